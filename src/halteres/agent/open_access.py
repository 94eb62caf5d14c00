"""What a caller without the token may set, start and spend; every user of the machine is one.

Owns: the refusals of such a caller, and how much it may have under way at once.
Never: judges a text before it is read as its setting reads it.
Guarantees: what a refused call names was neither run, opened nor asked. A draft is checked whole,
also what was set with the token.

Everything here is said of a caller without the token: ask `Caller.is_open` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from halteres.agent.tool import Busy, TokenNeeded
from halteres.config import environ
from halteres.config.discovery import is_path
from halteres.config.edits import Edit
from halteres.config.files import NOTHING_GIVEN, Sources
from halteres.config.program import describe, program_of
from halteres.config.reach import (
    Reach,
    Text,
    TooLargeToCheck,
    looks_elsewhere,
    looks_outward,
    names_a_module,
    texts_of,
)
from halteres.config.settings import ENV_WIRING, SECTIONS, RunSettings, Settings, wiring_of
from halteres.environments.config import BaseEnvConfig
from halteres.models import known_folder, model_folder, names_of
from halteres.runs.planning.models import models_home
from halteres.runs.reading.adapter import CONFIG

USED_AS_YOU: Final = "What it names would be run, read, written or asked as this server's user"


def check_environment(environment: str) -> None:
    """Refuse an environment by its file, which would be run. Raises TokenNeeded."""
    if is_path(environment):
        what = "Without the token an environment is chosen by its name, not by its file."
        raise TokenNeeded.of(what, USED_AS_YOU, field="environment")


def check_models(models: Iterable[str]) -> None:
    """Refuse a model, or weights, by a folder. Raises TokenNeeded."""
    for name in models:
        if not name.startswith("tinker://") and names_a_folder(name):
            raise TokenNeeded.of(
                "Without the token a model is named, or a run, or tinker:// weights: not a folder.",
                USED_AS_YOU,
                field="models",
            )


def check_keys(variables: Iterable[str]) -> None:
    """Refuse what would be given secrets of the operator's, by the names of their variables.

    Raises:
        TokenNeeded: one of them is set.
    """
    spent = [name for name in variables if environ.is_set(name)]
    if spent:
        why = f"Others are asked with this server's {' and '.join(spent)}"
        raise TokenNeeded.of("Without the token nothing is started that spends a key.", why)


def check_number(things: str, number: int, most: int) -> None:
    """Refuse one more where there are as many as such callers may have. Raises Busy."""
    if number >= most:
        raise Busy(
            f"Without the token {most} {things} at once are the limit.",
            f"There are {number}.",
            "Wait for one to end; with the token, in HALTERES_HOME/token, there is no limit",
        )


def check_changes(environment: str, changes: Mapping[str, Any]) -> None:
    """Refuse settings as they were given, before the environment is asked about them.

    Raises:
        TokenNeeded: one of them reaches beyond the run.
    """
    check_environment(environment)
    given = [
        _Given(name, Edit(name=name, value=None).key, value) for name, value in changes.items()
    ]
    _check_own(given)
    _check_environments(given, RunSettings(environment=environment))


def check_settings(settings: Settings, sources: Sources = NOTHING_GIVEN) -> None:
    """Refuse settings as a run would have them; what the environment or the operator's policy sets
    may be anything. Raises TokenNeeded."""
    sections = settings.model_dump(mode="json")
    keys = {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }
    given = [_Given(key, key, value) for key, value in keys.items() if sources.get(key) != "policy"]
    # Ours first: one of them is the Python that the environment is asked by.
    _check_own(given)
    _check_environments(given, settings.run)


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting and its value."""

    name: str  # as the caller wrote it
    key: str  # section.field
    value: Any

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def field(self) -> str:
        return self.key.partition(".")[2]

    def check(self, schema: Mapping[str, Any], default: Any) -> None:
        """Refuse a value that reaches beyond the run; the default may. Raises TokenNeeded."""
        if self.value == default:
            return
        try:
            texts = texts_of(schema, self.field, self.value)
            found = next((text for text in texts if _wants_token(text)), None)
        except TooLargeToCheck:
            raise TokenNeeded.of(
                f"'{self.name}' cannot be set without the token.",
                "Its value is too large to be checked",
            ) from None
        if found is not None:
            place = f"{self.section}.{found.place}"
            at = ""
            if place not in (self.key, self.name):
                at = f" ({place})"
            raise TokenNeeded.of(
                f"'{self.name}'{at} cannot be set without the token.", USED_AS_YOU, field=self.name
            )


def _check_own(given: Sequence[_Given]) -> None:
    """Check the settings that are ours. What a run fills in itself is refused to all, elsewhere."""
    defaults = Settings()
    for one in given:
        model = SECTIONS.get(one.section)
        if model is not None and one.field not in wiring_of(model):
            one.check(_schema_of(model), getattr(getattr(defaults, one.section), one.field, None))


def _check_environments(given: Sequence[_Given], run: RunSettings) -> None:
    """Check the environment's settings by what it says of them when it is asked about none."""
    theirs = [one for one in given if one.section == "env" and one.field not in ENV_WIRING]
    if not theirs:
        return
    described = describe(program_of(run), {})
    schema = _with_common_fields(described.schema)
    for one in theirs:
        one.check(schema, described.config.get(one.field))


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _with_common_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an environment's settings, with the fields that every environment has as we
    declare them: a class of atroposlib's, or an older one, declares no reach."""
    ours = _schema_of(BaseEnvConfig)
    return {
        "properties": {**schema.get("properties", {}), **ours["properties"]},
        "$defs": {**schema.get("$defs", {}), **ours.get("$defs", {})},
    }


def names_a_folder(name: str) -> bool:
    """Whether it names a folder that is neither a built-in model nor one of the store: also one
    with a model, or an adapter, below the server's working directory."""
    if looks_elsewhere(name):
        return not (name.startswith("/") and names_of(Path(name), models_home()))
    if known_folder(name, models_home()) is not None:
        return False
    has_weights = (Path(name) / CONFIG).is_file() or ("/" in name and Path(name).is_dir())
    return has_weights or model_folder(name, models_home()) is not None


def _always(_: str) -> bool:
    return True


_JUDGES: Final[Mapping[Reach | None, Callable[[str], bool]]] = {
    "code": _always,
    "path": _always,
    "address": _always,
    "key": _always,
    "environment": is_path,
    "model": names_a_folder,
    "id": names_a_module,
    "name": looks_outward,
    "nothing": lambda _: False,
    None: looks_outward,
}


def _wants_token(found: Text) -> bool:
    return bool(found.text.strip()) and _JUDGES[found.reach](found.text)
