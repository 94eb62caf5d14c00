"""Every step, in the order in which the program takes them."""

from __future__ import annotations

from . import connecting, optimising, passes, records, sampling, saving

STEPS = (
    *connecting.STEPS,
    *passes.STEPS,
    *optimising.STEPS,
    *saving.STEPS,
    *sampling.STEPS,
    *records.STEPS,
)
