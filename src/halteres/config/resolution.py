"""The settings of a run, from a file and edits to what will hold: `resolve_settings`.

Four steps, in this order: what was given is gathered; the operator's policy is laid over it; the
environment is asked what it makes of its own settings; all of it is checked, and one error has
every problem.

Defaults come first, then the file, then edits, then what the policy holds. An environment's own
defaults are its `config_init` and its `trainer_defaults`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from halteres.config import environ, sampler_list
from halteres.config.discovery import BUILTIN_FOLDER, reference
from halteres.config.edits import (
    ENVIRONMENT,
    OWN_KEYS,
    SWITCHES,
    Edit,
    Schema,
    Word,
    is_finite,
    names_beside,
    nearest_setting,
    number_in_text,
    odd_numbers,
    read_edit,
    schema_at,
    switch_refused,
    value_of,
)
from halteres.config.environ import LARGEST_BATCH
from halteres.config.files import Sections, Source, Sources, placed, read_sections
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
from halteres.config.problem import (
    Problem,
    UnknownSetting,
    refusal,
    rule_of,
    struck_out_problem,
)
from halteres.config.program import Description, EnvironmentProgram, describe, find_program
from halteres.config.settings import (
    ENV_WIRING,
    SECTIONS,
    InferenceSettings,
    RunSettings,
    Section,
    Settings,
    TrainerSettings,
    by_key,
)
from halteres.documents import DocumentError, half_characters
from halteres.errors import InvalidConfig
from halteres.logins import is_struck
from halteres.models.training_defaults import batch_for, rate_for

# where the environment leaves them unset (seeds 000, 002)
DEFAULT_GROUP_SIZE, DEFAULT_BATCH_SIZE = 16, 128

EQUAL_SCORES = "ensure_scores_are_not_same"
"""Drops groups of equal scores: right where an estimator compares the scores of a group, and
nothing else counts.
"""

STEPS, RATE, BATCH = "trainer.total_steps", "trainer.learning_rate", "env.batch_size"
THRESHOLD = "success_threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings as they will hold, and where those come from that were given: the others are
    defaults, or a resumed run's.
    """

    settings: Settings
    sources: Sources
    environment: EnvironmentProgram
    description: Description  # what the environment says of itself with these settings
    # section.field -> the value that changes are counted from: the default, or a resumed run's
    defaults: Mapping[str, Any]
    # edits taken for another type: name as given -> value
    coerced: Mapping[str, Any] = field(default_factory=dict)
    # earlier edits of a draft that were left out: locked by now, or gone (section.field -> value)
    discarded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def environment_settings(self) -> dict[str, Any]:
        """All settings that the environment runs with, ours among them that it is given."""
        run = self.settings.run
        ours = {"seed": run.seed, "success_threshold": run.success_threshold}
        return {**self.settings.env, **ours}


def resolve_settings(
    environment: str | None,
    file: Path | None,
    edits: Sequence[str],
    *,
    base: Settings | None = None,
    changes: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
) -> Resolved:
    """The settings of a run, checked, and where those come from that were given.

    Args:
        environment: name or path; beats the file's.
        file: YAML in our sections or in the seeds' format.
        edits: `section.field=value`, or a bare field where only one section has it; its type reads
            the value.
        base: settings to start from instead of the defaults (a resumed run's).
        changes: edits whose values are typed (JSON), by the same names.
        policy: what the operator locks and caps; default: the policy in force.

    Raises:
        NotFound: there is no such environment or file.
        InvalidConfig: with every problem at once; UnknownField, LockedField or PolicyCap where it
            is the only one.
    """
    if policy is None:
        policy = load_policy()
    typed = [Edit(name=name, value=value) for name, value in (changes or {}).items()]
    given = _gather(environment, file, [*map(read_edit, edits), *typed], base)
    _apply_policy(given, policy)
    program = _find_environment(given)
    # before a process is asked: the environment's is not to have them
    environ.hold_back(sampler_list.key_variables(_samplers(given)))
    description = _ask(given, program, policy)
    return _check(given, program, description, policy, base)


def _samplers(given: _Given) -> sampler_list.Given:
    """As they were given; none where they are refused later."""
    try:
        section = InferenceSettings(samplers=given.sections["inference"].get("samplers", 0))
    except ValueError:
        return 0
    return section.samplers


@dataclass(slots=True)
class _Given:
    """Settings as they were given, not checked yet, and what is wrong with them."""

    sections: Sections = field(default_factory=lambda: {name: {} for name in ("env", *SECTIONS)})
    sources: dict[str, Source] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # key -> name as it was given
    edits: list[Edit] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # what had been given for settings of the environment that the policy holds, and its source
    held: dict[str, tuple[Any, Source | None]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, Any]:
        """The environment's settings, without what a run fills in itself."""
        values = self.sections["env"]
        return {name: value for name, value in values.items() if name not in ENV_WIRING}

    def put(self, key: str, value: Any, source: Source, name: str = "") -> None:
        """Place a value."""
        section, _, bare = key.partition(".")
        self.sections[section][bare] = value
        self.sources[key] = source
        self.names[key] = name or key

    def value(self, key: str) -> Any:
        """The value of a key; None where nothing was given."""
        section, _, bare = key.partition(".")
        return self.sections[section].get(bare)

    def name(self, key: str) -> str:
        """The name under which a key was given."""
        return self.names.get(key, key)

    def refuse(self, *problems: Problem | None) -> None:
        """Add what is wrong."""
        self.problems.extend(problem for problem in problems if problem is not None)

    def unknown(self, key: str, got: Any, env_fields: Iterable[str] = ()) -> UnknownSetting:
        """The problem with a name that no setting has."""
        name = self.name(key)
        return UnknownSetting(field=name, got=got, did_you_mean=nearest_setting(name, env_fields))

    def read_value(self, index: int, schema: Schema) -> None:
        """Give an edit the value that its text has for a setting of this schema. What was typed is
        that value from here on; a text among typed values stays what was given, and is counted as
        taken for another type.
        """
        edit = self.edits[index]
        section, _, name = edit.key.partition(".")
        try:
            value = _typed(edit, schema)
        except DocumentError as error:
            self.refuse(Problem(field=edit.name, got=edit.value, rule=str(error)))
            self.sections[section].pop(name, None)
            return
        self.sections[section][name] = value
        if isinstance(edit.value, Word):
            self.edits[index] = replace(edit, value=value)


def _as_typed(edit: Edit, schema: Schema) -> Any:
    """The value of an edit; the text as it was given where that is no value of its setting."""
    try:
        return _typed(edit, schema)
    except DocumentError:
        return edit.value


def _typed(edit: Edit, schema: Schema) -> Any:
    """The value of an edit in a section of this schema. Raises DocumentError."""
    value = schema_at(schema, [edit.key.partition(".")[2]]).value_of(edit.value)
    return placed(edit.key, value, Path())


@cache
def _schema_of(section: str) -> dict[str, Any]:
    return SECTIONS[section].model_json_schema()


def _gather(
    environment: str | None,
    file: Path | None,
    edits: Sequence[Edit | Problem],
    base: Settings | None,
) -> _Given:
    """What was given, each over what came before it."""
    given = _Given()
    if base is not None:
        for name, values in base.model_dump(exclude_unset=True).items():
            given.sections[name].update(values)
    if file is not None:
        for section, values in read_sections(file, given.problems).items():
            for name, value in values.items():
                key = f"{section}.{name}"
                given.put(key, placed(key, value, file.parent, Path()), "file")
    for edit in edits:
        if isinstance(edit, Problem):
            given.refuse(edit)
        else:
            _add_edit(given, edit)
    if environment is not None:
        given.put(ENVIRONMENT, environment, "edit")
    return given


def _add_edit(given: _Given, edit: Edit) -> None:
    """Lay an edit over what is there. A text for one of the environment's settings stays a text:
    what it means, only the environment can say.
    """
    halves = half_characters(edit.value)
    if halves is not None:
        given.refuse(Problem(field=edit.name, got=ascii(edit.value), rule=halves))
        return
    if edit.name in SWITCHES:
        if value_of(edit.value, {"type": "boolean"}) not in (False, None, "false"):
            given.refuse(switch_refused(edit.name, edit.value))
        return
    place = edit.place()
    if isinstance(place, Problem):
        given.refuse(place)
        return
    given.put(place, edit.value, "edit", edit.name)
    given.edits.append(edit)
    section = place.partition(".")[0]
    if section in SECTIONS:
        given.read_value(len(given.edits) - 1, _schema_of(section))


def _apply_policy(given: _Given, policy: Policy) -> None:
    """Lay the policy's locks over what was given. Whether the environment has the fields that it
    locks is not known before it was asked: see `_settle_locks`.
    """
    for key, value in policy.lock.items():
        section, _, name = key.partition(".")
        if section == "env" and name in ENV_WIRING:
            # it is refused like all wiring, with the policy's value
            continue
        before, source = given.value(key), given.sources.get(key)
        if section == "env":
            given.held[key] = (before, source)
        elif source is not None and not is_same_value(key, before, value):
            given.refuse(policy_lock(key, value, policy).refused(given.name(key), before))
        given.put(key, value, "policy", given.name(key))


def _find_environment(given: _Given) -> EnvironmentProgram:
    """The environment's file. Paths are made absolute, so that they mean the same from any folder.

    Raises:
        NotFound: there is none, or not its interpreter, or not its folder.
    """
    run = given.sections["run"]
    keys = ("environment", "interpreter", "working_directory")
    name, interpreter, folder = (str(run[key]) if run.get(key) else None for key in keys)
    program = find_program(name or RunSettings().environment, interpreter, folder)
    if name is not None:
        run["environment"] = reference(name, program.name, str(program.path))
    if interpreter is not None and "/" in interpreter:
        run["interpreter"] = program.interpreter
    if folder is not None:
        run["working_directory"] = str(program.working_directory)
    lock, variant = variant_lock(program), given.value("env.variant")
    if lock is not None and variant not in (None, lock.value):
        given.refuse(lock.refused(given.name(lock.key), variant))
    given.sections["env"] |= program.variant_setting
    return program


def _ask(given: _Given, program: EnvironmentProgram, policy: Policy) -> Description:
    """Ask the environment what it makes of its settings, and read the texts that were typed for
    them. It is asked once; a second time only where a text meant something else than it looked
    like. Raises EnvironmentBroken.
    """
    guessed = given.env
    for edit in given.edits:
        section, _, name = edit.key.partition(".")
        if section == "env" and given.sources.get(edit.key) == "edit" and name in guessed:
            guessed[name] = _typed(edit, {})
    description = describe(program, guessed)
    absent = _settle_locks(given, description, policy)
    for index, edit in enumerate(given.edits):
        is_open = given.sources.get(edit.key) == "edit"
        if edit.key.startswith("env.") and is_open and isinstance(edit.value, str):
            given.read_value(index, description.schema)
    wanted = {name: value for name, value in guessed.items() if name not in absent}
    if given.env == wanted:
        problems = [one for one in description.problems if one.field not in absent.values()]
        description = replace(description, problems=tuple(problems))
    else:
        description = describe(program, given.env)
    if description.defaults is not None:
        return description
    # A file that describes itself by other means, or by an older Halteres of its own Python.
    return replace(description, defaults=describe(program, {}).config)


def _settle_locks(given: _Given, description: Description, policy: Policy) -> dict[str, str]:
    """Refuse what was given against the policy's locks on the environment.

    An environment that lists its fields may lack one that the policy locks: such a lock is taken
    back. Returns these: name -> key.
    """
    absent: dict[str, str] = {}
    for key, (before, source) in given.held.items():
        name, lock = key.removeprefix("env."), policy_lock(key, policy.lock[key], policy)
        if not description.fields or name in description.fields:
            typed = _as_typed(Edit(name=key, value=before), description.schema)
            if source is not None and not is_same_value(key, typed, lock.value):
                given.refuse(lock.refused(given.name(key), typed))
            continue
        del given.sections["env"][name], given.sources[key]
        if source is None:
            absent[name] = key
        else:
            given.put(key, before, source, given.name(key))
    return absent


def _check(
    given: _Given,
    program: EnvironmentProgram,
    description: Description,
    policy: Policy,
    base: Settings | None,
) -> Resolved:
    """The settings as they will hold. Raises InvalidConfig, with every problem."""
    _add_defaults(given, description, policy)
    parts = {name: _validated(given, name) for name in SECTIONS}
    trainer = parts["trainer"]
    # What follows from settings that were refused is unknown: they are mended first.
    known_trainer = None
    if isinstance(trainer, TrainerSettings):
        known_trainer = trainer
    env = _environment_values(given.env, description, known_trainer or TrainerSettings())
    if BUILTIN_FOLDER in program.path.resolve().parents:
        _suit_batch(given, env)
    for name, value in given.env.items():
        if is_struck(value):
            given.refuse(struck_out_problem(given.name(f"env.{name}"), value))
    compares_groups = known_trainer is not None and known_trainer.compares_groups
    _check_environment(given, description, env, 2 if compares_groups else 1, policy)
    if known_trainer is not None:
        given.refuse(over_cap(policy, known_trainer.total_steps))
        given.refuse(_minibatches_problem(known_trainer.minibatches, env.get("batch_size")))
        if isinstance(inference := parts["inference"], InferenceSettings):
            for problem in sampler_problems(
                inference.samplers,
                is_deterministic=known_trainer.deterministic,
                trains_unembed=known_trainer.train_unembed,
            ):
                given.refuse(problem)
    if isinstance(inference := parts["inference"], InferenceSettings):
        for problem in ranks_problems(inference):
            given.refuse(problem)
    if given.problems:
        raise _refused(given, description)
    settings = Settings.model_validate({**parts, "env": env})
    if base is None:
        defaults = _defaults(program, description, policy)
    else:
        defaults = by_key(base)
    return Resolved(
        settings=settings,
        sources=given.sources,
        environment=replace(program, is_foreign=description.is_foreign),
        description=description,
        defaults=defaults,
        coerced=_coerced(given.edits, settings),
    )


def _add_defaults(given: _Given, description: Description, policy: Policy) -> None:
    """Where nothing else was given: what the environment says of our settings, and the number of
    steps lowered to the policy's cap.
    """
    own = description.config.get(THRESHOLD)
    if own and THRESHOLD not in given.sections["run"]:
        given.put(f"run.{THRESHOLD}", own, "config_init")
    trainer, cap = given.sections["trainer"], policy.caps.max_steps
    is_given = "total_steps" in trainer
    for name, value in description.trainer.items():
        if name not in trainer:
            given.put(f"trainer.{name}", value, "config_init")
    _suit_model(given)
    steps = trainer.get("total_steps", TrainerSettings().total_steps)
    if cap is not None and not is_given and cap < steps:
        given.put(STEPS, cap, "policy")


def _suit_model(given: _Given) -> None:
    """Lower the learning rate to what suits the base model's size, where it is a default: ours and
    an environment's are for the built-in model.
    """
    trainer = given.sections["trainer"]
    is_default = "learning_rate" not in trainer or given.sources.get(RATE) == "config_init"
    model = given.value("inference.model")
    if not is_default or not isinstance(model, str):
        return
    rate = rate_for(model, environ.home() / "models", "rl")
    default = trainer.get("learning_rate", TrainerSettings().learning_rate)
    if rate is not None and isinstance(default, int | float) and rate < default:
        given.put(RATE, rate, "model")


def _suit_batch(given: _Given, env: dict[str, Any]) -> None:
    """Lower the batch to what suits the base model's size, where it is a default of an environment
    of ours: those are for the built-in model, whose steps take seconds. Others have their authors'.
    """
    model, batch, group = given.value("inference.model"), env.get("batch_size"), env["group_size"]
    if "batch_size" in given.env or not isinstance(model, str):
        return
    proposed = batch_for(model, environ.home() / "models")
    if proposed is None or not isinstance(batch, int) or not isinstance(group, int):
        return
    if batch <= proposed.answers or group < 1:
        return
    if "group_size" not in given.env and group > proposed.group:
        env["group_size"] = group = proposed.group
        given.sources["env.group_size"] = "model"
    # whole groups
    env["batch_size"] = max(1, proposed.answers // group) * group
    given.sources[BATCH] = "model"


def _validated(given: _Given, name: str) -> Section | None:
    """A section of ours; None where something is wrong with it."""
    model, values = SECTIONS[name], given.sections[name]
    known = {key: value for key, value in values.items() if key in model.model_fields}
    for key in values.keys() - known.keys():
        given.refuse(given.unknown(f"{name}.{key}", values[key]))
    try:
        return model.model_validate(known)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            # of a setting with settings of its own
            inside = ".".join(str(part) for part in detail["loc"][1:])
            if inside:
                rule = f"{inside}: {rule_of(detail)}"
            else:
                rule = rule_of(detail)
            facts = detail.get("ctx", {})
            if detail["loc"]:
                field = str(detail["loc"][0])
            else:
                field = str(facts.get("field", ""))
            got, guess = facts.get("got", detail["input"]), facts.get("did_you_mean")
            key = f"{name}.{field}".rstrip(".")
            given.refuse(Problem(field=key, got=got, rule=rule, did_you_mean=guess))
    return None


def _environment_values(
    given: Mapping[str, Any], description: Description, trainer: TrainerSettings
) -> dict[str, Any]:
    """The environment's values as they will hold.

    Left out are what a run fills in itself; values that JSON has no word for, which the environment
    alone can set; and `use_wandb`, unless it was given: atroposlib's default is true.
    """
    config = {**description.config, **({} if description.schema else given)}
    env = {
        name: value
        for name, value in config.items()
        if name not in ENV_WIRING and (name in given or (is_finite(value) and name != "use_wandb"))
    }
    if env.get("group_size") is None and "group_size" not in given:
        env["group_size"] = DEFAULT_GROUP_SIZE
    group = env["group_size"]
    if env.get("batch_size") in (None, -1) and isinstance(group, int):
        num_groups = 1
        if group > 0:
            num_groups = max(1, DEFAULT_BATCH_SIZE // group)
        env["batch_size"] = num_groups * group
    if trainer.learns_from_equal_scores and EQUAL_SCORES in env and EQUAL_SCORES not in given:
        env[EQUAL_SCORES] = False
    return env


def _check_environment(
    given: _Given,
    description: Description,
    env: Mapping[str, Any],
    smallest_group: int,
    policy: Policy,
) -> None:
    """Refuse what only the environment's answer shows to be wrong; `smallest_group`: rollouts of a
    task that the estimator of advantages needs.
    """
    model = given.sections["inference"].get("model", InferenceSettings().model)
    for key, source in given.sources.items():
        lock = wiring_lock(key, {**description.config, "tokenizer_name": model})
        if lock is not None and source != "policy":
            lock = replace(lock, value=policy.lock.get(key, lock.value))
            given.refuse(lock.refused(given.name(key), given.value(key)))
    for problem in description.problems:
        is_known = problem.field.removeprefix("env.") in description.fields
        if is_known or not description.schema:
            given.refuse(problem)
        else:
            given.refuse(given.unknown(problem.field, problem.got, description.fields))
    known = {problem.field for problem in given.problems}
    odd: dict[str, Problem] = {}
    for values in (env, given.env):
        odd |= {one.field: one for one in odd_numbers(description.schema, values)}
    given.refuse(*(problem for name, problem in odd.items() if name not in known))
    if not known & {"env.batch_size", "env.group_size"}:
        given.refuse(_batch_problem(env.get("batch_size"), env["group_size"], smallest_group))
    for edit in given.edits:
        is_theirs = edit.name in description.fields and edit.name not in ENV_WIRING
        if is_theirs and edit.key in OWN_KEYS:
            given.refuse(edit.ambiguous([edit.key, f"env.{edit.name}"]))


def _batch_problem(batch: Any, group: Any, smallest_group: int) -> Problem | None:
    """What is wrong with the sizes of batch and group, in rollouts; `smallest_group`: what the
    estimator of advantages needs.
    """
    is_number = isinstance(batch, int) and isinstance(group, int)
    if not is_number or group <= 0 or batch <= 0:
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
        largest = LARGEST_BATCH // group * group
        return Problem(field="env.batch_size", got=batch, rule=at_most, suggest=(largest,))
    if batch % group == 0:
        return None
    below = batch // group * group
    near = tuple(value for value in (below, below + group) if value)
    rule = f"must be a multiple of group_size {group}"
    return Problem(field="env.batch_size", got=batch, rule=rule, suggest=near)


def _minibatches_problem(minibatches: int, batch: Any) -> Problem | None:
    """What is wrong with a number of minibatches: a batch of rollouts is divided into them."""
    if not isinstance(batch, int) or minibatches <= max(1, batch):
        return None
    rule = f"must be at most env.batch_size ({batch}), the rollouts of a batch"
    return Problem(field="trainer.minibatches", got=minibatches, rule=rule, suggest=(batch,))


def ranks_problems(inference: InferenceSettings) -> Iterator[Problem]:
    """What a trainer of several processes needs and these settings do not give."""
    if inference.shard and not sampler_list.samplers_of(inference.samplers):
        rule = "needs inference.samplers: a trainer with a sharded base model does not sample"
        yield Problem(field="inference.shard", got=True, rule=rule)
    if inference.engine != "torch":
        rule = f"needs inference.engine 'torch': '{inference.engine}' has one process"
        number = inference.trainer_ranks
        if number > 1:
            yield Problem(field="inference.trainer_ranks", got=number, rule=rule, suggest=(1,))
        elif inference.shard:
            yield Problem(field="inference.shard", got=True, rule=rule)


def sampler_problems(
    given: sampler_list.Given,
    *,
    is_deterministic: bool,
    trains_unembed: bool | None,
) -> Iterator[Problem]:
    """What a run wants that its samplers cannot do."""
    samplers = sampler_list.samplers_of(given)
    if is_deterministic and not sampler_list.are_exact(samplers):
        rule = "needs samplers of ours alone: vLLM does not draw the same tokens twice"
        yield Problem(field="trainer.deterministic", got=True, rule=rule)
    if trains_unembed and not sampler_list.has_own(samplers):
        rule = "needs an engine in inference.samplers ('own'): vLLM takes no such adapter"
        yield Problem(field="trainer.train_unembed", got=True, rule=rule)


def _refused(given: _Given, description: Description) -> InvalidConfig:
    """The error for everything that is wrong, under the names that were given."""
    available = names_beside(description.fields)
    problems: list[Problem] = []
    for problem in given.problems:
        named = replace(problem, field=given.name(problem.field))
        if isinstance(named, UnknownSetting):
            named = replace(named, available=available)
        problems.append(named)
    refused = refusal(problems)
    names = {given.name(problem.field) for problem in given.problems}
    numbers: dict[str, float] = {}
    for edit in given.edits:
        section, _, name = edit.key.partition(".")
        if section in SECTIONS:
            schema = _schema_of(section)
        else:
            schema = description.schema
        number = number_in_text(schema_at(schema, [name]).types, edit.value)
        if number is not None and edit.name not in names:
            numbers[edit.name] = number
    if numbers:
        refused.details["coerced"] = numbers
    return refused


def _defaults(
    program: EnvironmentProgram, description: Description, policy: Policy
) -> dict[str, Any]:
    """section.field -> the value that holds where nothing is set, under the policy."""
    nothing = _Given()
    for key, value in policy_locks(policy, description.fields).items():
        section, _, name = key.partition(".")
        if section in SECTIONS or name not in ENV_WIRING:
            nothing.put(key, value, "policy")
    initial = replace(description, config=description.defaults or {})
    _add_defaults(nothing, initial, policy)
    own = {name: _validated(nothing, name) or model() for name, model in SECTIONS.items()}
    given = {**nothing.env, **program.variant_setting}
    trainer = own["trainer"]
    assert isinstance(trainer, TrainerSettings)  # noqa: S101 - for the type checker
    env = {**_environment_values(given, initial, trainer), **given}
    return by_key(Settings.model_validate({**own, "env": env}))


def _coerced(edits: Collection[Edit], settings: Settings) -> dict[str, Any]:
    """Edits that were taken for another type: name as given -> the value that holds."""
    values = settings.model_dump(mode="json")
    coerced: dict[str, Any] = {}
    for edit in edits:
        section, _, name = edit.key.partition(".")
        value = values[section].get(name, edit.value)
        if _kind(value) != _kind(edit.value):
            coerced[edit.name] = values[section][name]
    return coerced


def _kind(value: Any) -> str:
    kinds = {int: "number", float: "number", tuple: "list"}
    return kinds.get(type(value), type(value).__name__)
