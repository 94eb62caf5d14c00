"""What is told about the state, changing nothing."""
