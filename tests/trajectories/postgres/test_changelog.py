"""The log of turns: every kind of change comes back as it went in, but for tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest

from halteres.trajectories.records import (
    Change,
    GroupArrived,
    Place,
    RunRecord,
)
from halteres.trajectories.stores import postgres

from .samples import ADOPTED, CHANGES, arrived


def test_there_is_a_sample_of_every_kind_of_change() -> None:
    assert (
        {type(change) for change in CHANGES}
        == set(get_args(Change))
        == set(postgres.KINDS.values())
    )


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_a_change_comes_back_as_it_was(change: Change) -> None:
    (read,) = postgres.decoded(postgres.encoded([change]))
    assert read == (replace(change, body=b"") if isinstance(change, GroupArrived) else change)


def test_several_come_back_in_order() -> None:
    changes = [*CHANGES, ADOPTED, RunRecord()]
    read = postgres.decoded(postgres.encoded(changes))
    assert [type(change) for change in read] == [type(change) for change in changes]
    assert read[-2:] == changes[-2:]


def test_an_entry_has_the_form_that_servers_of_earlier_versions_read_and_write() -> None:
    """Servers of one queue are upgraded one after another."""
    entries = dict(msgspec.msgpack.decode(postgres.encoded(CHANGES)))
    assert set(entries) == set(postgres.KINDS)
    assert entries["run"].keys() == {"run"} and entries["env"].keys() == {"env"}
    assert entries["moved"].keys() == {"group"} and entries["delivery"].keys() == {"delivery"}
    assert entries["arrived"].keys() == {"group", "body"}


def test_tokens_never_enter_the_log() -> None:
    assert len(postgres.encoded([arrived(1, body=b"x" * 100_000)])) < 500


def test_a_kind_that_this_version_does_not_know_is_no_change() -> None:
    with pytest.raises(KeyError):
        postgres.decoded(msgspec.msgpack.encode([("teleported", {"group": 1})]))


def test_a_value_that_this_version_does_not_know_is_no_change() -> None:
    moved = postgres.encoded([arrived(1, place=Place.OUT)]).replace(b"\xa3out", b"\xa3orb")
    with pytest.raises(msgspec.ValidationError):
        postgres.decoded(moved)
