"""Replacing a file whole, and the end of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.config.environ import read_stop_request, write_stop_request
from halteres.files import TAIL_BYTES, replace_file, replacing, tail


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    replace_file(file, b"old")
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    file.write_bytes(b"old")
    with pytest.raises(ValueError, match="half"), replacing(file) as beside:
        beside.write_bytes(b"ne")
        assert beside.suffix == ".png"
        raise ValueError("half")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_last_lines_of_a_long_file_are_read_without_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"\xff" * TAIL_BYTES + b"\none\ntwo\n")
    assert tail(file, 2) == ["one", "two"]
    assert tail(tmp_path / "none", 2) == []


def test_a_stop_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "stop.json"
    assert read_stop_request(file) is None
    for mode in ("after_step", "now"):
        write_stop_request(file, mode)
        assert read_stop_request(file) == mode


@pytest.mark.parametrize("junk", [b"", b"[]", b"[[" * 100_000, b'{"mode": ["after_step"]}', b"\xff\xfe", b"7"])
def test_junk_where_a_stop_request_belongs_means_now(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "stop.json").write_bytes(junk)
    assert read_stop_request(tmp_path / "stop.json") == "now"
