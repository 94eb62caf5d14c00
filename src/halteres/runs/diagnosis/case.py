"""The case: a run's settings as far as its remedies need them, and the calls an agent can make about it.

Owns: the arguments of those calls, with this run's id and values computed from its settings.
Never: makes a call; judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from halteres.config.settings import TrainerSettings
from halteres.next_step import NextStep, Remedy
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.outcome import chosen

Changes = Mapping[str, Any]
"""section.field -> new value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run under observation."""

    run_id: str
    environment: str
    trainer: TrainerSettings
    env: Mapping[str, Any] = field(default_factory=dict)  # the environment's effective settings
    given: Changes = field(default_factory=dict)  # what the run was started with, as `changes` of a new one
    folder: Path | None = None  # the run's; its evaluations' samples lie there
    success_threshold: float = 0.0  # a score above it is a success

    @classmethod
    def of(cls, run: RunDirectory, environment: str) -> Case:
        """Read it from the run's files."""
        settings = run.settings()
        return cls(
            run_id=run.run_id,
            environment=environment,
            trainer=settings.trainer,
            env={**run.environment_config(), **settings.env},
            given=chosen(run),
            folder=run.path,
            success_threshold=settings.run.success_threshold,
        )

    def logs(self, role: str) -> NextStep:
        """Read a log."""
        return NextStep("rl_get_logs", {"run_id": self.run_id, "role": role})

    def rollouts(self, which: Literal["best", "worst"]) -> NextStep:
        """Read rollouts."""
        return NextStep("rl_get_rollouts", {"run_id": self.run_id, "which": which})

    def results(self) -> NextStep:
        """See what was reached."""
        return NextStep("rl_get_results", {"run_id": self.run_id})

    def stop(self, mode: Literal["now", "after_step"] = "now") -> NextStep:
        """Stop it."""
        return NextStep("rl_stop_training", {"run_id": self.run_id, **({} if mode == "now" else {"mode": mode})})

    def resume(self, changes: Changes) -> NextStep:
        """Go on from its newest checkpoint, once it has ended."""
        return NextStep("rl_start_training", {"resume_from": self.run_id, "changes": changes})

    def go_on_with(self, changes: Changes) -> tuple[NextStep, NextStep]:
        """End it with a checkpoint, and go on from that with other settings."""
        return self.stop(), self.resume(changes)

    def begin_anew(self, changes: Changes) -> NextStep:
        """Start again from the base model, with what this run was started with and other settings."""
        return NextStep("rl_start_training", {"environment": self.environment, "changes": {**self.given, **changes}})

    def slower(self) -> Changes:
        """Half the learning rate."""
        return {"trainer.learning_rate": _rounded(self.trainer.learning_rate / 2)}

    def spoilt(self, best: float) -> Remedy:
        """The remedy of a policy that has lost most of what it scored: its checkpoints have lost it too."""
        gentler = {"trainer.learning_rate": _rounded(self.trainer.learning_rate / 4)}
        words = f"the mean reward was {best:.3g} and is lost, updates are too large."
        return Remedy((self.stop(), self.begin_anew(gentler)), words)

    def unscored(self) -> Remedy:
        """The remedy where no answer ever scored: before anything is spent on it, the scorer is looked at."""
        words = "would the scorer know a right answer? If so, easier tasks, or"
        return Remedy((self.rollouts("worst"),), words, self.go_on_with(self.larger_groups()))

    def faster(self) -> Changes:
        """Twice the learning rate."""
        return {"trainer.learning_rate": _rounded(min(1.0, self.trainer.learning_rate * 2))}

    def larger_groups(self) -> Changes:
        """Twice as many rollouts of a task, in batches of whole groups."""
        group = 2 * max(1, self.number("group_size") or 4)
        batch = self.number("batch_size") or 0
        whole = -(-batch // group) * group
        return {"env.group_size": group, **({"env.batch_size": whole} if whole != batch else {})}

    def longer_answers(self) -> Changes:
        """Room for answers of twice the length, wherever a limit may cut them."""
        tokens, total = self.number("max_new_tokens"), self.number("max_token_length")
        changes: dict[str, Any] = {"env.max_new_tokens": 2 * tokens} if tokens else {}
        if total:
            total += tokens or total
            changes["env.max_token_length"] = total
        if total and total > self.trainer.max_token_trainer_length:
            changes["trainer.max_token_trainer_length"] = total
        return changes

    @property
    def groups_per_batch(self) -> int | None:
        """Groups in one batch."""
        batch, group = self.number("batch_size"), self.number("group_size")
        return batch // group if batch and group else None

    def number(self, name: str) -> int | None:
        """A positive whole number among the environment's settings."""
        value = self.env.get(name)
        return value if isinstance(value, int) and value > 0 else None


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
