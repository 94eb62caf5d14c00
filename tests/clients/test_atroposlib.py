"""An unmodified atroposlib 0.4.0 environment samples from our service and fills our trajectory
server.

The recipe is section 11 of the trajectory API's specification. The trainer is a stand-in: it
publishes a policy with the real SDK, registers, and takes batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tinker

from halteres.models import TINY

from .atropos_fixtures import (
    BATCH_SIZE,
    GROUP_SIZE,
    atropos_python,
    environment,
    environment_config,
    log_of,
)
from .conftest import server

RUN = "sums"
NUM_BATCHES = 3
MASKED, CONTEXT_LOGPROB = -100, 1.0

pytestmark = pytest.mark.clients


def published(service: str) -> tinker.SamplingClient:
    """Make a policy, one step away from the base model, that the environments of the run can
    sample.
    """
    client = tinker.ServiceClient(
        base_url=service, api_key="tml-test", user_metadata={"halteres_run": RUN}
    )
    trainer = client.create_lora_training_client(
        TINY, rank=8, seed=0, user_metadata={"halteres_run": RUN}
    ).result()
    example = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": np.array([6, 7, 8]), "weights": np.ones(3, np.float32)},
    )
    trainer.forward_backward([example], "cross_entropy").result()
    trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return trainer.save_weights_and_get_sampling_client().result()


async def batches(url: str, count: int) -> list[list[dict[str, Any]]]:
    """What a trainer is given: it registers, then asks until it has so many batches."""
    registration = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": BATCH_SIZE,
        "max_token_len": 512,
        "checkpoint_dir": "unused",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 100,
    }
    taken: list[list[dict[str, Any]]] = []
    async with aiohttp.ClientSession(url) as client:
        async with client.post("/register", json=registration) as answer:
            assert isinstance((await answer.json())["uuid"], int)
        while len(taken) < count:
            async with client.get("/batch") as answer:
                batch = (await answer.json())["batch"]
            if batch:
                taken.append(batch)
            else:
                # as the protocol's trainers do: an empty answer says no more than "not yet"
                await asyncio.sleep(0.1)
    return taken


def check_group(group: dict[str, Any]) -> None:
    """G sequences; logprobs are at most 0 on sampled tokens and the sentinel 1.0 on context."""
    assert (
        len(group["tokens"])
        == len(group["masks"])
        == len(group["inference_logprobs"])
        == GROUP_SIZE
    )
    assert len(group["scores"]) == GROUP_SIZE
    for tokens, masks, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert len(tokens) == len(masks) == len(logprobs)
        context = [mask == MASKED for mask in masks]
        assert any(context)
        assert not all(context)
        for token, mask, logprob in zip(tokens, masks, logprobs, strict=True):
            assert (
                logprob == CONTEXT_LOGPROB if mask == MASKED else (logprob <= 0 and mask == token)
            )


async def check_logprobs(sampler: tinker.SamplingClient, group: dict[str, Any]) -> None:
    """What atroposlib recorded is what the service computes for those tokens, with the tokens it
    recorded.
    """
    for tokens, masks, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        again = await sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens))
        acted = [at for at, mask in enumerate(masks) if mask != MASKED]
        recomputed = np.array([again[at] for at in acted], float)
        np.testing.assert_allclose(recomputed, [logprobs[at] for at in acted], atol=3e-5)


async def test_an_unmodified_environment_fills_exact_batches(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    python = await atropos_python(client_python)
    service_argv = (
        "--state",
        tmp_path / "service",
        "--engine",
        "torch",
        "--model",
        TINY,
        "--threads",
        "1",
    )
    async with (
        server(
            "halteres.service", *service_argv, probe="/api/v1/healthz", log=tmp_path / "service.log"
        ) as service,
        server(
            "halteres.trajectories",
            "--database",
            tmp_path / "api.sqlite",
            probe="/",
            log=tmp_path / "api.log",
        ) as trajectories,
    ):
        sampler = await asyncio.to_thread(published, service.url)
        config = environment_config("sums", f"{service.url}/runs/{RUN}/v1", trajectories.url)
        log = log_of(tmp_path, "sums")
        async with environment(python, tmp_path, config) as running:
            ended = asyncio.create_task(running.wait())
            pulled = asyncio.create_task(batches(trajectories.url, NUM_BATCHES))
            await asyncio.wait({ended, pulled}, timeout=180, return_when=asyncio.FIRST_COMPLETED)
            assert pulled.done(), log.read_text()[-4000:]
            for batch in pulled.result():
                assert sum(len(group["tokens"]) for group in batch) == BATCH_SIZE
                for group in batch:
                    check_group(group)
            await check_logprobs(sampler, pulled.result()[0][0])
        await ended
