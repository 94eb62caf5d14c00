"""Training requests: what each asks of the engine, and how an adapter comes back that an engine lost.

Owns: restore points, replay, custom losses, exports.
Never: decides the order of requests (`service.models` does), answers a client.
"""
