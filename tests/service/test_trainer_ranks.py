"""A service whose trainer is two ranks: a rank that ends or hangs ends the other, both start again,
and a plain SDK loop has the losses of one that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from deadlines import until
from tinker import types

from halteres.engine.process import EngineCommand, EngineProcess, Ranks, RestartPolicy
from halteres.engine.protocol import LoraConfig
from halteres.models import TINY

from .live_service import BASE, KEY
from .test_chaos import Kept, kept

pytestmark = pytest.mark.chaos

STARTS_S, STEPS = 120.0, 5
ENDS_S = 10.0  # after a rank has failed, nothing of the group is left


def pids_of(launcher: int) -> dict[int, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == launcher and stat[0] != "Z":
                variables = (folder / "environ").read_bytes().split(b"\0")
                ranks = [one for one in variables if one.startswith(b"RANK=")]
                if ranks:
                    found[int(ranks[0].removeprefix(b"RANK="))] = int(folder.name)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def engine(place: Path, number: int = 2, **changes: object) -> EngineProcess:
    command = EngineCommand(
        backend="torch",
        folder=BASE.folder,
        name=TINY,
        threads=1,
        cache_gb=0.1,
        ranks=Ranks(number=number, **changes),  # type: ignore[arg-type]
    )
    policy = RestartPolicy(ready_s=STARTS_S, backoff_s=0)
    return EngineProcess(command, place / "engine.log", policy=policy)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_rank_that_fails_ends_all_in_time_and_they_start_again(
    how: signal.Signals, tmp_path: Path
) -> None:
    process = engine(tmp_path)
    await process.start()
    try:
        assert process.info is not None
        assert process.info.ranks == 2
        for rank in (0, 1):
            assert process.pid is not None
            before = pids_of(process.pid)
            assert sorted(before) == [0, 1]
            link, launcher = process.engine, process.pid
            began = time.monotonic()
            os.kill(before[rank], how)
            if how == signal.SIGKILL or rank:  # of rank 0 that hangs the service hears by its pings
                async with asyncio.timeout(ENDS_S):
                    await link.broken.wait()
            group = (launcher, *before.values())
            rest_s = ENDS_S - (time.monotonic() - began)
            await until(lambda group=group: not any(map(lives, group)), within_s=rest_s)
            async with asyncio.timeout(STARTS_S):
                await process.settled(restarts=rank + 1)
            await process.engine.create_adapter(f"a{rank}", LoraConfig(rank=2))
    finally:
        await process.stop()
    assert process.state == "stopped"
    assert process.failure is not None
    said = {signal.SIGKILL: ("SIGKILL", "has ended"), signal.SIGSTOP: ("no sign of life",)}
    assert any(words in f"{process.failure}" for words in said[how]), process.failure


@pytest.mark.timeout(200)
async def test_ranks_write_to_the_log_and_end_with_torchrun(tmp_path: Path) -> None:
    """No rank can block on a pipe that nobody reads, and none is left where torchrun is killed."""
    process = engine(tmp_path)
    await process.start()
    try:
        assert process.pid is not None
        launcher, ranks = process.pid, pids_of(process.pid)
        log = str(tmp_path / "engine.log")
        for pid in ranks.values():
            assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)] == [log, log]
        os.kill(launcher, signal.SIGKILL)
        await until(lambda: not any(map(lives, ranks.values())), within_s=ENDS_S)
    finally:
        await process.stop()


def data_of(seed: int) -> list[types.Datum]:
    """Two hundred datums: a pass of them takes some tenths of a second."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(200):
        tokens = random.integers(3, 600, random.integers(20, 60)).tolist()
        inputs = {"weights": np.ones(len(tokens) - 1, np.float32), "target_tokens": tokens[1:]}
        found.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    return found


def margin(
    data: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss of the client's own."""
    loss = torch.stack([(one + 2).square().mean() for one in logprobs]).sum()
    return loss, {"margin": float(loss.detach())}


def loop(url: str, disturb: Callable[[int, str], None]) -> list[float]:
    """The losses of a training with the plain SDK; `disturb` may kill between passes and within."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = client.create_lora_training_client(TINY, rank=8, seed=1).result()
    losses = []
    for step in range(STEPS):
        disturb(step, "between")
        passed = training.forward_backward(data_of(step), "cross_entropy")
        disturb(step, "inside")
        losses.append(passed.result().metrics["loss:sum"])
        custom = training.forward_backward_custom(data_of(100 + step)[:20], margin)
        losses.append(custom.result().metrics["margin"])
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    client.holder.close()
    return losses


class Killer:
    """Kills ranks of a service, each of its two in turns."""

    def __init__(self, service: Kept, when: dict[int, str]) -> None:
        self._service, self._when = service, when
        self.killed: list[int] = []  # ranks

    def __call__(self, step: int, where: str) -> None:
        if self._when.get(step) != where:
            return
        if where == "inside":
            count = self._service.accepted()
            ends = time.monotonic() + 30
            while self._service.accepted() == count and time.monotonic() < ends:
                time.sleep(0.005)  # the loop is a thread of its own
        launcher = json.loads((self._service.state / "service.json").read_bytes())["engine_pid"]
        ranks = pids_of(launcher)
        rank = len(self.killed) % 2
        os.kill(ranks[rank], signal.SIGKILL)
        self.killed.append(rank)
        # the next kill is of a new group
        ends = time.monotonic() + ENDS_S
        while lives(launcher):
            assert time.monotonic() < ends, "the group did not end in time"
            time.sleep(0.05)


async def losses_of(place: Path, when: dict[int, str]) -> tuple[list[float], list[int]]:
    with kept(place, 0.0, "--trainer-ranks", "2", "--cache-gb", "0.1") as (service, url):
        killer = Killer(service, when)
        async with asyncio.timeout(500):
            found = await asyncio.to_thread(loop, url, killer)
        return found, killer.killed


@pytest.mark.timeout(1600)
async def test_a_loop_whose_ranks_are_killed_has_the_losses_of_one_undisturbed(
    tmp_path: Path,
) -> None:
    """Ten times, either rank, between passes and inside: five in each of two loops, since a service
    gives an engine up that dies more often within five minutes.
    """
    expected, killed = await losses_of(tmp_path / "undisturbed", {})
    assert killed == []
    for number, places in enumerate((("between", "inside"), ("inside", "between"))):
        when = {step: places[step % 2] for step in range(STEPS)}
        found, killed = await losses_of(tmp_path / f"{number}", when)
        assert len(killed) == STEPS
        assert set(killed) == {0, 1}
        assert found == expected


def published(url: str) -> tuple[list[float], list[float]]:
    """Log-probabilities of a sample from trained weights, as sampler and trainer have them."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = client.create_lora_training_client(TINY, rank=8, seed=1).result()
    training.forward_backward(data_of(0)[:20], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = [5, 6, 7, 8]
    asked = types.SamplingParams(max_tokens=8, seed=1, stop=[])
    drawn = sampling.sample(types.ModelInput.from_ints(prompt), 1, asked).result().sequences[0]
    whole = [*prompt, *drawn.tokens]
    inputs = {"weights": np.ones(len(whole) - 1, np.float32), "target_tokens": whole[1:]}
    datum = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
    passed = training.forward([datum], "cross_entropy").result()
    trained = passed.loss_fn_outputs[0]["logprobs"].tolist()[len(prompt) - 1 :]
    client.holder.close()
    assert drawn.logprobs is not None
    return list(drawn.logprobs), trained


@pytest.mark.timeout(400)
async def test_a_sharded_trainer_publishes_for_a_sampler(tmp_path: Path) -> None:
    further = ("--trainer-ranks", "2", "--shard", "--samplers", "1", "--cache-gb", "0.1")
    with kept(tmp_path / "state", 0.0, *further) as (_, url):
        async with asyncio.timeout(300):
            sampled, trained = await asyncio.to_thread(published, url)
    assert sampled == pytest.approx(trained, abs=5e-5)
