"""The training service: the Tinker API over an engine."""
