"""kill -9 of the service, of the engine, of both, during a training loop written with the plain
SDK: the loop finishes, and on the CPU its losses are those of a loop that nobody disturbed.

The instants are chosen by a seed, counted in requests that the journal holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tinker
from contract.requirements import proves
from deadlines import until
from tinker import types

from halteres.models import TINY

from .live_service import KEY

STEPS = 12
# publish, sample, forward_backward, optim_step; every fourth step saves, and loads
REQUESTS_OF_A_STEP = 4
LOOP_S = 90
SEED = 20261120


@dataclass
class Kept:
    """A service that somebody starts again whenever it dies, as an init system does."""

    state: Path
    descriptor: int
    replay_s: float
    further: tuple[str, ...] = ()  # arguments
    deaths: int = 0
    popen: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        argv = [
            "-m",
            "halteres.service",
            "--state",
            str(self.state),
            "--threads",
            "1",
            "--replay-s",
            str(self.replay_s),
            *self.further,
        ]
        command = [sys.executable, *argv, "--listen-fd", str(self.descriptor)]
        with (self.state / "service.log").open("ab") as log:
            self.popen = subprocess.Popen(
                command, pass_fds=[self.descriptor], stderr=log, stdout=log
            )

    async def watch(self) -> None:
        while True:
            await until(lambda: self.popen.poll() is not None, within_s=LOOP_S)
            self.deaths += 1
            self.start()

    def kill(self, whom: str) -> None:
        """`service`, `engine` or `both`; whoever is dead already is let be."""
        if whom in ("engine", "both"):
            self._kill(json.loads((self.state / "service.json").read_bytes())["engine_pid"])
        if whom in ("service", "both"):
            self._kill(self.popen.pid)

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def accepted(self) -> int:
        """Requests that the journal holds."""
        try:
            connection = sqlite3.connect(f"file:{self.state}/journal.sqlite?mode=ro", uri=True)
        except sqlite3.OperationalError:
            return 0
        try:
            return connection.execute("SELECT count(*) FROM requests").fetchone()[0]
        except sqlite3.OperationalError:
            return 0
        finally:
            connection.close()


@contextmanager
def kept(state: Path, replay_s: float, *further: str) -> Iterator[tuple[Kept, str]]:
    state.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        service = Kept(state, bound.fileno(), replay_s, further)
        service.start()
        try:
            yield service, f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            service.popen.kill()
            service.popen.wait()


def loop(url: str) -> list[float]:
    """The losses of a small on-policy training, and the score of what it has become."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = client.create_lora_training_client(TINY, rank=8, seed=1).result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    losses = []
    for step in range(STEPS):
        sampling = training.save_weights_and_get_sampling_client().result()
        asked = types.SamplingParams(max_tokens=8, seed=step, stop=[])
        drawn = sampling.sample(prompt, num_samples=4, sampling_params=asked).result()
        data = [
            taught(prompt.to_ints(), sequence, (-1.0) ** row)
            for row, sequence in enumerate(drawn.sequences)
        ]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=5e-3))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["policy_version:max"] == step + 1
        if step % 4 == 1:
            path = training.save_state(f"step-{step}").result().path
        if step % 4 == 3:  # back to what was saved two steps ago, in a training run of its own
            other = client.create_training_client_from_state_with_optimizer(path).result()
            scored = other.forward(data, "importance_sampling").result()
            losses.append(scored.metrics["loss:sum"])
    last = training.save_weights_and_get_sampling_client().result()
    losses += last.compute_logprobs(prompt).result()[1:]
    return losses


def taught(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    length = len(tokens) - 1
    inputs = {
        "target_tokens": (tokens[1:], "int64"),
        "logprobs": ([0.0] * before + list(sequence.logprobs or []), "float32"),
        "advantages": ([0.0] * before + [advantage] * len(sequence.tokens), "float32"),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: types.TensorData(data=data, dtype=dtype, shape=[length])
            for name, (data, dtype) in inputs.items()
        },
    )


async def disturbed(
    state: Path, kills: list[tuple[int, str]], replay_s: float = 1.0
) -> tuple[list[float], Kept]:
    """The losses of the loop, while these are killed as soon as the journal holds so many
    requests.
    """
    with kept(state, replay_s) as (service, url):
        watch = asyncio.create_task(service.watch())
        training = asyncio.create_task(asyncio.to_thread(loop, url))
        try:
            async with asyncio.timeout(LOOP_S):
                for after, whom in kills:
                    await until(
                        lambda after=after: training.done() or service.accepted() >= after,
                        within_s=LOOP_S,
                    )
                    service.kill(whom)
                return await training, service
        finally:
            watch.cancel()


@proves("durable:kill-service", "durable:kill-engine")
@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_a_loop_of_the_plain_sdk_survives_every_kill_with_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    undisturbed, _ = await disturbed(tmp_path / "undisturbed", [])
    chance = random.Random(SEED)
    rounds = [("engine", 0.0), ("service", 0.0), ("both", 0.05), ("engine", 1.0), ("service", 1.0)]
    for round_, (whom, replay_s) in enumerate(rounds):
        instants = sorted(chance.sample(range(2, STEPS * REQUESTS_OF_A_STEP), 2))
        losses, service = await disturbed(
            tmp_path / str(round_), [(instant, whom) for instant in instants], replay_s
        )
        assert losses == undisturbed, (
            f"seed {SEED}, round {round_}: {whom} after {instants} requests"
        )
        assert service.deaths == (0 if whom == "engine" else 2)
