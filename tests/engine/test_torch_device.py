"""The engine on a GPU, as far as a CPU can show it: which device is taken, and what a GPU's
attention kernels get.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halteres.engine.limits import GPU_PASS_TOKENS, activation_bytes
from halteres.engine.torch import TorchEngine, attention, device, flash
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.device import difference, usable_device
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel, FusedModel, Grid, Heads
from halteres.engine.torch.trie import FlashTrieAttention, Trie, TrieAttention
from halteres.errors import InvalidConfig
from halteres.models.shape import read_shape

from .requests import IMPORTANCE_SAMPLING
from .test_torch_trie import branching
from .torch_fixtures import RATE, logprobs_of, of_answer, sample, tokens_of, trained

CPU = torch.device("cpu")


@pytest.fixture
def base(model_folder: Path) -> BaseModel:
    return load_base(model_folder, torch.float32, CPU)


def plain_attend(q_IHW: Tensor, k_LKW: Tensor, v_LKW: Tensor, lengths: flash.Lengths) -> Tensor:
    """`flash.attend` sequence by sequence: the last query sees all keys, the one before it one
    less.
    """
    found: list[Tensor] = []
    group = q_IHW.shape[1] // k_LKW.shape[1]
    for i in range(len(lengths.queries) - 1):
        queries, keys = (
            slice(int(ends[i]), int(ends[i + 1])) for ends in (lengths.queries, lengths.keys)
        )
        q_HMW = q_IHW[queries].transpose(0, 1)
        k_HLW, v_HLW = (
            x_LKW[keys].repeat_interleave(group, 1).transpose(0, 1) for x_LKW in (k_LKW, v_LKW)
        )
        count, length = q_HMW.shape[1], k_HLW.shape[1]
        assert count <= lengths.most_queries and length <= lengths.most_keys
        seen_ML = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        scores_HML = q_HMW @ k_HLW.transpose(1, 2) / q_HMW.shape[-1] ** 0.5
        p_HML = scores_HML.masked_fill(~seen_ML, -torch.inf).softmax(-1)
        found.append((p_HML @ v_HLW).transpose(0, 1))
    return torch.cat(found)


def drawn_heads(rows: int, length: int, base: BaseModel) -> Heads:
    """Of B rows of T tokens, with gradients."""
    group, drawn = base.heads // base.kv_heads, torch.Generator().manual_seed(3)
    shapes = [(rows * base.kv_heads, group, length, base.head_width)] + [
        (rows * base.kv_heads, length, base.head_width)
    ] * 2
    return Heads(*(torch.randn(shape, generator=drawn).requires_grad_() for shape in shapes))


def with_gradients(attention: Any, heads: Heads, only_N: Tensor | slice) -> list[Tensor]:
    """What is attended at some tokens, and the gradients of its weighted sum."""
    out_NE = attention(0, heads)[only_N]
    weights_NE = torch.linspace(-1, 1, out_NE.numel()).view_as(out_NE)
    return [
        out_NE,
        *torch.autograd.grad(out_NE, (heads.q_XGTW, heads.k_XTW, heads.v_XTW), weights_NE),
    ]


def test_a_gpus_attention_over_shared_prefixes_is_the_cpus(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "attend", plain_attend)
    tries = [Trie.of([e.tokens for e in branching(seed, 8, 90)]) for seed in (1, 2)]
    heads = drawn_heads(sum(len(trie.tokens_N) for trie in tries), 1, base)
    ends = (0, len(tries[0].tokens_N))
    real_N = np.concatenate(
        [
            np.unique(np.concatenate([r.path_L for r in t.runs])) + end
            for t, end in zip(tries, ends, strict=True)
        ]
    )
    expected = with_gradients(TrieAttention(tries, base), heads, torch.from_numpy(real_N))
    found = with_gradients(FlashTrieAttention(tries, base), heads, torch.from_numpy(real_N))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_gpus_attention_over_padded_rows_is_the_cpus(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for bfloat16, in which a GPU's kernels read."""
    monkeypatch.setattr(flash, "attend", plain_attend)
    heads, causal = drawn_heads(3, 40, base), Causal(Grid.padded(base, 3, 40))

    def in_bfloat16(layer: int, heads: Heads) -> Tensor:
        return causal(
            layer, Heads(*(x.bfloat16() for x in (heads.q_XGTW, heads.k_XTW, heads.v_XTW)))
        ).float()

    expected, found = (
        with_gradients(attention, heads, slice(None)) for attention in (causal, in_bfloat16)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


async def test_a_device_that_is_the_cpu_passes_its_check_to_the_bit() -> None:
    assert await difference("cpu", "float32") == 0.0


async def test_cuda_without_a_gpu_is_refused_with_a_sentence(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert await usable_device("auto", model_folder, "float32") == "cpu"
    with pytest.raises(InvalidConfig, match="HALTERES_DEVICE"):
        await usable_device("cuda", model_folder, "float32")


async def test_a_small_model_stays_on_the_cpu_unless_the_gpu_is_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    async def equal(where: str, dtype: str) -> float:
        return 0.0

    monkeypatch.setattr(device, "_difference_in_a_process", equal)
    assert await usable_device("auto", model_folder, "float32") == "cpu"
    assert await usable_device("cuda", model_folder, "float32") == "cuda"
    monkeypatch.setattr(device, "SMALL", 1000)
    assert await usable_device("auto", model_folder, "float32") == "cuda"


async def test_a_gpu_that_computes_other_numbers_is_left_alone_and_the_log_says_why(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for apart in (0.5, float("nan")):

        async def differs(where: str, dtype: str, apart: float = apart) -> float:
            return apart

        monkeypatch.setattr(device, "_difference_in_a_process", differs)
        assert await usable_device("cuda", model_folder, "bfloat16") == "cpu"
    assert caplog.text.count("so the CPU computes") == 2


async def test_a_gpu_whose_check_breaks_is_left_alone_and_the_log_ends_with_its_words(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here there is no GPU: the check's own process fails as it would with a broken one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert await usable_device("cuda", model_folder, "float32") == "cpu"
    assert "failed its check, so the CPU computes" in caplog.text


async def test_the_check_sees_a_gradient_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys: the norm of the whole gradient moves by a ten-thousandth."""
    original, engines = TorchEngine.gradient, list[TorchEngine]()

    def without_keys(self: TorchEngine, adapter: str) -> dict[str, Tensor]:
        engines.append(self)
        found = original(self, adapter)
        return {
            n: torch.zeros_like(g) if "k_proj" in n and self is engines[0] else g
            for n, g in found.items()
        }

    monkeypatch.setattr(TorchEngine, "gradient", without_keys)
    assert await difference("cpu", "float32") == pytest.approx(1.0)


async def test_an_engine_with_a_gpus_attention_agrees_with_itself(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values in bfloat16, `flash.attend` as plain matmuls: prefill, a cached
    prefix, decoding, shared prefixes, steps.
    """
    monkeypatch.setattr(flash, "attend", plain_attend)
    monkeypatch.setattr(BaseModel, "attention_dtype", torch.bfloat16)
    engine = TorchEngine(model_folder, "x", dtype="bfloat16")
    prompt = list(range(100, 170))
    await trained(engine, steps=2)
    await engine.snapshot("a", "s")
    first = await sample(engine, "s", prompt, n=4, max_tokens=20)
    longer = [*prompt, *tokens_of(first.sequences[0]), 7, 8]
    second = await sample(engine, "s", longer, n=2, max_tokens=20)
    assert second.prompt_cache_hit_tokens > 0
    asked = [(prompt, one) for one in first.sequences] + [(longer, one) for one in second.sequences]
    passed = await engine.forward_backward(
        "a", tuple(of_answer(*one, 1.0) for one in asked), IMPORTANCE_SAMPLING
    )
    await engine.optim_step("a", RATE)
    await engine.close()
    sampled = [logprobs_of(one.logprobs) for _, one in asked]
    apart = [logprobs_of(t)[-len(s) :] - s for t, s in zip(passed.logprobs, sampled, strict=True)]
    assert 0.5 * float(np.mean(np.square(np.concatenate(apart)))) < 1e-3


async def test_how_much_of_a_bfloat16_cache_is_converted_at_once_changes_no_bit(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = list[Any]()
    for most in (1 << 18, 1 << 13):
        monkeypatch.setattr(attention, "WIDENED", most)
        engine = TorchEngine(model_folder, "x", dtype="bfloat16")
        answers.append(
            (await sample(engine, None, list(range(100, 190)), n=9, max_tokens=40)).sequences
        )
        await engine.close()
    assert answers[0] == answers[1]


def test_the_activations_of_a_pass_are_inputs_and_outputs_of_every_projection(
    base: BaseModel, model_folder: Path
) -> None:
    """By them a GPU computes layers once more, and a plan reckons with it."""
    assert isinstance(base, FusedModel)
    projections = [one for layer in base.layers for one in (*layer.attention, *layer.mlp)]
    numbers = sum(one.inputs + one.weight_ED.shape[0] for one in projections)
    assert activation_bytes(read_shape(model_folder)) == 4 * GPU_PASS_TOKENS * numbers
