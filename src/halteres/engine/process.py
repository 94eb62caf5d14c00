"""An engine's process, as the service owns it: started, known to be ready, restarted when it dies
or hangs, ended.

    start() ─▶ starting ─▶ ready ──died──▶ starting ... ─▶ failed   (more than `max_restarts` deaths
                                                                    in `window_s`)
                  └────────────┴──stop()──▶ stopped

Which process that is, and how its engine is reached, is its command's: `EngineCommand` starts one
of ours, which prints `ready` on its standard output once its socket listens. Whoever owns the
adapters hears of a death and rebuilds them: nothing here knows what an engine held.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Literal, Protocol, TypeVar

from halteres.config import environ
from halteres.engine.connection import LinkedEngine, connect
from halteres.engine.protocol import AskedType, EngineGone, HoldsModel, ModelInfo
from halteres.errors import HalteresError, NotReady, ProcessFailed, ServerError, boundary
from halteres.files import tail
from halteres.process import GRACE_S, Child, usable_cores

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]

SOCKET = "engine"  # its name

# how much later than its connection a process that dies may end
ENDS_WITHIN_S = 5.0

MACHINES_COME_WITHIN_S = 300  # those of the other ranks, once torchrun waits for them

_MACHINES_THAT_CAME = re.compile(r"waiting for clients\. (\d+)/(\d+) clients joined")
"""What torchrun says where it has waited for other machines in vain (torch 2.13)."""


class Link(HoldsModel, Protocol):
    """An engine in another process. Once a call has failed with EngineGone, `broken` is set: the
    process is ended then, and another is started.
    """

    broken: asyncio.Event

    def fail(self, error: HalteresError) -> None:
        """Every waiting call and every later one raises `error`."""

    async def disconnect(self) -> None:
        """End the connection; waiting calls fail with EngineGone."""


L = TypeVar("L", bound=Link)
L_co = TypeVar("L_co", bound=Link, covariant=True)


class Spawned(Protocol[L_co]):
    """A process that was started, and the way to the engine in it."""

    @property
    def process(self) -> Child:
        """It is ended with its group."""
        ...

    async def connect(self) -> L_co:
        """The engine, as soon as it can be reached; called once. Waiting is given up when the
        process ends or takes too long. EngineGone where it is known to end.
        """
        ...


class Command(Protocol[L_co]):
    """Which process to start."""

    def spawn(self, log: IO[bytes]) -> Spawned[L_co]:
        """Start one, which writes what it says to `log`. OSError or SubprocessError where the
        machine refuses.
        """
        ...


@dataclass(frozen=True, slots=True)
class SpawnedEngine:
    """A process of ours, which is about to listen on a Unix socket."""

    process: Child
    folder: Path  # of the socket

    async def connect(self) -> LinkedEngine:
        """The engine, once it has said that it listens. The connection outlives the socket's name:
        nothing is left behind, whichever process dies first.
        """
        output = self.process.process.stdout
        try:
            while output is not None and (line := await asyncio.to_thread(output.readline)):
                if line == b"ready\n":
                    return await connect(self.folder / SOCKET)
            raise EngineGone("The engine ended before it listened.")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Several processes that train as one, started by torchrun; those of this machine are its
    first.
    """

    number: int
    shard: bool = False  # each has a part of the base model
    machines: int = 1
    address: tuple[str, int] | None = None  # of this machine, where the others find it

    @property
    def here(self) -> int:
        """Of this machine."""
        return self.number // self.machines

    def options(self) -> list[str]:
        """Of torchrun."""
        own = ["--nproc-per-node", str(self.here), "--max-restarts", "0"]
        if self.address is None:
            return ["--standalone", "--local-addr", "127.0.0.1", *own]
        host, port = self.address
        return [
            *("--nnodes", str(self.machines), "--node-rank", "0"),
            *("--master-addr", host, "--master-port", str(port)),
            *("--rdzv-conf", f"timeout={MACHINES_COME_WITHIN_S}"),
            *own,
        ]

    def environment(self) -> dict[str, str]:
        """Variables of the ranks, beside those that torchrun sets."""
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
        if self.address is None and sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return variables

    def say_who_is_waited_for(self) -> None:
        """One line to the log, where other machines are to come."""
        if self.address is None or self.machines == 1:
            return
        host, port = self.address
        log.info(
            "The trainer waits at %s:%d for ranks of %d other machine(s), for %d s at most.",
            *(host, port, self.machines - 1, MACHINES_COME_WITHIN_S),
        )

    def check_address(self) -> None:
        """ProcessFailed where there is no such host, where it is not this machine, or where another
        process has its port.
        """
        if self.address is None:
            return
        host, port = self.address
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            why = "" if any(_is_ours(one[0], one[4]) for one in found) else "It is not this machine"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise ProcessFailed(
                f"The ranks cannot meet at {host}:{port}.",
                f"{why}.",
                "Give --trainer-address the name of this machine that the others know.",
            )
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise ProcessFailed(
                f"The ranks cannot meet at {host}:{port}.",
                f"{error.strerror}.",
                "Choose another port with --trainer-address, on every machine.",
            ) from error


def _is_ours(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Whether an address, as `getaddrinfo` gives it, is one of this machine."""
    with socket.socket(family, socket.SOCK_STREAM) as asked, suppress(OSError):
        # any port will do
        asked.bind((address[0], 0, *address[2:]))
        return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """Which engine of ours to start."""

    backend: Literal["torch", "scripted"]
    folder: Path  # of the base model
    name: str  # of the base model
    threads: int | None = None  # None: cores - 1, at least 1
    cache_gb: float | None = None  # for keys and values; None: by what is free
    dtype: AskedType = "auto"  # of the base weights
    device: str | None = None  # None: by HALTERES_DEVICE
    ranks: Ranks | None = None  # None: one process

    def argv(self, socket_path: Path) -> list[str]:
        """The command line."""
        threads = self.threads or max(1, usable_cores() - 1)
        options = {
            "socket": socket_path,
            "backend": self.backend,
            "model": self.folder,
            "name": self.name,
        }
        options |= {"threads": threads, "dtype": self.dtype}
        options |= {} if self.cache_gb is None else {"cache-gb": self.cache_gb}
        options |= {"device": self.device} if self.device else {}
        options |= {"ranks": self.ranks.number} if self.ranks else {}
        written = (
            part for option, value in options.items() for part in (f"--{option}", str(value))
        )
        flags = ["--shard"] if self.ranks and self.ranks.shard else []
        return [*self._launcher(), "-m", "halteres.engine", *written, *flags]

    def _launcher(self) -> list[str]:
        """Python, or torchrun, which starts as many as there are ranks on this machine."""
        if self.ranks is None:
            return [sys.executable]
        return [sys.executable, "-m", "torch.distributed.run", *self.ranks.options()]

    def spawn(self, log: IO[bytes]) -> SpawnedEngine:
        """Start it; `log` takes its standard error."""
        environment = environ.for_sandboxed()  # it needs no secret
        if self.ranks is not None:
            self.ranks.check_address()
            self.ranks.say_who_is_waited_for()
            environment |= self.ranks.environment()
        # a socket's path has 103 bytes at most (macOS)
        short = len(os.fsencode(tempfile.gettempdir())) < 70
        folder = Path(tempfile.mkdtemp(prefix="halteres-", dir=None if short else "/tmp"))  # noqa: S108 - private
        try:
            process = Child(
                self.argv(folder / SOCKET),
                environment=environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return SpawnedEngine(process, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How long to wait, and how often to try."""

    ready_s: float = 600.0  # loading a large model takes its time
    max_restarts: int = 5  # within window_s
    window_s: float = 300.0
    backoff_s: float = 0.1  # before the first restart, doubled for each further one
    max_backoff_s: float = 5.0
    ping_s: float = 10.0  # between two pings
    # without an answer to any, while the process lives: it hangs and is killed
    silent_s: float = 60.0


class EngineChild(Generic[L]):
    """One process of an engine, from its start to its end."""

    def __init__(self, process: Child, log: Path, log_begins: int) -> None:
        self.process, self._log, self._log_begins = process, log, log_begins
        self.link: L | None = None

    async def wait_ready(self, connect: Callable[[], Coroutine[Any, Any, L]]) -> ModelInfo:
        """Connect, and wait for the first answer, which is returned; ProcessFailed if it ends
        before.
        """

        async def first_answer() -> ModelInfo:
            self.link = await connect()
            return await self.link.info()

        answering = asyncio.create_task(first_answer(), name="engine start")
        ended = asyncio.wrap_future(self.process.exit)
        try:
            await asyncio.wait((answering, ended), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                with suppress(EngineGone):
                    return answering.result()
            exit_code = await ended
        finally:
            answering.cancel()
            ended.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        raise self.failure("ended before it was ready", exit_code)

    async def wait_end(self, ping_s: float, silent_s: float) -> ProcessFailed:
        """Wait for the end of the process, of its connection or of its answers to pings; returns
        why it ended.
        """
        assert self.link is not None  # noqa: S101 - for the type checker
        silent = asyncio.create_task(silence(self.link, ping_s, silent_s), name="engine pings")
        broken = asyncio.create_task(self.link.broken.wait(), name="engine connection broken")
        waits: list[asyncio.Future[Any]] = [silent, broken, asyncio.wrap_future(self.process.exit)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            how = "died"
            if silent.done() and self.process.exit_code is None:
                how = f"hung: it answered nothing for {silent_s:g} s, and was killed"
            elif not await self._has_exited(ENDS_WITHIN_S):
                how = "could not be reached any more, and was killed"
        finally:
            for wait in waits:
                wait.cancel()
        return self.failure(how, await self.end(grace_s=0))

    async def _has_exited(self, within_s: float) -> bool:
        exited = asyncio.wrap_future(self.process.exit)
        done, _ = await asyncio.wait([exited], timeout=within_s)
        exited.cancel()
        return bool(done)

    async def end(self, grace_s: float = GRACE_S) -> int:
        """Ask it to end; after the grace its group is killed. Returns its exit code."""
        stop = partial(self.process.end, grace_s) if grace_s else self.process.kill
        exit_code = await asyncio.to_thread(stop)
        if self.link is not None:
            await self.link.disconnect()
        if self.process.process.stdout is not None:
            self.process.process.stdout.close()
        return exit_code

    def failure(self, how: str, exit_code: int | None) -> ProcessFailed:
        """What to say about it, with the end of what it has logged."""
        lines = tail(self._log, 80, self._log_begins)
        killed_by = (
            signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else None
        )
        why = f"It was killed by {killed_by}." if killed_by else f"Exit code {exit_code}."
        # of several ranks the first that failed is the cause, and torchrun has the last word
        said = [line for line in lines if line.startswith("error: ")]
        said = said or [line for line in lines if line.strip("= ")][-1:]
        last = f" Its log ends with: {said[0].strip().removesuffix('.')}." if said else ""
        what, why, next = f"The engine (process {self.process.pid}) {how}.", why + last, ""
        came = _MACHINES_THAT_CAME.search("\n".join(said))
        if came is not None:
            what = f"Only {came[1]} of {came[2]} machines came for the trainer's ranks."
            why = f"The others did not within {MACHINES_COME_WITHIN_S} s."
            next = "Start torchrun on them, with the address of --trainer-address."
        return ProcessFailed(
            what,
            why,
            next,
            pid=self.process.pid,
            exit_code=exit_code,
            log=str(self._log),
            tail="\n".join(lines),
        )


async def silence(link: Link, ping_s: float, silent_s: float) -> None:
    """Ping again and again; returns once `silent_s` have passed without an answer.

    Several pings: a service that was itself stopped for a while does not blame its engine.
    """
    silent_for = 0.0
    while silent_for < silent_s:
        try:
            # an error is an answer, too; the end of the connection is noticed by itself
            with suppress(HalteresError):
                async with asyncio.timeout(ping_s):
                    await link.info()
            silent_for = 0.0
            await asyncio.sleep(ping_s)
        except TimeoutError:
            silent_for += ping_s


class EngineHost(Generic[L]):
    """How an engine that is kept alive is, for `service.fleet`; whoever keeps it sets the state."""

    def __init__(self) -> None:
        self._engine: L | None = None
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self.state: State = "starting"
        self.restarts = 0
        self.failure: HalteresError | None = None  # the last death's reason
        self.info: ModelInfo | None = None  # the first answer of the engine that was ready last

    @property
    def engine(self) -> L:
        """The engine now running; after a death its calls fail with NotReady until another is
        ready.

        Raises:
            NotReady: none was ever ready.
        """
        if self._engine is None:
            raise self.failure or NotReady("The engine is starting.", next="Ask again in a moment.")
        return self._engine

    async def start(self) -> None:
        """Start it and wait until it answers; the failure is raised where it cannot be started."""
        self._watch = asyncio.create_task(self._keep_alive(), name="engine watch")
        await self.settled()
        if self.state == "failed" and self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """End what keeps it alive; calls fail with EngineGone. Safe to repeat."""
        await self._set("stopped")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._engine is not None:
            self._engine.fail(
                EngineGone("The engine was stopped.", next="Start the service again.")
            )

    async def settled(self, restarts: int = 0) -> None:
        """Wait until it is ready, after at least so many restarts, or failed or stopped."""

        def is_settled() -> bool:
            if self.state == "ready":
                return self.restarts >= restarts
            return self.state != "starting"

        async with self._changed:
            await self._changed.wait_for(is_settled)

    async def _set(self, state: State) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()

    async def _keep_alive(self) -> None:
        raise NotImplementedError


class EngineProcess(EngineHost[L]):
    """An engine in a process of its own, kept alive. A start that fails is a ProcessFailed with its
    log's tail in the details: it ended by itself, was not ready within the deadline, or there was
    no process, memory or room left for it. One that a signal ends is started again, as later ones
    are.
    """

    def __init__(
        self,
        command: Command[L],
        log: Path,  # takes what it says
        *,
        on_death: Callable[[HalteresError], None] = lambda _: None,  # before the restart
        on_restart: Callable[[], None] = lambda: None,  # once it is ready again
        policy: RestartPolicy | None = None,
    ) -> None:
        super().__init__()
        self._command, self._log = command, log
        self._on_death, self._on_restart = on_death, on_restart
        self._policy = policy or RestartPolicy()
        self._child: EngineChild[L] | None = None
        self._deaths: deque[float] = deque()

    @property
    def pid(self) -> int | None:
        """Of the process now running."""
        return self._child.process.pid if self._child else None

    async def stop(self) -> None:
        """End it; within the grace in order, then at once. Safe to repeat."""
        await super().stop()
        if self._child is not None:
            await self._child.end()
            self._child = None

    async def _start_child(self) -> EngineChild[L]:
        """A child that answers; one that does not is killed."""
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as output:
                begins = output.tell()
                spawned = self._command.spawn(output)
        except (OSError, subprocess.SubprocessError) as error:
            raise ProcessFailed(
                "The engine could not be started.",
                f"{getattr(error, 'strerror', None) or error}".removesuffix(".") + ".",
                "See that processes, memory and room for temporary files are left (ulimit -a, "
                "df), and start it again.",
            ) from error
        child = EngineChild[L](spawned.process, self._log, begins)
        deadline = asyncio.timeout(self._policy.ready_s)
        try:
            async with deadline:
                self.info = await child.wait_ready(spawned.connect)
        except BaseException as error:
            await child.end(grace_s=0)
            if deadline.expired():
                how = f"was not ready within {self._policy.ready_s:g} s"
                raise child.failure(how, None) from error
            raise
        self._engine = child.link
        return child

    async def _keep_alive(self) -> None:
        was_ready = False
        while True:
            while self._deaths and time.monotonic() - self._deaths[0] > self._policy.window_s:
                self._deaths.popleft()
            if len(self._deaths) > self._policy.max_restarts:
                break
            if self._deaths:
                backoff_s = self._policy.backoff_s * 2 ** (len(self._deaths) - 1)
                await asyncio.sleep(min(backoff_s, self._policy.max_backoff_s))
            try:
                with boundary(ServerError, "The engine's start"):
                    self._child = await self._start_child()
                self.restarts += was_ready
                await self._set("ready")
                if was_ready:
                    self._on_restart()
                was_ready = True
                self.failure = await self._child.wait_end(
                    self._policy.ping_s, self._policy.silent_s
                )
                self._child = None
            except HalteresError as failure:
                self.failure = failure
                exit_code = failure.details.get("exit_code")
                if not was_ready and not (isinstance(exit_code, int) and exit_code < 0):
                    # it ended by itself, and will not do better another time
                    await self._set("failed")
                    return
            self._deaths.append(time.monotonic())
            self._on_death(self.failure)
            await self._set("starting")
        self.failure = ProcessFailed(
            "The engine keeps dying and is not started again.",
            f"{len(self._deaths)} deaths within {self._policy.window_s:g} s; the last: "
            f"{self.failure}",
            f"Read {self._log}, then restart the service.",
        )
        if self._engine is not None:
            self._engine.fail(self.failure)
        await self._set("failed")
