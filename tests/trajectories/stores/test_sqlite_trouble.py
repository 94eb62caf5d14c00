"""A store in trouble: full disks, torn tails, lost power, damage, a second server. Told, and
nothing lost.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from halteres.errors import Conflict
from halteres.trajectories.records import (
    Delivery,
    Place,
    RunRecord,
)
from halteres.trajectories.stores import store as tables
from halteres.trajectories.stores.sqlite import RESERVE_BYTES, SqliteStore
from halteres.trajectories.stores.store import StoreFailed
from trajectories.postgres.samples import arrived, batch, delivered, group, keyed

from .conftest import OpenStore

MEBIBYTE = 1024**2


def tokens(file: Path) -> Path:
    return file.with_name(f"{file.name}.tokens")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_grow_takes_nothing_and_goes_on_later(open_store: OpenStore) -> None:
    """Refused by the kernel, in the middle of the tokens: the turn is not remembered, what came
    before is.
    """
    store = open_store()
    store.commit([arrived(1, b"a" * MEBIBYTE), keyed(2, "k")])
    with (
        largest_file(3 * MEBIBYTE // 2),
        pytest.raises(
            StoreFailed, match=r"It was not stored\. .*File too large\. Make room on the disk;"
        ),
    ):
        store.commit([arrived(3, b"b" * MEBIBYTE)])
    assert [each.id for each in store.load().waiting] == [1, 2]
    store.commit([arrived(3, b"c" * MEBIBYTE)])
    for reader in (store, open_store()):
        assert list(reader.bodies([1, 2, 3]).values()) == [b"a" * MEBIBYTE, b"2", b"c" * MEBIBYTE]


def test_a_full_database_takes_nothing_and_the_place_of_the_tokens_is_used_again(
    open_store: OpenStore, file: Path
) -> None:
    """The tokens were written, their rows were not: nobody vouches for them."""
    store = open_store()
    store.commit([arrived(1, b"kept")])
    pages = store._driver.execute("PRAGMA page_count").fetchone()[0]
    store._driver.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFailed, match=r"database or disk is full\. Make room on the disk"):
        store.commit([arrived(number, b"not kept", why="x" * 4000) for number in range(2, 20)])
    store._driver.execute("PRAGMA max_page_count = 1000000")
    store.commit([arrived(2, b"kept as well")])
    for reader in (store, open_store()):
        assert [each.id for each in reader.load().waiting] == [1, 2]
        assert list(reader.bodies([1, 2]).values()) == [b"kept", b"kept as well"]
    assert [path.stat().st_size for path in tokens(file).iterdir()] == [
        len(b"kept" + b"kept as well")
    ]


def test_a_database_whose_log_cannot_grow_is_drained_in_the_room_that_the_log_has(
    open_store: OpenStore,
) -> None:
    """As on a full disk, where this process alone is refused more."""
    store = open_store()
    store.commit([arrived(number) for number in range(1, 101)])
    with largest_file(store.file.with_name(f"{store.file.name}-wal").stat().st_size):
        for step in range(1, 101):
            store.commit(delivered(step, step, step=step))
    for reader in (store, open_store()):
        assert reader.load().waiting == ()
        assert reader.load().run.step == 100


def test_groups_are_stored_only_beside_room_that_is_kept_for_a_full_disk(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = store.file.with_name(f"{store.file.name}.reserve")
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * RESERVE_BYTES - 1)
        )
        with pytest.raises(
            StoreFailed,
            match=r"It was not stored\. .*No space left on device\. Make room on the disk;",
        ):
            store.commit([arrived(1)])
        assert store.is_full
        store.commit([batch(1)])
    assert not reserve.exists()
    store.commit([arrived(1)])
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    assert not store.is_full
    store.close()
    assert reserve.stat().st_size == MEBIBYTE  # to start with, where the disk is full by then


def test_a_turn_is_remembered_whole_or_not_at_all(store: SqliteStore) -> None:
    store.commit([arrived(1), batch(1, 1)])
    with pytest.raises(StoreFailed, match="UNIQUE constraint failed"):
        store.commit([*delivered(1, 1, step=1), arrived(2), arrived(1)])
    loaded = store.load()
    assert [(each.id, each.place) for each in loaded.waiting] == [(1, Place.OUT)]
    assert (loaded.run.step, loaded.settled) == (0, ())
    store.commit([arrived(2), *delivered(1, 1, step=1)])
    assert store.load().run.step == 1


def test_a_kill_between_the_tokens_and_their_rows_leaves_no_trace(
    open_store: OpenStore, file: Path
) -> None:
    store = open_store()
    store.commit([arrived(1, b"vouched for")])
    store._segments.append([b"written by a server that was killed before it could commit"])
    store = open_store()
    assert [path.stat().st_size for path in tokens(file).iterdir()] == [len(b"vouched for")]
    store.commit([arrived(2, b"next")])
    assert list(open_store().bodies([1, 2]).values()) == [b"vouched for", b"next"]


def test_with_power_the_tokens_are_on_the_disk_before_their_rows_are_committed(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(durability="power")
    happened: list[str] = []
    write, sync, sync_folder = os.pwrite, os.fdatasync, os.fsync

    def written(file: int, text: memoryview, at: int) -> int:
        happened.append("tokens")
        return write(file, text, at)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "fdatasync", lambda file: happened.append("on disk") or sync(file))
    monkeypatch.setattr(
        os, "fsync", lambda file: happened.append("named on disk") or sync_folder(file)
    )
    driver = store._driver
    driver.set_trace_callback(
        lambda statement: happened.append(statement) if statement == "COMMIT" else None
    )
    store.commit([arrived(1)])
    store.commit([arrived(2), arrived(3)])
    store.commit([batch(1, 1)])
    assert happened == [
        "tokens",
        "on disk",
        "named on disk",
        "COMMIT",
        *["tokens"] * 2,
        "on disk",
        "COMMIT",
        "COMMIT",
    ]
    # FULL: a commit ends when the log is on disk
    assert driver.execute("PRAGMA synchronous").fetchone() == (2,)


def test_without_it_nothing_waits_for_the_disk(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segment_bytes=1)
    monkeypatch.setattr(os, "fdatasync", lambda file: pytest.fail("it waited"))
    store.commit([arrived(1)])
    store.commit([arrived(2)])
    assert store._driver.execute("PRAGMA synchronous").fetchone() == (1,)  # NORMAL


def test_tokens_that_the_disk_did_not_take_are_not_vouched_for(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(durability="power")

    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(StoreFailed, match="Input/output error"):
            store.commit([arrived(1, b"lost")])
    assert store.load().waiting == ()
    store.commit([arrived(1, b"kept")])
    assert list(open_store().bodies([1]).values()) == [b"kept"]


@pytest.mark.parametrize("damage", ["gone", "short", "flipped"])
def test_damaged_tokens_are_told_and_the_others_are_found(
    open_store: OpenStore, file: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(segment_bytes=5)
    store.commit([arrived(1, b"whole"), arrived(2, b"damaged")])
    store.commit([arrived(3, b"elsewhere")])
    path = tokens(file) / "00000001.seg"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            path.read_bytes()[:9] if damage == "short" else path.read_bytes()[:-1] + b"D"
        )
    for reader in (store, open_store()):
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert reader.bodies([2, 3]) == {3: b"elsewhere"}
        assert caplog.messages == [
            f"Tokens of 1 groups of {file} are damaged; the first is group 2."
        ]
        assert [each.id for each in reader.load().waiting] == [1, 2, 3]


def test_a_damaged_database_is_told_in_a_sentence(open_store: OpenStore, file: Path) -> None:
    store = open_store()
    store.commit([arrived(number, why="x" * 3000) for number in range(1, 50)])
    store.close()
    whole = file.read_bytes()
    file.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    with pytest.raises(
        StoreFailed, match=r"queue\.sqlite cannot be (opened|read)\. .*malformed"
    ) as told:
        open_store().load()
    assert "\n" not in told.value.sentence


def test_a_record_that_cannot_be_read_is_told_in_a_sentence(store: SqliteStore) -> None:
    store.commit([arrived(1), batch(1, 1)])
    store._driver.execute("UPDATE deliveries SET group_ids = '[1,'")
    with pytest.raises(StoreFailed, match=r"queue\.sqlite raised DecodeError"):
        store.load()


@pytest.mark.parametrize("version", [1, tables.SCHEMA_VERSION + 1])
def test_a_database_of_another_version_is_refused_and_left_alone(file: Path, version: int) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("CREATE TABLE groups (id INTEGER)")
    connection.close()
    before = file.read_bytes()
    for _ in range(2):  # the refusal lets go of the lock
        with pytest.raises(
            Conflict,
            match=rf"has version {version}\. This server reads version 3\. Name another file",
        ):
            SqliteStore(file)
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("groups",)]
    connection.close()
    assert len(file.read_bytes()) == len(before)


def test_what_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(
        "this is no database, but a text long enough to have a header" * 20
    )
    with pytest.raises(StoreFailed, match="cannot be opened"):
        SqliteStore(tmp_path / "text" / "queue.sqlite")
    with pytest.raises(StoreFailed, match=r"text cannot be opened\. file is not a database\."):
        SqliteStore(tmp_path / "text")


def test_a_folder_of_tokens_that_cannot_be_made_is_told(file: Path) -> None:
    tokens(file).write_text("in the way")
    for _ in range(2):
        with pytest.raises(
            StoreFailed, match=r"cannot be opened\. .*queue\.sqlite\.tokens: File exists\."
        ):
            SqliteStore(file)


def test_one_file_has_one_server_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "queue.sqlite"
    first = SqliteStore(file)
    first.commit([arrived(1, b"tokens")])
    with pytest.raises(Conflict, match=r"is in use\. Another trajectory server holds it\."):
        SqliteStore(file)
    assert list(first.bodies([1]).values()) == [b"tokens"]
    first.close()
    SqliteStore(file).close()


def test_readers_are_served_while_turns_are_committed_and_files_go(open_store: OpenStore) -> None:
    """What waits is read whole by any thread, whatever the writing thread does meanwhile."""
    store = open_store(segment_bytes=4000, keep_bytes=10_000)
    store.commit([arrived(1, b"1" * 3000)])
    ended, begun = threading.Event(), threading.Barrier(4)

    def read() -> int:
        num_read = 0
        begun.wait(20)
        while not ended.is_set() or num_read == 0:
            assert list(store.bodies([1]).values()) == [b"1" * 3000]
            assert 1 in {each.id for each in store.load().waiting}
            num_read += 1
        return num_read

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        begun.wait(20)
        try:
            for number in range(2, 100):
                store.commit([arrived(number, b"%d" % number * 1000)])
                store.commit([group(number, place=Place.ARCHIVED)])
        finally:
            ended.set()
        assert all(reader.result(20) for reader in readers)
    assert store._segments.num_bytes < 20_000


def test_the_same_turn_can_be_committed_after_it_failed(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = [arrived(1, b"tokens"), *delivered(1, 1, step=1)]
    assert isinstance(turn[1], Delivery) and isinstance(turn[2], RunRecord)
    with monkeypatch.context() as patch:
        patch.setattr(store._segments, "append", _fails)
        with pytest.raises(StoreFailed, match="No space left on device"):
            store.commit(turn)
    store.commit(turn)
    assert (store.load().run.step, list(store.bodies([1]).values())) == (1, [b"tokens"])


def _fails(texts: Sequence[bytes]) -> None:
    raise OSError(28, os.strerror(28))


def test_a_server_under_another_name_of_the_file_is_refused(tmp_path: Path) -> None:
    """Both would give the same ids, and keep tokens in different folders."""
    real, soft, hard = (tmp_path / name for name in ("real.sqlite", "soft.sqlite", "hard.sqlite"))
    store = SqliteStore(real)
    soft.symlink_to(real)
    with pytest.raises(Conflict, match="in use"):
        SqliteStore(soft)
    hard.hardlink_to(real)
    with pytest.raises(Conflict, match="hard link"):
        SqliteStore(hard)
    store.close()
    hard.unlink()
    store = SqliteStore(soft)
    assert store.file == real
    store.close()
    assert sorted(
        path.name for path in tmp_path.iterdir() if path.name.endswith((".lock", ".tokens"))
    ) == [
        "real.sqlite.lock",
        "real.sqlite.tokens",
    ]


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    with pytest.raises(Conflict, match="another program's"):
        SqliteStore(file)
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("notes",)]
    connection.close()


def test_a_database_that_is_refused_gets_no_lock_beside_it(tmp_path: Path) -> None:
    (file := tmp_path / "notes.sqlite").write_bytes(
        b"no database, and longer than its head would be" * 40
    )
    with pytest.raises(StoreFailed):
        SqliteStore(file)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.sqlite"]


def test_a_database_without_its_tokens_is_warned_of_when_it_is_opened(
    open_store: OpenStore, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a copy of the database alone."""
    open_store().commit([arrived(1, b"tokens")])
    open_store()
    assert caplog.text == ""
    shutil.rmtree(tokens(file))
    open_store()
    assert str(tokens(file)) in caplog.text and "1 of 1" in caplog.text
