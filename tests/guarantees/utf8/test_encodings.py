"""No text depends on the machine's locale: whatever opens a text names its encoding.

Python decodes with the locale's encoding unless another is given: under ISO-8859-1 a chat template
in UTF-8 has other characters, and so other tokens. The rule is read off the source, in each folder
whose programs we ship or measure with; `scripts/test` besides makes Python warn where a call of
ours relies on the locale, and the warning an error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("src", "benchmarks", "recipes", "scripts")
# Their hash is part of the built-in weights: they stay as they were when they made them, and are
# run by hand.
HASHED = ("recipes/tiny/manifest.py", "recipes/tiny/tokenizer.py")
ENCODINGS = ("utf-8", "utf-8-sig", "ascii")

# By name of the call: which positional argument is the encoding.
TEXT_METHODS = {"read_text": 0, "write_text": 1}
# By name of the call: which positional argument is the mode, and the mode where none is given.
OPENERS = {"open": (1, "r"), "fdopen": (1, "r")}
TEMPORARY = {"NamedTemporaryFile": "w+b", "TemporaryFile": "w+b", "SpooledTemporaryFile": "w+b"}
WRAPPERS = {"TextIOWrapper": 1, "FileHandler": 2, "WatchedFileHandler": 2}
FORBIDDEN = ("popen", "getpreferredencoding")


def name_of(call: ast.Call) -> str:
    """The last part of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def argument(call: ast.Call, keyword: str, position: int | None) -> ast.expr | None:
    """An argument given by keyword or by position."""
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    if position is not None and len(call.args) > position:
        return call.args[position]
    return None


def text(node: ast.expr | None) -> str | None:
    """The text of a literal."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None


def mode_of(call: ast.Call) -> str | None:
    """The mode in which a call opens a file; None where it opens none."""
    name = name_of(call)
    if name in TEMPORARY:
        return text(argument(call, "mode", 0)) or TEMPORARY[name]
    if name not in OPENERS:
        return None
    if isinstance(call.func, ast.Name) or name == "fdopen":
        return text(argument(call, "mode", 1)) or "r"
    # A method called `open`: the file's own takes the mode first, a module's (gzip, io, bz2)
    # second. Both, where they open binary without a mode, are fine; `open()` of other things has no
    # mode at all.
    modes = [text(argument(call, "mode", position)) for position in (0, 1)]
    return next((mode for mode in modes if mode is not None and set(mode) <= set("rwaxbt+")), None)


def needs_encoding(call: ast.Call) -> int | None:
    """Where a call that reads or writes text takes its encoding: the position, -1 for by keyword
    alone.
    """
    name = name_of(call)
    if name in TEXT_METHODS:
        return TEXT_METHODS[name]
    if name in WRAPPERS:
        return WRAPPERS[name]
    mode = mode_of(call)
    if mode is not None and "b" not in mode:
        return -1
    switches = [
        given.value for given in call.keywords if given.arg in ("text", "universal_newlines")
    ]
    if any(isinstance(value, ast.Constant) and value.value is True for value in switches):
        return -1
    return None


def faults(source: str) -> Iterator[int]:
    """Lines at which the locale decides how a text is read or written."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if name_of(node) in FORBIDDEN:
            yield node.lineno
            continue
        position = needs_encoding(node)
        if position is None:
            continue
        given = argument(node, "encoding", position if position >= 0 else None)
        if text(given) not in ENCODINGS:
            yield node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_text_is_read_and_written_in_an_encoding_that_is_named(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        if str(file.relative_to(ROOT)) not in HASHED
        for line in faults(file.read_text(encoding="utf-8"))
    ]
    assert not found, f'write encoding="utf-8" at {", ".join(found)}'


@pytest.mark.parametrize(
    "call",
    [
        "file.read_text()",
        "file.read_text(errors='replace')",
        "file.write_text(content)",
        "open(name)",
        "open(name, 'w')",
        "file.open('a')",
        "file.open(mode='w')",
        "gzip.open(file, 'rt')",
        "os.fdopen(descriptor, 'w')",
        "io.TextIOWrapper(stream)",
        "subprocess.run(command, text=True)",
        "Popen(command, universal_newlines=True)",
        "tempfile.NamedTemporaryFile('w')",
        "logging.FileHandler(name)",
        "file.read_text(encoding='locale')",
        "file.read_text(encoding=None)",
        "os.popen(command)",
    ],
)
def test_each_way_to_leave_the_encoding_to_the_locale_is_found(call: str) -> None:
    assert list(faults(call)) == [1]


@pytest.mark.parametrize(
    "call",
    [
        "file.read_text('ascii')",
        "file.read_text(encoding='utf-8')",
        "file.write_text(content, 'utf-8')",
        "open(name, 'rb')",
        "file.open('ab')",
        "gzip.open(file, 'rb')",
        "os.fdopen(descriptor, 'rb')",
        "os.open(name, os.O_RDONLY)",
        "journal.open()",
        "tempfile.NamedTemporaryFile()",
        "subprocess.run(command, text=True, encoding='utf-8')",
    ],
)
def test_bytes_and_named_encodings_are_no_fault(call: str) -> None:
    assert list(faults(call)) == []
