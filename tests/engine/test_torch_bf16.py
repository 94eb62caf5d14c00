"""Base weights in bfloat16: what is rounded with them, and what is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from halteres.engine.protocol import LossSpec
from halteres.engine.torch import TorchEngine, projections
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.projections import operand_type, plus, unrounded
from halteres.models import TINY

from .requests import CROSS_ENTROPY
from .torch_fixtures import LORA, RATE, lessons, logprobs_of, of_answer, prompts, sample, tokens_of

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def bf16(model_folder: Path) -> TorchEngine:
    return TorchEngine(model_folder, TINY, 1, Limits(pass_tokens=256), dtype="bfloat16")


async def test_the_engine_says_in_which_type_it_computes_and_that_it_is_exact(
    bf16: TorchEngine,
) -> None:
    info = await bf16.info()
    assert (info.dtype, info.exact) == ("bfloat16", True)
    base = bf16._base
    assert base.head.weight_ED.dtype == base.embedding_VD.dtype == torch.bfloat16
    assert base.final_norm_D.dtype == base.cos_PW.dtype == torch.float32


async def test_what_is_trained_stays_in_fp32_and_small_steps_count(bf16: TorchEngine) -> None:
    """0.088 + 1e-4 is 0.088 in bfloat16: there training would stand still."""
    await bf16.create_adapter("fine", LORA)
    adapter = bf16._adapters["fine"]
    assert {
        t.dtype for t in (adapter.flat, adapter._gradient, adapter.adam.first, adapter.adam.second)
    } == {torch.float32}
    before = adapter.flat.clone()
    await bf16.forward_backward("fine", lessons(), CROSS_ENTROPY)
    await bf16.optim_step("fine", RATE)
    # every B, whose gradients are not 0; A's are, while B is
    assert (adapter.flat != before).float().mean() > 0.4
    lora = adapter.weights[bf16._base.layers[0].mlp[0]]
    assert lora.read_a_RD.dtype == lora.scaled_b_ER.dtype == bf16._base.operands


async def test_sampled_log_probabilities_are_the_trainers_to_the_bit_also_after_steps(
    bf16: TorchEngine,
) -> None:
    await bf16.create_adapter("a", LORA)
    for _ in range(3):
        await bf16.snapshot("a", "s")
        texts = prompts(4, low=12, high=80)
        answers = await asyncio.gather(
            *(sample(bf16, "s", text, n=5, max_tokens=40, seed=2) for text in texts)
        )
        data = tuple(
            of_answer(text, one, 1.0 - i)
            for text, a in zip(texts, answers, strict=True)
            for i, one in enumerate(a.sequences)
        )
        passed = await bf16.forward_backward("a", data, LossSpec(name="importance_sampling"))
        sampled = [one for answer in answers for one in answer.sequences]
        for one, again in zip(sampled, passed.logprobs, strict=True):
            assert np.array_equal(logprobs_of(one.logprobs), logprobs_of(again)[-40:])
        await bf16.optim_step("a", RATE)


async def test_a_row_alone_is_what_it_is_among_strangers(bf16: TorchEngine) -> None:
    texts = prompts(9, low=5, high=90, seed=3)
    alone = [await sample(bf16, None, text, max_tokens=20, seed=1) for text in texts]
    together = await asyncio.gather(
        *(sample(bf16, None, text, max_tokens=20, seed=1) for text in texts)
    )
    assert [tokens_of(a.sequences[0]) for a in alone] == [
        tokens_of(a.sequences[0]) for a in together
    ]
    assert [a.sequences[0].logprobs for a in alone] == [a.sequences[0].logprobs for a in together]


@pytest.mark.parametrize("converted", [False, True])
def test_a_sum_is_rounded_once_and_logits_not_at_all(
    converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a CPU has no bf16 instructions, bf16 weights are read in fp32, and nothing is
    rounded.
    """
    if converted:
        monkeypatch.setattr(projections, "_bf16_by_onednn", False)
    torch.manual_seed(0)
    x, weight, other = (torch.randn(shape).bfloat16() for shape in ((24, 96), (40, 96), (24, 40)))
    exact = x.double() @ weight.double().T
    operands = operand_type(weight)
    assert operands == (torch.bfloat16 if projections._bf16_by_onednn else torch.float32)
    assert (
        (unrounded(x.to(operands), weight) - exact).abs().max()
        < 1e-3
        < (x @ weight.T - exact).abs().max()
    )
    summed = plus(x.to(operands), weight, None, other.to(operands))
    assert torch.equal(summed.bfloat16(), (exact + other).bfloat16())
