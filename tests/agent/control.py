"""Control servers for tests: in this process's loop, or a process as a person starts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx

from halteres.agent.transports.access import token
from halteres.agent.transports.http_server import ControlServer, LegacyAuth, create_app
from halteres.loopback import open_listener, url_of

SERVE = (
    sys.executable,
    "-c",
    "from halteres.cli.main import main; main()",
    "serve",
    "control",
    "--port",
    "0",
)
ANSWERS_ON = re.compile(r"(http://127\.0\.0\.1:\d+)")


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {token()}"}


def wireless(legacy_auth: LegacyAuth = "open", peer: str = "127.0.0.1") -> httpx.ASGITransport:
    return httpx.ASGITransport(
        create_app(legacy_auth), raise_app_exceptions=False, client=(peer, 1)
    )


def client(
    legacy_auth: LegacyAuth = "open", peer: str = "127.0.0.1", **headers: str
) -> httpx.AsyncClient:
    """A client of an app without a wire, with the token unless `headers` say otherwise."""
    merged = httpx.Headers(bearer())
    merged.update(headers)
    return httpx.AsyncClient(
        transport=wireless(legacy_auth, peer), base_url="http://127.0.0.1:8080", headers=merged
    )


@asynccontextmanager
async def serving(legacy_auth: LegacyAuth = "open") -> AsyncIterator[tuple[ControlServer, str]]:
    """A server on a free port, in this loop; told to end afterwards, if it was not before.

    Its socket listens from the start: who connects too early waits.
    """
    with open_listener(0) as listening:
        server = ControlServer(legacy_auth)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield server, url_of(listening)
        finally:
            server.end()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 10)


@contextmanager
def process(home: Path, *command: str, ends_with: int = 0) -> Iterator[str]:
    """A server's process; yields where it answers. SIGTERM ends it with this code."""
    environment = {**os.environ, "HALTERES_HOME": str(home)}
    started = subprocess.Popen(command or SERVE, stderr=subprocess.PIPE, text=True, env=environment)
    assert started.stderr is not None
    said = []
    try:
        for line in started.stderr:
            said.append(line)
            if found := ANSWERS_ON.search(line):
                yield found[1]
                break
        else:
            raise AssertionError("".join(said))
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == ends_with, started.stderr.read()
    finally:
        started.kill()
        started.wait()
        started.stderr.close()
