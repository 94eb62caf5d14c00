"""A base model with an adapter merged in, as transformers loads it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.requirements import proves
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from halteres.engine.protocol import LoraConfig
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch import TorchEngine, merge
from halteres.errors import HalteresError, InvalidData, NotFound

from .requests import CROSS_ENTROPY
from .torch_fixtures import logprobs_of, pair, prompts, running, same_numbers, trained, within

TOKENS = prompts(1, low=40, high=41, seed=81)[0]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def in_fp32(model: Path, folder: Path) -> Path:
    """The same model with fp32 on disk, where merging rounds nothing."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    tensors = {
        name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_shards(model: Path) -> Path:
    """Three files and an index, as large models have them."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        own = names[number::3]
        save_file({name: tensors[name] for name in own}, model / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return model


async def logprobs(engine: TorchEngine) -> np.ndarray:
    datum = pair(TOKENS, weights=[1.0] * (len(TOKENS) - 1))
    passed = await engine.forward_backward("a", (datum,), CROSS_ENTROPY, forward_only=True)
    return logprobs_of(passed.logprobs[0].data)


def by_transformers(folder: Path) -> np.ndarray:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("unembed", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
@proves("export:merged")
async def test_transformers_computes_from_the_merged_folder_what_we_compute_with_the_adapter(
    model_folder: Path, tmp_path: Path, unembed: bool, sharded: bool
) -> None:
    model = in_fp32(model_folder, tmp_path / "base")
    if sharded:
        in_shards(model)
    async with running(model) as engine:
        await trained(
            engine, steps=3, config=LoraConfig(rank=4, alpha=16, seed=1, train_unembed=unembed)
        )
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        saved = await engine.merge(str(tmp_path / "a"), str(tmp_path / "merged"))
        ours = await logprobs(engine)
        assert saved.version == 3
    merged = tmp_path / "merged"
    assert abs(by_transformers(merged) - ours).max() < within(1e-4, 0.3)
    assert abs(by_transformers(model) - ours).max() > 1e-2
    config = json.loads((merged / "config.json").read_text())
    assert config["tie_word_embeddings"] is not unembed
    weights = {
        name: t for file in merged.glob("*.safetensors") for name, t in load_file(file).items()
    }
    assert (HEAD in weights) == unembed
    assert len(list(merged.glob("*.safetensors"))) == (3 if sharded else 1)
    assert saved.size_bytes == sum(file.stat().st_size for file in merged.iterdir())
    again = AutoTokenizer.from_pretrained(merged)
    assert again.encode("1 + 1") == AutoTokenizer.from_pretrained(model_folder).encode("1 + 1")
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (merged / name).read_bytes() == (model / name).read_bytes()
    async with running(merged) as engine:  # and it is a base model like any other
        await engine.create_adapter("a", LoraConfig(rank=2))
        assert abs(await logprobs(engine) - ours).max() < within(1e-4, 0.3)


@proves("export:merged")
async def test_merged_weights_are_the_formula_rounded_to_the_type_on_disk(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=3)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        await engine.merge(str(tmp_path / "a"), str(tmp_path / "merged"))
        adapter = engine._adapters["a"]
        named, scale = adapter.layout.named(adapter.flat), adapter.layout.scale
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model_folder, tmp_path / "merged")
    )
    assert after.keys() == {*before, HEAD}
    for name, tensor in after.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        base = before[EMBEDDING if name == HEAD else name]
        assert tensor.dtype == torch.bfloat16
        if f"{module}.lora_A.weight" in named:
            added = scale * (named[f"{module}.lora_B.weight"] @ named[f"{module}.lora_A.weight"])
            assert torch.equal(tensor, (base.float() + added).bfloat16())
        else:
            assert torch.equal(tensor, base)


@same_numbers
@proves("export:merged")
async def test_in_float32_nothing_is_rounded_and_the_files_are_as_readable_as_their_neighbours(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=3)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        for dtype in ("base", "float32"):
            await engine.merge(str(tmp_path / "a"), str(tmp_path / dtype), dtype)
        ours = await logprobs(engine)
    apart = {
        dtype: abs(by_transformers(tmp_path / dtype) - ours).max() for dtype in ("base", "float32")
    }
    assert apart["float32"] < 1e-4 < apart["base"]
    assert json.loads((tmp_path / "float32" / "config.json").read_text())["dtype"] == "float32"
    assert {t.dtype for t in load_file(tmp_path / "float32" / "model.safetensors").values()} == {
        torch.float32
    }
    for dtype in ("base", "float32"):
        modes = {file.stat().st_mode for file in (tmp_path / dtype).iterdir()}
        assert modes == {(tmp_path / dtype / "config.json").stat().st_mode}


async def test_half_a_merged_model_never_stands_and_training_goes_on_meanwhile(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)

        def full(tensors: object, file: Path, metadata: object) -> None:
            file.write_bytes(b"half")
            raise OSError("No space left on device")

        monkeypatch.setattr(merge, "save_file", full)
        merging = asyncio.create_task(
            engine.merge(str(tmp_path / "a"), str(tmp_path / "into" / "m"))
        )
        await trained(engine, "b", steps=1)
        with pytest.raises(HalteresError, match="No space left"):
            await merging
        assert list((tmp_path / "into").iterdir()) == []
        monkeypatch.setattr(
            merge, "save_file", lambda *_, **__: (_ for _ in ()).throw(MemoryError())
        )
        with pytest.raises(HalteresError, match="out of memory in merge"):
            await engine.merge(str(tmp_path / "a"), str(tmp_path / "into" / "m"))
        assert list((tmp_path / "into").iterdir()) == []


async def test_what_cannot_be_merged_is_refused(model_folder: Path, tmp_path: Path) -> None:
    model = in_fp32(model_folder, tmp_path / "base")
    async with running(model) as engine:
        await trained(engine, steps=1)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        with pytest.raises(NotFound, match="lacks"):
            await engine.merge(str(tmp_path / "nowhere"), str(tmp_path / "m"))
        tensors = load_file(model / "model.safetensors")
        for refused, kind, says in (
            (
                lambda: save_file({"x": torch.zeros(1)}, model / "model.safetensors"),
                InvalidData,
                "do not hold",
            ),
            (
                lambda: (model / "model.safetensors").write_bytes(b"torn"),
                InvalidData,
                "cannot be merged",
            ),
            (lambda: (model / "model.safetensors").unlink(), NotFound, "safetensors first"),
        ):
            refused()
            with pytest.raises(kind, match=says):
                await engine.merge(str(tmp_path / "a"), str(tmp_path / "m"))
            assert not (tmp_path / "m").exists()
        assert tensors


async def test_the_scripted_engine_copies_its_model(
    scripted: ScriptedEngine, model_folder: Path, tmp_path: Path
) -> None:
    await scripted.create_adapter("a", LoraConfig(rank=2))
    await scripted.save("a", str(tmp_path / "a"), optimizer=False)
    saved = await scripted.merge(str(tmp_path / "a"), str(tmp_path / "m"))
    for file in model_folder.iterdir():
        assert (tmp_path / "m" / file.name).read_bytes() == file.read_bytes()
    assert saved.size_bytes == sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    with pytest.raises(NotFound, match="lacks"):
        await scripted.merge(str(tmp_path / "nowhere"), str(tmp_path / "m"))
