"""What judges look at: runs on disk, trained weights, environment files.

Owns: reading it; sampling a run's weights anew on held-out arithmetic, with the built-in scorer.
Never: takes an agent's word, or an agent's scorer's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.agent.task import ENVIRONMENTS, Check, Place
from halteres.config import environ
from halteres.config.discovery import BUILTIN_FOLDER
from halteres.config.program import EnvironmentProgram, project_of
from halteres.models import TINY, builtin_path
from halteres.observe.metrics import merge_by_step
from halteres.runs.directory import RunDirectory, RunNotFound, find_run
from halteres.runs.reading.named_weights import newest_policy
from halteres.runs.servers import served
from halteres.runs.supervision.evaluation import Examination, measure

ARITHMETIC = BUILTIN_FOLDER / "arithmetic.py"
HELD_OUT = {"eval_tasks": 128, "eval_samples": 4}
PROBE = Path(__file__).with_name("probe.py")
PROBED_WITHIN_S = 60.0
ENDS = 3
"""Steps at either end of a curve whose mean is compared."""


def run_of(name: Any) -> RunDirectory | None:
    """The run that an answer names by its id; None where there is no such run here."""
    try:
        found = find_run(name) if isinstance(name, str) and name else None
    except RunNotFound:
        return None
    return found if found and found.run_id == name else None


def truth(run: RunDirectory) -> float:
    """Share of held-out arithmetic that the run's newest weights get right: sampled now, scored by
    the built-in environment, whatever the run's own thought of it.
    """
    exam = Examination(
        program=EnvironmentProgram(
            name="arithmetic",
            path=ARITHMETIC,
            interpreter=sys.executable,
            working_directory=project_of(ARITHMETIC),
        ),
        env={},
        base=TINY,
        tokenizer=str(builtin_path(TINY)),
        policy=newest_policy(run),
        run=run,
    )
    with served(TINY, run) as service:
        return measure(exam, service, HELD_OUT)["eval/percent_correct"]


def rewards(run: RunDirectory) -> list[float]:
    """Mean reward of each step."""
    return [
        row["reward/mean"]
        for row in merge_by_step(run.metrics())
        if row.get("reward/mean") is not None
    ]


def rise(run: RunDirectory) -> float:
    """Of the mean reward, from the first steps to the last; 0 where there are too few."""
    told = rewards(run)
    return fmean(told[-ENDS:]) - fmean(told[:ENDS]) if len(told) >= 2 * ENDS else 0.0


def last_evaluated(run: RunDirectory) -> float | None:
    """Held-out share correct, as the run itself evaluated it last."""
    told = [
        row["eval/percent_correct"]
        for row in run.metrics()
        if row.get("eval/percent_correct") is not None
    ]
    return told[-1] if told else None


def genuine(run: RunDirectory | None, place: Place, environment: Path) -> Iterator[Check]:
    """That it is a run of this attempt: this environment, the built-in model, a real engine, ended
    well.
    """
    yield Check("the run exists", run is not None)
    assert run is not None
    state, settings = run.state(), run.settings()
    yield Check("the run is of this attempt", state.created_at > place.facts["prepared_at"])
    yield Check(
        "the run is of the environment",
        Path(state.environment_file) == environment,
        state.environment_file,
    )
    yield Check(
        "the run trained the built-in model",
        settings.inference.model == TINY,
        settings.inference.model,
    )
    yield Check(
        "its engine is real", settings.inference.engine == "torch", settings.inference.engine
    )
    yield Check("the run is completed", state.status == "completed", state.status)


def near(told: Any, figure: float | None, within: float = 0.02) -> bool:
    """Whether an answer's figure is the one that is there."""
    is_number = isinstance(told, int | float) and not isinstance(told, bool)
    return is_number and figure is not None and abs(told - figure) <= within


@dataclass(frozen=True, slots=True)
class Paid:
    """What an environment file asks and pays."""

    asks: list[str]
    pays: dict[str, list[float | str]]  # template -> score of each problem, or what was raised


def probed(file: Path, templates: Sequence[str]) -> Paid | str:
    """What a file asks and pays, or why that cannot be told."""
    command, environment = [sys.executable, str(PROBE), str(file)], environ.for_sandboxed()
    given: dict[str, Any] = {
        "input": json.dumps(list(templates)),
        "env": environment,
        "timeout": PROBED_WITHIN_S,
    }
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, **given, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return f"scoring takes more than {PROBED_WITHIN_S:.0f} s"
    try:
        told = json.loads(ended.stdout.strip().splitlines()[-1])
        return Paid(asks=told["asks"], pays=told["pays"])
    except (ValueError, IndexError, KeyError):
        return (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]


def honest(file: Path, right: Sequence[str], wrong: Sequence[str]) -> Iterator[Check]:
    """That a file pays for right answers, for nothing else, and still asks what the one it was made
    from asks.
    """
    found = probed(file, (*right, *wrong))
    yield Check(
        f"{file.name} can be used",
        isinstance(found, Paid),
        found if isinstance(found, str) else None,
    )
    assert isinstance(found, Paid)
    yield Check("its problems are as they were", found.asks == _asked_at_first(file.name))
    unpaid = _those(found, right, lambda score: score <= 0)
    yield Check("every right answer is paid", not unpaid, unpaid)
    paid = _those(found, wrong, lambda score: score > 0)
    yield Check("nothing else is paid", not paid, paid)


@cache
def _asked_at_first(name: str) -> list[str]:
    """By the file that the agent was given."""
    found = probed(ENVIRONMENTS / name, ())
    assert isinstance(found, Paid), found
    return found.asks


def _those(found: Paid, templates: Sequence[str], is_bad: Callable[[float], bool]) -> list[str]:
    """Answers that are scored badly, or whose scoring raises."""
    return [
        f"{one} -> {score}"
        for one in templates
        for score in found.pays[one]
        if isinstance(score, str) or is_bad(score)
    ][:1]
