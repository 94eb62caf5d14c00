"""A config's `rewards` at work in an environment: on groups for training, on held-out answers in
evaluation.

sampled ─▶ add: components that look at one answer ─▶ whole ─▶ finished: those that compare answers
   ─▶ composed
   ▲            │ without a reward: the rollout failed
   └────────────┘
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halteres.environments.scored import RewardRecord, ScoredDataGroup, ScoredDataItem, rollouts_of
from halteres.errors import EnvironmentFailed, ScorerFailed
from halteres.rewards.components import TOTAL, Value, compose
from halteres.rewards.functions import Sample
from halteres.rewards.judges import NoGrade
from halteres.rewards.reward_list import GroupScores, RewardList
from halteres.rollouts.groups import GroupFailed
from halteres.types import MASKED, FailedRollout

log = logging.getLogger(__name__)

MISSING = "reward_missing"
"""Code of a rollout that no component gave a value, or a gate none."""


class GroupScoring:
    """One group on its way to being whole. `began`: when sampling did (monotonic s); None: it is
    about to.
    """

    def __init__(
        self, rewards: RewardList, item: Any, step: int, began: float | None = None
    ) -> None:
        self._rewards, self._item, self._step = rewards, item, step
        self._samples = list[Sample]()  # of the rollouts that stay, in order
        self._values: dict[str, list[Value | None]] = {spec.name: [] for spec in rewards.specs}
        self._seconds, self._counts = Counter[str](), Counter[str]()
        self._no_grade = ""  # why the last judge that graded none of the answers did not
        self._began = time.monotonic() if began is None else began

    async def add(self, outcomes: Sequence[Any]) -> list[Any]:
        """Score the rollouts among these outcomes; a failure in place of each that has no reward.

        Raises:
            ScorerFailed: a component could not score at all, or none has scored any rollout of the
                group, for judges that give no grade.
            EnvironmentFailed: a function's own process could not.
        """
        rollouts = [one for one in outcomes if not isinstance(one, FailedRollout)]
        if not rollouts:
            return list(outcomes)
        samples = [sample_of(rollout) for rollout in rollouts]
        scores = await self._scores(samples, relative=False)
        failed = [self._failure(scores, place) for place in range(len(rollouts))]
        if self._no_grade and not self._samples and all(failed):
            raise ScorerFailed(self._no_grade)
        for place, sample in enumerate(samples):
            if failed[place] is None:
                self._samples.append(sample)
                for name, column in scores.values.items():
                    self._values[name].append(column[place])
        settled = iter(
            [failure or rollout for failure, rollout in zip(failed, rollouts, strict=True)]
        )
        return [one if isinstance(one, FailedRollout) else next(settled) for one in outcomes]

    async def finished(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """The whole group with its rewards.

        Raises:
            ScorerFailed: a component that compares answers could not, or a rollout is left without
                a reward.
        """
        if any(spec.is_relative for spec in self._rewards.specs):
            self._values.update((await self._scores(self._samples, relative=True)).values)
        rewards = compose(self._rewards.specs, self._values, self._rewards.aggregation)
        composed = [reward for reward in rewards if reward is not None]
        if len(composed) < len(rewards):
            why = self._no_grade or "No component scored the whole group."
            raise ScorerFailed("A rollout is left without a reward.", why)
        # Rewards in place of the environment's own scores, and of its rewards of turns.
        owner = {
            number: rollout
            for rollout, numbers in enumerate(rollouts_of(group))
            for number in numbers
        }
        group["scores"] = [composed[owner[number]].total for number in range(len(group["scores"]))]
        if spans := group.get("spans"):
            of_turns = [iter(reward.turns) for reward in composed]
            group["spans"] = [
                (
                    sequence,
                    start,
                    stop,
                    composed[rollout].own_weight * own + next(of_turns[rollout], 0.0),
                )
                for sequence, start, stop, own in spans
                for rollout in (owner[sequence],)
            ]
        group["rewards"] = RewardRecord(
            values=[
                {name: self._values[name][place] for name in self._values}
                for place in range(len(composed))
            ],
            own=[sample.score for sample in self._samples],
            seconds=dict(self._seconds),
            group_s=time.monotonic() - self._began,
            counts=dict(self._counts),
            version=self._rewards.version,
        )
        return group

    async def _scores(self, samples: Sequence[Sample], *, relative: bool) -> GroupScores:
        scores = await self._rewards.score(self._item, samples, self._step, relative=relative)
        for name, error in scores.failures.items():
            # judges go without a grade; the other components may still pay
            if isinstance(error, EnvironmentFailed):
                # of a function's own process, by the name of what became of it: others are sampled
                raise type(error)(f"The reward '{name}' could not score.", error.sentence)
            if not isinstance(error, NoGrade):
                raise ScorerFailed(f"The reward '{name}' could not score.", error.sentence)
            self._no_grade = f"The reward '{name}': {error.sentence}"
        self._seconds.update(scores.seconds)
        for name, column in scores.values.items():
            if none := sum(value is None for value in column):
                self._counts[f"reward/{name}_none"] += none
        return scores

    def _failure(self, scores: GroupScores, place: int) -> FailedRollout | None:
        """Why a rollout cannot stay; None: it can."""
        specs = self._rewards.specs
        for spec in specs:
            if spec.gate and scores.values[spec.name][place] is None:
                return FailedRollout(
                    code=MISSING, why=f"The gate '{spec.name}' could not be evaluated."
                )
        has_value = any(column[place] is not None for column in scores.values.values())
        if has_value or any(spec.is_relative for spec in specs):
            return None
        return FailedRollout(
            code=MISSING, why=self._no_grade or "No reward applies to it, or could score it."
        )


async def score_group(
    rewards: RewardList, item: Any, group: ScoredDataGroup, step: int, began: float
) -> ScoredDataGroup:
    """A group that an environment collected as a whole, from `began` (monotonic s) on.

    Raises:
        EnvironmentFailed: it has no messages. GroupFailed: a rollout has no reward.
    """
    scoring = GroupScoring(rewards, item, step, began)
    messages, spans = group.get("messages"), group.get("spans") or ()
    rollouts = [
        [
            ScoredDataItem(
                tokens=group["tokens"][number],
                masks=group["masks"][number],
                scores=group["scores"][number],
                messages=None if messages is None else messages[number],
                spans=[
                    (start, stop, reward)
                    for sequence, start, stop, reward in spans
                    if sequence == number
                ],
            )
            for number in rollout
        ]
        for rollout in rollouts_of(group)
    ]
    outcomes = await scoring.add(rollouts)
    failures = [one for one in outcomes if isinstance(one, FailedRollout)]
    if failures:
        raise GroupFailed(failures, len(outcomes))
    return await scoring.finished(group)


def sample_of(rollout: Sequence[ScoredDataItem]) -> Sample:
    """What is scored of a rollout: the chat of its last sequence, those before it as earlier ones.

    Raises:
        EnvironmentFailed: its sequences carry no messages.
    """
    chats: list[Sample] = []
    for item in rollout:
        messages, num_answers = item.get("messages"), len(item.get("spans") or ()) or 1
        if not messages:
            raise EnvironmentFailed(
                "`rewards` cannot score this environment's rollouts.",
                "Its groups carry no messages.",
                "Give each scored item its `messages`, or leave `rewards` empty.",
            )
        # The policy's answers are the last messages of the assistant.
        answers = [
            place for place, message in enumerate(messages) if message.get("role") == "assistant"
        ][-num_answers:]
        if len(answers) < num_answers:
            raise EnvironmentFailed("A chat to be scored has fewer answers than the policy gave.")
        begin = answers[0]
        places = tuple(place - begin for place in answers)
        chats.append(Sample(prompt=messages[:begin], completion=messages[begin:], answers=places))
    tokens = tuple(
        token
        for item in rollout
        for token, mask in zip(item["tokens"], item["masks"], strict=True)
        if mask != MASKED
    )
    return replace(chats[-1], tokens=tokens, score=rollout[0]["scores"], earlier=tuple(chats[:-1]))


async def held_out_metrics(
    rewards: RewardList | None,
    panel: RewardList | None,
    item: Any,
    samples: Sequence[Sample],
    step: int,
) -> list[dict[str, float]]:
    """What an evaluation adds to the environment's own scores of these answers: reward/NAME,
    reward/total, and panel/NAME of a panel that is never trained on. What could not be scored is
    left out.

    The total is the weighted sum, also where training standardises: standardised sums of two
    evaluations could not be compared.
    """
    metrics: list[dict[str, float]] = [{} for _ in samples]
    for kind, scorers in (("reward", rewards), ("panel", panel)):
        if scorers is None:
            continue
        scores = await scorers.score(item, samples, step)
        for error in scores.failures.values():
            log.warning("%s", error.sentence)
        for place, row in enumerate(metrics):
            own = {name: [column[place]] for name, column in scores.values.items()}
            for name, (value,) in own.items():
                row |= metrics_of(kind, name, value)
            lacks_a_score = any(
                own[one.name] == [None] and not one.may_be_inapplicable for one in scorers.specs
            )
            if kind == "reward" and not lacks_a_score:
                for reward in compose(scorers.specs, own, "sum_then_normalize"):
                    row |= {} if reward is None else {f"reward/{TOTAL}": reward.total}
    return metrics


def metrics_of(kind: str, name: str, value: Value | None) -> Mapping[str, float]:
    """A component's value, and the grades it is made of."""
    if value is None:
        return {}
    return {
        f"{kind}/{name}": value.total,
        **{f"{kind}/{name}/{part}": grade for part, grade in value.parts.items()},
    }
