"""The supervisor of one run: its processes, what follows from what happens, what it sees, how it
ends.
"""
