"""Adapters of the torch engine on disk, and snapshots in memory."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.requirements import proves
from safetensors.torch import load_file

from halteres.engine.protocol import Datum, LoraConfig, Weights, WeightsDamaged
from halteres.engine.torch import peft_checkpoint
from halteres.errors import Conflict, HalteresError, InvalidData, NotFound

from .requests import CROSS_ENTROPY, from_folder
from .torch_fixtures import (
    LORA,
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

pytestmark = pytest.mark.runs


@proves("checkpoint:exact")
async def test_ten_steps_straight_equal_five_save_load_five(
    model_folder: Path, tmp_path: Path
) -> None:
    """Bit for bit: weights, moments, version, metrics."""
    folder = str(tmp_path / "state")
    async with running(model_folder) as engine:

        async def steps(name: str, seeds: range) -> list[object]:
            seen: list[object] = []
            for seed in seeds:
                seen.append(
                    await engine.forward_backward(name, lessons(4, seed=seed), CROSS_ENTROPY)
                )
                seen.append(await engine.optim_step(name, RATE))
            return seen

        await engine.create_adapter("a", LORA)
        await engine.create_adapter("b", LORA)
        straight = await steps("a", range(10))
        first = await steps("b", range(5))
        saved = await engine.save("b", folder, optimizer=True)
        await steps("b", range(20, 22))
        loaded = await engine.load("b", folder, optimizer=True)
        assert saved.version == loaded.version == 5
        assert saved.size_bytes > 0
        assert [*first, *await steps("b", range(5, 10))] == straight
        for ours, theirs in zip(vars_of(engine, "a"), vars_of(engine, "b"), strict=True):
            assert torch.equal(ours, theirs)


def vars_of(engine: Any, name: str) -> tuple[torch.Tensor, ...]:
    adapter = engine._adapters[name]
    return adapter.flat, adapter.adam.first, adapter.adam.second


@proves("checkpoint:weights-alone")
async def test_loading_without_the_optimiser_starts_it_fresh_and_keeps_the_version(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=3)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        loaded = await engine.load("new", str(tmp_path / "a"), optimizer=False)
        assert loaded.version == 3
        assert engine._adapters["new"].adam.steps == 0
        assert torch.equal(engine._adapters["new"].flat, engine._adapters["a"].flat)
        with pytest.raises(NotFound, match=r"optimizer\.safetensors"):
            await engine.load("new", str(tmp_path / "a"), optimizer=True)


@pytest.mark.parametrize("what", ["adapter", "snapshot"])
async def test_a_save_holds_the_moment_it_was_asked_for_and_training_goes_on_meanwhile(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Both are proved to be inside at once: the step ends while the file is held half-way."""
    writing, written = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        original = getattr(peft_checkpoint, name)

        def held(*given: object) -> object:
            writing.set()
            assert written.wait(20)
            return original(*given)

        monkeypatch.setattr(peft_checkpoint, name, held)

    async with running(model_folder) as engine:
        await trained(engine, steps=2)
        await engine.snapshot("a", "s")
        await engine.forward_backward("a", lessons(3, seed=8), CROSS_ENTROPY)
        before = vars_of(engine, "a")[0].clone()
        for name in ("save_file", "write_hashed"):
            hold(name)
        folder = str(tmp_path / "w")
        call = (
            engine.save("a", folder, optimizer=True)
            if what == "adapter"
            else engine.save_snapshot("s", folder)
        )
        saving = asyncio.create_task(call)
        stepping = asyncio.create_task(engine.optim_step("a", RATE))
        async with asyncio.timeout(20):
            await asyncio.to_thread(writing.wait, 20)
            assert (await stepping).version == 3
            assert not (tmp_path / "w").exists()
            assert not saving.done()
            loading = asyncio.create_task(engine.load("b", folder, optimizer=what == "adapter"))
            written.set()
            assert (await saving).version == 2
            assert (await loading).version == 2
        assert torch.equal(engine._adapters["b"].flat, before)
        assert not torch.equal(engine._adapters["a"].flat, before)


async def test_a_save_whose_caller_went_away_is_written_all_the_same(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        saving = asyncio.create_task(engine.save("a", str(tmp_path / "w"), optimizer=True))
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        assert (await engine.load("b", str(tmp_path / "w"), optimizer=True)).version == 1


async def test_saves_into_one_folder_are_written_in_order(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "w")
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        calls: list[Any] = []
        for seed in range(5):
            calls.append(engine.forward_backward("a", lessons(2, seed=seed), CROSS_ENTROPY))
            calls.append(engine.optim_step("a", RATE))
            calls.append(engine.save("a", folder, optimizer=False))
        answers = await asyncio.gather(*calls)
        assert [saved.version for saved in answers[2::3]] == [2, 3, 4, 5, 6]
        assert (await engine.load("b", folder, optimizer=False)).version == 6
        assert torch.equal(engine._adapters["b"].flat, engine._adapters["a"].flat)
        assert [file.name for file in tmp_path.iterdir()] == ["w"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@proves("checkpoint:peft")
async def test_peft_reads_our_folder_and_computes_our_logits(
    model_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    async with running(model_folder) as engine:
        await trained(engine, config=LoraConfig(rank=4, alpha=16, seed=1))
        await engine.snapshot("a", "s")
        await engine.save_snapshot("s", str(tmp_path / "peft"))
        tokens = prompts(1, low=30)[0]
        passed = await engine.forward_backward(
            "a", (lesson(tokens),), CROSS_ENTROPY, forward_only=True
        )
    base: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    assert abs(logprobs_of(passed.logprobs[0]) - expected).max() < within(5e-5, 0.2)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (4, 16, "none")
    assert "lm_head" in config["target_modules"]
    unembed = model.get_submodule("base_model.model.lm_head")
    assert unembed.lora_B["default"].weight.abs().max() > 0  # type: ignore[index]


def lesson(tokens: list[int]) -> Datum:
    return pair(tokens, weights=[1.0] * (len(tokens) - 1))


@proves("sample:snapshot")
async def test_a_snapshot_stands_still_while_training_goes_on(
    model_folder: Path, tmp_path: Path
) -> None:
    """And sampling from it leaves the trainer untouched."""
    prompt = prompts(1)[0]
    async with running(model_folder) as engine:
        await trained(engine, steps=2)
        assert (await engine.snapshot("a", "old")).version == 2
        before = (await sample(engine, "old", prompt, n=4, seed=1)).sequences
        await engine.forward_backward("a", lessons(4, seed=50), CROSS_ENTROPY)
        flat, gradient = engine._adapters["a"].flat.clone(), engine._adapters["a"]._gradient.clone()
        assert (await sample(engine, "old", prompt, n=4, seed=1)).sequences == before
        assert torch.equal(engine._adapters["a"].flat, flat)
        assert torch.equal(engine._adapters["a"]._gradient, gradient)
        assert (await engine.optim_step("a", RATE)).version == 3
        assert (await engine.snapshot("a", "new")).version == 3
        assert (await sample(engine, "old", prompt, n=4, seed=1)).sequences == before
        new = await sample(engine, "new", prompt, n=4, seed=1)
        assert new.version == 3
        assert new.sequences != before


async def test_a_snapshot_survives_the_disk_and_its_adapter(
    model_folder: Path, tmp_path: Path
) -> None:
    prompt = prompts(1)[0]
    async with running(model_folder) as engine:
        await trained(engine, steps=2)
        await engine.snapshot("a", "s")
        await engine.save_snapshot("s", str(tmp_path / "s"))
        before = (await sample(engine, "s", prompt, n=2, seed=1)).sequences
        await engine.drop("a")
        await engine.drop("never was")
        assert (await sample(engine, "s", prompt, n=2, seed=1)).sequences == before
    async with running(model_folder) as other:
        assert await other.hold("t", from_folder(tmp_path / "s")) == 2
        assert (await sample(other, "t", prompt, n=2, seed=1)).sequences == before
        await other.drop("t")
        with pytest.raises(NotFound, match="'t'"):
            await sample(other, "t", prompt)


async def test_weights_by_folder_arrive_whole_or_not_at_all(
    model_folder: Path, tmp_path: Path
) -> None:
    """What is held under the name before stays, to the bit."""
    prompt, folder = prompts(1)[0], tmp_path / "s"
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        taken = await engine.snapshot("a", "s")
        saved = await engine.save_snapshot("s", str(folder))
        whole = Weights(name="s", version=taken.version, folder=saved.folder, sha256=saved.sha256)
        assert await engine.hold("t", whole) == await engine.hold("same", taken) == 1
        before = (await sample(engine, "s", prompt, n=2, seed=1)).sequences
        assert (await sample(engine, "same", prompt, n=2, seed=1)).sequences == before
        content = (folder / peft_checkpoint.WEIGHTS).read_bytes()
        for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-4], None):
            if damaged is None:
                (folder / peft_checkpoint.WEIGHTS).unlink()
            else:
                (folder / peft_checkpoint.WEIGHTS).write_bytes(damaged)
            for name in ("t", "new"):
                with pytest.raises(WeightsDamaged, match="did not arrive whole"):
                    await engine.hold(name, whole)
        assert (await sample(engine, "t", prompt, n=2, seed=1)).sequences == before
        with pytest.raises(NotFound, match="'new'"):
            await sample(engine, "new", prompt)


@pytest.mark.parametrize("existing", [False, True])
@proves("checkpoint:whole")
async def test_a_full_disk_leaves_nothing_half_written(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    folder = tmp_path / "place" / "state"
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        if existing:
            await engine.save("a", str(folder), optimizer=True)
        before = {file: file.read_bytes() for file in folder.rglob("*")} if existing else {}

        def full(tensors: object, file: Path) -> None:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(peft_checkpoint, "save_file", full)
        await engine.forward_backward("a", lessons(2), CROSS_ENTROPY)
        await engine.optim_step("a", RATE)
        with pytest.raises(HalteresError, match="No space left") as caught:
            await engine.save("a", str(folder), optimizer=True)
        assert caught.value.next
        assert {
            file: file.read_bytes() for file in folder.parent.rglob("*") if file.is_file()
        } == before
        monkeypatch.undo()
        assert (await engine.save("a", str(folder), optimizer=True)).version == 2
        assert [file.name for file in folder.parent.iterdir()] == ["state"]


async def test_a_checkpoint_of_another_model_or_a_torn_one_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        state = json.loads((tmp_path / "a" / "state.json").read_text())
        state["lora"]["rank"] = 5
        (tmp_path / "a" / "state.json").write_text(json.dumps(state))
        with pytest.raises(InvalidData, match="does not fit"):
            await engine.load("b", str(tmp_path / "a"), optimizer=False)
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"torn")
        with pytest.raises(InvalidData, match="cannot be read"):
            await engine.load("b", str(tmp_path / "a"), optimizer=False)
        with pytest.raises(NotFound, match="lacks"):
            await engine.load("b", str(tmp_path / "nowhere"), optimizer=False)
        with pytest.raises(Conflict, match="exists"):
            await engine.create_adapter("a", LORA)


LEAVES = {
    "train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "train_mlp": {"gate_proj", "up_proj", "down_proj"},
    "train_unembed": {"lm_head"},
}


@pytest.mark.parametrize(
    "switches", [("train_attn",), ("train_mlp",), ("train_unembed",), tuple(LEAVES)]
)
@pytest.mark.parametrize("rank", [1, 8, 64])
async def test_rank_alpha_and_switches_are_what_the_folder_says_and_the_seed_is_the_beginning(
    model_folder: Path, tmp_path: Path, switches: tuple[str, ...], rank: int
) -> None:
    chosen = {name: name in switches for name in LEAVES}
    async with running(model_folder) as engine:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            await engine.create_adapter(name, LoraConfig(rank=rank, alpha=12, seed=seed, **chosen))
        assert torch.equal(engine._adapters["a"].flat, engine._adapters["b"].flat)
        assert not torch.equal(engine._adapters["a"].flat, engine._adapters["c"].flat)
        await engine.forward_backward("a", lessons(2), CROSS_ENTROPY)
        await engine.optim_step("a", RATE)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (rank, 12)
    assert set(config["target_modules"]) == set().union(*(LEAVES[switch] for switch in switches))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in tensors} == set(config["target_modules"])
    for name, tensor in tensors.items():
        assert tensor.shape[0 if ".lora_A." in name else 1] == rank
        assert tensor.abs().max() > 0
