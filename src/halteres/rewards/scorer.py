"""What scores texts: a reward model here or at an address, an ensemble of them, a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from halteres.errors import HalteresError, InvalidConfig, InvalidData
from halteres.scores import Output, Scorable, Score, is_address

Device = Literal["auto", "cpu", "cuda"]
"""Where a model computes; `auto`: a GPU where there is one."""

Combination = Literal["mean", "min", "mean_minus_std"]
"""What an ensemble makes of its members' scores."""


class Scorer(Protocol):
    """Scores texts, each by itself: a score does not depend on the texts beside it."""

    name: str  # for tables: a folder's name, an address

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order; None where the scorer could not score it.

        Raises:
            HalteresError: nothing can be scored at all: no model, no server, no budget left.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; it may be called twice."""
        ...


class Units(Protocol):
    """The calibration of a model, as far as scores need it."""

    @property
    def temperature(self) -> float:
        """The probability that one text is better than another is sigmoid(difference of raw scores / temperature)."""
        ...

    def apply(self, raw: float, output: Output) -> float:
        """A raw score in other units."""
        ...

    def covers(self, raw: float) -> bool:
        """Whether the calibration was made from scores as low and as high as this one."""
        ...


class Model(Protocol):
    """A loaded reward model, as far as scores need it: `rewards.torch.model.RewardModel`, or a stand-in of a test."""

    @property
    def folder(self) -> Path | None:
        """Where it was loaded from."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of its weights, template and calibration: equal digests give equal scores."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed of a folder that says too little."""
        ...

    @property
    def calibration(self) -> Units | None:
        """None: it gives raw scores alone."""
        ...

    def score_each(self, texts: Sequence[Scorable]) -> list[Score | InvalidData]:
        """Raw scores; in place of one that could not be made, why. A text that cannot be read spoils no other."""
        ...


class LocalScorer:
    """A reward model in this process: computes in a thread, one call at a time."""

    def __init__(self, model: Model, output: Output = "standardised") -> None:
        self.name = str(model.folder or "model")
        self._model = model
        self._output: Output = output
        self._computing = asyncio.Lock()

    @property
    def digest(self) -> str:
        """The model's; it reads every weight where it was not asked for before."""
        return self._model.digest

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order; None for a text that the model cannot read."""
        async with self._computing:
            results = await asyncio.to_thread(self._model.score_each, texts)
        return [
            None if isinstance(one, HalteresError) else calibrated(self._model, one, self._output) for one in results
        ]

    async def close(self) -> None:
        """Nothing to let go of."""


def output_of(model: Model, wanted: Output) -> Output:
    """The units in which a model's scores come where these are wanted: raw ones of a model without calibration.

    Raises:
        InvalidConfig: a probability is wanted of such a model.
    """
    if model.calibration is None and wanted == "probability":
        raise InvalidConfig(
            f"The reward model {model.folder} gives no probabilities.",
            "It has no calibration.",
            "halteres reward calibrate makes one from held-out pairs.",
        )
    return wanted if model.calibration else "raw"


def calibrated(model: Model, score: Score, output: Output) -> Score:
    """A raw score in other units, as `output_of` says, and whether the calibration knows scores like it."""
    units = output_of(model, output)
    if model.calibration is None:
        return score
    value = score.value if units == "raw" else float(model.calibration.apply(score.value, output))
    return replace(score, value=value, out_of_range=not model.calibration.covers(score.value))


def places_of(where: str) -> list[str]:
    """The folders and addresses that a name stands for: several joined by commas are an ensemble."""
    return [place.strip() for place in where.split(",") if place.strip()]


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
) -> Scorer:
    """The scorer at a folder, an address, or several of them joined by commas: an ensemble.

    Args:
        where: as above.
        output: in which units scores come.
        combination: of an ensemble's scores.
        waits_for_start: whether a server that is not there yet is waited for.

    Raises:
        NotFound, InvalidData: a folder holds no reward model.
        InvalidConfig: no address of a server.
    """
    places = places_of(where)
    if len(places) > 1:
        from halteres.rewards.ensembles import Ensemble

        members = [open_scorer(place, output=output, waits_for_start=waits_for_start) for place in places]
        return Ensemble(members, combination)
    if is_address(where):
        from halteres.clients.rewards import RewardClient

        return RewardClient(where, output=output, waits_for_start=waits_for_start)
    from halteres.rewards.torch.model import RewardModel

    return LocalScorer(RewardModel.load(where), output)
