"""The `rewards` list of an environment's config: what each component is, the rubric that a judge
grades by, and how several components make one reward.

reward = sum of weight * value, over the components that have a value; a value is clipped first

gate                  below its threshold nothing but the gates counts; without a value the rollout
                      failed
sum_then_normalize    that sum; the trainer's advantages normalise it
normalize_then_sum    each component is standardised within the group first, then summed (TRL's
                      names for both)

A rubric is data (JSON, TOML, YAML or a mapping):

    criteria:
      - {name: correct, text: "Is the result right?", weight: 2, choices: [wrong, nearly right,
        right]}

Choices run from worst to best: the first is worth 0, the last 1, the others lie evenly between.
Read as well: a bare list of such criteria and `[[criteria]]` (verifiers 0.4), and Harbor's
`[[criterion]]` with `description` and `type` (binary, likert with `points`, numeric with `min` and
`max`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, LiteralString, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from halteres.config import environ
from halteres.config.reach import Places, WebAddress, declared
from halteres.documents import DocumentError, parse_yaml, read_document
from halteres.errors import InvalidConfig
from halteres.scores import Combination, Output

Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
When = Literal["episode", "turn", "difference"]
Method = Literal["ranking", "pairwise"]

TOTAL, SHARE = "total", "share_of_gain"
# names that metrics use below `reward/` and `panel/`
RESERVED = ("mean", "std", "min", "max", "success", TOTAL, SHARE)

DISAGREEMENT, OUT_OF_RANGE = "disagreement", "out_of_range"
"""What comes with a model's value: how far an ensemble's members are apart; 1 where no calibrated
score was like it.
"""

# what a rubric's criterion looks for: that something is there, or is right
Aspect = Literal["presence", "correctness"]
RESERVED_PARTS = (DISAGREEMENT, OUT_OF_RANGE, SHARE, *get_args(Aspect))
"""Names that metrics use below a component's, and that no criterion and no objective may have."""

# of a rubric's criterion: each has a letter of its own, and a likert scale seldom has more
MOST_CHOICES = 11
QUANTILE = "_q95"  # after a metric's name: the value that 95 % of the answers do not exceed
_EPSILON = 1e-4  # added to a standard deviation, as TRL does
_SOURCES = ("environment", "function", "model", "rubric", "rubric_column", "judge")


class _Spec(BaseModel):
    """Settings that are written down without their defaults: a list of components stays
    readable.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if getattr(self, name) != fields[name].default
        }


class JudgeSpec(_Spec):
    """A judge: a chat model on an OpenAI-compatible endpoint, and what it may cost."""

    base_url: Annotated[
        WebAddress,
        Field(
            description="address in OpenAI's form, ending in /v1",
            json_schema_extra=declared("address"),
        ),
    ]
    model: Annotated[
        str, Field(description="the model's name there", json_schema_extra=declared("nothing"))
    ] = "default"
    key_variable: Annotated[
        str | None,
        Field(
            pattern="JUDGE.*KEY",
            description="variable with the endpoint's key, e.g. JUDGE_KEY",
            json_schema_extra=declared("key"),
        ),
    ] = None
    method: Annotated[
        Method, Field(description="without a rubric: rank a group, or compare pairs")
    ] = "ranking"
    question: Annotated[
        str,
        Field(
            description="without a rubric: what is asked about the answers",
            json_schema_extra=declared("nothing"),
        ),
    ] = "Which answer serves the user's request better?"
    max_new_tokens: Annotated[
        int, Field(ge=1, description="tokens of a written verdict at most")
    ] = 256
    concurrency: Annotated[
        int, Field(ge=1, description="grades or comparisons under way at once")
    ] = 8
    request_timeout_s: Annotated[
        float, Field(gt=0, description="seconds that one request may take")
    ] = 60
    calls_per_step: Annotated[
        int | None, Field(ge=0, description="requests in one optimiser step at most")
    ] = None
    tokens_per_step: Annotated[
        int | None, Field(ge=0, description="tokens, both ways, in one step at most")
    ] = None
    calls_total: Annotated[
        int | None, Field(ge=0, description="requests of this process at most")
    ] = None
    tokens_total: Annotated[
        int | None, Field(ge=0, description="tokens of this process at most")
    ] = None


class RewardSpec(_Spec):
    """One component: a name and one source."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$",
            description="the name of its metrics",
            json_schema_extra=declared("nothing"),
        ),
    ]
    environment: Annotated[bool, Field(description="the environment's own score")] = False
    function: Annotated[
        str | None,
        Field(
            description="of TRL's signature: module:name or file.py:name",
            json_schema_extra=declared("code"),
        ),
    ] = None
    model: Annotated[
        Places | None,
        Field(
            description=(
                "a reward model's folder or its server's address; several by commas: an ensemble"
            ),
            json_schema_extra=declared("path"),
        ),
    ] = None
    combination: Annotated[Combination, Field(description="of an ensemble's scores")] = "mean"
    output: Annotated[Output, Field(description="of a reward model")] = "standardised"
    rubric: Annotated[
        str | dict[str, Any] | list[dict[str, Any]] | None,
        Field(
            description="by which `judge` grades, or its file", json_schema_extra=declared("path")
        ),
    ] = None
    rubric_column: Annotated[
        str | None,
        Field(
            description="the task's field that holds its own rubric",
            json_schema_extra=declared("nothing"),
        ),
    ] = None
    judge: Annotated[
        JudgeSpec | None, Field(description="grades by the rubric, or compares a group's answers")
    ] = None
    weight: Annotated[float, Field(description="what its value is multiplied by")] = 1.0
    clip: Annotated[
        tuple[float, float] | None, Field(description="lowest and highest value that counts")
    ] = None
    gate: Annotated[
        bool, Field(description="unless it is above its threshold, nothing but the gates counts")
    ] = False
    threshold: Annotated[float, Field(description="of a gate")] = 0.0
    when: Annotated[
        When, Field(description="score episodes, after each turn, or what each turn changed")
    ] = "episode"
    timeout_s: Annotated[
        float, Field(gt=0, description="seconds in which a group must be scored")
    ] = 120.0

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        given = [name for name in _SOURCES if getattr(self, name)]
        has_rubric = "rubric" in given or "rubric_column" in given
        if has_rubric and "judge" in given:
            given.remove("judge")

        def refused(kind: LiteralString, template: LiteralString) -> PydanticCustomError:
            return PydanticCustomError(
                kind, template, {"name": self.name, "given": ", ".join(given) or "none"}
            )

        if len(given) != 1 or (has_rubric and self.judge is None):
            raise refused(
                "one_source",
                "the component '{name}' needs exactly one of environment, function, model, judge, "
                "or a rubric with its "
                "judge; it has {given}",
            )
        if self.name in RESERVED:
            raise refused("reserved", "'{name}' is the name of another metric")
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise refused("clip", "clip of '{name}' is [lowest, highest]")
        if self.when != "episode" and (self.environment or self.gate or self.is_relative):
            raise refused("when", "'{name}' can only score whole episodes: when is 'episode'")
        return self

    @property
    def is_relative(self) -> bool:
        """Whether an answer's value depends on the other answers of its group."""
        return self.judge is not None and self.rubric is None and self.rubric_column is None

    @property
    def may_be_inapplicable(self) -> bool:
        """Whether a value of None means that the component does not apply, rather than that it
        could not score.
        """
        return self.function is not None


def _as_list(given: Any) -> Any:
    """A list that came as text, on a command line for example, is YAML."""
    if not isinstance(given, str):
        return given
    try:
        return parse_yaml(given)
    except DocumentError as error:
        raise PydanticCustomError("yaml", "no YAML: {why}", {"why": str(error)}) from error


RewardSpecs = Annotated[tuple[RewardSpec, ...], BeforeValidator(_as_list)]


def secret_variables(env: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the variables that an environment of these settings needs for its scorers, and is
    given by name.
    """
    specs = (*reward_specs(env), *_read_specs(env, "panel"))
    keys = {
        spec.judge.key_variable
        for spec in specs
        if spec.judge is not None and spec.judge.key_variable
    }
    if any("://" in (spec.model or "") for spec in specs):
        keys.add(environ.REWARD_KEY)
    return tuple(sorted(keys))


def reward_specs(env: Mapping[str, Any]) -> tuple[RewardSpec, ...]:
    """The components of the reward by an environment's settings; none where the environment will
    refuse them.
    """
    path = env.get("reward_model_path")
    short = []
    if path:
        short = [{"name": "reward_model", "model": str(path)}]
    return (*_read_specs(env, "rewards"), *_read_specs({"rewards": short}, "rewards"))


def is_learned(env: Mapping[str, Any]) -> bool:
    """Whether a reward model or a judge has a say in the reward, by the environment's settings."""
    return any(
        (spec.model or spec.judge) and (spec.weight or spec.gate) for spec in reward_specs(env)
    )


def _read_specs(env: Mapping[str, Any], name: str) -> tuple[RewardSpec, ...]:
    try:
        return TypeAdapter[tuple[RewardSpec, ...]](RewardSpecs).validate_python(env.get(name) or ())
    except ValidationError:
        return ()  # the environment refuses them, and says why


def check_specs(
    specs: Sequence[RewardSpec], aggregation: Aggregation, field: str = "rewards"
) -> None:
    """PydanticCustomError where two components have one name, or turns' values would be
    standardised.
    """
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1 or f"{name}_s" in names})
    if twice:
        raise PydanticCustomError(
            "names",
            "two components would share the metrics of '{name}'",
            {"field": field, "name": twice[0]},
        )
    turned = [spec.name for spec in specs if spec.when != "episode"]
    if turned and aggregation == "normalize_then_sum":
        raise PydanticCustomError(
            "aggregation",
            "normalize_then_sum cannot standardise the turns' values of '{name}'; use "
            "sum_then_normalize",
            {"field": field, "name": turned[0]},
        )


class Criterion(BaseModel, frozen=True, extra="forbid"):
    """One question about an answer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    text: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    # worst … best
    choices: Annotated[tuple[str, ...], Field(min_length=2, max_length=MOST_CHOICES)] = (
        "no",
        "yes",
    )
    aspect: Aspect | None = None

    @field_validator("choices", mode="before")
    @classmethod
    def _are_different_words(cls, choices: Any) -> Any:
        words = {False: "no", True: "yes"}  # YAML takes an unquoted no and yes for truth values
        found = [words[one] if isinstance(one, bool) else one for one in choices or ()]
        if len(set(map(str, found))) < len(found):
            raise ValueError("two choices are the same")
        return found

    @property
    def values(self) -> tuple[float, ...]:
        """What each choice is worth, 0 to 1."""
        return tuple(place / (len(self.choices) - 1) for place in range(len(self.choices)))


class Rubric(BaseModel, frozen=True, extra="forbid"):
    """Criteria that make one score together."""

    criteria: Annotated[tuple[Criterion, ...], Field(min_length=1)]

    @field_validator("criteria")
    @classmethod
    def _have_names_and_weight(cls, criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
        names = {one.name for one in criteria}
        if len(names) < len(criteria):
            raise ValueError("two criteria have the same name")
        if reserved := names & set(RESERVED_PARTS):
            raise ValueError(f"'{reserved.pop()}' is the name of another metric")
        if not any(one.weight for one in criteria):
            raise ValueError("every criterion has the weight 0")
        return criteria

    @property
    def digest(self) -> str:
        """SHA-256 of its criteria."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def score(self, grades: Mapping[str, float]) -> float:
        """The weighted mean of the criteria's grades, 0 to 1.

        >>> two = ({"name": "a", "text": "?"}, {"name": "b", "text": "?", "weight": 3})
        >>> Rubric.model_validate({"criteria": two}).score({"a": 1.0, "b": 0.0})
        0.25
        """
        whole = math.fsum(one.weight for one in self.criteria)
        return math.fsum(one.weight * grades[one.name] for one in self.criteria) / whole

    def aspects(self, grades: Mapping[str, float]) -> dict[str, float]:
        """The mean grade of the criteria of each aspect, where a criterion names it."""
        by_aspect: dict[str, list[float]] = {}
        for one in self.criteria:
            if one.aspect is not None:
                by_aspect.setdefault(one.aspect, []).append(grades[one.name])
        return {aspect: math.fsum(found) / len(found) for aspect, found in by_aspect.items()}


def read_rubric(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Rubric:
    """The rubric in a file, a text of JSON or YAML, a mapping or a list; InvalidConfig names the
    wrong field.
    """
    where, criteria = read_data(source, "rubric")
    if isinstance(criteria, Mapping):
        in_harbors_form = [
            _from_harbor(one, number) for number, one in enumerate(criteria.get("criterion", ()), 1)
        ]
        criteria = in_harbors_form or criteria.get("criteria")
    try:
        return Rubric.model_validate({"criteria": criteria})
    except ValidationError as error:
        raise InvalidConfig(f"{where} is no rubric.", problems_of(error)) from error


def read_data(source: str | Path | Mapping[str, Any] | Sequence[Any], noun: str) -> tuple[str, Any]:
    """How to call a source in an error, and its content: of a file, a text of JSON or YAML, or the
    data themselves.
    """
    if not isinstance(source, str | Path):
        return "This", source
    if isinstance(source, Path) or not ("\n" in source or source.lstrip()[:1] in ("{", "[")):
        file = Path(source).expanduser()
        return str(file), read_document(file, noun)
    try:
        return "This text", parse_yaml(source)
    except DocumentError as error:
        raise InvalidConfig(f"The {noun} {source} cannot be read.", f"{error}.") from error


def problems_of(error: ValidationError) -> str:
    """Every field that is wrong, and why."""
    found = error.errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found) + "."


def _from_harbor(one: Any, number: int) -> Any:
    if not isinstance(one, Mapping):
        return one
    match one.get("type", "binary"):
        case "binary":
            choices = ["no", "yes"]
        case "likert":
            choices = [str(point) for point in range(1, int(one.get("points", 5)) + 1)]
        case "numeric":
            low, high = float(one.get("min", 0)), float(one.get("max", 10))
            choices = [f"{low + (high - low) * step / 10:g}" for step in range(11)]
        case other:
            raise InvalidConfig(
                f"Criterion {number} has the type '{other}'.", next="binary, likert or numeric."
            )
    name = one.get("name") or one.get("id") or f"criterion_{number}"
    return {
        "name": name,
        "text": one.get("description"),
        "weight": one.get("weight", 1.0),
        "choices": choices,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What one component gave one rollout."""

    total: float  # of the episode; of turns' values their sum
    turns: tuple[float, ...] = ()  # one per turn, where the component scores turns
    parts: Mapping[str, float] = field(default_factory=dict)  # of a rubric: criterion -> grade


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What the components made of one rollout."""

    total: float
    turns: tuple[float, ...] = ()  # of it what is paid turn by turn, the environment's own excepted
    own_weight: float = 0.0  # what the environment's own rewards of turns are multiplied by


# component -> one value per rollout of the group; None: it has none
Values = Mapping[str, Sequence[Value | None]]


def compose(
    specs: Sequence[RewardSpec], values: Values, aggregation: Aggregation
) -> list[Reward | None]:
    """One reward per rollout of a group; None: it failed, for no component has a value, or a gate
    has none.

    A component that could not score every rollout of the group counts for none of it, unless None
    means that it does not apply (functions): a missing score is no zero among scores. A gate
    without a value fails its rollout alone.
    """
    counting = {spec.name: _counted(spec, values[spec.name], aggregation) for spec in specs}
    own = [
        spec
        for spec in specs
        if spec.environment and spec.clip is None and aggregation == "sum_then_normalize"
    ]
    rewards: list[Reward | None] = []
    for place in range(len(values[specs[0].name])):
        gates = [(spec.threshold, values[spec.name][place]) for spec in specs if spec.gate]
        found = [
            (spec, value) for spec in specs if (value := counting[spec.name][place]) is not None
        ]
        if not found or any(value is None for _, value in gates):
            rewards.append(None)
            continue
        is_open = all(value.total > threshold for threshold, value in gates if value is not None)
        parts = [(spec, value) for spec, value in found if is_open or spec.gate]
        length = max((len(value.turns) for _, value in parts), default=0)
        turns = [
            math.fsum(spec.weight * value.turns[k] for spec, value in parts if value.turns)
            for k in range(length)
        ]
        total = math.fsum(spec.weight * value.total for spec, value in parts)
        own_weight = math.fsum(spec.weight for spec, _ in parts if spec in own)
        rewards.append(Reward(total=total, turns=tuple(turns), own_weight=own_weight))
    return rewards


def _counted(
    spec: RewardSpec, column: Sequence[Value | None], aggregation: Aggregation
) -> list[Value | None]:
    """A component's values as they count: clipped, standardised where that is asked for; none where
    one is missing.
    """
    if not (spec.may_be_inapplicable or spec.gate) and any(value is None for value in column):
        return [None] * len(column)

    def clipped(value: Value) -> Value:
        if spec.clip is None:
            return value
        low, high = spec.clip
        turns = tuple(min(max(turn, low), high) for turn in value.turns)
        return Value(
            total=math.fsum(turns) if turns else min(max(value.total, low), high), turns=turns
        )

    counted = [None if value is None else clipped(value) for value in column]
    totals = [value.total for value in counted if value is not None]
    if aggregation == "sum_then_normalize" or not totals:
        return counted
    mean = math.fsum(totals) / len(totals)  # as TRL does: by the standard deviation with n - 1
    spread = math.sqrt(math.fsum((total - mean) ** 2 for total in totals) / max(1, len(totals) - 1))
    return [
        None if value is None else Value(total=(value.total - mean) / (spread + _EPSILON))
        for value in counted
    ]
