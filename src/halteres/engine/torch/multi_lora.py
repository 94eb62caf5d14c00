"""Adapters of several snapshots side by side, so that their rows share one step.

Copies of the weights of snapshots that decode together lie in stacks of like rank; rows are
multiplied with a stack in one batched matmul, or with their own adapter. A row has the bits that it
has by itself: on a CPU both ways add up the same products in the same order
(`projections.stackable`), and padding adds zeros.

S slots of snapshots, M rows of each (padding among them); N rows of a step, J of one snapshot; P
outputs of a part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halteres.engine.torch.adapter import Lora, Snapshot
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.projections import (
    LEAST_ROWS,
    SEQUENTIAL,
    Adaptations,
    Projection,
    round_up,
    stackable,
)

RANKS = (16, 32, 64, 128, SEQUENTIAL)
"""What ranks are padded to: with fewer than 16 outputs bits change, and sums over more than 192 are
split.
"""

ROWS_PER_CALL = 64  # what the calls for one adapter cost in all, in rows of a batched matmul
ROW_STEP, SLOT_STEP = 4, 4  # rows of a batched matmul, and slots, are multiples of these


class MultiLora:
    """The snapshots that decode together."""

    def __init__(self, base: BaseModel, most_bytes: int) -> None:
        self._base, self._most_bytes = base, most_bytes
        self._members: frozenset[Snapshot] = frozenset()
        self._stacks: dict[int, _Stack] = {}  # by rank
        self._newest: tuple[object, Adaptations] | None = None

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def hold(self, snapshots: Iterable[Snapshot]) -> None:
        """These decode together from now on; copies of others' weights go, those of new ones are
        made.
        """
        if self._members == (members := frozenset(snapshots)):
            return
        self._members, self._newest = members, None
        ranks: dict[int, list[Snapshot]] = {}
        if len(members) > 1 and stackable(self._base.embedding_VD):
            for one in sorted(members, key=lambda one: one.version):
                if one.layout is not None and one.layout.config.rank <= RANKS[-1]:
                    ranks.setdefault(
                        next(rank for rank in RANKS if one.layout.config.rank <= rank), []
                    ).append(one)
        self._stacks = {rank: stack for rank, stack in self._stacks.items() if rank in ranks}
        for rank, fit in ranks.items():
            if rank not in self._stacks or not self._stacks[rank].suits(fit):
                self._stacks.pop(rank, None)
                self._stacks[rank] = _Stack(rank, fit, self._most_bytes - self.nbytes)
            self._stacks[rank].hold(fit)

    def adaptations(self, owners: Sequence[Snapshot], rows_each: int, num_rows: int) -> Adaptations:
        """What is added to the rows of a step.

        `owners` are the snapshots of the rows as they lie, `rows_each` of each one; what is behind
        them, up to `num_rows`, is padding. `hold` has heard of them.
        """
        if owners.count(owners[0]) == len(owners):
            return owners[0].weights
        question = [*owners], rows_each, num_rows
        if self._newest is not None and self._newest[0] == question:
            return self._newest[1]
        places: dict[Snapshot, list[int]] = {}
        for place, owner in enumerate(owners):
            places.setdefault(owner, []).append(place)
        alone = {
            owner: np.add.outer(np.array(own) * rows_each, np.arange(rows_each)).reshape(-1)
            for owner, own in places.items()
            if owner.weights
        }
        device, stacked = self._base.device, list[_StackedRows]()
        for stack in self._stacks.values():
            chosen = _worth_stacking(
                {one: len(own) for one, own in alone.items() if one in stack.slots}
            )
            if chosen:
                slots = {stack.slots[one]: alone.pop(one) for one in chosen}
                stacked.append(_StackedRows(stack, slots, num_rows, device))
        mixed = _mixed(stacked, [_OwnRows(one.weights, own, device) for one, own in alone.items()])
        self._newest = question, mixed
        return mixed


def _worth_stacking(counts: Mapping[Snapshot, int]) -> list[Snapshot]:
    """Those of which a batched matmul is least work: all are padded to as many rows as the largest
    of them has.
    """
    found = sorted(counts, key=lambda one: counts[one])
    rows = [counts[one] for one in found]
    costs = [
        (stop * rows[stop - 1] if stop else 0)
        + sum(rows[stop:])
        + ROWS_PER_CALL * (len(rows) - stop)
        for stop in range(len(rows) + 1)
    ]
    return found[: costs.index(min(costs))]


class _Stack:
    """Weights of snapshots whose ranks are padded to one, slot by slot."""

    def __init__(self, rank: int, fit: Sequence[Snapshot], most_bytes: int) -> None:
        """Vacant slots for these, as far as there is memory."""
        self._rank = rank
        self.slots: dict[Snapshot, int] = {}
        self.weights: dict[Projection, _Weights] = {}
        projections = {
            projection: lora.read_a_RD for one in fit for projection, lora in one.weights.items()
        }
        bytes_each = sum(
            rank * (len(p.parts) * p.inputs + p.weight_ED.shape[0]) * like.element_size()
            for p, like in projections.items()
        )
        self._count = count = max(0, min(round_up(len(fit), SLOT_STEP), most_bytes // bytes_each))
        for projection, like in projections.items() if count else ():
            parts, columns = projection.parts, rank * len(projection.parts)
            self.weights[projection] = _Weights(
                a_SDR=like.new_zeros((count, projection.inputs, columns)),
                b_SRP=tuple(
                    like.new_zeros((count, rank, part.stop - part.start)) for part in parts
                ),
                parts=tuple(
                    (slice(i * rank, (i + 1) * rank), slice(part.start, part.stop))
                    for i, part in enumerate(parts)
                ),
            )

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(
            one.a_SDR.nbytes + sum(b_SRP.nbytes for b_SRP in one.b_SRP)
            for one in self.weights.values()
        )

    def suits(self, fit: Collection[Snapshot]) -> bool:
        """It has slots for them, and not far more."""
        known = all(projection in self.weights for one in fit for projection in one.weights)
        return known and len(fit) <= self._count <= 4 * round_up(len(fit), SLOT_STEP)

    def hold(self, fit: Sequence[Snapshot]) -> None:
        """Have these in slots, the first of them if there are too many."""
        self.slots = {one: slot for one, slot in self.slots.items() if one in fit}
        vacant = sorted(set(range(self._count)) - set(self.slots.values()))
        for one, slot in zip([one for one in fit if one not in self.slots], vacant, strict=False):
            for projection, weights in self.weights.items():
                weights.fill(slot, one.weights.get(projection), self._rank)
            self.slots[one] = slot


@dataclass(frozen=True, slots=True)
class _Weights:
    """One projection's; zeros where a rank is lower, or an adapter leaves the projection alone.

    By part: a block-diagonal B, as a single adapter has it, would be read from main memory with all
    its zeros.
    """

    a_SDR: Tensor  # of all parts, side by side
    b_SRP: tuple[Tensor, ...]  # by part, times the scale
    parts: tuple[tuple[slice, slice], ...]  # inner columns and outputs of each

    def fill(self, slot: int, lora: Lora | None, rank: int) -> None:
        """Copy an adapter into a slot."""
        self.a_SDR[slot] = 0
        for i, b_SRP in enumerate(self.b_SRP):
            b_SRP[slot] = 0
            if lora is not None:
                outputs, columns = lora.blocks[i]
                own = columns.stop - columns.start
                self.a_SDR[slot, :, i * rank : i * rank + own] = lora.read_a_RD[columns].t()
                b_SRP[slot, :own] = lora.scaled_b_ER[outputs, columns].t()


class _StackedRows:
    """Rows, by slot, that are multiplied with the slots of a stack."""

    def __init__(
        self, stack: _Stack, rows: Mapping[int, np.ndarray], num_rows: int, device: torch.device
    ) -> None:
        self.stack = stack
        self._shape = slots, most = max(rows) + 1, round_up(max(map(len, rows.values())), ROW_STEP)
        taken_SM, found_N = np.zeros((slots, most), np.int64), np.full(num_rows, slots * most)
        for slot, rows_J in rows.items():
            taken_SM[slot, : len(rows_J)] = rows_J
            found_N[rows_J] = slot * most + np.arange(len(rows_J))
        # Of every place the row that it takes; padding takes the first. Of every row its place;
        # behind the last lies a row of zeros, for rows that have none.
        self._taken_I = torch.from_numpy(taken_SM.reshape(-1)).to(device)
        self._found_N = torch.from_numpy(found_N).to(device)

    def add(self, y_NE: Tensor, x_ND: Tensor, weights: _Weights) -> None:
        slots, most = self._shape
        x_SMD = x_ND.index_select(0, self._taken_I).view(slots, most, -1)
        h_SMR = torch.bmm(x_SMD, weights.a_SDR[:slots])
        for b_SRP, (inner, outputs) in zip(weights.b_SRP, weights.parts, strict=True):
            out_IP = y_NE.new_empty((slots * most + 1, b_SRP.shape[2]))
            out_IP[-1] = 0
            torch.bmm(h_SMR[:, :, inner], b_SRP[:slots], out=out_IP[:-1].view(slots, most, -1))
            y_NE[:, outputs].add_(out_IP.index_select(0, self._found_N))


class _OwnRows:
    """Rows that are multiplied with one adapter, padded to as many as keep their bits."""

    def __init__(
        self, weights: Mapping[Projection, Lora], rows_J: np.ndarray, device: torch.device
    ) -> None:
        self.weights, self._rows_J = weights, torch.from_numpy(rows_J).to(device)
        padded_J = np.pad(rows_J, (0, -len(rows_J) % LEAST_ROWS), constant_values=rows_J[0])
        self._padded_J = torch.from_numpy(padded_J).to(device)

    def add(self, y_NE: Tensor, x_ND: Tensor, lora: Lora) -> None:
        y_JE = y_NE.index_select(0, self._padded_J)
        lora.add_to(y_JE, x_ND.index_select(0, self._padded_J))
        y_NE.index_copy_(0, self._rows_J, y_JE[: len(self._rows_J)])


def _mixed(
    stacked: Sequence[_StackedRows], alone: Sequence[_OwnRows]
) -> dict[Projection, _MixedProjection]:
    found: dict[Projection, _MixedProjection] = {}
    for rows in stacked:
        for projection, weights in rows.stack.weights.items():
            found.setdefault(projection, _MixedProjection([], [])).stacked.append((rows, weights))
    for own_rows in alone:
        for projection, lora in own_rows.weights.items():
            found.setdefault(projection, _MixedProjection([], [])).alone.append((own_rows, lora))
    return found


@dataclass(frozen=True, slots=True)
class _MixedProjection:
    """See `Adaptation`; for sampling alone, which has no backward."""

    stacked: list[tuple[_StackedRows, _Weights]]
    alone: list[tuple[_OwnRows, Lora]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        for rows, weights in self.stacked:
            rows.add(y_NE, x_ND, weights)
        for own_rows, lora in self.alone:
            own_rows.add(y_NE, x_ND, lora)
        return x_ND

    def gradients(
        self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError
