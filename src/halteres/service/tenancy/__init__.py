"""Who asks: keys, tenants, and what each may do and hold.

Owns: the file of keys, the figures of limits, the queue in which tenants take turns.
Never: knows a route; counts anything (`service.routes.middleware` and `service.service` do).
"""
