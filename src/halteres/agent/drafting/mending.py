"""The call that mends a refused edit.

Owns: putting suggestions in the place of what was refused; the `next` that works on the same draft.
Never: makes the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from halteres.agent.wording import worded
from halteres.config.edits import Edit
from halteres.errors import InvalidConfig


@contextmanager
def mending(tool: str, changes: Mapping[str, Any], **arguments: Any) -> Iterator[None]:
    """An edit of a draft is tried inside: a refusal leaves with the call that would not be refused, and says that
    nothing was changed."""
    try:
        yield
    except InvalidConfig as error:
        if error.details.get("problems") and error.details.get("field"):
            mended = _mended(changes, error.details["problems"])
            error.why = " ".join(part for part in (error.why, "Nothing was changed.") if part)
            error.next = worded(tool, **arguments, changes=mended) if mended else error.next
        raise


def _mended(changes: Mapping[str, Any], problems: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The changes with every suggestion followed; None where a problem has none."""
    mended = dict(changes)
    for problem in problems:
        name = next((one for one in changes if problem["field"] in (one, Edit(name=one, value=None).key)), None)
        meant, suggested = problem.get("did_you_mean"), problem.get("suggest")
        if meant and name:
            mended[meant] = mended.pop(name)
        elif suggested:
            mended[name or problem["field"].removeprefix("env.")] = suggested[0]
        else:
            return None
    return mended
