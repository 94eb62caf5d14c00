"""Waiting for something to happen to a run.

The event loop never waits, and the end of a run is never missed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halteres.errors import UserError
from halteres.observe.metrics import Tail
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.progress import conditions
from halteres.runs.state import RunState

POLL_S = 0.1

_WORDS = ("terminal", "running", "eval", "alert", "change")


@dataclass(frozen=True, slots=True)
class Until:
    """What to wake at."""

    kind: Literal["terminal", "running", "eval", "alert", "change", "step"]
    step: int = 0

    def __str__(self) -> str:
        if self.kind == "step":
            return f"step>={self.step}"
        return self.kind

    @classmethod
    def parse(cls, text: str) -> Until:
        """As a call writes it. UserError names what there is."""
        for word in _WORDS:
            if text == word:
                return cls(word)
        if reached := re.fullmatch(r"step>=(\d{1,9})", text):
            return cls("step", int(reached[1]))
        raise UserError(
            f"until cannot be '{text[:40]}'.",
            f"It is one of {', '.join(_WORDS)}, or step>=N.",
            field="until",
            allowed=[*_WORDS, "step>=N"],
        )


async def wait_for(run: RunDirectory, until: Until, wait_s: float) -> str:
    """Wait until it happens, the run has ended, or `wait_s` is over. Returns which: `until`,
    "terminal" or "wait_s".
    """
    loop = asyncio.get_running_loop()
    ends = loop.time() + wait_s
    watch = await asyncio.to_thread(Watch, run)
    while True:
        if watch.saw(until):
            return str(until)
        if watch.state.terminal:
            return "terminal"
        left = ends - loop.time()
        if left <= 0:
            return "wait_s"
        await asyncio.sleep(min(POLL_S, left))
        await asyncio.to_thread(watch.look)


async def wait_for_all(runs: Sequence[RunDirectory], until: Until, wait_s: float) -> str:
    """The same for several runs: until it holds of each of them that has not ended; until the first
    alert or change of one that has not.
    """
    if until.kind in ("alert", "change"):
        wakes = asyncio.FIRST_COMPLETED
    else:
        wakes = asyncio.ALL_COMPLETED
    if wakes is asyncio.FIRST_COMPLETED:
        alive = await asyncio.to_thread(lambda: [run for run in runs if not run.state().terminal])
        runs = alive or runs
    waits = [
        asyncio.create_task(wait_for(run, until, wait_s), name=f"wait for {run.run_id}")
        for run in runs
    ]
    try:
        done, _ = await asyncio.wait(waits, return_when=wakes)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    reasons = {task.result() for task in done}
    return next((reason for reason in ("wait_s", str(until)) if reason in reasons), "terminal")


class Watch:
    """What has happened to a run since the watch began."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        files = (run.path / name for name in ("metrics.jsonl", "events.jsonl"))
        self._metrics, self._events = (
            Tail(file, file.stat().st_size if file.exists() else 0) for file in files
        )
        self.state: RunState = run.state()
        self._first = _situation(self.state)
        self._step = self._first_step = self.state.step
        self._evaluated = self._alerted = False

    def saw(self, until: Until) -> bool:
        """Whether it has happened; a state or a step that was reached before counts too."""
        match until.kind:
            case "terminal":
                return self.state.terminal
            case "running":
                return self.state.status not in ("pending", "starting")
            case "step":
                return self._step >= until.step
            case "eval":
                return self._evaluated
            case "alert":
                return self._alerted
            case "change":
                moved = _situation(self.state) != self._first or self._step > self._first_step
                return self._evaluated or self._alerted or moved

    def look(self) -> None:
        """Read what is new."""
        for row in self._metrics.fresh():
            self._evaluated |= "eval/percent_correct" in row or row.get("src") == "eval"
            if row.get("src") == "trainer" and isinstance(step := row.get("step"), int):
                self._step = max(self._step, step)
        self._alerted |= any(event.get("type") == "alert" for event in self._events.fresh())
        self.state = self._run.state()
        self._step = max(self._step, self.state.step)


def _situation(state: RunState) -> tuple[object, ...]:
    return state.status, state.phase, tuple(conditions(state).items())
