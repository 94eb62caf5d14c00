"""Custom losses as data: which graphs are allowed, read without torch."""
