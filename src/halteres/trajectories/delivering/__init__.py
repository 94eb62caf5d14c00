"""Batches on their way to a trainer."""
