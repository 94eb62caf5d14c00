"""Drafts: an environment and edited settings, selected but not started; one per handle, in
HALTERES_HOME/drafts.

Edits of one draft follow one another, and a refused one leaves it as it was. Edits that can no
longer hold (the policy has the setting by now, or there is no such setting) are dropped, and the
answer says so once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent import open_access
from halteres.agent.answer_text import echoed, nonempty
from halteres.agent.tool import Caller, Facts
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
from halteres.config.edits import ALIASES, ENVIRONMENT, Edit, short_name
from halteres.config.files import Resolved, resolve_settings, settings_schema
from halteres.config.operator_policy import (
    Lock,
    is_own_wiring,
    load_policy,
    locks_beside,
    variant_lock,
)
from halteres.config.problem import LockedField, Problem, UnknownField, refusal
from halteres.config.program import Description, EnvironmentProgram, describe, program_of
from halteres.config.projection import Sources
from halteres.config.settings import ENV_WIRING, HEADLINE, SECTIONS, RunSettings, Settings
from halteres.errors import InvalidConfig, ServerError, UserError
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.runs.state import locked

_log = logging.getLogger(__name__)

_HANDLE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")  # not the names of folders

OPEN_DRAFTS = 200  # of whatever callers, beyond which one without the token makes no other

# how long an edit waits for another of the same draft, which may have to ask the environment
WITHIN_S = 10.0
NAME_LENGTH = 63  # of an environment's name in a run's: with the time it fits into run.name


class NoEnvironment(UserError):
    """The draft has no environment yet."""

    code = "no_environment"


class DraftNotStored(ServerError):
    """A draft's file could not be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What an agent has selected and edited."""

    handle: str
    # name, or absolute path of its file; of a family with the variant
    environment: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # section.field -> value, as it holds
    selected_at: float = 0.0  # unix seconds
    # of the run, unless it is edited: the environment's and the time of the selection (seed 002)
    name: str = ""

    @property
    def selected(self) -> str:
        """The environment. NoEnvironment where none was selected."""
        if self.environment is None:
            raise NoEnvironment("No environment selected. Use rl_select_environment(name) first.")
        return self.environment

    def resolve(self, changes: Mapping[str, Any] | None = None) -> Resolved:
        """The settings that a run would have now, under the policy in force, with the draft's
        changes or with these. Raises as `resolve_settings`.
        """
        own_name = Settings(run=RunSettings(name=self.name or None))
        changes = self.changes if changes is None else changes
        return resolve_settings(self.selected, None, (), base=own_name, changes=changes)

    def admitted(self, caller: Caller, changes: Mapping[str, Any] | None = None) -> Resolved:
        """As `resolve`, for a caller who sets or starts them. Raises TokenNeeded where that takes
        the token.
        """
        changes = self.changes if changes is None else changes
        open_access.check_changes(caller, self.selected, changes)
        resolved = self.resolve(changes)
        open_access.check_settings(caller, resolved)
        return resolved

    def edited(self, caller: Caller, changes: Mapping[str, Any]) -> tuple[Draft, Resolved]:
        """The draft with these settings changed too, and what it comes to.

        Raises:
            InvalidConfig: none of them can be.
            TokenNeeded: the caller may not set them.
        """
        _check_names(changes)
        overridden = {Edit(name=name, value=value).key for name, value in changes.items()}
        others = {key: value for key, value in self.changes.items() if key not in overridden}
        resolved = self.admitted(caller, {**others, **changes})
        values = by_key(resolved.settings)
        edited = [
            key
            for key, source in resolved.sources.items()
            if source == "edit" and key != ENVIRONMENT
        ]
        return replace(self, changes={key: values[key] for key in edited}), resolved


def _check_names(changes: Mapping[str, Any]) -> None:
    """Refuse an environment among the settings, and two names for one of them."""
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for name, value in changes.items():
        key = Edit(name=name, value=value).key
        if key == ENVIRONMENT:
            problems.append(
                Problem(field=name, got=value, rule="rl_select_environment selects another one")
            )
        elif key in seen:
            problems.append(
                Problem(field=name, got=value, rule=f"it is the same setting as {seen[key]}")
            )
        seen[key] = name
    if problems:
        raise refusal(problems)


def load_draft(caller: Caller, draft: str | None) -> Draft:
    """The draft of this handle, or the caller's own; without an environment where there is none
    yet.
    """
    return _read(_handle(caller, draft))


def _read(handle: str) -> Draft:
    try:
        return msgspec.json.decode(read_regular(_file(handle)), type=Draft)
    except FileNotFoundError:
        pass
    except (OSError, *NOT_JSON) as error:
        _log.warning("The draft %s cannot be read, and counts as empty: %s", handle, error)
    return Draft(handle=handle)


def save_draft(draft: Draft) -> None:
    """Keep a draft. DraftNotStored where the disk will not have it."""
    with _storing(draft.handle):
        # A key may be among the settings, and a draft is the one place that has it until there is a
        # run.
        replace_file(_file(draft.handle), msgspec.json.encode(draft), private=True)


@contextmanager
def editing(caller: Caller, draft: str | None) -> Iterator[Draft]:
    """The draft, for whoever will change it: nobody else changes it meanwhile.

    Raises:
        NotReady: somebody else does, for longer than WITHIN_S.
        DraftNotStored: the disk will not have it.
        Busy: there are as many as callers without the token may make.
    """
    handle = _handle(caller, draft)
    if caller.is_open and not _file(handle).exists():
        open_access.check_number(
            "drafts", sum(1 for _ in drafts_folder().glob("*.json")), OPEN_DRAFTS
        )
    with ExitStack() as held:
        with _storing(handle):
            _file(handle).parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(
                locked(
                    lock_of(_file(handle)), WITHIN_S, f"The draft '{handle}' is just being edited."
                )
            )
        yield _read(handle)


def drafts_folder() -> Path:
    """The folder of all drafts: HALTERES_HOME/drafts."""
    return environ.home() / "drafts"


def lock_of(file: Path) -> Path:
    """What is held while a draft's file is edited."""
    return file.with_name(f".{file.stem}.lock")


def _file(handle: str) -> Path:
    return drafts_folder() / f"{handle}.json"


def _handle(caller: Caller, draft: str | None) -> str:
    handle = draft or caller.draft
    if not _HANDLE.fullmatch(handle):
        raise UserError(
            f"'{handle[:80]}' is no handle of a draft.",
            "It is 1 to 64 letters, digits, '.', '_' and '-', but not '.' or '..'.",
            field="draft",
        )
    return handle


@contextmanager
def _storing(handle: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DraftNotStored(
            f"The draft '{handle}' cannot be kept in {drafts_folder()}.",
            f"{error.strerror or error}.",
            "Make room there, or set HALTERES_HOME to another folder.",
        ) from error


def described(settings: Settings) -> tuple[EnvironmentProgram, Description, dict[str, Any]]:
    """The environment of a draft's settings, what it says of itself with them, and all settings
    that it is run with. EnvironmentBroken, InvalidConfig: it cannot be run so.
    """
    run, program = settings.run, program_of(settings.run)
    own = {name: value for name, value in settings.env.items() if name not in ENV_WIRING}
    env = {**settings.env, "seed": run.seed, "success_threshold": run.success_threshold}
    return program, describe(program, own), env


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """An environment newly selected."""

    draft: Draft
    file_path: str  # the environment's, absolute
    resolved: Resolved
    discarded: dict[str, Any]  # edits that the draft had before


def choose(
    caller: Caller, draft: str | None, environment: str, changes: Mapping[str, Any]
) -> Selection:
    """Select an environment with its own defaults, and edit.

    Raises:
        EnvironmentNotFound, EnvironmentBroken, InvalidConfig, TokenNeeded: the draft is as it was.
    """
    open_access.check_environment(caller, environment)
    found = found_environment(environment)
    now = time.time()
    fresh = Draft(
        handle=_handle(caller, draft),
        environment=reference(environment, found.name, found.file_path),
        selected_at=now,
        name=f"{in_file_name(found.name)[:NAME_LENGTH]}-{datetime.fromtimestamp(now).astimezone():%Y%m%d-%H%M%S}",
    )
    after, resolved = fresh.edited(caller, changes)  # may take seconds: nobody else waits for them
    with editing(caller, draft) as before:
        save_draft(after)
    return Selection(
        draft=after, file_path=found.file_path, resolved=resolved, discarded=dict(before.changes)
    )


def found_environment(environment: str) -> EnvironmentFile:
    """The environment of this name, or in this file. A path may begin at the folder of this
    process, which its user need not know; at a folder of environments; at the one around it, as a
    workspace's texts have it.

    Raises:
        EnvironmentNotFound: neither, or a file that is not Python; `available` names, and
            `did_you_mean`.
        EnvironmentBroken: its file cannot be used.
    """
    base, variant = split_name(environment)
    folders = environ.environment_folders()
    begins = [Path.cwd(), *folders, *(folder.parent for folder in folders)] if is_path(base) else []
    places = list(dict.fromkeys(begin / Path(base).expanduser() for begin in begins))
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
        why = f"There is no file {', '.join(map(str, places))}." if places else ""
        raise EnvironmentNotFound(
            f"Environment '{environment}' not found.",
            f"Did you mean '{guess}'?" if guess else why,
            available=[one.name for one in discover().environments],
            did_you_mean=guess,
        ) from error


def current(caller: Caller, handle: str | None) -> tuple[Draft, Mapping[str, Any]]:
    """The draft of this handle as it can be now, and edits that it can have no more (section.field
    -> value): they are discarded for good.
    """
    draft = load_draft(caller, handle)
    possible, discarded = without_impossible_edits(draft)
    if discarded:
        with editing(caller, handle) as now:
            if now == draft:  # else somebody has edited it meanwhile, and has discarded them too
                save_draft(possible)
    return possible, discarded


def without_impossible_edits(draft: Draft) -> tuple[Draft, Mapping[str, Any]]:
    """The draft with the edits that can still be, and the others. Raises as `Draft.resolve`, but
    for what is wrong with an edit.
    """
    if draft.environment is None or not draft.changes:
        return draft, {}
    try:
        draft.resolve()
        return draft, {}
    except InvalidConfig as error:
        refused = {
            problem["field"] for problem in error.details.get("problems") or ()
        } & draft.changes.keys()
    gone: dict[str, Any] = {}
    for key in refused:
        try:
            draft.resolve({key: draft.changes[key]})
        except (LockedField, UnknownField):
            gone[key] = draft.changes[key]
        except InvalidConfig:  # a value that can be no more is its maker's to change
            pass
    return replace(
        draft, changes={k: v for k, v in draft.changes.items() if k not in gone}
    ) if gone else draft, gone


def brief(resolved: Resolved) -> dict[str, Any]:
    """The headline settings, what the environment says of the trainer's, and what was edited."""
    values, sources = by_key(resolved.settings), resolved.sources
    environments = [key for key in sources if _is_environments_default(key, sources)]
    edited = [key for key, source in sources.items() if source == "edit" and key != ENVIRONMENT]
    shown = dict.fromkeys([*HEADLINE, *environments, *edited])
    return {
        short_name(key, resolved.settings.env): echoed(values[key])
        for key in shown
        if key in values
    }


def _is_environments_default(key: str, sources: Sources) -> bool:
    """Whether it is a setting of the trainer whose value is the environment's default of it."""
    return key.startswith("trainer.") and sources.get(key) == "config_init"


def diff(before: Resolved, after: Resolved) -> dict[str, list[Any]]:
    """What holds differently: name -> [before, after]."""
    old, new = by_key(before.settings), by_key(after.settings)
    names: Collection[str] = after.settings.env
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {short_name(key, names): [echoed(old.get(key)), echoed(new.get(key))] for key in changed}


def by_key(settings: Settings) -> dict[str, Any]:
    """section.field -> value, as JSON."""
    sections = settings.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }


_TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}
_BOUNDS = {
    "exclusiveMinimum": "> ",
    "minimum": ">= ",
    "exclusiveMaximum": "< ",
    "maximum": "<= ",
    "minLength": "length >= ",
    "maxLength": "length <= ",
    "minItems": "length >= ",
    "maxItems": "length <= ",
}


class SettingRow(Facts):
    """A setting in an answer (the seeds' keys first): in brief its name and value, in full all that
    is known.
    """

    name: str
    type: str = ""
    default: Any = None
    description: str = ""
    current_value: Any
    locked_value: Any = None
    section: str = ""
    allowed: list[Any] = []
    range: str = ""
    required: bool = False
    same_as: str = ""
    why: str = ""  # it is locked


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a draft."""

    key: str  # section.field
    name: str  # the shortest that is clear; or the seeds' name
    schema: Mapping[str, Any]  # JSON Schema of the field, references followed
    default: Any
    current: Any
    is_edited: bool
    is_environments_default: bool = False  # of the trainer's, where the environment says the value
    is_required: bool = False
    lock: Lock | None = None
    same_as: str | None = None  # where this is the seeds' name for it

    @property
    def brief(self) -> SettingRow:
        """Name and value."""
        return SettingRow(name=self.name, current_value=self.current, **self._locked_value)

    @property
    def full(self) -> SettingRow:
        """All that is known."""
        options = [self.schema, *self.schema.get("anyOf", ())]
        types = dict.fromkeys(
            _TYPES.get(str(one["type"]), str(one["type"])) for one in options if "type" in one
        )
        bounds = [
            f"{sign}{one[name]}" for one in options for name, sign in _BOUNDS.items() if name in one
        ]
        enums = (one.get("enum", [one["const"]] if "const" in one else ()) for one in options)
        return SettingRow(
            name=self.name,
            type=" | ".join(types) or "any",
            default=self.default,
            description=self.schema.get("description", ""),
            current_value=self.current,
            **self._locked_value,
            section=self.key.partition(".")[0],
            **nonempty(
                allowed=[value for values in enums for value in values],
                range=", ".join(bounds),
                required=self.is_required or None,
                same_as=self.same_as,
                why=self.lock.why if self.lock else "",
            ),
        )

    @property
    def _locked_value(self) -> dict[str, Any]:
        return {"locked_value": self.lock.value} if self.lock else {}

    @property
    def is_headline(self) -> bool:
        """Whether it belongs to the first that one wants to know."""
        is_first = self.same_as is None and (self.key in HEADLINE or self.is_environments_default)
        return is_first or self.is_edited or self.name == "wandb_name"


def settings_of(resolved: Resolved) -> list[Setting]:
    """Every setting of a draft: the environment's, then ours, then the seeds' names for ours."""
    program, model = program_of(resolved.settings.run), resolved.settings.inference.model
    described = describe(program, {})
    fields, sources, ours = resolved.settings.env, resolved.sources, settings_schema()["$defs"]
    theirs = described.schema or {"properties": {name: {} for name in fields}}
    sections = {
        "env": theirs,
        **{section: ours[kind.__name__] for section, kind in SECTIONS.items()},
    }
    schemas = {
        f"{section}.{name}": one
        for section, schema in sections.items()
        for name, one in followed(schema)
    }
    name = resolved.settings.run.default_name("{run_id}")
    values = _in_force(resolved.settings) | (
        {} if sources.get("run.name") == "edit" else {"run.name": name}
    )
    defaults = {
        **{f"env.{name}": value for name, value in described.config.items()},
        **_in_force(Settings()),
        **{f"trainer.{name}": value for name, value in described.trainer.items()},
        "run.name": name,
    }
    locks = locks_beside({**described.config, "tokenizer_name": model}, load_policy())
    locks = {**locks, **({variant.key: variant} if (variant := variant_lock(program)) else {})}
    # from settings of ours
    filled_in = {f"env.{name}" for name in ENV_WIRING if not is_own_wiring(name)}

    def setting(key: str, name: str, same_as: str | None = None) -> Setting:
        lock = locks.get(key)
        return Setting(
            key=key,
            name=name,
            schema=schemas[key],
            default=defaults.get(key),
            current=lock.value if lock else values.get(key),
            is_edited=sources.get(key) == "edit" and same_as is None,
            is_environments_default=_is_environments_default(key, sources),
            is_required=key in {f"env.{name}" for name in theirs.get("required", ())},
            lock=lock,
            same_as=same_as,
        )

    return [
        *(
            setting(key, short_name(key, fields))
            for key in schemas
            if key != ENVIRONMENT and key not in filled_in
        ),
        *(
            setting(key, name, same_as=short_name(key, fields))
            for name, key in ALIASES.items()
            if name in ENV_WIRING
        ),
    ]


def _in_force(settings: Settings) -> dict[str, Any]:
    """Every value; where a setting is left open, the variable's."""
    run = settings.run
    return {
        **by_key(settings),
        "env.use_wandb": "wandb" in settings.sinks,
        "run.wandb_project": run.project,
        "run.wandb_entity": run.wandb_entity or environ.wandb_entity(),
    }


def followed(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of an object's schema, with what they refer to in its place."""
    known = schema.get("$defs", {})
    for name, one in schema.get("properties", {}).items():
        yield name, {**known.get(str(one.get("$ref", "")).rpartition("/")[2], {}), **one}
