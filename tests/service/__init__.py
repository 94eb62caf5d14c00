"""The training service, with the real SDK as its client."""
