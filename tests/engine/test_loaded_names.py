"""The names that a vLLM has loaded: never more than its places, never one in use unloaded, and known
whatever becomes of a caller.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from deadlines import until

from halteres.engine.protocol import Weights
from halteres.engine.vllm.adapters import AdapterFolders
from halteres.engine.vllm.loaded_names import LoadedNames
from halteres.errors import NotFound, ServerError

WAIT_S = 20


class Vllm:
    """What it was told to load; while `open` is not set, its answers wait."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.most = 0
        self.unloaded: list[str] = []
        self.refused: set[str] = set()
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def load(self, name: str) -> None:
        self.asked.set()
        await self.open.wait()
        if name in self.refused:
            raise ServerError("vLLM refused it.")
        self.loaded.append(name)
        self.most = max(self.most, len(self.loaded))

    async def unload(self, name: str) -> None:
        self.asked.set()
        await self.open.wait()
        self.unloaded.append(name)
        if name in self.loaded:
            self.loaded.remove(name)


def names_of(place: Path, places: int) -> tuple[LoadedNames, Vllm]:
    vllm = Vllm()
    return LoadedNames(vllm, AdapterFolders(place), places), vllm


async def held(names: LoadedNames, place: Path, *many: str) -> None:
    for version, name in enumerate(many):
        (place / name).mkdir()
        await names.hold(name, Weights(name=name, version=version))


async def test_the_name_unused_for_longest_makes_room_and_comes_back(tmp_path: Path) -> None:
    names, vllm = names_of(tmp_path, places=2)
    await held(names, tmp_path, "a", "b")
    async with names.in_use("a"):
        pass
    await held(names, tmp_path, "c")
    assert vllm.loaded == ["a", "c"]
    assert names.known == ("a", "b", "c")
    async with names.in_use("b"):
        assert vllm.loaded == ["c", "b"]
    assert names.find("b").version == 1
    assert vllm.most == 2
    assert (tmp_path / "a").is_dir()


async def test_a_name_in_use_is_never_unloaded_for_another(tmp_path: Path) -> None:
    names, vllm = names_of(tmp_path, places=1)
    await held(names, tmp_path, "a", "b")
    async with asyncio.timeout(WAIT_S):
        async with names.in_use("a"):
            waiting = asyncio.create_task(_used(names, "b"))
            vllm.asked.clear()
            second = asyncio.create_task(_used(names, "a"))
            await asyncio.sleep(0)
            assert vllm.loaded == ["a"]
            assert not waiting.done()
        await asyncio.gather(waiting, second)
    assert vllm.most == 1


async def _used(names: LoadedNames, name: str) -> None:
    async with names.in_use(name):
        pass


async def test_a_dropped_name_is_unloaded_before_its_folder_goes(tmp_path: Path) -> None:
    names, vllm = names_of(tmp_path, places=2)
    await held(names, tmp_path, "a")
    vllm.open.clear()
    vllm.asked.clear()
    dropping = asyncio.create_task(names.drop("a"))
    async with asyncio.timeout(WAIT_S):
        await vllm.asked.wait()
        assert (tmp_path / "a").is_dir()
        vllm.open.set()
        await dropping
    assert vllm.loaded == []
    assert not (tmp_path / "a").exists()
    await names.drop("a")
    with pytest.raises(NotFound):
        await _used(names, "a")


async def test_a_load_that_fails_leaves_neither_name_nor_folder(tmp_path: Path) -> None:
    names, vllm = names_of(tmp_path, places=2)
    vllm.refused = {"a"}
    with pytest.raises(ServerError):
        await held(names, tmp_path, "a")
    assert names.known == ()
    assert names.now().names == frozenset()
    assert not (tmp_path / "a").exists()


async def test_a_load_is_made_to_its_end_whoever_goes_away(tmp_path: Path) -> None:
    names, vllm = names_of(tmp_path, places=2)
    await held(names, tmp_path, "a")
    (tmp_path / "b").mkdir()
    vllm.open.clear()
    vllm.asked.clear()
    holding = asyncio.create_task(names.hold("b", Weights(name="b", version=1)))
    async with asyncio.timeout(WAIT_S):
        await vllm.asked.wait()
        holding.cancel()
        vllm.open.set()
        with pytest.raises(asyncio.CancelledError):
            await holding
        await until(lambda: "b" in vllm.unloaded, within_s=WAIT_S)
    assert vllm.loaded == ["a"]
    assert names.known == ("a",)
    assert names.now().names == {"a"}


async def test_names_are_lost_only_of_a_list_made_while_none_came_or_went(tmp_path: Path) -> None:
    names, vllm = names_of(tmp_path, places=2)
    await held(names, tmp_path, "a")
    before = names.now()
    assert names.lost_since(before, ["a", "of others"]) == []
    assert names.lost_since(before, ["of others"]) == ["a"]
    await held(names, tmp_path, "b")
    assert names.lost_since(before, []) == []
    before = names.now()
    vllm.open.clear()
    vllm.asked.clear()
    dropping = asyncio.create_task(names.drop("b"))
    async with asyncio.timeout(WAIT_S):
        await vllm.asked.wait()
        assert names.lost_since(before, ["a"]) == []
        vllm.open.set()
        await dropping
    assert names.lost_since(before, ["a"]) == []
