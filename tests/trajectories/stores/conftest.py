"""Stores over one file, each closed by whoever opens the next, or by the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.trajectories.stores.sqlite import SqliteStore

OpenStore = Callable[..., SqliteStore]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "queue.sqlite"


@pytest.fixture
def open_store(file: Path) -> Iterator[OpenStore]:
    """Opens the file as the next server would, the one before having ended."""
    opened: list[SqliteStore] = []

    def open_next(**options: Any) -> SqliteStore:
        while opened:
            opened.pop().close()
        opened.append(SqliteStore(file, **options))
        return opened[-1]

    yield open_next
    while opened:
        opened.pop().close()


@pytest.fixture
def store(open_store: OpenStore) -> SqliteStore:
    return open_store()
