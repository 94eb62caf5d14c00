"""The store of one server: rows in SQLite, tokens in segment files."""
