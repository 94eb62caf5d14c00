"""Scored groups in Atropos's form: what an author gives back, what goes to the trajectory server.

A rollout is one sequence as long as each of its prompts begins with all tokens before it; a prompt
that does not begins another sequence of the same rollout. Every sampled token is in one sequence,
and in one span of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple, NotRequired, TypedDict

from halteres.errors import EnvironmentFailed, InvalidData
from halteres.rewards.components import Value
from halteres.types import CONTEXT_LOGPROB, MASKED, FailedRollout, Outcome, Trajectory, Turn


class ScoredDataItem(TypedDict):
    """One scored sequence: a rollout, or a part of one."""

    tokens: list[int]
    masks: list[int]  # MASKED on context, the token id elsewhere
    scores: float
    # aligned with tokens, CONTEXT_LOGPROB on context
    inference_logprobs: NotRequired[list[float] | None]
    advantages: NotRequired[list[float] | None]
    ref_logprobs: NotRequired[list[float] | None]
    messages: NotRequired[list[dict[str, Any]] | None]
    overrides: NotRequired[dict[str, Any] | None]
    distill_token_ids: NotRequired[list[list[int]] | None]
    distill_logprobs: NotRequired[list[list[float]] | None]
    policy_version: NotRequired[list[int] | None]  # [smallest, largest]
    # each turn's action: first token, one past its last, reward
    spans: NotRequired[list[tuple[int, int, float]]]
    metrics: NotRequired[Mapping[str, float]]  # of the rollout; for our own records, not sent
    finish: NotRequired[str]  # why the rollout's last sampling ended; likewise
    outcome: NotRequired[Outcome]  # how the rollout's episode ended; likewise


class ScoredDataGroup(TypedDict):
    """Scored sequences of one item, field by field: one of each per sequence, the scores those of
    their rollouts.
    """

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
    # the sequence's rollout: 0, 1, ... in order; none: each is one
    episodes: NotRequired[list[int] | None]
    spans: NotRequired[list[tuple[int, int, int, float]] | None]  # of every turn: see `types.Span`
    generation_params: NotRequired[dict[str, Any] | None]
    group_overrides: NotRequired[dict[str, Any] | None]
    images: NotRequired[Any]
    metrics: NotRequired[list[Mapping[str, float]]]  # these three: one per rollout
    finish: NotRequired[list[str]]
    outcome: NotRequired[list[Outcome]]
    # attempts that were replaced; for our own records, not sent
    failures: NotRequired[list[FailedRollout]]
    # of each rollout: before a penalty was taken off; likewise
    own_scores: NotRequired[list[float]]
    # what the config's `rewards` gave; for our own records, not sent
    rewards: NotRequired[RewardRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """What the components of a config's `rewards` gave a group."""

    values: list[dict[str, Value | None]]  # of each rollout: component -> value
    own: list[float]  # of each rollout: the environment's own score
    seconds: dict[str, float]  # component -> how long it took
    group_s: float  # seconds from the first sampling to the last value
    counts: dict[str, int]  # what happened: reward/NAME_none, …
    version: str  # of the components: `RewardList.version`


PER_TOKEN = (
    "masks",
    "inference_logprobs",
    "advantages",
    "ref_logprobs",
    "distill_token_ids",
    "distill_logprobs",
)
PER_SEQUENCE = (
    "tokens",
    *PER_TOKEN,
    "scores",
    "messages",
    "overrides",
    "policy_version",
    "episodes",
)
PER_ROLLOUT = ("metrics", "finish", "outcome")
OWN = (*PER_ROLLOUT, "failures", "own_scores", "rewards")
_OPTIONAL_OF_ITEM = (*PER_TOKEN[1:], "messages", "policy_version")


class NotFiniteScore(EnvironmentFailed):
    """A reward that is NaN or infinite: the rollout failed, and its group is not sent."""

    code = "score_not_finite"


def finite(score: Any, where: str) -> float:
    """The score as a number.

    Raises:
        NotFiniteScore: NaN, infinite, or too large for a float.
        EnvironmentFailed: no number.
    """
    try:
        value = float(score)
    except OverflowError as error:  # a whole number that no float holds
        raise NotFiniteScore(
            f"{where} gave a score that is too large.", "A score is a finite number."
        ) from error
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"{where} gave {score!r} as a score.", "A score is a number."
        ) from error
    if not math.isfinite(value):
        raise NotFiniteScore(f"{where} gave the score {value}.", "A score is a finite number.")
    return value


def items_of(
    trajectory: Trajectory, *, messages: Sequence[list[dict[str, Any]]] | None = None
) -> list[ScoredDataItem]:
    """A trajectory as sequences: one, and another from each turn on whose prompt does not begin
    with all before it.

    What the score has beyond the turns' rewards is paid with the last turn: the spans of a rollout
    add up to its score.

    Args:
        messages: of every turn the chat, its answer included.

    Raises:
        InvalidData: no turn.
    """
    turns = trajectory.turns
    if not turns:
        raise InvalidData("A rollout without a turn cannot be scored.")
    wholes = [turn.prompt + turn.action for turn in turns]
    continues = [
        False,
        *(
            turn.prompt[: len(whole)] == whole
            for whole, turn in zip(wholes, turns[1:], strict=False)
        ),
    ]
    begins = [number for number, does in enumerate(continues) if not does]
    items: list[ScoredDataItem] = []
    for begin, end in zip(begins, [*begins[1:], len(turns)], strict=True):
        item = _item(turns[begin:end])
        item["scores"], item["finish"] = trajectory.score, turns[-1].stop_reason
        if messages is not None:
            item["messages"] = messages[end - 1]
        if trajectory.metrics:
            item["metrics"] = trajectory.metrics
        if trajectory.outcome is not None:
            item["outcome"] = trajectory.outcome
        items.append(item)
    return items


def _item(turns: Sequence[Turn]) -> ScoredDataItem:
    """Turns that continue each other, as one sequence without a score."""
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, float]] = []
    for turn in turns:
        context = turn.prompt[len(tokens) :]
        tokens += (*context, *turn.action)
        masks += (*[MASKED] * len(context), *turn.action)
        logprobs += (*[CONTEXT_LOGPROB] * len(context), *turn.logprobs)
        if turn.action:
            spans.append((len(turn.prompt), len(tokens), turn.reward))
    item = ScoredDataItem(tokens=tokens, masks=masks, scores=0.0, spans=spans)
    if len(logprobs) == len(tokens):
        item["inference_logprobs"] = logprobs
    if all(turn.version_min >= 0 for turn in turns):
        item["policy_version"] = [
            min(turn.version_min for turn in turns),
            max(turn.version_max for turn in turns),
        ]
    return item


def group_of(
    rollouts: Sequence[Sequence[ScoredDataItem]], failures: Sequence[FailedRollout] = ()
) -> ScoredDataGroup:
    """The group of these rollouts' sequences; an optional field is there if every sequence has it.

    `episodes` and `spans` are there where a rollout has several sequences or turns: other groups
    look as Atropos's do.
    """
    items = [item for rollout in rollouts for item in rollout]
    group: dict[str, Any] = {
        "tokens": [item["tokens"] for item in items],
        "masks": [item["masks"] for item in items],
        "scores": [item["scores"] for item in items],
    }
    fields = [(name, items) for name in _OPTIONAL_OF_ITEM]
    fields += [(name, [rollout[0] for rollout in rollouts]) for name in PER_ROLLOUT]
    for name, owners in fields:
        values = [owner.get(name) for owner in owners]
        if all(value is not None for value in values):
            group[name] = values
    if any(item.get("overrides") for item in items):
        group["overrides"] = [item.get("overrides") or {} for item in items]
    if any(len(rollout) > 1 or len(rollout[0].get("spans", ())) > 1 for rollout in rollouts):
        group["episodes"] = [number for number, rollout in enumerate(rollouts) for _ in rollout]
        if all("spans" in item for item in items):
            group["spans"] = [
                (place, *span) for place, item in enumerate(items) for span in item.get("spans", ())
            ]
    if failures:
        group["failures"] = list(failures)
    return ScoredDataGroup(**group)


def check(group: ScoredDataGroup, where: str) -> None:
    """See that a group can be sent.

    Raises:
        NotFiniteScore: a score is NaN or infinite.
        EnvironmentFailed: it is empty, lengths differ, or a number is not finite; the text names
            the field.
    """
    fields: Mapping[str, Any] = group
    size = len(group["tokens"])
    if not size or not all(group["tokens"]):
        raise EnvironmentFailed(f"{where} gave an empty group or sequence.")
    for name in PER_SEQUENCE:
        values = fields.get(name)
        if values is not None and len(values) != size:
            raise EnvironmentFailed(f"{where} gave {size} sequences and {len(values)} {name}.")
    finishes, num_rollouts = group.get("finish"), len(rollouts_of(group))
    if finishes and len(finishes) != num_rollouts:
        raise EnvironmentFailed(f"{where} gave {num_rollouts} rollouts and {len(finishes)} finish.")
    for number in (*(reward for *_, reward in group.get("spans") or ()), *group["scores"]):
        finite(number, where)
    for name in PER_TOKEN:
        for number, (values, tokens) in enumerate(
            zip(fields.get(name) or (), group["tokens"], strict=False)
        ):
            if len(values) != (length := len(tokens)):
                raise EnvironmentFailed(
                    f"{where} gave sequence {number} of {length} tokens with {len(values)} {name}."
                )
            flat = chain.from_iterable(values) if name.startswith("distill") else values
            if not all(map(math.isfinite, flat)):
                raise EnvironmentFailed(
                    f"{where} gave {name} of sequence {number} with NaN or infinity."
                )


def rollouts_of(group: ScoredDataGroup) -> list[list[int]]:
    """The rollouts of a group, in order: the numbers of each one's sequences."""
    episodes = group.get("episodes") or range(len(group["tokens"]))
    return [
        [number for number, _ in part] for _, part in groupby(enumerate(episodes), itemgetter(1))
    ]


def scores_of(group: ScoredDataGroup) -> list[float]:
    """The score of each rollout."""
    return [group["scores"][rollout[0]] for rollout in rollouts_of(group)]


def to_wire(group: ScoredDataGroup, *, include_messages: bool) -> dict[str, Any]:
    """The body of POST /scored_data, without `env_id`: what is set, without our own records."""
    left_out = OWN if include_messages else (*OWN, "messages")
    return {
        name: value for name, value in group.items() if value is not None and name not in left_out
    }


def action_tokens(group: ScoredDataGroup, number: int) -> list[int]:
    """The unmasked tokens of one sequence."""
    pairs = zip(group["tokens"][number], group["masks"][number], strict=True)
    return [token for token, mask in pairs if mask != MASKED]


def prompt_tokens(group: ScoredDataGroup, number: int) -> list[int]:
    """The context before the first unmasked token of one sequence."""
    masks = group["masks"][number]
    length = next((place for place, mask in enumerate(masks) if mask != MASKED), len(masks))
    return group["tokens"][number][:length]


class TurnTokens(NamedTuple):
    """One turn as a group has it."""

    action: list[int]
    observation: list[int]  # context after the action and before the next; empty after the last
    reward: float | None  # None: the group does not tell
    logprobs: list[float] | None  # of the action; None: the group does not tell


def turns_of(group: ScoredDataGroup, rollout: Sequence[int]) -> list[TurnTokens]:
    """The turns of a rollout, in order; `rollout`: the numbers of its sequences."""
    spans = group.get("spans")
    if spans is None:  # then each run of unmasked tokens is an action
        found: list[tuple[int, int, int, float | None]] = []
        for number in rollout:
            runs = groupby(enumerate(group["masks"][number]), lambda token: token[1] == MASKED)
            actions = [[place for place, _ in run] for masked, run in runs if not masked]
            found += [(number, action[0], action[-1] + 1, None) for action in actions]
    else:
        found = [span for span in spans if span[0] in rollout]
    logprobs = group.get("inference_logprobs")
    turns: list[TurnTokens] = []
    for place, (number, start, stop, reward) in enumerate(found):
        tokens = group["tokens"][number]
        after, begin, *_ = found[place + 1] if place + 1 < len(found) else (number, len(tokens))
        observation = tokens[stop:begin]
        # a new sequence's prompt, without the beginning that it shares with the one before it
        if after != number:
            prompt = group["tokens"][after][:begin]
            observation = prompt[len(commonprefix([prompt, tokens])) :]
        of_action = None
        if logprobs:
            of_action = logprobs[number][start:stop]
        turns.append(TurnTokens(tokens[start:stop], observation, reward, of_action))
    return turns
