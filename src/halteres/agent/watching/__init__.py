"""Watching and stopping runs."""
