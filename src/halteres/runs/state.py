"""What a run is doing, as run.json has it. The supervisor alone changes it, or a reader who found the supervisor gone.

pending -> starting -> running -> completed
              |           |----> failed
              '-----------'----> stopping -> stopped
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from halteres.config.program import EnvironmentProgram, project_of
from halteres.config.settings import default_name
from halteres.errors import HalteresError, NotFound
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.next_step import NextStep

Status = Literal["pending", "starting", "running", "stopping", "stopped", "completed", "failed"]
Phase = Literal["api", "trainer", "environment", "evaluation"]
"""What a starting run waits for; `evaluation`: training has ended, the last evaluation runs."""

Kind = Literal["rl", "reward"]
"""What is trained: a policy, by reinforcement learning; a reward model on preferences, by one process, no servers."""

TERMINAL: frozenset[Status] = frozenset(("stopped", "completed", "failed"))
SCHEMA = 1

Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Unix seconds of a year that calendars know."""

MOST_STATE_BYTES = 1 << 20
"""A run.json is a few kilobytes; what is larger was not written by a supervisor."""

RESERVE, RESERVE_BYTES = ".reserve", 128 * 1024
"""A file given up at the end: how a run ended can be written even when the disk is full."""


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
        return cls(what=error.what, why=why, first=details.get("first", ""), log=details.get("log", ""))


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. Times are unix seconds; `processes` is role -> {pid, start_time, pgid, port, exit, state}."""

    run_id: str
    name: str
    environment: str
    environment_file: str
    interpreter: str
    base_model: str
    tokenizer: str  # folder of the base model, or its name where only the service has it
    total_steps: int
    created_at: Time
    working_directory: str = ""  # of the environment's commands
    is_foreign: bool = False  # the environment is written for atroposlib
    status: Status = "pending"
    phase: Phase | None = None
    step: int = 0
    error: str | None = None
    code: str | None = None
    exit: dict[str, Any] | None = None  # of a failed run: {process, code} of what ended and should not have
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
    policy: str | None = None  # name of the operator's policy that holds
    resumed_from: str | None = None  # run id
    resume_point: dict[str, Any] | None = None  # name, step, state_path of the checkpoint it goes on from
    idempotency_key: str | None = None  # of the call that started it, where it carried one
    schema: int = SCHEMA

    @property
    def program(self) -> EnvironmentProgram:
        """Its environment, as it was when the run began."""
        file = Path(self.environment_file)
        return EnvironmentProgram(
            name=self.environment,
            path=file,
            interpreter=self.interpreter,
            working_directory=Path(self.working_directory) if self.working_directory else project_of(file),
            is_foreign=self.is_foreign,
        )

    @property
    def default_name(self) -> str:
        """What it is called where it was given no name; sinks call it so in any case."""
        return default_name(self.environment, self.run_id)

    @property
    def own_name(self) -> str | None:
        """The name that it was given."""
        return self.name if self.name != self.default_name else None

    def resume(self, reason: str = "") -> NextStep:
        """What goes on with it, and what for."""
        tool = "rl_train_reward_model" if self.kind == "reward" else "rl_start_training"
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
        f"Its other files are as they were. Put back a copy of {file.name}, or move {file.parent} away.",
        f"halteres runs logs {file.parent.name}",
        run_id=file.parent.name,
        path=str(file),
    )


def read_state(file: Path) -> RunState:
    """The state in this run.json. NotFound where there is none, RunUnreadable where it is damaged."""
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
    """Replace run.json whole: a reader sees the old or the new, never half."""
    replace_file(file, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
