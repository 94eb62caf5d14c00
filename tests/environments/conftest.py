from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from .fakes import Inference, inference_server


@pytest_asyncio.fixture
async def inference() -> AsyncIterator[Inference]:
    async with inference_server() as server:
        yield server
