"""Segment files alone: what was appended is read back, what nobody vouches for is gone, damage is
told.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from halteres.trajectories.stores.segments import Extent, Segments

TEXTS = [b"one", b"", bytes(range(256)) * 300, b"four"]


def opened(folder: Path, extents: Sequence[Extent] = (), segment_bytes: int = 1000) -> Segments:
    """As a server opens it whose rows vouch for these extents."""
    newest = max((extent.segment for extent in extents), default=0)
    end = max((each.start + each.length for each in extents if each.segment == newest), default=0)
    return Segments(folder, {extent.segment for extent in extents}, end, segment_bytes)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def test_texts_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    held = opened(tmp_path / "new" / "tokens")
    extents = held.append(TEXTS)
    assert [(each.segment, each.start, each.length) for each in extents] == [
        (1, 0, 3),
        (1, 3, 0),
        (1, 3, 76_800),
        (1, 76_803, 4),
    ]
    assert held.read(extents[::-1]) == TEXTS[::-1]
    assert held.num_bytes == sum(map(len, TEXTS))
    assert held.append([]) == []
    held.close()


def test_a_full_file_is_followed_by_the_next(tmp_path: Path) -> None:
    held = opened(tmp_path, segment_bytes=10)
    extents = [extent for text in (b"a" * 9, b"b" * 9, b"c") for extent in held.append([text])]
    assert [extent.segment for extent in extents] == [1, 1, 2]
    assert sorted(held.sizes.keys() - {held.newest}) == [1]
    held.close()
    assert sizes(tmp_path) == {"00000001.seg": 18, "00000002.seg": 1}
    assert held.read(extents) == [b"a" * 9, b"b" * 9, b"c"]
    held.close()


def test_the_next_server_goes_on_where_this_one_ended(tmp_path: Path) -> None:
    held = opened(tmp_path)
    extents = held.append([b"before"])
    held.close()
    held = opened(tmp_path, extents)
    extents += held.append([b"after"])
    assert extents[1][:2] == (1, 6)
    assert held.read(extents) == [b"before", b"after"]
    held.close()


def test_a_torn_tail_is_cut_and_what_nobody_vouches_for_goes(tmp_path: Path) -> None:
    held = opened(tmp_path, segment_bytes=10)
    vouched = held.append([b"kept" * 3])
    vouched += held.append([b"too"])
    held.append([b"never committed"])
    held.close()
    (tmp_path / "00000003.seg").write_bytes(b"begun, and killed")
    (tmp_path / "notes.txt").write_bytes(b"somebody else's")
    held = opened(tmp_path, vouched)
    assert sizes(tmp_path) == {"00000001.seg": 12, "00000002.seg": 3, "notes.txt": 15}
    assert held.read(vouched) == [b"kept" * 3, b"too"]
    held.close()


def test_what_was_taken_back_is_overwritten(tmp_path: Path) -> None:
    held = opened(tmp_path)
    kept = held.append([b"kept"])
    held.take_back(held.append([b"a row that was not committed"]))
    held.take_back([])
    after = held.append([b"next"])
    assert after[0].start == 4
    assert held.read(kept + after) == [b"kept", b"next"]
    held.close()


def test_a_disk_that_takes_a_little_at_a_time_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    calls: list[int] = []

    def reluctant(file: int, text: memoryview, at: int) -> int:
        calls.append(len(text))
        return write(file, text[:7], at)

    monkeypatch.setattr(os, "pwrite", reluctant)
    held = opened(tmp_path)
    texts = [b"x" * length for length in (1, 2, 30, 0, 4, 7, 14)]
    assert held.read(held.append(texts)) == texts
    assert len(calls) >= 58 / 7
    held.close()


def test_a_read_that_comes_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = opened(tmp_path)
    extents = held.append([b"0123456789" * 10])
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, at: read(file, min(length, 7), at))
    assert held.read(extents) == [b"0123456789" * 10]
    held.close()


def test_a_full_disk_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened(tmp_path)
    kept = held.append([b"kept"])
    write = os.pwrite

    def full(file: int, text: memoryview, at: int) -> int:
        if at >= 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, text[: 6 - at], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            held.append([b"too much"])
    after = held.append([b"fits again"])
    assert after[0].start == 4
    assert held.read(kept + after) == [b"kept", b"fits again"]
    held.close()


def test_what_nobody_vouches_for_leaves_no_room_taken(tmp_path: Path) -> None:
    """The disk may be full: a database beside needs that room, to say what may go."""
    held = opened(tmp_path)
    extents = held.append([b"kept"])
    held.take_back(held.append([b"lost"]))
    assert sizes(tmp_path) == {"00000001.seg": 4}
    extents += held.append([b"next"])
    assert held.read(extents) == [b"kept", b"next"]
    held.close()


@pytest.mark.parametrize("damage", ["gone", "short", "flipped"])
def test_damage_is_told_apart_from_what_is_whole(tmp_path: Path, damage: str) -> None:
    held = opened(tmp_path, segment_bytes=8)
    extents = held.append([b"whole", b"damaged"])
    extents += held.append([b"elsewhere"])
    path = tmp_path / "00000001.seg"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            path.read_bytes()[:9] if damage == "short" else path.read_bytes()[:-1] + b"D"
        )
    first = None if damage == "gone" else b"whole"
    assert held.read(extents) == [first, None, b"elsewhere"]
    held.close()


@pytest.mark.parametrize("left", [None, b"bef"])
def test_nothing_is_written_into_a_gap(tmp_path: Path, left: bytes | None) -> None:
    """A file that lost its end, or is lost, is left alone: what comes next begins another."""
    held = opened(tmp_path)
    lost = held.append([b"before"])
    held.close()
    (tmp_path / "00000001.seg").unlink()
    if left is not None:
        (tmp_path / "00000001.seg").write_bytes(left)
    held = opened(tmp_path, lost)
    after = held.append([b"after"])
    assert after[0][:2] == (2, 0)
    assert held.read([*lost, *after]) == [None, b"after"]
    held.close()


def test_an_unlinked_file_is_gone_for_readers_too(tmp_path: Path) -> None:
    held = opened(tmp_path, segment_bytes=1)
    extents = held.append([b"old"]) + held.append([b"new"])
    held.unlink(1)
    assert held.read(extents) == [None, b"new"]
    assert (sorted(held.sizes.keys() - {held.newest}), held.num_bytes) == ([], 3)
    held.close()


def test_sync_writes_the_file_once_and_its_folder_when_the_file_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(file: int) -> None:
        synced.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")

    monkeypatch.setattr(os, "fdatasync", note)
    monkeypatch.setattr(os, "fsync", note)
    held = opened(tmp_path, segment_bytes=4)
    held.sync()
    held.append([b"1"])
    held.sync()
    held.sync()
    held.append([b"234"])
    held.sync()
    held.append([b"in the next"])
    held.sync()
    assert synced == ["file", "folder", "file", "file", "folder"]
    held.close()


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/fd"))
    held = opened(tmp_path, segment_bytes=1)
    extents = [extent for number in range(5) for extent in held.append([b"%d" % number])]
    held.unlink(2)
    assert held.read(extents) == [b"0", None, b"2", b"3", b"4"]
    held.close()
    assert set(os.listdir("/dev/fd")) == before
