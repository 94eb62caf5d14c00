"""Where each effective setting comes from: what config.resolved.json says.

Owns: the sources, and which of them holds for a value.
Never: decides a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from halteres.config.settings import Settings

Source = Literal["default", "config_init", "file", "edit", "policy", "wiring", "resume"]
"""default: ours; config_init: the environment's, also where it declares defaults of the trainer; policy: held by the
operator's; wiring: filled in by the run; resume: held in the run gone on from."""

Sources = Mapping[str, Source]
"""section.field -> source, of what was given."""

NOTHING_GIVEN: Sources = MappingProxyType({})

Effective = dict[str, dict[str, Any]]
"""section.field -> {value, source}."""


def resolved(settings: Settings, given: Sources, *, is_resumed: bool = False) -> Effective:
    """Every effective setting with its source. One of ours that is no default, and not in `given`, is an edit too."""
    defaults = Settings().model_dump(mode="json")
    values: Effective = {}
    for section, fields in settings.model_dump(mode="json").items():
        own: Source = "resume" if is_resumed else "config_init" if section == "env" else "default"
        for name, value in fields.items():
            key = f"{section}.{name}"
            by_program = own == "default" and value != defaults[section][name]
            values[key] = {"value": value, "source": given.get(key, "edit" if by_program else own)}
    return values


def wired(values: Mapping[str, Any]) -> Effective:
    """What a run fills in itself, by section.field."""
    return {name: {"value": value, "source": "wiring"} for name, value in values.items()}
