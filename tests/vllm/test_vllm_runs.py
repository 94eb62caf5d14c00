"""The unmodified SDK before a service that samples from a real vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from deadlines import until
from engine.test_vllm_server import group_of
from runs.run_fixtures import wait, wait_for_end
from service.test_trainer_ranks import pids_of
from tinker import types

from halteres.config.resolution import resolve_settings
from halteres.models import TINY
from halteres.observe.metrics import merge_by_step, series
from halteres.runs.directory import stop_run
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

pytestmark = pytest.mark.vllm

READY_S = 300
STEPS = 4
PROMPT = [5, 6, 7, 8]


def info_of(url: str) -> dict[str, object]:
    return httpx.get(f"{url}/halteres/v1/info", timeout=30).json()


@contextmanager
def served(state: Path, vllm: str, samplers: str = "vllm") -> Iterator[str]:
    """A service with these samplers, by default one vLLM; ended by a signal, nothing of it is
    left.
    """
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        words = ["--state", str(state), "--listen-fd", str(bound.fileno()), "--threads", "1"]
        words += ["--samplers", samplers, "--vllm", vllm, "--context", "512"]
        service = subprocess.Popen(
            [sys.executable, "-m", "halteres.service", *words], pass_fds=(bound.fileno(),)
        )
        try:
            ready_by = time.monotonic() + READY_S
            while True:
                assert time.monotonic() < ready_by
                assert service.poll() is None
                try:
                    if httpx.get(f"{url}/api/v1/healthz", timeout=60).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            yield url
        finally:
            service.terminate()
            service.wait(60)


def datum(
    sequence: types.SampledSequence, advantages: list[float], prompt: Sequence[int] = PROMPT
) -> types.Datum:
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    length = len(tokens) - 1
    inputs = {
        "target_tokens": (tokens[1:], "int64"),
        "logprobs": ([0.0] * before + list(sequence.logprobs or []), "float32"),
        "advantages": ([0.0] * before + advantages, "float32"),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: types.TensorData(data=data, dtype=dtype, shape=[length])
            for name, (data, dtype) in inputs.items()
        },
    )


def train(url: str, steps: int, *, between: object = lambda _: None) -> tuple[list[float], float]:
    """Rewards of the steps and of what came of them (shares of odd tokens), and the largest |log
    ratio| of all.
    """
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    training = client.create_lora_training_client(
        TINY, rank=16, seed=1, train_unembed=False
    ).result()
    rewards, apart = list[float](), 0.0
    for step in range(steps + 1):
        sampling = training.save_weights_and_get_sampling_client().result()
        between(step)  # type: ignore[operator]
        params = types.SamplingParams(max_tokens=8, seed=step, stop=[])
        prompt = types.ModelInput.from_ints(PROMPT)
        drawn = sampling.sample(prompt, num_samples=32, sampling_params=params).result().sequences
        scores = np.array([[float(token % 2) for token in one.tokens] for one in drawn])
        rewards.append(float(scores.mean()))
        if step == steps:
            return rewards, apart
        data = [
            datum(one, (row - scores.mean()).tolist())
            for one, row in zip(drawn, scores, strict=True)
        ]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        apart = max(apart, passed.result().metrics["log_ratio_abs:max"])
        assert stepped.result().metrics["policy_version:max"] == step + 1
    raise AssertionError("the last step returns")


def test_four_steps_raise_the_reward_and_sampler_and_trainer_agree(
    vllm_command: str, tmp_path: Path
) -> None:
    with served(tmp_path / "state", vllm_command) as url:
        rewards, apart = train(url, STEPS)
    print(f"\nrewards {[round(one, 2) for one in rewards]}, log_ratio_abs:max {apart:.1e}")  # noqa: T201
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8
    assert apart < 1e-4


async def test_a_run_completes_while_each_of_its_vllms_processes_is_killed(
    vllm_command: str, tmp_path: Path
) -> None:
    groups = set[int]()

    def kill(step: int) -> None:
        """Its worker, its core and its front process, in the middle of a run."""
        (sampler,) = info_of(url)["samplers"]  # type: ignore[misc]
        groups.add(sampler["pid"])
        words = {1: "VLLM::Worker", 2: "VLLM::EngineCore", 3: "vllm serve"}.get(step)
        if words is not None:
            victim = next(
                pid
                for pid in group_of(sampler["pid"])
                if pid != sampler["pid"] and words in command_of(pid)
            )
            os.kill(victim, signal.SIGKILL)

    with served(tmp_path / "state", vllm_command) as url:
        await asyncio.to_thread(train, url, STEPS, between=kill)
        (sampler,) = info_of(url)["samplers"]  # type: ignore[misc]
        assert sampler["restarts"] == 3
    await until(lambda: not any(map(group_of, groups)), within_s=30)


RUN_STEPS = 10


@pytest.mark.timeout(1500)
def test_a_run_whose_sharded_trainer_is_two_ranks_learns_from_vllms_samples(
    vllm_command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    edits = [
        *("inference.trainer_ranks=2", "inference.shard=true", "inference.samplers=[vllm]"),
        *(f"inference.vllm={vllm_command}", f"trainer.total_steps={RUN_STEPS}"),
        *("trainer.eval_every=0", "env.eval_tasks=4", "env.eval_samples=2"),
    ]
    run = start_run(plan_run(resolve_settings("arithmetic", None, edits)))
    try:
        state = wait(run, lambda state: state.step >= 1, within_s=2 * READY_S)
        assert sorted(pids_of(state.processes["engine"]["pid"])) == [0, 1]
        state = wait_for_end(run, within_s=600)
    finally:
        stop_run(run)
    assert (state.status, state.error) == ("completed", None)
    rows = merge_by_step(run.metrics())
    rewards = [reward for _, reward in series(rows, "reward/mean")]
    apart = max(apart for _, apart in series(rows, "logprobs/absdiff_max"))
    print(f"\nrewards {[round(one, 2) for one in rewards]}, logprobs/absdiff_max {apart:.1e}")  # noqa: T201
    assert len(rewards) == RUN_STEPS
    assert rewards[-1] > rewards[0] + 0.2
    assert apart < 1e-4


def command_of(pid: int) -> str:
    """Of a process; the name that it gave itself where it gave one."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


SAMPLERS, WORKERS, REQUESTS = 3, 12, 120
STOPPED_S, RUNNING_S = 0.4, 0.1
"""The slow one computes a fifth of the time."""


@contextmanager
def slowed(processes: Sequence[int]) -> Iterator[None]:
    """They are stopped most of the time, as long as the block runs."""
    over = threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            for number, rest_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, RUNNING_S)):
                for pid in processes:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                over.wait(rest_s)
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def at_once(work: Callable[[int], object], count: int) -> list[object]:
    """A few clients, each of which asks again as soon as it has its answer."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, range(count)))


def test_two_vllms_and_one_of_ours_sample_one_run_and_the_slow_one_gets_less(
    vllm_command: str, tmp_path: Path
) -> None:
    """Of every version each answer is of that version's weights, whoever gave it."""
    state, steps, apart = tmp_path / "state", 3, 0.0
    drawn: list[list[tuple[list[int], types.SampledSequence]]] = []

    def requests_of(number: int) -> int:
        """That a vLLM has answered, by its own log."""
        return (state / f"sampler-{number}.log").read_bytes().count(b"POST /inference/v1/generate")

    with served(state, vllm_command, "own,vllm,vllm") as url:
        # they start one after the other
        ready_by = time.monotonic() + SAMPLERS * READY_S
        while True:
            samplers: list[dict[str, int]] = info_of(url)["samplers"]  # type: ignore[assignment]
            if all(one["state"] == "ready" for one in samplers):
                break
            assert time.monotonic() < ready_by
            time.sleep(0.5)
        assert len(samplers) == SAMPLERS
        slow = [pid for pid in group_of(samplers[1]["pid"]) if "VLLM::" in command_of(pid)]
        assert slow
        probes = {number: requests_of(number) for number in (2, 3)}
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        training = client.create_lora_training_client(
            TINY, rank=16, seed=1, train_unembed=False
        ).result()
        versions: list[tinker.SamplingClient] = []
        with slowed(slow):
            for step in range(steps):
                versions.append(training.save_weights_and_get_sampling_client().result())

                def ask(number: int, sampling: tinker.SamplingClient = versions[-1]) -> object:
                    prompt = [5, 6 + number % 40, 60 + number, 8]
                    params = types.SamplingParams(max_tokens=16, seed=number, stop=[])
                    asked = types.ModelInput.from_ints(prompt)
                    (one,) = sampling.sample(asked, 1, params).result(300).sequences
                    return prompt, one

                drawn.append(at_once(ask, REQUESTS))  # type: ignore[arg-type]
                data = [
                    datum(one, [float(token % 2) - 0.5 for token in one.tokens], prompt)
                    for prompt, one in drawn[-1]
                ]
                passed = training.forward_backward(data, "importance_sampling")
                stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
                apart = max(apart, passed.result().metrics["log_ratio_abs:max"])
                assert stepped.result().metrics["policy_version:max"] == step + 1

            def scored(number: int) -> float:
                """How far an earlier version's scores are from those of its own answers."""
                version = number % steps
                prompt, one = drawn[version][number]
                asked = types.ModelInput.from_ints([*prompt, *one.tokens])
                found = versions[version].compute_logprobs(asked).result(300)
                own = np.array(found[len(prompt) :], float)
                return float(np.abs(own - np.array(one.logprobs)).max())

            later = max(at_once(scored, 60))  # type: ignore[type-var]
        first, second = (requests_of(number) - probes[number] for number in (2, 3))
        assert [one["restarts"] for one in info_of(url)["samplers"]] == [0] * SAMPLERS  # type: ignore[index]
    asked = steps * REQUESTS + 60
    own = asked - first - second
    print(f"\nof {asked}: slowed vLLM {first}, other vLLM {second}, ours {own}")  # noqa: T201 - figures
    print(f"log_ratio_abs:max {apart:.1e}, earlier versions' scores within {later:.1e}")  # noqa: T201
    assert apart < 1e-4
    assert later < 1e-4
    assert min(first, second, own) > 0
    assert first < second
    assert first < own
