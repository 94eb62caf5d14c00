"""The components of a config at work on a group: one source per component, their calls side by
side, each with its deadline; and the hash of all that decides a score. `components` makes one
reward of their values.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from halteres.clients.json_client import until_ready
from halteres.clients.rewards import RewardClient
from halteres.errors import HalteresError, InvalidData, ScorerFailed, boundary
from halteres.rewards.components import (
    DISAGREEMENT,
    OUT_OF_RANGE,
    Aggregation,
    RewardSpec,
    Value,
    read_rubric,
)
from halteres.rewards.functions import Elsewhere, RewardFunction, Sample, columns_of
from halteres.rewards.judges import PROMPTS, Judge, NoGrade
from halteres.rewards.scorer import Ensemble, LocalScorer, Scorer, open_scorer
from halteres.scores import Scorable

# how long a reward server may load its model: a component's deadline begins after that
READY_WITHIN_S = 300.0
LOOK_S = 5.0  # how long a reward server may take to say, at a later step, which model it has


class ScorerTimedOut(ScorerFailed):
    """A component gave no scores in time."""

    code = "scorer_timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """What the components gave some rollouts of one item."""

    values: Mapping[str, list[Value | None]]
    seconds: Mapping[str, float]  # each component's own call
    failures: Mapping[str, HalteresError]  # component -> why it gave nothing at all


class RewardList:
    """The `rewards` of a config. InvalidConfig, NotFound or InvalidData where a part of it is not
    there.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        aggregation: Aggregation = "sum_then_normalize",
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`elsewhere`: which functions run in a process of their own; default: none."""
        self.specs = tuple(specs)
        self.aggregation: Aggregation = aggregation
        self._judges = {spec.name: Judge(spec.judge) for spec in specs if spec.judge is not None}
        self._rubrics = {
            spec.name: read_rubric(spec.rubric) for spec in specs if spec.rubric is not None
        }
        self._functions = {
            spec.name: RewardFunction(spec.function, elsewhere=elsewhere, within_s=spec.timeout_s)
            for spec in specs
            if spec.function is not None
        }
        self._models = {spec.name: Models(spec) for spec in specs if spec.model is not None}
        self._step: int | None = None
        self._beginning = asyncio.Lock()

    @property
    def version(self) -> str:
        """12 hex digits: a hash of every component's settings, code, prompts and model, wherever
        the model lies.
        """
        components: list[list[Any]] = []
        for spec in self.specs:
            digest, rubric = "", self._rubrics.get(spec.name)
            if spec.judge is not None:
                digest = PROMPTS
                if not spec.is_relative:
                    digest = f"{PROMPTS}/{rubric.digest if rubric else ''}"
            elif spec.function is not None:
                digest = self._functions[spec.name].digest
            elif spec.model is not None:
                digest = self._models[spec.name].digest
            components.append([spec.model_dump(mode="json", exclude={"model"}), digest])
        return hashlib.sha256(json.dumps([self.aggregation, components]).encode()).hexdigest()[:12]

    async def score(
        self, item: Any, samples: Sequence[Sample], step: int = 0, *, relative: bool | None = None
    ) -> GroupScores:
        """Every component's values of these rollouts of a task. A component that fails gives none,
        and says why.

        `step`: that judges' budgets count by. `relative`: ask only those whose values depend on the
        group, or not.
        """
        # all groups of a step have the version that its first one finds
        async with self._beginning:
            # With each new step judges may spend again, and a model behind an address may be
            # another. Groups of the step before may still be under way: they do not bring that step
            # back.
            if self._step is None or step > self._step:
                within_s = LOOK_S
                if self._step is None:
                    within_s = READY_WITHIN_S
                self._step = step
                for judge in self._judges.values():
                    judge.begin_step()
                await asyncio.gather(
                    *(model.learn_digests(within_s) for model in self._models.values())
                )
        specs = [spec for spec in self.specs if relative is None or spec.is_relative == relative]
        outcomes = await asyncio.gather(*(self._timed(spec, item, samples) for spec in specs))
        none: list[Value | None] = [None] * len(samples)
        by_name = {spec.name: outcome for spec, outcome in zip(specs, outcomes, strict=True)}
        return GroupScores(
            values={
                name: none if isinstance(found, HalteresError) else found
                for name, (found, _) in by_name.items()
            },
            seconds={name: seconds for name, (_, seconds) in by_name.items()},
            failures={
                name: found
                for name, (found, _) in by_name.items()
                if isinstance(found, HalteresError)
            },
        )

    def taken_counts(self) -> dict[str, int]:
        """What judges did since the last call of this, whatever became of its group:
        judge/NAME/calls, …
        """
        counts = {name: judge.taken_counts() for name, judge in self._judges.items()}
        return {
            f"judge/{name}/{kind}": count
            for name, own in counts.items()
            for kind, count in own.items()
        }

    async def close(self) -> None:
        """Close the judges' connections and the scorers', and end the functions' processes."""
        for function in self._functions.values():
            function.close()
        for one in (*self._judges.values(), *self._models.values()):
            await one.close()

    async def _timed(
        self, spec: RewardSpec, item: Any, samples: Sequence[Sample]
    ) -> tuple[list[Value | None] | HalteresError, float]:
        """A component's values, or why there are none, and the seconds that they took."""
        began, score = (
            time.monotonic(),
            self._values if spec.when == "episode" else self._turn_values,
        )
        found: list[Value | None] | HalteresError
        limit_s: float | None = spec.timeout_s
        function = self._functions.get(spec.name)
        if function is not None and function.has_own_clock:
            # each call's limit is kept there; waiting for a process is none of the function's time
            limit_s = None
        try:
            async with asyncio.timeout(limit_s):
                with boundary(ScorerFailed, f"The reward '{spec.name}'"):
                    found = await score(spec, item, samples)
        except TimeoutError:
            who = f"The reward '{spec.name}'" + (f" ({spec.model})" if spec.model else "")
            found = ScorerTimedOut(
                f"{who} gave no scores within {spec.timeout_s:g} s, its timeout_s."
            )
        except HalteresError as error:
            found = error
        return found, time.monotonic() - began

    async def _turn_values(
        self, spec: RewardSpec, item: Any, samples: Sequence[Sample]
    ) -> list[Value | None]:
        """The state after each turn's answer, or its difference to the one before; before the first
        it counts 0.
        """
        states = [sample.states for sample in samples]
        scored = iter(
            await self._values(spec, item, [state for of_one in states for state in of_one])
        )
        found: list[Value | None] = []
        for of_one in states:
            values = [value for _ in of_one if (value := next(scored)) is not None]
            if len(values) < len(of_one):
                found.append(None)
                continue
            turns = totals = [value.total for value in values]
            if spec.when == "difference":
                turns = [
                    after - before for before, after in zip([0.0, *totals], totals, strict=False)
                ]
            found.append(
                Value(
                    total=sum(turns), turns=tuple(turns), parts=values[-1].parts if values else {}
                )
            )
        return found

    async def _values(
        self, spec: RewardSpec, item: Any, samples: Sequence[Sample]
    ) -> list[Value | None]:
        if spec.environment:
            return [Value(total=sample.score) for sample in samples]
        if spec.model is not None:
            return await self._models[spec.name].score(samples)
        if spec.function is not None:
            numbers = await self._functions[spec.name](item, samples)
            return [None if one is None else Value(total=one) for one in numbers]
        judge = self._judges[spec.name]
        if spec.is_relative:
            numbers = await judge.relative_values(samples)
            values = [None if one is None else Value(total=one) for one in numbers]
        else:
            rubric = self._rubrics.get(spec.name)
            if rubric is None:  # the task's own
                own = columns_of(item).get(spec.rubric_column or "")
                if own is None:
                    raise InvalidData(
                        f"The task has no rubric in its field '{spec.rubric_column}'."
                    )
                rubric = read_rubric(own)
            # Equal answers of a group are asked about once.
            keys = [
                json.dumps([dict(message) for message in one.completion], sort_keys=True)
                for one in samples
            ]
            different = dict(zip(keys, samples, strict=True))
            answers = await asyncio.gather(
                *(judge.grade(rubric, sample) for sample in different.values())
            )
            grades = dict(zip(different, answers, strict=True))
            values = [
                None if (one := grades[key]) is None else Value(total=one.score, parts=one.criteria)
                for key in keys
            ]
        # One answer alone has nothing to be compared with.
        if all(value is None for value in values) and (len(samples) > 1 or not spec.is_relative):
            raise NoGrade(f"The judge {judge.spec.model} gave no grade.", judge.last_failure)
        return values


class Models:
    """A reward model, here or at an address, or an ensemble of several."""

    def __init__(self, spec: RewardSpec) -> None:
        how: dict[str, Any] = {
            "output": spec.output,
            "combination": spec.combination,
            "timeout_s": spec.timeout_s,
        }
        self._scorer = open_scorer(spec.model or "", waits_for_start=True, **how)
        if isinstance(self._scorer, Ensemble):
            self._members = self._scorer.members
        else:
            self._members = [self._scorer]
        # None: not known yet; empty: its server tells none.
        self._digests: list[str | None] = [None] * len(self._members)

    @property
    def digest(self) -> str:
        """Of every member; empty where one of them cannot tell."""
        known = [digest for digest in self._digests if digest]
        if len(known) == len(self._members):
            return "/".join(known)
        return ""

    async def score(self, samples: Sequence[Sample]) -> list[Value | None]:
        """One value per sample; beside a score its objectives' parts, and of an ensemble how far
        members are apart.
        """
        scores = await self._scorer.score(
            [Scorable(prompt=one.prompt, completion=one.completion) for one in samples]
        )
        if None in self._digests:
            await self.learn_digests(LOOK_S)  # who has just scored can tell
        values: list[Value | None] = []
        for score in scores:
            beside = {}
            if score is not None:
                beside = {DISAGREEMENT: score.disagreement, OUT_OF_RANGE: score.out_of_range}
            parts = {name: float(part) for name, part in beside.items() if part is not None}
            values.append(
                None if score is None else Value(total=score.value, parts={**score.parts, **parts})
            )
        return values

    async def learn_digests(self, within_s: float) -> None:
        """Ask which models these are; one that does not answer in time counts as the one it was."""
        found = await asyncio.gather(*(_digest(one, within_s) for one in self._members))
        self._digests = [
            before if now is None else now for before, now in zip(self._digests, found, strict=True)
        ]

    async def close(self) -> None:
        """Close the connections."""
        await self._scorer.close()


class _Card(msgspec.Struct):
    """What a reward server says of a model."""

    id: str
    digest: str = ""


class _Health(msgspec.Struct):
    models: list[_Card] = []


async def _digest(scorer: Scorer, within_s: float) -> str | None:
    """Of a scorer's model; empty: its server has none to tell; None: the server does not answer in
    time.
    """
    if isinstance(scorer, LocalScorer):
        return await asyncio.to_thread(lambda: scorer.digest)
    if not isinstance(scorer, RewardClient):
        return ""
    try:
        async with asyncio.timeout(within_s):
            health = msgspec.convert(await until_ready(scorer.health, within_s), _Health)
    except (InvalidData, msgspec.ValidationError):
        # somebody else's server, without such a route or with another
        return ""
    except (HalteresError, TimeoutError):
        return None
    name = unquote(scorer.root.partition("/models/")[2])
    if name:
        cards = [card for card in health.models if card.id == name]
    else:
        cards = health.models
    if cards:
        return cards[0].digest
    return ""
