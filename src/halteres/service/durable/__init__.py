"""What was accepted: the journal, the futures given for it, what becomes of both when a process dies."""
