"""What a training on a file is asked for (`FileTraining`), and the settings of a run that hold for
it.

A run by reinforcement learning has an environment; one of these has a data set instead: answers to
imitate (`sft`), or pairs of answers of which one is preferred (`dpo`). What they have in common,
the base model, the adapter, Adam, checkpoints, stands in the same sections as everywhere. What only
such a run has is a section of its own, `data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from halteres.config.edits import ALIASES, Edit, Word, read_edit, schema_at
from halteres.config.files import Source, Sources, data_place
from halteres.config.operator_policy import Policy, is_same_value, load_policy, policy_lock
from halteres.config.problem import Problem, UnknownSetting, refusal, rule_of
from halteres.config.settings import (
    InferenceSettings,
    RunSettings,
    Section,
    Settings,
    TrainerSettings,
    setting,
)
from halteres.documents import DocumentError, half_characters
from halteres.errors import InvalidData, nearest
from halteres.files import UnreadableFile, read_json, replace_file

Method = Literal["sft", "dpo"]
METHODS: tuple[Method, ...] = ("sft", "dpo")

FILE = "file_training.json"  # in the directory of a run
SECTION = "data"

BATCH_SIZES: Mapping[Method, int] = {"sft": 32, "dpo": 16}
"""Rows of a step where nothing else was asked for."""


class FileTraining(Section):
    """Section `data`: which rows a run trains on, and how."""

    method: Method = setting("sft", "what the rows are trained with", allowed=METHODS)
    data: str = setting(
        "", "a JSONL, JSON or Parquet file, or OWNER/NAME[:SPLIT] on the hub", reaches="name"
    )
    eval_data: str | None = setting(None, "held-out rows, of the same form", reaches="name")
    hold_out: float = setting(
        0.05, "share of the prompts that is held out where there is no eval_data", ge=0, lt=1
    )
    most_held_out: int = setting(400, "rows at most that such a share holds out", ge=1)
    epochs: float = setting(1.0, "times that the rows are gone through", gt=0, le=1000)
    batch_size: int = setting(32, "rows of one optimiser step", ge=1, le=65_536)
    packing: bool = setting(
        False, "sft: several rows of a batch in one sequence, where each sees those before it"
    )
    too_long: Literal["refuse", "drop"] = setting(
        "refuse", "what becomes of rows that are longer than trainer.max_token_trainer_length"
    )
    on_identical: Literal["refuse", "drop"] = setting(
        "refuse", "dpo: what becomes of a pair whose two answers are the same"
    )
    beta: float = setting(0.1, "dpo: how much a log-ratio to the base model counts", gt=0, le=100)
    label_smoothing: float = setting(
        0.0, "dpo: share of the pairs that is taken to be labelled the wrong way", ge=0, lt=0.5
    )
    tokenizer: str | None = setting(
        None, "folder of the tokenizer, where the base model lies elsewhere", reaches="path"
    )
    digest: str = setting("", "SHA-256 of the rows, written when the run begins")

    @property
    def label(self) -> str:
        """What stands where a run by reinforcement learning has the name of its environment."""
        name = Path(self.data).name.partition(".")[0]
        return f"{self.method}:{name or self.data}"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of the run in this directory. InvalidData where it cannot be read."""
        try:
            return cls.model_validate(read_json(folder / FILE, dict[str, Any]))
        except (UnreadableFile, ValidationError) as error:
            raise InvalidData(f"{folder / FILE} cannot be read.", f"{error}.") from error

    def write(self, folder: Path) -> None:
        """Into this directory."""
        replace_file(folder / FILE, self.model_dump_json(indent=1).encode() + b"\n")


FIELDS: Mapping[str, tuple[str, ...]] = {
    "run": (*("name", "seed", "max_minutes", "sinks", "wandb_project", "wandb_entity", "tags"),),
    "inference": ("model", "threads", "cache_gb", "dtype", "device", "engine"),
    "trainer": (
        *("total_steps", "lora_rank", "train_unembed", "learning_rate", "schedule"),
        *("warmup_steps", "beta1", "beta2", "adam_eps", "grad_clip_norm"),
        *("max_token_trainer_length", "checkpoint_every", "eval_every"),
    ),
    SECTION: tuple(
        name for name in FileTraining.model_fields if name not in ("method", "data", "digest")
    ),
}
"""The settings that a training on a file has, by section."""

ONLY: Mapping[Method, tuple[str, ...]] = {
    "sft": ("packing",),
    "dpo": ("on_identical", "beta", "label_smoothing"),
}
"""Settings of section `data` that one method has alone."""

_MODELS: Mapping[str, type[Section]] = {
    "run": RunSettings,
    "inference": InferenceSettings,
    "trainer": TrainerSettings,
    SECTION: FileTraining,
}

# what only a run by reinforcement learning reads, at values that no rule refuses
_FIXED: Mapping[str, Any] = {"loss": "cross_entropy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedFile:
    """Settings of a training on a file, and where those come from that were given."""

    settings: Settings
    training: FileTraining
    sources: Sources
    policy: Policy = field(default_factory=load_policy)

    def is_given(self, key: str) -> bool:
        """Whether this setting was given, or held by a policy, in this run or in one that it goes
        on from."""
        return key in self.sources


def resolve_file_training(
    method: Method,
    data: str | None,
    edits: Sequence[str] = (),
    *,
    changes: Mapping[str, Any] | None = None,
    base: ResolvedFile | None = None,
    policy: Policy | None = None,
) -> ResolvedFile:
    """The settings of a training on a file, checked.

    Args:
        method: what it trains with.
        data: its file, or a name on the hub; None: that of `base`.
        edits: `section.field=value`, or a field alone.
        changes: edits whose values are typed (JSON), by the same names.
        base: settings to start from, of a run that is gone on from.
        policy: what the operator locks and caps; default: the policy in force.

    Raises:
        InvalidConfig: with every problem at once; UnknownField, LockedField or PolicyCap where it
            is the only one.
    """
    policy = policy or load_policy()
    given = _Given(method)
    if base is not None:
        given.begin_with(base)
    if data is not None:
        given.put(f"{SECTION}.data", data_place(data, Path()), "edit")
    typed = [Edit(name=name, value=value) for name, value in (changes or {}).items()]
    for edit in (*map(read_edit, edits), *typed):
        if isinstance(edit, Problem):
            given.problems.append(edit)
        else:
            given.add(edit)
    given.hold(policy)
    parts = {name: given.section(name) for name in _MODELS}
    if given.problems:
        raise refusal(given.problems)
    training = parts.pop(SECTION)
    assert isinstance(training, FileTraining)  # noqa: S101 - for the type checker
    return ResolvedFile(
        settings=Settings.model_validate(parts),
        training=training,
        sources=given.sources,
        policy=policy,
    )


class _Given:
    """Settings as they were given, and what is wrong with them."""

    def __init__(self, method: Method) -> None:
        self._method: Method = method
        self._values: dict[str, dict[str, Any]] = {name: {} for name in _MODELS}
        self._values["trainer"].update(_FIXED)
        self._values[SECTION].update(method=method, batch_size=BATCH_SIZES[method])
        self.sources: dict[str, Source] = {f"{SECTION}.method": "edit"}
        self.problems: list[Problem] = []

    def begin_with(self, base: ResolvedFile) -> None:
        """Start from the settings of another run."""
        for name, values in base.settings.model_dump(exclude_unset=True).items():
            if name in self._values:
                self._values[name].update(values)
        self._values[SECTION].update(base.training.model_dump(exclude={"method"}))
        # its name is its own
        self._values["run"].pop("name", None)
        self.sources.update({key: "resume" for key in base.sources if key != "run.name"})

    def put(self, key: str, value: Any, source: Source) -> None:
        """Place a value."""
        section, _, name = key.partition(".")
        self._values[section][name] = value
        self.sources[key] = source

    def add(self, edit: Edit) -> None:
        """Place an edit, read by the type of its setting."""
        halves = half_characters(edit.value)
        if halves is not None:
            self.problems.append(Problem(field=edit.name, got=ascii(edit.value), rule=halves))
            return
        key = self._key_of(edit.name)
        if key is None:
            self.problems.append(self._unknown(edit))
            return
        section, _, name = key.partition(".")
        try:
            value = schema_at(_schema_of(section), [name]).value_of(edit.value)
        except DocumentError as error:
            self.problems.append(Problem(field=edit.name, got=edit.value, rule=str(error)))
            return
        if isinstance(value, Word):
            value = str(value)
        if key in (f"{SECTION}.eval_data", f"{SECTION}.tokenizer"):
            value = data_place(value, Path())
        self.put(key, value, "edit")

    def hold(self, policy: Policy) -> None:
        """Lay the operator's policy over what was given."""
        for key, value in policy.lock.items():
            section, _, name = key.partition(".")
            if name not in FIELDS.get(section, ()):
                continue
            before = self._values[section].get(name)
            if self.sources.get(key) == "edit" and not is_same_value(key, before, value):
                self.problems.append(policy_lock(key, value, policy).refused(key, before))
            self.put(key, value, "policy")

    def section(self, name: str) -> Section | None:
        """One section, checked; None where something is wrong with it."""
        model = _MODELS[name]
        try:
            return model.model_validate(self._values[name])
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                facts = detail.get("ctx", {})
                field = str(facts.get("field", ""))
                if detail["loc"]:
                    field = str(detail["loc"][0])
                got = facts.get("got", detail["input"])
                self.problems.append(
                    Problem(field=f"{name}.{field}".rstrip("."), got=got, rule=rule_of(detail))
                )
        return None

    def _key_of(self, given: str) -> str | None:
        """section.field of a name; None where no setting of a training on a file has it."""
        section, _, name = ALIASES.get(given, given).rpartition(".")
        if section:
            if name in self._fields(section):
                return f"{section}.{name}"
            return None
        owners = [one for one in (SECTION, *FIELDS) if name in self._fields(one)]
        if owners:
            return f"{owners[0]}.{name}"
        return None

    def _fields(self, section: str) -> tuple[str, ...]:
        """The settings of a section, without those of the other method."""
        names = FIELDS.get(section, ())
        if section != SECTION:
            return names
        others = [name for method in METHODS if method != self._method for name in ONLY[method]]
        return tuple(name for name in names if name not in others)

    def _unknown(self, edit: Edit) -> Problem:
        names = {name: f"{one}.{name}" for one in FIELDS for name in self._fields(one)}
        bare = edit.name.rpartition(".")[2]
        guess = nearest(bare, names)
        for method in METHODS:
            if bare in ONLY[method] and method != self._method:
                rule = f"it is a setting of {method} alone"
                return Problem(field=edit.name, got=edit.value, rule=rule)
        did_you_mean = None
        if guess is not None:
            did_you_mean = names[guess]
        return UnknownSetting(
            field=edit.name,
            got=edit.value,
            rule=f"a training by {self._method} has no such setting",
            did_you_mean=did_you_mean,
            available=tuple(sorted(names.values())),
        )


@cache
def _schema_of(section: str) -> dict[str, Any]:
    return _MODELS[section].model_json_schema()


def effective(resolved: ResolvedFile) -> Iterator[tuple[str, Any, Source]]:
    """Every setting that holds for such a run: section.field, value, where it comes from."""
    values = {
        **resolved.settings.model_dump(mode="json"),
        SECTION: resolved.training.model_dump(mode="json"),
    }
    others = [
        name for method in METHODS if method != resolved.training.method for name in ONLY[method]
    ]
    for section, names in {SECTION: ("method", "data", *FIELDS[SECTION]), **FIELDS}.items():
        shown = names
        if section == SECTION:
            shown = ("method", "data", *(name for name in FIELDS[SECTION] if name not in others))
        for name in shown:
            key = f"{section}.{name}"
            yield key, values[section][name], resolved.sources.get(key, "default")
