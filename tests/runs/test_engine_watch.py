"""How an engine ended is learnt from its service's log: the supervisor is not its parent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from halteres.engine.child import EngineChild
from halteres.runs.supervision.engine_watch import told_end


class Process:
    pid = 4242


def words(tmp_path: Path, how: str, code: int, said: str = "") -> str:
    """The line of the service's log when its engine ended so; the words are the engine's own side's."""
    log = tmp_path / "engine.log"
    log.write_text(said)
    child = EngineChild(cast(Any, Process()), -1, log, log_begins=0)
    return f"2026-11-20 12:00:00,000 service ERROR __main__: {child.failure(how, code)}\n"


@pytest.mark.parametrize(
    ("how", "code"),
    [("died", -9), ("died", 1), ("died", 0), ("hung: it answered nothing for 60 s, and was killed", -9)],
)
async def test_the_services_words_tell_the_exit_code(tmp_path: Path, how: str, code: int) -> None:
    log = tmp_path / "service.log"
    log.write_text("something else\n" + words(tmp_path, how, code, "It was killed by SIGTERM.\n") + "more\n")
    async with asyncio.timeout(5):
        assert await told_end(log, Process.pid) == code


async def test_words_are_waited_for_and_those_of_another_engine_are_not_taken(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text(words(tmp_path, "died", -9).replace("4242", "4243"))
    asked = asyncio.create_task(told_end(log, Process.pid))
    await asyncio.sleep(0)
    assert not asked.done()
    with log.open("a") as stream:
        stream.write(words(tmp_path, "died", -6))
    async with asyncio.timeout(5):
        assert await asked == -6
    os.truncate(log, 0)
