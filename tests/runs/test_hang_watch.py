"""When an event loop is taken to hang: the file that it touches, and a clock that a test sets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until

from halteres.config.environ import AskedHeartbeat
from halteres.process import identity, is_stopped
from halteres.runs.supervision.hang_watch import MOST_PER_LOOK_S, STUCK_S, HangWatch


class Scene:
    """A file, a clock, and looks at them."""

    def __init__(self, file: Path, limit_s: float = 10.0) -> None:
        self.now, self.file, self.beats = 1000.0, file, 0
        self.watch = HangWatch(AskedHeartbeat(file, limit_s), clock=lambda: self.now)

    def beat(self) -> None:
        self.beats += 1
        self.file.touch()
        os.utime(self.file, ns=(self.beats, self.beats))

    def looks(self, count: int, every_s: float = 1.0, who: dict[str, Any] | None = None) -> bool:
        """Look so often; the last look's verdict."""
        hung = False
        for _ in range(count):
            self.now += every_s
            hung = self.watch.is_hung(who or {})
        return hung


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "beats")


def test_a_loop_that_has_not_beaten_for_the_limit_hangs(scene: Scene) -> None:
    scene.beat()
    assert not scene.looks(10)  # the first look finds the beat
    assert scene.looks(1)
    assert scene.watch.silent_s == 10.0


def test_each_beat_begins_the_silence_anew(scene: Scene) -> None:
    for _ in range(5):
        scene.beat()
        assert not scene.looks(9)
    assert scene.looks(2)


def test_a_process_that_has_not_begun_to_beat_or_has_ended_it_is_not_watched(scene: Scene) -> None:
    """It loads its tasks, which may take long, or takes its leave."""
    assert not scene.looks(1000)
    scene.beat()
    assert not scene.looks(5)
    scene.file.unlink()
    assert not scene.looks(1000)


def test_what_passed_while_we_slept_ourselves_is_no_silence(scene: Scene) -> None:
    """A closed laptop, a stopped supervisor, a paused machine."""
    scene.beat()
    scene.looks(1)
    assert not scene.looks(1, every_s=10_000.0)
    assert scene.watch.silent_s == MOST_PER_LOOK_S
    scene.beat()
    assert not scene.looks(1)


def test_a_process_that_a_signal_has_stopped_does_not_hang(scene: Scene) -> None:
    scene.beat()
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        who = identity(child.pid)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(who))
        assert not scene.looks(100, who=who)
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(who))
        assert scene.looks(11, who=who)
    finally:
        child.kill()
        child.wait()


def test_the_next_process_begins_without_the_last_ones_silence(scene: Scene) -> None:
    scene.beat()
    assert scene.looks(11)
    scene.watch.begin()
    assert not scene.watch.has_hung
    assert not scene.looks(100)


def test_the_limit_is_the_environments_setting_and_0_is_none(tmp_path: Path) -> None:
    assert HangWatch.of(tmp_path / "beats", {"stuck_s": 7}).asked.limit_s == 7.0
    assert HangWatch.of(tmp_path / "beats", {}).asked.limit_s == STUCK_S == 120.0
    never = Scene(tmp_path / "beats", limit_s=0.0)
    never.beat()
    assert not never.looks(10_000)
    assert never.watch.asked.variable == {}


def test_the_item_at_work_is_read_where_the_file_names_one(scene: Scene) -> None:
    assert scene.watch.at_work_on == {}
    scene.file.write_text('{"draw_step": 2, "ordinal": 5, "drawing": false}   \n')
    assert scene.watch.at_work_on == {"draw_step": 2, "ordinal": 5, "drawing": False}
    for text in ("", "  \n", "[1]", '{"ordinal": 1}', "{"):
        scene.file.write_text(text)
        assert scene.watch.at_work_on == {}
