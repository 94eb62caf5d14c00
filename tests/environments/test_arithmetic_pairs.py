"""The generated preference set: seeded, in three kinds, with held-out problems of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import halteres.rewards
from halteres.environments.arithmetic_pairs import KINDS, preference_pairs
from halteres.environments.problems import extract_boxed
from halteres.rewards.preferences import overlap, read_preferences

DATA = Path(halteres.rewards.__file__).parent / "data"


def text(row: dict[str, Any], side: str) -> str:
    return row[side][0]["content"]


@pytest.mark.parametrize(
    ("split", "name", "count"), [("train", "train", 600), ("eval", "held_out", 300)]
)
def test_the_shipped_set_is_what_the_generator_makes_of_seed_0(
    split: Any, name: str, count: int
) -> None:
    lines = (DATA / f"arithmetic_pairs_{name}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(preference_pairs(count, split=split))


def test_the_shipped_halves_are_clean_and_share_no_prompt() -> None:
    train, held_out = (
        read_preferences(f"halteres/arithmetic-pairs{split}") for split in ("", ":held_out")
    )
    assert (len(train.comparisons), len(held_out.comparisons)) == (600, 300)
    assert train.warnings == held_out.warnings == () and overlap(train, held_out) == ""
    assert {one.kind for one in held_out.comparisons} == set(KINDS)


def test_each_kind_differs_in_what_it_is_named_for() -> None:
    for row in preference_pairs(300, seed=5):
        chosen, rejected = (extract_boxed(text(row, side)) for side in ("chosen", "rejected"))
        match row["kind"]:
            case "correct":
                assert chosen != rejected and rejected is not None
                assert len(text(row, "chosen").split()) == len(text(row, "rejected").split())
            case "polite":
                assert chosen == rejected is not None
            case _:
                assert chosen is not None and rejected is None


def test_another_seed_is_another_set() -> None:
    one, same, other = (list(preference_pairs(30, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
