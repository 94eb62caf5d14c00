"""Fixtures of the gateway's tests."""

from __future__ import annotations

import itertools

import pytest


@pytest.fixture(autouse=True)
def seeds_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service draws 1000, 2000, …: what an exact engine samples is the same every time, whether
    it has a special token in it or stops at once.
    """
    seeds = itertools.count(1000, 1000)
    monkeypatch.setattr("halteres.service.inference.answering.drawn_seed", lambda: next(seeds))
