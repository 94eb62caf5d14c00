"""The settings in which runs differ.

Owns: which fields count, their order, how many there is room for.
Never: reads a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from halteres.agent.shortening import size_of
from halteres.config.settings import Settings

_NO_SETTING = (
    *("run.name", "run.tags", "run.sinks", "run.wandb_project", "run.wandb_entity", "env.use_wandb"),
    *("inference.url", "inference.threads", "inference.cache_gb", "inference.samplers"),
)
"""Fields that do not change what is learnt."""

MOST_NAMES, FOR_NAMES = 8, 280
"""How many fields are told by name alone where there is no room for their values; characters kept free for them."""


def settings_that_differ(by_run: Mapping[str, Settings], room: int) -> dict[str, Any]:
    """Field to run to value, as many as fit into so many characters of JSON; some others by name.

    Where one run has a field and another has not (they are of different environments), the missing value is null.
    """
    flat = {run_id: _flat(settings) for run_id, settings in by_run.items()}
    fields = dict.fromkeys(field for settings in flat.values() for field in settings)
    differing = {field: {run_id: settings.get(field) for run_id, settings in flat.items()} for field in fields}
    differing = {field: values for field, values in differing.items() if _num_values(values) > 1}
    if size_of(differing) <= room:
        return {"settings_that_differ": differing}
    told: dict[str, dict[str, Any]] = {}
    for field, values in differing.items():
        if size_of({**told, field: values}) <= room - FOR_NAMES:
            told[field] = values
    more = [field for field in differing if field not in told]
    beyond = [f"and {len(more) - MOST_NAMES} more"] if len(more) > MOST_NAMES else []
    return {"settings_that_differ": told, "more_settings_that_differ": more[:MOST_NAMES] + beyond}


def _num_values(values: Mapping[str, Any]) -> int:
    return len({json.dumps(value, sort_keys=True) for value in values.values()})


def _flat(settings: Settings) -> dict[str, Any]:
    """`section.field` to value: the trainer's first, they matter most."""
    sections = settings.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section in ("trainer", "inference", "env", "run")
        for name, value in sections[section].items()
        if f"{section}.{name}" not in _NO_SETTING
    }
