"""What an operator may choose about the decisions of a trajectory server.

Owns: the rules' names, units and defaults.
Never: decides by them; knows how the server is reached (`options`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Composition = Literal["fifo", "weighted"]
Validation = Literal["quarantine", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one server. A trainer's own `max_staleness` goes before the server's."""

    validation: Validation = "quarantine"  # strict: 422 instead of setting a useless group aside, and more checks
    composition: Composition = "fifo"  # weighted: batches follow the environments' weights (fair queueing)
    max_staleness: int | None = None  # policy versions; None: unbounded
    require_version: bool = False  # untagged groups are set aside
    env_timeout_s: float = 60.0  # an environment silent for longer has no weight and no minimum share
    min_share_patience_s: float | None = None  # then a batch goes without a starved environment; None: never
    max_queue_batches: int | None = None  # of what waits; from there environments are told to pause
    max_queue_bytes: int = 32 * 1024**3  # of what waits; from there posts are held back, then refused with 503
    same_content_s: float = 0.0  # a body that an environment sends again within it counts once; 0: off
