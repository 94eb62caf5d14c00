"""The components of a config, at work on a group.

Owns: one source per component, their calls side by side, each with its deadline; the hash of all that decides a score.
Never: composes values (`components`), resamples, waits for a component that is too late.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from halteres.clients.json_client import until_ready
from halteres.clients.rewards import RewardClient
from halteres.errors import HalteresError, InvalidConfig, InvalidData, ScorerFailed, boundary
from halteres.rewards.components import DISAGREEMENT, OUT_OF_RANGE, Aggregation, RewardSpec, Value
from halteres.rewards.functions import RewardFunction, Sample, columns_of
from halteres.rewards.judges import PROMPTS, Judge, NoGrade
from halteres.rewards.rubrics import Rubric, read_rubric
from halteres.rewards.scorer import Ensemble, LocalScorer, Scorer, open_scorer, places_of
from halteres.scores import Combination, Scorable, Score

READY_WITHIN_S = 300.0
"""How long a reward server may load its model before it is asked to score: a component's deadline begins after that."""

LOOK_S = 5.0
"""How long a reward server may take to say, at a later step, which model it has."""


class ScorerTimedOut(ScorerFailed):
    """A component gave no scores in time."""

    code = "scorer_timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """What the components gave some rollouts of one item."""

    values: Mapping[str, list[Value | None]]
    seconds: Mapping[str, float]  # each component's own call
    failures: Mapping[str, HalteresError]  # component -> why it gave nothing at all


class Source(Protocol):
    """Where a component's values come from."""

    @property
    def digest(self) -> str:
        """Of what decides the values beside the component's settings; empty: nothing does, or it cannot be told."""
        ...

    async def score(self, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
        """One value per sample."""
        ...


class RewardList:
    """The `rewards` of a config.

    Raises:
        InvalidConfig, NotFound, InvalidData: a function, a rubric, a model's folder or a key is not there.
    """

    def __init__(self, specs: Sequence[RewardSpec], aggregation: Aggregation = "sum_then_normalize") -> None:
        self.specs = tuple(specs)
        self.aggregation: Aggregation = aggregation
        self._judges = {spec.name: Judge(spec.judge) for spec in specs if spec.judge is not None}
        self._sources = {spec.name: _source(spec, self._judges.get(spec.name)) for spec in specs}
        self._step: int | None = None
        self._beginning = asyncio.Lock()

    @property
    def version(self) -> str:
        """12 hex digits: a hash of every component's settings, code, prompts and model.

        Where a model lies does not count: a run that goes on has another address for it.
        """
        components = [
            [spec.model_dump(mode="json", exclude={"model"}), self._sources[spec.name].digest] for spec in self.specs
        ]
        return hashlib.sha256(json.dumps([self.aggregation, components]).encode()).hexdigest()[:12]

    async def score(
        self, item: Any, samples: Sequence[Sample], step: int = 0, *, relative: bool | None = None
    ) -> GroupScores:
        """Every component's values of these rollouts. A component that fails gives none, and says why.

        Args:
            step: the optimiser step that judges' budgets count by.
            relative: ask only those whose values depend on the whole group (True), or only the others (False).
        """
        await self._begin(step)
        asked = [spec for spec in self.specs if relative is None or spec.is_relative == relative]
        outcomes = await asyncio.gather(*(self._scored(spec, item, samples) for spec in asked))
        by_name = dict(zip((spec.name for spec in asked), outcomes, strict=True))
        failures = {name: values for name, (values, _) in by_name.items() if isinstance(values, HalteresError)}
        return GroupScores(
            values={
                name: [None] * len(samples) if isinstance(values, HalteresError) else values
                for name, (values, _) in by_name.items()
            },
            seconds={name: seconds for name, (_, seconds) in by_name.items()},
            failures=failures,
        )

    def taken_counts(self) -> dict[str, int]:
        """What judges did since the last call of this, whatever became of its group: judge/NAME/calls, …"""
        return {
            f"judge/{name}/{kind}": count
            for name, judge in self._judges.items()
            for kind, count in judge.taken_counts().items()
        }

    async def close(self) -> None:
        """Close the judges' connections and the scorers'."""
        for judge in self._judges.values():
            await judge.close()
        for source in self._sources.values():
            if isinstance(source, _ModelScores):
                await source.close()

    async def _begin(self, step: int) -> None:
        """With each new step judges may spend again, and a model behind an address may be another.

        Groups of the step before may still be under way: they do not bring that step back.
        """
        async with self._beginning:  # all groups of a step have the version that its first one finds
            if self._step is not None and step <= self._step:
                return
            within_s = READY_WITHIN_S if self._step is None else LOOK_S
            self._step = step
            for judge in self._judges.values():
                judge.budget.begin_step()
            models = [source for source in self._sources.values() if isinstance(source, _ModelScores)]
            await asyncio.gather(*(model.learn_digests(within_s) for model in models))

    async def _scored(
        self, spec: RewardSpec, item: Any, samples: Sequence[Sample]
    ) -> tuple[list[Value | None] | HalteresError, float]:
        began, source = time.monotonic(), self._sources[spec.name]
        try:
            async with asyncio.timeout(spec.timeout_s):
                with boundary(ScorerFailed, f"The reward '{spec.name}'"):
                    if spec.when == "episode":
                        values = await source.score(item, samples)
                    else:
                        values = await _score_turns(spec, source, item, samples)
        except TimeoutError:
            who = f"The reward '{spec.name}'" + (f" ({spec.model})" if spec.model else "")
            late = ScorerTimedOut(f"{who} gave no scores within {spec.timeout_s:g} s, its timeout_s.")
            return late, time.monotonic() - began
        except HalteresError as error:
            return error, time.monotonic() - began
        return values, time.monotonic() - began


async def _score_turns(spec: RewardSpec, source: Source, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
    """The state after each turn's answer, or its difference to the one before; before the first it counts 0."""
    states = [sample.states for sample in samples]
    scored = iter(await source.score(item, [state for of_one in states for state in of_one]))
    found: list[Value | None] = []
    for of_one in states:
        values = [next(scored) for _ in of_one]
        totals = [value.total for value in values if value is not None]
        if len(totals) < len(values):
            found.append(None)
            continue
        turns = totals
        if spec.when == "difference":
            turns = [after - before for before, after in zip([0.0, *totals], totals, strict=False)]
        last = values[-1]
        found.append(Value(total=sum(turns), turns=tuple(turns), parts=last.parts if last is not None else {}))
    return found


def _source(spec: RewardSpec, judge: Judge | None) -> Source:
    if spec.environment:
        return _OwnScore()
    if spec.function is not None:
        return _FunctionValues(spec.function)
    if spec.model is not None:
        return _ModelScores(spec, places_of(spec.model))
    if judge is None:
        raise InvalidConfig(f"The reward '{spec.name}' has no source.")
    if spec.is_relative:
        return _Comparisons(judge)
    return _Grades(judge, None if spec.rubric is None else read_rubric(spec.rubric), spec.rubric_column)


class _OwnScore:
    """The environment's own score."""

    digest = ""

    async def score(self, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
        return [Value(total=sample.score) for sample in samples]


class _FunctionValues:
    """A reward function."""

    def __init__(self, name: str) -> None:
        self._function = RewardFunction(name)
        self.digest = self._function.digest

    async def score(self, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
        values = await self._function(item, samples)
        return [None if value is None else Value(total=value) for value in values]


class _ModelScores:
    """A reward model, here or at an address, or an ensemble of several."""

    def __init__(self, spec: RewardSpec, places: Sequence[str]) -> None:
        self._members = [
            open_scorer(place, output=spec.output, waits_for_start=True, timeout_s=spec.timeout_s) for place in places
        ]
        self._scorer = _combined(self._members, spec.combination)
        self._digests: list[str | None] = [None] * len(places)  # None: not known yet; empty: its server tells none

    @property
    def digest(self) -> str:
        """Of every member; empty where one of them cannot tell."""
        known = [digest for digest in self._digests if digest]
        return "/".join(known) if len(known) == len(self._members) else ""

    async def score(self, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
        texts = [Scorable(prompt=sample.prompt, completion=sample.completion) for sample in samples]
        scores = await self._scorer.score(texts)
        if None in self._digests:
            await self.learn_digests(LOOK_S)  # who has just scored can tell
        return [None if score is None else self._value(score) for score in scores]

    async def learn_digests(self, within_s: float) -> None:
        """Ask which models these are; one that does not answer in time counts as the one it was."""
        for place, digest in enumerate(await asyncio.gather(*(_digest(one, within_s) for one in self._members))):
            self._digests[place] = self._digests[place] if digest is None else digest

    async def close(self) -> None:
        """Close the connections."""
        for scorer in self._members:
            if isinstance(scorer, RewardClient):
                await scorer.close()

    def _value(self, score: Score) -> Value:
        """A score comes with its objectives' parts, an ensemble's with how far its members are apart."""
        told = {DISAGREEMENT: score.disagreement, OUT_OF_RANGE: score.out_of_range}
        parts = {name: float(part) for name, part in told.items() if part is not None}
        return Value(total=score.value, parts={**score.parts, **parts})


class _Grades:
    """A judge's grades by a rubric, the task's own where it has one."""

    def __init__(self, judge: Judge, rubric: Rubric | None, column: str | None) -> None:
        self._judge, self._rubric, self._column = judge, rubric, column
        self.digest = f"{PROMPTS}/{rubric.digest if rubric else ''}"

    async def score(self, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
        rubric = self._rubric_of(item)
        grades = await _once_each(samples, lambda sample: self._judge.grade(rubric, sample))
        _check_graded(self._judge, grades)
        return [None if one is None else Value(total=one.score, parts=one.criteria) for one in grades]

    def _rubric_of(self, item: Any) -> Rubric:
        own = columns_of(item).get(self._column) if self._column is not None else None
        if own is not None:
            return read_rubric(own)
        if self._rubric is None:
            raise InvalidData(f"The task has no rubric in its field '{self._column}'.")
        return self._rubric


class _Comparisons:
    """A judge's view of a group's answers beside each other."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.digest = PROMPTS

    async def score(self, item: Any, samples: Sequence[Sample]) -> list[Value | None]:
        ranked = self._judge.rank if self._judge.spec.method == "ranking" else self._judge.compare_all
        values = await ranked(samples)
        if len(samples) > 1:  # one alone has nothing to be compared with
            _check_graded(self._judge, values)
        return [None if value is None else Value(total=value) for value in values]


def _check_graded(judge: Judge, grades: Sequence[object | None]) -> None:
    if all(grade is None for grade in grades):
        raise NoGrade(f"The judge {judge.spec.model} gave no grade.", judge.last_failure)


async def _once_each(samples: Sequence[Sample], ask: Any) -> list[Any]:
    """What is asked of each sample; equal answers of a group are asked about once."""
    keys = [json.dumps([dict(message) for message in sample.completion], sort_keys=True) for sample in samples]
    different = dict(zip(keys, samples, strict=True))
    answers = await asyncio.gather(*(ask(sample) for sample in different.values()))
    found = dict(zip(different, answers, strict=True))
    return [found[key] for key in keys]


def _combined(scorers: Sequence[Scorer], combination: Combination) -> Scorer:
    if len(scorers) == 1:
        return scorers[0]
    return Ensemble(scorers, combination)


async def _digest(scorer: Scorer, within_s: float) -> str | None:
    """Of a scorer's model; empty: its server has none to tell; None: the server does not answer in time."""
    if isinstance(scorer, LocalScorer):
        return await asyncio.to_thread(lambda: scorer.digest)
    if not isinstance(scorer, RewardClient):
        return ""
    try:
        async with asyncio.timeout(within_s):
            health = await until_ready(scorer.health, within_s)
    except InvalidData:  # somebody else's server, without such a route
        return ""
    except (HalteresError, TimeoutError):
        return None
    return _digest_in(health, unquote(scorer.root.partition("/models/")[2]))


def _digest_in(health: Mapping[str, Any], name: str) -> str:
    """The digest of the model of this name, of the first where there is no name."""
    cards = health.get("models")
    cards = [card for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
    named = {str(card.get("id")): card for card in cards}
    card = named.get(name) if name else next(iter(named.values()), None)
    return str(card.get("digest") or "") if card else ""
