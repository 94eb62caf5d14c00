"""Preference rows as what the trainer computes on, and the account of what was cut or dropped.

Owns: tokens and rows of each comparison; counts of truncation, told once and stored with the model.
Never: drops silently.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from halteres.rewards.preferences import MOST_ROWS, Preferences
from halteres.rewards.template import ScoringTemplate
from halteres.rewards.torch.losses import RankedTexts
from halteres.rewards.torch.model import rows_of
from halteres.rewards.torch.network import ScoringNetwork
from halteres.rewards.torch.shared_prefix import SharedRow
from halteres.rewards.training_config import TiePolicy
from halteres.rewards.training_plan import taught_rows
from halteres.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One comparison, ready to be computed."""

    rows: tuple[SharedRow, ...]  # their texts are those of the comparison, in order
    ranked: RankedTexts
    kind: str | None
    objective: str | None
    num_tokens: int  # useful ones, as TRL counts: each text with its prompt, and states once

    @property
    def length(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.tokens_L) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationReport:
    """What the longest text allowed has cost."""

    rows_cut: int = 0
    rows_dropped: int = 0
    ties_dropped: int = 0
    tokens_lost: int = 0
    first_rows: tuple[int, ...] = ()  # numbers of the first rows cut or dropped for their length

    def sentences(self, max_length: int | None) -> list[str]:
        """For people; none where nothing was lost."""
        found: list[str] = []
        where = f" (first rows: {', '.join(map(str, self.first_rows))})" if self.first_rows else ""
        if self.rows_cut:
            found.append(f"{self.rows_cut} rows cut to {max_length} tokens, {self.tokens_lost} tokens lost{where}.")
        if self.rows_dropped:
            found.append(f"{self.rows_dropped} rows dropped, longer than {max_length} tokens{where}.")
        if self.ties_dropped:
            found.append(f"{self.ties_dropped} rows dropped: ties alone, or of weight 0.")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A data set, ready to be computed."""

    examples: tuple[Example, ...]
    report: TruncationReport

    def facts(self, preferences: Preferences) -> dict[str, object]:
        """What is stored with the model about its data."""
        return {
            "source": preferences.source,
            "digest": preferences.digest,
            "rows": len(self.examples),
            "in_steps": any(one.ranked.labels for one in self.examples),
            "truncation": asdict(self.report),
        }


def prepare(
    preferences: Preferences,
    template: ScoringTemplate,
    tokenizer: Tokenizer,
    network: ScoringNetwork,
    *,
    tie_policy: TiePolicy,
    most: int,
    share: bool = True,
) -> Examples:
    """Tokenise every row and lay it out; `most` bounds the tokens of a shared row.

    Raises:
        InvalidData: a row cannot be rendered or is too long where that is an error; no row teaches, or is left.
    """
    found: list[Example] = []
    lengths: list[int] = []
    cut: list[int] = []
    lost = dropped = 0
    taught = taught_rows(preferences, tie_policy)
    for comparison in taught:
        rendered = template.render_comparison(tokenizer, comparison)
        lengths.append(max(len(one.tokens) + template.num_removed(one) for one in rendered))
        ranked = RankedTexts(
            ranks=comparison.ranks, labels=comparison.labels, margin=comparison.margin, weight=comparison.weight
        )
        if any(one.num_lost for one in rendered):
            cut.append(comparison.row)
            if template.truncation in ("drop", "error"):
                dropped += 1
                continue
            lost += sum(one.num_lost for one in rendered)
        texts = [one.tokens for one in rendered]
        rows = tuple(rows_of(texts, network, most if share else 0))
        count = len(texts[-1]) if comparison.labels else sum(map(len, texts))  # the last state holds the others
        kind, objective = comparison.kind, comparison.objective
        found.append(Example(rows=rows, ranked=ranked, kind=kind, objective=objective, num_tokens=count))
    if cut and template.truncation == "error":
        raise template.too_long(preferences.source, cut, lengths)
    if not found:
        raise template.none_left(preferences.source, lengths)
    report = TruncationReport(
        rows_cut=len(cut) - dropped,
        rows_dropped=dropped,
        ties_dropped=len(preferences.comparisons) - len(taught),
        tokens_lost=lost,
        first_rows=tuple(cut[:MOST_ROWS]),
    )
    return Examples(examples=tuple(found), report=report)
