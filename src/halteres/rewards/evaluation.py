"""Evaluation: how well a scorer or a judge orders held-out comparisons, by kind, by length, and
whether its scores stand still. A text that could not be scored is never counted as wrong: it is
counted beside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import ValidationError

from halteres.errors import InvalidConfig, InvalidData, NotReady
from halteres.rewards import metrics
from halteres.rewards.components import RewardSpec, problems_of, read_data, read_rubric
from halteres.rewards.functions import Sample
from halteres.rewards.judges import Judge
from halteres.rewards.metrics import (
    LEAST_PAIRS,
    Benchmark,
    Bin,
    Floats,
    PairFigures,
    Share,
    fit_calibration,
)
from halteres.rewards.model_folder import Calibration, RewardFile, Side, texts_of
from halteres.rewards.preferences import Comparison, Preferences
from halteres.rewards.scorer import Ensemble, Scorer
from halteres.scores import Scorable, Score
from halteres.tokenizer import Message, text_of

TEXTS_AT_ONCE = 256  # handed to the scorer in one call; and comparisons that wait for a judge
MOST_MISTAKES = 20  # pairs told apart worst, with their texts
PROBED = 16  # comparisons that the probes look at
FEW_PAIRS = 30  # of fewer nothing is said to be no better than a coin: they are too few to say
SAME = 1e-4  # two scores of one text differ by no more (fp32)
JUDGE_SUFFIXES = (".json", ".toml", ".yaml", ".yml")

_OTHER_FORM = {
    False: "The model was trained on steps with labels: its score says whether all is right so "
    "far, not which of two "
    "whole answers is the better one.",
    True: (
        "The model was trained on ranked answers: a score above 0 does not mean that a step is "
        "right."
    ),
}
"""Of a model, by whether it is evaluated on steps."""

ProbeName = Literal["alone", "beside_longer", "with_end_token", "without_template"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A comparison and the scores of its completions."""

    comparison: Comparison
    scores: tuple[Score, ...]  # K

    @property
    def values_K(self) -> Floats:
        """The scores as numbers."""
        return np.array([score.value for score in self.scores])

    @property
    def judged_K(self) -> Floats:
        """The scores of the comparison's objective, where the scorer tells them apart."""
        objective = self.comparison.objective or ""
        return np.array([score.parts.get(objective, score.value) for score in self.scores])

    @property
    def lengths_K(self) -> Floats:
        """Of each completion with its prompt: tokens where the scorer tells them, else
        characters.
        """
        if all(score.num_tokens for score in self.scores):
            return np.array([score.num_tokens for score in self.scores], dtype=np.float64)
        return np.array(
            [len(as_text(text)) for text in self.comparison.completions], dtype=np.float64
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A ranked pair of completions, scored; or a state of a completion in steps."""

    scored: Scored
    places: tuple[int, ...]  # of the better and the worse completion; of the state
    # the better side's score minus the other's; of a state its score, towards its label
    lead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """How well more than two completions of a prompt are ranked."""

    num_groups: int
    best_of_n: float  # mean credit: the best is among the m highest scores, 1/m
    random_best_of_n: float  # what chance would get
    kendall_tau: float | None  # mean of tau-b


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFigures:
    """What length has to do with the score."""

    spearman: float | None  # of score and length, all completions
    spearman_within: float | None  # mean over prompts
    chosen_shorter: Share  # accuracy where the better side is the shorter
    chosen_longer: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFigures:
    """How far a lead tells the probability of being right."""

    temperature: float  # at which leads were read
    error: float  # expected calibration error
    brier_score: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The same texts scored in another way."""

    name: ProbeName
    num_texts: int
    largest_difference: float  # of a text's two scores
    mean_shift: float  # the other way's mean score minus the first's
    scale_ratio: float | None  # the other way's standard deviation by the first's
    must_be_same: bool  # ... within `SAME`; otherwise a difference is a fact to know

    @property
    def passed(self) -> bool:
        """What must be the same is."""
        return not self.must_be_same or self.largest_difference <= SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFigures:
    """The questions put to a judge, what they cost, and whether it matters to it which answer comes
    first.
    """

    calls: int
    tokens: int  # both ways
    cached: int  # questions that were answered before
    written: int  # verdicts that are no expectation over a token's probabilities
    unreadable: int  # answers that hold no verdict
    failed: int  # questions without an answer
    over_budget: int  # questions that were not sent
    position_consistency: Share | None  # same verdict in both orders; None: it compares no answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    scorer: str
    source: str
    data_digest: str
    num_comparisons: int
    # comparisons of which a completion could not be scored; they are in no figure
    num_unscored: int
    num_truncated: int  # completions that were longer than the scorer reads
    num_without_eos: int
    overall: PairFigures
    by_kind: Mapping[str, PairFigures]
    by_objective: Mapping[str, PairFigures]
    # rows in steps: its place, or that there is none, is told rightly
    first_wrong_step: Share | None
    groups: GroupFigures | None  # of comparisons of more than two completions
    length: LengthFigures
    calibration: CalibrationFigures
    quantiles: Mapping[str, float]  # of all scores
    benchmark: Benchmark | None
    leads: tuple[float, ...]
    mistakes: tuple[Judged, ...]  # the lowest leads below 0, lowest first
    probes: tuple[Probe, ...] = ()
    judge: JudgeFigures | None = None  # of a judge
    notes: tuple[str, ...] = ()  # what the figures do not mean

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the accuracy alone would miss."""
        found = list(self.notes)
        kinds = {f"Kind '{name}'": figures for name, figures in self.by_kind.items()}
        objectives = {f"Objective '{name}'": figures for name, figures in self.by_objective.items()}
        for name, figures in {"Overall": self.overall, **kinds, **objectives}.items():
            share = figures.accuracy
            if share.holds_half:
                few = share.count < FEW_PAIRS
                verdict = " is no better than a coin"
                if few:
                    verdict = ", too few to tell from a coin"
                found.append(
                    f"{name}: {share.value:.1%} of {share.count}{verdict} ({share.low:.1%} to "
                    f"{share.high:.1%})."
                )
        if self.num_unscored:
            found.append(
                f"{self.num_unscored} comparisons could not be scored; they are in no figure."
            )
        if self.num_truncated:
            found.append(f"{self.num_truncated} texts were longer than the scorer reads.")
        if self.length.spearman_within is not None and self.length.spearman_within > 0.5:
            found.append(
                "Within a prompt, longer texts score higher: correlation "
                f"{self.length.spearman_within:.2f}."
            )
        found += [
            f"Probe '{probe.name}': scores of a text differ by up to "
            f"{probe.largest_difference:.2g}."
            for probe in self.probes
            if not probe.passed
        ]
        return tuple(found)


async def evaluate(
    scorer: Scorer,
    preferences: Preferences,
    *,
    stored: RewardFile | None = None,
    probe: bool = True,
) -> Evaluation:
    """Score every completion and work the figures out. InvalidData where no ranked pair could be
    scored.

    Args:
        scorer: in raw units, so that leads are those that the loss is made of; of steps, no
            ensemble.
        preferences: held-out ones; texts, no token ids.
        stored: what the model's folder says: its calibration's temperature, its end token, what it
            was trained on.
        probe: score some texts in other ways, too.
    """
    in_steps = any(one.labels for one in preferences.comparisons)
    if in_steps and isinstance(scorer, Ensemble):
        why = "A step is right where its raw score is above 0; those of members are standardised."
        raise InvalidData(
            "An ensemble cannot be evaluated on steps with labels.",
            why,
            "Evaluate each member by itself.",
        )
    temperature = 1.0
    if stored is not None and stored.calibration is not None:
        temperature = stored.calibration.temperature
    scored = await score_comparisons(scorer, preferences)
    found = _figures(scored, preferences, scorer.name, temperature)
    if stored is not None and stored.data.get("in_steps", in_steps) != in_steps:
        found = replace(found, notes=(_OTHER_FORM[in_steps],))
    if not probe:
        return found
    return replace(
        found,
        probes=await _probes(
            scorer, scored[:PROBED], stored.template.eos_token if stored else None
        ),
    )


async def score_comparisons(scorer: Scorer, preferences: Preferences) -> list[Scored]:
    """The comparisons all of whose completions could be scored."""
    texts = [
        scorable for comparison in preferences.comparisons for scorable in _scorables(comparison)
    ]
    scores: list[Score | None] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        scores.extend(await scorer.score(texts[start : start + TEXTS_AT_ONCE]))
    each = iter(scores)
    scored = [(one, [next(each) for _ in one.completions]) for one in preferences.comparisons]
    return [found for one, own in scored if (found := _scored(one, own)) is not None]


def calibration_of(scored: Sequence[Scored], *, offset_from: Side = "chosen") -> Calibration:
    """The calibration by every ranked pair; InvalidData where there are too few, or all scores are
    equal.

    Of a model with several objectives the score is their weighted sum, which rows without an
    objective judge: where those are enough, they alone count. Otherwise the temperature is that of
    each objective's own leads.
    """
    pairs = _pairs(scored)
    of_the_sum = [pair for pair in pairs if pair.scored.comparison.objective is None]
    used = pairs
    if len(of_the_sum) >= LEAST_PAIRS:
        used = of_the_sum
    values_P2 = np.array([pair.scored.values_K[[*pair.places]] for pair in used]).reshape(-1, 2)
    return fit_calibration(
        values_P2[:, 0], values_P2[:, 1], leads_P=_leads(used), offset_from=offset_from
    )


def read_judge(file: Path) -> RewardSpec:
    """The component in a file: `judge`, with or without a `rubric`; its name is the file's where it
    has none.
    """
    where, content = read_data(file, "judge")
    try:
        spec = RewardSpec.model_validate(
            {"name": "judge", **content} if isinstance(content, dict) else content
        )
    except ValidationError as error:
        raise InvalidConfig(f"{where} is no judge.", problems_of(error)) from error
    if "name" in content:
        return spec
    return spec.model_copy(update={"name": file.stem})


async def evaluate_judge(spec: RewardSpec, preferences: Preferences) -> Evaluation:
    """Ask the judge about every comparison, and work the figures out: grades by its rubric, else as
    its method says.

    InvalidConfig where it is no judge, InvalidData where the rows are none for it, NotReady where
    it gave no verdict.
    """
    if spec.judge is None or spec.rubric_column is not None:
        why = "It has no table `judge`."
        if spec.judge:
            why = "Preferences have no rubrics of their own."
        fix = "Give it a table `judge`, and for grades a `rubric`."
        raise InvalidConfig(f"The component '{spec.name}' is no judge of preferences.", why, fix)
    if any(one.labels for one in preferences.comparisons):
        what = f"The judge '{spec.name}' cannot be evaluated on steps with labels."
        raise InvalidData(
            what, "A judge grades whole answers.", "Name rows with chosen and rejected."
        )
    rubric = None
    if spec.rubric is not None:
        rubric = read_rubric(spec.rubric)
    judge = Judge(spec.judge, waits_for_start=False)

    def messages(text: str | Sequence[Message] | None, role: str) -> Sequence[Message]:
        if isinstance(text, str):
            return ({"role": role, "content": text},)
        return text or ()

    async def scored_by_judge(comparison: Comparison) -> Scored | None:
        samples = [
            Sample(
                prompt=messages(text.prompt, "user"),
                completion=messages(text.completion, "assistant"),
            )
            for text in _scorables(comparison)
        ]
        if rubric is not None:
            grades = await asyncio.gather(*(judge.grade(rubric, sample) for sample in samples))
            values = [None if grade is None else grade.score for grade in grades]
        else:
            values = await judge.relative_values(samples)
        return _scored(
            comparison, [None if value is None else Score(value=value) for value in values]
        )

    scored: list[Scored] = []
    try:
        for start in range(0, len(preferences.comparisons), TEXTS_AT_ONCE):
            part = preferences.comparisons[start : start + TEXTS_AT_ONCE]
            found = await asyncio.gather(*(scored_by_judge(comparison) for comparison in part))
            scored.extend(one for one in found if one is not None)
    finally:
        await judge.close()
    counts = judge.taken_counts()
    kinds = ("calls", "tokens", "cached", "written", "unreadable", "failed", "over_budget")
    in_both = counts.get("in_both_orders", 0)
    consistency = None
    if in_both:
        consistency = metrics.share(counts.get("consistent", 0), in_both)
    figures = JudgeFigures(
        **{kind: counts.get(kind, 0) for kind in kinds}, position_consistency=consistency
    )
    if not scored:
        lost = f"{figures.failed} questions failed, {figures.unreadable} answers could not be read"
        why = (
            f"{lost}, {figures.over_budget} questions were over its budget. The last: "
            f"{judge.last_failure}"
        )
        fix = (
            f"See whether {spec.judge.base_url} answers, and whether its model is called "
            f"{spec.judge.model}."
        )
        if not figures.failed:
            fix = "Take a judge that follows instructions, or raise max_new_tokens or its budget."
        raise NotReady(
            f"The judge gave a verdict on none of {len(preferences.comparisons)} comparisons.",
            why,
            fix,
        )
    return replace(_figures(scored, preferences, spec.name), judge=figures)


def as_text(text: object) -> str:
    """A string, or messages without their roles."""
    if isinstance(text, str):
        return text
    return "\n".join(text_of(message.get("content")) for message in cast("Sequence[Message]", text))


def _figures(
    scored: Sequence[Scored], preferences: Preferences, scorer: str, temperature: float = 1.0
) -> Evaluation:
    """Every figure but the probes, of the comparisons that could be scored."""
    pairs = _pairs(scored)
    in_steps = [one for one in scored if one.comparison.labels]
    states = [
        Judged(scored=one, places=(place,), lead=float(score if label else -score))
        for one in in_steps
        for place, (score, label) in enumerate(
            zip(one.judged_K, one.comparison.labels, strict=True)
        )
    ]
    # Right where the first state that scores no more than 0 is the first with the label wrong; or
    # there is neither.
    right = [
        [*(score > 0 for score in one.judged_K), False].index(False)
        == [*one.comparison.labels, False].index(False)
        for one in in_steps
    ]
    judged = [*pairs, *states]
    if not judged:
        why = f"{len(scored)} of {len(preferences.comparisons)} comparisons could be scored."
        raise InvalidData(
            f"{preferences.source} gives no ranked pair with two scores.",
            why,
            "See whether all are ties.",
        )
    leads = _leads(judged)
    bins = metrics.reliability(leads, temperature)
    values = np.concatenate([one.values_K for one in scored])
    scores = [score for one in scored for score in one.scores]
    return Evaluation(
        scorer=scorer,
        source=preferences.source,
        data_digest=preferences.digest,
        num_comparisons=len(preferences.comparisons),
        num_unscored=len(preferences.comparisons) - len(scored),
        num_truncated=sum(score.truncated for score in scores),
        num_without_eos=sum(not score.ended_with_eos for score in scores),
        overall=metrics.pair_figures(leads),
        by_kind=_figures_by(judged, "kind"),
        by_objective=_figures_by(judged, "objective"),
        first_wrong_step=metrics.share(sum(right), len(right)) if right else None,
        groups=_group_figures(scored),
        length=_length_figures(scored, pairs),
        calibration=CalibrationFigures(
            temperature=temperature,
            error=metrics.calibration_error(bins),
            brier_score=metrics.brier_score(leads, temperature),
            bins=bins,
        ),
        quantiles={f"{q:g}": float(np.quantile(values, q)) for q in metrics.QUANTILES},
        benchmark=metrics.rewardbench_2([(one.comparison, one.values_K) for one in scored]),
        leads=tuple(float(lead) for lead in leads),
        mistakes=tuple(
            sorted((one for one in judged if one.lead < 0), key=lambda one: one.lead)[
                :MOST_MISTAKES
            ]
        ),
    )


def _pairs(scored: Sequence[Scored]) -> list[Judged]:
    """All pairs of completions that are no tie."""
    return [
        Judged(scored=one, places=(better, worse), lead=float(judged_K[better] - judged_K[worse]))
        for one in scored
        for judged_K in (one.judged_K,)
        for better, worse in permutations(range(len(judged_K)), 2)
        if one.comparison.ranks[better] < one.comparison.ranks[worse]
    ]


def _leads(judged: Sequence[Judged]) -> Floats:
    return np.array([one.lead for one in judged], dtype=np.float64)


def _figures_by(
    judged: Sequence[Judged], field: Literal["kind", "objective"]
) -> dict[str, PairFigures]:
    by_name: dict[str, list[Judged]] = {}
    for one in judged:
        by_name.setdefault(getattr(one.scored.comparison, field) or "", []).append(one)
    return {name: metrics.pair_figures(_leads(by_name[name])) for name in sorted(by_name) if name}


def _group_figures(scored: Sequence[Scored]) -> GroupFigures | None:
    groups = [one for one in scored if len(one.scores) > 2 and len(set(one.comparison.ranks)) > 1]
    if not groups:
        return None
    correct = [np.array(one.comparison.ranks) == 0 for one in groups]
    credits = [
        metrics.best_of_n_credit(one.judged_K, best)
        for one, best in zip(groups, correct, strict=True)
    ]
    return GroupFigures(
        num_groups=len(groups),
        best_of_n=float(np.mean(credits)),
        random_best_of_n=float(np.mean([best.mean() for best in correct])),
        kendall_tau=_mean_known(
            metrics.kendall_tau(one.judged_K, one.comparison.ranks) for one in groups
        ),
    )


def _length_figures(scored: Sequence[Scored], pairs: Sequence[Judged]) -> LengthFigures:
    values, lengths = [one.values_K for one in scored], [one.lengths_K for one in scored]
    lengths_P2 = np.array([pair.scored.lengths_K[[*pair.places]] for pair in pairs]).reshape(-1, 2)
    right_P, longer_P = _leads(pairs) > 0, lengths_P2[:, 0] - lengths_P2[:, 1]
    return LengthFigures(
        spearman=metrics.spearman(np.concatenate(values), np.concatenate(lengths)),
        spearman_within=_mean_known(map(metrics.spearman, values, lengths)),
        chosen_shorter=metrics.share(int(right_P[longer_P < 0].sum()), int(np.sum(longer_P < 0))),
        chosen_longer=metrics.share(int(right_P[longer_P > 0].sum()), int(np.sum(longer_P > 0))),
    )


async def _probes(
    scorer: Scorer, scored: Sequence[Scored], eos_token: str | None
) -> tuple[Probe, ...]:
    """The same texts alone, beside a much longer one, with the end token written out, and as bare
    strings.
    """
    texts = [text for one in scored for text in _scorables(one.comparison)]
    first = np.concatenate([one.values_K for one in scored])
    longest = max(texts, key=lambda text: len(as_text(text.completion)))
    if isinstance(longest.completion, str):
        filler = replace(longest, completion=longest.completion * 3)
    else:
        *before, last = longest.completion
        filler = replace(longest, completion=[*before, {**last, "content": as_text([last]) * 3}])
    others: dict[ProbeName, list[Score | None]] = {
        "alone": [(await scorer.score([text]))[0] for text in texts],
        "beside_longer": (await scorer.score([*texts, filler]))[: len(texts)],
    }
    if not isinstance(texts[0].completion, str):
        # As one string, without any template: what `pipeline("text-classification")` is given.
        bare = (
            "\n".join(as_text(part) for part in (text.prompt, text.completion) if part)
            for text in texts
        )
        others["without_template"] = await scorer.score(
            [Scorable(completion=text) for text in bare]
        )
    elif eos_token:
        ended = [replace(text, completion=f"{text.completion}{eos_token}") for text in texts]
        others["with_end_token"] = await scorer.score(ended)
    values: dict[ProbeName, Floats] = {
        name: np.array([one.value for one in scores if one is not None])
        for name, scores in others.items()
    }
    return tuple(
        Probe(
            name=name,
            num_texts=len(first),
            largest_difference=float(np.abs(second - first).max()),
            mean_shift=float((second - first).mean()),
            scale_ratio=float(second.std() / first.std()) if first.std() else None,
            must_be_same=name != "without_template",
        )
        for name, second in values.items()
        if len(second) == len(first)  # else the other way could not be scored
    )


def _scored(comparison: Comparison, scores: Sequence[Score | None]) -> Scored | None:
    """None: one of the completions has no score."""
    known = tuple(score for score in scores if score is not None)
    if len(known) == len(comparison.completions):
        return Scored(comparison=comparison, scores=known)
    return None


def _scorables(comparison: Comparison) -> list[Scorable]:
    """The completions as a scorer reads them."""
    texts = [text for text in texts_of(comparison) if isinstance(text, Scorable)]
    if not texts:
        fix = "Evaluate on the texts that the ids were made of."
        raise InvalidData(f"Row {comparison.row} holds token ids, which no scorer reads.", next=fix)
    return texts


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return float(np.mean(known))
    return None
