"""vLLMs as samplers of a whole service: a stand-in that answers from recorded bodies, the unmodified
SDK before it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import tinker
from deadlines import until
from engine.recorded_vllm import FIRST, FLAWS, in_thread
from engine.test_vllm_server import executable, group_of
from tinker import types

from halteres.config import environ
from halteres.engine.process import EngineCommand, Ranks
from halteres.engine.vllm.server import RemoteVllm
from halteres.errors import InvalidConfig
from halteres.loopback import open_listener, url_of
from halteres.models import TINY
from halteres.service.fleet import Fleet
from halteres.service.fleet_options import add_arguments, fleet_of, ranks_of
from halteres.service.server import serve
from halteres.service.service import Options

from .live_service import BASE, closing, connected
from .test_durability import tokens, version

WAIT_S = 60


def arguments_of(state: Path, samplers: str, *further: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--engine", "scripted", "--samplers", samplers, "--vllm", str(state.parent / "vllm")]
    return parser.parse_args(
        [*words, *further],
        argparse.Namespace(state=state, sample_logprobs="raw"),
    )


@asynccontextmanager
async def served(
    place: Path, samplers: str, *further: str
) -> AsyncIterator[tuple[str, Fleet, tinker.ServiceClient]]:
    """A service while the block runs, and a client of it; ended by a signal."""
    executable(place)
    fleet = fleet_of(arguments_of(place / "state", samplers, *further), BASE)
    with open_listener(0) as bound:
        url = url_of(bound)
        service = asyncio.create_task(serve(place / "state", BASE, fleet, bound, Options()))
        try:
            client = await asyncio.to_thread(connected, url)
            async with asyncio.timeout(WAIT_S), closing(client):
                yield url, fleet, client
        finally:
            signal.raise_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(service, return_exceptions=True)


async def trainer(client: tinker.ServiceClient, *, unembed: bool = False) -> tinker.TrainingClient:
    return await client.create_lora_training_client(TINY, rank=4, train_unembed=unembed)


async def info_of(url: str) -> dict[str, object]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/halteres/v1/info") as response:
        return await response.json()


@pytest.mark.runs
async def test_a_service_samples_each_version_from_vllm(tmp_path: Path) -> None:
    async with served(tmp_path, "vllm") as (url, _, client):
        training = await trainer(client)
        kept = []
        for step in (1, 2, 3):
            assert await version(training) == step
            sampling = await training.save_weights_and_get_sampling_client()
            kept.append(sampling)
            assert (await tokens(sampling))[0][0] == FIRST + step
        # an older version still means its weights
        assert [(await tokens(one))[0][0] - FIRST for one in kept] == [1, 2, 3]
        told = await info_of(url)
        assert told["adapter_targets"] == ["attn", "mlp"]
        assert told["samples_exactly"] is False
        with pytest.raises(tinker.RequestFailedError, match="ignores that part"):
            await trainer(client, unembed=True)


@pytest.mark.runs
async def test_a_vllm_that_is_killed_costs_a_retry(tmp_path: Path) -> None:
    async with served(tmp_path, "vllm") as (_, fleet, client):
        training = await trainer(client)
        await version(training)
        sampling = await training.save_weights_and_get_sampling_client()
        assert (await tokens(sampling))[0][0] == FIRST + 1
        (host,) = fleet.samplers
        assert host.pid is not None
        before = host.pid
        os.kill(sorted(group_of(before))[1], signal.SIGKILL)
        assert (await tokens(sampling))[0][0] == FIRST + 1
        assert host.restarts == 1
        await until(lambda: not group_of(before), within_s=WAIT_S)


@pytest.mark.runs
async def test_two_vllms_and_an_engine_of_ours_sample_one_run(tmp_path: Path) -> None:
    """An adapter with an unembedding can be had then: the engine of ours samples it."""
    server = in_thread("key")
    os.environ["RECORDED_VLLM_KEY"] = "secret"
    url = f"http://127.0.0.1:{server.socket.getsockname()[1]} RECORDED_VLLM_KEY"
    try:
        async with served(tmp_path, f"own,vllm,{url}") as (_, fleet, client):
            training = await trainer(client)
            for host in fleet.samplers:
                await host.settled()
            assert await version(training) == 1
            sampling = await training.save_weights_and_get_sampling_client()
            drawn = await asyncio.gather(*(first_of(sampling, token) for token in range(20, 60)))
            # the scripted engine writes other tokens than the stand-ins
            assert FIRST + 1 in drawn
            assert len(set(drawn)) > 1
            names = [body.get("model", "") for _, body in server.requests]
            assert any(name.startswith("snapshot-") for name in names)
            whole = await trainer(client, unembed=True)
            assert await version(whole) == 1
            sampling = await whole.save_weights_and_get_sampling_client()
            drawn = await asyncio.gather(*(first_of(sampling, token) for token in range(20, 30)))
            assert FIRST + 1 not in drawn
    finally:
        del os.environ["RECORDED_VLLM_KEY"]
        server.end()


async def first_of(sampling: tinker.SamplingClient, token: int) -> int:
    params = types.SamplingParams(max_tokens=3, seed=token, temperature=1.0)
    prompt = types.ModelInput.from_ints([5, token])
    answer = await sampling.sample(prompt, 1, params)
    return answer.sequences[0].tokens[0]


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for samplers, further, words in (
        ("vllm", ("--vllm", "/nowhere/vllm"), "There is no executable"),
        ("vllm", ("--vllm", f"{executable(tmp_path)} --port 1"), "sets itself"),
        ("http://a:1 NOT_SET_ANYWHERE", (), "is not set"),
        ("vllm", ("--vllm", f"{executable(tmp_path)} --max_cpu_loras 1"), "sets itself"),
        ("vllm", ("--lora-rank", "600"), "must be 1 to 512"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            fleet_of(arguments_of(tmp_path / "state", samplers, *further), BASE)
    with pytest.raises(SystemExit):
        arguments_of(tmp_path / "state", "2,http://a:1")


WORDS = {
    "version": "It is version 0.31.2",
    "html": "It does not answer as vLLM does",
    "key": "It refuses the key",
    "no_tokens": "It takes no tokens (--enable-scale-out)",
    "no_loading": "Adapters cannot be loaded while it runs",
    "other_model": "It serves 'someone/else'",
    "vocabulary": "Its vocabulary is larger than the model's",
    "short": "It reads 64 tokens",
    "rank": "(--max-lora-rank)",
    "blind": "It does not see the folder",
    "processed": "",
}
"""What is said of each; the last is no flaw where log-probabilities at temperature 1 do."""


@pytest.mark.runs
@pytest.mark.parametrize("flaw", [flaw for flaw in FLAWS if WORDS[flaw]])
async def test_a_service_whose_vllm_cannot_be_used_ends_with_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    monkeypatch.setenv("RECORDED_VLLM_KEY", "another key")
    server, state = in_thread(flaw), tmp_path / "state"
    url = f"http://127.0.0.1:{server.socket.getsockname()[1]} RECORDED_VLLM_KEY"
    fleet = fleet_of(arguments_of(state, url, "--context", "512"), BASE)
    with open_listener(0) as bound:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(InvalidConfig) as refused:
                await serve(state, BASE, fleet, bound, Options())
    sentence = refused.value.sentence
    assert WORDS[flaw] in sentence
    assert "\n" not in sentence
    assert "another key" not in sentence
    # nothing is half-started: no name is loaded there, no process and no folder is left
    assert server.adapters == {}
    assert fleet.trainer.pid is None or not group_of(fleet.trainer.pid)
    assert list(state.glob("held-*/*")) == []
    server.end()


@pytest.mark.runs
async def test_a_rank_above_what_every_vllm_takes_is_refused_when_the_adapter_is_made(
    tmp_path: Path,
) -> None:
    """Where one of ours samples too, it takes such adapters."""
    async with served(tmp_path, "vllm", "--lora-rank", "8") as (_, fleet, client):
        assert fleet.max_rank == 8
        assert await client.create_lora_training_client(TINY, rank=8, train_unembed=False)
        with pytest.raises(tinker.RequestFailedError, match="takes ranks up to 8"):
            await client.create_lora_training_client(TINY, rank=16, train_unembed=False)
    mixed = arguments_of(tmp_path / "other", "own,vllm", "--lora-rank", "8")
    assert fleet_of(mixed, BASE).max_rank == 512


def test_a_shared_folder_is_divided_by_services_wherever_their_states_lie(tmp_path: Path) -> None:
    """Two machines may have their states at the same path."""
    shared = tmp_path / "shared"

    def folder_of(state: Path) -> Path:
        words = ("--weights-folder", str(shared))
        (host,) = fleet_of(arguments_of(state, "http://a:1", *words), BASE).samplers
        assert isinstance(host, RemoteVllm)
        return host._folders.path("snapshot-1").parent

    first, second = tmp_path / "one", tmp_path / "two"
    found = folder_of(first)
    assert found.parent == shared
    assert folder_of(second) != found
    # the service is started again, and its state may have moved
    assert folder_of(first) == found
    first.rename(tmp_path / "moved")
    assert folder_of(tmp_path / "moved") == found
    assert folder_of(first) != found
    (second / "id").write_text("../..")
    with pytest.raises(InvalidConfig, match="is damaged"):
        folder_of(second)


async def test_the_variable_with_a_samplers_key_reaches_no_process_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is called."""
    monkeypatch.setattr(environ, "_held_back", set[str]())
    monkeypatch.setenv("GPU2", "hunter2222")
    fleet_of(arguments_of(tmp_path / "state", "http://a:1 GPU2"), BASE)
    assert "GPU2" not in environ.for_sandboxed()
    assert environ.secrets()["GPU2"] == "hunter2222"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--shard",), "does not sample"),
        (("--trainer-ranks", "3", "--trainer-machines", "2"), "3 ranks on 2 machines"),
        (("--trainer-ranks", "0"), "0 ranks on 1 machines"),
        (("--trainer-ranks", "4", "--trainer-machines", "2"), "do not know where to meet"),
        (("--trainer-ranks", "2", "--trainer-address", "n0:29400"), "Set --trainer-machines"),
        (("--trainer-ranks", "2", "--engine", "scripted"), "'scripted' has one process"),
    ],
)
def test_ranks_that_cannot_be_started_so_are_refused(words: tuple[str, ...], says: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(InvalidConfig, match=says):
        ranks_of(parser.parse_args(words))


def test_ranks_are_started_by_torchrun_those_of_this_machine_first() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert ranks_of(parser.parse_args([])) is None
    words = ["--trainer-ranks", "8", "--trainer-machines", "2", "--trainer-address", "n0:29400"]
    ranks = ranks_of(parser.parse_args([*words, "--shard", "--samplers", "vllm"]))
    assert ranks == Ranks(number=8, shard=True, machines=2, address=("n0", 29400))
    command = EngineCommand(
        backend="torch", folder=BASE.folder, name=TINY, threads=1, ranks=ranks
    ).argv(Path("s"))
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nproc-per-node", "4", "--node-rank", "n0", "29400", "--shard"} <= set(command)
