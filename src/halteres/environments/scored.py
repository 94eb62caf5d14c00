"""Scored groups in Atropos's form: what an author gives back, what goes to the trajectory server.

Owns: tokens and masks of a trajectory, the sentinels on context, what makes a group unfit to send.
Never: sends, samples, judges a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NotRequired, TypedDict

from halteres.errors import EnvironmentFailed, InvalidData
from halteres.types import CONTEXT_LOGPROB, MASKED, FailedRollout, Trajectory


class ScoredDataItem(TypedDict):
    """One scored sequence."""

    tokens: list[int]
    masks: list[int]  # MASKED on context, the token id elsewhere
    scores: float
    inference_logprobs: NotRequired[list[float] | None]  # aligned with tokens, CONTEXT_LOGPROB on context
    advantages: NotRequired[list[float] | None]
    ref_logprobs: NotRequired[list[float] | None]
    messages: NotRequired[list[dict[str, Any]] | None]
    overrides: NotRequired[dict[str, Any] | None]
    distill_token_ids: NotRequired[list[list[int]] | None]
    distill_logprobs: NotRequired[list[list[float]] | None]
    policy_version: NotRequired[list[int] | None]  # [smallest, largest]
    metrics: NotRequired[Mapping[str, float]]  # for our own records, not sent
    finish: NotRequired[str]  # why sampling ended; for our own records, not sent


class ScoredDataGroup(TypedDict):
    """Scored sequences of one item, field by field: G of each."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: NotRequired[list[list[float]] | None]
    advantages: NotRequired[list[list[float]] | None]
    ref_logprobs: NotRequired[list[list[float]] | None]
    messages: NotRequired[list[list[dict[str, Any]]] | None]
    overrides: NotRequired[list[dict[str, Any]] | None]
    distill_token_ids: NotRequired[list[list[list[int]]] | None]
    distill_logprobs: NotRequired[list[list[list[float]]] | None]
    policy_version: NotRequired[list[list[int]] | None]
    generation_params: NotRequired[dict[str, Any] | None]
    group_overrides: NotRequired[dict[str, Any] | None]
    images: NotRequired[Any]
    metrics: NotRequired[list[Mapping[str, float]]]
    finish: NotRequired[list[str]]
    failures: NotRequired[list[FailedRollout]]  # attempts that were replaced; for our own records, not sent


PER_TOKEN = ("masks", "inference_logprobs", "advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs")
PER_SEQUENCE = ("tokens", *PER_TOKEN, "scores", "messages", "overrides", "policy_version")
OWN = ("metrics", "finish", "failures")
_OPTIONAL_OF_ITEM = (*PER_TOKEN[1:], "messages", "overrides", "policy_version", "metrics", "finish")


class NotFiniteScore(EnvironmentFailed):
    """A reward that is NaN or infinite: the rollout failed, and its group is not sent."""

    code = "score_not_finite"


def finite(score: Any, where: str) -> float:
    """The score as a number.

    Raises:
        NotFiniteScore: NaN or infinite.
        EnvironmentFailed: no number.
    """
    try:
        value = float(score)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"{where} gave {score!r} as a score.", "A score is a number.") from error
    if not math.isfinite(value):
        raise NotFiniteScore(f"{where} gave the score {value}.", "A score is a finite number.")
    return value


def item_of(trajectory: Trajectory, *, messages: list[dict[str, Any]] | None = None) -> ScoredDataItem:
    """A trajectory as one sequence, each later prompt beginning with all tokens before it.

    Raises:
        InvalidData: no turn, or a prompt that rewrites what was there; such turns need a sequence each.
    """
    turns = trajectory.turns
    if not turns:
        raise InvalidData("A rollout without a turn cannot be scored.")
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    for number, turn in enumerate(turns):
        if list(turn.prompt[: len(tokens)]) != tokens:
            raise InvalidData(f"The prompt of turn {number} does not continue the turns before it.")
        context = turn.prompt[len(tokens) :]
        tokens += (*context, *turn.action)
        masks += (*[MASKED] * len(context), *turn.action)
        logprobs += (*[CONTEXT_LOGPROB] * len(context), *turn.logprobs)
    item = ScoredDataItem(tokens=tokens, masks=masks, scores=trajectory.score, finish=turns[-1].stop_reason)
    if len(logprobs) == len(tokens):
        item["inference_logprobs"] = logprobs
    if all(turn.version_min >= 0 for turn in turns):
        item["policy_version"] = [min(turn.version_min for turn in turns), max(turn.version_max for turn in turns)]
    if messages is not None:
        item["messages"] = messages
    if trajectory.metrics:
        item["metrics"] = trajectory.metrics
    return item


def group_of(items: Sequence[ScoredDataItem], failures: Sequence[FailedRollout] = ()) -> ScoredDataGroup:
    """The group of these sequences; an optional field is there if every sequence has it."""
    group: dict[str, Any] = {
        "tokens": [item["tokens"] for item in items],
        "masks": [item["masks"] for item in items],
        "scores": [item["scores"] for item in items],
    }
    for name in _OPTIONAL_OF_ITEM:
        values = [item.get(name) for item in items]
        if all(value is not None for value in values):
            group[name] = values
    if failures:
        group["failures"] = list(failures)
    return ScoredDataGroup(**group)


def check(group: ScoredDataGroup, where: str) -> None:
    """See that a group can be sent.

    Raises:
        NotFiniteScore: a score is NaN or infinite.
        EnvironmentFailed: it is empty, lengths differ, or a number is not finite; the text names the field.
    """
    fields: Mapping[str, Any] = group
    size = len(group["tokens"])
    if not size or not all(group["tokens"]):
        raise EnvironmentFailed(f"{where} gave an empty group or sequence.")
    for name in PER_SEQUENCE:
        values = fields.get(name)
        if values is not None and len(values) != size:
            raise EnvironmentFailed(f"{where} gave {size} sequences and {len(values)} {name}.")
    for score in group["scores"]:
        finite(score, where)
    for name in PER_TOKEN:
        for number, values in enumerate(fields.get(name) or ()):
            _check_sequence(name, number, values, len(group["tokens"][number]), where)


def _check_sequence(name: str, number: int, values: Sequence[Any], length: int, where: str) -> None:
    if len(values) != length:
        raise EnvironmentFailed(f"{where} gave sequence {number} of {length} tokens with {len(values)} {name}.")
    flat = chain.from_iterable(values) if name.startswith("distill") else values
    if not all(map(math.isfinite, flat)):
        raise EnvironmentFailed(f"{where} gave {name} of sequence {number} with NaN or infinity.")


def expected_size(group: ScoredDataGroup, default: int) -> int:
    """Sequences that the group should have; `group_overrides` may change it."""
    return int((group.get("group_overrides") or {}).get("group_size", default))


def to_wire(group: ScoredDataGroup, *, include_messages: bool) -> dict[str, Any]:
    """The body of POST /scored_data, without `env_id`: what is set, without our own records."""
    left_out = OWN if include_messages else (*OWN, "messages")
    return {name: value for name, value in group.items() if value is not None and name not in left_out}


def action_tokens(group: ScoredDataGroup, number: int) -> list[int]:
    """The unmasked tokens of one sequence."""
    return [
        token for token, mask in zip(group["tokens"][number], group["masks"][number], strict=True) if mask != MASKED
    ]


def prompt_tokens(group: ScoredDataGroup, number: int) -> list[int]:
    """The context before the first unmasked token of one sequence."""
    masks = group["masks"][number]
    length = next((place for place, mask in enumerate(masks) if mask != MASKED), len(masks))
    return group["tokens"][number][:length]


def turns_of(group: ScoredDataGroup, number: int) -> list[tuple[list[int], list[int]]]:
    """The turns of one sequence: the tokens of each action, and of the context after it, empty after the last."""
    pairs = zip(group["tokens"][number], group["masks"][number], strict=True)
    runs = [(own, [token for token, _ in part]) for own, part in groupby(pairs, lambda pair: pair[1] != MASKED)]
    return [
        (tokens, runs[place + 1][1] if place + 1 < len(runs) else []) for place, (own, tokens) in enumerate(runs) if own
    ]
