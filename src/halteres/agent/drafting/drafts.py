"""Drafts: an environment and edited settings, selected but not started; one per handle, in HALTERES_HOME/drafts.

Edits of one draft follow one another, and a refused one leaves it as it was. Edits that can no longer hold (the policy
has the setting by now, or there is no such setting) are dropped and told once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent.tool import Caller
from halteres.config import environ
from halteres.config.discovery import (
    EnvironmentFile,
    EnvironmentNotFound,
    discover,
    find_environment,
    in_file_name,
    is_path,
    joined_name,
    reference,
    split_name,
)
from halteres.config.edits import ENVIRONMENT, Edit
from halteres.config.files import Resolved, resolve_settings
from halteres.config.problem import LockedField, Problem, UnknownField, refusal
from halteres.config.settings import RunSettings, Settings
from halteres.errors import InvalidConfig, ServerError, UserError
from halteres.files import replace_file
from halteres.runs.lock import locked

_log = logging.getLogger(__name__)


def found_environment(environment: str) -> EnvironmentFile:
    """The environment of this name, or in this file.

    Raises:
        EnvironmentNotFound: neither, or a file that is not Python; `available` names, and `did_you_mean`.
        EnvironmentBroken: its file cannot be used.
    """
    base, variant = split_name(environment)
    places = _places(base)
    file = next((place for place in places if place.is_file()), None)
    if file is not None and file.suffix != ".py":
        raise EnvironmentNotFound(
            f"Environment '{environment}' not found: it is not a .py file.",
            available=[one.name for one in discover().environments],
        )
    try:
        return find_environment(environment if file is None else joined_name(str(file), variant))
    except EnvironmentNotFound as error:
        guess = error.details.get("did_you_mean")
        raise EnvironmentNotFound(
            f"Environment '{environment}' not found.",
            f"Did you mean '{guess}'?" if guess else _looked_for(places),
            available=[one.name for one in discover().environments],
            did_you_mean=guess,
        ) from error


def _places(environment: str) -> list[Path]:
    """Where a path may lead: from the folder of this process, which its user need not know; from a folder of
    environments; from the one around it, as a workspace's texts have it (environments/sums.py). None of a name."""
    if not is_path(environment):
        return []
    folders = environ.environment_folders()
    begins = [Path.cwd(), *folders, *(folder.parent for folder in folders)]
    return list(dict.fromkeys(begin / Path(environment).expanduser() for begin in begins))


def _looked_for(places: list[Path]) -> str:
    return f"There is no file {', '.join(map(str, places))}." if places else ""


_HANDLE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")  # not the names of folders

WITHIN_S = 10.0
"""How long an edit waits for another of the same draft, which may have to ask the environment."""

NAME_LENGTH = 63
"""Of an environment's name in a run's: with the time it fits into run.name."""


class NoEnvironment(UserError):
    """The draft has no environment yet."""

    code = "no_environment"


class DraftNotKept(ServerError):
    """A draft's file could not be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What an agent has selected and edited."""

    handle: str
    environment: str | None = None  # name, or absolute path of its file; of a family with the variant
    changes: Mapping[str, Any] = field(default_factory=dict)  # section.field -> value, as it holds
    selected_at: float = 0.0  # unix seconds
    name: str = ""  # of the run, unless it is edited: the environment's and the time of the selection (seed 002)

    @property
    def selected(self) -> str:
        """The environment. NoEnvironment where none was selected."""
        if self.environment is None:
            raise NoEnvironment("No environment selected. Use rl_select_environment(name) first.")
        return self.environment

    def check_selected(self) -> None:
        """Raise NoEnvironment where none was selected."""
        _ = self.selected

    def resolve(self) -> Resolved:
        """The settings that a run would have now, under the policy in force. Raises as `resolve_settings`."""
        return self._with(self.changes)

    def edited(self, changes: Mapping[str, Any]) -> tuple[Draft, Resolved]:
        """The draft with these settings changed too, and what it comes to. InvalidConfig: none of them can be."""
        _check_names(changes)
        overridden = {Edit(name=name, value=value).key for name, value in changes.items()}
        kept = {key: value for key, value in self.changes.items() if key not in overridden}
        resolved = self._with({**kept, **changes})
        values = resolved.settings.model_dump(mode="json")
        edits = {
            key: values[section][name]
            for key, source in resolved.sources.items()
            if source == "edit" and key != ENVIRONMENT
            for section, _, name in [key.partition(".")]
        }
        return replace(self, changes=edits), resolved

    def _with(self, changes: Mapping[str, Any]) -> Resolved:
        named = Settings(run=RunSettings(name=self.name or None))
        return resolve_settings(self.selected, None, (), base=named, changes=changes)


def load_draft(caller: Caller, draft: str | None) -> Draft:
    """The draft of this handle, or the caller's own; without an environment where there is none yet."""
    return _read(_handle(caller, draft))


def save_draft(draft: Draft) -> None:
    """Keep a draft. DraftNotKept where the disk will not have it."""
    with _kept(draft.handle):
        replace_file(_file(draft.handle), msgspec.json.encode(draft))


@contextmanager
def editing(caller: Caller, draft: str | None) -> Iterator[Draft]:
    """The draft, for whoever will change it: nobody else changes it meanwhile.

    Raises:
        NotReady: somebody else does, for longer than WITHIN_S.
        DraftNotKept: the disk will not have it.
    """
    handle = _handle(caller, draft)
    with ExitStack() as held:
        with _kept(handle):
            _file(handle).parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(lock_of(_file(handle)), WITHIN_S, f"The draft '{handle}' is just being edited."))
        yield _read(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """An environment newly selected."""

    draft: Draft
    file_path: str  # the environment's, absolute
    resolved: Resolved
    discarded: dict[str, Any]  # edits that the draft had before


def choose(caller: Caller, draft: str | None, environment: str, changes: Mapping[str, Any]) -> Selection:
    """Select an environment with its own defaults, and edit.

    Raises:
        EnvironmentNotFound, EnvironmentBroken, InvalidConfig: the draft is as it was.
    """
    found = found_environment(environment)
    now = time.time()
    fresh = Draft(
        handle=_handle(caller, draft),
        environment=reference(environment, found.name, found.file_path),
        selected_at=now,
        name=f"{in_file_name(found.name)[:NAME_LENGTH]}-{datetime.fromtimestamp(now).astimezone():%Y%m%d-%H%M%S}",
    )
    after, resolved = fresh.edited(changes)  # may take seconds: nobody else waits for them
    with editing(caller, draft) as before:
        save_draft(after)
    return Selection(draft=after, file_path=found.file_path, resolved=resolved, discarded=dict(before.changes))


def _check_names(changes: Mapping[str, Any]) -> None:
    """Refuse an environment among the settings, and two names for one of them."""
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for name, value in changes.items():
        key = Edit(name=name, value=value).key
        if key == ENVIRONMENT:
            problems.append(Problem(field=name, got=value, rule="rl_select_environment selects another one"))
        elif key in seen:
            problems.append(Problem(field=name, got=value, rule=f"it is the same setting as {seen[key]}"))
        seen[key] = name
    if problems:
        raise refusal(problems)


def _handle(caller: Caller, draft: str | None) -> str:
    handle = draft or caller.draft
    if not _HANDLE.fullmatch(handle):
        raise UserError(
            f"'{handle[:80]}' is no handle of a draft.",
            "It is 1 to 64 letters, digits, '.', '_' and '-', but not '.' or '..'.",
            field="draft",
        )
    return handle


def drafts_home() -> Path:
    """The folder of all drafts: HALTERES_HOME/drafts."""
    return environ.home() / "drafts"


def lock_of(file: Path) -> Path:
    """What is held while a draft's file is edited."""
    return file.with_name(f".{file.stem}.lock")


def _file(handle: str) -> Path:
    return drafts_home() / f"{handle}.json"


def _read(handle: str) -> Draft:
    try:
        return msgspec.json.decode(_file(handle).read_bytes(), type=Draft)
    except FileNotFoundError:
        return Draft(handle=handle)
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("The draft %s cannot be read, and counts as empty: %s", handle, error)
        return Draft(handle=handle)


@contextmanager
def _kept(handle: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DraftNotKept(
            f"The draft '{handle}' cannot be kept in {_file(handle).parent}.",
            f"{error.strerror or error}.",
            "Make room there, or set HALTERES_HOME to another folder.",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """A draft, and what was set aside of it."""

    draft: Draft
    discarded: Mapping[str, Any]  # section.field -> value


def sifted(draft: Draft) -> Sifted:
    """The draft with the edits that can still be. Raises as `Draft.resolve`, but for what is wrong with an edit."""
    gone = {key: draft.changes[key] for key in _refused(draft) if _is_gone(draft, key)}
    kept = {key: value for key, value in draft.changes.items() if key not in gone}
    return Sifted(draft=replace(draft, changes=kept) if gone else draft, discarded=gone)


def current(caller: Caller, handle: str | None) -> Sifted:
    """The draft of this handle as it can be now; what is set aside is so for good, and told once."""
    draft = load_draft(caller, handle)
    found = sifted(draft)
    if found.discarded:
        with editing(caller, handle) as now:
            if now == draft:  # else somebody has edited it meanwhile, and has sifted it too
                save_draft(found.draft)
    return found


def _refused(draft: Draft) -> list[str]:
    """Edits that are named in the refusal of the draft's settings."""
    if draft.environment is None or not draft.changes:
        return []
    try:
        draft.resolve()
    except InvalidConfig as error:
        named = {problem["field"] for problem in error.details.get("problems") or ()}
        return [key for key in draft.changes if key in named]
    return []


def _is_gone(draft: Draft, key: str) -> bool:
    try:
        replace(draft, changes={key: draft.changes[key]}).resolve()
    except (LockedField, UnknownField):
        return True
    except InvalidConfig:
        return False
    return False
