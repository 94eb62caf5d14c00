"""Groups without a key, known again by their content: for clients that retry and know no keys.

Owns: the key made of a body, its environment and the time.
Never: is asked unless the operator wants it: two rollouts may truly be equal.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Self

from halteres.trajectories.posted_group import Scored
from halteres.trajectories.state import State


@dataclass(frozen=True, slots=True)
class Content:
    """A posted group and what it is known by, for at least `window_s` and less than twice that."""

    group: Scored
    name: str
    window_s: float

    @classmethod
    def of(cls, group: Scored, window_s: float) -> Self:
        """What a group is known by."""
        digest = hashlib.blake2b(group.element, digest_size=16)
        name = f"content-{group.env_id}-{digest.hexdigest()}"
        if group.key is None:  # the same content, however it was written down
            group = replace(group, fingerprint=int.from_bytes(digest.digest()[:7]))
        return cls(group, name, window_s)

    def keys(self, now: float) -> tuple[str, str]:
        """The key it would get at this time, and the one it may have got before."""
        window = int(now // self.window_s)
        return f"{self.name}-{window}", f"{self.name}-{window - 1}"

    def keyed(self, state: State) -> Scored:
        """The group with a key: its own, that of its earlier arrival, or a new one."""
        if self.group.key is not None:
            return self.group
        new, earlier = self.keys(state.clock())
        return replace(self.group, key=earlier if state.known(earlier) else new)
