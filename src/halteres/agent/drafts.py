"""Drafts: an environment and edited settings, selected but not started; one per handle, in
HALTERES_HOME/drafts. Callers without the token have their own, in drafts/open: what was prepared
with the token, no other changes, starts or reads.

Edits of one draft follow one another, and a refused one leaves it as it was. Edits that can no
longer hold (the policy has the setting by now, or there is no such setting) are dropped, and the
answer says so once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
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
from halteres.config.files import Sources
from halteres.config.operator_policy import (
    Lock,
    is_own_wiring,
    load_policy,
    locks_beside,
    variant_lock,
)
from halteres.config.problem import LockedField, Problem, UnknownField, refusal
from halteres.config.resolution import Resolved, resolve_settings
from halteres.config.settings import (
    ENV_WIRING,
    HEADLINE,
    SECTIONS,
    Settings,
    by_key,
    settings_schema,
)
from halteres.errors import InvalidConfig, ServerError, UserError
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.runs.directory import RunDirectory
from halteres.runs.state import locked

_log = logging.getLogger(__name__)

_HANDLE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")  # not the names of folders

OPEN_DRAFTS = 200  # of callers without the token, beyond which they make no other

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
    is_open: bool = False  # of callers without the token
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
        if changes is None:
            changes = self.changes
        resolved = resolve_settings(self.selected, None, (), changes=changes)
        if not self.name or "run.name" in resolved.sources:
            return resolved
        run = resolved.settings.run.model_copy(update={"name": self.name})
        return replace(resolved, settings=resolved.settings.model_copy(update={"run": run}))

    def with_edits_of(self, resolved: Resolved) -> Draft:
        """The draft with what was edited in these settings as its changes."""
        values, sources = by_key(resolved.settings), resolved.sources.items()
        keys = [key for key, source in sources if source == "edit" and key != ENVIRONMENT]
        return replace(self, changes={key: values[key] for key in keys})


def admitted(caller: Caller, draft: Draft, changes: Mapping[str, Any] | None = None) -> Resolved:
    """The settings of a draft with its changes or with these, for a caller who sets or starts them.

    Raises:
        TokenNeeded: that takes the token. Else as `resolve_settings`.
    """
    if changes is None:
        changes = draft.changes
    if caller.is_open:
        open_access.check_changes(draft.selected, changes)
    resolved = draft.resolve(changes)
    if caller.is_open:
        open_access.check_settings(resolved.settings, resolved.sources)
    return resolved


def edited(caller: Caller, draft: Draft, changes: Mapping[str, Any]) -> Resolved:
    """The draft's settings with these changed too. Its earlier changes that can be no more are left
    out, and are in `discarded`.

    Raises:
        InvalidConfig: none of them can be.
        TokenNeeded: the caller may not set them.
    """
    _check_names(changes)
    return _as_it_can_be(draft, changes, partial(admitted, caller, draft))


def _as_it_can_be(
    draft: Draft, changes: Mapping[str, Any], resolve: Callable[[Mapping[str, Any]], Resolved]
) -> Resolved:
    overridden = {Edit(name=name, value=value).key for name, value in changes.items()}
    kept = {key: value for key, value in draft.changes.items() if key not in overridden}
    try:
        return resolve({**kept, **changes})
    except InvalidConfig as error:
        gone = _impossible(draft, kept, error)
        if not gone:
            raise
    kept = {key: value for key, value in kept.items() if key not in gone}
    return replace(resolve({**kept, **changes}), discarded=gone)


def _impossible(draft: Draft, changes: Mapping[str, Any], error: InvalidConfig) -> dict[str, Any]:
    """The draft's changes that an error names and that no value could mend: their setting is locked
    by now, or gone. A change of which only the value is refused is left to the user.
    """
    refused = {problem["field"] for problem in error.details.get("problems") or ()}
    gone: dict[str, Any] = {}
    for key in refused & changes.keys():
        try:
            draft.resolve({key: changes[key]})
        except (LockedField, UnknownField):
            gone[key] = changes[key]
        except InvalidConfig:
            continue
    return gone


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
    return _read(_empty(caller, draft))


def _empty(caller: Caller, draft: str | None) -> Draft:
    return Draft(handle=_handle(caller, draft), is_open=caller.is_open)


def _read(empty: Draft) -> Draft:
    try:
        found = msgspec.json.decode(read_regular(_file(empty)), type=Draft)
        return replace(found, handle=empty.handle, is_open=empty.is_open)
    except FileNotFoundError:
        pass
    except (OSError, *NOT_JSON) as error:
        _log.warning("The draft %s cannot be read, and counts as empty: %s", empty.handle, error)
    return empty


def save_draft(draft: Draft) -> None:
    """Keep a draft. DraftNotStored where the disk will not have it."""
    with _storing(draft.handle):
        # A key may be among the settings, and a draft is the one place that has it until there is a
        # run.
        replace_file(_file(draft), msgspec.json.encode(draft), private=True)


@contextmanager
def editing(caller: Caller, draft: str | None) -> Iterator[Draft]:
    """The draft, for a caller that will change it: no other changes it meanwhile.

    Raises:
        NotReady: another caller changes it, for longer than WITHIN_S.
        DraftNotStored: the disk will not have it.
        Busy: there are as many as callers without the token may make.
    """
    empty = _empty(caller, draft)
    file = _file(empty)
    if caller.is_open and not file.exists():
        num_drafts = sum(1 for _ in file.parent.glob("*.json"))
        open_access.check_number("drafts", num_drafts, OPEN_DRAFTS)
    with ExitStack() as held:
        with _storing(empty.handle):
            file.parent.mkdir(parents=True, exist_ok=True)
            busy = f"The draft '{empty.handle}' is just being edited."
            held.enter_context(locked(lock_of(file), WITHIN_S, busy))
        yield _read(empty)


def drafts_folder() -> Path:
    """The folder of all drafts: HALTERES_HOME/drafts."""
    return environ.home() / "drafts"


def lock_of(file: Path) -> Path:
    """What is held while a draft's file is edited."""
    return file.with_name(f".{file.stem}.lock")


def _file(draft: Draft) -> Path:
    if draft.is_open:
        folder = drafts_folder() / "open"
    else:
        folder = drafts_folder()
    return folder / f"{draft.handle}.json"


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


def choose(
    caller: Caller,
    draft: str | None,
    environment: str,
    changes: Mapping[str, Any],
    like: RunDirectory | None = None,
) -> Resolved:
    """Select an environment with its own defaults, or with the settings of a run as far as they can
    hold now, and edit; what the draft had been changed to before is discarded.

    Raises:
        EnvironmentNotFound, EnvironmentBroken, InvalidConfig, TokenNeeded: the draft is as it was.
        RunUnreadable: the run's settings are damaged; the draft is as it was.
    """
    if caller.is_open:
        open_access.check_environment(environment)
    found = found_environment(environment)
    now = time.time()
    fresh = replace(
        _empty(caller, draft),
        environment=reference(environment, found.name, found.file_path),
        selected_at=now,
        name=f"{in_file_name(found.name)[:NAME_LENGTH]}-{datetime.fromtimestamp(now).astimezone():%Y%m%d-%H%M%S}",
    )
    # may take seconds, in which the draft is free for others
    if like is not None:
        fresh = _with_settings_of(caller, fresh, like)
    resolved = edited(caller, fresh, changes)
    with editing(caller, draft) as before:
        save_draft(fresh.with_edits_of(resolved))
    return replace(resolved, discarded=before.changes)


def _with_settings_of(caller: Caller, draft: Draft, run: RunDirectory) -> Draft:
    """The draft with every setting as it held in a run, as far as that can be here."""
    held = _settings_in(run)
    # what was set comes first: defaults that follow from it need not be set
    own = {key: held[key] for key in run.own_settings() if key in held}
    resolved = _with_what_can_be(caller, draft, own)
    values = by_key(resolved.settings)
    others = {
        key: value
        for key, value in held.items()
        if values.get(key) != value and resolved.sources.get(key) != "policy"
    }
    if others:
        resolved = _with_what_can_be(caller, draft, {**own, **others})
    return draft.with_edits_of(resolved)


def _settings_in(run: RunDirectory) -> dict[str, Any]:
    """section.field -> value of a run, without its environment and its name."""
    values = by_key(run.settings())
    return {key: value for key, value in values.items() if key not in (ENVIRONMENT, "run.name")}


def _with_what_can_be(caller: Caller, draft: Draft, changes: Mapping[str, Any]) -> Resolved:
    """The draft with these changes, without those that are refused. Raises as `admitted`, where it
    is refused without them too.
    """
    kept = dict(changes)
    while True:
        try:
            return admitted(caller, draft, kept)
        except InvalidConfig as error:
            refused = {problem["field"] for problem in error.details.get("problems") or ()}
            if not refused & kept.keys():
                raise
            kept = {key: value for key, value in kept.items() if key not in refused}


def differences(run: RunDirectory, resolved: Resolved) -> dict[str, list[Any]]:
    """Settings that hold otherwise than in a run: name -> [there, here]."""
    before = _settings_in(run)
    names = {short_name(key, resolved.settings.env) for key in before}
    changed = diff(before, resolved.settings)
    return {name: pair for name, pair in changed.items() if name in names}


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
    begins = []
    if is_path(base):
        begins = [Path.cwd(), *folders, *(folder.parent for folder in folders)]
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
        why = ""
        if places:
            why = f"There is no file {', '.join(map(str, places))}."
        raise EnvironmentNotFound(
            f"Environment '{environment}' not found.",
            f"Did you mean '{guess}'?" if guess else why,
            available=[one.name for one in discover().environments],
            did_you_mean=guess,
        ) from error


def current(caller: Caller, handle: str | None, *, to_run: bool = False) -> Resolved:
    """The settings that the draft of this handle comes to now. Changes that cannot hold any more
    are discarded for good. `to_run`: the caller runs something with it. Raises as `edited`.
    """
    draft = load_draft(caller, handle)
    if to_run:
        resolve = partial(admitted, caller, draft)
    else:
        resolve = draft.resolve
    resolved = _as_it_can_be(draft, {}, resolve)
    if resolved.discarded:
        with editing(caller, handle) as now:
            # else another caller has edited it meanwhile, and has discarded them too
            if now == draft:
                save_draft(draft.with_edits_of(resolved))
    return resolved


def brief(settings: Settings, sources: Sources) -> dict[str, Any]:
    """The headline settings, what the environment says of the trainer's, and what was edited."""
    values = by_key(settings)
    environments = [key for key in sources if _is_environments_default(key, sources)]
    edited = [key for key, source in sources.items() if source == "edit" and key != ENVIRONMENT]
    shown = dict.fromkeys([*HEADLINE, *environments, *edited])
    return {short_name(key, settings.env): echoed(values[key]) for key in shown if key in values}


def _is_environments_default(key: str, sources: Sources) -> bool:
    """Whether it is a setting of the trainer whose value is the environment's default of it."""
    return key.startswith("trainer.") and sources.get(key) == "config_init"


def diff(before: Mapping[str, Any], after: Settings) -> dict[str, list[Any]]:
    """What holds differently: name -> [before, after]; `before`: section.field -> value."""
    new, names = by_key(after), after.env
    changed = [key for key in {**before, **new} if before.get(key) != new.get(key)]
    return {
        short_name(key, names): [echoed(before.get(key)), echoed(new.get(key))] for key in changed
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
        if self.lock:
            return {"locked_value": self.lock.value}
        return {}

    @property
    def is_headline(self) -> bool:
        """Whether it belongs to the first that one wants to know."""
        is_first = self.same_as is None and (self.key in HEADLINE or self.is_environments_default)
        return is_first or self.is_edited or self.name == "wandb_name"


def settings_of(resolved: Resolved) -> list[Setting]:
    """Every setting of a draft: the environment's, then ours, then the seeds' names for ours."""
    program, model = resolved.environment, resolved.settings.inference.model
    described = resolved.description
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
        **{f"env.{name}": value for name, value in (described.defaults or {}).items()},
        **_in_force(Settings()),
        **{f"trainer.{name}": value for name, value in described.trainer.items()},
        "run.name": name,
    }
    locks = locks_beside({**(described.defaults or {}), "tokenizer_name": model}, load_policy())
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
