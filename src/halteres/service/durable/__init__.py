"""What was accepted: the journal, the futures given for it, what becomes of both when a process
dies.

Owns: one SQLite file and the thread that touches it; ids, dedupe keys and outcomes of requests.
Never: executes a request, knows what one means.
"""
