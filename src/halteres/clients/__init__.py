"""Small HTTP clients, for whoever needs one."""
