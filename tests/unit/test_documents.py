"""Documents: what is accepted, what is refused and where, and that there is no second reader."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from halteres.documents import (
    MOST_BYTES,
    MOST_VALUES,
    DocumentError,
    parse_json,
    parse_toml,
    parse_yaml,
    read_document,
    read_json_lines,
)
from halteres.errors import InvalidConfig

ROOT = Path(__file__).parents[2]
MARK = b"\xef\xbb\xbf"
READERS = (
    "safe_load",
    "load",
    "load_all",
    "full_load",
    "safe_load_all",
    "unsafe_load",
    "loads",
    "decode",
)
LIBRARIES = ("yaml", "tomllib", "msgspec.yaml", "msgspec.toml")

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}\n" for level in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", b"a: 1\n"),
        ("a.json", b'{"a": 1}'),
        ("a.JSON", b'{"a": 1}'),
        ("a.toml", b"a = 1\n"),
    ],
)
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    for begin in (b"", MARK):
        file.write_bytes(begin + content)
        assert read_document(file, "file") == {"a": 1}


def test_the_lines_of_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(MARK + b'{"a": 1}\n\n{"a": 2}\r\n' + MARK + b'{"a": 3}\n')
    assert list(read_json_lines(file)) == [(1, {"a": 1}), (3, {"a": 2}), (4, {"a": 3})]


@pytest.mark.parametrize(
    ("parse", "text", "where"),
    [
        (parse_yaml, "a: 1\nb: 2\na: 3\n", "line 3, column 1"),
        (parse_yaml, "a: {b: 1, b: 2}\n", "line 1, column 11"),
        (parse_yaml, "- a: 1\n- a: 1\n  'a': 2\n", "line 3, column 3"),
        (parse_json, '{"a": 1, "a": 2}', "line 1, column 10: the key 'a'"),
        (parse_json, '[{"b": {"a": 1, "a": 1}}]', "line 1, column 17: the key 'a'"),
        (parse_json, '{"a": "{\\"a",\n "b": [], "\\u0061": 1}', "line 2, column 11: the key 'a'"),
        (parse_toml, "a = 1\nb = 2\na = 3\n", "Cannot overwrite"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(parse: Any, text: str, where: str) -> None:
    with pytest.raises(DocumentError) as refused:
        parse(text)
    assert str(refused.value).startswith(where)


def test_a_merged_key_may_be_given_again() -> None:
    assert parse_yaml("a: &x {p: 1, q: 1}\nb: {<<: *x, p: 2}\n")["b"] == {"p": 2, "q": 1}


@pytest.mark.parametrize(
    ("parse", "text", "where"),
    [
        (parse_yaml, "a: [1\nb: 2", "line 2, column 2"),
        (parse_yaml, "a: \x07", "line 1, column 4"),
        (parse_yaml, "a: !!python/object:os.x 1", "line 1, column 4"),
        (parse_json, '{"a": 1,\n b', "line 2, column 2"),
        (parse_json, "", "line 1, column 1"),
    ],
)
def test_what_cannot_be_read_is_refused_with_line_and_column(
    parse: Any, text: str, where: str
) -> None:
    with pytest.raises(DocumentError) as refused:
        parse(text)
    assert str(refused.value).startswith(where)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_yaml, ALIASES),
        (parse_yaml, "&a [*a]"),
        (parse_yaml, "[" * 10_000),
        (parse_yaml, "a: " * 10_000),
        (parse_yaml, "- " * 10_000 + "a"),
        (parse_yaml, f"[{'1,' * 3 * MOST_VALUES}]"),
        (parse_yaml, f"a: {'9' * 5000}"),
        (parse_yaml, 'a: "\\ud800"'),
        (parse_yaml, "a: !!timestamp 2020-13-45"),
        (parse_yaml, "a: !!timestamp x"),
        (parse_yaml, 'a: !!int ""'),
        (parse_yaml, "a: !!float x"),
        (parse_yaml, "a: !!bool x"),
        (parse_yaml, "? {a: b}\n: 1"),
        (parse_json, "[" * 100_000),
        (parse_json, "[" * 100 + "]" * 100),
        (parse_json, "9" * 5000),
        (parse_json, '["\\udc00"]'),
        (parse_json, '{"\\udc00": 1}'),
        (parse_toml, "a=" + "[" * 5000),
        (parse_toml, ".".join("a" * 200) + " = 1"),
    ],
)
def test_a_hostile_document_is_refused_within_seconds(parse: Any, text: str) -> None:
    begun = time.process_time()
    with pytest.raises(DocumentError):
        parse(text)
    assert time.process_time() - begun < 10


def test_merges_of_merges_do_not_multiply() -> None:
    begun = time.process_time()
    assert parse_yaml(MERGES)["a11"] == {"k": 1}
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0123", 123),
        ("-012", -12),
        ("1:30", "1:30"),
        ("1_000", 1000),
        ("2026-01-02", "2026-01-02"),
        ("1e-3", "1e-3"),
        ("=", "="),
        (".5", 0.5),
        ("yes", True),
        ('"\\ud83d\\ude00"', "\U0001f600"),
    ],
)
def test_numbers_are_decimal_and_dates_are_texts(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}")["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "value",
    [
        "0123",
        "089",
        "1:30",
        "1:60",
        "1e-3",
        "-.5",
        "0x1f",
        "0o17",
        "2026-01-02",
        "=",
        "yes",
        "null",
        "~",
        "1_0",
        "#",
        "ö",
    ],
)
def test_what_is_written_is_read_again(value: str) -> None:
    assert parse_yaml(yaml.safe_dump({"a": [value, 1, 0.5, None, True]})) == {
        "a": [value, 1, 0.5, None, True]
    }


def test_what_is_no_regular_file_of_text_is_refused_at_once(tmp_path: Path) -> None:
    fifo, large, binary, wide = (
        tmp_path / name for name in ("fifo.yaml", "large.yaml", "binary.yaml", "wide.json")
    )
    os.mkfifo(fifo)
    large.write_bytes(b"#" * (MOST_BYTES + 1))
    binary.write_bytes(b"a: 1\nb: \xff\n")
    wide.write_bytes('{"a": 1}'.encode("utf-16"))
    endless, loop, folder = (
        tmp_path / "endless.yaml",
        tmp_path / "loop.yaml",
        tmp_path / "folder.yaml",
    )
    endless.symlink_to("/dev/zero")
    loop.symlink_to(loop)
    folder.mkdir()
    for file in (fifo, large, binary, wide, endless, loop, folder, tmp_path / "none.yaml"):
        with pytest.raises(InvalidConfig) as refused:
            read_document(file, "config file")
        assert str(file) in refused.value.what and refused.value.why and refused.value.next


WRITTEN_BY_USERS = (
    "agent/call.py",
    "agent/transports",
    "rewards/preference_files.py",
    "rewards/preferences.py",
    "service/inference/requests.py",
    "tool_calls.py",
    "environments/rows.py",
    "config/files.py",
    "config/edits.py",
)
JSON_READERS = ("json.loads", "json.load", "msgspec.json.decode")


@pytest.mark.parametrize("place", WRITTEN_BY_USERS)
def test_json_that_users_write_has_each_key_once(place: str) -> None:
    """A library takes the last of two. Where it reads first, `parse_json` looks at the same text."""
    path = ROOT / "src" / "halteres" / place
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # What is only looked at, or was written here, has no key that could be lost.
            unused = {one.value for one in ast.walk(function) if isinstance(one, ast.Expr)}
            called = {
                ast.unparse(one.func)
                for one in ast.walk(function)
                if isinstance(one, ast.Call)
                and (one not in unused or ast.unparse(one.func) == "parse_json")
                and not ast.unparse(one).startswith("json.loads(json.dumps(")
            }
            is_checked = "parse_json" in called or called.isdisjoint(JSON_READERS)
            assert is_checked, f"{file.name}: {function.name}"


def test_there_is_no_second_reader_of_documents() -> None:
    """A document that is read in another way has its keys twice, no bounds, and a byte order
    mark.
    """
    found: list[str] = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        if file.name == "documents.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_reader = isinstance(node, ast.Attribute) and node.attr in READERS
            if is_reader and ast.unparse(node.value) in LIBRARIES:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found, f"use halteres.documents at {', '.join(found)}"
