"""Real surroundings for the trainer's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .live_servers import LiveServers, Run, opened


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServers]:
    """A training service with the scripted engine, shared by the tests that need one."""
    with opened(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture
def make_run(world: LiveServers) -> Iterator[Callable[..., Run]]:
    """Makes runs; their processes end with the test."""
    runs: list[Run] = []

    def make(name: str, **settings: Any) -> Run:
        runs.append(world.run(name, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
