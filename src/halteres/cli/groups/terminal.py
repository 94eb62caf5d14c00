"""Groups in a terminal: one block each, as it arrives.

A block is one line of facts, one of figures, then the best and the worst sequence; context is quiet, and sampled text
has a thick bar before it, so that it can be told apart without colours too. Markup in what a model wrote stays text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from halteres.cli.groups import texts
from halteres.cli.groups.texts import Part, counted, parts_of, shortened
from halteres.clients.trajectories.groups import Group, Reader

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

SHORT = 480  # characters of one part where not all is wanted
MOST_PARTS = 6  # parts of one sequence where not all is wanted: the last ones
MOST_SCORES = 16

STYLES = {"queued": "cyan", "buffered": "cyan", "out": "yellow", "delivered": "green", "set_aside": "bold red"}
CONTEXT_BAR, SAMPLED_BAR = ("  ┊ ", "dim"), ("  ┃ ", "bold green")


class Terminal:
    """Prints groups; `full`: every sequence, whole."""

    def __init__(self, console: Console, tokenizer: Tokenizer | None, *, full: bool) -> None:
        self._console, self._tokenizer, self._full = console, tokenizer, full

    def show(self, group: Group) -> None:
        """One block, and an empty line."""
        for line in self._lines(group):
            self._console.print(line, soft_wrap=True)
        self._console.print()

    def rest(self, reader: Reader) -> None:
        """Nothing more is to be done."""

    def _lines(self, group: Group) -> Iterator[Text]:
        yield heading(group)
        if group.info.why:
            yield Text(f"  {texts.reason(group.info)}", style="red" if group.info.place == "set_aside" else "yellow")
        if not group.info.has_tokens:
            yield Text(f"  {texts.gone(group.info)}", style="dim")
            return
        yield figures(group)
        for at in range(group.num_sequences) if self._full else group.extremes:
            yield Text(f"  {_name(group, at)}", style="bold")
            yield from self._texts(parts_of(group, at, self._tokenizer))

    def _texts(self, parts: Sequence[Part]) -> Iterator[Text]:
        if not self._full and len(parts) > MOST_PARTS:
            yield Text.assemble(CONTEXT_BAR, (f"… {counted(len(parts) - MOST_PARTS, 'earlier part')}", "dim"))
            parts = parts[-MOST_PARTS:]
        for part in parts:
            bar, style = SAMPLED_BAR if part.is_sampled else CONTEXT_BAR
            text = Text(f"{part.label}: " if part.label else "", style="" if part.is_sampled else "dim")
            text.append((part if self._full else shortened(part, SHORT)).text)
            for line in text.wrap(self._console, max(20, self._console.width - len(bar))):
                line.rstrip()
                yield Text.assemble((bar, style), line)


def heading(group: Group) -> Text:
    """Which group, whose, where, when, of which version."""
    info = group.info
    text = Text.assemble((f"group {info.id}", "bold"), "  ", texts.owner(group), "  ")
    text.append(info.place.replace("_", " "), STYLES.get(info.place, "dim"))
    text.append(f"  {texts.clock(info.received_at)}")
    text.append(f"  {texts.version(info)}" if info.policy_version else "", "dim")
    return text


def figures(group: Group) -> Text:
    """Scores and their mean, lengths."""
    scores = group.element.scores
    more = f" … ({len(scores)} in all)" if len(scores) > MOST_SCORES else ""
    shown = " ".join(f"{score:g}" for score in scores[:MOST_SCORES])
    mean, lengths = (texts.number(group.mean), "bold"), (f"  {texts.lengths(group)}", "dim")
    return Text.assemble(("  scores ", "dim"), shown, more, ("  mean ", "dim"), mean, lengths)


def _name(group: Group, at: int) -> str:
    rank = texts.rank(group, at)
    alike = ", as all" if group.extremes == (at,) and group.num_sequences > 1 and group.element.scores else ""
    return f"{rank + ': ' if rank else ''}sequence {at}, {texts.score(group, at)}{alike}"
