"""Settings in few words.

Owns: which are the headline ones; the names under which settings are told; what differs between two.
Never: decides a value; tells a long one whole.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from halteres.agent.shortening import echoed
from halteres.config.edits import ENVIRONMENT, short_name
from halteres.config.files import Resolved
from halteres.config.settings import Settings
from halteres.config.sources import Sources

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
