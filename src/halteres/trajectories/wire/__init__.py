"""The wire: bodies, schemas, contents of posted groups."""
