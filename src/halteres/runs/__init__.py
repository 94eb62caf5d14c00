"""Runs: the run directory and the supervisor that starts, watches and stops a run's processes."""
