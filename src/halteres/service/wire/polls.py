"""Bodies of those who wait for promises.

Owns: retrieve_future, retrieve_futures, cancel_future.
Never: waits.
Source: tinker SDK 0.38.0, types/future_retrieve_request.py and types/futures_retrieve_request.py.
"""

from __future__ import annotations

import msgspec

from halteres.service.wire.bodies import Counter


class Retrieve(msgspec.Struct, kw_only=True):
    """POST retrieve_future, and cancel_future."""

    request_id: str
    allow_metadata_only: bool = False


class Target(msgspec.Struct, kw_only=True):
    """Whose promises: those of one client of a sampling session."""

    sampling_session_id: str
    cloned_sampler_id: Counter = 0


class RetrieveMany(msgspec.Struct, kw_only=True):
    """POST retrieve_futures."""

    target: Target
    prev_cursor: Counter = 0
    timeout: float | None = None  # s; 0 answers at once, None holds the poll
