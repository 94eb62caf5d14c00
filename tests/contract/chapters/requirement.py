"""One thing that the protocol demands of a server, or that we chose where it leaves the choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """An entry of the manifest.

    `source` is where it can be looked up: the file of an SDK, recorded traffic of one, public
    documentation, or "our choice" where the protocol is silent. `gap` is set only where it cannot
    be met, and says why.
    """

    id: str
    says: str
    source: str
    gap: str = ""
