"""Groups as one HTML page, which needs nothing else: a head, and a <details> for each with all its
sequences.

Its policy lets nothing be loaded or run; no character of a group is written unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from halteres.groups.group import BOUNDS, Part, ScoredGroup, counted, mean_of, number, read_groups

if TYPE_CHECKING:  # a user who names no tokenizer need not wait for its libraries
    from halteres.tokenizer import Tokenizer


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
    scores: str
    lengths: str
    sequences: str  # HTML; "" where no tokens are kept
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
        """The entry of a group, its sequences as HTML already."""
        rows = [_sequence(group, at, tokenizer) for at in range(group.num_sequences)]
        return cls(
            id=id,
            owner=owner,
            size=size or group.num_sequences,
            mean=group.mean,
            scores=group.listed_scores,
            lengths=group.lengths,
            sequences="".join(rows),
            standing=standing or Standing(),
        )


def render(entries: Sequence[Entry], source: str) -> str:
    """The whole page of these entries, the last one first, and where they come from."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    body = "".join(map(_entry, reversed(entries)))
    if not entries:
        body = '<p class="none">No group has come yet.</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light '
        'dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{counted(len(entries), 'group')}</title><style>{style}</style></head><body><main>"
        f"<header><h1>Groups</h1><p>{escape(source)} · written {when}</p><dl>{_facts(entries)}</dl>"
        f'<p class="legend">{_legend(entries)}</p></header>{body}</main></body></html>\n'
    )


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


def _facts(entries: Sequence[Entry]) -> str:
    means = [entry.mean for entry in entries if entry.mean is not None]
    facts = {
        "groups": len(entries),
        "sequences": sum(entry.size for entry in entries),
        "mean score": number(mean_of(means)),
    }
    if any(entry.standing.place for entry in entries):
        facts["set aside"] = sum(entry.standing.place == "set_aside" for entry in entries)
    return "".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts.items())


def _legend(entries: Sequence[Entry]) -> str:
    legend = (
        '<span class="context">context</span> is what the policy was given, '
        '<span class="sampled">sampled</span> what it wrote and learns from.'
    )
    if any("<mark " in entry.sequences for entry in entries):
        tints = [
            f'<mark class="p{at}">below {bound:.0%}</mark>' for at, bound in enumerate(BOUNDS, 1)
        ]
        legend += f" Tokens that it found unlikely: {' '.join(tints)}."
    return legend


def _entry(entry: Entry) -> str:
    standing = entry.standing
    place = "<span></span>"
    if standing.place:
        words = standing.place.replace("_", " ")
        place = f'<span class="place {standing.place}">{words}</span>'
    body = entry.sequences
    if not body:
        body = f'<p class="gone">{no_tokens(entry.size)}.</p>'
    if standing.why:
        body = f'<p class="why">{escape(standing.why)}</p>{body}'
    return (
        f'<details id="g{entry.id}"><summary><span class="id">{entry.id}</span>'
        f'<span class="owner">{escape(entry.owner)}</span>{place}'
        f'<span class="scores">{entry.scores}</span><span class="mean">{number(entry.mean)}</span>'
        f'<span class="quiet lengths">{escape(entry.lengths)}</span>'
        f'<span class="quiet">{escape(standing.version)}</span>'
        f'<time class="quiet">{standing.received}</time></summary>{body}</details>'
    )


def _sequence(group: ScoredGroup, at: int, tokenizer: Tokenizer | None) -> str:
    rank, parts = group.rank(at), group.parts(at, tokenizer)
    if any(part.label for part in parts):
        body = "".join(map(_message, parts))
    else:
        spans = [_span(group, at, part, tokenizer) for part in parts]
        body = f"<pre>{''.join(spans)}</pre>"
    figures = f"<small>{escape(group.figures(at))}</small>"
    head = f'<h2>{escape(group.score(at))} <span class="rank">{rank}</span> {figures}</h2>'
    return f'<section class="{rank}">{head}{body}</section>'


def _kind(part: Part) -> str:
    if part.is_sampled:
        return "sampled"
    return "context"


def _message(part: Part) -> str:
    text = f'<pre class="{_kind(part)}">{escape(part.text)}</pre>'
    return f'<div class="message"><b>{escape(part.label)}</b>{text}</div>'


def _span(group: ScoredGroup, at: int, part: Part, tokenizer: Tokenizer | None) -> str:
    """A part, its unlikely tokens tinted."""
    tinted = ""
    for stretch in group.stretches(at, part, tokenizer):
        text = escape(stretch.text)
        if stretch.level:
            text = f'<mark class="p{stretch.level}">{text}</mark>'
        tinted += text
    return f'<span class="{_kind(part)}">{tinted}</span>'
