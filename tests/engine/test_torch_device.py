"""The engine on a GPU, as far as a CPU can show it: which device is taken, and what a GPU's
attention kernels and matmuls get.
"""

from __future__ import annotations

import os
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from halteres.engine import __main__
from halteres.engine.limits import GPU_HEAD_ELEMENTS
from halteres.engine.protocol import BaseType, LoraConfig
from halteres.engine.torch import TorchEngine, attention, device, flash, limits
from halteres.engine.torch.adapter import Adapter, Layout, Lora
from halteres.engine.torch.attention import Cached, Causal, Prefill
from halteres.engine.torch.cache import Block
from halteres.engine.torch.device import Difference, difference, usable
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel, FusedModel, Grid, Heads
from halteres.engine.torch.projections import Projection
from halteres.engine.torch.trie import FlashTrieAttention, Trie, TrieAttention
from halteres.errors import InvalidConfig
from halteres.models.shape import read_shape
from halteres.runs.planning import resources

from .requests import IMPORTANCE_SAMPLING
from .test_torch_trie import branching
from .torch_fixtures import RATE, logprobs_of, of_answer, sample, tokens_of, trained

CPU = torch.device("cpu")

EQUAL = Difference(dtype="float32", sampled=0.0, trained=0.0, rounding=0.0, cosine=1.0, stretch=1.0)


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


async def test_a_device_that_is_the_cpu_passes_its_check() -> None:
    found = await difference("cpu", "float32")
    assert (found.trained, found.rounding, found.stretch) == (0.0, 0.0, 1.0)
    assert found.sampled < 1e-10
    assert found.problem is None


async def test_bfloat16_may_differ_by_twice_what_the_cpus_own_rounding_does() -> None:
    found = await difference("cpu", "bfloat16")
    assert found.problem is None
    assert found.trained == found.rounding > 0
    noisy = msgspec.structs.replace(found, rounding=0.01, trained=0.019)
    assert noisy.problem is None
    assert "trained" in (msgspec.structs.replace(noisy, trained=0.021).problem or "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sampled": 0.01}, "sampled"),
        ({"trained": float("nan")}, "trained"),
        ({"cosine": 0.5}, "cosine 0.5"),
        ({"cosine": float("nan")}, "gradient"),
        ({"stretch": 2.0}, "2 times its length"),
    ],
)
def test_what_is_too_far_apart_is_named(change: dict[str, float], says: str) -> None:
    assert says in (msgspec.structs.replace(EQUAL, **change).problem or "")


async def test_cuda_without_a_gpu_is_refused_with_a_sentence(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert await usable("auto", model_folder, "auto") == ("cpu", "float32")
    with pytest.raises(InvalidConfig, match="HALTERES_DEVICE"):
        await usable("cuda", model_folder, "auto")


def with_gpu(monkeypatch: pytest.MonkeyPatch, found: Difference) -> None:
    """A GPU whose check finds this."""

    async def checked(where: str, dtype: BaseType) -> Difference:
        return msgspec.structs.replace(found, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "_difference_in_a_process", checked)


async def test_a_small_model_stays_on_the_cpu_unless_the_gpu_is_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, EQUAL)
    assert await usable("auto", model_folder, "float32") == ("cpu", "float32")
    assert await usable("cuda", model_folder, "float32") == ("cuda", "float32")
    monkeypatch.setattr(device, "SMALL", 1000)
    assert await usable("auto", model_folder, "float32") == ("cuda", "float32")


async def test_a_gpu_computes_in_bfloat16_unless_another_type_is_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, EQUAL)
    assert await usable("cuda", model_folder, "auto") == ("cuda", "bfloat16")
    assert await usable("auto", model_folder, "auto") == ("cpu", "float32")
    # heads of this width have no kernel for bfloat16
    monkeypatch.setattr(device, "WIDEST_HEAD", 16)
    assert await usable("cuda", model_folder, "auto") == ("cuda", "float32")
    with pytest.raises(InvalidConfig, match="heads of width 32"):
        await usable("cuda", model_folder, "bfloat16")


async def test_a_large_model_never_goes_on_on_the_cpu_because_the_gpu_computes_other_numbers(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, msgspec.structs.replace(EQUAL, trained=0.5))
    assert await usable("auto", model_folder, "auto") == ("cpu", "float32")
    with pytest.raises(InvalidConfig, match=r"is 0\.5, of which"):
        await usable("cuda", model_folder, "auto")
    monkeypatch.setattr(device, "SMALL", 1000)
    with pytest.raises(InvalidConfig, match=r"is 0\.5, of which"):
        await usable("auto", model_folder, "auto")


async def test_a_gpu_whose_check_breaks_is_refused_with_the_last_words_of_the_check(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there is no GPU: the check's own process fails as it would with a broken one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InvalidConfig, match="Its check failed: "):
        await usable("cuda", model_folder, "float32")


async def test_the_check_sees_a_gradient_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys: the norm of the whole gradient moves by a ten-thousandth."""
    original, engines = TorchEngine.gradient, list[TorchEngine]()

    def without_keys(self: TorchEngine, adapter: str) -> dict[str, Tensor]:
        engines.append(self)
        found = original(self, adapter)
        return {
            n: torch.zeros_like(g) if "k_proj" in n and self is not engines[0] else g
            for n, g in found.items()
        }

    monkeypatch.setattr(TorchEngine, "gradient", without_keys)
    found = await difference("cpu", "float32")
    assert found.cosine == 0.0
    assert "gradient" in (found.problem or "")


def test_every_torch_is_told_to_be_causal_by_the_names_that_it_has() -> None:
    """Stand-ins with the parameters of torch 2.10, 2.11 and 2.12, and of one that has neither."""
    base = drawn_kernels_arguments()
    for stand_in, expanded in ((varlen_2_10, True), (varlen_2_11, True), (varlen_2_12, False)):
        asked.clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(varlen, "varlen_attn", stand_in)
            found = flash.attend(*base)
        torch.testing.assert_close(found, plain_attend(*base))
        assert asked == [4 if expanded else 2], "key heads that the kernel gets"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(varlen, "varlen_attn", varlen_of_another_kind)
        with pytest.raises(NotImplementedError, match="without window_size and is_causal"):
            flash.attend(*base)


asked: list[int] = []


def drawn_kernels_arguments() -> tuple[Tensor, Tensor, Tensor, flash.Lengths]:
    """Three sequences with 4 query heads and 2 key heads, the second with keys behind it."""
    drawn = torch.Generator().manual_seed(5)
    lengths = flash.Lengths([3, 5, 1], [3, 12, 1], CPU)
    shapes = (9, 4, 8), (16, 2, 8), (16, 2, 8)
    q_IHW, k_LKW, v_LKW = (torch.randn(shape, generator=drawn) for shape in shapes)
    return q_IHW, k_LKW, v_LKW, lengths


def of_kernels(parts: tuple[Any, ...]) -> Tensor:
    """What the kernels compute of the parameters that all versions have, if they are causal."""
    q_IHW, k_LKW, v_LKW, ends_q, ends_k, most_q, most_k = parts
    asked.append(k_LKW.shape[1])
    counts = [(b - a).tolist() for a, b in ((ends[:-1], ends[1:]) for ends in (ends_q, ends_k))]
    assert (most_q, most_k) == (max(counts[0]), max(counts[1]))
    return plain_attend(q_IHW, k_LKW, v_LKW, flash.Lengths(*counts, CPU))


def varlen_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, is_causal: bool = False, return_aux: None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    assert is_causal and key.shape[1] == query.shape[1]
    return of_kernels((query, key, value, cu_seq_q, cu_seq_k, max_q, max_k))


def varlen_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, return_aux: None = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert window_size == (-1, 0) and key.shape[1] == query.shape[1]
    return of_kernels((query, key, value, cu_seq_q, cu_seq_k, max_q, max_k))


def varlen_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, return_aux: None = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert window_size == (-1, 0) and enable_gqa
    return of_kernels((query, key, value, cu_seq_q, cu_seq_k, max_q, max_k))


def varlen_of_another_kind(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise AssertionError("it is never called")


def test_the_installed_torch_can_be_told_to_be_causal() -> None:
    assert flash.causal_options(signature(varlen.varlen_attn).parameters)


@pytest.mark.parametrize("together", [1 << 18, 120], ids=["one call", "several calls"])
def test_a_gpus_attention_to_cached_prefixes_is_the_cpus(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Rows of 3, 40 and 21 tokens behind pasts of 32, 0 and 64, in slots of two blocks."""
    monkeypatch.setattr(attention, "KEYS_TOGETHER", together)
    calls: list[int] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, lengths: flash.Lengths) -> Tensor:
        calls.append(len(lengths.queries) - 1)
        return plain_attend(q.float(), k.float(), v.float(), lengths).to(q.dtype)

    monkeypatch.setattr(flash, "attend", counted)
    starts, counts, length = (32, 0, 64), (3, 40, 21), 40
    found: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        blocks = Block(base, 2, 128), Block(base, 1, 128)
        drawn = torch.Generator().manual_seed(6)
        for block in blocks:
            block.buffer.copy_(torch.randn(block.buffer.shape, generator=drawn))
        prefill = Prefill(
            Grid.following(base, starts, length),
            [(blocks[0], 1), (blocks[1], 0), (blocks[0], 0)],
            [range(start, start + count) for start, count in zip(starts, counts, strict=True)],
        )
        drawn_ones = drawn_heads(3, length, base)
        heads = Heads(
            *(x.detach().to(dtype) for x in (drawn_ones.q_XGTW, drawn_ones.k_XTW, drawn_ones.v_XTW))
        )
        out_BTE = prefill(0, heads).float().view(3, length, -1)
        found.append(torch.cat([row[:count] for row, count in zip(out_BTE, counts, strict=True)]))
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()
    assert calls == ([3] if together > 1000 else [2, 1])


def test_a_gpu_reads_a_cache_as_it_lies_while_decoding(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks and a row of padding; what matmuls read is bfloat16, what they give fp32."""

    def plain(one: Tensor, other: Tensor) -> Tensor:
        assert one.dtype == other.dtype == torch.bfloat16
        return one.float() @ other.float()

    monkeypatch.setattr(attention, "wide_bmm", plain)
    drawn_ones = drawn_heads(4, 1, base)
    found: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(BaseModel, "cache_dtype", dtype)
        blocks = Block(base, 2, 128), Block(base, 1, 256)
        drawn = torch.Generator().manual_seed(7)
        for block in blocks:
            values = torch.randn(block.buffer.shape, generator=drawn).bfloat16()
            block.buffer.copy_(values)
        cached = Cached([(blocks[0], 2, 90), (blocks[1], 1, 200)], torch.tensor([17, 90, 200, 0]))
        parts = (drawn_ones.q_XGTW, drawn_ones.k_XTW, drawn_ones.v_XTW)
        found.append(cached(0, Heads(*(x.detach().to(dtype) for x in parts))).float())
    assert found[1][3].abs().max() == 0
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


def test_a_gpu_takes_the_largest_micro_batch_that_keeps_all_until_the_backward(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what is free beside keys and values; longer sequences compute their layers once more."""
    monkeypatch.setattr(BaseModel, "device", torch.device("cuda"))
    monkeypatch.setattr(BaseModel, "attention_dtype", torch.bfloat16)
    assert isinstance(base, FusedModel)
    each = limits.token_bytes(base)
    found: list[limits.Limits] = []
    for tokens in (1000, 6000, 60_000):
        rest = (tokens * each + int(2.5 * 4 * GPU_HEAD_ELEMENTS)) / 0.8 * 8 / 7
        monkeypatch.setattr(limits, "free_bytes", lambda _, rest=rest: int(rest) + 10**9)
        found.append(limits.Limits.of(base, cache_bytes=10**9))
    assert [one.pass_tokens for one in found] == [2048, 5632, 16_384]
    budgets = [limits.PassBudget.of(one) for one in found]
    assert [one.computes_again(2048) for one in budgets] == [True, False, False]
    assert [one.computes_again(20_000) for one in budgets] == [True, True, False]
    # rows by themselves are left, and they compute their layers once more already
    assert not budgets[1].shrink(20_000, 1)
    assert budgets[1].shrink(5000, 1) and budgets[1].computes_again(1)


def test_stacked_adapters_take_an_eighth_of_what_is_free_on_a_gpu(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.Limits.of(base, 10**9).mixture_bytes == 1 << 28
    monkeypatch.setattr(BaseModel, "device", torch.device("cuda"))
    for free, taken in ((81 * 10**9, 10 * 10**9), (2 * 10**9, 1 << 28)):
        monkeypatch.setattr(limits, "free_bytes", lambda _, free=free: free)
        assert limits.Limits.of(base, 10**9).mixture_bytes == taken


async def test_an_engine_with_a_gpus_attention_agrees_with_itself(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values in bfloat16, `flash.attend` as plain matmuls: prefill, a cached
    prefix, decoding, shared prefixes, steps.
    """
    monkeypatch.setattr(flash, "attend", plain_attend)
    monkeypatch.setattr(attention, "wide_bmm", lambda one, other: one.float() @ other.float())
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


def test_engine_and_estimate_reckon_alike_what_a_token_keeps_on_a_gpu(
    base: BaseModel, model_folder: Path
) -> None:
    """By them a GPU computes layers once more, and a plan reckons with it."""
    assert isinstance(base, FusedModel)
    assert limits.token_bytes(base) == resources.gpu_token_bytes(read_shape(model_folder))


def test_no_operands_are_made_for_gradients_that_nobody_multiplies_with(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []
    views = Layout.views

    def counted(self: Layout, flat: Tensor) -> dict[Projection, Lora]:
        made.append(flat)
        return views(self, flat)

    monkeypatch.setattr(Layout, "views", counted)
    layout = Layout.of(base, LoraConfig(rank=4))
    adapter = Adapter(layout, layout.initial(CPU))
    assert len(made) == 1 and made[0] is adapter.flat


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "auto", "expandable_segments:True"),
        ({}, "cpu", None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "auto", "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "auto", None),
    ],
)
def test_an_engine_that_may_use_a_gpu_has_segments_that_grow_unless_its_user_chose(
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    device: str,
    expected: str | None,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        # set first, so that what the engine sets goes with the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    def begun(*_: object, **__: object) -> None:
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise SystemExit(0)

    monkeypatch.setattr(__main__, "begin", begun)
    argv = ["--socket", "s", "--backend", "torch", "--model", str(model_folder), "--name", "x"]
    monkeypatch.setattr(sys, "argv", ["engine", *argv, "--device", device])
    with pytest.raises(SystemExit):
        __main__.main()
    assert seen == [expected]
