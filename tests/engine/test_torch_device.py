"""A GPU's way, as far as a CPU can walk it: which device is taken, and what its attention kernels are given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halteres.engine.torch import device, flash
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.device import difference, usable_device
from halteres.engine.torch.heads import Grid, Heads
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.trie import FlashTrieAttention, Trie, TrieAttention
from halteres.errors import InvalidConfig, ServerError

from .test_torch_trie import branching

CPU = torch.device("cpu")


@pytest.fixture
def base(model_folder: Path) -> BaseModel:
    return load_base(model_folder, torch.float32, CPU)


def plain_attend(q_IHW: Tensor, k_LKW: Tensor, v_LKW: Tensor, lengths: flash.Lengths) -> Tensor:
    """`flash.attend` sequence by sequence: the last query sees all keys, the one before it one less."""
    found: list[Tensor] = []
    group = q_IHW.shape[1] // k_LKW.shape[1]
    for i in range(len(lengths.queries) - 1):
        queries, keys = (slice(int(ends[i]), int(ends[i + 1])) for ends in (lengths.queries, lengths.keys))
        q_HMW = q_IHW[queries].transpose(0, 1)
        k_HLW, v_HLW = (x_LKW[keys].repeat_interleave(group, 1).transpose(0, 1) for x_LKW in (k_LKW, v_LKW))
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
    return [out_NE, *torch.autograd.grad(out_NE, (heads.q_XGTW, heads.k_XTW, heads.v_XTW), weights_NE)]


def test_a_gpus_attention_over_shared_prefixes_is_the_cpus(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "attend", plain_attend)
    tries = [Trie.of([e.tokens for e in branching(seed, 8, 90)]) for seed in (1, 2)]
    heads = drawn_heads(sum(len(trie.tokens_N) for trie in tries), 1, base)
    ends = (0, len(tries[0].tokens_N))
    real_N = np.concatenate(
        [np.unique(np.concatenate([r.path_L for r in t.runs])) + end for t, end in zip(tries, ends, strict=True)]
    )
    expected = with_gradients(TrieAttention(tries, base, CPU), heads, torch.from_numpy(real_N))
    found = with_gradients(FlashTrieAttention(tries, base, CPU), heads, torch.from_numpy(real_N))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_gpus_attention_over_padded_rows_is_the_cpus(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "attend", plain_attend)
    heads, causal = drawn_heads(3, 40, base), Causal(Grid.padded(base, 3, 40))
    expected = with_gradients(causal, heads, slice(None))
    found = with_gradients(lambda _, heads: causal._end_to_end(heads), heads, slice(None))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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

    monkeypatch.setattr(device, "difference", equal)
    assert await usable_device("auto", model_folder, "float32") == "cpu"
    assert await usable_device("cuda", model_folder, "float32") == "cuda"
    monkeypatch.setattr(device, "SMALL", 1000)
    assert await usable_device("auto", model_folder, "float32") == "cuda"


@pytest.mark.parametrize(
    "failure", [0.5, float("nan"), ServerError("A pass broke."), RuntimeError("CUDA error: misaligned address")]
)
async def test_a_gpu_that_fails_its_check_is_left_alone_and_the_log_says_why(
    failure: float | Exception, model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    async def fails(where: str, dtype: str) -> float:
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(device, "difference", fails)
    with caplog.at_level(logging.WARNING):
        assert await usable_device("cuda", model_folder, "bfloat16") == "cpu"
    assert "so the CPU computes" in caplog.text
