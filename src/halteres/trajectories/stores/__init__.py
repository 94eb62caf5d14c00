"""Durable memory, behind one protocol."""
