"""Custom losses as data, executed."""
