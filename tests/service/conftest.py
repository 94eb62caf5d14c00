"""Fixtures of the training service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tinker

from .live_service import LiveService, closing, serving


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No telemetry, no hub."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with serving(tmp_path) as scene:
        yield scene


@pytest.fixture
async def client(scene: LiveService) -> AsyncIterator[tinker.ServiceClient]:
    async with closing(await scene.client()) as client:
        yield client
