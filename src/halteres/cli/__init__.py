"""The command line: a module per subject."""
