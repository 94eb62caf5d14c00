"""What a run directory says, read by any process: progress, rollouts, outcome, failures."""
