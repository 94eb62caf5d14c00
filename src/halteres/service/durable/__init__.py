"""What was accepted: the journal, the promises given for it, what becomes of both when a process dies."""
