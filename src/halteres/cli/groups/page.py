"""Groups as one HTML file, which needs nothing else.

The page is a head with the curve of the mean scores, and a <details> for each group with all its sequences, the newest
first. Its policy lets nothing be loaded or run; no character of a group is written unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from halteres.cli.groups import texts
from halteres.cli.groups.texts import BOUNDS, Part, Stretch, counted, parts_of, stretches
from halteres.clients.trajectories.groups import Group, GroupInfo

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

CURVE = (640, 56)  # width and height of the head's curve
BAR = (5, 2, 22)  # width, gap and height of a score's bar
MOST_BARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One group on the page; its tokens are HTML already."""

    info: GroupInfo  # without its element
    owner: str
    mean: float | None
    scores: tuple[float, ...]
    lengths: str
    sequences: str  # HTML

    @classmethod
    def of(cls, group: Group, tokenizer: Tokenizer | None) -> Entry:
        """Everything that is shown of a group."""
        return cls(
            info=without_element(group.info),
            owner=texts.owner(group),
            mean=group.mean,
            scores=tuple(group.element.scores),
            lengths=texts.lengths(group),
            sequences="".join(_sequence(group, at, tokenizer) for at in range(group.num_sequences)),
        )

    def moved(self, info: GroupInfo) -> Entry:
        """The same group, where it is now."""
        return replace(self, info=without_element(info))


def without_element(info: GroupInfo) -> GroupInfo:
    """What is known of it."""
    return msgspec.structs.replace(info, element=msgspec.Raw(b""))


def render(entries: Sequence[Entry], *, source: str, written_at: float) -> str:
    """The whole page.

    Args:
        entries: the oldest first.
        source: the server's address, without its token.
        written_at: unix s.
    """
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    body = _head(entries, source, written_at) + "".join(map(_entry, reversed(entries)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{counted(len(entries), 'group')}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


@cache
def _style() -> str:
    return Path(__file__).with_name("page.css").read_text()


def _head(entries: Sequence[Entry], source: str, written_at: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_at))
    return (
        f"<header><h1>Groups</h1><p>{escape(source)} · written {when}</p><dl>{_facts(entries)}</dl>{_curve(entries)}"
        '<p class="legend"><span class="context">context</span> is what the policy was given, '
        f'<span class="sampled">sampled</span> what it wrote and learns from.{_surprises(entries)}</p></header>'
        + ("" if entries else '<p class="none">No group has come yet.</p>')
    )


def _surprises(entries: Iterable[Entry]) -> str:
    """What the tints mean, where there are any."""
    if not any("<mark " in entry.sequences for entry in entries):
        return ""
    tints = " ".join(f'<mark class="p{at}">below {bound:.0%}</mark>' for at, bound in enumerate(BOUNDS, 1))
    return f" Tokens that it found unlikely: {tints}."


def _facts(entries: Sequence[Entry]) -> str:
    means = _means(entries)
    mean = texts.number(sum(each / len(means) for each in means) if means else None)
    aside = sum(entry.info.place == "set_aside" for entry in entries)
    sequences = sum(entry.info.size for entry in entries)
    facts = [("groups", len(entries)), ("sequences", sequences), ("mean score", mean), ("set aside", aside)]
    return "".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts)


def _means(entries: Iterable[Entry]) -> list[float]:
    return [entry.mean for entry in entries if entry.mean is not None]


def _curve(entries: Sequence[Entry]) -> str:
    """The mean score of each group, the oldest at the left."""
    means = _means(entries)
    if len(means) < 2:
        return ""
    width, height = CURVE
    low, high = min(means), max(means)
    points = [
        f"{at * width / (len(means) - 1):.1f},{height - 3 - _share(mean, low, high) * (height - 6):.1f}"
        for at, mean in enumerate(means)
    ]
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="mean score of each group"><polyline points="{" ".join(points)}"/></svg>'
        f"<figcaption>mean score of each group, {texts.number(low)} to {texts.number(high)}</figcaption></figure>"
    )


def _entry(entry: Entry) -> str:
    info = entry.info
    why = f'<p class="why">{escape(texts.reason(info))}</p>' if info.why else ""
    gone = "" if entry.sequences else f'<p class="gone">{texts.gone(info)}.</p>'
    return (
        f'<details id="g{info.id}"><summary><span class="id">{info.id}</span>'
        f'<span class="owner">{escape(entry.owner)}</span>'
        f'<span class="place {info.place}">{escape(texts.place(info))}</span>'
        f'<span class="bars">{_bars(entry.scores)}</span><span class="mean">{texts.number(entry.mean)}</span>'
        f'<span class="quiet lengths">{escape(entry.lengths)}</span>'
        f'<span class="quiet">{escape(texts.version(info))}</span>'
        f'<time class="quiet">{texts.clock(info.received_at)}</time></summary>{why}{gone}{entry.sequences}</details>'
    )


def _bars(scores: Sequence[float]) -> str:
    """One bar per sequence, as high as its score between the group's worst and best."""
    if not scores:
        return ""
    shown, (width, gap, height) = scores[:MOST_BARS], BAR
    low, high = min(scores), max(scores)
    room = len(shown) * (width + gap)
    return (
        f'<svg width="{room}" height="{height}" viewBox="0 0 {room} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(", ".join(f"{score:g}" for score in shown))}">'
        + "".join(_bar(at, _share(score, low, high)) for at, score in enumerate(shown))
        + "</svg>"
    )


def _share(value: float, low: float, high: float) -> float:
    """How far up it is between the two, 0 to 1; in the middle where they are the same."""
    span = high / 2 - low / 2  # halves: the difference itself may be too large for a float
    return (value / 2 - low / 2) / span if span else 0.5


def _bar(at: int, share: float) -> str:
    width, gap, most = BAR
    height = 3 + share * (most - 3)
    kind = "high" if share > 2 / 3 else "low" if share < 1 / 3 else "middle"
    x, y = at * (width + gap), most - height
    return f'<rect class="{kind}" x="{x}" y="{y:.1f}" width="{width}" height="{height:.1f}" rx="1"/>'


def _sequence(group: Group, at: int, tokenizer: Tokenizer | None) -> str:
    rank = texts.rank(group, at)
    parts = parts_of(group, at, tokenizer)
    figures = escape(texts.figures(group, at))
    head = f'<h2>{escape(texts.score(group, at))} <span class="rank">{rank}</span> <small>{figures}</small></h2>'
    as_messages = any(part.label for part in parts)
    spans = "" if as_messages else "".join(_span(part, stretches(group, at, part, tokenizer)) for part in parts)
    body = "".join(map(_message, parts)) if as_messages else f"<pre>{spans}</pre>"
    return f'<section class="{rank}">{head}{body}</section>'


def _message(part: Part) -> str:
    kind = "sampled" if part.is_sampled else "context"
    return f'<div class="message"><b>{escape(part.label)}</b><pre class="{kind}">{escape(part.text)}</pre></div>'


def _span(part: Part, found: Iterable[Stretch]) -> str:
    kind = "sampled" if part.is_sampled else "context"
    text = "".join(
        f'<mark class="p{stretch.level}">{escape(stretch.text)}</mark>' if stretch.level else escape(stretch.text)
        for stretch in found
    )
    return f'<span class="{kind}">{text}</span>'
