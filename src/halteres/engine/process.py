"""The engine's process, as the service owns it.

Owns: starting it, knowing when it is ready, its one link, restarting it when it dies or hangs, ending it.
Never: knows what the engine held; whoever owns the adapters hears of a death and rebuilds them.

    start() ─▶ starting ─▶ ready ──died──▶ starting ... ─▶ failed   (more than `max_restarts` deaths in `window_s`)
                  └────────────┴──stop()──▶ stopped

The child prints `ready` on its standard output once its socket listens; the end of that output says that it died first.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halteres.engine.child import EngineChild
from halteres.engine.link.link import LinkedEngine, connect
from halteres.engine.protocol import BaseType, Engine, EngineGone
from halteres.errors import HalteresError, NotReady, ProcessFailed
from halteres.process import usable_cores

MAX_SOCKET_PATH = 100
"""Bytes; the kernel's own limit is 108 on Linux and 104 on macOS, its end included."""

SOCKET = "engine"

State = Literal["starting", "ready", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """Which engine to start."""

    backend: Literal["torch", "scripted"]
    folder: Path  # of the base model
    name: str  # of the base model
    threads: int | None = None  # None: cores - 1, at least 1
    cache_gb: float | None = None  # for keys and values; None: by what is free
    dtype: BaseType = "float32"  # of the base weights

    def argv(self, socket_path: Path) -> list[str]:
        """The command line."""
        threads = self.threads or max(1, usable_cores() - 1)
        named = {"socket": socket_path, "backend": self.backend, "model": self.folder, "name": self.name}
        options = [part for option, value in named.items() for part in (f"--{option}", str(value))]
        cache = () if self.cache_gb is None else ("--cache-gb", str(self.cache_gb))
        computed = ("--threads", str(threads), *cache, "--dtype", self.dtype)
        return [sys.executable, "-m", "halteres.engine", *options, *computed]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How long to wait, and how often to try."""

    ready_s: float = 600.0  # loading a large model takes its time
    max_restarts: int = 5  # within window_s
    window_s: float = 300.0
    backoff_s: float = 0.1  # before the first restart, doubled for each further one
    max_backoff_s: float = 5.0
    ping_s: float = 10.0  # between two signs of life that are asked for
    silent_s: float = 60.0  # without any, while the process lives: it hangs and is killed


class EngineProcess:
    """An engine in a process of its own, kept alive.

    Args:
        command: which engine.
        log: file that takes its standard error, appended to.
        on_death: called with the reason after every death that was not asked for, before the restart.
        on_restart: called once the engine is ready again.
        policy: deadlines and the bound on restarts.
    """

    def __init__(
        self,
        command: EngineCommand,
        log: Path,
        *,
        on_death: Callable[[HalteresError], None] = lambda _: None,
        on_restart: Callable[[], None] = lambda: None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._command, self._log = command, log
        self._on_death, self._on_restart = on_death, on_restart
        self._policy = policy or RestartPolicy()
        self._child: EngineChild | None = None
        self._engine: LinkedEngine | None = None
        self._watch: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque()
        self._changed = asyncio.Condition()
        self.state: State = "starting"
        self.restarts = 0
        self.failure: HalteresError | None = None  # the last death's reason

    @property
    def engine(self) -> Engine:
        """The engine now running; after a death its calls fail with NotReady until another is ready.

        Raises:
            NotReady: none was ever ready.
        """
        if self._engine is None:
            raise self.failure or NotReady("The engine is starting.", next="Ask again in a moment.")
        return self._engine

    @property
    def pid(self) -> int | None:
        """Of the process now running."""
        return self._child.process.pid if self._child else None

    async def start(self) -> None:
        """Start it and wait until it answers.

        One that a signal ends is started again, as later ones are.

        Raises:
            ProcessFailed: it ended by itself, or was not ready within the deadline; its log's tail is in the details.
                Or there was no process, memory or room left for it.
        """
        while self._child is None:
            try:
                self._child = await self._started()
            except HalteresError as failure:
                self._deaths.append(time.monotonic())
                if not _was_killed(failure) or not self._may_restart():
                    self.failure = failure
                    await self._set("failed")
                    raise
                self._on_death(failure)
                await asyncio.sleep(self._backoff_s())
        await self._set("ready")
        self._watch = asyncio.create_task(self._keep_alive(), name="engine watch")

    async def stop(self) -> None:
        """End it; within the grace in order, then at once. Safe to repeat."""
        await self._set("stopped")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._engine is not None:
            self._engine.fail(EngineGone("The engine was stopped.", next="Start the service again."))
        if self._child is not None:
            await self._child.end()
            self._child = None

    async def until(self, *states: State, restarts: int = 0) -> None:
        """Wait until it is in one of these states; `ready` counts only after at least so many restarts."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.state in states and (self.state != "ready" or self.restarts >= restarts)
            )

    async def _set(self, state: State) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()

    async def _started(self) -> EngineChild:
        try:
            with _socket_path() as socket_path:
                child = await EngineChild.spawn(self._command.argv(socket_path), self._log)
                return await self._ready(child, socket_path)
        except (OSError, subprocess.SubprocessError) as error:
            raise ProcessFailed(
                "The engine could not be started.",
                f"{getattr(error, 'strerror', None) or error}".removesuffix(".") + ".",
                "See that processes, memory and room for temporary files are left (ulimit -a, df), and start it again.",
            ) from error

    async def _ready(self, child: EngineChild, socket_path: Path) -> EngineChild:
        """The child once it answers; one that does not is killed."""
        try:
            async with asyncio.timeout(self._policy.ready_s):
                await child.listening()
                child.link = self._engine = await connect(socket_path)
                await child.link.info()
            return child
        except BaseException as error:
            await child.kill()
            if isinstance(error, TimeoutError):
                raise child.failure(f"was not ready within {self._policy.ready_s:g} s", None) from error
            raise

    async def _keep_alive(self) -> None:
        while self._child is not None:
            failure = await self._child.ended(self._policy.ping_s, self._policy.silent_s)
            self._child = None
            self._died(failure)
            await self._set("starting")
            while self._child is None and self._may_restart():
                await asyncio.sleep(self._backoff_s())
                try:
                    self._child = await self._started()
                except HalteresError as failure:
                    self._died(failure)
            if self._child is not None:
                self.restarts += 1
                await self._set("ready")
                self._on_restart()
        await self._give_up()

    def _died(self, failure: HalteresError) -> None:
        self.failure = failure
        self._deaths.append(time.monotonic())
        self._on_death(failure)

    def _may_restart(self) -> bool:
        while self._deaths and time.monotonic() - self._deaths[0] > self._policy.window_s:
            self._deaths.popleft()
        return len(self._deaths) <= self._policy.max_restarts

    def _backoff_s(self) -> float:
        return min(self._policy.backoff_s * 2 ** (len(self._deaths) - 1), self._policy.max_backoff_s)

    async def _give_up(self) -> None:
        reason = ProcessFailed(
            "The engine keeps dying and is not started again.",
            f"{len(self._deaths)} deaths within {self._policy.window_s:g} s; the last: {self.failure}",
            f"Read {self._log}, then restart the service.",
        )
        self.failure = reason
        if self._engine is not None:
            self._engine.fail(reason)
        await self._set("failed")


def _was_killed(failure: HalteresError) -> bool:
    """A signal ended it: it may do better another time, which one that ended by itself will not."""
    code = failure.details.get("exit_code")
    return isinstance(code, int) and code < 0


@contextmanager
def _socket_path() -> Iterator[Path]:
    """A name for a socket; the one connection outlives it: nothing to leave behind, whoever dies first."""
    directory = _short_directory()
    try:
        yield directory / SOCKET
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _short_directory() -> Path:
    """A private directory short enough for a socket's path."""
    for place in (None, "/tmp"):  # noqa: S108  mkdtemp makes it private
        directory = Path(tempfile.mkdtemp(prefix="halteres-", dir=place))
        if len(os.fsencode(directory / SOCKET)) <= MAX_SOCKET_PATH:
            return directory
        directory.rmdir()
    raise NotReady("No directory has a path short enough for a socket.", f"{MAX_SOCKET_PATH} bytes are the limit.")
