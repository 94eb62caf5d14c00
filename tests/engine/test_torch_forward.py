"""The torch engine computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.requirements import proves
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from halteres.engine.protocol import LoraConfig
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.adapter import Layout
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel, Grid, gated, rms_norm
from halteres.engine.torch.projections import head_logits, linear, project, target_logprobs
from halteres.errors import InvalidConfig, NotFound

from .requests import CROSS_ENTROPY
from .torch_fixtures import (
    DTYPE,
    LORA,
    Reference,
    input_of,
    lessons,
    logprobs_of,
    prompts,
    running,
    same_numbers,
    sample,
    tokens_of,
    trained,
    within,
)

CPU = torch.device("cpu")


def qwen2(folder: Path) -> Path:
    """Biases on q, k and v; an untied head."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=700, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def llama(folder: Path) -> Path:
    """The llama3 rotary embedding, as many key heads as query heads."""
    torch.manual_seed(1)
    rope: Any = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=650, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, rope_parameters=rope, mlp_bias=True, attention_bias=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=["qwen3", "qwen2", "llama"])
def any_family(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Path:
    made = {
        "qwen3": lambda: model_folder,
        "qwen2": lambda: qwen2(tmp_path),
        "llama": lambda: llama(tmp_path),
    }
    return made[request.param]()


def logits_of(base: BaseModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        grid = Grid.padded(base, 1, len(tokens))
        hidden = base.hidden_states({}, torch.tensor(tokens), grid, Causal(grid))
        return head_logits(base.head, {}, hidden)


def test_logits_equal_transformers(any_family: Path) -> None:
    base = load_base(any_family, getattr(torch, DTYPE), CPU)
    reference = Reference(any_family)
    for tokens in prompts(3, low=30, high=120):
        with torch.no_grad():
            expected = reference.logits(tokens)
        assert (logits_of(base, tokens) - expected).abs().max() < within(5e-5, 0.5)


@same_numbers
@proves("sample:greedy")
async def test_greedy_equals_generate(any_family: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(any_family, dtype=torch.float32)
    async with running(any_family) as engine:
        for prompt in prompts(3, seed=5):
            answer = await sample(engine, None, prompt, temperature=0.0, max_tokens=20)
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            assert tokens_of(answer.sequences[0]) == expected[0, len(prompt) :].tolist()


async def test_an_adapters_gradients_equal_a_float64_reference(
    any_family: Path, tmp_path: Path
) -> None:
    """Merged by formula into transformers' own forward; a step of plain SGD reads our gradient off
    the weights.
    """
    async with running(any_family) as engine:
        await trained(engine, steps=2)
        base, adapter = engine._base, engine._adapters["a"]
        reference = Reference(
            any_family, adapter.layout.named(adapter.flat.clone()), LORA.alpha / LORA.rank
        )
        data = lessons(6, seed=9)
        passed = await engine.forward_backward("a", data, CROSS_ENTROPY)
        expected = [reference.logprobs(datum) for datum in data]
        for ours, theirs in zip(passed.logprobs, expected, strict=True):
            assert np.abs(logprobs_of(ours) - theirs.detach().numpy()).max() < within(3e-5, 0.2)
        loss = sum(
            -(input_of(datum, "weights") * lp).sum()
            for datum, lp in zip(data, expected, strict=True)
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert passed.metrics["loss:sum"] == pytest.approx(
            loss.item(), rel=within(1e-5, 2e-2), abs=within(1e-3, 0.5)
        )
        ours = adapter.layout.named(adapter._gradient)
        assert len(ours) == 2 * (7 * len(base.layers) + 1)
        for name, theirs in reference.adapter.items():
            assert theirs.grad is not None
            scale = theirs.grad.abs().max()
            assert (ours[name] - theirs.grad).abs().max() < within(2e-5, 0.05) * max(
                1.0, float(scale)
            ), name


def test_written_backwards_equal_autograd(model_folder: Path) -> None:
    torch.manual_seed(0)
    base = load_base(model_folder, getattr(torch, DTYPE), CPU)
    projection = base.layers[1].mlp[0]
    layout = Layout.of(base, LORA)
    flat = layout.initial(CPU).normal_(std=0.1)
    lora = layout.views(flat)[projection]
    x = torch.randn(24, 128).to(base.operands)
    weight = projection.weight_ED.float() + lora.scaled_b_ER.float() @ lora.a_RD

    norm = base.final_norm_D
    cases: list[tuple[Any, Any]] = [
        (
            lambda v: rms_norm(v.float(), norm, 1e-6, base.operands),
            lambda v: v / (v.square().mean(-1, True) + 1e-6).sqrt() * norm,
        ),
        (gated, lambda v: torch.nn.functional.silu(v[:, :64]) * v[:, 64:]),
        (lambda v: project(v, projection, lora), lambda v: v @ weight.T),
    ]
    for ours, theirs in cases:
        a, b = x.clone().requires_grad_(), x.clone().float().requires_grad_()
        out_a, out_b = ours(a), theirs(b)
        torch.testing.assert_close(
            out_a.float(), out_b, rtol=within(1e-4, 2e-2), atol=within(1e-5, 5e-2)
        )
        gradient = torch.randn_like(out_a)
        out_a.backward(gradient)
        out_b.backward(gradient.float())
        assert a.grad is not None
        torch.testing.assert_close(
            a.grad.float(), b.grad, rtol=within(1e-4, 2e-2), atol=within(2e-5, 5e-2)
        )


def test_log_probabilities_do_not_depend_on_the_chunks_of_the_head(model_folder: Path) -> None:
    base = load_base(model_folder, getattr(torch, DTYPE), CPU)
    torch.manual_seed(0)
    targets = torch.randint(0, base.vocabulary, (50,))
    values = []
    for elements in (1 << 25, 16 * base.vocabulary):
        x = (
            torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
            .to(base.operands)
            .requires_grad_()
        )
        logprobs = target_logprobs(base.head, {}, x, targets, elements)
        (logprobs * torch.linspace(-1, 1, 50)).sum().backward()
        assert x.grad is not None
        values.append((logprobs.detach(), x.grad))
    torch.testing.assert_close(
        values[0], values[1], rtol=within(1e-5, 2e-2), atol=within(1e-6, 1e-3)
    )


def test_a_row_of_a_matmul_has_the_same_bits_whatever_the_other_rows_are() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(256, 128), torch.randn(768, 128)
    whole = linear(x, weight)
    for rows in (8, 16, 24, 64, 136, 248):
        assert torch.equal(linear(x[:rows].clone(), weight), whole[:rows])


@proves("lora:options")
async def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(
    model_folder: Path,
) -> None:
    async with running(model_folder) as engine:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            await engine.create_adapter(name, LoraConfig(rank=4, seed=seed))
        flats = [engine._adapters[name].flat for name in "abc"]
        assert torch.equal(flats[0], flats[1])
        assert not torch.equal(flats[0], flats[2])


@proves("lora:options")
async def test_only_the_chosen_modules_are_trained(model_folder: Path, tmp_path: Path) -> None:
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LoraConfig(rank=2, train_attn=False, train_unembed=False))
        await engine.forward_backward("a", lessons(2), CROSS_ENTROPY)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
    leaves = {
        name.split(".")[-3] for name in load_file(tmp_path / "a" / "adapter_model.safetensors")
    }
    assert leaves == {"gate_proj", "up_proj", "down_proj"}


def test_a_missing_or_unknown_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model"):
        TorchEngine(tmp_path / "nowhere", "x")
    (tmp_path / "config.json").write_text(
        '{"model_type": "unheard", "architectures": ["UnheardForCausalLM"]}'
    )
    with pytest.raises(InvalidConfig, match="unheard"):
        TorchEngine(tmp_path, "x")


async def test_the_engine_takes_the_cpu_though_there_is_a_gpu(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    async with running(model_folder) as engine:
        assert (await engine.info()).device == "cpu"
