"""Named weights on disk: where they lie, who owns them, how long they live."""
