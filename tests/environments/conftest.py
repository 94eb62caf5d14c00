from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from halteres.environments.cage import cage_missing

from .fakes import Inference, inference_server


@pytest_asyncio.fixture
async def inference() -> AsyncIterator[Inference]:
    async with inference_server() as server:
        yield server


@pytest.fixture
def cages() -> None:
    """Skips where this machine has no cages, and says what it lacks."""
    missing = cage_missing()
    if missing is not None:
        pytest.skip(missing)
