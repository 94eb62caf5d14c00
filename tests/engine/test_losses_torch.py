"""Losses on the torch engine: several targets per token, sums, micro-batches, gradients down to the
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.requirements import proves
from torch import Tensor

from halteres.engine.protocol import Datum, LossSpec
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.errors import InvalidData

from .requests import CROSS_ENTROPY, array, packed
from .torch_fixtures import (
    LORA,
    Reference,
    gradient,
    input_of,
    logprobs_of,
    pair,
    prompts,
    running,
    trained,
    within,
)

SAMPLED = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")


def wide(tokens: Sequence[int], k: int, seed: int = 0) -> Datum:
    """K targets per token, some of them twice, with weights of any sign, some of them 0."""
    random = np.random.default_rng(seed)
    targets = random.integers(3, 600, (len(tokens), k))
    targets[:, -1] = targets[:, 0]
    weights = random.standard_normal((len(tokens), k)) * (random.random((len(tokens), k)) < 0.7)
    weights[0], weights[-1] = 0, np.linspace(-1, 1, k)
    return Datum(
        tokens=packed(tokens),
        inputs={"target_tokens": array(targets, "int64"), "weights": array(weights)},
    )


def judged(tokens: Sequence[int], seed: int) -> Datum:
    """A datum for every loss of sampled tokens: a prompt without advantage, then an answer."""
    random, n = np.random.default_rng(seed), len(tokens) - 1
    answer = np.arange(n) >= n // 2
    return pair(
        tokens,
        logprobs=np.where(answer, random.normal(-6, 1, n), 0),
        advantages=np.where(answer, random.standard_normal(n), 0),
        sequence_ratio_mask=answer.astype(float),
    )


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, expected in theirs.items():
        assert expected.grad is not None
        tolerance = within(1e-4, 0.3) * max(1.0, expected.grad.abs().max().item())
        torch.testing.assert_close(ours[name].double(), expected.grad, rtol=1e-4, atol=tolerance)


async def moved(
    engine: TorchEngine, data: Sequence[Datum], loss: LossSpec, name: str = "a"
) -> tuple[float, Tensor]:
    """The loss of one pass, and the gradient that it added."""
    before = gradient(engine, name)
    passed = await engine.forward_backward(name, tuple(data), loss)
    return passed.metrics["loss:sum"], gradient(engine, name) - before


@proves("pass:wide-targets", "loss:gradients")
async def test_several_targets_per_token_and_their_gradient_equal_the_formula(
    model_folder: Path,
) -> None:
    """Also of targets that occur twice, weights of any sign, and widths that differ between
    datums.
    """
    async with running(model_folder, Limits(head_elements=672 * 16)) as engine:
        await trained(engine, steps=2)
        adapter = engine._adapters["a"]
        reference = Reference(
            model_folder, adapter.layout.named(adapter.flat.clone()), LORA.alpha / LORA.rank
        )
        texts = prompts(5, seed=2)
        data = [
            wide(text, k, seed)
            for seed, (text, k) in enumerate(zip(texts, (3, 1, 20, 3, 2), strict=True))
        ]
        data.append(pair(texts[0], weights=np.ones(len(texts[0]) - 1)))
        passed = await engine.forward_backward("a", tuple(data), CROSS_ENTROPY)
        expected = torch.zeros((), dtype=torch.float64)
        for datum, found in zip(data, passed.logprobs, strict=True):
            logprobs = reference.logprobs(datum)
            assert found.shape == datum.inputs["target_tokens"].shape
            assert np.abs(logprobs_of(found) - logprobs.detach().numpy()).max() < within(3e-5, 0.3)
            expected = expected - (input_of(datum, "weights") * logprobs).sum()
        expected.backward()
        assert passed.metrics["loss:sum"] == pytest.approx(expected.item(), abs=within(1e-3, 3.0))
        close(adapter.layout.named(adapter._gradient), reference.adapter)


async def test_one_target_in_a_row_of_its_own_is_the_same_to_the_bit(model_folder: Path) -> None:
    text = prompts(1, low=20)[0]
    narrow = pair(text, weights=np.linspace(-1, 1, len(text) - 1))
    rows = {name: array(value.reshape(-1, 1), dtype) for name, value, dtype in (
        ("target_tokens", np.asarray(text[1:]), "int64"), ("weights", np.linspace(-1, 1, len(text) - 1), "float32")
    )}  # fmt: skip
    async with running(model_folder) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
        flat = await engine.forward_backward("a", (narrow,), CROSS_ENTROPY)
        tall = await engine.forward_backward(
            "b", (Datum(tokens=narrow.tokens, inputs=rows),), CROSS_ENTROPY
        )
        assert flat.logprobs[0].data == tall.logprobs[0].data
        assert (flat.logprobs[0].shape, tall.logprobs[0].shape) == (
            (len(text) - 1,),
            (len(text) - 1, 1),
        )
        assert flat.metrics == tall.metrics
        assert torch.equal(gradient(engine, "a"), gradient(engine, "b"))


@pytest.mark.runs
@pytest.mark.parametrize("name", SAMPLED)
@proves("pass:sums")
async def test_doubled_data_doubles_loss_and_gradient_in_any_micro_batches(
    model_folder: Path, name: str
) -> None:
    loss = LossSpec(name=name)
    data = [judged(text, seed) for seed, text in enumerate(prompts(6, seed=4))]
    found = []
    for limits in (Limits(pass_tokens=1), Limits(pass_tokens=1 << 20)):
        async with running(model_folder, limits) as engine:
            await trained(engine, steps=1)
            once, slope = await moved(engine, data, loss)
            twice, slopes = await moved(engine, [*data, *data], loss)
            assert twice == pytest.approx(2 * once, rel=within(1e-4, 2e-2))
            torch.testing.assert_close(slopes, 2 * slope, rtol=1e-3, atol=within(1e-3, 2.0))
            found.append((once, slope))
    (alone, one), (beside, eight) = found
    assert alone == pytest.approx(beside, rel=within(1e-4, 2e-2))
    torch.testing.assert_close(one, eight, rtol=1e-3, atol=within(1e-3, 2.0))


@pytest.mark.parametrize("name", SAMPLED)
async def test_settings_reach_the_formula(model_folder: Path, name: str) -> None:
    config = {
        "dro": {"beta": 3.0},
        "stable_reinforce": {"kl_coeff": 3.0},
        "importance_sampling": {},
    }.get(name, {"clip_low_threshold": 0.1, "clip_high_threshold": 9})
    data = (judged(prompts(1, low=30)[0], 1),)
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        plain = await engine.forward_backward("a", data, LossSpec(name=name))
        set_ = await engine.forward_backward("a", data, LossSpec(name=name, config=config))
        assert (plain.metrics["loss:sum"] == set_.metrics["loss:sum"]) == (not config)
        with pytest.raises(InvalidData, match="no setting 'gamma'"):
            await engine.forward_backward("a", data, LossSpec(name=name, config={"gamma": 1}))


@proves("pass:metric-names")
async def test_metrics_of_every_loss_are_mergeable(model_folder: Path) -> None:
    """One colon and a reduction that the SDK knows; the same keys of every chunk."""
    from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP

    data = [judged(text, seed) for seed, text in enumerate(prompts(2))]
    silent = pair([5, 6, 7], logprobs=[0, 0], advantages=[0, 0], sequence_ratio_mask=[1, 1])
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        for name in SAMPLED:
            one, other = [
                (await engine.forward_backward("a", chunk, LossSpec(name=name))).metrics
                for chunk in (tuple(data), (silent,))
            ]
            assert (
                one.keys() == other.keys() >= {"loss:sum", "num_tokens:sum", "num_loss_tokens:sum"}
            )
            assert all(key.count(":") == 1 and key.split(":")[1] in REDUCE_MAP for key in one)
            assert other["loss:sum"] == other["num_loss_tokens:sum"] == 0


async def test_the_scripted_engine_scores_several_targets(scripted: ScriptedEngine) -> None:
    await scripted.create_adapter("a", LORA)
    text = prompts(1, low=10)[0]
    datum = wide(text, 3)
    passed = await scripted.forward_backward("a", (datum,), CROSS_ENTROPY)
    found = logprobs_of(passed.logprobs[0])
    assert found.shape == (len(text), 3)
    assert (found[:, 0] == found[:, 2]).all()
    assert passed.metrics["loss:sum"] == pytest.approx(
        -(input_of(datum, "weights").numpy() * found).sum(), rel=1e-5
    )
