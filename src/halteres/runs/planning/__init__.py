"""From settings to a run directory with a supervisor: what must be true before, what is carried
over.
"""
