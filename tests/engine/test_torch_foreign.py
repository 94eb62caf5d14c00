"""Adapters that others wrote: PEFT's own folders, and exports in the Tinker API's format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halteres.engine.protocol import LoraConfig
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch import TorchEngine
from halteres.errors import HalteresError, InvalidData, NotFound

from .requests import CROSS_ENTROPY, from_folder
from .torch_fixtures import (
    RATE,
    lessons,
    logprobs_of,
    pair,
    prompts,
    running,
    sample,
    trained,
    within,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENS = prompts(1, low=30, high=31, seed=71)[0]


def foreign(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file(tensors, folder / WEIGHTS)
    return folder


def two_modules(rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """q and v of layer 1 alone."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, outputs in (("q_proj", 128), ("v_proj", 64)):
        module = f"base_model.model.model.layers.1.self_attn.{name}"
        found[f"{module}.lora_A.weight"] = torch.randn(rank, 128, generator=random) * 0.1
        found[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.1
    return found


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


async def logprobs(engine: TorchEngine, adapter: str) -> np.ndarray:
    datum = pair(TOKENS, weights=[1.0] * (len(TOKENS) - 1))
    passed = await engine.forward_backward(adapter, (datum,), CROSS_ENTROPY, forward_only=True)
    return logprobs_of(passed.logprobs[0].data)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize("rslora", [False, True])
async def test_a_folder_that_peft_wrote_computes_what_peft_computes(
    model_folder: Path, tmp_path: Path, rslora: bool
) -> None:
    """Its unembedding too; beside that PEFT writes unchanged embeddings, which say nothing."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    targets = ["q_proj", "down_proj", "lm_head"]
    config = PeftConfig(
        r=4, lora_alpha=6, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(str(tmp_path / "peft"))
    assert any("lora" not in name for name in load_file(tmp_path / "peft" / WEIGHTS))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()
    async with running(model_folder) as engine:
        loaded = await engine.load("a", str(tmp_path / "peft"), optimizer=False)
        assert loaded.version == 0
        assert abs(await logprobs(engine, "a") - expected).max() < within(5e-5, 0.2)
        shape = engine._adapters["a"].layout.config
        assert (shape.rank, shape.train_attn, shape.train_mlp, shape.train_unembed) == (
            4,
            True,
            True,
            True,
        )
        assert shape.alpha == pytest.approx(6 * math.sqrt(4) if rslora else 6)
        await engine.forward_backward("a", lessons(3), CROSS_ENTROPY)
        assert (await engine.optim_step("a", RATE)).version == 1
        with pytest.raises(NotFound, match=r"optimizer\.safetensors"):
            await engine.load("a", str(tmp_path / "peft"), optimizer=True)


async def test_what_a_folder_does_not_have_is_zero_and_stays_zero(
    model_folder: Path, tmp_path: Path
) -> None:
    tensors = two_modules()
    folder = foreign(tmp_path / "two", PLAIN, tensors)
    async with running(model_folder) as engine:
        await engine.load("a", str(folder), optimizer=False)
        adapter = engine._adapters["a"]
        assert (adapter.layout.config.train_mlp, adapter.layout.config.train_unembed) == (
            False,
            False,
        )
        for _ in range(2):
            for name, tensor in adapter.layout.named(adapter.flat).items():
                assert (name in tensors) == bool(tensor.any())
            await engine.forward_backward("a", lessons(3), CROSS_ENTROPY)
            await engine.optim_step("a", RATE)
        assert await engine.hold("s", from_folder(folder)) == 0
        assert (await sample(engine, "s", TOKENS, n=2, seed=1)).version == 0


async def test_exports_in_the_tinker_apis_format_are_the_same_adapter(
    model_folder: Path, tmp_path: Path
) -> None:
    """Two keys of configuration, `unembed_tokens` for lm_head, bfloat16 or no prefix at all."""
    async with running(model_folder) as engine:
        await trained(engine, config=LoraConfig(rank=4, alpha=16, seed=1))
        await engine.save("a", str(tmp_path / "own"), optimizer=False)
        own = load_file(tmp_path / "own" / WEIGHTS)
        renamed = {
            name.replace("model.lm_head", "model.model.unembed_tokens"): t
            for name, t in own.items()
        }
        assert renamed.keys() != own.keys()
        bare = {name.removeprefix("base_model.model."): t for name, t in own.items()}
        for number, tensors in enumerate((renamed, bare)):
            folder = foreign(tmp_path / str(number), {"r": 4, "lora_alpha": 16}, tensors)
            await engine.load(f"b{number}", str(folder), optimizer=False)
            assert torch.equal(engine._adapters[f"b{number}"].flat, engine._adapters["a"].flat)
        rounded = foreign(
            tmp_path / "bf16", {"r": 4, "lora_alpha": 16}, {n: t.bfloat16() for n, t in own.items()}
        )
        await engine.load("c", str(rounded), optimizer=False)
        torch.testing.assert_close(
            engine._adapters["c"].flat, engine._adapters["a"].flat, rtol=1e-2, atol=1e-3
        )


def with_tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    tensors = two_modules()
    full = f"base_model.model.model.layers.1.self_attn.{name}.weight"
    changed = change(tensors.pop(full))
    return tensors if changed is None else {**tensors, full: changed}


def poked(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 2] = float("nan")
    return tensor


REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "another method": ({**PLAIN, "peft_type": "IA3"}, two_modules(), "peft_type 'IA3'"),
    "no rank": ({"lora_alpha": 8}, two_modules(), "'r' is None"),
    "an absurd rank": ({**PLAIN, "r": 10**9}, two_modules(), "'r' is 1000000000"),
    "a rank that is a text": ({**PLAIN, "r": "4"}, two_modules(), "'r' is '4'"),
    "no alpha": ({"r": 4}, two_modules(), "'lora_alpha' is None"),
    "an alpha that is not finite": (
        {"r": 4, "lora_alpha": float("nan")},
        two_modules(),
        "'lora_alpha' is nan",
    ),
    "ranks that differ": ({**PLAIN, "rank_pattern": {"q_proj": 8}}, two_modules(), "rank_pattern"),
    "alphas that differ": (
        {**PLAIN, "alpha_pattern": {"q_proj": 1}},
        two_modules(),
        "alpha_pattern",
    ),
    "modules in full": (
        {**PLAIN, "modules_to_save": ["lm_head"]},
        two_modules(),
        "modules_to_save",
    ),
    "DoRA": ({**PLAIN, "use_dora": True}, two_modules(), "use_dora"),
    "biases": ({**PLAIN, "bias": "all"}, two_modules(), "bias 'all'"),
    "a changed base": (
        {**PLAIN, "init_lora_weights": "pissa_niter_4"},
        two_modules(),
        "may change the base",
    ),
    "a rank other than it says": (
        PLAIN,
        two_modules(rank=3),
        r"of shape \[3, 128\], not \[4, 128\]",
    ),
    "a NaN": (PLAIN, with_tensor("q_proj.lora_A", poked), "NaN or infinite"),
    "half a pair": (PLAIN, with_tensor("v_proj.lora_B", lambda _: None), "is there and"),
    "integers": (PLAIN, with_tensor("q_proj.lora_A", lambda t: t.to(torch.int32)), "torch.int32"),
    "no LoRA at all": (PLAIN, {"x": torch.zeros(2)}, "no LoRA tensors"),
    "a module of another model": (
        PLAIN,
        {
            **two_modules(),
            "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 128),
        },
        "layers.9.mlp.up_proj",
    ),
    "an embedding that was trained": (
        PLAIN,
        {**two_modules(), "base_model.model.model.embed_tokens.weight": torch.ones(672, 128)},
        "embed_tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_this_engine_does_not_compute_is_refused_with_its_name(
    model_folder: Path, tmp_path: Path, case: str
) -> None:
    settings, tensors, says = REFUSED[case]
    folder = foreign(tmp_path / "bad", settings, tensors)
    async with running(model_folder) as engine:
        with pytest.raises(InvalidData, match=says) as raised:
            await engine.load("a", str(folder), optimizer=False)
        assert raised.value.next
        with pytest.raises(InvalidData):
            await engine.hold("a", from_folder(folder))


async def test_patterns_that_say_what_the_rest_says_are_fine(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = {
        **PLAIN,
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"v_proj": 8},
        "modules_to_save": None,
    }
    async with running(model_folder) as engine:
        loaded = await engine.load(
            "a", str(foreign(tmp_path / "a", settings, two_modules())), optimizer=False
        )
        assert loaded.version == 0
        await engine.load("b", str(foreign(tmp_path / "b", PLAIN, two_modules())), optimizer=False)
        assert np.array_equal(await logprobs(engine, "a"), await logprobs(engine, "b"))


@pytest.mark.parametrize("text", ["", "[]", '"x"', "{", "[" * 100_000])
async def test_a_configuration_that_is_none_is_refused(
    model_folder: Path, tmp_path: Path, text: str
) -> None:
    folder = foreign(tmp_path / "a", PLAIN, two_modules())
    (folder / CONFIG).write_text(text)
    async with running(model_folder) as engine:
        with pytest.raises(InvalidData):
            await engine.load("a", str(folder), optimizer=False)


async def test_our_own_folder_with_an_absurd_rank_is_refused_before_anything_is_allocated(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        state = json.loads((tmp_path / "a" / "state.json").read_text())
        state["lora"]["rank"] = 10**9
        (tmp_path / "a" / "state.json").write_text(json.dumps(state))
        with pytest.raises(InvalidData, match="rank 1000000000"):
            await engine.load("b", str(tmp_path / "a"), optimizer=False)


async def test_the_scripted_engine_takes_and_refuses_the_same_configurations(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    folder = foreign(tmp_path / "a", PLAIN, two_modules())
    assert (await scripted.load("a", str(folder), optimizer=False)).version == 0
    assert await scripted.hold("s", from_folder(folder)) == 0
    with pytest.raises(NotFound, match="lacks"):
        await scripted.load("a", str(folder), optimizer=True)
    for case in ("DoRA", "no rank", "no LoRA at all"):
        settings, tensors, says = REFUSED[case]
        with pytest.raises(InvalidData, match=says):
            await scripted.load(
                "b", str(foreign(tmp_path / "b", settings, tensors)), optimizer=False
            )
    (folder / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(HalteresError, match="cannot be read"):
        await scripted.load("a", str(folder), optimizer=False)
