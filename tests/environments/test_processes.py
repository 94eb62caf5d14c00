"""Environment files as processes, against the real trajectory server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from halteres.environments.problems import extract_boxed
from halteres.errors import NotReady
from halteres.observe.metrics import read_rows
from halteres.types import CONTEXT_LOGPROB, MASKED

from .fakes import (
    ARITHMETIC,
    TOKENIZER,
    Inference,
    environment,
    start,
    trajectory_server,
    write_config,
)

pytestmark = pytest.mark.runs


async def test_arithmetic_fills_exact_batches_for_each_version_and_ends_with_the_run(
    inference: Inference, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, inference, group_size=4, batch_size=32, run_dir=str(tmp_path), total_steps=3
    )
    async with (
        asyncio.timeout(25),
        trajectory_server(tmp_path, batch_size=32, num_steps=3) as server,
    ):
        address = f"--env.rollout_server_url={server.url}"
        async with environment(ARITHMETIC, "serve", "--config", str(config), address) as env:
            for version in range(3):
                inference.version = version
                batch = await server.take(version)
                assert [len(group.tokens) for group in batch.groups] == [4] * 8
                assert {span for group in batch.groups for span in group.versions} == {
                    (version, version)
                }
                assert len(inference.requests) == 8 * (version + 1)
            _, stderr = await env.communicate()
    assert env.returncode == 0, stderr.decode()
    group = batch.groups[0]
    for tokens, masks, logprobs in zip(group.tokens, group.masks, group.logprobs, strict=True):
        assert [mask == MASKED for mask in masks] == [
            logprob == CONTEXT_LOGPROB for logprob in logprobs
        ]
        assert extract_boxed(TOKENIZER.decode(tokens)) is not None
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["groups/sent"]) for row in rows] == [(1, 8), (2, 8), (3, 8)]
    assert {"train/percent_correct", "train/completion_lengths", "train/worked_share"} <= set(
        rows[0]
    )
    lines = read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    assert len(lines) == 8
    assert {"question", "answer", "numbers", "operators", "wording"} == set(lines[0]["item"])


async def test_a_killed_trajectory_server_costs_no_group_and_doubles_none(
    inference: Inference, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, inference, group_size=4, batch_size=16, max_num_workers=2, run_dir=str(tmp_path)
    )
    async with (
        asyncio.timeout(40),
        trajectory_server(tmp_path, batch_size=16, num_steps=9) as server,
    ):
        address = f"--env.rollout_server_url={server.url}"
        async with environment(ARITHMETIC, "serve", "--config", str(config), address) as env:
            await server.take(0)
            await server.kill()
            await server.start()
            inference.version = 1
            inference.asked.clear()
            asking = asyncio.create_task(server.take(1))
            await inference.asked.wait()
            await server.kill()
            await server.start()
            second = await asking
            inference.version = 2
            third = await server.take(2)
            assert env.returncode is None
    assert [len(batch.groups) for batch in (second, third)] == [4, 4]
    sent = [group.tokens for batch in (second, third) for group in batch.groups]
    assert len(set(sent)) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order_and_the_server_is_told(
    inference: Inference, tmp_path: Path, number: signal.Signals
) -> None:
    config = write_config(tmp_path, inference, group_size=4, batch_size=16)
    async with (
        asyncio.timeout(20),
        trajectory_server(tmp_path, batch_size=16, num_steps=9) as server,
    ):
        address = f"--env.rollout_server_url={server.url}"
        async with environment(ARITHMETIC, "serve", "--config", str(config), address) as env:
            await server.take(0)
            env.send_signal(number)
            async with asyncio.timeout(5):
                _, stderr = await env.communicate()
            diagnosis = await asyncio.to_thread(server.trainer.diagnostics)
    assert env.returncode == 0, stderr.decode()
    assert "no goodbye" not in stderr.decode()
    assert not [known for known in diagnosis["environments"] if known.get("connected")]


async def test_a_killed_environment_started_again_doubles_no_rollout_of_the_batch(
    inference: Inference, tmp_path: Path
) -> None:
    """Without a folder: the item of every draw and the samples asked for differ from those of its
    first life.
    """
    config = write_config(
        tmp_path, inference, group_size=4, batch_size=32, max_num_workers=1, total_steps=1
    )
    async with (
        asyncio.timeout(30),
        trajectory_server(tmp_path, batch_size=32, num_steps=1) as server,
    ):
        address = f"--env.rollout_server_url={server.url}"
        taking = asyncio.create_task(server.take(0))
        async with environment(ARITHMETIC, "serve", "--config", str(config), address) as env:
            while len(inference.requests) < 3:
                inference.asked.clear()
                await inference.asked.wait()
            env.kill()
            await env.wait()
        assert not taking.done()
        async with environment(ARITHMETIC, "serve", "--config", str(config), address):
            batch = await taking
    assert len(batch.groups) == len({group.tokens for group in batch.groups}) == 8
    seeds = [request["sampling_params"]["sampling_seed"] for request in inference.requests]
    assert len(set(seeds)) == len(seeds)


async def test_an_environment_that_gives_up_leaves_its_reason_for_the_run(
    inference: Inference, tmp_path: Path
) -> None:
    inference.failures = [400] * 100
    config = write_config(
        tmp_path, inference, group_size=4, batch_size=16, run_dir=str(tmp_path), max_failed_groups=2
    )
    async with (
        asyncio.timeout(20),
        trajectory_server(tmp_path, batch_size=16, num_steps=9) as server,
    ):
        address = f"--env.rollout_server_url={server.url}"
        async with environment(ARITHMETIC, "serve", "--config", str(config), address) as env:
            with pytest.raises(NotReady):  # environments may register once the trainer has asked
                await asyncio.to_thread(server.trainer.batch, 0, deadline_s=0.1)
            await env.wait()
    assert env.returncode == 1
    words = json.loads((tmp_path / "control" / "failure.json").read_bytes())
    assert (words["role"], words["code"]) == ("env", "env_error")
    assert "failed one after another" in words["what"]
    assert "not now" in words["why"]
    assert "max_failed_groups" in words["next"]


async def test_a_signal_ends_it_also_while_nobody_answers(
    inference: Inference, tmp_path: Path
) -> None:
    config = write_config(tmp_path, inference)
    process = await start(
        ARITHMETIC, "serve", "--config", str(config), "--env.rollout_server_url=http://127.0.0.1:9"
    )
    assert process.stderr is not None
    async with asyncio.timeout(10):
        await process.stderr.readline()  # the first word of its log: it has begun
        process.terminate()
        async with asyncio.timeout(5):
            await process.communicate()
    assert process.returncode == 0


async def test_a_broken_lifeline_ends_it(inference: Inference, tmp_path: Path) -> None:
    config = write_config(tmp_path, inference)
    reading, writing = os.pipe()
    process = await start(
        ARITHMETIC,
        "serve",
        "--config",
        str(config),
        "--env.rollout_server_url=http://127.0.0.1:9",
        pass_fds=(reading,),
        HALTERES_LIFELINE_FD=str(reading),
    )
    os.close(reading)
    assert process.stderr is not None
    async with asyncio.timeout(10):
        await process.stderr.readline()
        os.close(writing)
        async with asyncio.timeout(5):
            await process.communicate()
    assert process.returncode == 0
