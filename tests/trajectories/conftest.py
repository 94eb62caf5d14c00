"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .server_fixtures import ServerFixture, ServerProcess, opened


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServerFixture]:
    """A server in process, before anybody has registered."""
    async with opened(tmp_path / "queue.sqlite") as scene:
        yield scene


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server process."""
    process = ServerProcess(tmp_path / "queue.sqlite")
    yield process
    process.close()
