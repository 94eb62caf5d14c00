"""The manifest's entries, one module per chapter of the protocol."""
