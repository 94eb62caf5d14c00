"""Who asks: keys, tenants, and what each may do and hold."""
