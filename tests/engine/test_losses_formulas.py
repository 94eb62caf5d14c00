"""Each loss and its gradient against the published formula in 64 bits, on padded micro-batches of
random data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from contract.requirements import proves
from torch import Tensor

from halteres.engine.checks import LossNotFinite, complete_loss
from halteres.engine.protocol import LossSpec
from halteres.engine.torch.losses import LOSSES, PerToken, Value
from halteres.engine.torch.micro_batches import Example, MicroBatch

Inputs = Mapping[str, Tensor]
CPU = torch.device("cpu")
LOW, HIGH, BETA, KL = 0.8, 1.2, 0.05, 0.0


def clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    return torch.minimum(
        torch.maximum(ratio, inputs["clip_low_threshold"]), inputs["clip_high_threshold"]
    )


def surrogate(ratio: Tensor, inputs: Inputs) -> Tensor:
    return -torch.minimum(
        ratio * inputs["advantages"], clipped(ratio, inputs) * inputs["advantages"]
    ).sum()


def cross_entropy(lp: Tensor, inputs: Inputs) -> Tensor:
    return -(inputs["weights"] * lp).sum()


def importance_sampling(lp: Tensor, inputs: Inputs) -> Tensor:
    return -((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(lp: Tensor, inputs: Inputs) -> Tensor:
    return surrogate((lp - inputs["logprobs"]).exp(), inputs)


def cispo(lp: Tensor, inputs: Inputs) -> Tensor:
    ratio = clipped((lp - inputs["logprobs"]).exp(), inputs).detach()
    return -(ratio * lp * inputs["advantages"]).sum()


def dro(lp: Tensor, inputs: Inputs) -> Tensor:
    return -(lp * inputs["advantages"] - 0.5 * BETA * (lp - inputs["logprobs"]) ** 2).sum()


def gspo(lp: Tensor, inputs: Inputs) -> Tensor:
    mask = inputs["sequence_ratio_mask"] != 0
    s = (lp - inputs["logprobs"])[mask].mean().exp()
    return surrogate(s.detach() * (lp - lp.detach()).exp(), inputs)


def stable_reinforce(lp: Tensor, inputs: Inputs) -> Tensor:
    total = torch.zeros((), dtype=lp.dtype)
    for sequence in inputs["sampled_sequences"].unique():
        if sequence != 0:
            sampled = inputs["sampled_sequences"] == sequence
            s = (lp - inputs["logprobs"])[sampled].mean().exp().detach().clamp(max=2)
            total = total - (s * inputs["advantages"] * lp)[sampled].sum()
            total = total + 0.5 * KL * ((lp - inputs["logprobs"])[sampled] ** 2).sum()
    return total


REFERENCE: Mapping[str, Callable[[Tensor, Inputs], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def drawn(seed: int, length: int, index: int = 0, gap: float = 0.3) -> tuple[Example, np.ndarray]:
    """A datum with every input, and log-probabilities for it; advantages of both signs, thresholds
    per token.
    """
    random = np.random.default_rng(seed)
    lp = random.normal(-2, 1, length).astype(np.float32)
    inputs = {
        "weights": random.standard_normal(length),
        "logprobs": lp + random.normal(0, gap, length),
        "advantages": random.standard_normal(length) + 0.01,
        "sequence_ratio_mask": np.concatenate([[0.5], random.integers(0, 2, length - 1)]),
        "clip_low_threshold": random.uniform(0.5, 1.0, length),
        "clip_high_threshold": random.uniform(1.0, 1.5, length),
    }
    tokens = np.zeros(length, np.int64)
    floats = {name: value.astype(np.float32) for name, value in inputs.items()}
    # 3 of them, in pieces; A and q are anything elsewhere
    sequences = random.integers(0, 4, length).astype(np.int32)
    return Example(tokens, tokens, {**floats, "sampled_sequences": sequences}, index), lp


def batched(data: Sequence[tuple[Example, np.ndarray]]) -> tuple[MicroBatch, Tensor]:
    """Side by side; log-probabilities of the padding are anything."""
    batch = MicroBatch.of([example for example, _ in data], CPU)
    lp = torch.full((batch.rows, batch.length), -7.0)
    for row, (_, values) in zip(lp, data, strict=True):
        row[: len(values)] = torch.from_numpy(values)
    return batch, lp


def valued(
    name: str, data: Sequence[tuple[Example, np.ndarray]], **config: float
) -> tuple[Value, Tensor]:
    batch, lp = batched(data)
    value = PerToken(LOSSES[name], complete_loss(LossSpec(name=name, config=config))).value(
        lp, batch, True
    )
    assert value.gradient is not None
    return value, value.gradient


def doubled(example: Example) -> Inputs:
    return {name: torch.from_numpy(values).double() for name, values in example.inputs.items()}


@pytest.mark.parametrize("name", REFERENCE)
@proves("loss:gradients")
def test_a_loss_and_its_gradient_equal_the_formula(name: str) -> None:
    data = [drawn(seed, length) for seed, length in ((1, 5), (2, 19), (3, 40), (4, 1))]
    value, gradient = valued(name, data)
    total = 0.0
    for (example, lp), row in zip(data, gradient, strict=True):
        exact = torch.from_numpy(lp).double().requires_grad_()
        expected = REFERENCE[name](exact, doubled(example))
        (slope,) = torch.autograd.grad(expected, exact)
        total += expected.item()
        torch.testing.assert_close(row[: len(lp)].double(), slope, rtol=3e-5, atol=3e-6)
        assert not row[len(lp) :].any(), "the padding has no gradient"
    assert value.total == pytest.approx(total, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("name", REFERENCE)
@proves("pass:sums")
def test_a_loss_is_a_sum_whatever_is_beside_it(name: str) -> None:
    """Doubled data doubles it; a datum has the same gradient alone and beside a longer one."""
    one, long = drawn(5, 9), drawn(6, 60)
    alone, slope = valued(name, [one])
    twice, slopes = valued(name, [one, one])
    beside, mixed = valued(name, [long, one])
    assert twice.total == pytest.approx(2 * alone.total, rel=1e-6)
    assert torch.equal(slopes[0], slopes[1])
    assert torch.equal(slopes[0], slope[0])
    assert torch.equal(mixed[1, :9], slope[0, :9])
    assert beside.total == pytest.approx(alone.total + valued(name, [long])[0].total, rel=1e-6)
    assert twice.metrics["num_loss_tokens:sum"] == 2 * alone.metrics["num_loss_tokens:sum"]


@pytest.mark.parametrize(
    "name", [name for name in REFERENCE if name not in ("cross_entropy", "dro")]
)
def test_a_token_without_advantage_has_no_loss_whatever_its_sampler_said(name: str) -> None:
    (example, lp), spoilt = drawn(7, 20), drawn(7, 20)[0]
    off = np.arange(20) % 3 == 0
    for one in (example, spoilt):
        one.inputs["advantages"][off] = 0
        one.inputs["sequence_ratio_mask"][:] = ~off
        one.inputs["sampled_sequences"][:] = ~off
    spoilt.inputs["logprobs"][off] = -10000
    (clean, slope), (poisoned, slopes) = valued(name, [(example, lp)]), valued(name, [(spoilt, lp)])
    assert poisoned.total == clean.total
    assert torch.equal(slope, slopes)
    assert not slope[0, :20][torch.from_numpy(off)].any()
    assert clean.metrics["num_loss_tokens:sum"] == 20 - off.sum()
    assert clean.metrics.keys() >= {"log_ratio:sum", "log_ratio_squared:sum", "log_ratio_abs:max"}
    assert poisoned.metrics == clean.metrics


def test_dro_holds_tokens_without_advantage_to_their_sampler_but_for_the_filler_of_prompts() -> (
    None
):
    example, lp = drawn(7, 20)
    filler, sampled = np.arange(20) < 5, np.arange(20) >= 15
    example.inputs["advantages"][filler | sampled] = 0
    example.inputs["logprobs"][filler] = 0
    value, slope = valued("dro", [(example, lp)])
    assert not slope[0, :20][torch.from_numpy(filler)].any()
    kept = {
        name: torch.from_numpy(values[~filler]).double() for name, values in example.inputs.items()
    }
    expected = REFERENCE["dro"](torch.as_tensor(lp).double()[torch.from_numpy(~filler)], kept)
    assert value.total == pytest.approx(float(expected), rel=1e-5)


def test_clipped_tokens_are_counted() -> None:
    """ppo: ratios 2 and 1/2 with advantages of both signs; two of the four are clipped."""
    tokens = np.zeros(4, np.int64)
    q, advantages = np.log([0.5, 0.5, 2.0, 2.0]), [1, -1, 1, -1]
    inputs = {
        "logprobs": q,
        "advantages": advantages,
        "clip_low_threshold": [LOW] * 4,
        "clip_high_threshold": [HIGH] * 4,
    }
    example = Example(
        tokens, tokens, {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    )
    value, gradient = valued("ppo", [(example, np.zeros(4, np.float32))])
    assert value.metrics["num_clipped_tokens:sum"] == 2
    assert gradient[0, :4].tolist() == pytest.approx([0, 2, -0.5, 0])
    assert value.total == pytest.approx(-(HIGH - 2 + 0.5 - LOW))
    assert value.metrics["log_ratio_abs:max"] == pytest.approx(np.log(2))
    assert (
        valued("cispo", [(example, np.zeros(4, np.float32))])[0].metrics["num_clipped_tokens:sum"]
        == 4
    )


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_ratio_that_overflows_is_clipped_where_the_loss_clips_it(name: str) -> None:
    example, lp = drawn(8, 6)
    example.inputs["logprobs"][:] = -1000
    example.inputs["advantages"][:] = [1, 1, 1, 2, 0, 1]
    example.inputs["sequence_ratio_mask"][:] = 1
    value, gradient = valued(name, [(example, lp)])
    high = example.inputs["clip_high_threshold"]
    factor = lp if name == "cispo" else 1.0
    assert value.total == pytest.approx(
        -(high * factor * example.inputs["advantages"]).sum(), rel=1e-6
    )
    assert torch.isfinite(gradient).all()


def sequenced(*sequences: int, q: float, a: float = 1.0) -> Example:
    """Targets of these sequences; q and A are equal everywhere that was sampled, and 9 on
    prompts.
    """
    numbers, prompts = np.asarray(sequences, np.int32), np.asarray(sequences) == 0
    floats = {"logprobs": np.where(prompts, 9, q), "advantages": np.where(prompts, 9, a)}
    inputs = {name: value.astype(np.float32) for name, value in floats.items()}
    return Example(
        np.zeros(len(numbers), np.int64), numbers, {**inputs, "sampled_sequences": numbers}
    )


@proves("loss:stable_reinforce")
def test_stable_reinforce_weighs_each_sequence_by_its_mean_ratio_up_to_2_and_reads_no_prompt() -> (
    None
):
    """Per sequence s = exp(mean of lp - q); the gradient is -min(s, 2) * A, and does not go through
    s.
    """
    lp = np.asarray([-1, -1, -2, -5, -1, -1], np.float32)
    example = sequenced(0, 1, 1, 0, 2, 2, q=-1.5)
    value, gradient = valued("stable_reinforce", [(example, lp)])
    assert gradient[0, :6].tolist() == pytest.approx([0, -1, -1, 0, -np.exp(0.5), -np.exp(0.5)])
    assert value.total == pytest.approx(3 + 2 * np.exp(0.5))
    far, slope = valued("stable_reinforce", [(sequenced(0, 1, 1, 0, 2, 2, q=-1e30, a=-1), lp)])
    assert slope[0, :6].tolist() == [0, 2, 2, 0, 2, 2]
    assert (far.total, far.metrics["num_clipped_tokens:sum"]) == (-10, 4)
    low, slope = valued("stable_reinforce", [(sequenced(1, 1, q=1e30), lp[:2])])
    assert (low.total, slope[0, :2].tolist()) == (0, [0, 0])


@proves("loss:stable_reinforce")
def test_stable_reinforce_holds_sampled_tokens_to_their_sampler_by_kl_coeff() -> None:
    lp = np.asarray([-1, -1, -3], np.float32)
    example = sequenced(0, 1, 1, q=-2, a=0)
    value, gradient = valued("stable_reinforce", [(example, lp)], kl_coeff=0.5)
    assert value.total == pytest.approx(0.5 * 0.5 * 2)
    assert gradient[0, :3].tolist() == pytest.approx([0, 0.5, -0.5])


@proves("loss:stable_reinforce")
def test_where_nothing_was_sampled_stable_reinforce_is_0() -> None:
    value, gradient = valued(
        "stable_reinforce", [(sequenced(0, 0, q=0), np.zeros(2, np.float32))], kl_coeff=1.0
    )
    assert (value.total, bool(gradient.any())) == (0, False)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_a_ratio_that_overflows_elsewhere_is_told_with_its_datum_and_position(name: str) -> None:
    good, (bad, lp) = drawn(8, 6, index=3), drawn(8, 6, index=5)
    bad.inputs["logprobs"][2] = -1000
    bad.inputs["advantages"][:] = [0, 0, -1, 0, 0, 0]
    bad.inputs["sequence_ratio_mask"][:] = [0, 0, 1, 0, 0, 0]
    with pytest.raises(LossNotFinite, match="is not finite at datum 5, position 2"):
        valued(name, [good, (bad, lp)])


@proves("pass:wide-targets")
def test_several_targets_per_token_are_summed_with_their_weights() -> None:
    random = np.random.default_rng(3)
    weights = random.standard_normal((7, 3)).astype(np.float32)
    tokens = np.zeros(7, np.int64)
    batch = MicroBatch.of([Example(tokens, np.zeros((7, 3), np.int64), {"weights": weights})], CPU)
    lp = torch.randn(1, batch.length, 3, generator=torch.Generator().manual_seed(1))
    value = PerToken(LOSSES["cross_entropy"], {}).value(lp, batch, True)
    assert value.gradient is not None
    assert value.total == pytest.approx(-(weights * lp[0, :7].numpy()).sum(), rel=1e-5)
    assert torch.equal(value.gradient[0, :7], -torch.from_numpy(weights))
    assert value.metrics["num_loss_tokens:sum"] == 7


@proves("pass:accumulates")
def test_a_forward_pass_has_no_gradient() -> None:
    batch, lp = batched([drawn(1, 5)])
    value = PerToken(LOSSES["ppo"], complete_loss(LossSpec(name="ppo"))).value(lp, batch, False)
    assert value.gradient is None
    assert value.total == valued("ppo", [drawn(1, 5)])[0].total
