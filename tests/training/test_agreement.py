"""Agreement between sampler and trainer: the figures, and which tokens they count."""

from __future__ import annotations

import numpy as np
import pytest

from halteres.training.datums import Example
from halteres.training.logprob_mismatch import agreement

from . import fakes


def example(logprobs: list[float], versions: tuple[int, int] | None = (0, 0)) -> Example:
    return fakes.example([1] * (len(logprobs) + 1), [1.0, *logprobs], 1.0, versions)


def trained(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float32) for row in rows]


def test_equal_log_probabilities_agree_exactly() -> None:
    metrics = agreement([example([-1.0, -2.0])], trained([-1.0, -2.0]), version=0)
    assert (
        metrics["kl_sample_train_v1"]
        == metrics["kl_sample_train_v2"]
        == metrics["logprobs/absdiff_max"]
        == 0.0
    )
    assert metrics["tokens/compared"] == 2


def test_v1_is_the_mean_of_the_difference_and_v2_half_its_mean_square() -> None:
    metrics = agreement([example([-1.0, -2.0])], trained([-1.5, -1.75]), version=0)
    assert metrics["kl_sample_train_v1"] == pytest.approx((0.5 - 0.25) / 2)
    assert metrics["kl_sample_train_v2"] == pytest.approx((0.25 + 0.0625) / 4)
    assert metrics["logprobs/absdiff_max"] == pytest.approx(0.5)
    assert metrics["logprobs/diff"] == pytest.approx(0.125)


def test_the_seeds_moments_are_of_reference_and_training() -> None:
    metrics = agreement([example([-1.0, -3.0, -2.0])], trained([-1.0, -1.0, -4.0]), version=0)
    assert (metrics["logprobs/mean"], metrics["logprobs/min"], metrics["logprobs/p50"]) == (
        -2.0,
        -3.0,
        -2.0,
    )
    assert (metrics["logprobs/mean_training"], metrics["logprobs/min_training"]) == (-2.0, -4.0)
    assert metrics["logprobs/std"] == pytest.approx(np.std([-1, -3, -2]))


def test_context_tokens_are_not_compared() -> None:
    two_turns = fakes.example([1, 2, 3, 4], [1.0, -1.0, 1.0, -2.0], 1.0, (0, 0))
    metrics = agreement([two_turns], trained([-1.0, -99.0, -2.0]), version=0)
    assert metrics["logprobs/absdiff_max"] == 0.0
    assert metrics["tokens/compared"] == 2


@pytest.mark.parametrize("versions", [(0, 0), (0, 1), (2, 2), None])
def test_tokens_of_another_or_an_unknown_version_are_not_compared(
    versions: tuple[int, int] | None,
) -> None:
    """They differ rightly; in `logprobs/diff` they still show."""
    own, other = example([-1.0], (1, 1)), example([-1.0], versions)
    metrics = agreement([own, other], trained([-1.0], [-5.0]), version=1)
    assert metrics["logprobs/absdiff_max"] == 0.0
    assert metrics["tokens/compared"] == 1
    assert metrics["logprobs/diff"] == 2.0


def test_without_comparable_tokens_there_is_no_figure() -> None:
    metrics = agreement([], [], version=0)
    assert metrics["kl_sample_train_v2"] is None
    assert metrics["logprobs/mean"] is None
    assert metrics["tokens/compared"] == 0


def test_the_high_quantile_sees_more_than_one_token_in_a_thousand_and_no_fewer() -> None:
    def metrics(num_far: int) -> dict[str, float | None]:
        far = [-1.0 - 1e-4] * num_far + [-1.0] * (2000 - num_far)
        return agreement([example([-1.0] * 2000)], trained(far), version=0)

    assert metrics(3)["logprobs/absdiff_p999"] == pytest.approx(1e-4, rel=0.01)
    assert metrics(1)["logprobs/absdiff_p999"] == 0.0
    assert metrics(1)["logprobs/absdiff_max"] == pytest.approx(1e-4, rel=0.01)
