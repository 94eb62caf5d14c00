"""The rows of preference data as they stand in a file, a data set or a list, with their numbers.

Owns: JSONL, JSON, Parquet, `datasets.Dataset`, data sets on the Hugging Face hub; the sentence for what cannot be read.
Never: knows what a row means.
"""

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


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that is no JSON object."""

    why: str  # goes on after "row 3: "


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedRows:
    """Rows with their numbers from 1: lines of a JSONL file, places in everything else."""

    source: str  # the file's name, or "data"
    digest: str  # SHA-256 of the file, or of the rows as JSON
    rows: tuple[tuple[int, Mapping[str, Any] | Unreadable], ...]


def read_rows(source: str | Path | Iterable[Mapping[str, Any]]) -> NumberedRows:
    """The rows of a file (by its name's ending), of a data set on the hub, or of anything that yields mappings.

    Raises:
        NotFound: no such file.
        InvalidData: a folder, an empty file, no list of rows.
        InvalidConfig: what is needed to read it is not installed; the hub cannot be asked.
    """
    if isinstance(source, str | Path):
        found = _from_place(str(source))
    elif isinstance(source, Mapping):
        splits = ", ".join(f"'{name}'" for name in source)
        raise InvalidData(
            "The preference data is one mapping, not rows.",
            f"Its keys are {splits or 'none'}.",
            "Of a data set with several splits hand over one: dataset['train'].",
        )
    else:
        found = _from_objects("data", source)
    if not found.rows:
        raise InvalidData(f"{found.source} holds no row.", "It is empty.", f"A row is {EXAMPLE}")
    return found


def _from_place(place: str) -> NumberedRows:
    if place.partition(":")[0] == SHIPPED:
        return _from_file(_shipped(place))
    file = Path(place).expanduser()
    hub = _HUB.fullmatch(place)
    if hub and not file.exists() and file.suffix not in _SUFFIXES:
        return _from_hub(place, hub["name"], hub["split"] or "train")
    return _from_file(file)


def _shipped(name: str) -> Path:
    split = name.partition(":")[2] or "train"
    if split not in ("train", "held_out"):
        raise NotFound(f"{SHIPPED} has no split '{split}'.", next=f"Name {SHIPPED}:train or {SHIPPED}:held_out.")
    return Path(__file__).parent / "data" / f"arithmetic_pairs_{split}.jsonl"


def _from_file(file: Path) -> NumberedRows:
    if file.is_dir():
        inside = sorted(one.name for one in file.iterdir() if one.suffix in _SUFFIXES)
        raise InvalidData(
            f"{file} is a folder, not a file of preference data.",
            f"It holds {', '.join(inside[:5])}." if inside else "It holds no .jsonl, .json or .parquet file.",
            f"Name one of them: {file / inside[0]}" if inside else "Name a file.",
        )
    if file.suffix == ".parquet" and file.exists():
        return _from_parquet(file)
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
    rows = _listed(content, file) if content.lstrip()[:1] == b"[" else tuple(_lines(content))
    return NumberedRows(source=file.name, digest=digest, rows=rows)


def _lines(content: bytes) -> Iterator[tuple[int, Mapping[str, Any] | Unreadable]]:
    """Of JSON lines; split as bytes, because str.splitlines() also cuts within JSON texts."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _row(json.loads(line.decode()))
            except UnicodeDecodeError:
                yield number, Unreadable("is not UTF-8 text")
            except NOT_JSON:
                yield number, Unreadable("is not JSON")


def _listed(content: bytes, file: Path) -> tuple[tuple[int, Mapping[str, Any] | Unreadable], ...]:
    try:
        return tuple((number, _row(value)) for number, value in enumerate(json.loads(content.decode()), 1))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidData(
            f"{file.name} is not UTF-8 text.", f"Line {line} is the first.", "Save it as UTF-8."
        ) from error
    except NOT_JSON as error:
        raise InvalidData(
            f"{file.name} begins as a JSON list and is none.", f"{error}.", "Mend it, or write JSONL."
        ) from error


def _row(value: Any) -> Mapping[str, Any] | Unreadable:
    return value if isinstance(value, Mapping) else Unreadable("is not a JSON object")


def _from_objects(source: str, objects: Iterable[Any]) -> NumberedRows:
    rows = tuple((number, _row(value)) for number, value in enumerate(objects, 1))
    sha = hashlib.sha256()
    for _, value in rows:
        sha.update(json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass") + b"\n")
    return NumberedRows(source=source, digest=sha.hexdigest(), rows=rows)


def _from_parquet(file: Path) -> NumberedRows:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # an extra
    except ImportError as error:
        raise InvalidConfig(
            f"Reading {file.name} needs the package `pyarrow`.",
            f"{error}.",
            "pip install 'halteres[hub]', or convert it to JSONL.",
        ) from error
    try:
        objects: list[Any] = parquet.read_table(file).to_pylist()
    except Exception as error:  # any of the library's
        raise InvalidData(f"{file.name} cannot be read as Parquet.", f"{type(error).__name__}: {error}.") from error
    return _from_objects(file.name, objects)


def _from_hub(place: str, name: str, split: str) -> NumberedRows:
    try:
        datasets = importlib.import_module("datasets")  # an extra
    except ImportError as error:
        raise InvalidConfig(
            f"There is no file {place}; a data set of this name on the Hugging Face hub needs the package `datasets`.",
            f"{error}.",
            "pip install 'halteres[hub]', or name a file: prefs.jsonl",
        ) from error
    try:
        found = datasets.load_dataset(name, split=split)
    except Exception as error:  # any of a library's: no network, no such name or split
        raise InvalidConfig(
            f"There is no file {place}, and no such data set could be loaded from the Hugging Face hub.",
            f"{type(error).__name__}: {error}.",
            "See to the name, the split (OWNER/NAME:SPLIT) and the network, or name a file: prefs.jsonl",
        ) from error
    return _from_objects(place, found)
