"""How a run's failure is reported: which process, at which step, what its log says, which settings
would fix it.

Whether memory ran out is read from the words of processes and libraries and, where it counts them,
from the kernel.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.errors import EnvironmentGaveUp, HalteresError, ProcessFailed
from halteres.files import NOT_JSON, read_regular
from halteres.next_step import NextStep
from halteres.observe.metrics import read_rows
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.progress import Given, read_given, signal_name
from halteres.runs.state import RunState, read_state

Changes = dict[str, Any]

TOKENS = 64  # lengths are lowered to a multiple of this many tokens


def smaller(env: Mapping[str, Any]) -> Changes:
    """What takes less memory, each a fix of its own: max_token_length a quarter shorter, half the
    batch_size.

    >>> smaller({"max_token_length": 1024, "batch_size": 64, "group_size": 8})
    {'max_token_length': 768, 'batch_size': 32}
    """

    def number(name: str) -> int:
        value = env.get(name)
        if isinstance(value, int) and value > 0:
            return value
        return 0

    length, batch, group = map(number, ("max_token_length", "batch_size", "group_size"))
    changes = {
        "max_token_length": length * 3 // 4 // TOKENS * TOKENS,
        "batch_size": batch // 2 // max(1, group) * max(1, group),  # whole groups
    }
    return {name: value for name, value in changes.items() if value > 0}


def smaller_rows(data: Mapping[str, Any]) -> Changes:
    """The same of a training on a file: half the rows of a step.

    >>> smaller_rows({"batch_size": 32})
    {'data.batch_size': 16}
    """
    rows = data.get("batch_size")
    if isinstance(rows, int) and rows > 1:
        return {"data.batch_size": rows // 2}
    return {}


def mending(code: str | None, given: Given) -> Changes:
    """The change that a failed run is best gone on with, or started with again; none where its
    settings were not what failed it.
    """
    if code == "gpu_oom" and given.data:
        return smaller_rows(given.data)
    if code == "gpu_oom":
        # the batch rather than the length: answers stay whole
        return dict(list(smaller(given.env).items())[-1:])
    if code == "nan_loss" and given.trainer.learning_rate:
        return {"learning_rate": float(f"{given.trainer.learning_rate / 2:.2g}")}
    return {}


Memory = Literal["GPU memory", "memory"]  # as a sentence calls it

_WORDS: tuple[tuple[Memory, re.Pattern[str]], ...] = (
    (
        "GPU memory",
        re.compile(
            r"\b(CUDA|HIP|XPU|MPS|GPU)\b.*out of memory|OutOfMemoryError|_ALLOC_FAILED", re.I
        ),
    ),
    (
        "memory",
        re.compile(
            r"out of memory|not enough memory|can(no|')t allocate "
            r"memory|\bMemoryError\b|\bbad_alloc\b",
            re.I,
        ),
    ),
)

COUNTERS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")
"""Where the kernel counts whom it has killed: in this container, in this machine."""


def ran_out(lines: Iterable[str]) -> Memory | None:
    """Which memory these lines say there was too little of; None where they say no such thing.

    >>> ran_out(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."])
    'GPU memory'
    """
    text = "\n".join(lines)
    return next((memory for memory, words in _WORDS if words.search(text)), None)


def kernel_kills() -> int:
    """Processes that the kernel has killed for want of memory since it began to count; 0 where it
    does not tell.
    """
    for file in COUNTERS:
        try:
            counted = re.search(
                r"^oom_kill (\d+)$", Path(file).read_text(encoding="utf-8"), re.MULTILINE
            )
        except OSError:
            continue
        if counted:
            return int(counted[1])
    return 0


class DiskFull(HalteresError):
    """No room for a run."""

    code = "disk_full"


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """control/failure.json: what a process of ours wrote when it ended with an error."""

    role: str
    code: str
    what: str
    why: str = ""
    next: str = ""


# lines of a log's end, and of a stack in it; characters of a reason
_LOG_LINES, _STACK_LINES, MOST_REASON = 60, 600, 600
_ERROR = re.compile(r"(error: |.* (?:ERROR|CRITICAL) \S+: )(.+)")
"""A line that reports an error: our processes' last words, or a log line of that level."""

_REMARK = re.compile(
    r"\S+ \S+ (?:\S+ )?(?:DEBUG|INFO) \S+: |Unclosed |(?:connector|connections|client_session): "
)
"""A line that gives no reason: a log's remark, or what aiohttp says of a process that ends at
once.
"""

NO_REASON = "It gave no reason: does its code end the process (sys.exit, os._exit)?"


def died(
    run: RunDirectory, role: str, title: str, code: int | None, *, step: int, ready: bool
) -> ProcessFailed:
    """A process of the run ended though it should not have."""
    when = "before it was ready"
    if ready:
        when = f"at step {step}"
    last_words, exited = _last_words(run, role, code), {"process": role, "code": code}
    if role in ("trainer", "service"):  # what an environment needs is not for our settings to fix
        # The service's log is not asked which memory there was too little of: trainer and engine
        # tell it themselves.
        lines = []
        if last_words:
            lines = [last_words.what, last_words.why]
        if role == "trainer":
            lines += run.log_tail(role, _LOG_LINES)
        lines += run.log_tail("engine", _LOG_LINES)
        memory = ran_out(lines)
        if memory:
            given = read_given(run)
            changes = smaller_rows(given.data) if given.data else smaller(given.env)
            fixes = [f"{name} to {value}" for name, value in changes.items()]
            lower = "Take a smaller inference.model"
            if fixes:
                lower = f"Lower {' or '.join(fixes)}"
            what = f"{title} ran out of {memory} {when}."
            go_on = _going_on(run, lower)
            if given.data:
                # a run that goes on keeps its batches: which rows make them depends on their size
                go_on = f"{lower}, then start again."
            failed = ProcessFailed(what, "", go_on, exit=exited, first=lower)
            failed.code = "gpu_oom"
            return failed
    what = f"{title} {how(code)} {when}."
    if last_words is not None:
        why = " ".join(part for part in (last_words.what, last_words.why, last_words.next) if part)
        failed = _ended(run, role, what, why, exited)
        failed.code = last_words.code
        return failed
    why = _reason(run, role, code)
    is_unknown = code is None and role == "service"
    if not why and (code == -signal.SIGKILL or is_unknown):
        # A guess, and told as one: who sends SIGKILL is not known afterwards, and how an engine
        # ended not always.
        kills = kernel_kills()
        if kills:
            why = (
                f"Possibly for want of memory: the kernel has killed {kills} processes here for "
                "that since it started."
            )
    return _ended(run, role, what, why, exited)


def gave_up(run: RunDirectory, role: str, code: int | None) -> bool:
    """Whether the process said that it would come to the same end if it were started again."""
    last_words = _last_words(run, role, code)
    return last_words is not None and last_words.code == EnvironmentGaveUp.code


def too_slow(run: RunDirectory, role: str, title: str, seconds: float) -> ProcessFailed:
    """A process of the run did not become ready in time."""
    what = f"{title} was not ready within {seconds:.0f} s."
    return _ended(run, role, what, _reason(run, role, None), {"process": role, "code": None})


STUCK = "env_stuck"


def stuck(
    run: RunDirectory, role: str, title: str, silent_s: float, where: str, step: int
) -> ProcessFailed:
    """A process was killed since its event loop hung, once more than it is started again."""
    what = f"{title} hung again: it gave no sign of life for {silent_s:.0f} s, at step {step}."
    why = "Its stack shows nothing of its file."
    if where:
        why = f"It hung in {where}."
    failed = _ended(run, role, what, why, {"process": role, "code": -signal.SIGKILL})
    failed.code = STUCK
    return failed


def hung_at(run: RunDirectory, role: str, file: str) -> str:
    """Where a process of the run hangs, by the stack that it wrote to its log: see `frame_in`."""
    lines = run.log_tail(role, _STACK_LINES)
    begins = [place for place, line in enumerate(lines) if line.startswith("Timeout (")]
    if not begins:
        return ""
    return frame_in(file, "\n".join(lines[begins[-1] :]))


def frame_in(file: str, stacks: str) -> str:
    """The innermost place in an environment's file, of the stacks that Python dumps; "" if none.

    >>> frame_in("/a/sums.py", 'File "/a/sums.py", line 7 in score')
    'score (sums.py:7)'
    """
    found = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)', stacks)
    if found:
        return f"{found[2]} ({file.rpartition('/')[2]}:{found[1]})"
    return ""


def not_started(run: RunDirectory, error: OSError) -> ProcessFailed:
    """A process could not be started at all."""
    return _ended(run, "supervisor", "A process of the run could not be started.", f"{error}.")


def disk_full(run: RunDirectory) -> DiskFull:
    """There is no room left for the run's files."""
    first, why = "Make room", f"Nothing more can be written in {run.path}."
    return DiskFull("The disk is full.", why, _going_on(run, first), first=first)


def _ended(
    run: RunDirectory, role: str, what: str, why: str, exited: dict[str, Any] | None = None
) -> ProcessFailed:
    facts = {}
    if exited is not None:
        facts = {"exit": exited}
    return ProcessFailed(what, why, _going_on(run), first="", log=str(run.log(role)), **facts)


def _going_on(run: RunDirectory, first: str = "") -> NextStep | str:
    """How to go on from the newest checkpoint, once something else is done."""
    newest = run.newest_checkpoint()
    if newest is None:
        if first:
            return f"{first}, then start again."
        return "There is no checkpoint to go on from: start the run again."
    go_on = f"Go on from step {newest['step']}"
    if first:
        go_on = f"{first}, then go on from step {newest['step']}"
    return read_state(run.path / "run.json").resume(go_on)


def _last_words(run: RunDirectory, role: str, code: int | None) -> LastWords | None:
    """What the process wrote as its reason; None for foreign programs, and for one that did not end
    by itself.
    """
    if code != 1:
        return None
    try:
        words = msgspec.json.decode(
            read_regular(run.path / "control" / "failure.json"), type=LastWords
        )
    except (OSError, *NOT_JSON):
        return None
    if words.role == role:
        return words
    return None


def how(code: int | None) -> str:
    """An exit code as a verb."""
    if code is None:
        return "ended unexpectedly"
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal_name(-code)}"


def reason(lines: Sequence[str], code: int) -> str:
    """The last of a process's last words that may be a reason for this exit code; else that there
    is none.
    """
    none = "It said nothing."
    if code >= 0:
        none = NO_REASON
    return next((line for line in reversed(lines) if not _REMARK.match(line)), none)


def _reason(run: RunDirectory, role: str, code: int | None) -> str:
    """What the process itself gave as its reason: its last error; else its last line, if it ended
    by itself.
    """
    lines = [line.strip() for line in run.log_tail(role, _LOG_LINES) if line.strip()]
    errors = [error[2] for error in map(_ERROR.match, lines) if error]
    last = ""
    if errors:
        last = errors[-1]
    elif code is not None and code > 0:
        last = reason(lines, code)
    last = last[:MOST_REASON]
    if not last or last.endswith((".", "!", "?")):
        return last
    return f"{last}."


@dataclass(frozen=True, slots=True)
class FailedProcess:
    """The process that ended though it should not have, or never became ready."""

    process: str
    # its exit code, negative for a signal; None: unknown, or it did not end by itself
    code: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """As answers tell it."""
        return {"process": self.process, "code": self.code}


def failed_process(state: RunState) -> FailedProcess | None:
    """Who failed; None for a run that has not, and where no process was to blame."""
    if state.status != "failed":
        return None
    if state.processes.get("engine", {}).get("state") == "ended":
        # where its service or we had ended it, the word would be another
        return FailedProcess("engine", None)
    if state.exit:
        return FailedProcess(str(state.exit.get("process")), state.exit.get("code"))
    waited_for = {"api": "service", "trainer": "trainer", "environment": "env"}.get(
        state.phase or ""
    )
    # it never became ready
    if waited_for:
        return FailedProcess(waited_for, None)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that training can go on from."""

    step: int | None
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """How a run failed, as it is reported now."""

    error: str  # a sentence or more
    code: str
    exit: FailedProcess | None
    resumable: bool
    last_checkpoint: Checkpoint | None
    first: str  # what is to be done before it is gone on from; mostly nothing

    @property
    def whose_log(self) -> str:
        """The process whose log has the reason."""
        if self.exit:
            return self.exit.process
        return "supervisor"


def failure_of(state: RunState) -> FailureReport | None:
    """How it failed; None of a run that has not."""
    if state.status != "failed":
        return None
    first = ""
    if state.failure:
        first = state.failure.first
    return FailureReport(
        error=error_of(state),
        code=state.code or "internal",
        exit=failed_process(state),
        resumable=state.resumable,
        last_checkpoint=last_checkpoint(state),
        first=first,
    )


def error_of(state: RunState) -> str:
    """The error, with the way on as it is now: a checkpoint may have been written since."""
    failure = state.failure
    if failure is None:
        return state.error or "The run failed."
    newest = None
    if state.resumable:
        newest = last_checkpoint(state)
    if failure.first and newest:
        way_on = f"{failure.first}, then resume."
    elif failure.first:
        way_on = f"{failure.first}, then start again."
    elif newest:
        way_on = f"`next` goes on from step {newest.step}."
    else:
        way_on = "There is no checkpoint to go on from: `next` starts again."
    return " ".join(part for part in (failure.what, failure.why, way_on) if part)


def last_checkpoint(state: RunState) -> Checkpoint | None:
    """The newest one that training can go on from."""
    newest = state.last_checkpoint
    if newest:
        return Checkpoint(step=newest.get("step"), path=newest.get("state_path"))
    return None


def read_restarts(events: Path) -> dict[str, int]:
    """Role -> how often it was started again; none where nothing was."""
    return dict(
        Counter(str(row.get("role")) for row in read_rows(events) if row.get("type") == "restart")
    )
