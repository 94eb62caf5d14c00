"""The engine: what holds the weights. One process, no durable state."""
