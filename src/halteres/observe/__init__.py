"""What a run looks like: metrics and their plots, sinks that metrics are forwarded to."""
