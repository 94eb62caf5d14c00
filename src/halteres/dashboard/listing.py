"""The list of runs as the page shows it.

Owns: what is told of each run, and its curve at a glance.
Never: judges a run (`runs.directory`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from halteres.errors import NotFound, boundary
from halteres.files import open_regular
from halteres.observe.metrics import decoded
from halteres.runs.directory import UNREADABLE, Entry, known_runs
from halteres.runs.reading.progress import read_alerts
from halteres.runs.state import Kind, RunState, RunUnreadable, read_state

ERROR_LENGTH = 200
"""Characters; the run's own page has the whole sentence."""


def listed(only: Collection[str] | None = None) -> dict[str, Any]:
    """Every run, newest first, or those among these ids that there are; `now` is the clock that their times are of."""
    return {
        "runs": [row for run in known_runs() if only is None or run.run_id in only if (row := _row(run)) is not None],
        "now": time.time(),
    }


def _row(run: Entry) -> dict[str, Any] | None:
    """One row, also of a run that cannot be read; None of one that was removed while we looked."""
    if run.unreadable:
        return _damaged(run, run.error)
    try:
        with boundary(RunUnreadable, f"Reading run {run.run_id}"):  # whatever is wrong with one run, the others stay
            return _read(run)
    except RunUnreadable as error:
        return _damaged(run, error.what)
    except NotFound:
        return None


def _read(run: Entry) -> dict[str, Any]:
    state = read_state(run.path / "run.json")
    spark = spark_of(run.path / "metrics.jsonl", state.kind)
    return {
        "run_id": run.run_id,
        "name": state.name,
        "environment": state.environment,
        "kind": state.kind,
        "model": state.base_model,
        "status": run.facts.status,
        "phase": state.phase,
        "step": state.step,
        "total_steps": state.total_steps,
        "created_at": state.created_at,
        "ended_at": run.facts.ended_at,
        "reward": spark.reward,
        "evaluation": spark.evaluation,
        "curve": [float(f"{value:.4g}") for value in spark.rewards],
        "alerts": [alert.rule for alert in read_alerts(run.path / "events.jsonl")],
        "error": _error(state),
    }


def _damaged(run: Entry, error: str) -> dict[str, Any]:
    """The row of a run that cannot be read."""
    return {
        "run_id": run.run_id,
        "name": run.facts.name,
        "environment": run.facts.environment,
        "kind": "rl",
        "model": "",
        "status": UNREADABLE,
        "phase": None,
        "step": 0,
        "total_steps": 0,
        "created_at": run.facts.created_at,
        "ended_at": run.facts.created_at,
        "reward": None,
        "evaluation": None,
        "curve": [],
        "alerts": [],
        "error": error,
    }


def _error(state: RunState) -> str | None:
    error = state.error
    return error if error is None or len(error) <= ERROR_LENGTH else f"{error[: ERROR_LENGTH - 3]}..."


POINTS = 40
"""Points of a curve that is a hundred pixels wide."""

WHOLE_BYTES, WINDOW_BYTES, SEARCHED_BYTES = 192 * 1024, 8 * 1024, 4 * 1024 * 1024
"""A file that is read whole; how much is read in each place of a longer one (two steps' rows or more); how much of its
end is searched for the last evaluation."""


@dataclass(frozen=True, slots=True)
class Spark:
    """What a list shows of a run's figures."""

    rewards: tuple[float, ...] = ()  # mean of the batch, reward units, evenly spread over the run; of a reward training
    # the share of its pairs in the right order
    reward: float | None = None  # the newest
    evaluation: float | None = None  # the newest held-out share correct


class _Row(msgspec.Struct, kw_only=True, gc=False):
    reward: float | None = msgspec.field(name="reward/mean", default=None)
    evaluation: float | None = msgspec.field(name="eval/percent_correct", default=None)


class _RewardTrainingRow(_Row, kw_only=True, gc=False):
    reward: float | None = msgspec.field(name="accuracy", default=None)
    evaluation: float | None = msgspec.field(name="eval_accuracy", default=None)


@dataclass(frozen=True, slots=True)
class _Names:
    """Under which names a kind of run tells its figures."""

    decoder: msgspec.json.Decoder[_Row]
    evaluation: bytes


_NAMES: dict[Kind, _Names] = {
    "rl": _Names(msgspec.json.Decoder(_Row), b'"eval/percent_correct"'),
    "reward": _Names(msgspec.json.Decoder(_RewardTrainingRow), b'"eval_accuracy"'),
}


def spark_of(metrics: Path, kind: Kind = "rl") -> Spark:
    """The curve as it is now; an empty one where there is no file. It is read again only once the file has grown."""
    try:
        looked = metrics.stat()
        return _read_spark(metrics, kind, looked.st_size, looked.st_mtime_ns)
    except OSError:
        return Spark()


@lru_cache(maxsize=2048)
def _read_spark(metrics: Path, kind: Kind, size: int, mtime_ns: int) -> Spark:
    names = _NAMES[kind]
    with open_regular(metrics) as stream:
        if size <= WHOLE_BYTES:
            rows = list(_rows(stream.read(), names))
            rewards = _spread([row.reward for row in rows if row.reward is not None])
            return Spark(rewards, rewards[-1] if rewards else None, _last_evaluation(rows))
        rewards = tuple(reward for place in _places(size) if (reward := _reward_at(stream, place, names)) is not None)
        return Spark(rewards, rewards[-1] if rewards else None, _last_evaluation(_evaluations(stream, size, names)))


def _rows(text: bytes, names: _Names) -> Iterator[_Row]:
    for line in text.split(b"\n"):
        if line and (row := decoded(names.decoder, line)) is not None:
            yield row


def _spread(values: list[float]) -> tuple[float, ...]:
    """At most POINTS of them, the first and the last among them."""
    if len(values) <= POINTS:
        return tuple(values)
    return tuple(values[round(at * (len(values) - 1) / (POINTS - 1))] for at in range(POINTS))


def _places(size: int) -> list[int]:
    return [round(at * (size - WINDOW_BYTES) / (POINTS - 1)) for at in range(POINTS)]


def _reward_at(stream: BinaryIO, place: int, names: _Names) -> float | None:
    """The newest reward in the window that begins there."""
    stream.seek(place)
    found = None
    for row in _rows(stream.read(WINDOW_BYTES), names):
        found = found if row.reward is None else row.reward
    return found


def _evaluations(stream: BinaryIO, size: int, names: _Names) -> Iterator[_Row]:
    """The newest row that has one."""
    stream.seek(max(0, size - SEARCHED_BYTES))
    text = stream.read()
    at = text.rfind(names.evaluation)
    if at >= 0:
        end = text.find(b"\n", at)
        yield from _rows(text[text.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(text)], names)


def _last_evaluation(rows: Iterable[_Row]) -> float | None:
    return next((row.evaluation for row in reversed(list(rows)) if row.evaluation is not None), None)
