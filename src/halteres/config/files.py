"""Settings from a file and from edits.

Owns: reading YAML (ours or the seeds'), `section.field=value` edits, validation of everything at once, the JSON Schema.
Never: changes anything; on failure there is one InvalidConfig that lists every problem.

Order: defaults, then the file, then edits; an environment's own defaults are its `config_init`, asked with `describe`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from halteres.config.numbers import TEXT, odd_numbers, truth_for_number
from halteres.config.problem import Problem, refusal
from halteres.config.program import Description, EnvironmentProgram, confirm, describe, find_program
from halteres.config.projection import ENV_WIRING, Sections, from_seed_format, is_seed_format
from halteres.config.settings import InferenceSettings, RunSettings, Settings, TrainerSettings, Wiring
from halteres.config.sources import Source, Sources
from halteres.errors import InvalidConfig, nearest

SECTIONS: Mapping[str, type[BaseModel]] = {
    "run": RunSettings,
    "inference": InferenceSettings,
    "trainer": TrainerSettings,
}
"""The sections whose fields are ours; `env` belongs to the environment."""

DEFAULT_GROUP_SIZE, DEFAULT_BATCH_SIZE = 16, 128
"""Where the environment leaves them unset (seeds 000, 002)."""

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings, and where those come from that were given: the others are defaults, or a resumed run's."""

    settings: Settings
    sources: Sources


def load_settings(
    environment: str | None, file: Path | None, edits: Sequence[str], *, base: Settings | None = None
) -> Settings:
    """The settings of a run, validated; `resolve_settings` without the sources."""
    return resolve_settings(environment, file, edits, base=base).settings


def resolve_settings(
    environment: str | None, file: Path | None, edits: Sequence[str], *, base: Settings | None = None
) -> Resolved:
    """The settings of a run, validated, and where those come from that were given.

    Args:
        environment: name or path; beats the file's.
        file: YAML in our sections or in the seeds' format.
        edits: `section.field=value`, or a bare field where only one section has it; values are YAML.
        base: settings to start from instead of the defaults (a resumed run's).

    Raises:
        InvalidConfig: with every problem at once. NotFound: no such environment or file.
    """
    gathering = _Gathering(sections=_base_sections(base))
    if file is not None:
        gathering.add_file(file)
    bare = [gathering.add_edit(edit) for edit in edits]
    if environment is not None:
        gathering.put("run", "environment", environment, "edit")
    settings = gathering.settle([edit for edit in bare if edit is not None])
    return Resolved(settings=settings, sources=gathering.sources)


def settings_schema() -> dict[str, Any]:
    """JSON Schema of Settings; a field that only the supervisor writes carries `x-wiring` with the reason."""
    schema = Settings.model_json_schema()
    for model in SECTIONS.values():
        for name, why in wiring_of(model).items():
            schema["$defs"][model.__name__]["properties"][name]["x-wiring"] = why
    return schema


def wiring_of(model: type[BaseModel]) -> dict[str, str]:
    """Fields of a section that only the supervisor writes, each with the reason."""
    return {
        name: mark.why
        for name, info in model.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, Wiring)
    }


@dataclass(slots=True)
class _Gathering:
    """Settings on their way: sections as given, and what was found wrong with them."""

    sections: Sections
    problems: list[Problem] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)

    def put(self, section: str, name: str, value: Any, source: Source) -> None:
        self.sections[section][name] = value
        self.sources[f"{section}.{name}"] = source

    def add_file(self, file: Path) -> None:
        data = _read_yaml(file)
        given = from_seed_format(data, self.problems) if is_seed_format(data) else self._own_format(data)
        for section, values in given.items():
            for name, value in values.items():
                self.put(section, name, value, "file")

    def _own_format(self, data: Mapping[str, Any]) -> Sections:
        given: Sections = {}
        for name, values in data.items():
            if name not in self.sections:
                self.problems.append(_unknown(name, values, self.sections))
            elif not isinstance(values, Mapping):
                self.problems.append(Problem(field=name, got=values, rule="must be a section of fields"))
            else:
                given[name] = {str(key): value for key, value in values.items()}
                self._refuse_wiring(name, given[name])
        return given

    def add_edit(self, edit: str) -> tuple[str, Any] | None:
        """Place one edit; a bare name that none of our sections has is returned: it may be the environment's."""
        name, equals, text = edit.partition("=")
        section, _, bare = name.strip().rpartition(".")
        if not equals or not bare:
            self.problems.append(Problem(field=edit, got=None, rule="write it as section.field=value"))
            return None
        value = _scalar(text)
        owners = [section] if section else [s for s, model in SECTIONS.items() if bare in model.model_fields]
        if len(owners) > 1:
            choice = " or ".join(f"{owner}.{bare}" for owner in owners)
            self.problems.append(Problem(field=bare, got=value, rule=f"more than one section has it: write {choice}"))
        elif owners and owners[0] not in self.sections:
            self.problems.append(_unknown(owners[0], value, self.sections))
        elif owners:
            self._refuse_wiring(owners[0], {bare: value})
            self.put(owners[0], bare, value, "edit")
        else:
            return bare, value
        return None

    def _refuse_wiring(self, section: str, given: Mapping[str, Any]) -> None:
        wiring = ENV_WIRING if section == "env" else wiring_of(SECTIONS[section])
        self.problems.extend(
            Problem(field=f"{section}.{name}", got=given[name], rule=f"it cannot be set: {wiring[name]}")
            for name in given
            if name in wiring
        )

    def settle(self, bare: Sequence[tuple[str, Any]]) -> Settings:
        """Validate all sections, then ask the environment about its own."""
        environment = self._environment()
        parts = {name: self._validated(name) for name in SECTIONS}
        for name, value in bare:
            self._refuse_wiring("env", {name: value})
            self.put("env", name, value, "edit")
        given = self.sections["env"]
        told = describe(environment, {name: value for name, value in given.items() if name not in ENV_WIRING})
        self._add_environment_problems(told, {name for name, _ in bare})
        effective = _effective(given, told)
        known = {problem.field for problem in self.problems}
        odd = odd_numbers(told.schema, {**effective, **given})
        self.problems.extend(problem for problem in odd if problem.field not in known)
        self._check_batch(effective)
        if self.problems:
            raise refusal(self.problems)
        confirm(environment, effective, told)
        return Settings.model_validate({**parts, "env": effective})

    def _environment(self) -> EnvironmentProgram:
        """The environment's file; a path is made absolute, so that it means the same from any folder."""
        run = self.sections["run"]
        name, interpreter = (str(run[key]) if run.get(key) else None for key in ("environment", "interpreter"))
        environment = find_program(name or RunSettings().environment, interpreter)
        if name is not None and name != environment.name:
            run["environment"] = str(environment.path)
        return environment

    def _validated(self, name: str) -> BaseModel | None:
        model, given = SECTIONS[name], self.sections[name]
        known = {key: value for key, value in given.items() if key in model.model_fields}
        for key in given.keys() - known.keys():
            self.problems.append(_unknown(f"{name}.{key}", given[key], _all_names()))
        refused = truth_for_number(model, name, known)
        self.problems.extend(refused)
        for problem in refused:
            del known[problem.field.removeprefix(f"{name}.")]
        try:
            return model.model_validate(known)
        except ValidationError as error:
            self.problems.extend(_problems_of(name, error))
        return None

    def _add_environment_problems(self, told: Description, bare: set[str]) -> None:
        """The environment's own; a bare name it does not know may be a slip for one of ours."""
        for problem in told.problems:
            name = problem.field.removeprefix("env.")
            if name in bare and name not in told.fields:
                problem = _unknown(name, problem.got, [*_all_names(), *told.fields])
            self.problems.append(problem)

    def _check_batch(self, env: Mapping[str, Any]) -> None:
        if any(problem.field in ("env.batch_size", "env.group_size") for problem in self.problems):
            return
        batch, group = env["batch_size"], env["group_size"]
        if not (isinstance(batch, int) and isinstance(group, int) and group > 0 and batch > 0):
            self.problems.append(Problem(field="env.batch_size", got=batch, rule="must be a positive integer"))
        elif group < 2:
            rule = "must be at least 2: an answer's advantage is how much better it is than the others of its group"
            self.problems.append(Problem(field="env.group_size", got=group, rule=rule, suggest=(8, 16)))
        elif batch % group:
            below = batch // group * group
            near = tuple(value for value in (below, below + group) if value)
            rule = f"must be a multiple of group_size {group}"
            self.problems.append(Problem(field="env.batch_size", got=batch, rule=rule, suggest=near))


def _base_sections(base: Settings | None) -> Sections:
    sections: Sections = {"run": {}, "env": {}, "inference": {}, "trainer": {}}
    if base is not None:
        for name, values in base.model_dump(exclude_unset=True).items():
            sections[name].update(values)
    return sections


def _effective(given: Mapping[str, Any], told: Description) -> dict[str, Any]:
    """The environment's values as they will hold, without what a run fills in itself."""
    env = {**told.config, **({} if told.schema else given)}
    env = {name: value for name, value in env.items() if name not in ENV_WIRING}
    group = env.setdefault("group_size", DEFAULT_GROUP_SIZE)
    if env.get("batch_size") in (None, -1):
        whole_groups = max(1, DEFAULT_BATCH_SIZE // group) if isinstance(group, int) and group > 0 else 1
        env["batch_size"] = whole_groups * group
    return env


def _problems_of(section: str, error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        rule = TEXT if detail["type"] == "string_type" else detail["msg"].replace("Input should be", "must be")
        path = ".".join(str(part) for part in detail["loc"][:1])
        yield Problem(field=f"{section}.{path}".rstrip("."), got=detail["input"], rule=rule)


def _all_names() -> list[str]:
    return [name for model in SECTIONS.values() for name in model.model_fields]


def _unknown(name: str, got: Any, known: Any) -> Problem:
    guess = nearest(name.rpartition(".")[2], known)
    owner = next((section for section, model in SECTIONS.items() if guess in model.model_fields), None)
    qualified = f"{owner}.{guess}" if owner and guess not in SECTIONS else guess
    return Problem(field=name, got=got, rule="there is no such setting", did_you_mean=qualified)


def _scalar(text: str) -> Any:
    """The value of an edit, read as YAML; `1e-3` is a number, which YAML 1.1 takes for a text."""
    if _NUMBER.fullmatch(text.strip()):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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
