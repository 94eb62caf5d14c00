"""Which batch a deterministic environment fills: one after the other, each by one policy version alone.

Owns: the batch that is being filled, what it still lacks, the policy version that samples it.
Never: draws, sends, asks a server.

Elsewhere the trajectory server says how many groups it has room for, and whatever weights are newest sample them: which
those are depends on what took how long. Here the batch after k others is sampled by the weights with which the trainer
asked for the batch after k - lag others (before the first: by those of its first question), and holds the first groups
in the order of draws. It is begun when that question was asked, so that rollouts go on during `lag` optimiser steps.

The count is this environment's own, from the first batch that was not delivered when it began. Started again, it draws
that batch from its beginning: what the server has already counts once, by its key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class BatchPlan:
    """The batch that is being filled, by the only environment of its run."""

    lag: int  # batches that the weights may lag behind
    batch_size: int  # rollouts
    group_size: int  # rollouts
    step: int  # whole batches before it
    version: int | None = None  # of the weights that sample it; None: the trainer has not asked with them yet
    filled: int = 0  # rollouts that it has

    @property
    def asked_for(self) -> int:
        """The batches before the one with whose question the trainer names the weights."""
        return self.step - self.lag

    @property
    def room(self) -> int:
        """Groups that may be under way; 0 until the weights are there."""
        return 0 if self.version is None else -(-(self.batch_size - self.filled) // self.group_size)

    def name_weights(self, asked_for: int, version: int | None) -> None:
        """What the trainer asked with, as far as it is known."""
        if asked_for == self.asked_for:
            self.version = version

    def takes(self, step: int, num_rollouts: int) -> bool:
        """Whether a group that was drawn for the batch after `step` others has a place in it: not where an item gave
        more groups than one, or a larger one than is lacking."""
        return step == self.step and self.filled + num_rollouts <= self.batch_size

    def is_completed_by(self, num_rollouts: int) -> bool:
        """Whether so many rollouts more make the batch whole: then nothing else is under way."""
        return self.filled + num_rollouts >= self.batch_size

    def add(self, num_rollouts: int) -> None:
        """A group has its place; a batch that is whole makes room for the next."""
        if self.is_completed_by(num_rollouts):
            self.step, self.filled, self.version = self.step + 1, 0, None
        else:
            self.filled += num_rollouts
