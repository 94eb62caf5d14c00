"""The SDK's own command line, as its users type it: `tinker checkpoint …`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves

from halteres.service.checkpoint_folders import SHORTEST_S
from halteres.service.keys import LOCAL

from .live_service import KEY, LiveService, trainer

pytestmark = pytest.mark.runs

COMMAND_S = 60
PROGRAM = """
import runpy
from halteres.process import block_torch
block_torch()
runpy.run_module("tinker.cli", run_name="__main__", alter_sys=True)
"""
"""`python -m tinker.cli` as where no torch is: it needs none, and importing that takes most of a
command's time.
"""


@pytest.fixture
async def paths(client: tinker.ServiceClient) -> dict[str, str]:
    """A checkpoint of every kind."""
    training = await trainer(client)
    return {
        "weights": (await training.save_state("a")).path,
        "sampler": (await training.save_weights_for_sampler("b")).path,
        "external": (await training.save_weights_external("c")).path,
    }


async def tinker_cli(scene: LiveService, *arguments: str, ends: int = 0) -> Any:
    """What `tinker --format json …` printed, read."""
    variables = {
        **os.environ,
        "TINKER_BASE_URL": scene.url,
        "TINKER_API_KEY": KEY,
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", PROGRAM, "--format", "json", *arguments]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, env=variables, **pipes)
    async with asyncio.timeout(COMMAND_S):
        printed, said = await process.communicate()
    # The threads of SDK 0.38.0's transport now and then abort its interpreter after its last word,
    # on a busy machine.
    assert process.returncode in (ends, -signal.SIGABRT), said.decode()
    if ends:
        return said.decode()
    return json.loads(printed) if printed.strip() else None


@proves("export:cli")
async def test_checkpoints_are_listed_and_shown(scene: LiveService, paths: dict[str, str]) -> None:
    run = paths["weights"].removeprefix("tinker://").split("/")[0]
    everything, of_run, shown = await asyncio.gather(
        tinker_cli(scene, "checkpoint", "list"),
        tinker_cli(scene, "checkpoint", "list", "--run-id", run),
        tinker_cli(scene, "checkpoint", "info", paths["external"]),
    )
    for listed in (everything, of_run):
        assert {one["tinker_path"] for one in listed["checkpoints"]} == set(paths.values())
    assert (shown["checkpoint_type"], shown["lora_rank"], shown["is_lora"]) == ("external", 8, True)


@proves("export:cli")
async def test_checkpoints_are_published_given_a_time_to_live_and_deleted(
    scene: LiveService, paths: dict[str, str]
) -> None:
    known, run = scene.service.checkpoints, paths["weights"].removeprefix("tinker://").split("/")[0]
    await asyncio.gather(
        tinker_cli(scene, "checkpoint", "publish", paths["weights"]),
        tinker_cli(scene, "checkpoint", "set-ttl", paths["sampler"], "--ttl", str(SHORTEST_S)),
    )
    assert known.owned(paths["weights"], LOCAL).public
    assert known.owned(paths["sampler"], LOCAL).expires_at is not None
    _, deleted = await asyncio.gather(
        tinker_cli(scene, "checkpoint", "unpublish", paths["weights"]),
        tinker_cli(
            scene, "checkpoint", "delete", "--yes", "--run-id", run, "--type", "sampler_weights"
        ),
    )
    assert not known.owned(paths["weights"], LOCAL).public
    assert (deleted["deleted_count"], deleted["failed"]) == (1, [])
    assert {str(one.path) for one in known.all()} == {paths["weights"], paths["external"]}


@proves("export:cli")
async def test_checkpoints_are_downloaded(
    scene: LiveService, paths: dict[str, str], tmp_path: Path
) -> None:
    """Training weights by way of an export that is deleted afterwards."""
    out = tmp_path / "out"
    out.mkdir()
    weights, exported = await asyncio.gather(
        tinker_cli(scene, "checkpoint", "download", paths["weights"], "-o", str(out / "weights")),
        tinker_cli(scene, "checkpoint", "download", paths["external"], "-o", str(out / "external")),
    )
    for told in (weights, exported):
        folder = Path(told["destination"])
        assert {file.name for file in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        assert told["file_size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert {str(one.path) for one in scene.service.checkpoints.all()} == set(paths.values())


async def test_a_hub_upload_stops_where_the_hub_begins(
    scene: LiveService, paths: dict[str, str]
) -> None:
    """There is no hub here: the command asks for a login before it touches the checkpoint."""
    said = await tinker_cli(scene, "checkpoint", "push-hf", paths["external"], ends=1)
    assert "hf auth login" in said
