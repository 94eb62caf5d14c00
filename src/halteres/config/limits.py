"""Limits that hold on both sides of a wire.

Owns: figures that settings are checked against before a run, and requests within one.
Never: checks them.
"""

from __future__ import annotations

LARGEST_BATCH = 2**20
"""Sequences of one batch: the trajectory server chooses it in time and memory that grow with its size."""
