"""A real browser at the page: what it shows, what it asks for, what it complains of."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from halteres.agent.transports.access import link
from halteres.agent.transports.http_server import ControlServer
from halteres.loopback import open_listener, url_of

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 800}
DEADLINE_MS = 10_000
EXPECTED_WITHIN_MS = 20_000


def executable() -> str:
    """The browser's path: CHROMIUM, as scripts/test-browser sets it, or what is found."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "No Chromium was found. `make test-browser` installs one."
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile of its own."""
    # Longer than Playwright's five seconds: runs start next to the page, two files at a time.
    expect.set_options(timeout=EXPECTED_WITHIN_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable(), args=list(ARGUMENTS))
        try:
            yield running
        finally:
            running.close()


@contextmanager
def serving() -> Iterator[str]:
    """A control server in a thread of its own. Which home is its own it asks at each request."""
    loops: list[asyncio.AbstractEventLoop] = []
    begun = threading.Event()
    server = ControlServer()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        begun.set()
        await server.serve(sockets=[listening])

    with open_listener(0) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert begun.wait(10)
        try:
            yield url_of(listening)
        finally:
            loops[0].call_soon_threadsafe(server.end)
            thread.join(10)
            assert not thread.is_alive()


@dataclass(slots=True)
class Visit:
    """One browser profile at one server; at the end, whether it stayed there, and had nothing to
    complain of.
    """

    url: str
    context: BrowserContext
    page: Page
    asked: list[str] = field(default_factory=list)  # URLs
    complaints: list[str] = field(default_factory=list)

    def enter(self, path: str = "") -> Page:
        """Open the page with a link, then go to a place in it."""
        self.page.goto(link(self.url))
        self.page.locator("#connection.up").wait_for()
        if path:
            self.page.goto(f"{self.url}/{path}")
        return self.page

    def check(self) -> None:
        """Nothing left this machine, no script was refused or failed, no dialog opened."""
        assert {urlsplit(url).hostname for url in self.asked} == {"127.0.0.1"}
        assert not self.complaints


@contextmanager
def visiting(running: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """A visit in a profile that knows nothing yet."""
    context = running.new_context(**{"viewport": WIDE, **options})
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    visit = Visit(url, context, page)
    context.on("request", lambda request: visit.asked.append(request.url))
    page.on("pageerror", lambda error: visit.complaints.append(f"error: {error}"))
    page.on("console", lambda said: _note(visit, said))
    page.on(
        "dialog",
        lambda dialog: (visit.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()),
    )
    try:
        yield visit
        visit.check()
    finally:
        context.close()


def _note(visit: Visit, said: Any) -> None:
    """A page that is refused is told by every browser; nothing else may be."""
    if said.type in ("error", "warning") and "401 (Unauthorized)" not in said.text:
        visit.complaints.append(f"{said.type}: {said.text}")
