"""Several scorers as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from halteres.errors import InvalidConfig
from halteres.rewards.scorer import Ensemble, open_scorer, score_once
from halteres.scores import Combination, Scorable, Score, best_first
from rewards.scorers import Scripted

MEMBERS = (Scripted(lambda _: 1.0, "a"), Scripted(lambda _: 4.0, "b"), Scripted(lambda _: 1.0, "c"))
STD = math.sqrt(2.0)  # of 1, 4, 1 around 2


@pytest.mark.parametrize(
    ("combination", "value"), [("mean", 2.0), ("min", 1.0), ("mean_minus_std", 2.0 - 0.5 * STD)]
)
async def test_members_are_combined_and_their_disagreement_is_told(
    combination: Combination, value: float
) -> None:
    (score,) = await Ensemble(MEMBERS, combination, k=0.5).score([Scorable(completion="text")])
    assert score is not None
    assert (score.value, score.disagreement) == (pytest.approx(value), pytest.approx(STD))


async def test_parts_that_all_members_tell_are_told_as_their_mean() -> None:
    class Parted(Scripted):
        async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
            return [
                Score(value=0.0, parts={"safe": float(len(self.name)), self.name: 1.0})
                for _ in texts
            ]

    (score,) = await Ensemble((Parted(len, "a"), Parted(len, "bcd"))).score(
        [Scorable(completion="text")]
    )
    assert score is not None and score.parts == {"safe": 2.0}


async def test_what_a_member_cannot_score_has_no_score() -> None:
    short = Scripted(lambda text: 0.0 if len(text) < 3 else None)
    scores = await Ensemble((MEMBERS[0], short)).score(
        [Scorable(completion="ab"), Scorable(completion="abc")]
    )
    assert [score is None for score in scores] == [False, True]


async def test_members_of_different_units_are_no_ensemble() -> None:
    """A calibrated member standardises, another gives raw scores: their mean would be neither."""
    calibrated, plain = Scripted(lambda _: 1.0, "calibrated"), Scripted(lambda _: 4.0, "plain")
    calibrated.units, plain.units = "standardised", "raw"
    with pytest.raises(
        InvalidConfig, match=r"calibrated: standardised, plain: raw\. Not every one is calibrated"
    ):
        await Ensemble([calibrated, plain]).score([Scorable(completion="text")])


def test_one_scorer_is_no_ensemble() -> None:
    with pytest.raises(InvalidConfig):
        Ensemble(MEMBERS[:1])
    assert Ensemble(MEMBERS[:2], "min").name == "min(a, b)"


async def test_an_ensemble_is_named_by_commas_and_closes_its_members() -> None:
    scorer = open_scorer("http://127.0.0.1:1, http://127.0.0.1:2,", combination="min")
    assert isinstance(scorer, Ensemble)
    assert scorer.name == "min(http://127.0.0.1:1, http://127.0.0.1:2)"
    closed = list[str]()

    class Closing(Scripted):
        async def close(self) -> None:
            closed.append(self.name)

    await score_once(Ensemble([Closing(len, "a"), Closing(len, "b")]), [Scorable(completion="a")])
    assert closed == ["a", "b"]


def test_the_best_is_first_of_equal_ones_the_earlier_and_what_has_no_score_last() -> None:
    assert best_first([0.0, None, 2.0, -1.0, 2.0]) == [2, 4, 0, 3, 1]
