"""Judging runs: results, rollouts, comparison."""
