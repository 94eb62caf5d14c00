"""The losses in numpy, for an engine without weights.

Owns: the value of each loss that the Tinker API names, over one datum; the formulas of `engine.torch.losses` in
64 bits, written a second time.
Never: computes gradients or custom losses.

N tokens of a datum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from halteres.engine.checks import loss_not_finite
from halteres.engine.datums import MAX_SEQUENCE_RATIO, SEQUENCES, inputs_of
from halteres.engine.protocol import Datum, LossSpec
from halteres.errors import UserError
from halteres.losses import CLIP_HIGH, CLIP_LOW, STABLE_REINFORCE, find_kind

Inputs = Mapping[str, np.ndarray]
Settings = Mapping[str, float]


def cross_entropy(logprobs: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """-sum w * lp, N or N x K."""
    return -float((inputs["weights"] * logprobs).sum())


def importance_sampling(logprobs_N: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """-sum r * A."""
    return -float((np.exp(_log_ratio(logprobs_N, inputs)) * inputs["advantages"]).sum())


def ppo(logprobs_N: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """-sum min(r * A, clip(r) * A)."""
    return _clipped_surrogate(np.exp(_log_ratio(logprobs_N, inputs)), inputs)


def cispo(logprobs_N: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """-sum clip(r) * lp * A."""
    ratio_N = np.clip(np.exp(_log_ratio(logprobs_N, inputs)), inputs[CLIP_LOW], inputs[CLIP_HIGH])
    return -float((ratio_N * logprobs_N * inputs["advantages"]).sum())


def dro(logprobs_N: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """-sum (lp * A - beta / 2 * (lp - q)²)."""
    meant_N = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    penalty_N = 0.5 * settings["beta"] * np.where(meant_N, logprobs_N - inputs["logprobs"], 0.0) ** 2
    return float((penalty_N - logprobs_N * inputs["advantages"]).sum())


def gspo(logprobs_N: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """As ppo, with the sequence's ratio at every token."""
    differences_N = (logprobs_N - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0]
    return _clipped_surrogate(np.full(len(logprobs_N), np.exp(differences_N.mean())), inputs)


def stable_reinforce(logprobs_N: np.ndarray, inputs: Inputs, settings: Settings) -> float:
    """sum (-min(s, 2) * A * lp + kl_coeff / 2 * (lp - q)²) over sampled tokens, s = exp(mean of lp - q)."""
    total = 0.0
    for sequence in set(inputs[SEQUENCES].tolist()) - {0}:
        sampled = inputs[SEQUENCES] == sequence
        differences = (logprobs_N - inputs["logprobs"])[sampled]
        weight = math.exp(min(differences.mean(), math.log(MAX_SEQUENCE_RATIO)))
        total -= weight * (inputs["advantages"] * logprobs_N)[sampled].sum()
        if settings["kl_coeff"]:
            total += 0.5 * settings["kl_coeff"] * (differences**2).sum()
    return float(total)


Formula = Callable[[np.ndarray, Inputs, Settings], float]

LOSSES: Mapping[str, Formula] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    STABLE_REINFORCE: stable_reinforce,
}


def sum_of(loss: LossSpec, settings: Settings, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> float:
    """The loss of checked datums, whose targets have these log-probabilities.

    Raises:
        UserError: it is a custom loss.
        LossNotFinite: it is NaN or infinite.
    """
    if loss.custom is not None:
        raise UserError("The scripted engine computes no custom losses.", next="Use the engine that holds weights.")
    formula = LOSSES[loss.name]
    with np.errstate(over="ignore", invalid="ignore"):
        values = [
            formula(row.astype(np.float64), inputs_of(datum, loss, settings), settings)
            for datum, row in zip(data, logprobs, strict=True)
        ]
    total = sum(values)
    if not math.isfinite(total):
        raise loss_not_finite("", ratios="logprobs" in find_kind(loss.name).inputs)
    return float(total)


def _log_ratio(logprobs_N: np.ndarray, inputs: Inputs) -> np.ndarray:
    return np.where(inputs["advantages"] != 0, logprobs_N - inputs["logprobs"], 0.0)


def _clipped_surrogate(ratio_N: np.ndarray, inputs: Inputs) -> float:
    advantages_N = inputs["advantages"]
    ratio_N = np.where(advantages_N != 0, ratio_N, 1.0)  # 0 times an infinite ratio is no number
    clipped_N = np.clip(ratio_N, inputs[CLIP_LOW], inputs[CLIP_HIGH])
    return -float(np.minimum(ratio_N * advantages_N, clipped_N * advantages_N).sum())
