"""A vLLM's life: started, watched and ended with all of its group, or waited for at an address."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deadlines import until

from halteres.engine.process import EngineProcess, RestartPolicy
from halteres.engine.protocol import EngineGone, ModelInfo, SamplingParams
from halteres.engine.vllm.adapters import LARGEST, AdapterFolders, Projections
from halteres.engine.vllm.client import PROBE, Demands, VllmSamples
from halteres.engine.vllm.server import RemoteVllm, VllmCommand, rank_of_server
from halteres.errors import HalteresError, InvalidConfig, NotReady, ProcessFailed, ServerError
from halteres.models import TINY

from . import recorded_vllm
from .recorded_vllm import DEADLY, FIRST, HANGING, in_thread
from .test_vllm_client import PROMPT, packed, published, unpacked, vllm

WAIT_S = 30
POLICY = RestartPolicy(backoff_s=0, max_backoff_s=0.1, ping_s=0.2, silent_s=0.6, ready_s=WAIT_S)
"""A process that hangs is noticed soon."""


def executable(place: Path) -> Path:
    """A command that behaves as `vllm` does."""
    file = place / "vllm"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {recorded_vllm.__file__} "$@"\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def command(
    model_folder: Path, place: Path, further: str = "", flaws: str = "", **demands: object
) -> VllmCommand:
    return VllmCommand(
        given=f"{executable(place)} {further}",
        demands=Demands(name=TINY, folder=model_folder, context=512, **demands),  # type: ignore[arg-type]
        base=Projections.of(model_folder),
        folders=AdapterFolders(place / "held"),
        environment={"RECORDED_VLLM_FLAWS": flaws},
    )


@asynccontextmanager
async def running(given: VllmCommand, place: Path) -> AsyncIterator[EngineProcess[VllmSamples]]:
    host = EngineProcess(given, place / "vllm.log", policy=POLICY)
    try:
        async with asyncio.timeout(WAIT_S):
            await host.start()
        yield host
    finally:
        await host.stop()


def group_of(pid: int) -> list[int]:
    """Processes of this group that have not ended."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == pid and state not in "ZX":
                found.append(int(entry.name))
    return found


async def first_token(host: EngineProcess[VllmSamples] | RemoteVllm, snapshot: str) -> int:
    result = await host.engine.sample(snapshot, PROMPT, 1, SamplingParams(max_tokens=1))
    return unpacked(result.sequences[0].tokens)[0]


async def test_a_vllm_is_started_used_and_ended_with_its_whole_group(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(command(model_folder, tmp_path), tmp_path) as host:
        assert host.info is not None
        assert (host.info.trains, host.info.exact, host.info.max_rank) == (False, False, 32)
        assert host.info.targets == ("attn", "mlp")
        await host.engine.hold("snapshot-1", published(tmp_path, 5))
        assert await first_token(host, "snapshot-1") == FIRST + 5
        pid = host.pid
        assert pid is not None
        # ours, the front process and the worker that it leaves behind
        assert len(group_of(pid)) == 3
    await until(lambda: not group_of(pid), within_s=WAIT_S)
    assert not (tmp_path / "held").exists()  # weights take room


@pytest.mark.parametrize("victim", [0, 1], ids=["the process above it", "its front process"])
async def test_a_vllm_that_is_killed_leaves_nothing_and_another_holds_nothing(
    model_folder: Path, tmp_path: Path, victim: int
) -> None:
    async with running(command(model_folder, tmp_path), tmp_path) as host:
        await host.engine.hold("snapshot-1", published(tmp_path, 5))
        pid, engine = host.pid, host.engine
        assert pid is not None
        under_way = asyncio.create_task(
            engine.sample(None, packed(5, HANGING), 1, SamplingParams(max_tokens=1))
        )
        await asyncio.sleep(0)
        os.kill(sorted(group_of(pid))[victim], signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(EngineGone):
                await under_way
            await host.settled(restarts=1)
        assert not group_of(pid)
        assert host.engine is not engine
        assert not (tmp_path / "held" / "snapshot-1").exists()
        await host.engine.hold("snapshot-1", published(tmp_path, 6))
        assert await first_token(host, "snapshot-1") == FIRST + 6


async def test_a_request_that_ends_it_is_told_and_one_that_hangs_does_not_end_it(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(command(model_folder, tmp_path), tmp_path) as host:
        hanging = asyncio.create_task(
            host.engine.sample(None, packed(5, HANGING), 1, SamplingParams(max_tokens=1))
        )
        await asyncio.sleep(2 * POLICY.silent_s)
        assert (host.restarts, hanging.done()) == (0, False)
        with pytest.raises(EngineGone):
            await host.engine.sample(None, packed(5, DEADLY), 1, SamplingParams(max_tokens=1))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(EngineGone):
                await hanging
            await host.settled(restarts=1)
        assert host.failure is not None
        assert "Exit code 3" in host.failure.why


async def test_a_vllm_that_is_silent_is_replaced(model_folder: Path, tmp_path: Path) -> None:
    async with running(command(model_folder, tmp_path), tmp_path) as host:
        pid = host.pid
        assert pid is not None
        for one in group_of(pid):
            os.kill(one, signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            await host.settled(restarts=1)
        assert host.failure is not None
        assert "hung" in host.failure.what
        assert not group_of(pid)


async def test_when_the_service_is_killed_nothing_of_its_vllm_is_left(
    model_folder: Path, tmp_path: Path
) -> None:
    given = command(model_folder, tmp_path)
    code = (
        "import asyncio, pathlib, sys\n"
        "from halteres.engine.process import EngineProcess\n"
        "from halteres.engine.vllm.adapters import AdapterFolders, Projections\n"
        "from halteres.engine.vllm.client import Demands\n"
        "from halteres.engine.vllm.server import VllmCommand\n"
        "place, model = map(pathlib.Path, sys.argv[1:])\n"
        "async def main():\n"
        "    demands = Demands(name='halteres/tiny', folder=model, context=512)\n"
        "    base, folders = Projections.of(model), AdapterFolders(place / 'held')\n"
        "    command = VllmCommand(given=str(place / 'vllm'), demands=demands, base=base, folders=folders)\n"
        "    host = EngineProcess(command, place / 'vllm.log')\n"
        "    await host.start()\n"
        "    print(host.pid, host.engine._http.connector.path, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        str(tmp_path),
        str(model_folder),
        stdout=-1,
        env=given.variables(),
    )
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        number, socket = (await process.stdout.readline()).split()
    pid, folder = int(number), Path(os.fsdecode(socket)).parent
    assert len(group_of(pid)) == 3
    assert folder.is_dir()
    process.kill()
    await process.wait()
    await until(lambda: not group_of(pid), within_s=WAIT_S)
    assert not folder.exists()


async def test_a_vllm_that_cannot_be_used_is_not_started_again(
    model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="It is version"):
        async with running(command(model_folder, tmp_path, flaws="version"), tmp_path):
            raise AssertionError("it was taken")


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("--port 8000", "--port"),
        ("--max-lora-rank=64", "--max-lora-rank"),
        ("--max_lora_rank 64", "--max-lora-rank"),
        ("--no-enable-lora", "--no-enable-lora"),
        ("--no_enable_scale_out", "--no-enable-scale-out"),
        ("--enable-chunked-prefill", "--enable-chunked-prefill"),
        ("--gpu_memory_utilization=.9", "--gpu-memory-utilization"),
        ("--served-model x", "--served-model"),
        ("--max_num_seqs many", "--max-num-seqs"),
        ("'", "cannot be read"),
    ],
)
def test_arguments_that_the_service_sets_itself_are_refused(
    model_folder: Path, tmp_path: Path, further: str, words: str
) -> None:
    """vLLM takes "_" for "-", "--no-" before a switch, and the beginning of a name."""
    with pytest.raises(InvalidConfig, match=words):
        command(model_folder, tmp_path, further).check()


@pytest.mark.parametrize("further", ["--max-num-seqs 8", "--max_num_seqs=8", "--max_num_seqs 8"])
def test_how_many_sequences_it_decodes_is_its_users_to_say_in_every_spelling(
    model_folder: Path, tmp_path: Path, further: str
) -> None:
    given = command(model_folder, tmp_path, further)
    given.check()
    given = given.settled()
    words = [word.replace("_", "-") for word in given.argv(tmp_path / "socket")]
    assert sum(word.startswith("--max-num-seqs") for word in words) == 1
    assert given.demands.most_samples == 8
    usual = command(model_folder, tmp_path).settled()
    assert "--max-num-seqs" in usual.argv(tmp_path / "socket")
    assert usual.demands.most_samples == 64


@pytest.mark.parametrize(
    ("trains", "asked", "expected"),
    [
        (("float32", "cpu"), ("auto", "auto"), ("float32", "cpu")),
        (("bfloat16", "cuda"), ("auto", "auto"), ("bfloat16", "cuda")),
        (("float32", "cuda"), ("auto", "cuda"), ("float32", "cuda")),
        (("float32", "cpu"), ("bfloat16", "cpu"), ("bfloat16", "cpu")),
    ],
)
def test_it_computes_in_the_type_and_on_the_device_that_the_engine_chose(
    model_folder: Path,
    tmp_path: Path,
    trains: tuple[str, str],
    asked: tuple[str, str],
    expected: tuple[str, str],
) -> None:
    """With `auto` a small model stays on the CPU in fp32, also where there is a GPU."""
    info = ModelInfo(
        name=TINY,
        folder=str(model_folder),
        architecture="",
        vocab_size=1,
        max_context_length=1,
        num_parameters=1,
        dtype=trains[0],
        device=trains[1],
        threads=1,
    )
    given = command(model_folder, tmp_path, dtype=asked[0], device=asked[1])
    given = replace(given, trainer=lambda: info).settled()
    assert (given.demands.dtype, given.demands.device) == expected
    assert given.demands.largest == LARGEST[expected[0]]
    words = given.argv(tmp_path / "socket")
    assert words[words.index("--dtype") + 1] == expected[0]
    assert ("--gpu-memory-utilization" in words) is (expected[1] == "cuda")
    assert ("VLLM_CPU_KVCACHE_SPACE" in given.variables()) is (expected[1] == "cpu")


def test_further_arguments_are_passed_on_and_what_a_run_needs_is_asked_for(
    model_folder: Path, tmp_path: Path
) -> None:
    given = command(
        model_folder, tmp_path, "--enforce-eager --swap-space 2", tempered=True, rank=20, places=3
    )
    words = given.argv(tmp_path / "socket")
    assert words[:3] == [str(tmp_path / "vllm"), "serve", str(model_folder)]
    assert "--enforce-eager" in words
    assert words[words.index("--swap-space") + 1] == "2"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert words[words.index("--max-lora-rank") + 1] == "32"
    assert words[words.index("--max-cpu-loras") + 1] == "3"
    assert words[words.index("--max-loras") + 1] == "3"
    targets = words[words.index("--lora-target-modules") + 1 :]
    assert targets[:7] == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert [rank_of_server(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]


async def test_an_executable_that_is_not_there_is_named(model_folder: Path, tmp_path: Path) -> None:
    given = command(model_folder, tmp_path)
    (tmp_path / "vllm").unlink()
    with pytest.raises((InvalidConfig, ProcessFailed), match="There is no executable"):
        async with running(given, tmp_path):
            raise AssertionError("it was started")


# At an address


def remote(model_folder: Path, place: Path, url: str, ready_s: float = WAIT_S) -> RemoteVllm:
    policy = RestartPolicy(max_backoff_s=0.1, ping_s=0.2, silent_s=0.6, ready_s=ready_s)
    demands = Demands(name=TINY, folder=model_folder, context=512)
    folders = AdapterFolders(place / "held")
    return RemoteVllm(url, demands, Projections.of(model_folder), folders, policy=policy)


async def test_a_vllm_at_an_address_is_waited_for_and_holds_nothing_when_it_comes_back(
    model_folder: Path, tmp_path: Path
) -> None:
    first = in_thread()
    port = first.socket.getsockname()[1]
    host = remote(model_folder, tmp_path, f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(WAIT_S):
            await host.start()
            await host.engine.hold("snapshot-1", published(tmp_path, 5))
            assert await first_token(host, "snapshot-1") == FIRST + 5
            engine = host.engine
            first.adapters.clear()  # it was started again
            with pytest.raises(EngineGone, match="started again"):
                await first_token(host, "snapshot-1")
            await host.settled(restarts=1)
            assert host.engine is not engine
            first.end()
            with pytest.raises(EngineGone):
                while True:
                    await host.engine.sample(None, PROMPT, 1, SamplingParams(max_tokens=1))
            second = in_thread(port=port)
            await host.settled(restarts=2)
            await host.engine.hold("snapshot-1", published(tmp_path, 6))
            assert await first_token(host, "snapshot-1") == FIRST + 6
    finally:
        await host.stop()
    assert second.adapters == {}  # what was loaded there is unloaded
    second.end()


async def test_a_vllm_at_an_address_that_cannot_be_used_is_refused_at_the_start(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm("no_tokens") as server:
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        host = remote(model_folder, tmp_path, url)
        with pytest.raises(InvalidConfig, match="--enable-scale-out"):
            await host.start()
        assert host.state == "failed"
        await host.stop()


async def test_an_address_where_nothing_answers_is_given_up(
    model_folder: Path, tmp_path: Path
) -> None:
    host = remote(model_folder, tmp_path, "http://127.0.0.1:9", ready_s=0.2)
    with pytest.raises(NotReady, match="does not answer"):
        await host.start()
    await host.stop()


@pytest.mark.parametrize(
    ("silent", "error"), [(False, ServerError), (True, NotReady)], ids=["broken", "silent"]
)
async def test_a_first_answer_that_fails_ends_the_start(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent: bool,
    error: type[HalteresError],
) -> None:
    clients = list[VllmSamples]()

    async def info(client: VllmSamples) -> ModelInfo:
        clients.append(client)
        if silent:
            await asyncio.Event().wait()
        raise RuntimeError("strange")

    monkeypatch.setattr(VllmSamples, "info", info)
    with vllm() as server:
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        host = remote(model_folder, tmp_path, url, ready_s=2)
        try:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(error):
                    await host.start()
        finally:
            await host.stop()
    assert clients
    assert all(client.broken.is_set() for client in clients)


async def test_a_folder_stays_until_its_name_is_unloaded(
    model_folder: Path, tmp_path: Path
) -> None:
    """Those of an earlier life of the service."""
    left = tmp_path / "held" / "snapshot-left"
    left.mkdir(parents=True)
    unloaded = dict[str, bool]()  # whether the folder was there

    class Adapters(dict[str, Path]):
        def pop(self, name: str, *default: Any) -> Any:
            unloaded[name] = name in self and self[name].is_dir()
            return super().pop(name, *default)

    with vllm() as server:
        server.adapters = Adapters({"snapshot-left": left})
        host = remote(model_folder, tmp_path, f"http://127.0.0.1:{server.socket.getsockname()[1]}")
        try:
            async with asyncio.timeout(WAIT_S):
                await host.start()
            assert unloaded == {"snapshot-left": True, PROBE: True}
            assert not left.exists()
        finally:
            await host.stop()
