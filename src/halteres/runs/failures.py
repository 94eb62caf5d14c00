"""How a run's failure is told: which process, at which step, what its log says, what to do.

Owns: the sentences.
Never: decides that something failed.
"""

from __future__ import annotations

import re
import signal

import msgspec

from halteres.errors import HalteresError, ProcessFailed
from halteres.runs.directory import RunDirectory


class DiskFull(HalteresError):
    """No room for a run."""

    code = "disk_full"


_LOG_LINES = 60
_ERROR = re.compile(r"(error: |.* (?:ERROR|CRITICAL) \S+: )(.+)")
"""A line that tells of an error: our processes' last words, or a log line of that level."""


def died(run: RunDirectory, role: str, title: str, code: int | None, *, step: int, ready: bool) -> ProcessFailed:
    """A process of the run ended though it should not have."""
    what = f"{title} {how(code)} {'at step ' + str(step) if ready else 'before it was ready'}."
    told, after, exited = _told(run, role, code), next_after(run, role), {"process": role, "code": code}
    if told is None:
        return ProcessFailed(what, _said(run, role, code), after, exit=exited)
    why = " ".join(part for part in (told.what, told.why) if part)
    failed = ProcessFailed(what, why, f"{told.next} {after}".strip(), exit=exited)
    failed.code = told.code
    return failed


def too_slow(run: RunDirectory, role: str, title: str, seconds: float) -> ProcessFailed:
    """A process of the run did not become ready in time."""
    return ProcessFailed(
        f"{title} was not ready within {seconds:.0f} s.", _said(run, role, None), next_after(run, role)
    )


def not_started(run: RunDirectory, error: OSError) -> ProcessFailed:
    """A process could not be started at all."""
    return ProcessFailed("A process of the run could not be started.", f"{error}.", next_after(run, "supervisor"))


def disk_full(run: RunDirectory) -> DiskFull:
    """There is no room left for the run's files."""
    newest = run.newest_checkpoint()
    then = (
        f"then go on from step {newest['step']}: halteres train --resume {run.run_id}" if newest else "then start again"
    )
    return DiskFull("The disk is full.", f"Nothing more can be written in {run.path}.", f"Make room, {then}.")


def how(code: int | None) -> str:
    """An exit code as a verb."""
    if code is None:
        return "ended unexpectedly"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def next_after(run: RunDirectory, role: str) -> str:
    """Where to look, and how to go on."""
    newest = run.newest_checkpoint()
    look = f"Its log: {run.log(role)}."
    if newest is None:
        return f"{look} There is no checkpoint to go on from: start the run again."
    return f"{look} Go on from step {newest['step']}: halteres train --resume {run.run_id}"


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """control/failure.json: what a process of ours wrote when it ended with an error."""

    role: str
    code: str
    what: str
    why: str = ""
    next: str = ""


def _told(run: RunDirectory, role: str, code: int | None) -> LastWords | None:
    """What the process wrote as its reason; None for foreign programs, and for one that did not end by itself."""
    if code != 1:
        return None
    try:
        words = msgspec.json.decode((run.path / "control" / "failure.json").read_bytes(), type=LastWords)
    except (OSError, msgspec.DecodeError):
        return None
    return words if words.role == role else None


def _said(run: RunDirectory, role: str, code: int | None) -> str:
    """What the process itself gave as its reason: its last error; else its last line, if it ended by itself."""
    lines = [line.strip() for line in run.log_tail(role, _LOG_LINES) if line.strip()]
    errors = [said[2] for line in lines if (said := _ERROR.match(line))]
    ended_itself = code is not None and code > 0
    last = (errors or (lines if ended_itself else []) or [""])[-1][:600]
    return last if not last or last.endswith((".", "!", "?")) else f"{last}."
