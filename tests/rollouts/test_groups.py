"""A group whose rollouts fail: what becomes data, and what the log has of it."""

from __future__ import annotations

import logging

import pytest

from halteres.errors import EnvironmentFailed, HalteresError, boundary
from halteres.rollouts.groups import as_data


def broken_scorer(line: int) -> float:
    if line == 1:
        raise KeyError("answer")
    raise KeyError("question")


def failure(line: int) -> HalteresError:
    try:
        with boundary(EnvironmentFailed, "Sums.score"):
            broken_scorer(line)
    except HalteresError as error:
        return error
    raise AssertionError


def test_the_first_failure_at_a_place_goes_to_the_log_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = [as_data(failure(line)) for line in (1, 1, 2, 1)]
    assert len(caplog.records) == 2
    tracebacks = [record.exc_text or "" for record in caplog.records]
    assert all("in broken_scorer" in text for text in tracebacks)
    assert found[0].why.endswith("(at test_groups.py:15)"), found[0].why
