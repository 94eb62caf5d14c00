"""Several ranks that train as one: the figures of one process, equal on every rank."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch.distributed as dist
import transformers as hf

from halteres.config import environ
from halteres.engine import process
from halteres.engine.process import EngineCommand, EngineProcess, RestartPolicy
from halteres.engine.protocol import LoraConfig
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.ranks import ENDED, Card, Ranks, check_alike
from halteres.errors import InvalidConfig, ProcessFailed
from halteres.models import TINY

from .rank_program import LIMITS, Found, figures_of, folder, played
from .test_torch_families import FAMILIES, made

TESTS = Path(__file__).parents[1]
RUNS_WITHIN_S = 100
ENDS_WITHIN_S = 15  # a rank that has lost the others

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
async def alone(place: Path) -> Found:
    """What one process makes of it, without ranks."""
    written = place / "alone.npz"
    if not written.exists():
        engine = TorchEngine(folder(), TINY, 1, LIMITS)
        try:
            np.savez(written, **await played(engine, place))
        finally:
            await engine.close()
    with np.load(written) as found:
        return dict(found)


@cache
def ran(place: Path, size: int, *options: str) -> Found:
    """What `rank_program` has written, as so many ranks; it compares them with each other."""
    place.mkdir(exist_ok=True)
    out = place / "found.npz"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--nproc-per-node", str(size), "--max-restarts", "0"),
            *("-m", "engine.rank_program", str(out), str(place), *options, str(size)),
        ],
        cwd=TESTS,
        env=environ.for_child(OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS)),
        capture_output=True,
        text=True,
        timeout=RUNS_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    with np.load(out) as written:
        return dict(written)


def apart(found: Found, alone: Found, kind: str, *, relative: bool = False) -> float:
    """The largest difference of what is called so."""
    worst = 0.0
    for name, expected in alone.items():
        if name.startswith(kind):
            difference = float(np.abs(found[name] - expected).max())
            if relative:
                difference /= float(np.abs(expected).max())
            worst = max(worst, difference)
    return worst


def assert_like_one(found: Found, alone: Found) -> None:
    assert apart(found, alone, "logprobs") <= 5e-5
    assert apart(found, alone, "loss", relative=True) <= 2e-4
    assert apart(found, alone, "weights") <= 1e-5
    assert apart(found, alone, "tokens") == 0
    assert apart(found, alone, "update_norm", relative=True) <= 1e-4
    assert apart(found, alone, "grad_norm", relative=True) <= 1e-4
    assert str(found["refused"]) == "nan_loss"
    assert str(found["not read"]) == "not_found"


def test_one_rank_has_the_bits_of_one_process(place: Path, alone: Found) -> None:
    found = ran(place / "1", 1)
    for name, expected in alone.items():
        assert np.array_equal(found[name], expected), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_a_sharded_base_compute_what_one_process_computes(
    size: int, place: Path, alone: Found
) -> None:
    """As below, by transformers' layers, of which each rank has a part; computed once more in the
    backward.
    """
    assert_like_one(ran(place / f"{size} sharded", size, "--shard"), alone)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_process_computes(size: int, place: Path, alone: Found) -> None:
    """Log-probabilities, losses and weights of two adapters of different ranks trained in turns,
    one made later, one dropped, one loaded from a folder that rank 0 alone sees; after a loss that is
    not finite on the last rank alone, and a folder that is missing.
    """
    assert_like_one(ran(place / f"{size}", size), alone)


@pytest.mark.parametrize("options", [(), ("--shard",)], ids=["replicated", "sharded"])
def test_two_runs_of_equal_size_have_equal_bits(options: tuple[str, ...], place: Path) -> None:
    name = " ".join(("2", *options)).replace("--shard", "sharded")
    first, second = ran(place / name, 2, *options), ran(place / f"{name} again", 2, *options)
    assert np.array_equal(first["digest"], second["digest"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is rank 0 of 2, as torchrun would say it."""
    values = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": free_port()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return monkeypatch


CARD = Card(ranks=2, version="1", model="m", dtype="float32", shard=False)

JOINED = """
import sys, time
from halteres.engine.torch.ranks import Card, Ranks
card = Card(ranks=2, version="1", model="m", dtype="float32", shard="--shard" in sys.argv)
ranks = Ranks.join(card, "cpu", 60)
"""


def two_of(program: str, *options: str) -> list[subprocess.Popen[str]]:
    """Two ranks that have met and then run this program, without torchrun: the first has the
    store.
    """
    port, started = free_port(), []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", JOINED + program, *options],
                env=environ.for_child(
                    MASTER_ADDR="127.0.0.1",
                    OMP_NUM_THREADS="1",
                    PYTHONPATH=str(TESTS),
                    **variables,
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def test_a_rank_ends_where_the_machine_of_the_store_cannot_be_reached() -> None:
    """It waits for the next call; a stopped process stands for a machine off the network."""
    program = """
ranks.watch()
print("joined", flush=True)
if ranks.rank:
    ranks.receive()
time.sleep(100)
"""
    first, second = two_of(program)
    try:
        for one in (first, second):
            assert one.stdout is not None
            assert one.stdout.readline() == "joined\n"
        first.send_signal(signal.SIGSTOP)
        _, said = second.communicate(timeout=ENDS_WITHIN_S)
    finally:
        for one in (first, second):
            one.kill()
            one.communicate()
    assert second.returncode == ENDED
    assert "error: Rank 1 cannot reach the first machine" in said


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_killed_while_models_are_loaded_ends_the_other(dies: int) -> None:
    """Neither exchanges anything then: a sleeping process stands for one that reads its files."""
    program = """
print("joined", flush=True)
time.sleep(100)
"""
    ranks = two_of(program)
    other = ranks[1 - dies]
    try:
        for one in ranks:
            assert one.stdout is not None
            assert one.stdout.readline() == "joined\n"
        ranks[dies].kill()
        _, said = other.communicate(timeout=ENDS_WITHIN_S)
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    assert other.returncode == ENDED
    assert f"error: Rank {dies} has ended." in said


def test_a_rank_without_memory_for_a_checkpoint_holds_up_no_other() -> None:
    """Rank 1 alone cannot make what rank 0 has read: both have the same failure, at once."""
    program = f"""
from pathlib import Path
import torch
from halteres.engine.protocol import LoraConfig
from halteres.engine.torch import peft_checkpoint
from halteres.engine.torch.adapter import Checkpoint, Layout
from halteres.engine.torch.loading import load_base
from halteres.errors import HalteresError

def refuse(*_):
    raise RuntimeError("not enough memory: you tried to allocate 1 byte")

base = load_base(Path({str(folder())!r}), torch.float32, torch.device("cpu"))
own = None
if ranks.rank == 0:
    layout = Layout.of(base, LoraConfig(rank=2, seed=1))
    own = Checkpoint(layout=layout, flat=torch.zeros(layout.size), version=1, adam=None)
else:
    peft_checkpoint.Layout.of = refuse
try:
    peft_checkpoint.shared(ranks, own, base)
except HalteresError as error:
    print(error.code, flush=True)
ranks.close()
ranks.leave()
"""
    ranks = two_of(program)
    try:
        said = [one.communicate(timeout=RUNS_WITHIN_S) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    assert [out for out, _ in said] == ["gpu_oom\n"] * 2, said


def test_a_rank_of_a_sharded_base_that_fails_alone_leaves_no_other_waiting() -> None:
    """In the first step of an adapter, which the other rank takes; and at the beginning of a pass,
    in which both end.
    """
    program = """
import asyncio
import torch
from engine.rank_program import LIMITS, STEP, data_of, folder
from halteres.engine.protocol import LoraConfig, LossSpec
from halteres.engine.torch import TorchEngine, passes
from halteres.errors import HalteresError

def refuse(*_):
    raise MemoryError

async def main():
    engine = TorchEngine(folder(), "m", 1, LIMITS, ranks=ranks)
    ranks.watch()
    await engine.create_adapter("a", LoraConfig(rank=2, seed=1))
    data, loss = data_of("cross_entropy", 1), LossSpec(name="cross_entropy")
    await engine.forward_backward("a", data, loss)
    empty_like = torch.empty_like
    if ranks.rank:
        torch.empty_like = refuse
    try:
        await engine.optim_step("a", STEP)
        print("stepped", flush=True)
    except HalteresError as error:
        print(error.code, flush=True)
    torch.empty_like = empty_like
    if ranks.rank:
        passes.MicroBatch.of = refuse
    await engine.forward_backward("a", data, loss)

asyncio.run(main())
"""
    ranks = two_of(program, "--shard")
    try:
        said = [one.communicate(timeout=RUNS_WITHIN_S) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    assert [out for out, _ in said] == ["stepped\n", "gpu_oom\n"], said
    assert [one.returncode for one in ranks] == [ENDED, ENDED]
    assert "Rank 1 failed within a micro-batch" in said[1][1]


SHARDED = ("gemma", "phi", "phi3", "qwen3_moe", "smollm3")
"""Families that transformers computes; those with windows are refused."""


async def test_families_of_transformers_are_sharded_as_they_are_computed_whole(
    tmp_path: Path,
) -> None:
    """Experts, biases, heads of their own width: two passes, the second after a step."""
    program = """
import asyncio
from pathlib import Path
import numpy as np
from engine.rank_program import LIMITS, figures_of
from halteres.engine.torch import TorchEngine

async def main(folders):
    for folder in map(Path, folders):
        engine = TorchEngine(folder, "m", 1, LIMITS, ranks=ranks)
        found = await figures_of(engine)
        if ranks.rank == 0:
            np.save(folder / "sharded.npy", found)
        await engine.close()

asyncio.run(main(sys.argv[2:]))
ranks.close()
ranks.leave()
"""
    folders = [made(tmp_path / name, FAMILIES[name]) for name in SHARDED]
    ranks = two_of(program, "--shard", *map(str, folders))
    try:
        said = [one.communicate(timeout=RUNS_WITHIN_S)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    assert [one.returncode for one in ranks] == [0, 0], said
    for one in folders:
        engine = TorchEngine(one, "m", 1, LIMITS)
        expected = await figures_of(engine)
        await engine.close()
        apart = np.abs(np.load(one / "sharded.npy") - expected).max()
        assert apart <= 5e-5, (one.name, apart)


def test_a_rank_whose_torchrun_has_ended_kills_no_other_parent(
    first_of_two: pytest.MonkeyPatch,
) -> None:
    """An orphan's parent is init, or the supervisor that adopted it."""
    first_of_two.setenv("WORLD_SIZE", "1")
    first_of_two.setenv("TORCHELASTIC_RUN_ID", "r")
    killed: list[int] = []

    def end(code: int) -> None:
        raise SystemExit(code)

    ranks = Ranks.join(msgspec.structs.replace(CARD, ranks=1), "cpu", within_s=10)
    try:
        first_of_two.setattr(os, "kill", lambda pid, _: killed.append(pid))
        first_of_two.setattr(os, "_exit", end)
        parent = os.getppid()
        with pytest.raises(SystemExit):
            ranks.end("It ends.", "A test wants it.", launcher=True)
        assert killed == [parent]
        first_of_two.setattr(os, "getppid", lambda: 1)
        with pytest.raises(SystemExit):
            ranks.end("It ends.", "A test wants it.", launcher=True)
        assert killed == [parent]
    finally:
        dist.destroy_process_group()


def test_a_rank_that_never_comes_is_named_in_time(first_of_two: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessFailed, match="Not all 2 ranks came within 1 s") as raised:
        Ranks.join(CARD, "cpu", within_s=1)
    assert "Missing: 1." in raised.value.why


def test_a_rank_that_goes_as_soon_as_it_has_come_is_an_error_with_a_next_step(
    first_of_two: pytest.MonkeyPatch,
) -> None:
    port = int(os.environ["MASTER_PORT"])
    # the store of rank 0, where the other has left its card and no more
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] - its documented name
    store.set("halteres/card/1", msgspec.json.encode(CARD).decode())
    first_of_two.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ProcessFailed, match=f"could not meet at 127.0.0.1:{port}"):
        Ranks.join(CARD, "cpu", within_s=1)


def test_a_port_that_somebody_else_has_is_refused(first_of_two: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        first_of_two.setenv("MASTER_PORT", str(port))
        with pytest.raises(ProcessFailed, match=f"could not meet at 127.0.0.1:{port}"):
            Ranks.join(CARD, "cpu", within_s=1)
        with pytest.raises(ProcessFailed, match=f"cannot meet at 127.0.0.1:{port}"):
            process.Ranks(number=2, address=("127.0.0.1", port)).check_address()


async def test_machines_that_never_come_are_an_error_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun waits for them, and no rank is started before."""
    monkeypatch.setattr(process, "MACHINES_COME_WITHIN_S", 2)
    ranks = process.Ranks(number=2, machines=2, address=("127.0.0.1", free_port()))
    command = EngineCommand(backend="torch", folder=folder(), name=TINY, threads=1, ranks=ranks)
    engine = EngineProcess(command, tmp_path / "log", policy=RestartPolicy(ready_s=RUNS_WITHIN_S))
    with pytest.raises(ProcessFailed, match="Only 1 of 2 machines came") as raised:
        await engine.start()
    await engine.stop()
    assert raised.value.next


@pytest.mark.timeout(300)
async def test_ranks_of_another_machine_end_in_order_with_the_service(tmp_path: Path) -> None:
    """Two torchruns stand for two machines of two ranks each. The second is asked nothing: it ends
    with code 0, so that what starts it again and again ends too.
    """
    port = free_port()
    ranks = process.Ranks(number=4, machines=2, address=("127.0.0.1", port))
    command = EngineCommand(backend="torch", folder=folder(), name=TINY, threads=1, ranks=ranks)
    engine = EngineProcess(command, tmp_path / "log", policy=RestartPolicy(ready_s=250))
    second = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("--max-restarts", "0", "-m", "halteres.engine", "--backend", "torch"),
        *("--model", TINY, "--ranks", "4", "--threads", "1"),
        env=environ.for_child(OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        await engine.start()
        assert engine.info is not None
        assert engine.info.ranks == 4
        await engine.engine.create_adapter("a", LoraConfig(rank=2, seed=1))
        await engine.stop()
        async with asyncio.timeout(2 * ENDS_WITHIN_S):
            said = (await second.communicate())[1].decode()
    finally:
        await engine.stop()
        with suppress(ProcessLookupError):
            second.kill()
    assert second.returncode == 0, said[-2000:]
    assert not [line for line in said.splitlines() if line.startswith("error: ")]


async def test_ranks_of_another_machine_fail_where_the_service_is_killed(tmp_path: Path) -> None:
    """Another code than 0: what starts them again and again goes on, for the next service."""
    program = f"""
import asyncio
from pathlib import Path
from halteres.engine.process import EngineCommand, EngineProcess, Ranks
from halteres.models import TINY

async def main(folder, place, port):
    ranks = Ranks(number=2, machines=2, address=("127.0.0.1", int(port)))
    command = EngineCommand(
        backend="torch", folder=Path(folder), name=TINY, threads=1, ranks=ranks
    )
    await EngineProcess(command, Path(place) / "log").start()
    print("ready", flush=True)
    await asyncio.sleep({RUNS_WITHIN_S})

import sys
asyncio.run(main(*sys.argv[1:]))
"""
    port = str(free_port())
    service = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(folder()), str(tmp_path), port),
        env=environ.for_child(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
    )
    second = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port),
        *("--max-restarts", "0", "-m", "halteres.engine", "--backend", "torch"),
        *("--model", TINY, "--ranks", "2", "--threads", "1"),
        env=environ.for_child(OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert service.stdout is not None
        async with asyncio.timeout(RUNS_WITHIN_S):
            assert await service.stdout.readline() == b"ready\n"
        service.kill()
        async with asyncio.timeout(2 * ENDS_WITHIN_S):
            said = (await second.communicate())[1].decode()
    finally:
        for one in (service, second):
            with suppress(ProcessLookupError):
                one.kill()
            await one.wait()
    assert second.returncode != 0, said[-2000:]
    assert [line for line in said.splitlines() if line.startswith("error: ")]


def test_an_address_that_has_no_host_is_refused() -> None:
    ranks = process.Ranks(number=2, machines=2, address=("no-such-host.invalid", 29400))
    with pytest.raises(ProcessFailed, match="cannot meet at no-such-host"):
        ranks.check_address()


def test_an_address_of_another_machine_is_refused() -> None:
    # of a block that is reserved for documentation: no machine has it
    ranks = process.Ranks(number=2, machines=2, address=("192.0.2.1", free_port()))
    with pytest.raises(ProcessFailed, match="It is not this machine"):
        ranks.check_address()


def test_the_log_says_that_other_machines_are_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger=process.__name__)
    process.Ranks(number=2, machines=2, address=("127.0.0.1", 29400)).say_who_is_waited_for()
    assert "waits at 127.0.0.1:29400 for ranks of 1 other machine(s), for 300 s" in caplog.text


def test_a_number_of_ranks_that_is_another_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="3 ranks were asked for, and 2 are there"):
        check_alike([msgspec.structs.replace(CARD, ranks=3)] * 2)


def test_a_rank_without_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidConfig, match="has no others"):
        Ranks.join(CARD, "cpu", within_s=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ranks", 3), ("version", "2"), ("model", "n"), ("dtype", "bfloat16"), ("shard", True)],
)
def test_what_two_ranks_have_different_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match="The ranks have different") as raised:
        check_alike([CARD, msgspec.structs.replace(CARD, **{field: value})])
    assert f"rank 1 has {value}" in raised.value.why


async def test_ranks_with_different_models_end_with_one_sentence(tmp_path: Path) -> None:
    """Two machines, as it were, of which one was given another file."""
    other = tmp_path / "other"
    shutil.copytree(folder(), other)
    with (other / "model.safetensors").open("r+b") as weights:
        weights.seek(-2, 2)
        weights.write(b"\0\0")
    port, started = free_port(), []
    for rank, model in enumerate((folder(), other)):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()}
        command = [
            *(sys.executable, "-m", "halteres.engine", "--backend", "torch", "--name", TINY),
            *("--ranks", "2", "--model", str(model), "--socket", str(tmp_path / "s")),
        ]
        started.append(
            await asyncio.create_subprocess_exec(
                *command,
                env=environ.for_child(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", **variables),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
    async with asyncio.timeout(RUNS_WITHIN_S):
        said = [(await one.communicate())[1].decode() for one in started]
    for one, text in zip(started, said, strict=True):
        assert one.returncode == 1
        assert "error: The ranks have different models." in text
        assert "Traceback" not in text


@pytest.mark.parametrize("kind", ["window", "unknown"])
async def test_a_model_that_cannot_be_sharded_is_refused_with_the_reason(
    kind: str, tmp_path: Path
) -> None:
    """Attention in windows that are shorter than the context, or of another kind than ours."""
    small: dict[str, Any] = {
        "vocab_size": 700,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "window":
        says = "exact up to 64 of 256 positions"
        config = hf.MistralConfig(**small, max_position_embeddings=256, sliding_window=64)
        model: Any = hf.MistralForCausalLM(config)
    else:
        says = "attention scores are capped"
        model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**small, head_dim=16, sliding_window=8192))
    shutil.copytree(folder(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "m")
    command = EngineCommand(
        backend="torch",
        folder=tmp_path / "m",
        name="m",
        threads=1,
        ranks=process.Ranks(number=1, shard=True),
    )
    engine = EngineProcess(command, tmp_path / "log", policy=RestartPolicy(ready_s=RUNS_WITHIN_S))
    with pytest.raises(ProcessFailed, match=says):
        await engine.start()
    await engine.stop()
