"""Settings one by one: what each is, what may be set, what holds; and the few that matter most, in few words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halteres.agent.drafting.drafts import Draft
from halteres.agent.fitting import echoed
from halteres.config import environ
from halteres.config.edits import ALIASES, ENVIRONMENT, Edit, short_name
from halteres.config.files import Resolved, settings_schema
from halteres.config.policies import Lock, is_own_wiring, load_policy, locks_beside, variant_lock
from halteres.config.program import describe, program_of
from halteres.config.projection import Sources
from halteres.config.settings import ENV_WIRING, SECTIONS, Settings

HEADLINE = (
    "inference.model",
    "env.group_size",
    "env.batch_size",
    "trainer.total_steps",
    "trainer.learning_rate",
    "trainer.lora_rank",
    "env.max_token_length",
    "trainer.eval_every",
)


def brief(resolved: Resolved) -> dict[str, Any]:
    """The headline settings, what the environment says of the trainer's, and what was edited."""
    values, sources = by_key(resolved.settings), resolved.sources
    environments = [key for key in sources if is_environments_default(key, sources)]
    edited = [key for key, source in sources.items() if source == "edit" and key != ENVIRONMENT]
    shown = dict.fromkeys([*HEADLINE, *environments, *edited])
    return {short_name(key, resolved.settings.env): echoed(values[key]) for key in shown if key in values}


def is_environments_default(key: str, sources: Sources) -> bool:
    """Whether it is a setting of the trainer whose value is the environment's default of it."""
    return key.startswith("trainer.") and sources.get(key) == "config_init"


def diff(before: Resolved, after: Resolved) -> dict[str, list[Any]]:
    """What holds differently: name -> [before, after]."""
    old, new = by_key(before.settings), by_key(after.settings)
    names: Collection[str] = after.settings.env
    return {
        short_name(key, names): [echoed(old.get(key)), echoed(new.get(key))]
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }


def by_key(settings: Settings) -> dict[str, Any]:
    """section.field -> value, as JSON."""
    sections = settings.model_dump(mode="json")
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}


_TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}
_BOUNDS = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
_LENGTHS = (("minLength", ">="), ("maxLength", "<="), ("minItems", ">="), ("maxItems", "<="))


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
    def brief(self) -> dict[str, Any]:
        """Name and value."""
        return {"name": self.name, "current_value": self.current, **self._locked}

    @property
    def full(self) -> dict[str, Any]:
        """All that is known (the seeds' keys first)."""
        told = {
            "name": self.name,
            "type": _type(self.schema),
            "default": self.default,
            "description": self.schema.get("description", ""),
            "current_value": self.current,
            **self._locked,
            "section": self.key.partition(".")[0],
        }
        facts = {
            "allowed": _allowed(self.schema),
            "range": _range(self.schema),
            "required": self.is_required or None,
            "same_as": self.same_as,
            "why": self.lock.why if self.lock else None,
        }
        return {**told, **{name: fact for name, fact in facts.items() if fact is not None}}

    @property
    def _locked(self) -> dict[str, Any]:
        return {"locked_value": self.lock.value} if self.lock else {}

    @property
    def is_headline(self) -> bool:
        """Whether it belongs to the first that one wants to know."""
        is_first = self.same_as is None and (self.key in HEADLINE or self.is_environments_default)
        return is_first or self.is_edited or self.name == "wandb_name"


def settings_of(draft: Draft, resolved: Resolved) -> list[Setting]:
    """Every setting: the environment's, then ours, then the seeds' names for ours."""
    known = _known(draft, resolved)
    fields = resolved.settings.env
    shown = [key for key in known.schemas if key != ENVIRONMENT and not _is_filled_from_ours(key)]
    aliases = [(name, key) for name, key in ALIASES.items() if name in ENV_WIRING]
    return [
        *(known.setting(key, short_name(key, fields)) for key in shown),
        *(known.setting(key, name, same_as=short_name(key, fields)) for name, key in aliases),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known of all settings, by section.field."""

    schemas: Mapping[str, dict[str, Any]]
    defaults: Mapping[str, Any]
    values: Mapping[str, Any]
    locks: Mapping[str, Lock]
    sources: Sources
    required: frozenset[str]

    def setting(self, key: str, name: str, same_as: str | None = None) -> Setting:
        lock = self.locks.get(key)
        return Setting(
            key=key,
            name=name,
            schema=self.schemas[key],
            default=self.defaults.get(key),
            current=lock.value if lock else self.values.get(key),
            is_edited=self.sources.get(key) == "edit" and same_as is None,
            is_environments_default=is_environments_default(key, self.sources),
            is_required=key in self.required,
            lock=lock,
            same_as=same_as,
        )


def _known(draft: Draft, resolved: Resolved) -> _Known:
    program = program_of(resolved.settings.run)
    told = describe(program, {})
    theirs = told.schema or {"properties": {name: {} for name in resolved.settings.env}}
    ours = settings_schema()["$defs"]
    sections = {"env": theirs, **{section: ours[model.__name__] for section, model in SECTIONS.items()}}
    model, name = resolved.settings.inference.model, resolved.settings.run.default_name("{run_id}")
    variant = variant_lock(program)
    values = _in_force(resolved.settings)
    if resolved.sources.get("run.name") != "edit":
        values["run.name"] = name
    return _Known(
        schemas={f"{one}.{name}": field for one, schema in sections.items() for name, field in followed(schema)},
        defaults={
            **{f"env.{name}": value for name, value in told.config.items()},
            **_in_force(Settings()),
            **{f"trainer.{name}": value for name, value in told.trainer.items()},
            "run.name": name,
        },
        values=values,
        locks={
            **locks_beside({**told.config, "tokenizer_name": model}, load_policy()),
            **({variant.key: variant} if variant else {}),
        },
        sources=resolved.sources,
        required=frozenset(f"env.{name}" for name in theirs.get("required", ())),
    )


def find_setting(settings: list[Setting], name: str) -> Setting | None:
    """The one of this name, whichever way it is written."""
    key = Edit(name=name, value=None).key
    exact = [one for one in settings if one.name == name]
    return next(iter(exact or [one for one in settings if one.key == key]), None)


def _is_filled_from_ours(key: str) -> bool:
    section, _, name = key.partition(".")
    return section == "env" and name in ENV_WIRING and not is_own_wiring(name)


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
    for name, field in schema.get("properties", {}).items():
        meant = known.get(str(field.get("$ref", "")).rpartition("/")[2], {})
        yield name, {**meant, **field}


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [schema, *schema.get("anyOf", ())]


def _type(schema: Mapping[str, Any]) -> str:
    names = [_TYPES.get(str(one["type"]), str(one["type"])) for one in _options(schema) if "type" in one]
    return " | ".join(dict.fromkeys(names)) or "any"


def _allowed(schema: Mapping[str, Any]) -> list[Any] | None:
    found = [value for one in _options(schema) for value in one.get("enum", [one["const"]] if "const" in one else [])]
    return found or None


def _range(schema: Mapping[str, Any]) -> str | None:
    bounds = [f"{sign} {one[name]}" for one in _options(schema) for name, sign in _BOUNDS if name in one]
    bounds += [f"length {sign} {one[name]}" for one in _options(schema) for name, sign in _LENGTHS if name in one]
    return ", ".join(bounds) or None
