"""One call of a tool, whatever transport it came through: arguments checked, the tool run, whatever
happened an answer.

Arguments are read as the types that the tool declares: 3.0 and "3" for an integer, JSON in a text
for a list or an object, null for what is not given; a text as nothing else where the tool takes
texts. The answer says what was read as another type. What cannot be read, the tool refuses.

No answer holds NaN or a secret, and every one says what to do next. Only cancellation leaves a call
as an exception. After a call that began something, what HALTERES_HOME keeps besides runs is brought
within its bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from pydantic import ValidationError

from halteres.agent.answer_text import LONGEST, echoed, fitted, marked
from halteres.agent.drafts import drafts_folder, lock_of
from halteres.agent.next_call import next_call
from halteres.agent.status import LOOKS
from halteres.agent.table import BY_NAME
from halteres.agent.tool import Caller, Result, Tool, schema_of
from halteres.agent.trial.folder import Kind, TestFolder, tests_folder
from halteres.config import environ
from halteres.config.edits import schema_at
from halteres.documents import DocumentError, parse_json
from halteres.errors import (
    Conflict,
    HalteresError,
    NotFound,
    ServerError,
    UserError,
    as_answer,
    boundary,
    unknown,
)
from halteres.next_step import written
from halteres.redaction import Redactor
from halteres.runs.directory import runs_home
from halteres.runs.state import is_locked, lock_taken, read_state
from halteres.short_texts import clipped

_log = logging.getLogger(__name__)

NO_TEXT: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that no name, path or file can hold: NUL, and halves of a surrogate pair."""

RUNS: Final = ("run_id", "run_ids", "resume_from", "settings_of")
"""Arguments that name runs, which are looked up in a list: what no run is called is not found."""

EXACT: Final = 2**53  # below it a JSON number that is whole is one integer

_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
}

MAX_DEPTH: Final = 32
LONGEST_ECHO = 120  # characters of a refused value that are repeated in the answer
MOST_PROBLEMS = 8


class Defect(ServerError):
    """Something nobody foresaw; `boundary` makes it of whatever was raised."""


def record_defect(what: str, cause: BaseException) -> ServerError:
    """The error to answer with for a defect; its cause goes to the log."""
    number = secrets.token_hex(4)
    _log.error("%s (%s)", what, number, exc_info=cause)
    return ServerError(what, f"This is a defect of ours; the log has it as {number}.", "Report it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a call came to."""

    body: dict[str, Any]  # JSON, for people; `error` and `code` where it failed
    failed: bool = False
    status: int = 200  # for transports that speak HTTP
    images: tuple[Path, ...] = ()  # PNG files

    @property
    def for_agents(self) -> dict[str, Any]:
        """The body with the texts of others marked as data: for every reader but people."""
        return marked(self.body)


@dataclass(slots=True)
class _Arguments:
    """What a call gives."""

    values: dict[str, Any] = field(default_factory=dict)
    # those that came as another type, as they hold now
    coerced: dict[str, Any] = field(default_factory=dict)


async def call(name: str, arguments: Mapping[str, Any] | None, caller: Caller) -> Reply:
    """Call a tool by name. Whatever goes wrong is an answer; only cancellation leaves as an
    exception.
    """
    given = _Arguments()
    try:
        with boundary(Defect, name):
            if name not in BY_NAME:
                raise unknown(UserError, "tool", name, BY_NAME)
            found = BY_NAME[name]
            given = _read_arguments(found, arguments or {})
            checked = _checked(found, given.values, caller)
            # A tool that waits runs on the loop, the others in a thread: they read files and ask
            # environments.
            if inspect.iscoroutinefunction(found.function):
                result: Result = await found.function(caller, **checked)
            else:
                result = await caller.in_thread(name, partial(found.function, caller, **checked))
            if not found.hints.read_only:  # something new was begun
                await asyncio.to_thread(clean_up)
            body = result.model_dump(mode="json", exclude_unset=True, context=caller.write)
            if given.coerced:
                body["coerced"] = {**given.coerced, **body.get("coerced", {})}
            body["next"] = body.pop("next")  # the last key
            longest = result.longest
            if caller.takes_all:
                longest = sys.maxsize
            sealed = _sealed(body, longest)
            sealed.update({name: body[name] for name in result.handed_over})
            return Reply(body=sealed, images=result.images)
    except HalteresError as error:
        if given.coerced:
            error.details["coerced"] = {**given.coerced, **error.details.get("coerced", {})}
        return refused(name, error, arguments or {}, caller)


def _read_arguments(tool: Tool[...], given: Mapping[str, Any]) -> _Arguments:
    """The arguments that were given. An empty text counts as not given (some clients fill them in),
    and so does null where the tool has a default.

    Raises:
        UserError: a text holds what no text can hold, or is JSON with a key twice.
    """
    found = _Arguments()
    schema = schema_of(tool.arguments)
    for name, value in given.items():
        for text in () if name in RUNS else _texts(value):
            if NO_TEXT.search(text):
                why = "It holds a NUL character, or half of a surrogate pair."
                raise UserError(
                    f"{tool.name} cannot use '{name}'.", why, "Send it without.", field=name
                )
        if name == "value" or name not in tool.arguments.model_fields:
            found.values[name] = value
            continue
        try:
            read = _as_type(value, schema_at(schema, [name]).types)
        except DocumentError as error:
            what = f"{tool.name} cannot read '{name}'."
            raise UserError(what, f"{error}.", "Correct the JSON text.", field=name) from error
        if read == "":
            continue
        declared = tool.arguments.model_fields[name]
        if read is None and not declared.is_required():
            # Null for an argument whose default is null, too, changes nothing.
            if declared.default is not None:
                found.coerced[name] = declared.default
            continue
        found.values[name] = read
        if type(read) is not type(value):
            found.coerced[name] = echoed(read)
    return found


def _as_type(value: Any, types: set[str]) -> Any:
    """The value as one of these types; itself where it is none.

    Raises:
        DocumentError: it is JSON with a key twice.
    """
    if isinstance(value, str) and types and "string" not in types:
        return _from_text(value, types)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
    if is_whole and "integer" in types and "number" not in types:
        return int(value)
    return value


def _from_text(text: str, types: set[str]) -> Any:
    try:
        parsed = msgspec.json.decode(text.encode())
        # It is JSON; that each of its keys stands there once, msgspec does not look at.
        parse_json(text, most_values=len(text))
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        # Python's words for true and false
        parsed = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if parsed is None:
        return None
    if isinstance(parsed, float):
        parsed = _as_type(parsed, types)
    is_truth = isinstance(parsed, bool)
    fits = any(
        isinstance(parsed, _TYPES[one]) and is_truth == (one == "boolean")
        for one in types & _TYPES.keys()
    )
    if fits:
        return parsed
    return text


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, names of members included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one


def _checked(found: Tool[...], arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """The arguments that were given, validated.

    Raises:
        UserError: the tool does not take them.
    """
    if _is_deeper(arguments, MAX_DEPTH):
        raise UserError(
            "The arguments cannot be used.", f"They are nested deeper than {MAX_DEPTH} levels."
        )
    try:
        model = found.arguments.model_validate(arguments, context=caller)
    except ValidationError as error:
        raise _invalid(found, error) from error
    return {name: getattr(model, name) for name in model.model_fields_set}


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        items = None
    return items is not None and (
        levels == 0 or any(_is_deeper(item, levels - 1) for item in items)
    )


def _invalid(found: Tool[...], error: ValidationError) -> UserError:
    known = list(found.arguments.model_fields)
    problems: list[dict[str, Any]] = []
    for detail in error.errors(include_url=False):
        rule = detail["msg"].replace("Input should be", "must be")
        if detail["type"] == "extra_forbidden":
            rule = f"there is no such argument (there are: {', '.join(known) or 'none'})"
        field, got = ".".join(str(part) for part in detail["loc"]), detail["input"]
        if not (got is None or isinstance(got, bool | int | float | str)):
            got = clipped(repr(got), 1000)
        problems.append({"field": clipped(field, LONGEST_ECHO), "rule": rule, "got": got})
    sentences = "; ".join(
        f"{problem['field']}: {problem['rule']}" for problem in problems[:MOST_PROBLEMS]
    )
    more = ""
    if len(problems) > MOST_PROBLEMS:
        more = f"; and {len(problems) - MOST_PROBLEMS} more"
    what = f"{found.name} cannot be called so: {sentences}{more}."
    takes = f"{found.name} takes: {', '.join(known) or 'no arguments'}"
    return UserError(what, "", takes, problems=problems, field=problems[0]["field"], allowed=known)


def refused(name: str, error: HalteresError, arguments: Mapping[str, Any], caller: Caller) -> Reply:
    """The answer to a call that failed so."""
    if isinstance(error, Defect):
        error = record_defect(error.what, error.__cause__ or error)
    body = as_answer(error)
    if problems := body.get("problems"):
        shown = problems[:MOST_PROBLEMS]
        body["problems"] = [
            {**problem, "got": echoed(problem.get("got"), LONGEST_ECHO)} for problem in shown
        ]
        if len(problems) > MOST_PROBLEMS:
            body["num_problems"] = len(problems)
    takes = {}
    if name in BY_NAME:
        takes = BY_NAME[name].arguments.model_fields
    draft = arguments.get("draft")
    following = next_call(name, error, draft if isinstance(draft, str) else None, takes)
    body["next"] = written(following, caller.write)
    return Reply(body=_sealed(body), failed=True, status=error.status)


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


DAY_S, DRAFT_DAYS = 86_400.0, 30
TESTS, PICTURES = 50, 50
"""The newest that stay of tests, of each kind of evaluation, and of pictures (they are drawn again
when asked for).
"""

OWN_DRAFTS = ("mcp-", "page-")
"""How the handles of drafts begin that nobody chose: of stdio servers, of views of the page."""

REMOVING = ".gone-"  # how the name of a test begins while it is removed


def clean_up() -> None:
    """Remove what is beyond the bounds. Safe to do at any time, by several at once.

    Runs, models, tests under way and whatever somebody gave a name always stay. Drafts of stdio
    servers, which make one each, and of the page's views go DRAFT_DAYS after their last edit, last
    looks with the end of their run, killed starts after a day.
    """
    for remove in (_old_tests, _old_drafts, _ended_looks, _old_pictures, _unfinished_starts):
        with contextlib.suppress(OSError):  # removed by somebody else, or not ours to remove
            remove()


def _old_tests() -> None:
    for kind in get_args(Kind):
        for folder in _oldest(tests_folder().glob(f"{kind}-*"), beyond=TESTS):
            if not is_locked(TestFolder(folder).lock):
                folder.rename(folder.with_name(REMOVING + folder.name))  # no reader sees half of it
    for folder in tests_folder().glob(f"{REMOVING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _old_drafts() -> None:
    for file in drafts_folder().glob("*.json"):
        if file.name.startswith(OWN_DRAFTS) and _age_s(file) > DRAFT_DAYS * DAY_S:
            with contextlib.suppress(Conflict), lock_taken(lock_of(file)):
                file.unlink(missing_ok=True)
                lock_of(file).unlink(missing_ok=True)


def _ended_looks() -> None:
    for file in (environ.home() / LOOKS).glob("*.json"):
        try:
            ended = read_state(runs_home() / file.stem / "run.json").terminal
        except NotFound:
            ended = True
        if ended:
            file.unlink(missing_ok=True)


def _old_pictures() -> None:
    for file in _oldest((environ.home() / "cache").glob("*.png"), beyond=PICTURES):
        file.unlink(missing_ok=True)


def _unfinished_starts() -> None:
    for folder in runs_home().glob(".new-*"):
        if _age_s(folder) > DAY_S and not is_locked(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)


def _oldest(paths: Iterable[Path], beyond: int) -> list[Path]:
    """All but the newest `beyond`."""
    return sorted(paths, key=_age_s)[beyond:]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
