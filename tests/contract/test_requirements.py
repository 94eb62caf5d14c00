"""The manifest is complete both ways: each requirement has a test, each named requirement
exists.
"""

from __future__ import annotations

import re

import pytest

from .proofs import proofs
from .requirements import BY_ID, CHAPTERS, REQUIREMENTS, proves

PROOFS = proofs()


def test_ids_are_unique_and_read_alike() -> None:
    assert len(BY_ID) == len(REQUIREMENTS)
    assert all(re.fullmatch(r"[a-z]+:[a-z0-9_-]+", requirement.id) for requirement in REQUIREMENTS)
    assert all(requirement.says and requirement.source for requirement in REQUIREMENTS)
    assert all(CHAPTERS.values())


def test_every_requirement_has_a_test() -> None:
    """A gap needs none: it says why it cannot be met."""
    unproved = sorted(
        requirement.id
        for requirement in REQUIREMENTS
        if not requirement.gap and requirement.id not in PROOFS
    )
    assert not unproved, f"no test proves: {', '.join(unproved)}"


def test_every_named_requirement_exists() -> None:
    unknown = {one: where for one, where in PROOFS.items() if one not in BY_ID}
    assert not unknown


def test_a_gap_is_not_proved() -> None:
    proved = {
        requirement.id: PROOFS[requirement.id]
        for requirement in REQUIREMENTS
        if requirement.gap and requirement.id in PROOFS
    }
    assert not proved, "a gap that a test proves is none"


def test_only_what_cannot_be_done_is_a_gap() -> None:
    gaps = {requirement.id for requirement in REQUIREMENTS if requirement.gap}
    assert gaps == {"loss:stable_reinforce-hosted", "optim:dimuon", "keys:whoami", "numbers:hosted"}


def test_an_unknown_id_is_told_where_it_is_written() -> None:
    with pytest.raises(KeyError, match="order:none"):
        proves("order:none")
