"""The settings of a run from a file and edits, validated at once, beside the environment and the
policy.

Order: defaults, then the file, then edits, then what the operator's policy holds; an environment's
own defaults are its `config_init` and its `trainer_defaults`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from halteres.config.discovery import reference
from halteres.config.edits import (
    ENVIRONMENT,
    OWN_KEYS,
    SWITCHES,
    Edit,
    is_finite,
    names_beside,
    nearest_setting,
    number_in_text,
    odd_numbers,
    read_edit,
    switch_refused,
)
from halteres.config.environ import LARGEST_BATCH
from halteres.config.operator_policy import (
    Policy,
    is_same_value,
    load_policy,
    over_cap,
    policy_lock,
    policy_locks,
    variant_lock,
    wiring_lock,
)
from halteres.config.problem import Problem, UnknownSetting, refusal, rule_of
from halteres.config.program import Description, EnvironmentProgram, confirm, describe, find_program
from halteres.config.projection import (
    Sections,
    Source,
    Sources,
    from_seed_format,
    is_seed_format,
    section_of,
)
from halteres.config.settings import (
    ENV_WIRING,
    SECTIONS,
    InferenceSettings,
    RunSettings,
    Section,
    Settings,
    TrainerSettings,
    wiring_of,
)
from halteres.config.values import ANYTHING, Schema, Word, schema_at, value_of
from halteres.documents import DocumentError, half_characters, read_document
from halteres.errors import InvalidConfig, nearest
from halteres.logins import is_struck

# where the environment leaves them unset (seeds 000, 002)
DEFAULT_GROUP_SIZE, DEFAULT_BATCH_SIZE = 16, 128

EQUAL_SCORES = "ensure_scores_are_not_same"
"""Drops groups of equal scores: right where an estimator compares the scores of a group, and
nothing else counts.
"""

DATASET = "env.dataset"
STEPS = "trainer.total_steps"
THRESHOLD = "success_threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings, and where those come from that were given: the others are defaults, or a resumed
    run's.
    """

    settings: Settings
    sources: Sources
    # edits taken for another type: name as given -> value
    coerced: Mapping[str, Any] = field(default_factory=dict)
    # of the environment, by field
    trainer_defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Gathering:
    """Sections as given, and what is wrong with them."""

    policy: Policy
    sections: Sections = field(
        default_factory=lambda: {"run": {}, "env": {}, "inference": {}, "trainer": {}}
    )
    problems: list[Problem] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # key -> name as it was given

    def put(self, key: str, value: Any, source: Source, name: str = "") -> None:
        """Place a value."""
        section, _, bare = key.partition(".")
        self.sections[section][bare] = value
        self.sources[key] = source
        self._names[key] = name or key

    def add_edit(self, edit: Edit | Problem) -> None:
        """Lay an edit over what is there."""
        if isinstance(edit, Problem):
            self.problems.append(edit)
        elif (halves := half_characters(edit.value)) is not None:
            self.problems.append(Problem(field=edit.name, got=ascii(edit.value), rule=halves))
        elif edit.name in SWITCHES:
            if value_of(edit.value, {"type": "boolean"}) not in (False, None, "false"):
                self.problems.append(switch_refused(edit.name, edit.value))
        elif isinstance(place := edit.place(), Problem):
            self.problems.append(place)
        else:
            section = place.partition(".")[0]
            # What a text means for the environment's settings, only the environment can say
            # (`_read_texts`).
            self.put(place, edit.value, "edit", edit.name)
            self.edits.append(edit)
            if section in SECTIONS:
                self._read_text(len(self.edits) - 1, _schema_of(section))

    def _read_text(self, index: int, schema: Schema) -> None:
        """Give an edit the value that its text has for a setting of this schema. What was typed is
        that value from here on; a text among typed values stays what was given, and is counted as
        taken for another type.
        """
        edit = self.edits[index]
        section, _, name = edit.key.partition(".")
        try:
            value = value_of(edit.value, schema_at(schema, [name]))
        except DocumentError as error:
            self.problems.append(Problem(field=edit.name, got=edit.value, rule=str(error)))
            self.sections[section].pop(name, None)
            return
        if edit.key == DATASET:
            value = data_place(value, Path())
        self.sections[section][name] = value
        if isinstance(edit.value, Word):
            self.edits[index] = replace(edit, value=value)

    def _read_texts(self, environment: EnvironmentProgram) -> None:
        """Give the edits of the environment's settings their values: it is asked which types it
        has.
        """
        texts = [
            index
            for index, edit in enumerate(self.edits)
            if edit.key.startswith("env.") and isinstance(edit.value, str)
        ]
        if not texts:
            return
        # Mostly this is what they turn out to mean, and the environment is started once.
        guessed = {
            name: value_of(value, ANYTHING)
            for name, value in self.sections["env"].items()
            if name not in ENV_WIRING
        }
        schema = describe(environment, guessed).schema
        for index in texts:
            self._read_text(index, schema)

    def settle(self) -> Resolved:
        """Lay the policy over all, validate our sections, ask the environment about its own.

        Raises:
            InvalidConfig: with every problem at once; UnknownField, LockedField or PolicyCap where
                it is the only one.
        """
        environment = self._environment()
        self._read_texts(environment)
        self._apply_policy(environment)
        given = {
            name: value for name, value in self.sections["env"].items() if name not in ENV_WIRING
        }
        description = describe(environment, given)
        self._add_defaults(description)
        parts = {name: self._validated(name) for name in SECTIONS}
        env = _environment_values(given, description)
        trainer = parts["trainer"]
        # What follows from settings that were refused is unknown: they are mended first.
        is_known = isinstance(trainer, TrainerSettings)
        trainer = trainer if isinstance(trainer, TrainerSettings) else TrainerSettings()
        if trainer.learns_from_equal_scores and EQUAL_SCORES in env and EQUAL_SCORES not in given:
            env[EQUAL_SCORES] = False
        self._add(*(self._struck_out(f"env.{name}", value) for name, value in given.items()))
        self._check_environment(
            description, given, env, 2 if is_known and trainer.compares_groups else 1
        )
        if is_known:
            self._add(over_cap(self.policy, trainer.total_steps))
            batch, minibatches = env["batch_size"], trainer.minibatches
            if isinstance(batch, int) and minibatches > max(1, batch):
                rule = f"must be at most env.batch_size ({batch}), the rollouts of a batch"
                self._add(
                    Problem(
                        field="trainer.minibatches", got=minibatches, rule=rule, suggest=(batch,)
                    )
                )
        if self.problems:
            raise self._refusal(description)
        confirm(environment, env, description)
        settings = Settings.model_validate({**parts, "env": env})
        values, coerced = settings.model_dump(mode="json"), dict[str, Any]()
        for edit in self.edits:
            section, _, name = edit.key.partition(".")
            if _kind(values[section].get(name, edit.value)) != _kind(edit.value):
                coerced[edit.name] = values[section][name]
        defaults = description.trainer
        return Resolved(
            settings=settings, sources=self.sources, coerced=coerced, trainer_defaults=defaults
        )

    def _environment(self) -> EnvironmentProgram:
        """The environment's file; paths are made absolute, so that they mean the same from any
        folder.
        """
        run = self.sections["run"]
        keys = ("environment", "interpreter", "working_directory")
        name, interpreter, folder = (str(run[key]) if run.get(key) else None for key in keys)
        environment = find_program(name or RunSettings().environment, interpreter, folder)
        if name is not None:
            run["environment"] = reference(name, environment.name, str(environment.path))
        if interpreter is not None and "/" in interpreter:
            run["interpreter"] = environment.interpreter
        if folder is not None:
            run["working_directory"] = str(environment.working_directory)
        lock, given = variant_lock(environment), self.sections["env"].get("variant")
        if lock is not None and given not in (None, lock.value):
            self.problems.append(lock.refused(self._names.get(lock.key, lock.key), given))
        self.sections["env"] |= environment.variant_setting
        return environment

    def _apply_policy(self, environment: EnvironmentProgram) -> None:
        locks_env = any(key.startswith("env.") for key in self.policy.lock)
        fields = describe(environment, {}).fields if locks_env else frozenset[str]()
        for key, value in policy_locks(self.policy, fields).items():
            section, _, name = key.partition(".")
            if section == "env" and name in ENV_WIRING:
                continue  # it is refused like all wiring, with the policy's value
            if key in self.sources and not is_same_value(key, self.sections[section][name], value):
                lock = policy_lock(key, value, self.policy)
                self.problems.append(lock.refused(self._names[key], self.sections[section][name]))
            self.put(key, value, "policy")

    def _add_defaults(self, description: Description) -> None:
        """Where nobody gave another value: what the environment says of our settings, steps lowered
        to their cap.
        """
        if (own := description.config.get(THRESHOLD)) and THRESHOLD not in self.sections["run"]:
            self.put(f"run.{THRESHOLD}", own, "config_init")
        given, cap = set(self.sections["trainer"]), self.policy.caps.max_steps
        for name, value in description.trainer.items():
            if name not in given:
                self.put(f"trainer.{name}", value, "config_init")
        steps = self.sections["trainer"].get("total_steps", TrainerSettings().total_steps)
        if cap is not None and "total_steps" not in given and cap < steps:
            self.put(STEPS, cap, "policy")

    def _validated(self, name: str) -> Section | None:
        model, given = SECTIONS[name], self.sections[name]
        known = {key: value for key, value in given.items() if key in model.model_fields}
        self._add(
            *(self._unknown(f"{name}.{key}", given[key]) for key in given.keys() - known.keys())
        )
        try:
            return model.model_validate(known)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                # of a setting with settings of its own
                inside = ".".join(str(part) for part in detail["loc"][1:])
                rule = f"{inside}: {rule_of(detail)}" if inside else rule_of(detail)
                facts = detail.get("ctx", {})
                field = str(detail["loc"][0]) if detail["loc"] else str(facts.get("field", ""))
                got, guess = facts.get("got", detail["input"]), facts.get("did_you_mean")
                key = f"{name}.{field}".rstrip(".")
                self.problems.append(Problem(field=key, got=got, rule=rule, did_you_mean=guess))
        return None

    def _check_environment(
        self,
        description: Description,
        given: Mapping[str, Any],
        env: Mapping[str, Any],
        smallest_group: int,
    ) -> None:
        """What only beside the environment can be seen to be wrong."""
        model = self.sections["inference"].get("model", InferenceSettings().model)
        for key, source in self.sources.items():
            lock = wiring_lock(key, {**description.config, "tokenizer_name": model})
            if lock is not None and source != "policy":
                section, _, name = key.partition(".")
                lock = replace(lock, value=self.policy.lock.get(key, lock.value))
                self.problems.append(lock.refused(self._names[key], self.sections[section][name]))
        for problem in description.problems:
            is_unknown = (
                bool(description.schema)
                and problem.field.removeprefix("env.") not in description.fields
            )
            self._add(
                self._unknown(problem.field, problem.got, description.fields)
                if is_unknown
                else problem
            )
        known = {problem.field for problem in self.problems}
        odd = {
            one.field: one
            for values in (env, given)
            for one in odd_numbers(description.schema, values)
        }
        self._add(*(problem for name, problem in odd.items() if name not in known))
        if not known & {"env.batch_size", "env.group_size"}:
            self._add(_batch_problem(env, smallest_group))
        for edit in self.edits:
            if (
                edit.name in description.fields
                and edit.name not in ENV_WIRING
                and edit.key in OWN_KEYS
            ):
                self.problems.append(edit.ambiguous([edit.key, f"env.{edit.name}"]))

    def _refusal(self, description: Description) -> InvalidConfig:
        """The error for everything that is wrong, under the names that were given."""
        names = {
            problem.field: self._names.get(problem.field, problem.field)
            for problem in self.problems
        }
        problems = [replace(problem, field=names[problem.field]) for problem in self.problems]
        there = names_beside(description.fields)
        refused = refusal(
            [
                replace(one, available=there) if isinstance(one, UnknownSetting) else one
                for one in problems
            ]
        )
        coerced: dict[str, float] = {}
        for edit in self.edits:
            section, _, name = edit.key.partition(".")
            schema = (
                SECTIONS[section].model_json_schema() if section in SECTIONS else description.schema
            )
            number = number_in_text(schema.get("properties", {}).get(name, {}), edit.value)
            if number is not None and edit.name not in names.values():
                coerced[edit.name] = number
        if coerced:
            refused.details["coerced"] = coerced
        return refused

    def _add(self, *problems: Problem | None) -> None:
        self.problems.extend(problem for problem in problems if problem is not None)

    def _struck_out(self, key: str, value: Any) -> Problem | None:
        """A value copied from an answer, which shows no secret."""
        if not is_struck(value):
            return None
        rule = "a secret was struck out of this value where it was shown; give the whole value"
        return Problem(field=self._names.get(key, key), got=value, rule=rule)

    def _unknown(self, key: str, got: Any, env_fields: Iterable[str] = ()) -> Problem:
        name = self._names.get(key, key)
        return UnknownSetting(field=name, got=got, did_you_mean=nearest_setting(name, env_fields))


def _environment_values(given: Mapping[str, Any], description: Description) -> dict[str, Any]:
    """The environment's values as they will hold, without what a run fills in itself, what no JSON
    can say and only the environment itself can set, and whether it would use W&B (atroposlib's
    default is to): only who asks does.
    """
    env = {
        name: value
        for name, value in {**description.config, **({} if description.schema else given)}.items()
        if name not in ENV_WIRING and (name in given or (is_finite(value) and name != "use_wandb"))
    }
    group = env.setdefault("group_size", DEFAULT_GROUP_SIZE)
    if env.get("batch_size") in (None, -1):
        whole_groups = (
            max(1, DEFAULT_BATCH_SIZE // group) if isinstance(group, int) and group > 0 else 1
        )
        env["batch_size"] = whole_groups * group
    return env


def _batch_problem(env: Mapping[str, Any], smallest_group: int) -> Problem | None:
    """What is wrong with the sizes of group and batch; `smallest_group`: what the estimator of
    advantages needs.
    """
    batch, group = env["batch_size"], env["group_size"]
    if not (isinstance(batch, int) and isinstance(group, int) and group > 0 and batch > 0):
        return Problem(field="env.batch_size", got=batch, rule="must be a positive integer")
    if group < smallest_group:
        rule = (
            "must be at least 2: an answer's advantage is how much better it is than the "
            "others of its group"
        )
        return Problem(field="env.group_size", got=group, rule=rule, suggest=(8, 16))
    at_most = f"must be at most {LARGEST_BATCH}: the trajectory server takes no larger batch"
    if group > LARGEST_BATCH:
        return Problem(field="env.group_size", got=group, rule=at_most)
    if batch > LARGEST_BATCH:
        return Problem(
            field="env.batch_size",
            got=batch,
            rule=at_most,
            suggest=(LARGEST_BATCH // group * group,),
        )
    if batch % group:
        below = batch // group * group
        near = tuple(value for value in (below, below + group) if value)
        return Problem(
            field="env.batch_size",
            got=batch,
            rule=f"must be a multiple of group_size {group}",
            suggest=near,
        )
    return None


@cache
def _schema_of(section: str) -> dict[str, Any]:
    return SECTIONS[section].model_json_schema()


def _kind(value: Any) -> str:
    return {int: "number", float: "number", tuple: "list"}.get(type(value), type(value).__name__)


def load_settings(
    environment: str | None,
    file: Path | None,
    edits: Sequence[str],
    *,
    base: Settings | None = None,
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
        edits: `section.field=value`, or a bare field where only one section has it; its type reads
            the value.
        base: settings to start from instead of the defaults (a resumed run's).
        changes: edits whose values are typed (JSON), by the same names.
        policy: what the operator locks and caps; default: the policy in force.

    Raises NotFound for an environment or a file, else as `Gathering.settle`.
    """
    gathering = Gathering(policy=load_policy() if policy is None else policy)
    for name, values in (base.model_dump(exclude_unset=True) if base else {}).items():
        gathering.sections[name].update(values)
    if file is not None:
        for section, values in _read_sections(file, gathering.problems).items():
            for name, value in values.items():
                key = f"{section}.{name}"
                gathering.put(
                    key, data_place(value, file.parent, Path()) if key == DATASET else value, "file"
                )
    for edit in (
        *map(read_edit, edits),
        *(Edit(name=name, value=value) for name, value in (changes or {}).items()),
    ):
        gathering.add_edit(edit)
    if environment is not None:
        gathering.put(ENVIRONMENT, environment, "edit")
    return gathering.settle()


def data_place(given: Any, *folders: Path) -> Any:
    """A data set's file or folder as it is called from anywhere: the environment runs in another
    folder.

    It is looked for in these folders, the first of which is meant where none has it. A name on the
    hub stays as it is.
    """
    if not isinstance(given, str) or not given:
        return given
    path = Path(os.path.expanduser(given))  # of any text: Path would raise for an unknown user
    found = next((folder / path for folder in folders if os.path.exists(folder / path)), None)
    if found is None and (given.startswith((".", "~")) or path.suffix == ".jsonl"):
        found = folders[0] / path
    return str(found.absolute()) if found is not None else given


def settings_schema() -> dict[str, Any]:
    """JSON Schema of Settings; a field that only the supervisor writes carries `x-wiring` with the
    reason.
    """
    schema = Settings.model_json_schema()
    for model in SECTIONS.values():
        for name, why in wiring_of(model).items():
            schema["$defs"][model.__name__]["properties"][name]["x-wiring"] = why
    return schema


def _read_sections(file: Path, problems: list[Problem]) -> Sections:
    data = read_document(file, "config file")
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidConfig(
            f"The config file {file} holds no sections.", next="Start with `env:` or `trainer:`."
        )
    if is_seed_format(data):
        return from_seed_format(data, problems)
    known = ("run", "env", "inference", "trainer")
    others = [name for name in data if name not in known]
    problems.extend(
        UnknownSetting(field=name, got=data[name], did_you_mean=nearest(name, known))
        for name in others
    )
    return {name: section_of(data, name, problems) for name in known if name in data}
