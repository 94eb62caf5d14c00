"""Shared scene: the scripted engine over the built-in model's tokenizer, in process and behind a
link.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from halteres.engine.connection import LinkedEngine, connect, serve
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.models import TINY, builtin_path


@pytest.fixture(scope="session")
def model_folder() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


@pytest.fixture
def scripted(model_folder: Path) -> ScriptedEngine:
    return ScriptedEngine(model_folder, TINY)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """pytest's own directories can be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="ht-") as directory:
        yield Path(directory) / "s"


@pytest.fixture
async def linked(scripted: ScriptedEngine, socket_path: Path) -> AsyncIterator[LinkedEngine]:
    """`scripted` behind a link."""
    async with serve(scripted, socket_path):
        engine = await connect(socket_path)
        yield engine
        await engine.disconnect()
