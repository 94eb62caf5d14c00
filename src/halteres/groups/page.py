"""Groups as one HTML file, which needs nothing else: the page's own list of groups, and all their
sequences as its data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.clients.trajectories.groups import harmless
from halteres.groups.group import Part, ScoredGroup, counted, mean_of, read_groups
from halteres.groups.rollout_rows import in_utf16
from halteres.standalone_page import standalone_page

if TYPE_CHECKING:  # a user who names no tokenizer need not wait for its libraries
    from halteres.tokenizer import Tokenizer

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a group is on a server, in words; of a group in a file nothing."""

    place: str = ""  # its code
    why: str = ""  # it was set aside, or what is wrong with it
    version: str = ""
    received: str = ""  # the hour of the day


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One group on the page."""

    id: int
    owner: str  # its environment
    size: int  # sequences
    mean: float | None
    spread: float | None  # standard deviation of the scores
    lengths: str
    prompt: str  # the context that all sequences begin with; "" where they differ
    sequences: list[Row]  # as dashboard/static/answers.js reads them; none where none are kept
    standing: Standing = Standing()

    @classmethod
    def of(
        cls,
        group: ScoredGroup,
        tokenizer: Tokenizer | None,
        *,
        id: int,
        owner: str,
        size: int | None = None,  # where the group has no tokens any more
        standing: Standing | None = None,
    ) -> Entry:
        """The entry of a group, its sequences in parts already."""
        sequences = [_sequence(group, at, tokenizer) for at in range(group.num_sequences)]
        return cls(
            id=id,
            owner=owner,
            size=size or group.num_sequences,
            mean=group.mean,
            spread=group.spread,
            lengths=group.lengths,
            prompt=_take_prompt(sequences),
            sequences=sequences,
            standing=standing or Standing(),
        )

    def row(self) -> Row:
        """What the page reads."""
        standing = self.standing
        row: Row = {
            "place": self.id,
            "label": str(self.id),
            "task": self.owner,
            "state": standing.place,
            "why": standing.why,
            "facts": [word for word in (self.lengths, standing.version, standing.received) if word],
            "prompt": self.prompt,
            "rollouts": self.sequences,
        }
        if self.mean is not None:
            row |= {"mean": self.mean, "spread": self.spread}
        if not self.sequences:
            row["note"] = no_tokens(self.size) + "."
        return row


def render(entries: Sequence[Entry], source: str) -> str:
    """The whole page of these entries, the last one first, and where they come from."""
    means = [entry.mean for entry in entries if entry.mean is not None]
    facts: Row = {
        "groups": len(entries),
        "sequences": sum(entry.size for entry in entries),
        "mean score": mean_of(means),
    }
    if any(entry.standing.place for entry in entries):
        facts["set aside"] = sum(entry.standing.place == "set_aside" for entry in entries)
    data = {
        "source": source,
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime()),
        "facts": facts,
        "groups": [entry.row() for entry in reversed(entries)],
    }
    return standalone_page("groups_file.js", data, title=counted(len(entries), "group"))


def page_of(file: Path, owner: str, tokenizer: Tokenizer | None) -> str:
    """The page of a file of groups, all of one environment."""
    entries = [
        Entry.of(group, tokenizer, id=number, owner=owner)
        for number, group in enumerate(read_groups(file), 1)
        if group is not None
    ]
    return render(entries, f"{owner}, {file.name}")


def no_tokens(size: int) -> str:
    """What stands in the place of a group's sequences."""
    if size == 1:
        return "1 sequence; no tokens are kept of it"
    return f"{size} sequences; no tokens are kept of them"


def _sequence(group: ScoredGroup, at: int, tokenizer: Tokenizer | None) -> Row:
    """One sequence as the page reads a rollout."""
    row: Row = {
        "score": group.score_of(at),
        "rank": group.rank(at),
        "tokens": len(group.tokens[at]),
        "figures": f"{group.num_sampled(at)} sampled",
        "parts": [_part(group, at, part, tokenizer) for part in group.parts(at, tokenizer)],
    }
    advantage = group.mean_advantage(at)
    if advantage is not None:
        row["advantage"] = advantage
    return row


def _part(group: ScoredGroup, at: int, part: Part, tokenizer: Tokenizer | None) -> Row:
    row: Row = {"text": part.text, "sampled": part.is_sampled}
    if part.label:
        row["label"] = part.label
    advantage = group.mean_advantage(at)
    if part.is_sampled and advantage is not None:
        row["advantage"] = advantage
    if not part.is_sampled or part.tokens is None or tokenizer is None:
        return row
    begin, end = part.tokens
    ids = group.tokens[at][begin:end]
    if not all(0 <= token < tokenizer.vocab_size for token in ids):
        return row
    texts = map(harmless, tokenizer.token_texts(ids, skip_special_tokens=False))
    row |= {"ids": ids, "lengths": in_utf16(part.text, [len(text) for text in texts])}
    logprobs = group.logprobs_of(at)
    if logprobs is not None:
        row["logprobs"] = [round(one, 4) for one in logprobs[begin:end]]
    return row


def _take_prompt(sequences: Sequence[Row]) -> str:
    """The first part of every sequence, which is taken out of them, where it is the same context
    for all.
    """
    firsts = [next(iter(row["parts"]), None) for row in sequences]
    if not firsts or firsts[0] is None:
        return ""
    first: Row = firsts[0]
    is_message = "label" in first
    if first["sampled"] or is_message or any(other != first for other in firsts):
        return ""
    for row in sequences:
        del row["parts"][0]
    return first["text"]
