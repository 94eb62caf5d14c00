"""Named weights on disk: where they lie, who owns them, how long they live.

Owns: tinker:// paths, folders and their rows; that a checkpoint is there whole or not at all.
Never: writes or reads tensors (an engine does).
"""
