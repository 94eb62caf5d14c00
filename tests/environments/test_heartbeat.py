"""The heartbeat of an environment's event loop: it beats, and it names the item at work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from halteres.config.environ import HEARTBEAT, AskedHeartbeat
from halteres.environments import heartbeat
from halteres.rollouts.rng import Draw, rolling_out


@asynccontextmanager
async def asked(monkeypatch: pytest.MonkeyPatch, file: Path) -> AsyncIterator[None]:
    """A process that is asked for a heartbeat, and gives it."""
    monkeypatch.setenv(HEARTBEAT, AskedHeartbeat(file, 60.0).variable[HEARTBEAT])
    async with asyncio.timeout(10), heartbeat.beating():
        yield


def at_work(file: Path) -> Any:
    """What the file says now."""
    text = file.read_text().strip("\x00 \n")
    if text:
        return json.loads(text)
    return None


async def test_the_loop_beats_until_the_end_and_not_where_nobody_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "beats"
    monkeypatch.setattr(heartbeat, "SLOWEST_BEAT_S", 0.0)
    async with asked(monkeypatch, file):
        first = file.stat().st_mtime_ns
        while file.stat().st_mtime_ns == first:  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0)
    assert not file.exists()
    monkeypatch.delenv(HEARTBEAT)
    async with heartbeat.beating():
        await asyncio.sleep(0)
    assert not file.exists()


async def test_the_file_names_the_item_that_the_loop_is_at_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in tasks that its work starts, and after each wait of them."""
    file = tmp_path / "beats"
    seen: list[tuple[int, Any]] = []

    async def score(ordinal: int) -> None:
        for _ in range(3):
            seen.append((ordinal, at_work(file)))
            await asyncio.sleep(0)

    async def item(ordinal: int) -> None:
        with rolling_out(Draw(seed=0, step=7, ordinal=ordinal)):

            async def work() -> None:
                await score(ordinal)
                await asyncio.gather(score(ordinal), score(ordinal))

            await heartbeat.noted(work())

    async with asked(monkeypatch, file):
        await asyncio.gather(*(item(ordinal) for ordinal in range(3)))
        assert at_work(file) is None
        with heartbeat.drawing(Draw(seed=0, step=8, ordinal=4)):
            assert at_work(file) == {"draw_step": 8, "ordinal": 4, "drawing": True}
        assert at_work(file) is None
    assert len(seen) == 27
    for ordinal, said in seen:
        assert said == {"draw_step": 7, "ordinal": ordinal, "drawing": False}


async def test_work_that_is_noted_returns_raises_and_is_cancelled_as_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def patient() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "never"

    async def raising() -> None:
        await asyncio.sleep(0)
        raise LookupError("gone")

    async def catching() -> str:
        try:
            await raising()
        except LookupError:
            return "caught"
        return "never"

    async with asked(monkeypatch, tmp_path / "beats"):
        assert await heartbeat.noted(catching()) == "caught"
        with pytest.raises(LookupError, match="gone"):
            await heartbeat.noted(raising())
        with rolling_out(Draw(seed=0, step=0, ordinal=0)):
            task = asyncio.create_task(patient(), name="p")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and task.get_name() == "p"
    assert ended == ["cancelled"]
