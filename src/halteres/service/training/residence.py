"""Where a training run's adapter is, and from what it would come back.

Owns: the facts. Never: changes them by itself (`adapters` does).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from halteres.engine.protocol import Trains


@dataclass(slots=True, kw_only=True, eq=False)
class Residence:
    """Of one adapter."""

    home: Trains | None = None  # the engine that holds it
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of whoever uses it
    point: int | None = None  # number of the request after which the newest restore point was taken
    work_s: float = 0.0  # engine time since then: what bringing it back would take
    point_s: float = 0.0  # what the last restore point took
    gradient: bool = False  # one waits for its step, so that no restore point can be taken
    forgotten: bool = False  # it ended long ago: restore point and requests are gone
