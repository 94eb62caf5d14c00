"""Ensembles: several scorers as one, which trusts a text less the more its members disagree.

Conservative ways (`min`, `mean_minus_std`) nearly remove over-optimisation in best-of-N (Coste et al., ICLR 2024); what
all members get wrong alike they do not see (arXiv 2312.09244).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from halteres.errors import InvalidConfig
from halteres.rewards.scorer import Combination, Scorer
from halteres.scores import Scorable, Score


class Ensemble:
    """A `Scorer` of several, which score side by side.

    A text that a member could not score has no score: the mean of the rest would be of another ensemble. Of parts that
    all members tell, it tells the mean.

    Args:
        members: two or more, in standardised units, or the one with the widest scores decides.
        combination: `min` is the worst case; `mean_minus_std` takes `k` standard deviations (ddof=0) off the mean.
        k: of `mean_minus_std`.
    """

    def __init__(self, members: Sequence[Scorer], combination: Combination = "mean", k: float = 1.0) -> None:
        if len(members) < 2:
            raise InvalidConfig("An ensemble needs two members or more.", f"It has {len(members)}.")
        self.name = f"{combination}({', '.join(member.name for member in members)})"
        self._members, self._k = members, k
        self._combination: Combination = combination

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order, with the members' disagreement; None where a member has none.

        Raises:
            HalteresError: a member can score nothing at all.
        """
        by_member = await asyncio.gather(*(member.score(texts) for member in self._members))
        return [self._combined(scores) for scores in zip(*by_member, strict=True)]

    async def close(self) -> None:
        """Close the members."""
        for member in self._members:
            await member.close()

    def _combined(self, scores: Sequence[Score | None]) -> Score | None:
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            return None
        values_M = np.array([score.value for score in known])
        spread = float(values_M.std())
        value = float(values_M.min() if self._combination == "min" else values_M.mean())
        out_of_range = [score.out_of_range for score in known if score.out_of_range is not None]
        return Score(
            value=value - self._k * spread if self._combination == "mean_minus_std" else value,
            num_tokens=max(score.num_tokens for score in known),
            truncated=any(score.truncated for score in known),
            ended_with_eos=all(score.ended_with_eos for score in known),
            out_of_range=any(out_of_range) if out_of_range else None,
            disagreement=spread,
            parts={
                name: math.fsum(score.parts[name] for score in known) / len(known)
                for name in known[0].parts
                if all(name in score.parts for score in known)
            },
        )
