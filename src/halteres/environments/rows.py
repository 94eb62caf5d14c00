"""Questions whose answers are numbers, read from a file or the hub."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from halteres.documents import DocumentError, read_json_lines
from halteres.environments.answers import number_in
from halteres.errors import InvalidConfig, InvalidData

HELD_OUT_SHARE = 0.1
"""Of a single file's questions, chosen by hash: a question keeps its side, whatever rows are
added.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question."""

    question: str
    answer: str  # a number, e.g. "1,000"


def load_rows(source: str | Path) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows to train on and the held-out ones.

    Args:
        source: a `.jsonl` file, of whose questions a tenth is held out; a folder with `train.jsonl`
            and `test.jsonl`; or a data set on the hub with the splits `train` and `test` of its
            configuration `main`. A row is `{"question": "...", "answer": "..."}`; of an answer with
            `####` the number after it counts.

    Raises:
        InvalidConfig: no such file; the hub cannot be asked.
        InvalidData: a row that is none, with its place; no row to train on.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        train, held_out = _read(path / "train.jsonl"), _read(path / "test.jsonl")
    elif path.suffix == ".jsonl" or path.is_absolute():
        train, held_out = list[Row](), list[Row]()
        for row in _read(path):
            first_byte = hashlib.sha256(row.question.encode()).digest()[0]
            (held_out if first_byte < HELD_OUT_SHARE * 256 else train).append(row)
    else:
        train, held_out = _from_hub(str(source))
    if not train:
        raise InvalidData(f"{source} holds no question to train on.")
    return train, held_out


def _read(file: Path) -> list[Row]:
    try:
        return [_row(fields, f"{file}:{number}") for number, fields in read_json_lines(file)]
    except OSError as error:
        raise InvalidConfig(
            f"The questions in {file.absolute()} cannot be read.",
            f"{error.strerror or error}.",
            "Give the whole path of a JSONL file, or of a folder with train.jsonl and test.jsonl.",
        ) from error
    except DocumentError as error:
        raise InvalidData(
            f"{file.absolute()} is no file of JSON lines.", f"{error}.", next=_FORM
        ) from error


_FORM = 'A row is {"question": "...", "answer": "7"}; the number may stand after "####".'

_LARGEST_EXPONENT = 100  # of ten: a longer number stays as Python writes it


def _row(fields: Any, place: str) -> Row:
    """A row of a data set."""
    found = fields if isinstance(fields, Mapping) else {}
    question, answer = (
        found.get("question"),
        _decimal(found.get("answer", "")).rpartition("####")[2].strip(),
    )
    if not isinstance(question, str) or number_in(answer) is None:
        raise InvalidData(f"{place} is no question with a number as its answer.", next=_FORM)
    return Row(question=question, answer=answer)


def _decimal(answer: Any) -> str:
    """An answer as text. A number is written in digits, as people read it, where they are few."""
    if not isinstance(answer, float) or not math.isfinite(answer):
        return str(answer)
    digits = Decimal(repr(answer))
    return f"{digits:f}" if abs(digits.adjusted()) <= _LARGEST_EXPONENT else str(answer)


def _from_hub(name: str) -> tuple[list[Row], list[Row]]:
    try:
        datasets = importlib.import_module("datasets")  # an extra
    except ImportError as error:
        raise InvalidConfig(
            f"The data set {name} on the Hugging Face hub needs the package `datasets`.",
            f"{error}.",
            "pip install 'halteres[hub]', or name a local JSONL file: --set "
            "env.dataset=/path/to/questions.jsonl",
        ) from error
    try:
        splits: Mapping[str, Iterable[Any]] = datasets.load_dataset(name, "main")
    except Exception as error:
        # any of a library's: no network, no such name, another configuration
        raise InvalidConfig(
            f"The data set {name} could not be loaded from the Hugging Face hub.",
            f"{type(error).__name__}: {error}.",
            "See to the network, or name a local JSONL file: --set "
            "env.dataset=/path/to/questions.jsonl",
        ) from error
    train, held_out = (
        [
            _row(fields, f"{name} {split}, row {number}")
            for number, fields in enumerate(splits[split])
        ]
        for split in ("train", "test")
    )
    return train, held_out
