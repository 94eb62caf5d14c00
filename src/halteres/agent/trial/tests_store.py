"""What earlier tests found out: for checks and estimates before a run is started, and for whoever asks again.

Owns: the noun `TestOutcome`, finding the newest test of an environment with a model, and the open one of a request.
Never: starts a test; believes one that is older than the environment's file, or that says little of training: of
greedy, cut or few answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from halteres.agent.trial.folder import TestFolder, all_tests
from halteres.agent.trial.request import LOCAL, Request
from halteres.config.discovery import (
    EnvironmentBroken,
    EnvironmentFile,
    EnvironmentNotFound,
    find_environment,
    split_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """What one test found with one model. A figure of None was not measured."""

    __test__ = False  # for pytest: this is no class of tests

    test_id: str
    groups_with_variance: float | None  # share of groups
    mean_score: float | None
    tokens_per_s: float | None
    seconds: float  # of the environment's process
    rollouts: int  # completions that were scored
    trainable: bool | None
    finished_at: float  # unix seconds
    output_file: Path  # its groups, a line each


def latest_test(environment: str, model: str, draft: str = "") -> TestOutcome | None:
    """The newest finished test of this environment with this model that scored anything as training would.

    Args:
        environment: its name, or its file: as a run's settings have it.
        model: as a draft names it, or an endpoint's id.
        draft: handle; a test of this draft comes before those of others, which may have other settings.
    """
    try:
        found = find_environment(environment)
    except (EnvironmentNotFound, EnvironmentBroken):
        return None
    best_first = sorted(_alike(found), key=lambda test: (test[0].draft == draft, _finished_at(test[1])), reverse=True)
    return next((told for _, folder in best_first for told in _outcomes(folder, model)), None)


OPEN_S = 600.0
"""So long after its end a test whose answer nobody was given waits for the same call."""


def open_test(request: Request) -> TestFolder | None:
    """The newest test of the same arguments that goes on, or has ended and nobody was given its answer.

    Clients that cannot pass a test_id ask again with the same arguments until the test has ended (seed 001).
    """
    found = [
        (other.created_at, folder)
        for folder, other in _requests()
        if other.asks_the_same(request) and _is_open(folder, other)
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _is_open(folder: TestFolder, request: Request) -> bool:
    phase = folder.phase()
    if phase == "lost" or folder.collected.exists() or _changed_since(request.environment_file, request.created_at):
        return False
    return phase == "running" or time.time() - _finished_at(folder) <= OPEN_S


def _requests() -> Iterator[tuple[TestFolder, Request]]:
    for folder in all_tests():
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # just removed, or of another version
            yield folder, folder.request()


def _alike(found: EnvironmentFile) -> Iterator[tuple[Request, TestFolder]]:
    """Tests of this environment that were like training; of a family's file, those of the same variant."""
    environment = found.file_path, split_name(found.name)[1]
    for folder, request in _requests():
        same = (request.environment_file, split_name(request.environment)[1]) == environment
        if same and request.is_like_training:
            yield request, folder


def _outcomes(folder: TestFolder, model: str) -> Iterator[TestOutcome]:
    result = folder.result()
    if result is None or _changed_since(result["environment_file"], _finished_at(folder)):
        return
    for one in result["models_tested"]:
        if one["model"] in (model, LOCAL + model) and one["steps_tested"]:
            yield TestOutcome(
                test_id=result["test_id"],
                groups_with_variance=one["groups_with_variance"],
                mean_score=one["mean_score"],
                tokens_per_s=one.get("tokens_per_s"),
                seconds=one.get("seconds", 0.0),
                rollouts=one["total_completions"],
                trainable=one["trainable"],
                finished_at=_finished_at(folder),
                output_file=Path(one["output_file"]),
            )


def _changed_since(file: str, at: float) -> bool:
    """Whether an environment's file has changed since (unix s), or is gone."""
    try:
        return Path(file).stat().st_mtime > at
    except OSError:
        return True


def _finished_at(folder: TestFolder) -> float:
    try:
        return (folder.path / "result.json").stat().st_mtime
    except OSError:
        return 0.0
