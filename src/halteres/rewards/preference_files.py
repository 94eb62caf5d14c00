"""Rows of data to train on from where they lie: a file, the package, the Hugging Face hub, or
objects in memory.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.documents import DocumentError, parse_json, parse_json_line
from halteres.errors import InvalidConfig, InvalidData, NotFound, nearest
from halteres.files import open_regular

Source = str | Path | Iterable[Mapping[str, Any]]
# in the package: alone the half to train on, with `:held_out` the other
SHIPPED = "halteres/arithmetic-pairs"
EXAMPLE = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}'
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(?::(?P<split>[\w.\[\]%:+-]+))?")
_SUFFIXES = (".jsonl", ".json", ".parquet")


class RowProblem(Exception):
    """Why a row cannot be used: goes on after "row 3: "."""

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(problem)
        self.detail = detail  # of this row alone, with its place; of alike rows the first one's


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """Rows as they were found, not looked at yet."""

    source: str  # the file's name, or "data"
    digest: str  # SHA-256 of the file, or of the rows as JSON
    # with numbers from 1: of lines in a JSONL file, of places elsewhere
    rows: tuple[tuple[int, Any], ...]


def read_rows(
    source: Source, *, what: str = "preference data", example: str = EXAMPLE
) -> NumberedRows:
    """Every row of a source.

    Args:
        source: where the rows lie.
        what: what they are, in the words of errors.
        example: one of them, likewise.

    Raises:
        NotFound, InvalidConfig, InvalidData: it cannot be read, or holds none.
    """
    if isinstance(source, Mapping):
        fix = "Of a data set with several splits hand over one: dataset['train']."
        why = f"Its keys are {', '.join(map(repr, source)) or 'none'}."
        raise InvalidData(f"The {what} is one mapping, not rows.", why, fix)
    if isinstance(source, str | Path):
        found = _from_place(str(source), what)
    else:
        found = _from_objects("data", source)
    if not found.rows:
        raise InvalidData(f"{found.source} holds no row.", "It is empty.", f"A row is {example}")
    return found


def _from_place(place: str, what: str) -> NumberedRows:
    """Of a file by its name's ending, the package, or a data set on the hub."""
    file = Path(place).expanduser()
    shipped, _, split = place.partition(":")
    if shipped == SHIPPED:
        if split not in ("", "train", "held_out"):
            raise NotFound(
                f"{SHIPPED} has no split '{split}'.",
                next=f"Name {SHIPPED}:train or {SHIPPED}:held_out.",
            )
        file = Path(__file__).parent / "data" / f"arithmetic_pairs_{split or 'train'}.jsonl"
    elif (hub := _HUB.fullmatch(place)) and not file.exists() and file.suffix not in _SUFFIXES:
        missing = f"There is no file {place}; a data set of this name on the Hugging Face hub"
        datasets = _import_extra("datasets", missing, "name a file: prefs.jsonl")
        try:
            return _from_objects(
                place, datasets.load_dataset(hub["name"], split=hub["split"] or "train")
            )
        except Exception as error:  # any of a library's: no network, no such name or split
            missing = (
                f"There is no file {place}, and no such data set could be loaded from the "
                "Hugging Face hub."
            )
            fix = (
                "See to the name, the split (OWNER/NAME:SPLIT) and the network, or name a file: "
                "prefs.jsonl"
            )
            raise InvalidConfig(missing, f"{type(error).__name__}: {error}.", fix) from error
    if file.suffix == ".parquet" and file.is_file():
        parquet = _import_extra("pyarrow.parquet", f"Reading {file.name}", "convert it to JSONL.")
        try:
            return _from_objects(file.name, parquet.read_table(file).to_pylist())
        except Exception as error:  # any of the library's
            raise InvalidData(
                f"{file.name} cannot be read as Parquet.", f"{type(error).__name__}: {error}."
            ) from error
    return _from_file(file, what)


def _from_file(file: Path, what: str) -> NumberedRows:
    """Of JSON lines, or a JSON list."""
    if file.is_dir():
        inside = sorted(one.name for one in file.iterdir() if one.suffix in _SUFFIXES)
        why = "It holds no .jsonl, .json or .parquet file."
        if inside:
            why = f"It holds {', '.join(inside[:5])}."
        fix = "Name a file."
        if inside:
            fix = f"Name one of them: {file / inside[0]}"
        raise InvalidData(f"{file} is a folder, not a file of {what}.", why, fix)
    try:
        with open_regular(file) as stream:
            content = stream.read()
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        beside = None
        if file.parent.is_dir():
            beside = nearest(file.name, [one.name for one in file.parent.iterdir()])
        why = ""
        if not beside:
            why = f"Known names: {SHIPPED}, OWNER/NAME on the Hugging Face hub, files."
        fix = ""
        if beside:
            fix = f"Did you mean {file.parent / beside}?"
        raise NotFound(f"There is no file {file}.", why, fix) from error
    except OSError as error:
        raise InvalidData(f"{file} cannot be read.", f"{error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidData(
            f"{file.name} is not UTF-8 text.", f"Line {line} is the first.", "Save it as UTF-8."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    rows: list[tuple[int, Any]] = []
    if text.lstrip()[:1] == "[":
        try:
            rows += enumerate(parse_json(text, most_values=len(text)), 1)
        except DocumentError as error:
            wrong = f"{file.name} starts with '[' but is not a valid JSON list."
            raise InvalidData(wrong, f"{error}.", "Correct it, or write JSONL.") from error
        return NumberedRows(file.name, digest, tuple(rows))
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts within JSON texts
        # Files that were joined have a mark in the middle, too.
        line = line.removeprefix("\ufeff")
        if line.strip():
            rows.append((number, _row(line, number)))
    return NumberedRows(file.name, digest, tuple(rows))


def _row(line: str, number: int) -> Any:
    """The value of a line, or why it has none."""
    try:
        return parse_json_line(line, number)
    except DocumentError as error:
        return RowProblem("is not JSON that can be read", str(error))


def _from_objects(source: str, objects: Iterable[Any]) -> NumberedRows:
    rows = tuple(enumerate(objects, 1))
    sha = hashlib.sha256()
    for _, value in rows:
        sha.update(
            json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass") + b"\n"
        )
    return NumberedRows(source, sha.hexdigest(), rows)


def _import_extra(module: str, who: str, instead: str) -> Any:
    """A module of the extra `hub`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what, fix = (
            f"{who} needs the package `{module.partition('.')[0]}`.",
            f"pip install 'halteres[hub]', or {instead}",
        )
        raise InvalidConfig(what, f"{error}.", fix) from error
