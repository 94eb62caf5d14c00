"""A home for runs; clients that were let in, and that were not; a real browser at the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from agent import control, run_fixtures

from halteres.agent.transports.access import page_key

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from .browser import Visit

HOST = "127.0.0.1:8080"
HOSTILE = "<script>window.owned=1</script><img src=x onerror='window.owned=2'>"


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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    from .browser import browser

    with browser() as running:
        yield running


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    from .browser import serving

    with serving() as address:
        yield address


Visiting = Callable[..., AbstractContextManager["Visit"]]


@pytest.fixture
def visiting(chromium: Browser, url: str) -> Visiting:
    from .browser import visiting

    return lambda **options: visiting(chromium, url, **options)


@pytest.fixture
def visit(visiting: Visiting) -> Iterator[Visit]:
    with visiting() as one:
        yield one


@pytest.fixture
def alive() -> Iterator[Callable[..., Any]]:
    """Runs that go on, under this process, for the length of a test."""
    with ExitStack() as stack:
        yield lambda run, **changes: stack.enter_context(run_fixtures.supervised(run, **changes))


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)
