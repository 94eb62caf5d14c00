"""What an operator may choose about a training service.

Owns: the choices and their defaults.
Never: reads them from anywhere (`__main__` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from halteres.service.tenancy.limits import Allowances


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of one service."""

    own_key: str | None = field(default=None, repr=False)  # of its one user, beside those of its file
    require_keys: bool = False  # also where none was made; beyond the loopback always
    limits: Allowances = Allowances()  # noqa: RUF009 - frozen
    sample_logprobs: Literal["raw", "tempered"] = "raw"  # of sampled tokens: at temperature 1, or at the sampling one
    refuse_stable_reinforce: bool = False  # rather than compute it by a formula of ours
    replay_s: float = 1.0  # engine time after which a restore point is due; 0: after every request
    reward_models: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)  # name -> server: for best_of
    weights_bytes: int | None = None  # for adapters and snapshots in the engine; None: by what memory is free
    silent_s: float = 600.0  # without a word from its client: a session's adapters leave the engine
    keep_requests_s: float = 3600.0  # how long a settled request may be asked for again
    journal_bytes: int = 16 * 2**30  # a larger journal keeps settled requests for a minute
    keep_points_s: float = 24 * 3600.0  # how long the adapters of a finished or silent session can be brought back
    reap_s: float = 30.0  # between two looks at what has ended
    client_flags: Mapping[str, bool] = field(default_factory=dict[str, bool])  # other than `routes.connection` has them
