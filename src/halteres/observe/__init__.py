"""What a run looks like: metrics, plots."""
