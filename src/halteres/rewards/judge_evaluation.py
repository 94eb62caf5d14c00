"""Evaluation of a judge: how well its grades or comparisons order held-out preferences, and what that costs.

Owns: a judge's file, which is one component of a `rewards` list.
Never: counts a comparison that the judge gave no verdict on as wrong: it is counted beside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from halteres.errors import InvalidConfig, InvalidData, NotReady
from halteres.rewards import metrics
from halteres.rewards.components import RewardSpec
from halteres.rewards.evaluation import Evaluation, JudgeFigures, Scored, figures_of, scorables
from halteres.rewards.functions import Sample
from halteres.rewards.judges import Judge
from halteres.rewards.preferences import Comparison, Preferences
from halteres.rewards.rubrics import Rubric, read_data, read_rubric
from halteres.scores import Score
from halteres.text import Message

SUFFIXES = (".json", ".toml", ".yaml", ".yml")

COMPARISONS_AT_ONCE = 256
"""That wait for the judge; how many requests are under way is its own setting."""


def read_judge(file: Path) -> RewardSpec:
    """The component in a file: `judge`, with or without a `rubric`; its name is the file's where it has none.

    Raises:
        InvalidConfig: unreadable, or no component.
    """
    where, content = read_data(file, "judge")
    try:
        spec = RewardSpec.model_validate({"name": "judge", **content} if isinstance(content, dict) else content)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        raise InvalidConfig(f"{where} is no judge.", f"{found}.") from error
    return spec if isinstance(content, dict) and "name" in content else spec.model_copy(update={"name": file.stem})


async def evaluate_judge(spec: RewardSpec, preferences: Preferences) -> Evaluation:
    """Ask the judge about every comparison, and work the figures out: grades by its rubric, else as its method says.

    Raises:
        InvalidConfig: no judge, or its key or its rubric is not there.
        InvalidData: token ids instead of texts; steps; no ranked pair.
        NotReady: the judge gave a verdict on not one comparison.
    """
    if spec.judge is None or spec.rubric_column is not None:
        raise InvalidConfig(
            f"The component '{spec.name}' is no judge of preferences.",
            "Preferences have no rubrics of their own." if spec.judge else "It has no table `judge`.",
            "Give it a table `judge`, and for grades a `rubric`.",
        )
    if any(one.labels for one in preferences.comparisons):
        raise InvalidData(
            f"The judge '{spec.name}' cannot be evaluated on steps with labels.",
            "A judge grades and compares whole answers.",
            "Name preferences: rows with chosen and rejected.",
        )
    rubric = None if spec.rubric is None else read_rubric(spec.rubric)
    judge = Judge(spec.judge, waits_for_start=False)
    scored: list[Scored] = []
    try:
        for start in range(0, len(preferences.comparisons), COMPARISONS_AT_ONCE):
            part = preferences.comparisons[start : start + COMPARISONS_AT_ONCE]
            found = await asyncio.gather(*(_scored(judge, rubric, comparison) for comparison in part))
            scored.extend(one for one in found if one is not None)
    finally:
        await judge.close()
    did = _judge_figures(judge)
    if not scored:
        raise NotReady(
            f"The judge gave a verdict on none of {len(preferences.comparisons)} comparisons.",
            f"{did.failed} questions failed, {did.unreadable} answers could not be read, {did.over_budget} questions "
            "were over its budget." + (f" The last: {judge.last_failure}" if judge.last_failure else ""),
            f"See whether {spec.judge.base_url} answers, and whether its model is called {spec.judge.model}."
            if did.failed
            else "Take a judge that follows instructions, or raise max_new_tokens or its budget.",
        )
    return replace(figures_of(scored, preferences, scorer=spec.name), judge=did)


async def _scored(judge: Judge, rubric: Rubric | None, comparison: Comparison) -> Scored | None:
    """None: the judge gave an answer of this comparison no value."""
    samples = [
        Sample(prompt=_messages(text.prompt, "user"), completion=_messages(text.completion, "assistant"))
        for text in scorables(comparison)
    ]
    if rubric is not None:
        grades = await asyncio.gather(*(judge.grade(rubric, sample) for sample in samples))
        values = [None if grade is None else grade.score for grade in grades]
    else:
        values = await (judge.rank(samples) if judge.spec.method == "ranking" else judge.compare_all(samples))
    scores = tuple(Score(value=value) for value in values if value is not None)
    return Scored(comparison=comparison, scores=scores) if len(scores) == len(samples) else None


def _judge_figures(judge: Judge) -> JudgeFigures:
    counts = judge.taken_counts()
    kinds = ("calls", "tokens", "cached", "written", "unreadable", "failed", "over_budget")
    both = counts.get("in_both_orders", 0)
    return JudgeFigures(
        **{kind: counts.get(kind, 0) for kind in kinds},
        position_consistency=metrics.share(counts.get("consistent", 0), both) if both else None,
    )


def _messages(text: str | Sequence[Message] | None, role: str) -> Sequence[Message]:
    if isinstance(text, str):
        return ({"role": role, "content": text},)
    return text or ()
