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
from halteres.errors import HalteresError, InvalidConfig

LONGEST_CALL = 600
"""Characters of a call that is worth telling."""


@contextmanager
def mending(tool: str, changes: Mapping[str, Any], **arguments: Any) -> Iterator[None]:
    """An edit of a draft is tried inside: a refusal leaves with the call that would not be refused, and says that
    nothing was changed."""
    try:
        yield
    except InvalidConfig as error:
        if error.details.get("problems") and error.details.get("field"):
            error.why = " ".join(part for part in (error.why, "Nothing was changed.") if part)
            error.next = mended_call(error, tool, changes, **arguments) or error.next
        raise


def mended_call(error: HalteresError, tool: str, changes: Mapping[str, Any], **arguments: Any) -> str | None:
    """The call that would not be refused, where every problem has a suggestion."""
    mended = _mended({**changes, **error.details.get("coerced", {})}, error.details.get("problems") or [])
    call = worded(tool, **arguments, changes=mended) if mended else ""
    return call if 0 < len(call) <= LONGEST_CALL else None


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
