"""Settings: validated once, at the edge."""
