"""Environments: tasks, prompts and rewards."""
