"""How every process of ours begins and ends, starts and ends others, which process a pid means,
what a machine has.

Owns: the lifeline (a pipe whose end of file means: whoever started us is gone), the child that
cannot outlive us, the program that is run to its end, the process that outlives its maker, what
descendants leave behind, the ban on torch where nobody but us would import it, logging to stderr
without secrets, the clock by which silence is measured. Never: decides what a process does in
between.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.redaction import Redactor, printable

# how long a process may take to end in order after its lifeline broke; then it ends at once
GRACE_S = 10.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_WALL_AHEAD_S = time.time() - time.monotonic()

_POLL_S, _LOOK_S = 0.02, 1.0

# bytes at the end of each stream of a program that are read: answers come last
MOST_OUTPUT = 4 * 1024 * 1024
# after the program's end: somebody who escaped its group may hold a stream open
OUTPUT_ENDS_WITHIN_S = 1.0

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Lifeline:
    """A pipe: children hold the read end and end themselves when it does."""

    read_end: int
    write_end: int

    @classmethod
    def open(cls) -> Lifeline:
        """A new one; neither end is inherited unless passed on."""
        return cls(*os.pipe())

    def close(self) -> None:
        """Let go: whoever still holds the read end ends."""
        os.close(self.write_end)
        os.close(self.read_end)


def begin(
    role: str, *, torch: bool = False, threads: int | None = None, private: bool = False
) -> None:
    """Set the process up: log format, lifeline, and no torch unless `torch`.

    `import tinker` and `transformers.AutoTokenizer` pull torch in where it is installed (1.4 s and
    250 MB); the SDK works without it, so processes that need none block the import first. What a
    `private` process and its children write is its user's alone.
    """
    try:
        level = environ.log_level()
    except InvalidConfig as error:
        sys.exit(f"error: {error.sentence}")
    for stream in (sys.stdout, sys.stderr):
        # It writes out what waits in the buffer, which for a tool server would go to its client.
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")

    class WithoutSecrets(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            # Tracebacks included; and whatever this process has learnt to keep since it began. An
            # error may quote what a model wrote: a terminal gets no commands.
            return printable(Redactor.of_this_process().text(super().format(record)))

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WithoutSecrets(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if not torch:
        block_torch()
    elif threads:
        environ.set_threads(threads)
    if private:
        os.umask(0o077)
    hold_lifeline()


def block_torch() -> None:
    """Make `import torch` fail in this process."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]


def hold_lifeline(on_end: Callable[[], None] | None = None) -> None:
    """Watch the pipe HALTERES_LIFELINE_FD; when it ends, end this process in order, at latest after
    GRACE_S.
    """
    descriptor = environ.lifeline_fd()
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)  # our own children get lifelines of their own

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        logging.getLogger(__name__).warning("The process that started this one is gone; ending.")
        timer = threading.Timer(GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        if on_end is not None:
            on_end()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Child:
    """A process that cannot outlive us, in a group of its own, of which nothing is left once it has
    ended.

    A thread of its own waits for it, so that threads (`exit.result(seconds)`) and event loops
    (`await asyncio.wrap_future(child.exit)`) can both wait for its exit code, which is negative for
    a signal.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
        lifeline: Lifeline | None = None,
        descriptors: Sequence[int] = (),
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exit: Callable[[], object] | None = None,
    ) -> None:
        """Start it, as `subprocess.Popen` would; OSError where that cannot be.

        Args:
            lifeline: it ends with this; None: with one of its own, which ends with us.
            descriptors: handed down besides.
            before_exit: called on the thread that waits, once the group has ended and before the
                exit is known.
        """
        line = lifeline or Lifeline.open()
        self._own_lifeline = None if lifeline else line
        try:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, "HALTERES_LIFELINE_FD": str(line.read_end)},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(line.read_end, *descriptors),
                process_group=0,
                preexec_fn=die_with_parent,
            )
        except BaseException:
            if self._own_lifeline:
                self._own_lifeline.close()
            raise
        self.exit: Future[int] = Future()
        # whoever waits for it may be cancelled, it may not
        self.exit.set_running_or_notify_cancel()
        self._before_exit, self._is_swept, self._sweeping = before_exit, False, threading.Lock()
        threading.Thread(target=self._wait, name=f"exit of {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its pid, which is also its group's."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.exit.result() if self.exit.done() else None

    def end(self, grace_s: float = GRACE_S) -> int:
        """SIGTERM, wait, then SIGKILL for the whole group. Returns the exit code; safe to
        repeat.
        """
        if not self.exit.done():
            self.process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                return self.exit.result(grace_s)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL for the whole group. Returns the exit code; safe to repeat."""
        self._sweep()
        return self.exit.result()

    def _sweep(self) -> None:
        """Kill the group, or what its leader left of it, once: later the number may be somebody
        else's.
        """
        with self._sweeping:
            if not self._is_swept:
                self._is_swept = True
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def _wait(self) -> None:
        code = self.process.wait()
        try:
            self._sweep()  # grandchildren survive their parent otherwise
            if self._own_lifeline:
                self._own_lifeline.close()
            if self._before_exit:
                self._before_exit()
        finally:
            self.exit.set_result(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended, and what it wrote."""

    code: int
    out: str
    err: str


class Hung(Exception):
    """A program was ended since it hung; with the end of what it wrote to stderr."""


class TimedOut(TimeoutError):
    """A program was ended at its deadline; with the ends of what it wrote."""

    def __init__(self, within_s: float, out: str, err: str) -> None:
        super().__init__(f"not within {within_s:g} s")
        self.out, self.err = out, err


def run_caught(
    command: Sequence[str],
    folder: Path,
    within_s: float,
    keys: Sequence[str] = (),
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    is_hung: Callable[[int], bool] | None = None,
) -> Ended:
    """Run somebody else's program to its end, in a group that is killed afterwards.

    Args:
        keys: names of the secret variables of ours that it may have; by default none.
        variables: set for it.
        is_hung: asked every second with its pid.

    Raises:
        TimedOut: it ran past the deadline.
        Hung: `is_hung` said so.
    """
    pipe, threads = subprocess.PIPE, list[threading.Thread]()
    environment = environ.with_keys(*keys, **variables)
    child = Child(command, environment=environment, folder=folder, stdout=pipe, stderr=pipe)
    ends = bytearray(), bytearray()

    def read(stream: IO[bytes] | None, end: bytearray) -> None:
        assert stream is not None, "it is a pipe"  # noqa: S101 - for the type checker
        with stream:
            while piece := os.read(stream.fileno(), 65536):
                end += piece
                del end[:-MOST_OUTPUT]

    for stream, end in zip((child.process.stdout, child.process.stderr), ends, strict=True):
        thread = threading.Thread(
            target=read, args=(stream, end), name="output of a program", daemon=True
        )
        thread.start()
        threads.append(thread)
    ends_at, hung, is_late = time.monotonic() + within_s, False, False
    try:
        while not child.exit.done() and not hung:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                is_late = True
                break
            with suppress(TimeoutError):
                child.exit.result(min(left_s, _LOOK_S))
            hung = is_hung is not None and not child.exit.done() and is_hung(child.pid)
    finally:
        code = child.kill()
    for thread in threads:
        thread.join(OUTPUT_ENDS_WITHIN_S)
    out, err = (bytes(end).decode(errors="replace") for end in ends)
    if hung:
        raise Hung(err)
    if is_late:
        raise TimedOut(within_s, out, err)
    return Ended(code=code, out=out, err=err)


def detach(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], held: int
) -> None:
    """Start a process that outlives this one: a session of its own, its output in `log`, one
    descriptor handed down.

    While this process lives, it takes note of the other's end, so that no zombie is left.
    """
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            pass_fds=(held,),
        )
    threading.Thread(target=child.wait, name=f"reaper of {folder.name}", daemon=True).start()


def die_with_parent() -> None:
    """For `preexec_fn`: ask Linux to kill this child when the *thread* that started it ends;
    foreign programs that know no lifeline have this alone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent` in this process, whose lifeline ends it in order."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)


def steady_time() -> float:
    """Unix s that never jump: the wall clock as this process found it, and the time since on the
    monotonic one.
    """
    return _WALL_AHEAD_S + time.monotonic()


def adopt_orphans(reap_s: float = 10.0) -> None:
    """From here on this process is the parent of whatever its descendants leave behind (Linux),
    also of what left its process group; `end_orphans` ends that. Every `reap_s` seconds those that
    have ended are taken note of.
    """
    if sys.platform != "linux":
        return

    def reap() -> None:
        """Zombies that nobody has waited for between two looks: the exit of a child of ours is its
        waiter's to take.
        """
        before = set[int]()
        while True:
            time.sleep(reap_s)
            zombies = {child for child in _children() if _stat(child)[0] == "Z"}
            for child in zombies & before:
                with suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
            before = zombies

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=reap, name="orphans", daemon=True).start()


def end_orphans(within_s: float = GRACE_S) -> None:
    """Kill every child of this process, and theirs as they become ours, and wait for no longer than
    `within_s`. For a process that waits for none of them.
    """
    ends = time.monotonic() + within_s
    while (children := _children()) and time.monotonic() < ends:
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """Children of every thread of this process; none where there is no /proc."""
    found = list[int]()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += map(int, file.read_text(encoding="utf-8").split())
    return found


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began; None where it is gone, a zombie, or there
    is no /proc.
    """
    state, started = _stat(pid)
    return None if state in ("", "Z", "X") else started


def boot_id() -> str | None:
    """Names this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def identity(pid: int) -> dict[str, Any]:
    """What tells this process from a later one of the same pid: pids are used again."""
    return {"pid": pid, "start_time": start_time(pid), "boot_id": boot_id()}


def alive(who: Mapping[str, Any] | None) -> bool:
    """Whether the process of this identity still runs."""
    if not who or not who.get("pid"):
        return False
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(who["pid"], 0)
        except OSError:
            return False
        return True
    now = start_time(who["pid"])
    same_boot = who.get("boot_id") in (None, boot_id())
    return now is not None and same_boot and now == who.get("start_time", now)


def is_stopped(who: Mapping[str, Any]) -> bool:
    """Whether a signal (SIGSTOP) has stopped the process of this identity; False where there is no
    /proc to tell.
    """
    state, started = _stat(who.get("pid"))
    return state in ("T", "t") and started == who.get("start_time", started)


def peak_memory_bytes(pid: int | None) -> int | None:
    """The most memory that the process has held so far (VmHWM); None where there is no /proc to
    tell, or no such process. Memory of a GPU is not in it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    # a process that has ended, and was not waited for, has no such line
    kilobytes = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return next((1024 * int(number) for number in kilobytes), None)


class CpuShare:
    """How much of the time in which its threads wanted a core a process had one."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._ran_s = self._waited_s = 0.0

    def since_last(self, pid: int) -> float | None:
        """The share since this was last asked of this process, from 0 to 1; None the first time,
        where the system does not say it, and where nothing was wanted.
        """
        ran_s = waited_s = 0.0
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError, ValueError):  # the thread has just ended
                ran, waited = file.read_text(encoding="utf-8").split()[:2]
                ran_s += int(ran) / 1e9
                waited_s += int(waited) / 1e9
        more_ran_s, more_waited_s = ran_s - self._ran_s, waited_s - self._waited_s
        is_first = pid != self._pid
        self._pid, self._ran_s, self._waited_s = pid, ran_s, waited_s
        # what threads that have ended had is gone
        if is_first or more_ran_s <= 0 or more_waited_s < 0:
            return None
        return more_ran_s / (more_ran_s + more_waited_s)


def load_average() -> float:
    """How many processes ran or waited for a core, on the average of the last minute; 0 where the
    system does not say it.
    """
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _stat(pid: int | None) -> tuple[str, int]:
    """State and start time by /proc; an empty state where it has no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def usable_cores() -> int:
    """Cores this process may run on."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One kind of memory, in bytes. None: this system does not tell."""

    total: int | None
    free: int | None  # what a new process can have without pushing others out


def main_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """The machine's memory that is no GPU's, or the container's where that is less."""
    machine = dict(_numbers(meminfo))  # KiB
    total, free = (
        machine[name] << 10 if name in machine else None for name in ("MemTotal", "MemAvailable")
    )
    if total is None:
        with suppress(OSError, ValueError):
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = {
        name: dict(_numbers(cgroup / f"memory.{name}")) for name in ("max", "current", "stat")
    }
    limit, used = container["max"].get(""), container["current"].get("")
    if limit is None or used is None or (total is not None and limit >= total):
        return Memory(total=total, free=free)
    # files in memory make way for a process
    left = max(0, limit - used + container["stat"].get("inactive_file", 0))
    return Memory(total=limit, free=left if free is None else min(free, left))


def _numbers(file: Path) -> Iterator[tuple[str, int]]:
    """The numbers in a file by the word before them; none where it holds no number (`max`), or is
    not there.
    """
    try:
        rows = [
            line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, ValueError):
        return
    for row in rows:
        name, value = ("", row[0]) if len(row) == 1 else (row[0].rstrip(":"), row[1])
        if value.isdecimal():
            yield name, int(value)
