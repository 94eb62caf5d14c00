"""Folders of adapters that somebody changed: refused in a sentence, and nothing outside them is
read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch import TorchEngine
from halteres.errors import InvalidData, NotFound

from .torch_fixtures import running, trained


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
