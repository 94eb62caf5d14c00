"""Halteres: reinforcement-learning post-training of language models, self-hosted."""

__version__ = "0.1.0"
