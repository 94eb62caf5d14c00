"""Groups as one HTML file, which needs nothing else: a head, and a <details> for each with all its
sequences.

Its policy lets nothing be loaded or run; no character of a group is written unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from halteres.cli.groups import group as shown
from halteres.cli.groups.group import BOUNDS, Group, counted, mean_of, number
from halteres.cli.groups.view import unwritable
from halteres.clients.trajectories.groups import GroupInfo, Reader
from halteres.errors import NotReady
from halteres.files import replace_file

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One group on the page; its tokens are HTML already."""

    info: GroupInfo  # without its element
    owner: str
    mean: float | None
    scores: str
    lengths: str
    sequences: str  # HTML


class PageFile:
    """The HTML file: the newest groups, written anew after every look that brought a change."""

    def __init__(
        self,
        file: Path,
        tokenizer: Tokenizer | None,
        *,
        source: str,  # the server's address, without its token
        limit: int,
        written: Callable[[], object] = lambda: None,  # called once: the file is there
    ) -> None:
        self._file, self._tokenizer, self._source = file, tokenizer, source
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._written, self._is_there, self._is_written = written, False, False

    def show(self, group: Group) -> None:
        """One more; the oldest goes where there are enough."""
        entry = Entry(
            info=msgspec.structs.replace(group.info, element=msgspec.Raw(b"")),
            owner=group.owner,
            mean=group.mean,
            scores=group.scores,
            lengths=group.lengths,
            sequences="".join(
                _sequence(group, at, self._tokenizer) for at in range(group.num_sequences)
            ),
        )
        self._entries.append(entry)
        self._is_written = False

    def rest(self, reader: Reader) -> None:
        """Note where the groups are by now, and write."""
        if self._is_written and self._entries:
            after, many = min(entry.info.id for entry in self._entries) - 1, len(self._entries)
            try:
                now = {
                    info.id: info
                    for info in reader.page(after=after, limit=many, bodies=False).groups
                }
            except NotReady:
                return
            moved = [
                replace(entry, info=now.get(entry.info.id, entry.info)) for entry in self._entries
            ]
            self._is_written = moved == list(self._entries)
            self._entries = deque(moved, maxlen=self._entries.maxlen)
        if self._is_written:
            return
        try:
            replace_file(self._file, render(tuple(self._entries), self._source).encode())
        except OSError as error:
            raise unwritable(self._file, error) from error
        self._is_written = True
        if not self._is_there:
            self._is_there = True
            self._written()


def render(entries: Sequence[Entry], source: str) -> str:
    """The whole page of these entries, the oldest first, of the server at this address."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    means = [entry.mean for entry in entries if entry.mean is not None]
    facts = {
        "groups": len(entries),
        "sequences": sum(entry.info.size for entry in entries),
        "mean score": number(mean_of(means)),
        "set aside": sum(entry.info.place == "set_aside" for entry in entries),
    }
    terms = "".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts.items())
    tints = " ".join(
        f'<mark class="p{at}">below {bound:.0%}</mark>' for at, bound in enumerate(BOUNDS, 1)
    )
    unlikely = any("<mark " in entry.sequences for entry in entries)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light '
        'dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{counted(len(entries), 'group')}</title><style>{style}</style></head><body><main>"
        f"<header><h1>Groups</h1><p>{escape(source)} · written {when}</p><dl>{terms}</dl>"
        '<p class="legend"><span class="context">context</span> is what the policy was given, '
        '<span class="sampled">sampled</span> what it wrote and learns from.'
        + (f" Tokens that it found unlikely: {tints}." if unlikely else "")
        + "</p></header>"
        + ("" if entries else '<p class="none">No group has come yet.</p>')
        + "".join(map(_entry, reversed(entries)))
        + "</main></body></html>\n"
    )


def _entry(entry: Entry) -> str:
    info = entry.info
    why = f'<p class="why">{escape(shown.reason(info))}</p>' if info.why else ""
    gone = "" if entry.sequences else f'<p class="gone">{shown.no_tokens(info)}.</p>'
    return (
        f'<details id="g{info.id}"><summary><span class="id">{info.id}</span>'
        f'<span class="owner">{escape(entry.owner)}</span>'
        f'<span class="place {info.place}">{info.place.replace("_", " ")}</span>'
        f'<span class="scores">{entry.scores}</span><span class="mean">{number(entry.mean)}</span>'
        f'<span class="quiet lengths">{escape(entry.lengths)}</span>'
        f'<span class="quiet">{escape(shown.version(info))}</span>'
        "<time "
        f'class="quiet">{shown.clock(info.received_at)}</time></summary>{why}{gone}{entry.sequences}</details>'
    )


def _sequence(group: Group, at: int, tokenizer: Tokenizer | None) -> str:
    rank, parts, body = group.rank(at), group.parts(at, tokenizer), ""
    as_messages = any(part.label for part in parts)
    for part in parts:
        kind, text = "sampled" if part.is_sampled else "context", escape(part.text)
        if as_messages:
            body += (
                f'<div class="message"><b>{escape(part.label)}</b><pre '
                f'class="{kind}">{text}</pre></div>'
            )
            continue
        tinted = (
            f'<mark class="p{stretch.level}">{escape(stretch.text)}</mark>'
            if stretch.level
            else escape(stretch.text)
            for stretch in group.stretches(at, part, tokenizer)
        )
        body += f'<span class="{kind}">{"".join(tinted)}</span>'
    figures = f"<small>{escape(group.figures(at))}</small>"
    head = f'<h2>{escape(group.score(at))} <span class="rank">{rank}</span> {figures}</h2>'
    return (
        f'<section class="{rank}">{head}{body if as_messages else f"<pre>{body}</pre>"}</section>'
    )
