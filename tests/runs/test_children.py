"""One child process and its group."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from deadlines import until

from halteres.process import Child, Lifeline, start_time
from halteres.runs.supervision.run_processes import spawn

PARENT = """
import subprocess, sys
sink = None if sys.argv[1] == "clinging" else subprocess.DEVNULL
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=sink)
print(child.pid, flush=True)
"""


async def parent_of_one(
    tmp_path: Path, lifeline: Lifeline, kind: str = "loose"
) -> tuple[Child, int]:
    """A child that leaves one of its own behind when it ends, at once; the pid of that one."""
    command, told = (sys.executable, "-c", PARENT, kind), tmp_path / "told"
    with told.open("wb") as answer:
        child = spawn(
            command, log=tmp_path / "log", folder=tmp_path, lifeline=lifeline, answer=answer
        )
    return child, int(await until(told.read_text, what=lambda: "it tells the pid of its own"))


async def until_gone(pid: int) -> None:
    await until(lambda: start_time(pid) is None, what=lambda: f"process {pid} ends")


def test_what_a_child_leaves_is_killed_when_it_has_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        lifeline = Lifeline.open()
        async with asyncio.timeout(20):
            _, grandchild = await parent_of_one(tmp_path, lifeline)
            await until_gone(grandchild)
        lifeline.close()

    asyncio.run(scene())


def test_a_grandchild_that_holds_the_output_open_cannot_keep_a_child_from_ending(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        lifeline = Lifeline.open()
        async with asyncio.timeout(20):
            child, grandchild = await parent_of_one(tmp_path, lifeline, "clinging")
            await until_gone(child.pid)
            assert child.end(grace_s=0.2) == 0
            await until_gone(grandchild)
        lifeline.close()

    asyncio.run(scene())


def test_the_group_of_a_child_that_has_ended_is_never_signalled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours later the number may be another process's."""

    async def scene() -> None:
        lifeline = Lifeline.open()
        async with asyncio.timeout(20):
            child, _ = await parent_of_one(tmp_path, lifeline)
            await asyncio.wrap_future(child.exit)
            signalled: list[tuple[int, signal.Signals]] = []
            monkeypatch.setattr(os, "killpg", lambda *given: signalled.append(given))
            assert child.end() == 0
            assert not signalled
        lifeline.close()

    asyncio.run(scene())
