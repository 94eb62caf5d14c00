"""Settings from a file and from edits.

Owns: reading YAML (ours or the seeds'), the one entry for whoever wants settings, their JSON Schema.
Never: changes anything; on failure there is one InvalidConfig that lists every problem (`gathering`).

Order: defaults, then the file, then edits, then what the operator's policy holds; an environment's own defaults are its
`config_init` and its `trainer_defaults`, asked with `describe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from halteres.config.edits import ENVIRONMENT, Edit, read_edit
from halteres.config.gathering import Gathering, Resolved
from halteres.config.policies import Policy, load_policy
from halteres.config.problem import Problem, UnknownSetting
from halteres.config.projection import Sections, from_seed_format, is_seed_format
from halteres.config.settings import SECTIONS, Settings, wiring_of
from halteres.errors import InvalidConfig, nearest

__all__ = ["Resolved", "load_settings", "resolve_settings", "settings_schema"]


def load_settings(
    environment: str | None, file: Path | None, edits: Sequence[str], *, base: Settings | None = None
) -> Settings:
    """The settings of a run, validated; `resolve_settings` without the sources."""
    return resolve_settings(environment, file, edits, base=base).settings


def resolve_settings(
    environment: str | None,
    file: Path | None,
    edits: Sequence[str],
    *,
    base: Settings | None = None,
    changes: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
) -> Resolved:
    """The settings of a run, validated, and where those come from that were given.

    Args:
        environment: name or path; beats the file's.
        file: YAML in our sections or in the seeds' format.
        edits: `section.field=value`, or a bare field where only one section has it; values are YAML.
        base: settings to start from instead of the defaults (a resumed run's).
        changes: edits whose values are typed (JSON), by the same names.
        policy: what the operator locks and caps; default: the policy in force.

    Raises:
        InvalidConfig: with every problem at once; UnknownField, LockedField or PolicyCap where it is the only one.
        NotFound: no such environment or file.
    """
    gathering = Gathering(policy=load_policy() if policy is None else policy)
    for name, values in (base.model_dump(exclude_unset=True) if base else {}).items():
        gathering.sections[name].update(values)
    if file is not None:
        gathering.add_file(_sections(_read_yaml(file), gathering.problems))
    for edit in (*map(read_edit, edits), *(Edit(name=name, value=value) for name, value in (changes or {}).items())):
        gathering.add_edit(edit)
    if environment is not None:
        gathering.put(ENVIRONMENT, environment, "edit")
    return gathering.settle()


def settings_schema() -> dict[str, Any]:
    """JSON Schema of Settings; a field that only the supervisor writes carries `x-wiring` with the reason."""
    schema = Settings.model_json_schema()
    for model in SECTIONS.values():
        for name, why in wiring_of(model).items():
            schema["$defs"][model.__name__]["properties"][name]["x-wiring"] = why
    return schema


def _sections(data: Mapping[str, Any], problems: list[Problem]) -> Sections:
    """The sections of a file, in whichever of the two formats."""
    if is_seed_format(data):
        return from_seed_format(data, problems)
    known = ("run", "env", "inference", "trainer")
    given: Sections = {}
    for name, values in data.items():
        if name not in known:
            problems.append(UnknownSetting(field=name, got=values, did_you_mean=nearest(name, known)))
        elif not isinstance(values, Mapping):
            problems.append(Problem(field=name, got=values, rule="must be a section of fields"))
        else:
            given[name] = {str(key): value for key, value in values.items()}
    return given


def _read_yaml(file: Path) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidConfig(f"Config file {file} cannot be read.", f"{error.strerror}.", "Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise InvalidConfig(f"Config file {file} is not YAML.", f"{where}.", "Mend it and try again.") from error
    if not isinstance(data or {}, Mapping):
        raise InvalidConfig(f"Config file {file} holds no sections.", next="Start with `env:` or `trainer:`.")
    return data or {}
