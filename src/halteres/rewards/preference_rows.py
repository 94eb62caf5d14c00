"""The rows of preference data as they stand in a file, a data set or a list, with their numbers."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.errors import InvalidConfig, InvalidData, NotFound, nearest
from halteres.files import NOT_JSON

SHIPPED = "halteres/arithmetic-pairs"
"""The preference set inside the package: this name alone is its training half, with `:held_out` the other."""

EXAMPLE = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}'
STEPS_EXAMPLE = '{"prompt": "2 + 2 + 2?", "completions": ["2 + 2 = 4.", "4 + 2 = 7."], "labels": [true, false]}'
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(?::(?P<split>[\w.\[\]%:+-]+))?")
_SUFFIXES = (".jsonl", ".json", ".parquet")


class RowProblem(Exception):
    """Why a row cannot be used: goes on after "row 3: "."""


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """Rows with their numbers from 1: lines of a JSONL file, places in everything else. A row that is no JSON object is
    its problem."""

    source: str  # the file's name, or "data"
    digest: str  # SHA-256 of the file, or of the rows as JSON
    rows: tuple[tuple[int, Mapping[str, Any] | RowProblem], ...]


Source = str | Path | Iterable[Mapping[str, Any]]


def read_rows(source: Source) -> NumberedRows:
    """The rows of a file (by its name's ending), of a data set on the hub, or of anything that yields mappings.

    Raises:
        NotFound: no such file.
        InvalidData: a folder, an empty file, no list of rows.
        InvalidConfig: what is needed to read it is not installed; the hub cannot be asked.
    """
    if isinstance(source, Mapping):
        splits = ", ".join(f"'{name}'" for name in source)
        raise InvalidData(
            "The preference data is one mapping, not rows.",
            f"Its keys are {splits or 'none'}.",
            "Of a data set with several splits hand over one: dataset['train'].",
        )
    found = _from_place(str(source)) if isinstance(source, str | Path) else _from_objects("data", source)
    if not found.rows:
        raise InvalidData(f"{found.source} holds no row.", "It is empty.", f"A row is {EXAMPLE}")
    return found


def _from_place(place: str) -> NumberedRows:
    file = Path(place).expanduser()
    shipped, _, split = place.partition(":")
    if shipped == SHIPPED:
        if split not in ("", "train", "held_out"):
            raise NotFound(f"{SHIPPED} has no split '{split}'.", next=f"Name {SHIPPED}:train or {SHIPPED}:held_out.")
        file = Path(__file__).parent / "data" / f"arithmetic_pairs_{split or 'train'}.jsonl"
    elif (hub := _HUB.fullmatch(place)) and not file.exists() and file.suffix not in _SUFFIXES:
        return _from_hub(place, hub["name"], hub["split"] or "train")
    if file.is_dir():
        inside = sorted(one.name for one in file.iterdir() if one.suffix in _SUFFIXES)
        raise InvalidData(
            f"{file} is a folder, not a file of preference data.",
            f"It holds {', '.join(inside[:5])}." if inside else "It holds no .jsonl, .json or .parquet file.",
            f"Name one of them: {file / inside[0]}" if inside else "Name a file.",
        )
    if file.suffix == ".parquet" and file.exists():
        parquet = _extra("pyarrow.parquet", f"Reading {file.name}", "convert it to JSONL.")
        try:
            return _from_objects(file.name, parquet.read_table(file).to_pylist())
        except Exception as error:  # any of the library's
            raise InvalidData(f"{file.name} cannot be read as Parquet.", f"{type(error).__name__}: {error}.") from error
    return _from_file(file)


def _from_file(file: Path) -> NumberedRows:
    """JSON lines, or a JSON list."""
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        beside = nearest(file.name, [one.name for one in file.parent.iterdir()]) if file.parent.is_dir() else None
        raise NotFound(
            f"There is no file {file}.",
            "" if beside else f"Known names: {SHIPPED}, OWNER/NAME on the Hugging Face hub, files.",
            f"Did you mean {file.parent / beside}?" if beside else "",
        ) from error
    except OSError as error:
        raise InvalidData(f"{file} cannot be read.", f"{error.strerror or error}.") from error
    digest = hashlib.sha256(content).hexdigest()
    content = content.removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] != b"[":
        return NumberedRows(file.name, digest, tuple(_lines(content)))
    try:
        return NumberedRows(file.name, digest, _numbered(json.loads(content.decode())))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidData(
            f"{file.name} is not UTF-8 text.", f"Line {line} is the first.", "Save it as UTF-8."
        ) from error
    except NOT_JSON as error:
        raise InvalidData(
            f"{file.name} begins as a JSON list and is none.", f"{error}.", "Mend it, or write JSONL."
        ) from error


def _lines(content: bytes) -> Iterator[tuple[int, Mapping[str, Any] | RowProblem]]:
    """Of JSON lines; split as bytes, because str.splitlines() also cuts within JSON texts."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _object(json.loads(line.decode()))
            except UnicodeDecodeError:
                yield number, RowProblem("is not UTF-8 text")
            except NOT_JSON:
                yield number, RowProblem("is not JSON")


def _object(value: Any) -> Mapping[str, Any] | RowProblem:
    return value if isinstance(value, Mapping) else RowProblem("is not a JSON object")


def _numbered(values: Iterable[Any]) -> tuple[tuple[int, Mapping[str, Any] | RowProblem], ...]:
    return tuple((number, _object(value)) for number, value in enumerate(values, 1))


def _from_objects(source: str, objects: Iterable[Any]) -> NumberedRows:
    rows = _numbered(objects)
    sha = hashlib.sha256()
    for _, value in rows:
        sha.update(json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass") + b"\n")
    return NumberedRows(source, sha.hexdigest(), rows)


def _from_hub(place: str, name: str, split: str) -> NumberedRows:
    missing = f"There is no file {place}; a data set of this name on the Hugging Face hub"
    datasets = _extra("datasets", missing, "name a file: prefs.jsonl")
    try:
        return _from_objects(place, datasets.load_dataset(name, split=split))
    except Exception as error:  # any of a library's: no network, no such name or split
        raise InvalidConfig(
            f"There is no file {place}, and no such data set could be loaded from the Hugging Face hub.",
            f"{type(error).__name__}: {error}.",
            "See to the name, the split (OWNER/NAME:SPLIT) and the network, or name a file: prefs.jsonl",
        ) from error


def _extra(module: str, who: str, instead: str) -> Any:
    """A module of the extra `hub`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InvalidConfig(
            f"{who} needs the package `{package}`.", f"{error}.", f"pip install 'halteres[hub]', or {instead}"
        ) from error
