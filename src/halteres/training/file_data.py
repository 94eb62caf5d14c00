"""The data of a training on a file: its rows as tokens, those that are held out, and which rows
make the batch of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from halteres.config.file_training import FileTraining
from halteres.errors import InvalidConfig, InvalidData
from halteres.rewards.preference_files import NumberedRows, read_rows
from halteres.rewards.preferences import IDENTICAL, read_preferences, row_numbers
from halteres.tokenizer import Tokenizer
from halteres.training.conversations import SFT_EXAMPLE, TokenRow, read_conversations, read_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class FileData:
    """Checked rows, as tokens."""

    train: tuple[TokenRow, ...]
    held_out: tuple[TokenRow, ...]  # none where nothing is held out
    digest: str  # SHA-256 of both files' rows
    num_dropped: int = 0  # rows that were too long
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of the rows that are trained on, answers and context."""
        return sum(row.num_tokens for row in self.train)

    @property
    def num_answers(self) -> int:
        """Of these, tokens of answers."""
        return sum(row.num_answers for row in self.train)

    def steps(self, training: FileTraining) -> int:
        """Optimiser steps of so many epochs."""
        return max(1, ceil(training.epochs * len(self.train) / training.batch_size))

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[TokenRow, ...]:
        """The rows of a step, counted from 1. Every epoch has an order of its own, drawn from the
        seed; a batch may end one and begin the next.
        """
        first = (step - 1) * batch_size
        count = len(self.train)
        rows: list[TokenRow] = []
        for place in range(first, first + batch_size):
            epoch, at = divmod(place, count)
            rows.append(self.train[_order(count, seed, epoch)[at]])
        return tuple(rows)


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of the rows in an epoch. Every version of numpy draws the same."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return tuple(np.argsort(generator.random(count), kind="stable").tolist())


def read_data(training: FileTraining, tokenizer: Tokenizer, longest: int) -> FileData:
    """The data of a training, checked.

    Args:
        training: its files, and what becomes of rows that cannot be trained on.
        tokenizer: of the base model.
        longest: tokens at most of one sequence.

    Raises:
        NotFound, InvalidConfig: there is no such file, or it cannot be read here; or nothing is
            left on one side.
        InvalidData: some rows cannot be used: the message names them by number.
    """
    rows, digest, warnings = _rows(training, training.data, tokenizer)
    held_out: tuple[TokenRow, ...] = ()
    if training.eval_data is not None:
        held_out, other_digest, other_warnings = _rows(training, training.eval_data, tokenizer)
        digest = hashlib.sha256(f"{digest}:{other_digest}".encode()).hexdigest()
        warnings += other_warnings
        shared = {row.key for row in rows}
        twice = [row.number for row in held_out if row.key in shared]
        if twice:
            warnings += (
                f"{training.eval_data} {row_numbers(twice)}: the prompt is also in "
                f"{training.data}.",
            )
    num_rows = len(rows) + len(held_out)
    rows = _short_enough(rows, training.data, training, longest)
    held_out = _short_enough(held_out, str(training.eval_data), training, longest)
    num_dropped = num_rows - len(rows) - len(held_out)
    if not rows:
        raise InvalidConfig(
            f"{training.data} has no row to train on.",
            f"All are longer than {longest} tokens.",
            "Raise trainer.max_token_trainer_length, as far as the model's context goes.",
        )
    if training.eval_data is None and training.hold_out:
        rows, held_out = _split(rows, training)
    if training.data and num_dropped:
        warnings += (f"{num_dropped} rows are longer than {longest} tokens, and are left out.",)
    return FileData(
        train=rows,
        held_out=held_out,
        digest=digest,
        num_dropped=num_dropped,
        warnings=warnings,
    )


def _rows(
    training: FileTraining, place: str, tokenizer: Tokenizer
) -> tuple[tuple[TokenRow, ...], str, tuple[str, ...]]:
    """The rows of one file, its digest, and what is odd about it."""
    if training.method == "dpo":
        on_identical = "error"
        if training.on_identical == "drop":
            on_identical = "drop"
        try:
            found = read_preferences(place, on_identical=on_identical)
        except InvalidData as error:
            if IDENTICAL in str(error):
                error.next = "Mend them, or leave such pairs out: data.on_identical=drop."
            raise
        rows = read_pairs(found.source, found.comparisons, tokenizer)
        return rows, found.digest, found.warnings
    numbered: NumberedRows = read_rows(place, what="training data", example=SFT_EXAMPLE)
    return read_conversations(numbered, tokenizer), numbered.digest, ()


def _short_enough(
    rows: Sequence[TokenRow], source: str, training: FileTraining, longest: int
) -> tuple[TokenRow, ...]:
    """The rows without those that are too long. InvalidData where there are some and none may be
    left out.
    """
    long = [row for row in rows if row.longest > longest]
    if long and training.too_long == "refuse":
        numbers = sorted({row.number for row in long})
        most = max(row.longest for row in long)
        raise InvalidData(
            f"{source} {row_numbers(numbers)}: longer than {longest} tokens; the longest has "
            f"{most}.",
            "Cut off, an answer would have no end.",
            "Raise trainer.max_token_trainer_length as far as the model's context goes, or leave "
            "such rows out: data.too_long=drop.",
            rows=numbers[:10],
            longest=most,
        )
    return tuple(row for row in rows if row.longest <= longest)


def _split(
    rows: Sequence[TokenRow], training: FileTraining
) -> tuple[tuple[TokenRow, ...], tuple[TokenRow, ...]]:
    """Rows to train on and held-out ones; no prompt is on both sides. Ordered by a hash, most
    prompts keep their side when rows are added.
    """
    keys = sorted({row.key for row in rows}, key=lambda key: hashlib.sha256(key.encode()).digest())
    wanted = min(training.most_held_out, max(1, round(training.hold_out * len(rows))))
    by_key: dict[str, int] = {}
    for row in rows:
        by_key[row.key] = by_key.get(row.key, 0) + 1
    chosen: set[str] = set()
    number = 0
    for key in keys[:-1]:
        if number >= wanted:
            break
        chosen.add(key)
        number += by_key[key]
    if not chosen:
        raise InvalidConfig(
            f"Nothing can be held out of {training.data}.",
            "All its rows have one prompt.",
            "Name a file of held-out rows (data.eval_data), or hold nothing out: data.hold_out=0.",
        )
    held_out = tuple(row for row in rows if row.key in chosen)
    return tuple(row for row in rows if row.key not in chosen), held_out


def check_digest(data: FileData, training: FileTraining) -> None:
    """InvalidData where the files are no longer those that the run began with."""
    if training.digest and data.digest != training.digest:
        raise InvalidData(
            f"The rows of {training.data} have changed since the run began.",
            "Which rows make the batch of a step depends on all of them.",
            "Put the file back as it was, or start a new run.",
        )


def with_digest(training: FileTraining, data: FileData) -> FileTraining:
    """The training with the digest of its rows."""
    return training.model_copy(update={"digest": data.digest})
