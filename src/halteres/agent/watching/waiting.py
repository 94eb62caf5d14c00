"""Waiting for something to happen to a run.

Owns: what can be waited for (`Until`), noticing it in the run's files, the deadline.
Never: reads what it has read before, keeps the event loop waiting, or misses that the run has ended.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from halteres.errors import UserError
from halteres.observe.metrics import Tail
from halteres.runs import lock
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.processes import conditions
from halteres.runs.state import RunState

LOOK_EVERY_S = 0.1

NOTHING: Final = "wait_s"
"""What is told where nothing woke the call: the time that was given was over."""

_WORDS = ("terminal", "running", "eval", "alert", "change")
_STEP = re.compile(r"step>=(\d{1,9})")
_NOT_YET_RUNNING = ("pending", "starting")


@dataclass(frozen=True, slots=True)
class Until:
    """What to wake at."""

    kind: Literal["terminal", "running", "eval", "alert", "change", "step"]
    step: int = 0

    def __str__(self) -> str:
        return f"step>={self.step}" if self.kind == "step" else self.kind

    @classmethod
    def parse(cls, text: str) -> Until:
        """As a call writes it. UserError names what there is."""
        for word in _WORDS:
            if text == word:
                return cls(word)
        if reached := _STEP.fullmatch(text):
            return cls("step", int(reached[1]))
        raise UserError(
            f"until cannot be '{text[:40]}'.",
            f"It is one of {', '.join(_WORDS)}, or step>=N.",
            field="until",
            allowed=[*_WORDS, "step>=N"],
        )


async def wait_for(run: RunDirectory, until: Until, wait_s: float) -> str:
    """Wait until it happens, the run has ended, or `wait_s` is over. Returns which: `until`, "terminal" or "wait_s"."""
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
            return NOTHING
        await asyncio.sleep(min(LOOK_EVERY_S, left))
        await asyncio.to_thread(watch.look)


async def wait_for_all(runs: Sequence[RunDirectory], until: Until, wait_s: float) -> str:
    """The same of several runs: until it holds of each of them that has not ended; until the first alert or change of
    one that has not."""
    wakes = asyncio.FIRST_COMPLETED if until.kind in ("alert", "change") else asyncio.ALL_COMPLETED
    if wakes is asyncio.FIRST_COMPLETED:
        alive = await asyncio.to_thread(lambda: [run for run in runs if not run.state().terminal])
        runs = alive or runs
    waits = [asyncio.create_task(wait_for(run, until, wait_s), name=f"wait for {run.run_id}") for run in runs]
    try:
        done, _ = await asyncio.wait(waits, return_when=wakes)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    reasons = {task.result() for task in done}
    return next((reason for reason in (NOTHING, str(until)) if reason in reasons), "terminal")


class Watch:
    """What has happened to a run since the watch began."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._metrics, self._events = _from_now(run, "metrics.jsonl"), _from_now(run, "events.jsonl")
        self._stamp = self._run_json()
        self.state: RunState = run.state()
        self._first = _mark(self.state)
        self._step = self._first_step = self.state.step
        self._evaluated = self._alerted = False

    def saw(self, until: Until) -> bool:
        """Whether it has happened; a state or a step that was reached before counts too."""
        match until.kind:
            case "terminal":
                return self.state.terminal
            case "running":
                return self.state.status not in _NOT_YET_RUNNING
            case "step":
                return self._step >= until.step
            case "eval":
                return self._evaluated
            case "alert":
                return self._alerted
            case "change":
                return self._evaluated or self._alerted or self._moved

    @property
    def _moved(self) -> bool:
        return _mark(self.state) != self._first or self._step > self._first_step

    def look(self) -> None:
        """Look at what has changed: four sizes and a lock, where nothing has."""
        for row in _fresh(self._metrics):
            self._evaluated |= "eval/percent_correct" in row or row.get("src") == "eval"
            if row.get("src") == "trainer" and isinstance(step := row.get("step"), int):
                self._step = max(self._step, step)
        for event in _fresh(self._events):
            self._alerted |= event.get("type") == "alert"
        stamp = self._run_json()
        if stamp != self._stamp or not lock.held(self._run.path / "lock"):
            self._stamp, self.state = stamp, self._run.state()
            self._step = max(self._step, self.state.step)

    def _run_json(self) -> tuple[int, int, int]:
        """Tells one run.json from the next: it is replaced whole."""
        try:
            told = os.stat(self._run.path / "run.json")
        except OSError:
            return 0, 0, 0  # gone: reading the state will say so
        return told.st_ino, told.st_mtime_ns, told.st_size


def _mark(state: RunState) -> tuple[object, ...]:
    return state.status, state.phase, tuple(conditions(state).items())


def _from_now(run: RunDirectory, name: str) -> Tail:
    file = run.path / name
    return Tail(file, file.stat().st_size if file.exists() else 0)


def _fresh(tail: Tail) -> list[dict[str, object]]:
    try:
        grown = tail.file.stat().st_size > tail.offset
    except FileNotFoundError:
        return []
    return tail.fresh() if grown else []
