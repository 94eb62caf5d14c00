"""What is built from the repository can be installed and used without it."""
