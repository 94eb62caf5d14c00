"""Choosing an environment and its settings: drafts and the tools that edit them."""
