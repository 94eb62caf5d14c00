"""What a run directory tells, read by any process: progress, rollouts, outcome, failures."""
