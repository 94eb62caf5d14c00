"""What can go wrong: one tree of errors that say what happened, why, and what to do next; and how
each wire shows them.

HalteresError
├── UserError            400  the caller can mend it
│   ├── InvalidConfig        a setting is unknown, of the wrong type or out of range
│   ├── InvalidData          a datum, group or prompt cannot be used
│   ├── NotFound         404  a named thing does not exist
│   └── Conflict         422 it exists already, or something else holds it (not 409, which SDKs
                         retry for ever)
├── NotReady             503  ask again in a moment
├── RolloutFailed             one rollout ended without a trajectory; the run goes on
│   ├── EnvironmentFailed
│   │   └── EnvironmentGaveUp
│   ├── SamplerFailed
│   └── ScorerFailed
├── ProcessFailed             a process of a run died or never became ready
└── ServerError          500  ours to mend; the text carries an id that is also in the log
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from halteres.logins import without_logins, without_logins_in
from halteres.next_step import Advice, NextStep, as_call, for_people, written

MOST_TOLD, FEW_TOLD = 16, 5  # names that an error lists: all of them, or a few of many

MOST_COMPARED, MOST_KNOWN = 200, 1000
"""Characters of a name that a client sent, and known names, among which the nearest is sought."""


class HalteresError(Exception):
    """An error for the reader who must act. However it is shown, no address in it has its login,
    and no character is a half one ("\\ud800", which foreign code may quote): no file could hold it.

    Args:
        what: what happened, one sentence.
        why: the cause, with the figures that show it.
        next: what to do now: calls as values, or a sentence where none helps.
        details: further JSON-able facts for programs (field, allowed, did_you_mean ...).
    """

    code: str = "internal"  # of the class; an error retold for another process keeps that one's
    status: ClassVar[int] = 500

    def __init__(self, what: str, why: str = "", next: Advice = "", **details: Any) -> None:
        self.what, self.why, self.details = _whole(what), _whole(why), details
        self.next: Advice = next
        super().__init__(self.sentence)

    @property
    def sentence(self) -> str:
        """What, why and next as one readable text."""
        return self.written(lambda step: step.command)

    def written(self, write: Callable[[NextStep], str]) -> str:
        """The same with each call as `write` has it."""
        return _joined(self.what, self.why, written(self.next, write))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.why, self.next, self.details)


def _rebuild(
    kind: type[HalteresError], what: str, why: str, next: Advice, details: dict[str, Any]
) -> HalteresError:
    return kind(what, why, next, **details)


class UserError(HalteresError):
    """The caller can mend it."""

    code, status = "invalid_arguments", 400


class InvalidConfig(UserError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""

    code = "invalid_config"


class InvalidData(UserError):
    """A datum, group or prompt that cannot be used."""

    code = "invalid_data"


class NotFound(UserError):
    """A named thing does not exist."""

    code, status = "not_found", 404


class Conflict(UserError):
    """It exists already, or another process holds it."""

    code, status = "conflict", 422


class NotReady(HalteresError):
    """Not yet; the same request may succeed in a moment."""

    code, status = "not_ready", 503


class RolloutFailed(HalteresError):
    """One rollout ended without a trajectory. It is recorded, and the run goes on."""

    code = "rollout_failed"


class EnvironmentFailed(RolloutFailed):
    """The environment's own code raised."""

    code = "env_error"


class EnvironmentGaveUp(EnvironmentFailed):
    """Its own code can make nothing to train on; started again, it would come to the same end."""

    code = "env_gave_up"


class SamplerFailed(RolloutFailed):
    """Inference gave no usable answer."""

    code = "sampler_error"


class ScorerFailed(RolloutFailed):
    """A reward function, a reward model or a judge gave no usable answer."""

    code = "scorer_failed"


class ProcessFailed(HalteresError):
    """A process of a run died, or never became ready; `log` among its details is where to look."""

    code = "process_exited"

    def written(self, write: Callable[[NextStep], str]) -> str:
        """What, why, where to look and what next as one readable text."""
        log = ""
        if self.details.get("log"):
            log = f"Its log: {self.details['log']}."
        return _joined(self.what, self.why, log, written(self.next, write))


class ServerError(HalteresError):
    """Ours to mend."""

    code = "internal"


@contextmanager
def boundary(kind: type[HalteresError], where: str) -> Iterator[None]:
    """Foreign code runs inside; whatever it raises leaves as `kind`. Cancellation and our own
    errors pass through.
    """
    try:
        yield
    except HalteresError:
        raise
    except Exception as error:
        raise kind(f"{where} raised {type(error).__name__}: {error}.") from error


@contextmanager
def contained(kind: type[HalteresError], where: str) -> Iterator[None]:
    """As `boundary`, in a task, of code that is given what a model wrote: what would end the event
    loop leaves as `kind`, too.
    """
    with contained_exit(kind, where), boundary(kind, where):
        yield


@contextmanager
def contained_exit(kind: type[HalteresError], where: str) -> Iterator[None]:
    """SystemExit, and a cancellation that nobody asked this task for, leave as `kind`; all else
    passes through.
    """
    try:
        yield
    except (SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        raise kind(f"{where} raised {type(error).__name__}: {error}.") from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be, or None."""
    matches = difflib.get_close_matches(
        name[:MOST_COMPARED], list(known)[-MOST_KNOWN:], n=1, cutoff=0.5
    )
    if matches:
        return matches[0]
    return None


def unknown(
    kind: type[HalteresError], noun: str, name: str, known: Iterable[str], next: Advice = ""
) -> HalteresError:
    """The error for a name that is not among the known ones; offers the nearest.

    Of more than MOST_TOLD known ones it names the last few: they are the newest where there is an
    order at all.
    """
    names = list(known)
    listed, more = sorted(names), ""
    if len(names) > MOST_TOLD:
        listed = names[-FEW_TOLD:]
        more = f" and {len(names) - FEW_TOLD} more"
    guess = nearest(name, names)
    hint = f"Known: {', '.join(listed) or 'none'}{more}."
    if guess:
        hint = f"Did you mean '{guess}'?"
    return kind(
        f"There is no {noun} '{shortened(name)}'.", hint, next, did_you_mean=guess, allowed=listed
    )


def shortened(text: str, most: int = 200) -> str:
    """A text that a client sent, to be quoted in a sentence: of a long one, its beginning."""
    if len(text) <= most:
        return text
    return f"{text[:most]}… ({len(text)} characters)"


def size_text(size: float) -> str:
    """Bytes as people read them.

    >>> size_text(3 * 2**30)
    '3.0 GiB'
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def as_failed_future(error: HalteresError) -> dict[str, Any]:
    """The Tinker API's failed promise: the client raises RequestFailedError of that category.

    Clients keep the text alone: it begins with the error's code, which `failed_future` reads.
    """
    category = "server"
    if isinstance(error, UserError):
        category = "user"
    return {"error": f"[{error.code}] {error.sentence}", "category": category}


def failed_future(text: str) -> tuple[str, str]:
    """Code and sentence of a failed promise's text; an empty code where a service that is not ours
    wrote it.

    >>> failed_future("[nan_loss] The loss is not finite.")
    ('nan_loss', 'The loss is not finite.')
    """
    tagged = re.fullmatch(r"\[(\w+)\] (.*)", text, re.DOTALL)
    if tagged is None:
        return "", text
    return tagged[1], tagged[2]


def as_http(error: HalteresError) -> dict[str, Any]:
    """The body of a 4xx or 5xx answer; `detail` is what FastAPI-shaped clients show."""
    return {"detail": error.sentence, "code": error.code, **_given(error.details)}


def as_answer(error: HalteresError, write: Callable[[NextStep], str] = as_call) -> dict[str, Any]:
    """A tool's or command's answer, with calls as `write` has them."""
    following = without_logins_in(written(error.next, write))
    what = _joined(error.what, error.why)
    return {"error": what, "code": error.code, **_given(error.details), "next": following}


def as_failure(error: HalteresError) -> dict[str, str]:
    """What a process that ends with this error leaves for those who report its end."""
    parts = {"what": error.what, "why": error.why, "next": for_people(error.next)}
    return {"code": error.code, **{name: without_logins(text) for name, text in parts.items()}}


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()


def _joined(*parts: str) -> str:
    return without_logins(" ".join(part for part in parts if part))


def _given(details: dict[str, Any]) -> dict[str, Any]:
    return {name: without_logins_in(value) for name, value in details.items() if value is not None}
