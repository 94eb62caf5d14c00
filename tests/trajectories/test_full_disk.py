"""A full disk: what waits can be taken out and the server started again; groups are refused until
there is room.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from halteres.trajectories import service
from halteres.trajectories.stores.sqlite import RESERVE_BYTES, SqliteStore
from halteres.trajectories.stores.store import StoreFailed

from .postgres.samples import arrived, delivered
from .server_fixtures import group, marks, opened

MEBIBYTE = 1024**2


@dataclass
class Disk:
    """A file system of its own, of 48 MiB."""

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "queue.sqlite"

    @property
    def reserve(self) -> Path:
        return self.folder / "queue.sqlite.reserve"

    def fill(self) -> None:
        """Another program takes every byte."""
        with (self.folder / "ballast").open("ab", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        assert shutil.disk_usage(self.folder).free == 0

    def make_room(self) -> None:
        (self.folder / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48M", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a disk that can be filled wants the right to mount one")
    try:
        yield Disk(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


async def test_a_queue_on_a_full_disk_can_be_drained_and_takes_groups_again_once_there_is_room(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FULL_HOLD_S", 0.0)
    async with opened(disk.database) as scene:
        await scene.begin(batch_size=2)
        await scene.send(*(group(mark=mark) for mark in range(1, 9)))
        disk.fill()
        posted = 8
        while (
            answer := await scene.raw_post("/scored_data", group(mark=posted + 1))
        ).status_code == 200:
            posted += 1  # into what room was left
        disk.fill()  # what it gave back then, too
        assert answer.status_code == 503 and "Make room on the disk" in answer.json()["detail"]
        assert [marks(await scene.batch()) for _ in range(4)] == [[1], [2], [3], [4]]
        refused = await scene.raw_post("/scored_data", group(mark=posted + 1))
        assert (
            refused.status_code == 503 and "batches can still be taken" in refused.json()["detail"]
        )
        disk.make_room()
        await scene.send(group(mark=posted + 1))
        assert disk.reserve.stat().st_blocks * 512 == RESERVE_BYTES


@pytest.mark.parametrize("ended", ["closed", "killed"])
def test_a_server_on_a_full_disk_can_be_started_again_and_drained(disk: Disk, ended: str) -> None:
    store = SqliteStore(disk.database)
    for number in range(1, 201):
        store.commit([arrived(number, b"t" * 1000)])
    log = disk.folder / "queue.sqlite-wal"
    left = {path: path.read_bytes() for path in (disk.database, log, disk.reserve)}
    store.close()
    if ended == "killed":  # what it wrote is in the log still
        for path, content in left.items():
            path.write_bytes(content)
    disk.fill()
    store = SqliteStore(disk.database)
    try:
        assert [each.id for each in store.load().waiting] == list(range(1, 201))
        for step in range(1, 201):
            if step == 1 or (step == 100 and ended == "killed"):
                # another program takes what was given back; after a proper end less was kept
                disk.fill()
            store.commit(delivered(step, step, step=step))
        assert store.load().waiting == ()
        assert store.is_full
        with pytest.raises(StoreFailed, match=r"No space left on device\. Make room on the disk"):
            store.commit([arrived(201)])
        disk.make_room()
        store.commit([arrived(201)])
        assert not store.is_full
    finally:
        store.close()


class Full(SqliteStore):
    """A store that knows that its disk is full."""

    @property
    def is_full(self) -> bool:
        return True


async def test_groups_for_a_full_disk_are_held_and_refused_before_they_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that holds a group would fail as a whole, and with it the batch that was asked for
    meanwhile.
    """
    monkeypatch.setattr(service, "FULL_HOLD_S", 0.0)
    store = Full(tmp_path / "queue.sqlite")
    async with opened(store.file, store=store) as scene:
        await scene.begin(batch_size=2)
        monkeypatch.setattr(store, "commit", lambda changes: pytest.fail("it was tried"))
        refused = await scene.raw_post("/scored_data", group())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["detail"] == (
            "The group was not stored. The disk of the trajectory database is full; batches can "
            "still be taken."
            " Make room on the disk; the request can be sent again."
        )
