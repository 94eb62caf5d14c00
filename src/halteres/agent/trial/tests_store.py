"""What earlier tests found out: for checks and estimates before a run is started.

Owns: the noun `TestOutcome`, finding the newest test of an environment with a model.
Never: starts a test; believes one that is older than the environment's file, or that says little of training: of
greedy, cut or few answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent.trial.folder import TestFolder, all_tests
from halteres.agent.trial.request import LOCAL, Request
from halteres.config.discovery import EnvironmentBroken, EnvironmentNotFound, find_environment


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
        file = find_environment(environment).file_path
    except (EnvironmentNotFound, EnvironmentBroken):
        return None
    best_first = sorted(_alike(file), key=lambda test: (test[0].draft == draft, _finished_at(test[1])), reverse=True)
    return next((told for _, folder in best_first for told in _outcomes(folder, model)), None)


def _alike(file: str) -> Iterator[tuple[Request, TestFolder]]:
    """Tests of this file that were like training."""
    for folder in all_tests():
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # just removed, or of another version
            request = folder.request()
            if request.environment_file == file and request.is_like_training:
                yield request, folder


def _outcomes(folder: TestFolder, model: str) -> Iterator[TestOutcome]:
    result = folder.result()
    if result is None or _is_outdated(folder, result):
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


def _is_outdated(folder: TestFolder, result: dict[str, Any]) -> bool:
    """Whether the environment's file has changed since, or is gone."""
    try:
        return Path(result["environment_file"]).stat().st_mtime > _finished_at(folder)
    except OSError:
        return True


def _finished_at(folder: TestFolder) -> float:
    try:
        return (folder.path / "result.json").stat().st_mtime
    except OSError:
        return 0.0
