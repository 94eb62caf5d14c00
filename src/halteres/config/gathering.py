"""Settings on their way: what a file and edits give, laid together and validated at once.

Owns: the order (defaults, file, edits, then what the policy holds), the list of everything that is wrong with them,
what was taken for another type.
Never: reads a file; changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from halteres.config.control import LARGEST_BATCH
from halteres.config.discovery import reference
from halteres.config.edits import (
    OWN_KEYS,
    SWITCHES,
    TEXT,
    Edit,
    endless,
    names_beside,
    nearest_setting,
    number_in_text,
    odd_numbers,
    truth_for_number,
)
from halteres.config.locks import over_cap, policy_lock, policy_locks, same, variant_lock, wiring_lock
from halteres.config.policies import Policy
from halteres.config.problem import Problem, UnknownSetting, refusal
from halteres.config.program import Description, EnvironmentProgram, confirm, describe, find_program
from halteres.config.projection import Sections
from halteres.config.settings import (
    ENV_WIRING,
    SECTIONS,
    InferenceSettings,
    RunSettings,
    Section,
    Settings,
    TrainerSettings,
)
from halteres.config.sources import Source, Sources
from halteres.errors import InvalidConfig

DEFAULT_GROUP_SIZE, DEFAULT_BATCH_SIZE = 16, 128
"""Where the environment leaves them unset (seeds 000, 002)."""

_GROUP_RULE = "must be at least 2: an answer's advantage is how much better it is than the others of its group"

_AT_MOST = f"must be at most {LARGEST_BATCH}: the trajectory server takes no larger batch"


def effective(given: Mapping[str, Any], told: Description) -> dict[str, Any]:
    """The environment's values as they will hold, without what a run fills in itself, what no JSON can say and only
    the environment itself can set, and whether it would use W&B (atroposlib's default is to): only who asks does."""
    env = {**told.config, **({} if told.schema else given)}
    env = {
        name: value
        for name, value in env.items()
        if name not in ENV_WIRING and (name in given or not (endless(value) or name == "use_wandb"))
    }
    group = env.setdefault("group_size", DEFAULT_GROUP_SIZE)
    if env.get("batch_size") in (None, -1):
        whole_groups = max(1, DEFAULT_BATCH_SIZE // group) if isinstance(group, int) and group > 0 else 1
        env["batch_size"] = whole_groups * group
    return env


def minibatch_problem(minibatches: int, env: Mapping[str, Any]) -> Problem | None:
    """More optimiser steps wanted of a batch than it has rollouts: there would be one for each, and no more."""
    batch = env["batch_size"]
    if not isinstance(batch, int) or minibatches <= max(1, batch):
        return None
    rule = f"must be at most env.batch_size ({batch}), the rollouts of a batch"
    return Problem(field="trainer.minibatches", got=minibatches, rule=rule, suggest=(batch,))


def batch_problem(env: Mapping[str, Any], smallest_group: int) -> Problem | None:
    """What is wrong with the sizes of group and batch; `smallest_group`: what the estimator of advantages needs."""
    batch, group = env["batch_size"], env["group_size"]
    if not (isinstance(batch, int) and isinstance(group, int) and group > 0 and batch > 0):
        return Problem(field="env.batch_size", got=batch, rule="must be a positive integer")
    if group < smallest_group:
        return Problem(field="env.group_size", got=group, rule=_GROUP_RULE, suggest=(8, 16))
    if group > LARGEST_BATCH:
        return Problem(field="env.group_size", got=group, rule=_AT_MOST)
    if batch > LARGEST_BATCH:
        return Problem(field="env.batch_size", got=batch, rule=_AT_MOST, suggest=(LARGEST_BATCH // group * group,))
    if batch % group:
        below = batch // group * group
        near = tuple(value for value in (below, below + group) if value)
        rule = f"must be a multiple of group_size {group}"
        return Problem(field="env.batch_size", got=batch, rule=rule, suggest=near)
    return None


EQUAL_SCORES = "ensure_scores_are_not_same"
"""Drops groups of equal scores: right where an estimator compares the scores of a group, and nothing else counts."""

STEPS = "trainer.total_steps"
THRESHOLD = "success_threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings, and where those come from that were given: the others are defaults, or a resumed run's."""

    settings: Settings
    sources: Sources
    coerced: Mapping[str, Any] = field(default_factory=dict)  # edits taken for another type: name as given -> value
    trainer_defaults: Mapping[str, Any] = field(default_factory=dict)  # of the environment, by field


@dataclass(slots=True)
class Gathering:
    """Sections as given, and what was found wrong with them."""

    policy: Policy
    sections: Sections = field(default_factory=lambda: {"run": {}, "env": {}, "inference": {}, "trainer": {}})
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

    def add_file(self, given: Sections) -> None:
        """Lay a file's sections over what is there."""
        for section, values in given.items():
            for name, value in values.items():
                self.put(f"{section}.{name}", value, "file")

    def add_edit(self, edit: Edit | Problem) -> None:
        """Lay an edit over what is there."""
        if isinstance(edit, Problem):
            self.problems.append(edit)
        elif edit.name in SWITCHES:
            self.problems.extend(filter(None, [edit.switched_on()]))
        elif isinstance(place := edit.place(), Problem):
            self.problems.append(place)
        else:
            self.put(place, edit.value, "edit", edit.name)
            self.edits.append(edit)

    def settle(self) -> Resolved:
        """Lay the policy over all, validate our sections, ask the environment about its own.

        Raises:
            InvalidConfig: with every problem at once; UnknownField, LockedField or PolicyCap where it is the only one.
        """
        environment = self._environment()
        self._hold(environment)
        given = {name: value for name, value in self.sections["env"].items() if name not in ENV_WIRING}
        told = describe(environment, given)
        self._add_defaults(told)
        parts = {name: self._validated(name) for name in SECTIONS}
        env = effective(given, told)
        trainer = parts["trainer"]
        trainer = trainer if isinstance(trainer, TrainerSettings) else TrainerSettings()
        if trainer.learns_from_equal_scores and EQUAL_SCORES in env and EQUAL_SCORES not in given:
            env[EQUAL_SCORES] = False
        is_known = parts["trainer"] is not None  # refused settings are mended first: what follows from them is unknown
        self._check_environment(told, given, env, 2 if is_known and trainer.compares_groups else 1)
        if is_known:
            wrong = [over_cap(self.policy, trainer.total_steps), minibatch_problem(trainer.minibatches, env)]
            self.problems.extend(filter(None, wrong))
        if self.problems:
            raise self._refusal(told)
        confirm(environment, env, told)
        settings = Settings.model_validate({**parts, "env": env})
        return Resolved(
            settings=settings,
            sources=self.sources,
            coerced=dict(_coerced(self.edits, settings)),
            trainer_defaults=told.trainer,
        )

    def _refusal(self, told: Description) -> InvalidConfig:
        """The error for everything that is wrong, under the names that were given."""
        refused = refusal([self._as_given(problem, told) for problem in self.problems])
        named = {problem.field for problem in self.problems}
        numbers = {edit.name: _number(edit, told) for edit in self.edits}
        fine = {edit.name for edit in self.edits} - {self._names.get(field, field) for field in named}
        if coerced := {name: number for name, number in numbers.items() if number is not None and name in fine}:
            refused.details["coerced"] = coerced
        return refused

    def _as_given(self, problem: Problem, told: Description) -> Problem:
        """With the name that was given; with those that there are, where there is none of that name."""
        named = replace(problem, field=self._names.get(problem.field, problem.field))
        return replace(named, available=names_beside(told.fields)) if isinstance(named, UnknownSetting) else named

    def _environment(self) -> EnvironmentProgram:
        """The environment's file; paths are made absolute, so that they mean the same from any folder."""
        run = self.sections["run"]
        keys = ("environment", "interpreter", "working_directory")
        name, interpreter, folder = (str(run[key]) if run.get(key) else None for key in keys)
        environment = find_program(name or RunSettings().environment, interpreter, folder)
        if name is not None:
            run["environment"] = reference(name, environment.name, str(environment.path))
        self._name_variant(environment)
        if interpreter is not None and "/" in interpreter:
            run["interpreter"] = environment.interpreter
        if folder is not None:
            run["working_directory"] = str(environment.working_directory)
        return environment

    def _hold(self, environment: EnvironmentProgram) -> None:
        """Lay the policy's locks over what was given."""
        locks_env = any(key.startswith("env.") for key in self.policy.lock)
        fields = describe(environment, {}).fields if locks_env else frozenset[str]()
        for key, value in policy_locks(self.policy, fields).items():
            section, _, name = key.partition(".")
            if section == "env" and name in ENV_WIRING:
                continue  # told, and refused like all wiring
            if key in self.sources and not same(key, self.sections[section][name], value):
                lock = policy_lock(key, value, self.policy)
                self.problems.append(lock.refused(self._names[key], self.sections[section][name]))
            self.put(key, value, "policy")

    def _name_variant(self, environment: EnvironmentProgram) -> None:
        """Which variant of a family it is, says the environment's name: another one is refused."""
        lock, given = variant_lock(environment), self.sections["env"].get("variant")
        if lock is not None and given not in (None, lock.value):
            self.problems.append(lock.refused(self._names.get(lock.key, lock.key), given))
        self.sections["env"] |= environment.variant_setting

    def _add_defaults(self, told: Description) -> None:
        """Where nobody gave another value: what the environment says of our settings, steps lowered to their cap."""
        if (own := told.config.get(THRESHOLD)) and THRESHOLD not in self.sections["run"]:
            self.put(f"run.{THRESHOLD}", own, "config_init")
        given, cap = set(self.sections["trainer"]), self.policy.caps.max_steps
        for name, value in told.trainer.items():
            if name not in given:
                self.put(f"trainer.{name}", value, "config_init")
        steps = self.sections["trainer"].get("total_steps", TrainerSettings().total_steps)
        if cap is not None and "total_steps" not in given and cap < steps:
            self.put(STEPS, cap, "policy")

    def _validated(self, name: str) -> Section | None:
        model, given = SECTIONS[name], self.sections[name]
        known = {key: value for key, value in given.items() if key in model.model_fields}
        for key in given.keys() - known.keys():
            self.problems.append(self._unknown(f"{name}.{key}", given[key]))
        refused = truth_for_number(model, name, known)
        self.problems.extend(refused)
        for problem in refused:
            del known[problem.field.removeprefix(f"{name}.")]
        try:
            return model.model_validate(known)
        except ValidationError as error:
            self.problems.extend(_problems_of(name, error))
        return None

    def _check_environment(
        self, told: Description, given: Mapping[str, Any], env: Mapping[str, Any], smallest_group: int
    ) -> None:
        """What only beside the environment can be seen to be wrong."""
        self._refuse_wiring(told)
        for problem in told.problems:
            name = problem.field.removeprefix("env.")
            is_unknown = bool(told.schema) and name not in told.fields
            self.problems.append(self._unknown(problem.field, problem.got, told.fields) if is_unknown else problem)
        known = {problem.field for problem in self.problems}
        odd = {one.field: one for values in (env, given) for one in odd_numbers(told.schema, values)}
        self.problems.extend(problem for field, problem in odd.items() if field not in known)
        if not known & {"env.batch_size", "env.group_size"}:
            self.problems.extend(filter(None, [batch_problem(env, smallest_group)]))
        for edit in self.edits:
            if edit.name in told.fields and edit.name not in ENV_WIRING and edit.key in OWN_KEYS:
                self.problems.append(edit.ambiguous([edit.key, f"env.{edit.name}"]))

    def _refuse_wiring(self, told: Description) -> None:
        for key, source in self.sources.items():
            lock = wiring_lock(key, {**told.config, "tokenizer_name": self._model})
            if lock is not None and source != "policy":
                value = self.policy.lock.get(key, lock.value)
                section, _, name = key.partition(".")
                self.problems.append(replace(lock, value=value).refused(self._names[key], self.sections[section][name]))

    @property
    def _model(self) -> Any:
        return self.sections["inference"].get("model", InferenceSettings().model)

    def _unknown(self, key: str, got: Any, env_fields: frozenset[str] = frozenset()) -> Problem:
        return UnknownSetting(
            field=self._names.get(key, key),
            got=got,
            did_you_mean=nearest_setting(self._names.get(key, key), env_fields),
        )


def _number(edit: Edit, told: Description) -> float | None:
    """The number that an edit gives as text, where one is wanted."""
    section, _, name = edit.key.partition(".")
    schema = SECTIONS[section].model_json_schema() if section in SECTIONS else told.schema
    return number_in_text(schema.get("properties", {}).get(name, {}), edit.value)


def _coerced(edits: list[Edit], settings: Settings) -> Iterator[tuple[str, Any]]:
    """Edits whose value is now of another kind than it was given."""
    values = settings.model_dump(mode="json")
    for edit in edits:
        section, _, name = edit.key.partition(".")
        if name in values[section] and _kind(values[section][name]) != _kind(edit.value):
            yield edit.name, values[section][name]


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(type(value))
    for name, types in (("number", (int, float)), ("text", str), ("list", (list, tuple))):
        if isinstance(value, types):
            return name
    return str(type(value))


def _problems_of(section: str, error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        rule = TEXT if detail["type"] == "string_type" else detail["msg"].replace("Input should be", "must be")
        inside = ".".join(str(part) for part in detail["loc"][1:])  # of a setting with settings of its own
        rule = f"{inside}: {rule}" if inside else rule
        facts = detail.get("ctx", {})
        path = ".".join(str(part) for part in detail["loc"][:1]) or str(facts.get("field", ""))
        got = facts.get("got") if "got" in facts else detail["input"]
        guess = facts.get("did_you_mean")
        yield Problem(field=f"{section}.{path}".rstrip("."), got=got, rule=rule, did_you_mean=guess)
