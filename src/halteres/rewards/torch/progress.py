"""What a training shows and measures while it goes on: TRL's metrics, and a bar or plain lines.

Owns: the metrics of an interval; how they are shown.
Never: decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from halteres.rewards.torch.examples import Example
from halteres.rewards.torch.losses import pairs_of


@dataclass(slots=True)
class Interval:
    """Sums over the steps since the last report; its metrics have TRL's names, extremes are true ones."""

    losses: list[float] = field(default_factory=list)  # of each step
    scores: list[float] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)  # better minus worse, of each pair; of a state, towards its label
    leads_of: dict[str, list[float]] = field(default_factory=dict)  # ... by kind, and by objective: objective/NAME
    num_ties: int = 0
    num_pairs: int = 0
    useful_tokens: int = 0
    computed_tokens: int = 0  # with padding
    real_tokens: int = 0  # without
    began_cpu_s: float = field(default_factory=time.process_time)

    def add(self, examples: Sequence[Example], scores: Sequence[float], computed: int) -> None:
        """A forward pass."""
        values = np.asarray(scores)
        pairs = pairs_of([one.ranked for one in examples])
        for better, worse, c, tied in zip(pairs.better, pairs.worse, pairs.comparison, pairs.tied, strict=True):
            self.num_pairs += 1
            self.num_ties += tied
            if not tied:
                self._add_lead(examples[c], float(values[better] - values[worse]))
        states = [(one, k) for one in examples for k in range(len(one.ranked.ranks))]
        for score, (one, k) in zip(scores, states, strict=True):
            if one.ranked.labels:
                self._add_lead(one, score if one.ranked.labels[k] else -score)
        self.scores += scores
        self.useful_tokens += sum(one.num_tokens for one in examples)
        self.real_tokens += sum(len(row.tokens_L) for one in examples for row in one.rows)
        self.computed_tokens += computed

    def _add_lead(self, example: Example, lead: float) -> None:
        self.leads.append(lead)
        for name in (example.kind, example.objective and f"objective/{example.objective}"):
            if name:
                self.leads_of.setdefault(name, []).append(lead)

    def metrics(self) -> dict[str, float]:
        """Of the interval."""
        leads = np.array(self.leads)
        seconds = time.process_time() - self.began_cpu_s
        kinds = sorted(self.leads_of)
        return {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "min_reward": min(self.scores),
            "mean_reward": float(np.mean(self.scores)),
            "max_reward": max(self.scores),
            **({"accuracy": float((leads > 0).mean()), "margin": float(leads.mean())} if len(leads) else {}),
            **{f"accuracy/{kind}": float((np.array(self.leads_of[kind]) > 0).mean()) for kind in kinds},
            **{f"margin/{kind}": float(np.mean(self.leads_of[kind])) for kind in kinds},
            "tie_rate": self.num_ties / max(1, self.num_pairs),
            "padding_share": 1 - self.real_tokens / self.computed_tokens,
            "tokens_per_cpu_s": self.useful_tokens / seconds if seconds > 0 else 0.0,
        }


class Progress:
    """A bar in a terminal, a line per report elsewhere, nothing where it is not wanted."""

    def __init__(self, total: int, *, shown: bool) -> None:
        from rich.console import Console

        self._total, self._shown = total, shown
        self._console = Console(stderr=True)
        self._bar = None

    @contextmanager
    def __call__(self) -> Iterator[Progress]:
        """The bar is shown as long as the block."""
        if not (self._shown and self._console.is_terminal):
            yield self
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Bar(*columns, console=self._console) as bar:
            self._bar = bar
            self._task = bar.add_task("", total=self._total)
            yield self
        self._bar = None

    def note(self, text: str) -> None:
        """One sentence that stays."""
        if self._shown:
            self._console.print(text, highlight=False, markup=False)

    def step(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """A step is done; metrics where it is time to report."""
        if not self._shown:
            return
        line = _line(step, self._total, metrics) if metrics is not None else None
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)  # None leaves it as it is
        elif line is not None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    names = ("loss", "accuracy", "margin", "eval_accuracy", "tokens_per_cpu_s")
    figures = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
    return f"step {step}/{total}: {figures}"
