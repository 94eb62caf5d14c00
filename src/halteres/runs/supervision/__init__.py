"""The supervisor of one run: its processes, its course, what it sees, how it ends."""
