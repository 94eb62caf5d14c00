"""Replacing a file whole, and the end of one."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import halteres
from halteres.config.environ import read_stop_request, write_stop_request
from halteres.files import (
    PIECE_BYTES,
    SMALL_BYTES,
    TAIL_BYTES,
    UnreadableFile,
    read_json,
    replace_file,
    replacing,
    sha256_of,
    tail,
    text_of_file,
)


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


@pytest.mark.parametrize(
    "junk", [b"", b"[]", b"[[" * 100_000, b'{"mode": ["after_step"]}', b"\xff\xfe", b"7"]
)
def test_junk_where_a_stop_request_belongs_means_now(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "stop.json").write_bytes(junk)
    assert read_stop_request(tmp_path / "stop.json") == "now"


class Point(msgspec.Struct):
    x: int


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "cut off": b'{"x": 1',
    "no JSON": b"x: 1",
    "a list": b"[1]",
    "another form": b'{"x": "one"}',
    "deep": b'{"x":' * 200 + b"1" + b"}" * 200,
    "deeper than Python's stack": b"[" * 100_000,
    "no text": b"\xff\xfe\x00\x01",
    "a number of 10,000 digits": b'{"x": ' + b"9" * 10_000 + b"}",
    "a number that no field holds": b'{"x": 1e400}',
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_json_that_cannot_be_used_is_one_error_that_names_the_file(
    tmp_path: Path, case: str
) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(UNREADABLE[case])
    with pytest.raises(UnreadableFile, match=r"state\.json"):
        read_json(file, Point)


def test_what_is_no_regular_file_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("fifo", "zero", "folder", "loop", "missing"):
        with pytest.raises(UnreadableFile, match=name):
            read_json(tmp_path / name, Point)
        with pytest.raises(UnreadableFile, match=name):
            text_of_file(tmp_path / name)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(SMALL_BYTES + 1)
    with pytest.raises(UnreadableFile, match="more than"):
        read_json(tmp_path / "large", Point)


def test_a_link_is_followed_only_where_one_is_expected(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"x": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert read_json(tmp_path / "link", Point) == Point(1)
    with pytest.raises(UnreadableFile, match="symbolic link"):
        read_json(tmp_path / "link", Point, linked=False)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + b'{"x": 1}')
    assert read_json(tmp_path / "a", Point) == Point(1)
    assert text_of_file(tmp_path / "a") == '{"x": 1}'


READ_FOLDERS_OF_OTHERS = (
    "models",
    "engine",
    "tokenizer.py",
    "chat_template.py",
    "service",
    "rewards",
)
"""Rooms that read config.json, state.json and the like out of folders that somebody made
elsewhere.
"""

DECODERS = ("json.loads", "json.load", "msgspec.json.decode")
CONTENTS = ("read_text", "read_bytes", "read_regular")
THE_ONE_READER = "files.read_json"


def decoded_files(tree: ast.AST) -> Iterator[int]:
    """Lines on which the contents of a file go straight into a JSON decoder."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called: Any = node.func
        validates = isinstance(called, ast.Attribute) and called.attr == "model_validate_json"
        if not validates and ast.unparse(called) not in DECODERS:
            continue
        inside = [
            ast.unparse(one.func)
            for one in ast.walk(node)
            if isinstance(one, ast.Call) and one is not node
        ]
        if any(name.rpartition(".")[2] in CONTENTS for name in inside):
            yield node.lineno


def test_rooms_that_read_folders_of_others_decode_no_file_but_by_the_one_reader() -> None:
    source, wrong = Path(halteres.__file__).parent, list[str]()
    for room in READ_FOLDERS_OF_OTHERS:
        place = source / room
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            lines = decoded_files(ast.parse(file.read_text(encoding="utf-8")))
            wrong += (
                f"{file.relative_to(source)}:{line} decodes a file: use {THE_ONE_READER}"
                for line in lines
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "json.loads(file.read_text())",
        "msgspec.json.decode((folder / STATE).read_bytes(), type=State)",
        "Model.model_validate_json(read_regular(file))",
    ],
)
def test_the_search_for_other_readers_finds_them(source: str) -> None:
    assert list(decoded_files(ast.parse(source))) == [1]


def test_a_files_hash_is_that_of_its_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (PIECE_BYTES + 1))
    assert sha256_of(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sha256_of(tmp_path / "none") is None
    assert sha256_of(tmp_path) is None
