"""The transports: each puts the one table of tools on a wire, and adds no logic."""
