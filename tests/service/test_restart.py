"""What outlives the engine, and what outlives the service."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
from contract.requirements import proves
from tinker import types

from halteres.models import TINY
from halteres.service.keys import LOCAL

from .live_service import DATA, STEP, LiveService, closing, prompt, serving, trainer

WAIT_S = 20
ONE = types.SamplingParams(max_tokens=1)


async def test_named_weights_are_loaded_again_after_the_engine_died(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    path = (await training.save_weights_for_sampler("named")).path
    named = await client.create_sampling_client(model_path=path)
    base = await client.create_sampling_client(base_model=TINY)
    before = await named.compute_logprobs(prompt(5, 6))
    await scene.host.die()
    assert await named.compute_logprobs(prompt(5, 6)) == before
    await base.sample(prompt(5), 1, ONE)
    assert scene.engine.calls["hold"] == 1


@proves("promise:lost-sample")
async def test_a_sample_under_way_when_the_engine_dies_is_drawn_again_by_itself(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    base = await client.create_sampling_client(base_model=TINY)
    held = scene.engine.block("sample")
    waiting = base.sample(prompt(5), 1, ONE)
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        await scene.host.die()
        assert len((await waiting).sequences) == 1


@proves("durable:known-again")
async def test_after_a_restart_everything_that_was_named_is_known_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene, closing(await scene.client(halteres_run="r1")) as client:
        training = await trainer(client, rank=4)
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        state = (await training.save_state("state")).path
        weights = (await training.save_weights_for_sampler("weights")).path
        named = await client.create_sampling_client(model_path=weights)
        scored = await named.compute_logprobs(prompt(5, 6))
        first = scene.rows("SELECT id FROM requests WHERE kind = 'forward_backward'")[0][0]
        outcome = await scene.redeem(first)
    async with serving(tmp_path) as scene, closing(await scene.client()) as client:
        assert await scene.redeem(first) == outcome
        assert (await scene.get("/halteres/v1/info"))[1]["policies"] == {"r1": 1}
        _, answer = await scene.ask(
            "/runs/r1/generate", text="1", sampling_params={"max_new_tokens": 1}
        )
        assert answer["meta_info"]["policy_version"] == [1, 1]
        again = await client.create_sampling_client(model_path=weights)
        assert await again.compute_logprobs(prompt(5, 6)) == scored
        resumed = await client.create_training_client_from_state_with_optimizer(state)
        assert resumed.get_info().lora_rank == 4


async def test_a_checkpoint_folder_of_another_service_is_known_by_its_place(tmp_path: Path) -> None:
    async with serving(tmp_path / "one") as scene, closing(await scene.client()) as client:
        training = await trainer(client, rank=4)
        path = (await training.save_state("moved")).path
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "checkpoints").rename(tmp_path / "two" / "checkpoints")
    async with serving(tmp_path / "two") as scene, closing(await scene.client()) as client:
        resumed = await client.create_training_client_from_state_with_optimizer(path)
        assert resumed.get_info().lora_rank == 4


async def test_state_loaded_into_a_lost_model_brings_it_back(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    path = (await training.save_state("kept")).path
    await scene.host.die()
    with pytest.warns(FutureWarning):
        loading = training.load_state_with_optimizer(path)
    assert (await loading).path == path
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)


async def test_a_model_without_a_checkpoint_is_still_described_after_a_restart(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
    async with serving(tmp_path) as scene:
        status, info = await scene.post("get_info", {"model_id": model})
        assert (status, info["lora_rank"], info["model_name"]) == (200, 4, TINY)


KILLED_BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from halteres.engine import folders

rename = Path.rename

def killed(self, target):
    if self.name.startswith(".new-"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

Path.rename = killed
with folders.written(Path(sys.argv[1])) as place:
    (place / "state.json").write_text("half")
"""


@proves("checkpoint:whole")
async def test_a_checkpoint_whose_replacement_was_killed_between_the_renames_is_put_back(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene, closing(await scene.client()) as client:
        training = await trainer(client, rank=4)
        path = (await training.save_state("kept")).path
        folder = scene.service.checkpoints.find(path, LOCAL).folder
    command = [sys.executable, "-c", KILLED_BETWEEN_THE_RENAMES, str(folder)]
    killed = await asyncio.to_thread(subprocess.run, command, timeout=WAIT_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    async with serving(tmp_path) as scene, closing(await scene.client()) as client:
        resumed = await client.create_training_client_from_state_with_optimizer(path)
        assert resumed.get_info().lora_rank == 4
    assert [place.name for place in folder.parent.iterdir()] == ["kept"]
