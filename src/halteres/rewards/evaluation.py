"""Evaluation: how well a scorer orders held-out comparisons, by kind, by length, and whether its scores stand still.

Owns: scores of every completion, the figures made of them, the probes.
Never: trains, calibrates; counts a text that could not be scored as wrong: it is counted beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from halteres.errors import InvalidData
from halteres.rewards import metrics
from halteres.rewards.benchmarks import Benchmark, rewardbench_2
from halteres.rewards.calibration import LEAST_PAIRS, Calibration, Side, fit_calibration
from halteres.rewards.metrics import Bin, Floats, PairFigures, Share
from halteres.rewards.preferences import Comparison, Preferences
from halteres.rewards.reward_file import RewardFile
from halteres.rewards.scorer import Ensemble, Scorer
from halteres.rewards.template import texts_of
from halteres.scores import Scorable, Score
from halteres.text import Message

TEXTS_AT_ONCE = 256
"""Handed to the scorer in one call."""

MOST_MISTAKES = 20
"""Pairs told apart worst, kept with their texts."""

PROBED = 16
"""Comparisons that the probes look at."""

FEW_PAIRS = 30
"""Of fewer nothing is said to be no better than a coin: they are too few to say."""

_OTHER_FORM = {
    False: "The model was trained on steps with labels: its score says whether all is right so far, not which of two "
    "whole answers is the better one.",
    True: "The model was trained on ranked answers: a score above 0 does not mean that a step is right.",
}
"""Of a model, by whether it is evaluated on steps."""

SAME = 1e-4
"""Two scores of one text differ by no more (fp32)."""


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
    def ranked_pairs(self) -> list[tuple[int, int]]:
        """Places of the better and the worse completion, of all pairs that are no tie."""
        ranks = self.comparison.ranks
        places = range(len(ranks))
        return [(better, worse) for better in places for worse in places if ranks[better] < ranks[worse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A ranked pair of completions, scored."""

    scored: Scored
    better: int  # its place
    worse: int

    @property
    def lead(self) -> float:
        """The better side's score minus the other's."""
        judged_K = self.scored.judged_K
        return float(judged_K[self.better] - judged_K[self.worse])

    @property
    def longer(self) -> int:
        """By how much the better side is longer: tokens where the scorer tells them, else characters."""
        lengths = lengths_of(self.scored)
        return int(lengths[self.better] - lengths[self.worse])


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of a completion in steps, scored."""

    scored: Scored
    place: int

    @property
    def label(self) -> bool:
        """Whether the step that led there is right."""
        return self.scored.comparison.labels[self.place]

    @property
    def lead(self) -> float:
        """The score, towards the label: above 0 it is told rightly."""
        score = float(self.scored.judged_K[self.place])
        return score if self.label else -score


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

    name: Literal["alone", "beside_longer", "with_end_token", "without_template"]
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
    """What a judge was asked, what that cost, and whether it matters to it which answer comes first."""

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
    num_unscored: int  # comparisons of which a completion could not be scored; they are in no figure
    num_truncated: int  # completions that were longer than the scorer reads
    num_without_eos: int
    overall: PairFigures
    by_kind: Mapping[str, PairFigures]
    by_objective: Mapping[str, PairFigures]
    first_wrong_step: Share | None  # rows in steps: its place, or that there is none, is told rightly
    groups: GroupFigures | None  # of comparisons of more than two completions
    length: LengthFigures
    calibration: CalibrationFigures
    quantiles: Mapping[str, float]  # of all scores
    probes: tuple[Probe, ...]
    benchmark: Benchmark | None
    leads: tuple[float, ...]
    mistakes: tuple[Pair | State, ...]  # the lowest leads below 0, lowest first
    judge: JudgeFigures | None = None  # of a judge
    notes: tuple[str, ...] = ()  # what the figures do not mean

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the accuracy alone would miss."""
        kinds = {f"Kind '{name}'": figures for name, figures in self.by_kind.items()}
        objectives = {f"Objective '{name}'": figures for name, figures in self.by_objective.items()}
        figures = {"Overall": self.overall, **kinds, **objectives}
        found = [*self.notes, *(_coin(what, one.accuracy) for what, one in figures.items() if one.accuracy.holds_half)]
        if self.num_unscored:
            found.append(f"{self.num_unscored} comparisons could not be scored; they are in no figure.")
        if self.num_truncated:
            found.append(f"{self.num_truncated} texts were longer than the scorer reads.")
        if self.length.spearman_within is not None and self.length.spearman_within > 0.5:
            found.append(f"Within a prompt, longer texts score higher: correlation {self.length.spearman_within:.2f}.")
        found.extend(
            f"Probe '{probe.name}': scores of a text differ by up to {probe.largest_difference:.2g}."
            for probe in self.probes
            if not probe.passed
        )
        return tuple(found)


async def evaluate(
    scorer: Scorer,
    preferences: Preferences,
    *,
    stored: RewardFile | None = None,
    probe: bool = True,
) -> Evaluation:
    """Score every completion and work the figures out.

    Args:
        scorer: in raw units, so that leads are those that the loss is made of.
        preferences: held-out ones.
        stored: what the model's folder says: its calibration's temperature, its end token, what it was trained on.
        probe: score some texts in other ways, too.

    Raises:
        InvalidData: token ids instead of texts; not one ranked pair could be scored; steps, and an ensemble.
    """
    in_steps = any(one.labels for one in preferences.comparisons)
    if in_steps and isinstance(scorer, Ensemble):
        raise InvalidData(
            "An ensemble cannot be evaluated on steps with labels.",
            "A step is told to be right by a raw score above 0, and the scores of its members are standardised.",
            "Evaluate each member by itself.",
        )
    temperature = stored.calibration.temperature if stored is not None and stored.calibration is not None else 1.0
    scored = await score_comparisons(scorer, preferences)
    found = figures_of(scored, preferences, scorer=scorer.name, temperature=temperature)
    if stored is not None and stored.data.get("in_steps", in_steps) != in_steps:
        found = replace(found, notes=(_OTHER_FORM[in_steps],))
    if not probe:
        return found
    return replace(found, probes=await probes(scorer, scored[:PROBED], stored.template.eos_token if stored else None))


def _coin(what: str, accuracy: Share) -> str:
    interval = f"({accuracy.low:.1%} to {accuracy.high:.1%})"
    if accuracy.count < FEW_PAIRS:
        return f"{what}: {accuracy.value:.1%} of {accuracy.count}, too few to tell from a coin {interval}."
    return f"{what}: {accuracy.value:.1%} of {accuracy.count} is no better than a coin {interval}."


def figures_of(
    scored: Sequence[Scored], preferences: Preferences, *, scorer: str, temperature: float = 1.0
) -> Evaluation:
    """Every figure but the probes, of the comparisons that could be scored. Raises as `evaluate` does."""
    pairs = [Pair(scored=one, better=better, worse=worse) for one in scored for better, worse in one.ranked_pairs]
    states = [State(scored=one, place=place) for one in scored for place in range(len(one.comparison.labels))]
    judged = [*pairs, *states]
    if not judged:
        raise InvalidData(
            f"{preferences.source} gives no ranked pair with two scores.",
            f"{len(scored)} of {len(preferences.comparisons)} comparisons could be scored.",
            "See what the scorer says of the others, and whether all are ties.",
        )
    leads = leads_of(judged)
    bins = metrics.reliability(leads, temperature)
    in_steps = [one for one in scored if one.comparison.labels]
    scores = np.concatenate([one.values_K for one in scored])
    return Evaluation(
        scorer=scorer,
        source=preferences.source,
        data_digest=preferences.digest,
        num_comparisons=len(preferences.comparisons),
        num_unscored=len(preferences.comparisons) - len(scored),
        num_truncated=sum(score.truncated for one in scored for score in one.scores),
        num_without_eos=sum(not score.ended_with_eos for one in scored for score in one.scores),
        overall=metrics.pair_figures(leads),
        by_kind=_by(judged, lambda one: one.kind),
        by_objective=_by(judged, lambda one: one.objective),
        first_wrong_step=metrics.share(sum(map(_finds_first_wrong, in_steps)), len(in_steps)) if in_steps else None,
        groups=_groups(scored),
        length=_length(scored, pairs),
        calibration=CalibrationFigures(
            temperature=temperature,
            error=metrics.calibration_error(bins),
            brier_score=metrics.brier_score(leads, temperature),
            bins=bins,
        ),
        quantiles={f"{q:g}": float(np.quantile(scores, q)) for q in (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)},
        probes=(),
        benchmark=rewardbench_2([(one.comparison, one.values_K) for one in scored]),
        leads=tuple(float(lead) for lead in leads),
        mistakes=tuple(sorted((one for one in judged if one.lead < 0), key=lambda one: one.lead)[:MOST_MISTAKES]),
    )


def _by(judged: Sequence[Pair | State], name_of: Callable[[Comparison], str | None]) -> dict[str, PairFigures]:
    names = sorted({name for one in judged if (name := name_of(one.scored.comparison)) is not None})
    return {
        name: metrics.pair_figures(leads_of([one for one in judged if name_of(one.scored.comparison) == name]))
        for name in names
    }


def _finds_first_wrong(scored: Scored) -> bool:
    """Whether the first state that scores no more than 0 is the first with the label wrong; or there is neither."""
    told = [score > 0 for score in scored.judged_K]
    labels = list(scored.comparison.labels)
    return [*told, False].index(False) == [*labels, False].index(False)


async def score_comparisons(scorer: Scorer, preferences: Preferences) -> list[Scored]:
    """The comparisons all of whose completions could be scored."""
    texts = [scorable for comparison in preferences.comparisons for scorable in scorables(comparison)]
    scores: list[Score | None] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        scores.extend(await scorer.score(texts[start : start + TEXTS_AT_ONCE]))
    scored: list[Scored] = []
    at = iter(scores)
    for comparison in preferences.comparisons:
        of_this = tuple(next(at) for _ in comparison.completions)
        known = tuple(score for score in of_this if score is not None)
        if len(known) == len(of_this):
            scored.append(Scored(comparison=comparison, scores=known))
    return scored


def scorables(comparison: Comparison) -> list[Scorable]:
    """The completions of a comparison as a scorer reads them.

    Raises:
        InvalidData: it holds token ids; a scorer reads texts, with a tokenizer of its own.
    """
    if comparison.form == "pre-tokenised":
        raise InvalidData(
            f"Row {comparison.row} holds token ids, which no scorer reads.",
            "A reward model has a tokenizer of its own.",
            "Evaluate on the texts that the ids were made of.",
        )
    return [text for text in texts_of(comparison) if isinstance(text, Scorable)]


def leads_of(judged: Sequence[Pair | State]) -> Floats:
    """Shape (P,)."""
    return np.array([one.lead for one in judged], dtype=np.float64)


def calibration_of(
    scored: Sequence[Scored], *, data_digest: str, template_digest: str = "", offset_from: Side = "chosen"
) -> Calibration:
    """The calibration by every ranked pair.

    Of a model with several objectives the score is their weighted sum, which rows without an objective judge: where
    those are enough, they alone count. Otherwise the temperature is that of each objective's own leads.

    Raises:
        InvalidData: too few pairs, or all scores are equal.
    """
    pairs = [Pair(scored=one, better=better, worse=worse) for one in scored for better, worse in one.ranked_pairs]
    of_the_sum = [pair for pair in pairs if pair.scored.comparison.objective is None]
    used = of_the_sum if len(of_the_sum) >= LEAST_PAIRS else pairs
    return fit_calibration(
        np.array([pair.scored.values_K[pair.better] for pair in used]),
        np.array([pair.scored.values_K[pair.worse] for pair in used]),
        leads_P=leads_of(used),
        data_digest=data_digest,
        template_digest=template_digest,
        offset_from=offset_from,
    )


def lengths_of(scored: Scored) -> Floats:
    """Of each completion with its prompt: tokens where the scorer tells them, else characters."""
    if all(score.num_tokens for score in scored.scores):
        return np.array([score.num_tokens for score in scored.scores], dtype=np.float64)
    return np.array([len(as_text(text)) for text in scored.comparison.completions], dtype=np.float64)


def as_text(text: object) -> str:
    """A string, or messages without their roles."""
    if isinstance(text, str):
        return text
    messages = cast("Sequence[Message]", text)
    return "\n".join(str(message.get("content") or "") for message in messages)


def _groups(scored: Sequence[Scored]) -> GroupFigures | None:
    groups = [one for one in scored if len(one.scores) > 2 and one.ranked_pairs]
    if not groups:
        return None
    correct = [np.array(one.comparison.ranks) == 0 for one in groups]
    taus = [metrics.kendall_tau(one.judged_K, one.comparison.ranks) for one in groups]
    return GroupFigures(
        num_groups=len(groups),
        best_of_n=float(
            np.mean([metrics.best_of_n_credit(one.judged_K, best) for one, best in zip(groups, correct, strict=True)])
        ),
        random_best_of_n=float(np.mean([best.mean() for best in correct])),
        kendall_tau=_mean([tau for tau in taus if tau is not None]),
    )


def _length(scored: Sequence[Scored], pairs: Sequence[Pair]) -> LengthFigures:
    lengths = [lengths_of(one) for one in scored]
    within = [metrics.spearman(one.values_K, length) for one, length in zip(scored, lengths, strict=True)]
    shorter, longer = ([pair.lead > 0 for pair in pairs if sign * pair.longer > 0] for sign in (-1, 1))
    return LengthFigures(
        spearman=metrics.spearman(np.concatenate([one.values_K for one in scored]), np.concatenate(lengths)),
        spearman_within=_mean([each for each in within if each is not None]),
        chosen_shorter=metrics.share(sum(shorter), len(shorter)),
        chosen_longer=metrics.share(sum(longer), len(longer)),
    )


async def probes(scorer: Scorer, scored: Sequence[Scored], eos_token: str | None = None) -> tuple[Probe, ...]:
    """The same texts alone, beside a much longer one, with the end token written out, and as bare strings."""
    texts = [text for one in scored for text in scorables(one.comparison)]
    first = np.concatenate([one.values_K for one in scored])
    longest = max(texts, key=lambda text: len(as_text(text.completion)))
    filler = replace(longest, completion=_longer(longest.completion))
    alone = [(await scorer.score([text]))[0] for text in texts]
    beside = (await scorer.score([*texts, filler]))[: len(texts)]
    found = [_probe("alone", first, alone, same=True), _probe("beside_longer", first, beside, same=True)]
    bare = [_bare(text) for text in texts]
    if isinstance(texts[0].completion, str):
        if eos_token:
            ended = [replace(text, completion=f"{text.completion}{eos_token}") for text in texts]
            found.append(_probe("with_end_token", first, await scorer.score(ended), same=True))
    else:
        found.append(_probe("without_template", first, await scorer.score(bare), same=False))
    return tuple(probe for probe in found if probe is not None)


def _probe(
    name: Literal["alone", "beside_longer", "with_end_token", "without_template"],
    first: Floats,
    other: Sequence[Score | None],
    *,
    same: bool,
) -> Probe | None:
    """None where the other way could not be scored."""
    if any(score is None for score in other):
        return None
    second = np.array([score.value for score in other if score is not None])
    return Probe(
        name=name,
        num_texts=len(first),
        largest_difference=float(np.abs(second - first).max()),
        mean_shift=float((second - first).mean()),
        scale_ratio=float(second.std() / first.std()) if first.std() else None,
        must_be_same=same,
    )


def _longer(completion: str | Sequence[Message]) -> str | Sequence[Message]:
    """Three times as long."""
    if isinstance(completion, str):
        return completion * 3
    last = completion[-1]
    return [*completion[:-1], {**last, "content": as_text([last]) * 3}]


def _bare(text: Scorable) -> Scorable:
    """As one string, without any template: what `pipeline("text-classification")` is given."""
    parts = [as_text(part) for part in (text.prompt, text.completion) if part]
    return Scorable(completion="\n".join(parts))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
