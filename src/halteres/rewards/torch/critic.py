"""A critic: the value of what stands before each token, by a head on a base model or a reward
model, with a LoRA of its own; trained by clipped regression on returns.

    L = ½ mean over tokens of max( (V − R)², (clip(V, V_old − c, V_old + c) − R)² )

Source: PPO, arXiv 1707.06347, as arXiv 2203.02155 uses it on language models. On a base model the
head begins with zeros, so that every value is 0 until the first update.

Shapes: M tokens that have a value, of all sequences.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from halteres.clients.critic import (
    PASS_TOKENS,
    STATE,
    Rows,
    Targets,
    Updated,
    UpdateRequest,
    step_name,
)
from halteres.engine.folders import copy_linked, recover, written
from halteres.engine.shapes import CONFIG
from halteres.engine.torch.micro_batches import plan
from halteres.errors import Conflict, HalteresError, InvalidData
from halteres.models.shape import is_classifier
from halteres.rewards.torch.network import ScoringNetwork, base_config, open_network
from halteres.rewards.training_plan import LoraSettings

OPTIMISER = "critic.pt"  # in a state: optimiser, count of updates, the last one's answer
BETAS, EPSILON = (0.9, 0.95), 1e-8
GRADIENT_NORM = 1.0  # largest, of one optimiser step


class LossNotFinite(HalteresError):
    """A value, the loss of the values or its gradient is NaN or infinite."""

    code, status = "nan_loss", 422

    def __init__(self, what: str) -> None:
        why = "Its weights have diverged, or a return is huge."
        next = "Resume from the last checkpoint with a lower trainer.critic_learning_rate."
        super().__init__(what, why, next)


def value_loss(
    values_M: Tensor, sampled_M: Tensor, returns_M: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether the clip raised it; both of shape (M,).

    Args:
        values_M: of the present weights.
        sampled_M: of the weights that the batch was sampled with.
        returns_M: what values are to become.
        clip: how far a value may move from the sampled one; further, its loss no longer falls.
    """
    clipped_M = values_M.clamp(sampled_M - clip, sampled_M + clip)
    plain_M, bounded_M = (values_M - returns_M) ** 2, (clipped_M - returns_M) ** 2
    return 0.5 * torch.maximum(plain_M, bounded_M), bounded_M > plain_M


@dataclass(slots=True)
class Critic:
    """Weights, optimiser and the count of updates; `place`: the folder of its states."""

    network: ScoringNetwork
    place: Path
    step: int = 0  # updates so far
    last: Updated | None = None  # the answer to the newest of them
    max_tokens_per_forward: int = PASS_TOKENS
    _optimiser: torch.optim.Adam = field(init=False)

    def __post_init__(self) -> None:
        parameters = list(self.network.trained().values())
        self._optimiser = torch.optim.Adam(parameters, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)

    @classmethod
    def open(cls, folder: Path, place: Path, *, rank: int, seed: int, step: int = 0) -> Critic:
        """The critic whose states are in `place`, or a new one.

        Args:
            folder: of a base model or a reward model, which it began from.
            place: of its states; the newest is gone on with.
            rank: of its LoRA; a reward model that is an adapter goes on with its own.
            seed: of the first weights.
            step: updates that count as done where there is no state.

        Raises:
            NotFound, InvalidConfig, InvalidData: the folder holds no such model, or the state is
                damaged or of another one.
        """
        network = open_network(
            folder,
            padding=0,  # no value sees what comes after its token
            lora_settings=LoraSettings(r=rank, lora_alpha=2 * rank),
            seed=seed,
            device="cpu",
        )
        network.model.eval()  # it has no dropout, also where it learns
        assert network.adapter is not None  # noqa: S101 - for the type checker
        if not (folder / CONFIG).is_file() and not is_classifier(base_config(folder)):
            nn.init.zeros_(network.adapter.head.weight)
        critic = cls(network, place, step)
        place.mkdir(parents=True, exist_ok=True)
        recover(place)  # what a killed process was just writing
        if (place / STATE).is_dir():
            critic._load(place / STATE)
        return critic

    def values(self, step: int, sequences: Sequence[Rows]) -> list[list[float]]:
        """The values of these places.

        Raises:
            Conflict: it has done more or fewer updates.
            LossNotFinite: a value is NaN or infinite, which no JSON says.
        """
        if step != self.step:
            raise _out_of_step(self.step, step)
        found: list[list[float]] = [[] for _ in sequences]
        with torch.inference_mode():
            for part in self._parts(sequences):
                values = self._values([sequences[i] for i in part]).tolist()
                if not all(map(math.isfinite, values)):
                    raise LossNotFinite("A value of the critic is not finite.")
                for i in part:
                    count = len(sequences[i].rows)
                    found[i], values = values[:count], values[count:]
        return found

    def update(self, request: UpdateRequest) -> Updated:
        """Take the optimiser steps of a batch, and write the state that they lead to.

        An update that was done before is not done again: its answer is given again.

        Raises:
            Conflict: it is not the next one.
            LossNotFinite: nothing is written.
            ServerError: the state cannot be written.
        """
        if self.last is not None and request.step == self.step:
            return self.last
        if request.step != self.step + 1:
            raise _out_of_step(self.step + 1, request.step)
        for group in self._optimiser.param_groups:
            group["lr"] = request.learning_rate
        steps = [
            self._optimise([request.sequences[i] for i in one], request.clip)
            for one in request.minibatches
        ]
        updated = Updated(step=request.step)
        if steps:
            loss, clipped, norm = (fmean(column) for column in zip(*steps, strict=True))
            updated = Updated(step=request.step, loss=loss, clipped=clipped, gradient_norm=norm)
        self.step, self.last = request.step, updated
        self._write()
        return updated

    def save(self, step: int) -> None:
        """Keep the state after this many updates. Conflict where it has done another number,
        ServerError where it cannot be written.
        """
        if step != self.step:
            raise _out_of_step(self.step, step)
        if not (self.place / STATE).is_dir():
            self._write()
        copy_linked(self.place / STATE, self.place / step_name(step))

    def _optimise(self, targets: Sequence[Targets], clip: float) -> tuple[float, float, float]:
        """One optimiser step: the loss before it, the share of tokens whose loss the clip raised,
        and the norm of the gradient.
        """
        self._optimiser.zero_grad(set_to_none=True)
        count = sum(len(one.rows) for one in targets)
        total = raised = 0.0
        for part in self._parts(targets):
            own = [targets[i] for i in part]
            sampled_M = torch.tensor([v for one in own for v in one.values])
            returns_M = torch.tensor([r for one in own for r in one.returns])
            loss_M, raised_M = value_loss(self._values(own), sampled_M, returns_M, clip)
            loss = loss_M.sum() / count
            loss.backward()
            total += loss.item()
            raised += raised_M.sum().item() / count
        norm = nn.utils.clip_grad_norm_(self.network.trained().values(), GRADIENT_NORM).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            raise LossNotFinite(f"The critic's loss is {total:g} and its gradient's norm {norm:g}.")
        self._optimiser.step()
        return total, raised, norm

    def _parts(self, sequences: Sequence[Rows]) -> list[tuple[int, ...]]:
        texts = [np.array(one.tokens, np.int64) for one in sequences]
        return plan(texts, self.max_tokens_per_forward, self.network.shares_prefixes)

    def _values(self, sequences: Sequence[Rows]) -> Tensor:
        """Shape (M,), sequence after sequence."""
        texts = [np.array(one.tokens, np.int64) for one in sequences]
        return self.network.outputs_at(texts, [one.rows for one in sequences]).squeeze(-1)

    def _write(self) -> None:
        state = {
            "step": self.step,
            "last": None if self.last is None else msgspec.structs.asdict(self.last),
            "optimiser": self._optimiser.state_dict(),
        }
        content = io.BytesIO()
        torch.save(state, content)
        with written(self.place / STATE) as folder:
            self.network.save(folder)
            (folder / OPTIMISER).write_bytes(content.getvalue())

    def _load(self, folder: Path) -> None:
        try:
            state: dict[str, Any] = torch.load(
                folder / OPTIMISER, weights_only=True, map_location="cpu"
            )
            self.network.load_weights(folder)
            self._optimiser.load_state_dict(state["optimiser"])
            self.step = state["step"]
            if state["last"] is not None:
                self.last = msgspec.convert(state["last"], Updated)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.PickleError) as error:
            raise InvalidData(
                f"The critic's state in {folder} cannot be used.",
                f"{type(error).__name__}: {error}.",
                "Resume the run from its last checkpoint.",
            ) from error


def _out_of_step(done: int, asked: int) -> Conflict:
    return Conflict(
        f"The critic is asked for update {asked}, and is at {done}.",
        "Another trainer has asked it, or its state is of another checkpoint.",
        "Resume the run from its last checkpoint.",
    )
