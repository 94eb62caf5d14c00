"""Agreement: how far sampler and trainer differ on the same tokens under the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halteres.training.datums import Example

Metrics = dict[str, float | None]


def agreement(
    examples: Sequence[Example], trained: Sequence[NDArray[np.float32]], version: int | None
) -> Metrics:
    """Metrics of one pass.

    Args:
        examples: what was trained on.
        trained: the trainer's log-probabilities of the targets, N per example.
        version: the policy version that the pass started from; only sequences sampled wholly by it
            are compared. None: none is, for all were sampled at another temperature, and differ
            rightly.

    Returns:
        `logprobs/*` of the sampler (reference) and of the pass, over all action tokens;
        `logprobs/diff`, their mean difference; and, over tokens of `version` alone,
        `kl_sample_train_v1` (mean of reference - training), `kl_sample_train_v2` (half the mean
        square), `logprobs/absdiff_p999`, `logprobs/absdiff_max`, `tokens/compared`. None where
        there are no such tokens.

    Source: estimators k1 and k2 of Schulman, "Approximating KL divergence"; names as in
    tinker-cookbook.
    """
    pairs = list(zip(examples, trained, strict=True))
    reference, training = _of_actions(pairs)
    own_reference, own_training = _of_actions(
        [(e, t) for e, t in pairs if e.versions == (version, version)]
    )
    return {
        **_moments(reference, ""),
        **_moments(training, "_training"),
        "logprobs/diff": float((reference - training).mean()) if reference.size else None,
        **_divergence(own_reference - own_training),
    }


def _of_actions(
    pairs: Sequence[tuple[Example, NDArray[np.float32]]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    reference = [example.sampled_N[example.actions_N] for example, _ in pairs]
    training = [logprobs_N[example.actions_N] for example, logprobs_N in pairs]
    empty = [np.empty(0)]  # of no pairs
    return np.concatenate(reference or empty).astype(np.float64), np.concatenate(
        training or empty
    ).astype(np.float64)


def _moments(logprobs: NDArray[np.float64], suffix: str) -> Metrics:
    names = [f"logprobs/{name}{suffix}" for name in ("mean", "std", "min", "p50")]
    if not logprobs.size:
        return dict.fromkeys(names)
    values = (logprobs.mean(), logprobs.std(), logprobs.min(), np.median(logprobs))
    return dict(zip(names, map(float, values), strict=True))


def _divergence(difference: NDArray[np.float64]) -> Metrics:
    names = (
        "kl_sample_train_v1",
        "kl_sample_train_v2",
        "logprobs/absdiff_p999",
        "logprobs/absdiff_max",
    )
    if not difference.size:
        return {**dict.fromkeys(names), "tokens/compared": 0.0}
    absolute = np.abs(difference)
    values = (
        difference.mean(),
        0.5 * np.square(difference).mean(),
        # never below the true quantile of few tokens
        np.quantile(absolute, 0.999, method="higher"),
        absolute.max(),
    )
    return {
        **dict(zip(names, map(float, values), strict=True)),
        "tokens/compared": float(difference.size),
    }
