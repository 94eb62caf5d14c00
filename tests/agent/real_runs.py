"""Real runs, started and watched by the tools; the engine has no weights and the environment takes
its time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deadlines
from runs.run_fixtures import survivors

from halteres.agent.call import call
from halteres.agent.tool import Caller
from halteres.process import alive
from halteres.runs.state import RunState

ENVIRONMENT = str(Path(__file__).with_name("paced_env.py"))
CHANGES = {
    "inference.engine": "scripted",
    "trainer.total_steps": 1000,
    "trainer.checkpoint_every": 2,
    "trainer.eval_every": 0,
}

HOST = """
import asyncio, json, signal, sys
from halteres.agent.call import call
from halteres.agent.tool import (Caller)

given = json.loads(sys.argv[1])
for _ in range(int(sys.argv[2])):
    answer = asyncio.run(call("rl_start_training", given, Caller(draft="host"))).body
    print(json.dumps(answer), flush=True)
signal.pause()
"""


def host_of(count: int) -> subprocess.Popen[str]:
    """A host of the tools, in a process group of its own, that starts so many runs and stays."""
    given = json.dumps({"environment": ENVIRONMENT, "changes": CHANGES})
    return subprocess.Popen(
        [sys.executable, "-c", HOST, given, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


async def told(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A tool's answer."""
    return (await call(name, arguments, Caller(draft="tests"))).body


async def until(
    run_id: str, holds: Callable[[dict[str, Any]], object], within_s: float
) -> dict[str, Any]:
    """What rl_check_status tells once this holds of it."""
    answer: dict[str, Any] = {}

    async def reached() -> object:
        answer.clear()
        answer.update(await told("rl_check_status", run_id=run_id))
        return holds(answer)

    await deadlines.until(reached, within_s, lambda: answer)
    return answer


async def until_gone(state: RunState, within_s: float = 15) -> None:
    """Until no process of a run is left, its supervisor included."""
    await deadlines.until(
        lambda: not _left(state), within_s, lambda: f"still there: {_left(state)}"
    )


def _left(state: RunState) -> list[str]:
    return [*survivors(state), *(["supervisor"] if alive(state.supervisor) else [])]


async def make_the_call(text: str) -> dict[str, Any]:
    """Make the call that an answer names, as an agent reads it."""
    found = re.fullmatch(r"(rl_\w+)\((.*)\)", text)
    assert found, text
    arguments = {
        name: json.loads(value)
        for name, value in re.findall(r"(\w+)=(\{[^}]*\}|\"[^\"]*\"|[\w.]+)", found[2])
    }
    return await told(found[1], **arguments)
