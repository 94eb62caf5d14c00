"""A home for runs, and browsers that were let in, and that were not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from agent import control

from halteres.agent.transports.access import page_key

HOST = "127.0.0.1:8080"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HALTERES_HOME."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


Client = Callable[..., httpx.AsyncClient]


@pytest.fixture
def stranger(home: Path) -> Client:
    """A client that carries nothing."""

    def client(**headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=control.wireless(), base_url=f"http://{HOST}", headers=headers
        )

    return client


@pytest.fixture
def page(stranger: Client) -> Client:
    """The page in a browser that was let in."""

    def client(**headers: str) -> httpx.AsyncClient:
        kept = {"cookie": f"halteres-8080={page_key()}", "sec-fetch-site": "same-origin"}
        return stranger(**{**kept, **headers})

    return client
