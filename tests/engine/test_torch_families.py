"""Decoders that transformers computes: with our attention and adapters inside they are what they
were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from halteres.engine.protocol import LossSpec
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.transformers_model import TransformersModel
from halteres.errors import InvalidConfig
from halteres.models import TINY

from .requests import CROSS_ENTROPY
from .torch_fixtures import (
    LORA,
    RATE,
    Reference,
    gradient,
    input_of,
    lessons,
    logprobs_of,
    of_answer,
    prompts,
    running,
    same_numbers,
    sample,
    tokens_of,
    trained,
    within,
)

pytestmark = pytest.mark.runs

SMALL: dict[str, Any] = {
    "vocab_size": 700, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Any]] = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=200)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SMALL, head_dim=16)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=128)
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, pad_token_id=0)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**{**SMALL, "num_key_value_heads": 4})),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**SMALL, pad_token_id=0)),
}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "capped scores": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, head_dim=16)), "scores are capped"),
    "sinks": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4)), "has sinks"
    ),
    "scaled logits": (lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL, logits_scaling=2.0)), "logits are 100"),
    "no attention": (
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=700, hidden_size=64, num_hidden_layers=2)), "attention"
    ),
    "nothing to adapt": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=700, n_embd=64, n_layer=2, n_head=4)), "no plain linear"
    ),
}  # fmt: skip


def made(folder: Path, build: Callable[[], Any]) -> Path:
    torch.manual_seed(0)
    build().save_pretrained(folder)
    return folder


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made(tmp_path / request.param, FAMILIES[request.param])


@same_numbers
async def test_greedy_answers_are_those_of_generate(family: Path) -> None:
    model: Any = hf.AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32)
    async with running(family) as engine:
        assert isinstance(engine._base, TransformersModel)
        for prompt in prompts(3, seed=5):
            answer = await sample(engine, None, prompt, temperature=0.0, max_tokens=20)
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            assert tokens_of(answer.sequences[0]) == expected[0, len(prompt) :].tolist()


async def test_an_adapters_gradients_are_those_of_float64(family: Path) -> None:
    async with running(family) as engine:
        await trained(engine, steps=2)
        adapter = engine._adapters["a"]
        reference = Reference(
            family, adapter.layout.named(adapter.flat.clone()), LORA.alpha / LORA.rank
        )
        if "moe" in family.name:
            reference.model.set_experts_implementation("eager")  # grouped matmuls know no float64
        data = lessons(6, seed=9)
        passed = await engine.forward_backward("a", data, CROSS_ENTROPY)
        expected = [reference.logprobs(datum) for datum in data]
        for ours, theirs in zip(passed.logprobs, expected, strict=True):
            assert np.abs(logprobs_of(ours) - theirs.detach().numpy()).max() < within(1e-4, 0.1)
        loss = sum(
            -(input_of(datum, "weights") * lp).sum()
            for datum, lp in zip(data, expected, strict=True)
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        ours = adapter.layout.named(adapter._gradient)
        assert set(ours) == set(reference.adapter)
        for name, theirs in reference.adapter.items():
            assert theirs.grad is not None
            assert (ours[name] - theirs.grad).abs().max() < within(1e-4, 0.1) * max(
                1.0, float(theirs.grad.abs().max())
            ), name


async def test_layers_that_are_computed_again_give_the_same_bits(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A datum for which there is no memory otherwise; layers keep their inputs alone then."""
    original = TransformersModel.hidden_states
    kept: dict[bool, int] = {}

    def crowded(*args: Any, recompute: bool) -> torch.Tensor:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = original(*args, recompute=recompute)
        kept[recompute] = sum(sizes.values())
        if not recompute:
            raise MemoryError
        return found

    async with running(family) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
        expected = await engine.forward_backward("a", lessons(1), CROSS_ENTROPY)
        monkeypatch.setattr(TransformersModel, "hidden_states", crowded)
        assert await engine.forward_backward("b", lessons(1), CROSS_ENTROPY) == expected
        assert torch.equal(gradient(engine, "b"), gradient(engine, "a"))
    assert kept[True] < kept[False] / 2, kept


async def test_sampled_logprobs_are_the_trainers_also_after_a_step(family: Path) -> None:
    """To rounding: whether a row's bits depend on the others is not ours to promise."""
    async with running(family) as engine:
        await trained(engine, steps=1)
        for _ in range(2):
            await engine.snapshot("a", "s")
            prompt = prompts(1, low=12, high=20)[0]
            answer = await sample(engine, "s", prompt, n=4, max_tokens=16, seed=3)
            data = tuple(of_answer(prompt, one, 1.0) for one in answer.sequences)
            passed = await engine.forward_backward("a", data, LossSpec(name="importance_sampling"))
            for sampled, again in zip(answer.sequences, passed.logprobs, strict=True):
                assert np.abs(
                    logprobs_of(sampled.logprobs) - logprobs_of(again)[len(prompt) - 1 :]
                ).max() < within(5e-5, 2e-2)
            await engine.optim_step("a", RATE)


async def test_checkpoints_and_merged_folders_are_read_back(family: Path, tmp_path: Path) -> None:
    async with running(family) as engine:
        await trained(engine, steps=2)
        await engine.snapshot("a", "s")
        await engine.save("a", str(tmp_path / "saved"), optimizer=True)
        await engine.load("b", str(tmp_path / "saved"), optimizer=True)
        assert torch.equal(engine._adapters["a"].flat, engine._adapters["b"].flat)
        (tmp_path / "saved" / "state.json").unlink()  # as PEFT would have written it
        await engine.load("c", str(tmp_path / "saved"), optimizer=False)
        assert torch.equal(engine._adapters["a"].flat, engine._adapters["c"].flat)
        await engine.merge(str(tmp_path / "saved"), str(tmp_path / "merged"))
        prompt = prompts(1)[0]
        expected = tokens_of((await sample(engine, "s", prompt, temperature=0.0)).sequences[0])
    async with running(tmp_path / "merged") as engine:
        assert (
            tokens_of((await sample(engine, None, prompt, temperature=0.0)).sequences[0])
            == expected
        )


async def test_sequences_end_where_the_smallest_window_does(tmp_path: Path) -> None:
    async with running(made(tmp_path / "m", FAMILIES["mistral"])) as engine:
        assert (await engine.info()).max_context_length == 200


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_computed_rightly_is_refused_with_the_reason(
    tmp_path: Path, case: str
) -> None:
    build, says = REFUSED[case]
    with pytest.raises(InvalidConfig, match=says) as raised:
        await asyncio.to_thread(TorchEngine, made(tmp_path / "m", build), TINY)
    assert raised.value.next


def test_routers_are_not_adapted(tmp_path: Path) -> None:
    folder = made(tmp_path / "m", FAMILIES["qwen3_moe"])
    assert any(".mlp.gate." in name for name in load_file(folder / "model.safetensors"))
    leaves = {
        part.leaf
        for layer in TorchEngine(folder, TINY)._base.layers
        for p in layer.mlp
        for part in p.parts
    }
    assert "gate" not in leaves


async def test_sequences_end_where_the_rotary_embedding_would_change(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = hf.Phi3Config(
        **SMALL, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=64
    )
    async with running(made(tmp_path / "m", lambda: hf.Phi3ForCausalLM(config))) as engine:
        assert (await engine.info()).max_context_length == 64
