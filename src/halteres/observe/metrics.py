"""JSON-lines files of a run: metrics, events, checkpoints.

A row that was appended is read back whole, or, if its writer died inside the write, not at all. A
value that is not finite is null.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halteres.errors import HalteresError
from halteres.files import MOST_BYTES, NOT_JSON, lines_of, open_regular

T = TypeVar("T")
Row = dict[str, Any]
"""One line. In metrics.jsonl: `step` (1-based), `t` (unix seconds), `src` ("trainer", "env",
"eval"), then numbers.
"""

LONGEST_ROW = 4 * 1024 * 1024  # bytes of a line; a longer one is no row of ours


class WriteFailed(HalteresError):
    """A line could not be written: disk full, folder gone, no permission."""

    code = "write_failed"


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Append one row as one line, in one write. The folder must exist.

    Raises:
        WriteFailed: the disk is full, or the folder is missing or closed to us.
    """
    append_line(file, encoded_row(row))


def append_line(file: Path, encoded: bytes) -> None:
    """Append what `encoded_row` made of a row. Raises as `append_row`."""
    line = encoded + b"\n"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            # A writer that died inside its line left no newline: end its line first, or ours would
            # be lost with it.
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            whole = b"\n" * is_torn + line
            if os.write(descriptor, whole) != len(whole):
                raise OSError(28, "No space left on device")
        finally:
            os.close(descriptor)
    except OSError as error:
        next = "Make room (or make the folder writable), then resume the run."
        raise WriteFailed(
            f"Could not append to {file}.", f"{error.strerror or error}.", next
        ) from error


def read_rows(file: Path) -> list[Row]:
    """Every whole row in the order of writing; none where the file cannot be read. A torn line is
    left out.
    """
    return [row for line in read_lines(file) if (row := decoded(_decoder, line)) is not None]


def read_lines(file: Path) -> list[bytes]:
    """The lines of a file; none where it cannot be read. What is longer than a row can be is left
    out.
    """
    try:
        with open_regular(file) as stream:
            return [line for line in lines_of(stream, LONGEST_ROW) if line != b"\n"]
    except OSError:
        return []


def decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    """A line, decoded; None for a torn or damaged one, or one of another kind."""
    try:
        return decoder.decode(line)
    except NOT_JSON:
        return None


@dataclass(slots=True)
class Tail:
    """Whole lines of a file that others append to, each once; never waits."""

    file: Path
    offset: int = 0  # bytes that were read

    def fresh(self) -> list[Row]:
        """Rows appended since the last look; an unfinished or broken line is left out."""
        try:
            with open_regular(self.file) as stream:
                stream.seek(self.offset)
                data = stream.read(MOST_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [row for line in whole.splitlines() if (row := decoded(_decoder, line)) is not None]


def merge_by_step(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row per step, ascending: the keys of all its rows, the last writer of a key wins. No
    step, no row.

    >>> of_env = {"step": 1, "src": "env", "a": 2, "b": 3}
    >>> merge_by_step([{"step": 1, "src": "trainer", "a": 1}, of_env])
    [{'step': 1, 'a': 2, 'b': 3}]
    """
    merged: dict[int, Row] = {}
    for row in rows:
        if isinstance(step := row.get("step"), int):
            merged.setdefault(step, {}).update(
                {key: value for key, value in row.items() if key != "src"}
            )
    return [merged[step] for step in sorted(merged)]


def series(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric over merged rows, where it is a number."""
    return [
        (row["step"], float(row[name])) for row in rows if isinstance(row.get(name), (int, float))
    ]


def encoded_row(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON, without its end."""
    try:
        return _encoder.encode(dict(row))
    except UnicodeEncodeError:
        # a task, or what a model wrote, holds half a character ("\ud800")
        return _encoder.encode(_whole(row))


def _whole(value: Any) -> Any:
    """The value with a question mark for each half of a character, which no file can hold."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_whole(name): _whole(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(one) for one in value]
    return value


def _plain(value: Any) -> Any:
    """numpy scalars are numbers, paths are text; anything else is a mistake of the caller's."""
    return str(value) if isinstance(value, Path) else value.item()


_decoder = msgspec.json.Decoder(Row)
_encoder = msgspec.json.Encoder(enc_hook=_plain)


def events_of(lines: Sequence[bytes], *kinds: str) -> list[Row]:
    """Events of these kinds; most lines are looked at and not decoded."""
    marks = [f'"{kind}"'.encode() for kind in kinds]
    marked = (line for line in lines if any(mark in line for mark in marks))
    found = (row for line in marked if (row := decoded(_decoder, line)) is not None)
    return [event for event in found if event.get("type") in kinds]
