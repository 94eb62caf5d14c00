"""Adapters of several snapshots side by side, so that their rows share one step.

Owns: copies of the weights of snapshots that decode together, padded to one rank; which rows are multiplied with them
in one batched matmul, and which with their own adapter's.
Never: trains; keeps a copy of a snapshot that has no row.
Promise: a row has the bits that it has by itself. On a CPU both ways add up the same products one after the other
(`matmul.reduced`), and padding adds zeros.

S slots of snapshots, M rows of each (padding among them), R = parts * padded rank; N rows of a step, J of one snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.cache import round_up
from halteres.engine.torch.lora import Adaptation, Adaptations, Lora
from halteres.engine.torch.matmul import LEAST_COLUMNS, SEQUENTIAL, linear, reduced, stackable
from halteres.engine.torch.model import BaseModel, Projection

ROWS_PER_CALL = 64
"""What the calls for one adapter cost in all, in rows of a batched matmul."""

ROW_STEP, SLOT_STEP = 4, 4
"""Rows of a batched matmul, and slots, are multiples of these."""

LEAST_ROWS = 8
"""Of a matmul of its own: with fewer than 4 rows kernels change, and with them bits."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """One projection's weights, slot by slot; zeros where a rank is lower, or an adapter leaves it alone."""

    a_SRD: Tensor
    b_SER: Tensor  # times the scale

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.a_SRD.nbytes + self.b_SER.nbytes

    def fill(self, slot: int, lora: Lora | None, rank: int) -> None:
        """Copy an adapter into a slot, each part's padded to this rank."""
        self.a_SRD[slot] = 0
        self.b_SER[slot] = 0
        for i, (rows, columns) in enumerate(lora.blocks if lora is not None else ()):
            assert lora is not None  # noqa: S101 - for the type checker
            own = slice(i * rank, i * rank + columns.stop - columns.start)
            self.a_SRD[slot, own] = lora.a_RD[columns]
            self.b_SER[slot, rows, own] = lora.scaled_b_ER[rows, columns]


class Mixture:
    """The snapshots that decode together."""

    def __init__(self, base: BaseModel, most_bytes: int) -> None:
        self._base, self._most_bytes = base, most_bytes
        self._members: frozenset[Snapshot] = frozenset()
        self._slots: dict[Snapshot, int] = {}
        self._stacks: dict[Projection, _Stack] = {}
        self._rank = 0

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def hold(self, snapshots: Collection[Snapshot]) -> None:
        """These decode together from now on; copies of others' weights go, those of new ones are made."""
        if self._members == (members := frozenset(snapshots)):
            return
        self._members = members
        fit = [one for one in dict.fromkeys(snapshots) if _rank(one) and _inner(one) <= SEQUENTIAL]
        if len(members) < 2 or not stackable(self._base.embedding_VD):
            fit = []
        self._slots = {one: slot for one, slot in self._slots.items() if one in fit}
        rank = round_up(max(map(_rank, fit), default=0), LEAST_COLUMNS)
        new = any(projection not in self._stacks for one in fit for projection in one.weights)
        if new or rank > self._rank or not len(fit) <= self._capacity <= 4 * round_up(len(fit), SLOT_STEP):
            self._begin_anew(fit, rank)
        vacant = sorted(set(range(self._capacity)) - set(self._slots.values()))
        for one, slot in zip([one for one in fit if one not in self._slots], vacant, strict=False):
            self._slots[one] = slot
            for projection, stack in self._stacks.items():
                stack.fill(slot, one.weights.get(projection), self._rank)

    def adaptations(self, owners: Sequence[Snapshot], rows_each: int, num_rows: int) -> Adaptations:
        """What is added to so many rows, of which each of `owners` has so many; the rest is padding.

        Args:
            owners: as the rows lie; a snapshot may come again. `hold` has heard of them.
            rows_each: rows of each.
            num_rows: padding among them.
        """
        if len(set(owners)) == 1:
            return owners[0].weights
        rows: dict[Snapshot, list[int]] = {}
        for i, owner in enumerate(owners):
            rows.setdefault(owner, []).append(i)
        each = np.arange(rows_each)
        rows_J = {
            owner: (np.array(own)[:, None] * rows_each + each).reshape(-1)
            for owner, own in rows.items()
            if owner.weights
        }
        stacked = self._worth_stacking(rows_J)
        places = {self._slots[owner]: rows_J[owner] for owner in stacked}
        plan = _Plan.of(places, num_rows, self._base.device) if places else None
        alone = [(one.weights, _Alone.of(own, self._base.device)) for one, own in rows_J.items() if one not in stacked]
        return _Mixed(self._stacks, plan, alone)

    def _worth_stacking(self, rows_J: Mapping[Snapshot, np.ndarray]) -> set[Snapshot]:
        """Those of which a batched matmul is least work: all are padded to as many rows as the largest of them has."""
        held = sorted((one for one in rows_J if one in self._slots), key=lambda one: len(rows_J[one]))
        counts = [len(rows_J[one]) for one in held]
        costs = [
            (stop * counts[stop - 1] if stop else 0) + sum(counts[stop:]) + ROWS_PER_CALL * (len(counts) - stop)
            for stop in range(len(counts) + 1)
        ]
        return set(held[: costs.index(min(costs))])

    @property
    def _capacity(self) -> int:
        return next((stack.a_SRD.shape[0] for stack in self._stacks.values()), 0)

    def _begin_anew(self, fit: Sequence[Snapshot], rank: int) -> None:
        """Vacant slots for these, as many as there is memory for."""
        self._slots, self._stacks, self._rank = {}, {}, rank
        projections = {projection: lora.a_RD for one in fit for projection, lora in one.weights.items()}
        numbers = sum(len(p.parts) * rank * (p.inputs + p.weight_ED.shape[0]) for p in projections)
        slots = min(round_up(len(fit), SLOT_STEP), self._most_bytes // (4 * numbers or 1))
        if slots < 1:
            return
        for projection, like in projections.items():
            inner = len(projection.parts) * rank
            self._stacks[projection] = _Stack(
                like.new_empty((slots, inner, projection.inputs)),
                like.new_empty((slots, projection.weight_ED.shape[0], inner)),
            )


def _rank(snapshot: Snapshot) -> int:
    return 0 if snapshot.layout is None else snapshot.layout.config.rank


def _inner(snapshot: Snapshot) -> int:
    """Inputs of the widest B, padded: sums over them have to be of products one after the other."""
    rank = round_up(_rank(snapshot), LEAST_COLUMNS)
    return rank * max((len(projection.parts) for projection in snapshot.weights), default=1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows the slots multiply."""

    shape: tuple[int, int]  # S, M
    taken_I: Tensor  # of every place the row that it takes; padding takes the first
    found_N: Tensor  # of every row its place; behind the last lies a row of zeros, for rows that have none

    @classmethod
    def of(cls, places: Mapping[int, np.ndarray], num_rows: int, device: torch.device) -> _Plan:
        """Rows by slot."""
        slots, most = max(places) + 1, round_up(max(map(len, places.values())), ROW_STEP)
        taken_SM, found_N = np.zeros((slots, most), np.int64), np.full(num_rows, slots * most)
        for slot, rows_J in places.items():
            taken_SM[slot, : len(rows_J)] = rows_J
            found_N[rows_J] = slot * most + np.arange(len(rows_J))
        taken_I, found_N = torch.from_numpy(taken_SM.reshape(-1)), torch.from_numpy(found_N)
        return cls((slots, most), taken_I.to(device), found_N.to(device))

    def add(self, y_NE: Tensor, x_ND: Tensor, stack: _Stack) -> None:
        """What the slots make of their rows."""
        slots, most = self.shape
        x_SMD = x_ND.index_select(0, self.taken_I).view(slots, most, -1)
        h_SMR = torch.bmm(x_SMD, stack.a_SRD[:slots].transpose(1, 2))
        out_IE = y_NE.new_empty((slots * most + 1, y_NE.shape[1]))
        out_IE[-1] = 0
        torch.bmm(h_SMR, stack.b_SER[:slots].transpose(1, 2), out=out_IE[:-1].view(slots, most, -1))
        y_NE.add_(out_IE.index_select(0, self.found_N))


@dataclass(frozen=True, slots=True)
class _Alone:
    """Rows that are multiplied with one adapter."""

    rows_J: Tensor
    padded_J: Tensor  # the same rows, and the first again

    @classmethod
    def of(cls, rows_J: np.ndarray, device: torch.device) -> _Alone:
        """At least as many as keep their bits."""
        padded_J = np.pad(rows_J, (0, -len(rows_J) % LEAST_ROWS), constant_values=rows_J[0])
        return cls(torch.from_numpy(rows_J).to(device), torch.from_numpy(padded_J).to(device))

    def add(self, y_NE: Tensor, x_ND: Tensor, lora: Lora) -> None:
        """What the adapter makes of its rows."""
        h_JR = reduced(x_ND.index_select(0, self.padded_J), lora.a_RD)
        y_NE.index_add_(0, self.rows_J, linear(h_JR, lora.scaled_b_ER)[: len(self.rows_J)])


@dataclass(frozen=True, slots=True)
class _Mixed:
    """See `lora.Adaptations`."""

    stacks: Mapping[Projection, _Stack]
    plan: _Plan | None
    alone: Sequence[tuple[Mapping[Projection, Lora], _Alone]]

    def get(self, projection: Projection, /) -> Adaptation | None:
        """See `lora.Adaptations`."""
        stack = self.stacks.get(projection) if self.plan is not None else None
        alone = [(weights[projection], rows) for weights, rows in self.alone if projection in weights]
        return _MixedProjection(self.plan, stack, alone) if stack is not None or alone else None


@dataclass(frozen=True, slots=True)
class _MixedProjection:
    """See `lora.Adaptation`; in sampling alone."""

    plan: _Plan | None
    stack: _Stack | None
    alone: Sequence[tuple[Lora, _Alone]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None: nothing is trained."""
        return ()

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        """See `lora.Adaptation`."""
        if self.plan is not None and self.stack is not None:
            self.plan.add(y_NE, x_ND, self.stack)
        for lora, rows in self.alone:
            rows.add(y_NE, x_ND, lora)
        return x_ND

    def gradients(self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None) -> tuple[Tensor, ...]:
        """None: sampling has no backward."""
        raise NotImplementedError
