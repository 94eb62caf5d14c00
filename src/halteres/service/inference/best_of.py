"""The best of several: which of a prompt's sequences a request is answered with.

Owns: the order of sequences, by a reward model that the operator named, else by mean log-probability per token.
Never: asks an address that a request brings, tells a client where a reward model is served.
Source: OpenAI's API reference for `best_of`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from halteres.clients import rewards
from halteres.errors import HalteresError, InvalidData, NotReady, unknown
from halteres.scores import Scorable, best_first
from halteres.service.inference.written import Written

SCORED_WITHIN_S = 120.0

log = logging.getLogger(__name__)


class BestOf:
    """The choice, by reward models that are served elsewhere: name -> address."""

    def __init__(self, reward_models: Mapping[str, str]) -> None:
        self._addresses = reward_models

    def check(self, reward_model: str | None) -> None:
        """See that there is such a reward model, before anything is sampled.

        Raises:
            InvalidData: there is none of this name; the message names those that there are.
        """
        if reward_model is None or reward_model in self._addresses:
            return
        if not self._addresses:
            raise InvalidData(
                "This service has no reward models.",
                "It is started with them: halteres serve --reward-model NAME=URL.",
                "Leave `reward_model` out: `best_of` then goes by log-probability.",
                param="reward_model",
            )
        raise unknown(InvalidData, "reward model", reward_model, self._addresses)

    async def chosen(
        self, written: Sequence[Written], count: int, reward_model: str | None, text_of: Callable[[Written], Scorable]
    ) -> list[Written]:
        """So many sequences of each prompt, the best first; one that could not be scored comes behind all that could.

        Raises:
            NotReady: the reward model could not be asked, or scored no sequence at all.
        """
        if reward_model is None:
            values = [_mean_logprob(one) for one in written]
        else:
            values = await self._scores(reward_model, [text_of(one) for one in written])
        of_prompt: dict[int, list[int]] = {}
        for at, one in enumerate(written):
            of_prompt.setdefault(one.place - one.sample, []).append(at)
        return [
            replace(written[places[rank]], place=number * count + place, sample=place)
            for number, places in enumerate(of_prompt.values())
            for place, rank in enumerate(best_first([values[at] for at in places])[:count])
        ]

    async def _scores(self, name: str, texts: Sequence[Scorable]) -> list[float | None]:
        try:
            scores = await rewards.score(self._addresses[name], texts, timeout_s=SCORED_WITHIN_S)
        except HalteresError as error:  # it may name the operator's address: that is for the log
            log.warning("The reward model '%s' could not be asked: %s", name, error.sentence)
            raise NotReady(
                f"The reward model '{name}' could not be asked.", next="Try again, or leave `reward_model` out."
            ) from error
        if not any(scores):
            raise NotReady(f"The reward model '{name}' could not score one of {len(texts)} answers.")
        return [None if score is None else score.value for score in scores]


def _mean_logprob(one: Written) -> float | None:
    """Per token; None of a sequence without tokens."""
    return math.fsum(one.logprobs) / len(one.logprobs) if one.logprobs else None
