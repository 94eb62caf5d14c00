"""Routes by subject: each takes a request apart, asks a room's part, and puts the answer together."""
