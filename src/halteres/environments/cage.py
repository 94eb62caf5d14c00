"""Cages: worker processes that see nothing of this machine but Python, and change nothing of it.

Owns: what a worker may use and see, the pool that asks it, whether this machine has cages. Never:
what is asked. Guarantees: code in a cage reads no file that it is not shown, writes none but in a
scratch folder that ends with it, reaches no network and no process outside, and is gone when the
pool is closed or this process ends, however it ends. `cage_entry` is the way in.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import site
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from halteres import process
from halteres.config import environ
from halteres.environments.scratch_folders import remove_abandoned
from halteres.environments.worker_process import (
    NO_LIMITS,
    WorkerLimits,
    WorkerLost,
    WorkerProcess,
)
from halteres.errors import EnvironmentFailed, InvalidConfig

logger = logging.getLogger(__name__)

__all__ = ["CagePolicy", "WorkerLimits", "WorkerPool", "cage_missing", "gym_workers", "try_cage"]

CagePolicy = Literal["auto", "on", "off"]
"""Of `env.cage`: whose scorers go into a cage: the unsafe ones, all, none."""

ENTRY = Path(__file__).with_name("cage_entry.py")
GYM_WORKER = Path(__file__).with_name("gym_worker.py")
WORKER_LOOP = Path(__file__).with_name("worker_loop.py")

SCRATCH = "/halteres-scratch"
"""The working folder in a cage: a name that no file has which a cage shows."""

SOURCES = ("/usr/src", "/usr/local/src")
"""Where containers keep their user's project, in folders that a cage shows."""

START_S = 120.0
"""How long another package may take to be imported, and its data set or environment to be made."""

TRIED_WITHIN_S = 30.0

UNKNOWN = "It could not be found out whether this machine has cages."

FORBIDDEN = (None, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
"""Errors of a machine without cages, and a cage that failed its own test. Others pass."""

USED_UP = (errno.ENOSPC, errno.EUSERS)
"""Errors where there are as many namespaces as may be: for good where that is none."""

REASONS = {
    **{
        f"/proc/sys/user/max_{kind}_namespaces": "0"
        for kind in ("user", "cgroup", "ipc", "mnt", "net", "pid", "uts")
    },
    "/proc/sys/kernel/unprivileged_userns_clone": "0",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Settings of Linux that forbid namespaces, with the value that does."""


def cage_missing() -> str | None:
    """One sentence that says what this machine lacks for cages; None where they work.

    A cage is started for that, once per process, and tests itself. None, too, where the trial
    failed for want of memory or time: no worker then runs without a cage, one that cannot enter a
    cage is lost, and the next call tries again.
    """
    try:
        return find_missing()
    except WorkerLost as lost:
        logger.warning("%s", lost)
        return None


@functools.cache
def find_missing() -> str | None:
    """What `cage_missing` says, kept once it is known. WorkerLost where it is not."""
    if sys.platform != "linux":
        return f"Cages need Linux: there are no namespaces on {sys.platform}."
    return try_cage(sys.executable)


def try_cage(python: str, *readable: Path) -> str | None:
    """Start a cage as a worker of this Python has it, with files and folders that it reads.

    Returns:
        One sentence that says why this machine allows none; None where it started.

    Raises:
        WorkerLost: it did not start, for a reason that may pass or that lies in what it reads.
    """
    command = _command((python, "-c", "print('{}')"), WorkerLimits(), caged=True, readable=readable)
    try:
        ended = process.run_caught(command, Path("/"), TRIED_WITHIN_S)
    except (OSError, TimeoutError) as error:
        raise WorkerLost(UNKNOWN, f"{error}.") from error
    said: Any = None
    with contextlib.suppress(ValueError):
        said = json.loads(ended.out)
    if said == {}:
        return None
    if not isinstance(said, dict):
        raise WorkerLost(UNKNOWN, ended.err[-200:])
    why, setting = str(said.get("error")), _setting()
    number = said.get("errno")
    has_none = number in USED_UP and "user.max_" in setting
    if number not in FORBIDDEN and not has_none:
        raise WorkerLost(UNKNOWN, why)
    return f"This machine allows no cage{setting}: {why}"


def _setting() -> str:
    """The setting of this machine that forbids namespaces, where one is known."""
    for file, forbids in REASONS.items():
        with contextlib.suppress(OSError):
            if Path(file).read_text(encoding="ascii").strip() == forbids:
                name = file.removeprefix("/proc/sys/").replace("/", ".")
                return f" (sysctl {name} is {forbids})"
    return ""


def _command(
    command: Sequence[str],
    limits: WorkerLimits,
    *,
    caged: bool,
    readable: Sequence[Path] = (),
    stays: bool = False,
) -> tuple[str, ...]:
    """The command that starts `command` behind `cage_entry`, by the same Python."""
    python, *arguments = command
    given = {
        "memory_bytes": limits.memory_bytes,
        "cpu_s": limits.cpu_s,
        "file_bytes": limits.file_bytes,
        "open_files": limits.open_files,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    if caged:
        options += ["caged=1", f"processes={limits.processes}", f"scratch={SCRATCH}"]
        options += [f"hidden={path}" for path in (Path.home(), environ.home(), *SOURCES)]
        options += [f"readable={path}" for path in readable]
    elif stays:
        options.append("stays=1")
    return (python, "-E", "-s", "-S", str(ENTRY), *options, "--", *arguments)


class WorkerPool:
    """Alike workers, each asked one thing at a time, and replaced after any error."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        size: int,
        limits: WorkerLimits,
        caged: bool,
        readable: Sequence[Path] = (),
        start_within_s: float,
        environment: Mapping[str, str] | None = None,
        opening: Mapping[str, Any] | None = None,
    ) -> None:
        """Start none yet: the first question does. Remove the folders that workers of killed
        processes have left.

        Args:
            command: a Python and its arguments: what speaks `worker_process`'s lines.
            size: workers at most, and questions at once.
            readable: files and folders that a cage shows, read-only; none of them may hold the
                user's home.
            start_within_s: until a worker is ready.
            opening: sent to each worker before it is ready: settings that other users, who can
                read a process's arguments, must not see.
            environment: variables of workers outside a cage, which then work in this process's
                folder; by default few variables, and a scratch folder.

        Raises:
            InvalidConfig: a readable path would show the user's home.
        """
        remove_abandoned()
        shown = [path.expanduser().absolute() for path in readable]
        for path in shown:
            if Path.home().resolve().is_relative_to(path.resolve()):
                raise InvalidConfig(
                    f"A cage may not show {path}.",
                    "It holds this user's home, and with it keys and logins.",
                    "Name single files and folders.",
                )
        if site.ENABLE_USER_SITE:
            shown.append(Path(site.getusersitepackages()))
        self._limits, self._start_within_s, self._opening = limits, start_within_s, opening
        self._command = _command(
            command, limits, caged=caged, readable=shown, stays=environment is not None
        )
        self._environment = environment
        if environment is None or caged:
            # where this user's own packages lie, whatever the home is
            self._environment = environ.for_caged(PYTHONUSERBASE=site.getuserbase())
        self._idle = deque[WorkerProcess]()
        self._held = set[WorkerProcess]()
        self._places = asyncio.Semaphore(size)
        # each start is a core's work for a moment, or for seconds
        self._starts = asyncio.Semaphore(process.usable_cores())
        self._starting = set[asyncio.Task[None]]()
        self._is_closed = False

    @property
    def num_running(self) -> int:
        """Workers that have been started and have not ended."""
        return sum(worker.is_running for worker in (*self._idle, *self._held))

    async def ask(self, question: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        """The answer of any free worker. Questions wait for one in the order in which they came;
        each of those before them ends within its own limit.

        Raises:
            EnvironmentFailed: one of `worker_process`'s, by what the worker did.
        """
        worker = await self.take()
        try:
            if not worker.is_running:
                await self._start(worker)
            return await worker.ask(question, within_s)
        finally:
            self.give_back(worker)

    async def take(self) -> WorkerProcess:
        """A worker that is the caller's alone until it is given back: for an episode of many
        questions.
        """
        await self._places.acquire()
        if self._is_closed:
            self._places.release()
            raise WorkerLost("The workers have been closed.")
        worker = self._free()
        self._held.add(worker)
        return worker

    def give_back(self, worker: WorkerProcess) -> None:
        """Let the next question have it. One that has ended is started again meanwhile."""
        self._held.discard(worker)
        self._places.release()
        if self._is_closed:
            worker.kill()
            return
        self._idle.append(worker)
        if not worker.is_running:
            task = asyncio.get_running_loop().create_task(
                self._start_ahead(worker), name="start of a worker"
            )
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    def close(self) -> None:
        """Kill all of them, and all that they started."""
        self._is_closed = True
        for task in self._starting:
            task.cancel()
        for worker in (*self._idle, *self._held):
            worker.kill()

    def _free(self) -> WorkerProcess:
        """One that runs, else one that is being started, else a new one."""
        for worker in self._idle:
            if worker.is_ready:
                self._idle.remove(worker)
                return worker
        if self._idle:
            return self._idle.popleft()
        return WorkerProcess(
            self._command,
            start_within_s=self._start_within_s,
            limits=self._limits,
            environment=self._environment,
            opening=self._opening,
        )

    async def _start(self, worker: WorkerProcess) -> None:
        async with self._starts:
            await worker.start()

    async def _start_ahead(self, worker: WorkerProcess) -> None:
        # the next question starts it again, and says why that fails
        with contextlib.suppress(EnvironmentFailed):
            await self._start(worker)


def gym_workers(
    kind: Literal["reasoning", "text"],
    *arguments: str,
    size: int,
    python: str | None = None,
    limits: WorkerLimits = NO_LIMITS,
    caged: bool = False,
) -> WorkerPool:
    """Workers that run another package's environment (`gym_worker`), by a Python that has the
    package. By default they are in no cage: the package is the user's own choice.
    """
    environment = None
    if not caged:
        # six tasks of reasoning-gym 0.1.25 draw from sets of texts: without a fixed seed of hashes
        # each process would make other items of the same numbers
        environment = environ.for_sandboxed(PYTHONHASHSEED="0")
    return WorkerPool(
        (python or sys.executable, str(GYM_WORKER), kind, *arguments),
        size=size,
        limits=limits,
        caged=caged,
        readable=(GYM_WORKER, WORKER_LOOP),
        start_within_s=START_S,
        environment=environment,
    )
