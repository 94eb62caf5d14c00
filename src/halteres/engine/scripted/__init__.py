"""A deterministic engine without weights, for tests of ours and of whoever writes a client."""
