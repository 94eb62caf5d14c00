"""Engine after engine, as the service of a run starts them.

Owns: the order of their news: one has ended, another is there.
Never: starts or ends one (`engine_watch` says how each is known).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from halteres.runs.directory import RunDirectory
from halteres.runs.supervision.engine_watch import another, exit_code, gone
from halteres.runs.supervision.messages import EngineBack, EngineGone

TOLD_WITHIN_S = 2.0
"""How long the service may take to say how its engine ended."""


async def engines(run: RunDirectory, engine: Mapping[str, Any]) -> AsyncIterator[EngineGone | EngineBack]:
    """Every end of an engine, and the next one that its service starts; without end."""
    while True:
        await gone(engine)
        code = None
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_WITHIN_S):
                code = await exit_code(run.path / "service", engine["pid"])
        yield EngineGone(code)
        engine = await another(run.path / "service", engine["pid"])
        yield EngineBack(engine)
