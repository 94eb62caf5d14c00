"""A server that dies as by kill -9, in process: what a test may do to it from outside.

Owns: the instants of death (before, within, after a commit, or between requests), the files as
death leaves them, the next server on those files. Never: knows what should come of it (`test_model`
does).

A death is a copy: the files as they are at that instant become the next server's; what the dead one
still does happens to files that nobody reads again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import httpx

from halteres.trajectories.records import (
    Change,
)
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import StoreFailed

from .server_fixtures import Clock, ServerFixture, opened

T = TypeVar("T")
Instant = Literal["before", "torn", "after"]
"""When a server dies: before a commit, with its tokens but not its rows on the disk, or after
it.
"""

Leaves = Literal["never", "at once", "within"]
"""When a client hangs up."""


class Died(Exception):
    """The server died under the request; `body` is what had arrived."""

    def __init__(self, body: bytes = b"") -> None:
        super().__init__()
        self.body = body


class MortalStore(SqliteStore):
    """A store that can die at a commit; from then on it takes and gives nothing."""

    dead = False
    _commits_left = 0
    _instant: Instant = "before"
    _die: Callable[[Instant], None] | None = None

    def doom(self, num_commits: int, instant: Instant, die: Callable[[Instant], None]) -> None:
        """Let so many commits pass, and die at the next one."""
        self._commits_left, self._instant, self._die = num_commits, instant, die

    def commit(self, changes: Sequence[Change]) -> None:
        self._check()
        if self._die is None or not changes:
            super().commit(changes)
        elif self._commits_left:
            self._commits_left -= 1
            super().commit(changes)
        else:
            if self._instant == "after":
                super().commit(changes)
            self._die(self._instant)
            self.dead = True
            self._check()

    def load(self) -> Any:
        self._check()
        return super().load()

    def _check(self) -> None:
        if self.dead:
            raise StoreFailed("The server is dead.")


class KillableServer:
    """One server after the other over the same files, and whoever talks to them, without an event
    loop of his own.
    """

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self._folder, self._num_servers = folder, 0
        self._loop = asyncio.Runner()
        self._begin()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """One request.

        Raises:
            Died: nobody knows what came of it; another server is there.
        """
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self._run(self._scene.http.request(method, path, content=content, headers=named))
        self._check_alive(b"")
        return answer

    def get(self, path: str, **params: Any) -> Any:
        """A GET that succeeds."""
        answer = self.ask("GET", f"{path}?{urlencode(params, doseq=True)}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def question(self, leaves: Leaves, **params: Any) -> bytes:
        """GET /batch below any HTTP library; gives what arrived."""
        client = _Client(self._scene, leaves)
        try:
            self._run(client.ask(params))
        except (StoreFailed, RuntimeError):  # Starlette's, for an error after a reply has begun
            if not self._store.dead:
                raise
        self._run(self._settle())  # a batch that is given back is decided on after the reply
        self._check_alive(client.body)
        return client.body

    def doom(self, num_commits: int, instant: Instant) -> None:
        """The server will die at one of its next commits."""
        self._store.doom(num_commits, instant, self._copy)

    def crash(self) -> None:
        """kill -9 between requests; another server begins on what it left."""
        self._run(self._settle())
        if not self._store.dead:
            self._copy("before")
        self._begin_again()

    def close(self) -> None:
        """End the last server."""
        self._run(self._end())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def _check_alive(self, body: bytes) -> None:
        if self._store.dead:
            self._begin_again()
            raise Died(body)

    async def _settle(self) -> None:
        """What was decided before is kept; a server's own decisions may still be on their way."""
        service: TrajectoryService = self._scene.app.state.service
        with suppress(StoreFailed):
            await service.decisions.submit(lambda state: None)

    def _copy(self, instant: Instant) -> None:
        here, next_one = (self._folder / str(self._num_servers + more) for more in (0, 1))
        shutil.copytree(here, next_one)
        for segment in sorted(next_one.glob("*.tokens/*"))[-1:] if instant == "torn" else ():
            with segment.open("ab") as file:
                file.write(b'{"tokens":[[1')

    def _begin_again(self) -> None:
        self._run(self._end())
        self._num_servers += 1
        self._begin()

    def _begin(self) -> None:
        self._store = MortalStore(self._folder / str(self._num_servers) / "queue.sqlite")
        self._run(self._start())

    async def _start(self) -> None:
        self._stop, ready = asyncio.Event(), asyncio.Event()
        self._serving = asyncio.create_task(self._serve(ready, self._stop), name="server")
        await ready.wait()
        await self._settle()

    async def _serve(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        async with opened(self._store.file, self.clock, self._store) as self._scene:
            ready.set()
            await stop.wait()

    async def _end(self) -> None:
        self._stop.set()
        await self._serving


class _Client:
    """A question for a batch, asked by somebody who may hang up."""

    def __init__(self, scene: ServerFixture, leaves: Leaves) -> None:
        self._app, self._leaves, self.body = scene.app, leaves, b""

    async def ask(self, params: dict[str, Any]) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "path": "/batch",
            "raw_path": b"/batch",
        }
        scope |= {"query_string": urlencode(params).encode(), "headers": [(b"host", b"127.0.0.1")]}
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._leaves == "at once" or (self._leaves == "within" and self.body):
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()  # a request without a body says nothing more
        raise AssertionError

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.body += message.get("body", b"")
