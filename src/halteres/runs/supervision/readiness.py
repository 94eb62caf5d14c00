"""When a role is ready: asked, never guessed by sleeping.

Owns: the probes, the back-off between questions, the deadline.
Never: notices that a process died; whoever waits races this against its exit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from halteres.clients import plain
from halteres.errors import NotReady

FIRST_S, GROWTH, LONGEST_S = 0.05, 1.4, 0.5
ANSWER_WITHIN_S = 2.0


class Probe(Protocol):
    """One question."""

    async def __call__(self) -> bool:
        """Whether the role is ready now."""
        ...


@dataclass(frozen=True, slots=True)
class Answers:
    """An HTTP server answers 200."""

    url: str
    key: str | None = field(default=None, repr=False)

    async def __call__(self) -> bool:
        """Ask once."""
        return await get_json(self.url, self.key) is not None


@dataclass(frozen=True, slots=True)
class Exists:
    """A file was touched."""

    file: Path

    async def __call__(self) -> bool:
        """Look once."""
        return self.file.exists()


@dataclass(frozen=True, slots=True)
class Registered:
    """The trajectory server knows an environment."""

    api_url: str
    key: str | None = field(default=None, repr=False)

    async def __call__(self) -> bool:
        """Ask once."""
        told = await get_json(f"{self.api_url}/v1/diagnostics", self.key)
        return bool(told and told.get("environments"))


async def until_ready(probe: Probe) -> None:
    """Return once the probe says yes. The caller sets the deadline."""
    pause = FIRST_S
    while not await probe():
        await asyncio.sleep(pause)
        pause = min(pause * GROWTH, LONGEST_S)


async def get_json(url: str, key: str | None = None) -> Mapping[str, Any] | None:
    """The JSON object behind a URL of ours; None where there is no good answer (yet). `key`: where one is asked for."""
    return await asyncio.to_thread(_get_json, url, key)


def _get_json(url: str, key: str | None) -> Mapping[str, Any] | None:
    try:
        return plain.get_json(url, ANSWER_WITHIN_S, key)
    except (plain.Refused, NotReady):
        return None
