"""Starting training: intent, checks, estimates, base models."""
