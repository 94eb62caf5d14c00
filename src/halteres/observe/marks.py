"""Margins of evaluations."""

from halteres.observe.plots import margins_of

__all__ = ["margins_of"]
