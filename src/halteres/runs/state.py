"""What a run is doing, as run.json has it, and the lock that says whether its supervisor lives.

pending -> starting -> running -> completed
              |           |----> failed
              '-----------'----> stopping -> stopped

The supervisor alone changes it, or a reader who found the supervisor gone. The kernel frees a lock
with its last holder, however that one died.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from halteres.config.program import EnvironmentProgram, project_of
from halteres.config.settings import default_name
from halteres.errors import Conflict, HalteresError, NotFound, NotReady
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.logins import without_logins
from halteres.next_step import NextStep

Status = Literal["pending", "starting", "running", "stopping", "stopped", "completed", "failed"]
Phase = Literal["api", "trainer", "environment", "evaluation"]
"""What a starting run waits for; `evaluation`: training has ended, the last evaluation runs."""

Kind = Literal["rl", "reward", "sft", "dpo"]
"""What is trained: a policy, by reinforcement learning; a reward model on preferences, by one
process, no servers; a policy on a file, by imitation (`sft`) or on preferences (`dpo`), by a
trainer and a training service.
"""

ON_FILES: tuple[Kind, ...] = ("sft", "dpo")
"""Kinds of run that train a policy on a file, and have no environment."""

TERMINAL: frozenset[Status] = frozenset(("stopped", "completed", "failed"))
Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # unix seconds of a year that calendars know
# a run.json is a few kilobytes; what is larger was not written by a supervisor
MOST_STATE_BYTES = 1 << 20

RESERVE, RESERVE_BYTES = ".reserve", 128 * 1024
"""A file given up at the end: how a run ended can be written even when the disk is full."""

_POLL_S = 0.01


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a run failed, in parts: how it is gone on from depends on when that is asked."""

    what: str  # a sentence
    why: str = ""  # sentences
    first: str = ""  # what is to be done before it is gone on from, without a full stop
    log: str = ""  # path of the log of whoever failed

    @classmethod
    def of(cls, error: HalteresError) -> Failure:
        """The parts of an error that ended a run."""
        why, details = error.why, error.details
        if "first" not in details:  # its next step is no way to go on
            why = f"{why} {error.next}".strip()
        return cls(
            what=error.what, why=why, first=details.get("first", ""), log=details.get("log", "")
        )


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. Times are unix seconds; `processes` is role -> {pid, start_time, pgid, port, exit,
    state}.
    """

    run_id: str
    name: str
    environment: str
    environment_file: str
    interpreter: str
    base_model: str
    tokenizer: str  # folder of the base model, or its name where only the service has it
    total_steps: int
    created_at: Time
    environment_sha256: str | None = None  # of its file, as the run began
    working_directory: str = ""  # of the environment's commands
    is_foreign: bool = False  # the environment is written for atroposlib
    status: Status = "pending"
    phase: Phase | None = None
    step: int = 0
    error: str | None = None
    code: str | None = None
    # of a failed run: {process, code} of what ended and should not have
    exit: dict[str, Any] | None = None
    failure: Failure | None = None  # of a failed run: `error` in its parts
    note: str | None = None  # what a person should know though nothing failed
    resumable: bool = False
    last_checkpoint: dict[str, Any] | None = None
    started_at: Time | None = None
    ended_at: Time | None = None
    supervisor: dict[str, Any] | None = None  # pid, start_time, boot_id
    processes: dict[str, dict[str, Any]] = {}
    urls: dict[str, str] = {}
    kind: Kind = "rl"
    service_given: bool = False  # somebody else's service: never stopped
    # that service speaks the Tinker API alone: a relay samples it by the SDK; during a run with an
    # environment the run's own
    is_relayed: bool = False
    policy: str | None = None  # name of the operator's policy that holds
    resumed_from: str | None = None  # run id
    # name, step, state_path of the checkpoint it goes on from
    resume_point: dict[str, Any] | None = None
    idempotency_key: str | None = None  # of the call that started it, where it carried one
    schema: int = 1

    @property
    def program(self) -> EnvironmentProgram:
        """Its environment, as it was when the run began."""
        file = Path(self.environment_file)
        return EnvironmentProgram(
            name=self.environment,
            path=file,
            interpreter=self.interpreter,
            working_directory=Path(self.working_directory)
            if self.working_directory
            else project_of(file),
            is_foreign=self.is_foreign,
        )

    @property
    def default_name(self) -> str:
        """What it is called where it was given no name; sinks call it so in any case."""
        return default_name(self.environment, self.run_id)

    @property
    def own_name(self) -> str | None:
        """The name that it was given."""
        if self.name != self.default_name:
            return self.name
        return None

    @property
    def trains_policy(self) -> bool:
        """Whether its adapter is one of a training service."""
        return self.kind != "reward"

    @property
    def is_on_file(self) -> bool:
        """Whether it trains a policy on a file, with no environment."""
        return self.kind in ON_FILES

    def resume(self, reason: str = "") -> NextStep:
        """What goes on with it, and what for."""
        tool = "rl_start_training"
        if self.kind == "reward":
            tool = "rl_train_reward_model"
        return NextStep(tool, {"resume_from": self.run_id}, reason)

    @property
    def terminal(self) -> bool:
        """Whether the run has ended; it never changes again."""
        return self.status in TERMINAL


class RunUnreadable(NotFound):
    """The run is there, and one of the files that tell of it is damaged."""

    code, status = "run_unreadable", 422


def unreadable(file: Path, why: str) -> RunUnreadable:
    """The error for a damaged file of a run: which, and what can be done."""
    return RunUnreadable(
        f"Run {file.parent.name} cannot be read: {file} is damaged ({why.rstrip('.')}).",
        f"Its other files are as they were. Put back a copy of {file.name}, or move {file.parent} "
        "away.",
        f"halteres runs logs {file.parent.name}",
        run_id=file.parent.name,
        path=str(file),
    )


def read_state(file: Path) -> RunState:
    """The state in this run.json. NotFound where there is none, RunUnreadable where it is
    damaged.
    """
    try:
        content = read_regular(file, MOST_STATE_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"There is no run in {file.parent}.", "It has no run.json.") from error
    except OSError as error:
        raise unreadable(file, error.strerror or str(error)) from error
    try:
        return msgspec.json.decode(content, type=RunState)
    except NOT_JSON as error:
        raise unreadable(file, str(error) if content.strip() else "it is empty") from error


def write_state(file: Path, state: RunState) -> None:
    """Replace run.json whole: a reader sees the old or the new, never half, and no login of an
    address.
    """
    content = without_logins(msgspec.json.format(msgspec.json.encode(state), indent=1).decode())
    replace_file(file, content.encode() + b"\n")


def take_lock(file: Path) -> int:
    """The lock's descriptor. Conflict where another process holds it. It is not inherited unless
    handed on.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        what = f"{file.parent} is held by a running supervisor."
        raise Conflict(
            what, "One directory is one run.", "Wait for it, stop it, or start another run."
        ) from None
    return descriptor


@contextmanager
def lock_taken(file: Path) -> Iterator[None]:
    """Hold the lock for the length of a block. Conflict where another process holds it."""
    descriptor = take_lock(file)
    try:
        yield
    finally:
        os.close(descriptor)


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock. Whoever only asks hinders nobody who asks too."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # we may not look: nothing speaks against it
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(
    file: Path, within_s: float, what: str, given_up: threading.Event | None = None
) -> Iterator[None]:
    """Hold the lock for the length of a block; whoever comes later waits, `within_s` at most.

    NotReady, with `what` cannot be done now, where somebody else held it all the time, or
    `given_up` was set. The file is made where it is not there; its folder must be.
    """
    ends, given_up = time.monotonic() + within_s, given_up or threading.Event()
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # else somebody took the file away meanwhile
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                break
        os.close(descriptor)
        if time.monotonic() > ends or given_up.wait(_POLL_S):
            try:
                holder = f"Process {int(file.read_text(encoding='utf-8'))}"
            except (OSError, ValueError):
                holder = "Another process"
            raise NotReady(what, f"{holder} holds {file}.", "Try again in a moment.")
    try:
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.pwrite(descriptor, f"{os.getpid():<10}".encode(), 0)
        yield
    finally:
        os.close(descriptor)
