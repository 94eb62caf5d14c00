"""What scores texts: a reward model here or at an address, an ensemble of them, a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from halteres.errors import HalteresError, InvalidConfig, InvalidData
from halteres.text import Message

Output = Literal["raw", "standardised", "probability"]
"""Units of a score: of the head; centred and scaled, or between 0 and 1, by the model's calibration (raw without)."""


Device = Literal["auto", "cpu", "cuda"]
"""Where a model computes; `auto`: a GPU where there is one."""

Combination = Literal["mean", "min", "mean_minus_std"]
"""What an ensemble makes of its members' scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """A completion and its prompt, both strings or both messages; without a prompt, the completion holds everything."""

    completion: str | Sequence[Message]
    prompt: str | Sequence[Message] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # functions in OpenAI's form, for the chat template
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a scorer gives a text."""

    value: float  # in the scorer's own units; larger is better
    num_tokens: int = 0  # that the scorer read; 0: it does not tell
    truncated: bool = False  # the text was longer than the scorer reads
    ended_with_eos: bool = True  # the scorer read an end token last
    disagreement: float | None = None  # standard deviation of an ensemble's members; None: not an ensemble's
    out_of_range: bool | None = None  # beyond every score that the calibration was made from; None: there is none
    converted: bool = False  # the text came in another form than the scorer reads, and was put into its own
    parts: Mapping[str, float] = field(default_factory=dict)  # raw, of each objective; `value` is their weighted sum


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


def is_address(place: str) -> bool:
    """Whether it is a server's address; what is none is a folder."""
    return place.startswith(("http://", "https://"))


async def score_once(scorer: Scorer, texts: Sequence[Scorable]) -> list[Score | None]:
    """Score, and close the scorer."""
    try:
        return await scorer.score(texts)
    finally:
        await scorer.close()


def best_first(values: Sequence[float | None]) -> list[int]:
    """Places of the values, the best first; of equal ones, the earlier; what has no score, last."""
    return sorted(range(len(values)), key=lambda place: (values[place] is None, -(values[place] or 0.0)))


def open_scorer(where: str, *, output: Output = "standardised", combination: Combination = "mean") -> Scorer:
    """The scorer at a folder, an address, or several of them joined by commas: an ensemble.

    Raises:
        NotFound, InvalidData: a folder holds no reward model.
        InvalidConfig: no address of a server.
    """
    places = places_of(where)
    if len(places) > 1:
        from halteres.rewards.ensembles import Ensemble

        return Ensemble(tuple(open_scorer(place, output=output) for place in places), combination)
    if is_address(where):
        from halteres.clients.rewards import RewardClient

        return RewardClient(where, output=output)
    from halteres.rewards.torch.model import RewardModel

    return LocalScorer(RewardModel.load(where), output)
