"""The best of several sampled sequences: by a reward model that is served elsewhere, or by
log-probability.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from halteres.clients import rewards
from halteres.errors import HalteresError, InvalidData, NotReady, unknown
from halteres.scores import Scorable, best_first
from halteres.service.inference.outputs import Output

SCORED_WITHIN_S = 120.0

log = logging.getLogger(__name__)


class BestOf:
    """The choice, by reward models that are served elsewhere: name -> address."""

    def __init__(self, reward_models: Mapping[str, str]) -> None:
        self._addresses = reward_models

    def check(self, reward_model: str | None) -> None:
        """See that there is such a reward model, before anything is sampled."""
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
        self,
        outputs: list[Output],
        count: int,
        reward_model: str | None,
        text_of: Callable[[Output], Scorable],
    ) -> list[Output]:
        """So many sequences of each prompt, the best first, by a reward model's score or else the
        mean log-probability of a token; one that could not be scored comes behind all that could.
        NotReady where none could.
        """
        values: list[float | None] = [
            math.fsum(logprob or 0.0 for _, logprob, _ in one.positions) / len(one.tokens)
            if one.tokens
            else None
            for one in outputs
        ]
        if reward_model is not None:
            texts = [text_of(one) for one in outputs]
            try:
                scores = await rewards.score(
                    self._addresses[reward_model], texts, timeout_s=SCORED_WITHIN_S
                )
            except HalteresError as error:
                # it may name the operator's address: that is for the log
                log.warning(
                    "The reward model '%s' could not be asked: %s", reward_model, error.sentence
                )
                what = f"The reward model '{reward_model}' could not be asked."
                raise NotReady(what, next="Try again, or leave `reward_model` out.") from error
            if not any(scores):
                raise NotReady(
                    f"The reward model '{reward_model}' could not score one of {len(texts)} "
                    "answers."
                )
            values = [None if score is None else score.value for score in scores]
        of_prompt: dict[int, list[int]] = {}
        for at, one in enumerate(outputs):
            of_prompt.setdefault(one.place - one.sample, []).append(at)
        return [
            replace(outputs[places[rank]], place=number * count + place, sample=place)
            for number, places in enumerate(of_prompt.values())
            for place, rank in enumerate(best_first([values[at] for at in places])[:count])
        ]
