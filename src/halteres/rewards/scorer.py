"""What scores texts: a reward model here or at an address, an ensemble of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Protocol

from halteres.clients.rewards import RewardClient
from halteres.errors import InvalidConfig
from halteres.scores import Combination, Output, Scorable, Score, is_address

if TYPE_CHECKING:
    from halteres.rewards.torch.model import RewardModel


class Scorer(Protocol):
    """Scores texts, each by itself: a score does not depend on the texts beside it."""

    name: str  # for tables: a folder's name, an address

    @property
    def units(self) -> Output | None:
        """In which scores come; None: it is not known yet, or none of these."""
        ...

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order; None where the scorer could not score it. Raises
        HalteresError where nothing can be scored at all: no model, no server, no budget left.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; it may be called twice."""
        ...


class LocalScorer:
    """A `Scorer` by a reward model in this process: it computes in a thread, one call at a time."""

    def __init__(self, model: RewardModel, output: Output = "standardised") -> None:
        self.name = str(model.folder or "model")
        self._model, self._computing = model, asyncio.Lock()
        self._output: Output = output

    @property
    def digest(self) -> str:
        """The model's; it reads every weight where it was not asked for before."""
        return self._model.digest

    @property
    def units(self) -> Output:
        """In which scores come."""
        return output_of(self._model, self._output)

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order; None for a text that the model cannot read."""
        async with self._computing:
            results = await asyncio.to_thread(self._model.score_each, texts)
        return [
            calibrated(self._model, one, self._output) if isinstance(one, Score) else None
            for one in results
        ]

    async def close(self) -> None:
        """Nothing to let go of."""


class Ensemble:
    """A `Scorer` of two or more, which score side by side: it trusts a text less the more they
    disagree.

    Conservative ways (`min`; `mean_minus_std`, which takes `k` standard deviations, ddof=0, off)
    nearly remove over-optimisation in best-of-N (Coste et al., ICLR 2024); what all members get
    wrong alike they do not see (arXiv 2312.09244). A text that a member could not score has no
    score: the mean of the rest would be of another ensemble.
    """

    def __init__(
        self, members: Sequence[Scorer], combination: Combination = "mean", k: float = 1.0
    ) -> None:
        if len(members) < 2:
            raise InvalidConfig("An ensemble needs two members or more.", f"It has {len(members)}.")
        self.name = f"{combination}({', '.join(member.name for member in members)})"
        self.units: Output | None = None  # its members'
        self.members, self._combination, self._k = members, combination, k

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order, with the members' disagreement; None where a member has
        none. InvalidConfig where the members score in different units.
        """
        by_member = await asyncio.gather(*(member.score(texts) for member in self.members))
        units: dict[str, Output] = {
            one.name: one.units for one in self.members if one.units is not None
        }
        if len(set(units.values())) > 1:
            why = (
                f"{', '.join(f'{name}: {unit}' for name, unit in units.items())}. Not every one "
                "is calibrated."
            )
            fix = "Calibrate each (halteres reward calibrate), or ask for raw scores (output: raw)."
            raise InvalidConfig("The members of the ensemble score in different units.", why, fix)
        self.units = next(iter(units.values()), None)
        combined: list[Score | None] = []
        for scores in zip(*by_member, strict=True):
            known = [score for score in scores if score is not None]
            if len(known) < len(scores):
                combined.append(None)
                continue
            values = [score.value for score in known]
            spread = pstdev(values)
            if self._combination == "min":
                value = min(values)
            else:
                value = fmean(values)
            out_of_range = [score.out_of_range for score in known if score.out_of_range is not None]
            shared = [
                name for name in known[0].parts if all(name in score.parts for score in known)
            ]
            score = Score(
                value=value - self._k * spread if self._combination == "mean_minus_std" else value,
                num_tokens=max(score.num_tokens for score in known),
                truncated=any(score.truncated for score in known),
                ended_with_eos=all(score.ended_with_eos for score in known),
                out_of_range=any(out_of_range) if out_of_range else None,
                disagreement=spread,
                parts={name: fmean(score.parts[name] for score in known) for name in shared},
            )
            combined.append(score)
        return combined

    async def close(self) -> None:
        """Close the members."""
        for member in self.members:
            await member.close()


def output_of(model: RewardModel, output: Output) -> Output:
    """The units that a model can give where these are asked for: raw without a calibration, but no
    probability.
    """
    if model.calibration is None and output == "probability":
        fix = "halteres reward calibrate makes one from held-out pairs."
        raise InvalidConfig(
            f"The reward model {model.folder} gives no probabilities.",
            "It has no calibration.",
            fix,
        )
    if model.calibration:
        return output
    return "raw"


def calibrated(model: RewardModel, score: Score, output: Output) -> Score:
    """A raw score in other units, as `output_of` says, and whether the calibration knows scores
    like it.
    """
    units, calibration = output_of(model, output), model.calibration
    if calibration is None:
        return score
    return replace(
        score,
        value=calibration.apply(score.value, units),
        out_of_range=not calibration.covers(score.value),
    )


def places_of(where: str) -> list[str]:
    """The folders and addresses that a name stands for: several joined by commas are an
    ensemble.
    """
    return [place.strip() for place in where.split(",") if place.strip()]


def comparable_units(where: str) -> Output:
    """In which units to show the scores at a place: raw, but of an ensemble standardised, so that
    they can be added.
    """
    if len(places_of(where)) > 1:
        return "standardised"
    return "raw"


async def score_once(scorer: Scorer, texts: Sequence[Scorable]) -> list[Score | None]:
    """Score, and close the scorer."""
    try:
        return await scorer.score(texts)
    finally:
        await scorer.close()


def open_scorer(
    where: str,
    *,
    output: Output = "standardised",
    combination: Combination = "mean",
    waits_for_start: bool = False,
    timeout_s: float = 300,
) -> Scorer:
    """The scorer at a folder, an address, or several of them joined by commas: an ensemble.

    `waits_for_start`: a server that is not there yet is waited for. `timeout_s`: of a call to a
    server. NotFound or InvalidData where a folder holds no reward model, InvalidConfig for no
    address of a server.
    """
    places = places_of(where)
    if len(places) > 1:
        members = [
            open_scorer(place, output=output, waits_for_start=waits_for_start, timeout_s=timeout_s)
            for place in places
        ]
        return Ensemble(members, combination)
    if is_address(where):
        return RewardClient(
            where, output=output, waits_for_start=waits_for_start, timeout_s=timeout_s
        )
    from halteres.rewards.torch.model import RewardModel

    return LocalScorer(RewardModel.load(where), output)
