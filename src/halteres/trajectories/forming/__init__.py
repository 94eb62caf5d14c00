"""What waits, and which of it makes a batch."""
