"""A run broke off; it must come to its end without losing what it had learnt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from benchmarks.agent import evidence
from benchmarks.agent.starting import begin, until_ended, until_step
from benchmarks.agent.task import Answer, Check, Place
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.state import RunState

NAME = "recover"
TEXT = """\
My training run broke off last night, long before its last step, and I do not know why. Please find out what happened,
and bring it to its end with the settings it had, without losing what it had learnt.

When you are done, end with one line of JSON: {"failed_run": "...", "what_ended": "...", "completed_run": "..."}
failed_run and completed_run are run ids, what_ended names the process that ended first."""
FILES: tuple[str, ...] = ()
ENVIRONMENT, VICTIM, AT_STEP = "arithmetic", "trainer", 7
EDITS = ("trainer.total_steps=20", "trainer.checkpoint_every=5", "trainer.eval_every=0")


def prepare(place: Place) -> dict[str, Any]:
    """A run whose trainer was killed between two checkpoints."""
    run = begin(ENVIRONMENT, *EDITS)
    state = until_step(run, AT_STEP)
    os.kill(state.processes[VICTIM]["pid"], signal.SIGKILL)
    state = until_ended(run)
    assert state.status == "failed", state.error
    checkpoint = run.newest_checkpoint()
    assert checkpoint is not None
    return {"run_id": run.run_id, "checkpoint_step": checkpoint["step"]}


def judge(place: Place, answer: Answer) -> Iterator[Check]:
    """The completed run descends from the failed one, from its newest checkpoint, with all its
    steps and settings.
    """
    facts = place.facts
    yield Check(
        "the failed run is the one",
        answer.get("failed_run") == facts["run_id"],
        answer.get("failed_run"),
    )
    what = answer.get("what_ended")
    yield Check("what ended is told", isinstance(what, str) and VICTIM in what.casefold(), what)
    run = evidence.run_of(answer.get("completed_run"))
    yield Check("the completed run exists", run is not None)
    assert run is not None
    state = run.state()
    yield Check("it is completed", state.status == "completed", state.status)
    first = find_run(facts["run_id"])
    step = _resumed_at(run, first)
    yield Check("it goes on from the last checkpoint", step == facts["checkpoint_step"], step)
    yield Check(
        "it has all the steps",
        _steps(run) == list(range(1, first.state().total_steps + 1)),
        _steps(run)[-1:],
    )
    yield Check("its settings are the same", _settings(run) == _settings(first))


def _resumed_at(run: RunDirectory, first: RunDirectory) -> int | None:
    """The step at which the line from the first run to this one left the first; None where it does
    not come from it.
    """
    state: RunState | None = run.state()
    while state and state.resumed_from and state.resumed_from != first.run_id:
        before = evidence.run_of(state.resumed_from)
        state = before.state() if before else None
    return (state.resume_point or {}).get("step") if state and state.resumed_from else None


def _steps(run: RunDirectory) -> list[int]:
    """Steps that were trained."""
    return sorted({row["step"] for row in run.metrics() if row.get("reward/mean") is not None})


def _settings(run: RunDirectory) -> dict[str, Any]:
    return run.settings().model_dump(mode="json", exclude={"run": {"name"}})
