"""One call of a tool, whatever face it came through.

Owns: checking arguments, running the tool, turning whatever happens into an answer; that no answer holds NaN or a
secret, and that every one says what to do next.
Never: raises (cancellation aside), knows a wire.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from halteres.agent.caller import Caller
from halteres.agent.cleanup import clean_up
from halteres.agent.fitting import LONGEST, clipped, echoed, fitted
from halteres.agent.next_steps import next_call
from halteres.agent.table import BY_NAME
from halteres.agent.tool import Result, Tool
from halteres.agent.untrusted import marked
from halteres.errors import HalteresError, ServerError, UserError, as_answer, boundary, unknown
from halteres.redaction import Redactor

_log = logging.getLogger(__name__)


class Defect(ServerError):
    """Something nobody foresaw; `boundary` makes it of whatever was raised."""


def recorded(what: str, cause: BaseException) -> ServerError:
    """The error to tell; its cause is in the log."""
    number = secrets.token_hex(4)
    _log.error("%s (%s)", what, number, exc_info=cause)
    return ServerError(what, f"This is a defect of ours; the log has it as {number}.", "Report it.")


MAX_DEPTH: Final = 32


def check_depth(arguments: Any) -> None:
    """Raise UserError where values are nested deeper than MAX_DEPTH."""
    layer = [arguments]
    for _ in range(MAX_DEPTH):
        # Each value once: a few that hold each other twice would be as many as 2**MAX_DEPTH.
        layer = list({id(item): item for outer in layer for item in _items(outer)}.values())
    if layer:
        raise UserError("The arguments cannot be used.", f"They are nested deeper than {MAX_DEPTH} levels.")


def _items(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


LONGEST_ECHO = 120
"""Characters of a refused value that are told back."""

MOST_PROBLEMS = 8
"""So many are told; whoever has more mends those first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a call came to."""

    body: dict[str, Any]  # JSON, for people; `error` and `code` where it failed
    failed: bool = False
    status: int = 200  # for faces that speak HTTP
    images: tuple[Path, ...] = ()  # PNG files

    @property
    def for_agents(self) -> dict[str, Any]:
        """The body with the texts of others marked as data: what every face but those for people hands on."""
        return marked(self.body)


async def call(name: str, arguments: Mapping[str, Any] | None, caller: Caller) -> Reply:
    """Call a tool by name. Whatever goes wrong is an answer; only cancellation leaves as an exception."""
    try:
        with boundary(Defect, f"{name}"):
            found = _tool(name)
            checked = _checked(found, arguments or {})
            result = await _run(found, caller, checked)
            if not found.hints.read_only:  # something new was begun
                await asyncio.to_thread(clean_up)
            return _told(result)
    except HalteresError as error:
        return _refused(name, error, arguments or {})


def _told(result: Result) -> Reply:
    body = result.model_dump(mode="json", exclude_unset=True)
    last = body.pop("next")
    return Reply(body=_sealed({**body, "next": last}, result.longest), images=result.images)


async def _run(found: Tool, caller: Caller, arguments: Mapping[str, Any]) -> Result:
    """A tool that waits runs on the loop, the others in a thread: they read files and ask environments."""
    if inspect.iscoroutinefunction(found.function):
        return await found.function(caller, **arguments)
    return await caller.in_thread(found.name, partial(found.function, caller, **arguments))


def _tool(name: str) -> Tool:
    if name not in BY_NAME:
        raise unknown(UserError, "tool", name, BY_NAME)
    return BY_NAME[name]


def _checked(found: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given, validated. A text that is empty counts as not given (some hosts fill them in)."""
    check_depth(arguments)
    given = {name: value for name, value in arguments.items() if value != "" or name == "value"}
    try:
        model = found.arguments.model_validate(given)
    except ValidationError as error:
        raise _invalid(found, error) from error
    return {name: getattr(model, name) for name in model.model_fields_set}


def _invalid(found: Tool, error: ValidationError) -> UserError:
    known = list(found.arguments.model_fields)
    problems = [_problem(detail, known) for detail in error.errors(include_url=False)]
    sentences = "; ".join(f"{problem['field']}: {problem['rule']}" for problem in problems[:MOST_PROBLEMS])
    sentences += f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
    return UserError(
        f"{found.name} cannot be called so: {sentences}.",
        "",
        f"{found.name} takes: {', '.join(known) or 'no arguments'}",
        problems=problems,
        field=problems[0]["field"],
        allowed=known,
    )


def _problem(detail: Any, known: list[str]) -> dict[str, Any]:
    field = clipped(".".join(str(part) for part in detail["loc"]), LONGEST_ECHO)
    rule = detail["msg"].replace("Input should be", "must be")
    if detail["type"] == "extra_forbidden":
        rule = f"there is no such argument (there are: {', '.join(known) or 'none'})"
    return {"field": field, "rule": rule, "got": _short(detail["input"])}


def _short(value: Any) -> Any:
    """What was given, as it is where it is small: whoever sends a megabyte does not want it back."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_ECHO else f"{text[:LONGEST_ECHO]}..."


def _refused(name: str, error: HalteresError, arguments: Mapping[str, Any]) -> Reply:
    if isinstance(error, Defect):
        error = recorded(error.what, error.__cause__ or error)
    body = _with_few_problems(as_answer(error))
    takes = BY_NAME[name].arguments.model_fields if name in BY_NAME else {}
    body["next"] = next_call(name, error, _draft(arguments), takes)
    return Reply(body=_sealed(body), failed=True, status=error.status)


def _with_few_problems(body: dict[str, Any]) -> dict[str, Any]:
    """The first problems, and how many there are where that is not all."""
    problems = body.get("problems") or []
    few = [{**problem, "got": echoed(problem.get("got"), LONGEST_ECHO)} for problem in problems[:MOST_PROBLEMS]]
    count = {"num_problems": len(problems)} if len(problems) > MOST_PROBLEMS else {}
    return {**body, "problems": few, **count} if problems else body


def _draft(arguments: Any) -> str | None:
    """The draft that a call names; it may be one that no tool can be called with."""
    named = arguments.get("draft") if isinstance(arguments, Mapping) else None
    return named if isinstance(named, str) else None


def _sealed(body: dict[str, Any], longest: int = LONGEST) -> dict[str, Any]:
    return fitted(Redactor.of_this_process().json(_finite(body)), longest)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
