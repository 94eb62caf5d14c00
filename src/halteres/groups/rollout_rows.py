"""Rows of a run's rollouts/step_N.jsonl, as both of their writers make them: the environment, and
the trainer where the environment writes none.

A row is one group: its task, its prompt, what was sampled, how that was scored, and why it was
dropped where it was. Tokens come in plain lists: `ids` and `logprobs` of what was sampled, and so
trained on, `prompt_ids` and `observation_ids` of what was given, and so masked. `lengths` says how
many characters of the text next to it each of the `ids` adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from halteres.observe.metrics import LONGEST_ROW, append_line, encoded_row, read_rows
from halteres.tokenizer import Tokenizer

DIGITS = 3
"""Decimals of a log-probability: a probability is right to a thousandth of itself."""

TOKENS: Final = ("ids", "logprobs", "lengths", "observation_ids")
TEXTS: Final = ("text", "turns")

Row = dict[str, Any]


def group_id(tokens: Sequence[Sequence[int]], scores: Sequence[float]) -> str:
    """What a group is known by in every file of a run: a digest of its tokens and scores, which the
    environment that made it and the trainer that was given it both have.
    """
    content = [[list(row) for row in tokens], [float(score) for score in scores]]
    encoded = msgspec.msgpack.encode(content, enc_hook=lambda number: number.item())
    return hashlib.sha256(encoded).hexdigest()[:16]


def sampled_fields(
    ids: Sequence[int], logprobs: Sequence[float] | None, tokenizer: Tokenizer
) -> Row:
    """The fields of a stretch that was sampled; `logprobs`: in nats, None where there are none.

    Returns:
        `ids`, `logprobs` and `lengths`, one of each per token.
    """
    fields: Row = {"ids": list(ids)}
    if logprobs is not None:
        # the sum makes -0.0 a 0.0
        fields["logprobs"] = [round(float(one), DIGITS) + 0.0 for one in logprobs]
    fields["lengths"] = [len(text) for text in tokenizer.token_texts(ids)]
    return fields


def in_utf16(text: str, lengths: Sequence[int]) -> list[int]:
    """Lengths in characters as lengths in units of UTF-16, in which JavaScript counts."""
    if text.isascii() or max(text) <= "\uffff":
        return list(lengths)
    counted: list[int] = []
    begin = 0
    for length in lengths:
        counted.append(len(text[begin : begin + length].encode("utf-16-le")) // 2)
        begin += length
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """How many groups are written with their tokens."""

    megabytes: float = 50.0  # of a run's rows, from which on they have no tokens
    groups: int = -1  # of each step; -1: all


@dataclass(slots=True)
class _Step:
    """What is known of one step's file."""

    # groups that another process wrote, before this one began: number, and id where they have one
    earlier: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    num_with_tokens: int = 0  # groups


class RolloutFiles:
    """Appends rows to the files of one run."""

    def __init__(self, folder: Path, limits: TokenLimits) -> None:
        self._folder, self._limits = folder, limits
        self._steps: dict[int, _Step] = {}
        self._num_bytes: int | None = None  # of all rows; None: not looked at yet

    def append(self, step: int, row: Row) -> None:
        """Append a group's row, unless an earlier process of the run wrote the same group. A row
        of no completions that says why its group was dropped belongs to one that is there.

        Of a row that would go beyond the limits, tokens are left out; of a dropped group's, texts
        too. `left_out` then says what, `left_out_by` the setting that decided it.

        Raises:
            WriteFailed: the disk is full, or the folder is missing or closed to us.
        """
        file = self._folder / f"step_{step}.jsonl"
        known = self._steps.get(step)
        if known is None:
            known = self._steps[step] = _step_of(file)
        says_why = not row["completions"] and "dropped" in row
        if _key(row) in known.earlier and not says_why:
            return
        row = self._within_limits(row, known)
        encoded = encoded_row(row)
        if len(encoded) > LONGEST_ROW:
            row = _without(row, TOKENS, "the longest row")
            encoded = encoded_row(row)
        append_line(file, encoded)
        known.num_with_tokens += has_tokens(row)
        self._num_bytes = self._bytes_on_disk() + len(encoded)

    def _within_limits(self, row: Row, known: _Step) -> Row:
        limits = self._limits
        if not row["completions"]:
            return row
        if self._bytes_on_disk() >= limits.megabytes * 1e6:
            left_out = TOKENS
            if row.get("dropped"):
                left_out = (*TOKENS, *TEXTS)
            return _without(row, left_out, "env.rollout_tokens_mb")
        if 0 <= limits.groups <= known.num_with_tokens:
            return _without(row, TOKENS, "env.rollout_token_groups")
        return row

    def _bytes_on_disk(self) -> int:
        if self._num_bytes is None:
            files = self._folder.glob("step_*.jsonl")
            self._num_bytes = sum(file.stat().st_size for file in files)
        return self._num_bytes


def has_tokens(row: Mapping[str, Any]) -> bool:
    """Whether a row has the tokens of what was sampled."""
    return any(
        "ids" in part for one in row.get("completions", ()) for part in (one, *one.get("turns", ()))
    )


def _step_of(file: Path) -> _Step:
    rows = [row for row in read_rows(file) if "group" in row]
    return _Step({_key(row) for row in rows}, sum(map(has_tokens, rows)))


def _key(row: Mapping[str, Any]) -> tuple[int, str]:
    """What a process that draws a step again writes the same: two groups of one task may have the
    same tokens and scores, and so one id.
    """
    return row["group"], row.get("id", "")


def _without(row: Row, names: Sequence[str], by: str) -> Row:
    """The row without these fields, which says so."""
    kept = cast("Row", _pruned(row, {*names, "prompt_ids"}))
    what = ["tokens"]
    if "text" in names:
        what.append("texts")
    return {**kept, "left_out": what, "left_out_by": by}


def _pruned(value: Any, names: set[str]) -> Any:
    """A row without these fields, in its completions and their turns too."""
    if isinstance(value, list):
        return [_pruned(one, names) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("Row", value)
    kept: Row = {}
    for name, one in fields.items():
        if name in names:
            continue
        # a task's own fields may be called anything
        if name in ("completions", "turns"):
            one = _pruned(one, names)
        kept[name] = one
    return kept
