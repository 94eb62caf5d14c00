"""Tokens that nobody will ask for again: kept while there is room, the oldest go first, what is
wanted never goes.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halteres.trajectories.records import (
    Change,
    Place,
    RunRecord,
    Standing,
)
from halteres.trajectories.stores import store as tables
from halteres.trajectories.stores.segments import Segments
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import StoreFailed
from trajectories.postgres.samples import arrived, batch, delivered, group

from .conftest import OpenStore

FILE = {"segment_bytes": 1}
"""Every turn begins a file of its own."""


def body(number: int) -> bytes:
    return b"%3d" % number * 10


def fill(store: SqliteStore, *numbers: int, place: Place = Place.QUEUED) -> None:
    """Groups of 30 bytes, each in a file of its own."""
    for number in numbers:
        store.commit([arrived(number, body(number), place=place)])


def kept(store: SqliteStore, numbers: Iterable[int] = range(1, 20)) -> list[int]:
    """Those of the groups whose tokens can be read, checked."""
    found = store.bodies(list(numbers))
    assert found == {number: body(number) for number in found}
    return sorted(found)


def test_within_its_bounds_everything_is_kept(open_store: OpenStore) -> None:
    store = open_store(**FILE)
    fill(store, 1, 2, 3, 4)
    fill(store, 5, place=Place.SET_ASIDE)
    store.commit([batch(1, 1), *delivered(1, 1, step=1), *delivered(2, 2, step=2)])
    store.commit([group(3, place=Place.ARCHIVED)])
    assert kept(store) == kept(open_store(**FILE)) == [1, 2, 3, 4, 5]


def test_beyond_them_the_oldest_go_first_and_only_as_many_as_must(
    open_store: OpenStore, file: Path
) -> None:
    store = open_store(**FILE, keep_bytes=130)
    fill(store, 1, 2, 3, 4)
    store.commit([*delivered(1, 1, 2, step=1), *delivered(2, 3, step=2)])
    assert kept(store) == [1, 2, 3, 4]
    fill(store, 5)
    assert kept(store) == [2, 3, 4, 5]
    fill(store, 6)
    assert kept(store) == kept(open_store(**FILE, keep_bytes=130)) == [3, 4, 5, 6]
    assert len(list(file.with_name(f"{file.name}.tokens").iterdir())) == 4


@pytest.mark.parametrize("place", [Place.QUEUED, Place.BUFFERED])
def test_what_waits_stays_whatever_the_bounds(open_store: OpenStore, place: Place) -> None:
    store = open_store(**FILE, keep_bytes=0)
    fill(store, 1, place=place)
    fill(store, *range(2, 8))
    store.commit([*delivered(1, 2, 3, step=1), *delivered(2, 4, step=2)])
    assert kept(store) == [1, 4, 5, 6, 7]


@pytest.mark.parametrize("standing", [Standing.OFFERED, Standing.LEASED, Standing.RETURNED])
def test_what_is_out_stays(open_store: OpenStore, standing: Standing) -> None:
    store = open_store(**FILE, keep_bytes=0)
    fill(store, *range(1, 7))
    store.commit([batch(1, 1, 2), batch(1, 1, 2, standing=standing)])
    store.commit([*delivered(2, 3, step=1), *delivered(3, 4, step=2)])
    fill(store, 7)
    assert kept(store) == [1, 2, 4, 5, 6, 7]


def test_the_batch_delivered_last_stays_until_the_next_is(open_store: OpenStore) -> None:
    """Also where an older batch is acknowledged after a younger one."""
    store = open_store(**FILE, keep_bytes=0)
    fill(store, *range(1, 5))
    store.commit([batch(1, 1), batch(2, 2)])
    store.commit(delivered(2, 2, step=1))
    assert kept(store) == [1, 2, 3, 4]
    store.commit(delivered(1, 1, step=2))
    assert kept(store) == [1, 3, 4]


@pytest.mark.parametrize("place", [Place.SET_ASIDE, Place.ARCHIVED])
def test_what_is_done_with_goes(open_store: OpenStore, place: Place) -> None:
    store = open_store(**FILE, keep_bytes=0)
    fill(store, 1, 2, 3)
    store.commit([group(1, place=place)])
    assert kept(store) == [2, 3]


def test_another_run_wants_nothing_of_the_one_before(open_store: OpenStore) -> None:
    store = open_store(**FILE, keep_bytes=0)
    fill(store, 1, 2)
    store.commit(delivered(1, 1, step=1))
    store.commit([group(2, place=Place.ARCHIVED), RunRecord(first_group=3)])
    fill(store, 3)
    assert kept(store) == [3]


def test_a_file_stays_as_long_as_one_of_its_groups_is_wanted(open_store: OpenStore) -> None:
    store = open_store(segment_bytes=100, keep_bytes=0)
    fill(store, *range(1, 9))  # 1 to 4 in one file, 5 to 8 in the next
    for number, another in ((1, 21), (4, 22), (2, 23)):
        store.commit([group(number, place=Place.ARCHIVED)])
        fill(store, another)
        assert kept(store, range(1, 9)) == list(range(1, 9))
    store.commit([group(3, place=Place.ARCHIVED)])
    assert kept(store, range(1, 9)) == [5, 6, 7, 8]


def test_a_file_that_cannot_be_removed_fails_no_turn_and_goes_at_the_next_start(
    open_store: OpenStore,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(**FILE, keep_bytes=0)
    fill(store, 1, 2)

    def refuse(self: Segments, number: int) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Segments, "unlink", refuse)
        store.commit([group(1, place=Place.ARCHIVED)])
    assert "Tokens that nobody wants stay" in caplog.text and "Permission denied" in caplog.text
    folder = file.with_name(f"{file.name}.tokens")
    assert len(list(folder.iterdir())) == 2
    store = open_store(**FILE, keep_bytes=0)
    assert [path.name for path in folder.iterdir()] == ["00000002.seg"]
    assert kept(store) == [2]


def refuse(store: SqliteStore, number: int, *, row: bool = False) -> None:
    """A group comes that the disk has no room for, or none for its row."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    refusing = mock.patch.object(tables, "write", side_effect=full) if row else None
    with (
        refusing or mock.patch.object(os, "pwrite", side_effect=full),
        pytest.raises(StoreFailed, match="No space"),
    ):
        store.commit([arrived(number, body(number))])


@pytest.mark.parametrize("row", [False, True])
def test_a_file_is_cut_at_its_own_end_where_the_one_behind_it_was_removed(
    open_store: OpenStore, *, row: bool
) -> None:
    """A group that was refused had begun a file: the one before counted as full, and went before an
    older one.
    """
    options = {"segment_bytes": 60, "keep_bytes": 0}
    store = open_store(**options)
    fill(store, 1)
    # 120 bytes are in the first file
    store.commit([arrived(2, body(2)), arrived(3, body(3)), arrived(4, body(4))])
    store.commit([arrived(5, body(5)), arrived(6, body(6))])  # and 60 in the second
    refuse(store, 7, row=row)
    store.commit([*delivered(1, 5, 6, step=1), *delivered(2, 1, step=2)])
    assert kept(store) == [1, 2, 3, 4]
    store = open_store(**options)
    assert kept(store) == [1, 2, 3, 4]
    fill(store, 7)
    assert kept(store) == kept(open_store(**options)) == [1, 2, 3, 4, 7]


@pytest.mark.parametrize("row", [False, True])
def test_what_is_in_a_file_whose_number_is_used_again_is_nobody_else_s(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, *, row: bool
) -> None:
    options = {"segment_bytes": 60, "keep_bytes": 0}
    store = open_store(**options)
    fill(store, 1, 2, 3, 4)  # two files, both full
    refuse(store, 5, row=row)
    # 2 waits, the second file goes
    store.commit([*delivered(1, 3, 4, step=1), *delivered(2, 1, step=2)])
    store = open_store(**options)
    caplog.clear()
    fill(store, 5, 6, 7)  # the second file, again
    assert kept(store) == [1, 2, 5, 6, 7]
    store.commit([*delivered(3, 2, step=3), *delivered(4, 5, step=4)])
    assert kept(store) == kept(open_store(**options)) == [5, 6, 7]
    assert caplog.text == "", "nothing is called damaged that was removed"


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "buffer", "aside", "lease", "deliver", "return", "refused", "restart"]
        ),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=60,
)


class Run:
    """Steps, and what must be readable after each."""

    def __init__(self) -> None:
        self.num_groups = self.num_batches = 0
        self.waiting: list[int] = []
        self.out: dict[int, list[int]] = {}
        self.last: list[int] = []

    @property
    def wanted(self) -> set[int]:
        return {
            *self.waiting,
            *self.last,
            *(number for groups in self.out.values() for number in groups),
        }

    def changes(self, what: str, which: int) -> list[Change]:
        if what in ("arrive", "buffer"):
            numbers = range(self.num_groups + 1, self.num_groups + which + 2)
            self.num_groups += which + 1
            self.waiting += numbers
            place = Place.BUFFERED if what == "buffer" else Place.QUEUED
            return [arrived(number, body(number), place=place) for number in numbers]
        if what == "aside" and self.waiting:
            number = self.waiting.pop(which % len(self.waiting))
            return [group(number, place=Place.SET_ASIDE, reason="stale", why="Too old.")]
        if what == "lease" and self.waiting:
            self.num_batches += 1
            taken, self.waiting = self.waiting[: which + 1], self.waiting[which + 1 :]
            self.out[self.num_batches] = taken
            return [batch(self.num_batches, *taken)]
        if what == "return" and self.out:
            number = list(self.out)[which % len(self.out)]
            return [batch(number, *self.out[number], standing=Standing.RETURNED)]
        if what == "deliver" and self.out:
            number = list(self.out)[which % len(self.out)]
            self.last = self.out.pop(number)
            return delivered(number, *self.last, step=self.num_batches)
        return []


@given(
    steps=STEPS,
    segment_bytes=st.sampled_from([1, 70, 200]),
    keep_bytes=st.sampled_from([0, 150, 600]),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_happens_what_is_wanted_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], segment_bytes: int, keep_bytes: int
) -> None:
    file = tmp_path_factory.mktemp("store") / "queue.sqlite"
    store, run = SqliteStore(file, keep_bytes=keep_bytes, segment_bytes=segment_bytes), Run()
    for what, which in steps:
        if what == "restart":
            store.close()
            store = SqliteStore(file, keep_bytes=keep_bytes, segment_bytes=segment_bytes)
        if what == "refused":
            refuse(store, run.num_groups + 1, row=which > 2)
        store.commit(run.changes(what, which))
        assert set(kept(store, sorted(run.wanted))) == run.wanted
    everything = set(kept(store, range(1, run.num_groups + 1)))
    assert everything >= run.wanted
    in_vain = 30 * len(everything - run.wanted)
    # one file, of one turn, may still be written
    assert segment_bytes > 1 or in_vain <= keep_bytes + 30 * 6
    store.close()
