"""Posted groups and the environments that send them."""
