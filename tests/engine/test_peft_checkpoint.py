"""Folders of adapters that somebody changed: refused in a sentence, and nothing outside them is
read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halteres.engine.checks import LossNotFinite
from halteres.engine.folders import digest
from halteres.engine.protocol import BaseType, LoraConfig, Weights
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch import TorchEngine
from halteres.engine.vllm.adapters import LARGEST, Projections, check_adapter
from halteres.errors import InvalidData, NotFound
from halteres.models import TINY

from .torch_fixtures import prompts, running, sample, trained


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def linked(file: Path) -> None:
    """To the same contents elsewhere: it is the link that is refused."""
    elsewhere = file.with_name(f"elsewhere-{file.name}")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def written(content: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(content) and None


STATES: dict[str, Callable[[Path], None]] = {
    "a FIFO": fifo,
    "a link": linked,
    "an endless file": endless,
    "nested deeply": written("[" * 100_000),
    "an object nested deeply": written('{"a":' * 3000 + "1" + "}" * 3000),
    "a list": written("[]"),
    "empty": written(""),
    "a version that is a text": written('{"version": "two", "lora": {"rank": 8}}'),
    "a rank that is a list": written('{"version": 1, "lora": {"rank": [8]}}'),
    "no adapter": written('{"version": 1}'),
    "no UTF-8": lambda file: file.write_bytes(b"\xff\xfe{}") and None,
}


async def saved(engine: TorchEngine, folder: Path) -> Path:
    await trained(engine, steps=1)
    await engine.save("a", str(folder), optimizer=True)
    return folder


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("optimizer", [False, True])
async def test_a_state_file_that_cannot_be_read_is_a_sentence(
    model_folder: Path, scripted: ScriptedEngine, tmp_path: Path, case: str, optimizer: bool
) -> None:
    async with running(model_folder) as engine:
        folder = await saved(engine, tmp_path / "a")
        STATES[case](folder / "state.json")
        for one in (engine, scripted):
            # With the optimiser a file that is none counts as missing.
            with pytest.raises((InvalidData, NotFound), match=r"state\.json"):
                await one.load("b", str(folder), optimizer=optimizer)


async def test_a_linked_optimiser_is_not_followed(
    model_folder: Path, scripted: ScriptedEngine, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        folder = await saved(engine, tmp_path / "a")
        await engine.load("b", str(folder), optimizer=True)
        linked(folder / "optimizer.safetensors")
        for one in (engine, scripted):
            with pytest.raises(InvalidData, match="symbolic link") as refused:
                await one.load("c", str(folder), optimizer=True)
            assert "cp -rL" in str(refused.value.next)


async def test_links_of_a_hugging_face_cache_lead_to_the_adapter(
    model_folder: Path, tmp_path: Path
) -> None:
    """Its snapshots are links to blobs: an adapter from the hub has no files of ours beside its
    two.
    """
    async with running(model_folder) as engine:
        folder = await saved(engine, tmp_path / "a")
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (snapshot / name).symlink_to(folder / name)
        assert (await engine.load("b", str(snapshot), optimizer=False)).version == 0


# A snapshot's folder, which samplers read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_snapshots_folder_holds_its_numbers_in_the_type_and_its_digest_is_that_of_its_files(
    model_folder: Path, tmp_path: Path, dtype: BaseType
) -> None:
    """They are hashed as they are written, and not read again for it."""
    folder, lora = tmp_path / "s", LoraConfig(rank=6, seed=3, train_unembed=False)
    async with running(model_folder) as engine:
        await trained(engine, config=lora)
        await engine.snapshot("a", "s")
        saved = await engine.save_snapshot("s", str(folder), dtype)
        adapter = engine._adapters["a"]
        expected = adapter.layout.named(adapter.flat.to(getattr(torch, dtype)))
    assert saved.sha256 == digest(folder)
    assert saved.version == 3
    assert saved.largest == pytest.approx(
        float(adapter.flat.to(getattr(torch, dtype)).abs().max()) * 32 / 6
    )
    found = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected[name])
    # what a vLLM is given is looked through by the same rules
    check_adapter(folder, Projections.of(model_folder), 8, LARGEST[dtype])


async def test_only_what_is_asked_for_is_rounded_and_training_comes_back_to_every_bit(
    model_folder: Path, tmp_path: Path
) -> None:
    """Also where the base is bfloat16: restore points and saved states are fp32."""
    engine = await asyncio.to_thread(TorchEngine, model_folder, TINY, 1, dtype="bfloat16")
    try:
        await trained(engine)
        flat = engine._adapters["a"].flat.clone()
        await engine.snapshot("a", "s")
        rounded = await engine.save_snapshot("s", str(tmp_path / "rounded"), "bfloat16")
        whole = await engine.save_snapshot("s", str(tmp_path / "whole"))
        await engine.save("a", str(tmp_path / "state"), optimizer=True)
        await engine.load("b", str(tmp_path / "state"), optimizer=True)
        assert torch.equal(engine._adapters["b"].flat, flat)
        assert rounded.size_bytes < 0.6 * whole.size_bytes
        prompt, drawn = prompts(1)[0], {}
        for name, saved in (("whole", whole), ("rounded", rounded)):
            source = Weights(name="s", version=3, folder=saved.folder, sha256=saved.sha256)
            assert await engine.hold(name, source) == 3
            drawn[name] = (await sample(engine, name, prompt, temperature=0)).sequences
        assert drawn["whole"] == (await sample(engine, "s", prompt, temperature=0)).sequences
        assert not torch.equal(engine._snapshots["rounded"].flat, flat)
    finally:
        await engine.close()


async def test_a_weight_that_the_type_does_not_hold_is_refused_and_no_folder_is_left(
    model_folder: Path, tmp_path: Path
) -> None:
    """3.4e38 is finite in fp32, and infinite once it is rounded to bfloat16."""
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        engine._adapters["a"].flat[7] = -3.4e38
        await engine.snapshot("a", "s")
        with pytest.raises(LossNotFinite, match="cannot be published"):
            await engine.save_snapshot("s", str(tmp_path / "s"), "bfloat16")
        assert list(tmp_path.iterdir()) == []
        saved = await engine.save_snapshot("s", str(tmp_path / "s"))
        assert saved.largest is not None
        assert saved.largest >= 3.39e38
