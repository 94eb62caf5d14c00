"""How an engine ended is learnt from its service, its parent: the supervisor is none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from halteres.engine.process import EngineChild
from halteres.errors import HalteresError
from halteres.runs.supervision.run_processes import engine_exit_code
from halteres.service.fleet_options import note_end

FILE = "engine_exit.json"


class Process:
    pid = 4242


def ended(tmp_path: Path, code: int | None) -> HalteresError:
    """What the engine's own side says of an end with this code."""
    log = tmp_path / "engine.log"
    log.write_text("an engine started\n")
    return EngineChild(cast(Any, Process()), log, log_begins=0).failure("died", code)


@pytest.mark.parametrize("code", [-9, 1, 0, None])
async def test_the_service_writes_the_exit_code(tmp_path: Path, code: int | None) -> None:
    note_end(tmp_path / FILE, ended(tmp_path, code))
    async with asyncio.timeout(5):
        assert await engine_exit_code(tmp_path, Process.pid) == code


async def test_an_end_is_waited_for_and_that_of_another_engine_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"pid": 4243, "code": -9}))
    asked = asyncio.create_task(engine_exit_code(tmp_path, Process.pid))
    await asyncio.sleep(0)
    assert not asked.done()
    note_end(tmp_path / FILE, ended(tmp_path, -6))
    async with asyncio.timeout(5):
        assert await asked == -6
