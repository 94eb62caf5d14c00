"""How a batch becomes optimiser steps: the learning rate, epochs and minibatches, as functions of the settings and the
step alone, so that a resumed run goes on as it would have."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from halteres.config.settings import TrainerSettings
from halteres.training.datums import Example


def learning_rate(config: TrainerSettings, step: int) -> float:
    """The learning rate of a step, counted from 1: warm-up in a straight line, then constant or down to 0.

    >>> [round(learning_rate(TrainerSettings(learning_rate=1, total_steps=4, schedule="linear"), s), 2) for s in (1, 4)]
    [1.0, 0.25]
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    steps = max(1, config.total_steps - config.warmup_steps)
    past = (step - config.warmup_steps - 1) / steps  # 0 at the first step after the warm-up
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1.0 - past)
        case "cosine":
            return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * past))


def minibatches(
    examples: Sequence[Example], config: TrainerSettings, seed: int, step: int
) -> Iterator[Sequence[Example]]:
    """What each optimiser step of a batch is taken on; shuffled by (seed, step, epoch) where there are several."""
    if not examples:
        return
    if config.updates_per_batch == 1:
        yield examples
        return
    for epoch in range(config.epochs):
        order = list(range(len(examples)))
        random.Random(f"{seed}/{step}/{epoch}").shuffle(order)  # noqa: S311 - an order, no secret
        num = min(config.minibatches, len(order))
        bounds = [len(order) * part // num for part in range(num + 1)]
        for start, stop in pairwise(bounds):
            yield [examples[i] for i in order[start:stop]]
