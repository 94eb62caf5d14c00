"""Batch forming."""
