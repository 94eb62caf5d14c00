"""Sampling sessions: cancelling and joining, by raw HTTP and by the real SDK 0.38.0."""

from __future__ import annotations

import asyncio
from typing import Any

import tinker
from contract.requirements import proves
from deadlines import until
from tinker import types

from halteres.models import TINY

from .live_service import LiveService, prompt

WAIT_S = 20


async def sampler_of(scene: LiveService, seq: int = 0, session: str | None = None) -> str:
    body = {
        "session_id": session or await scene.session(),
        "sampling_session_seq_id": seq,
        "base_model": TINY,
    }
    return (await scene.post("create_sampling_session", body))[1]["sampling_session_id"]


async def sampled(
    scene: LiveService, sampler: str, seq: int, tokens: tuple[int, ...] = (5, 6), **params: Any
) -> str:
    """A sample is asked for; returns its future."""
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": list(tokens)}]},
        "sampling_params": {"max_tokens": 3, **params},
    }
    status, promised = await scene.post("asample", body)
    assert status == 200, promised
    return promised["request_id"]


@proves("promise:cancel")
async def test_a_cancelled_sample_ends_at_once_and_the_others_go_on(scene: LiveService) -> None:
    sampler = await sampler_of(scene)
    held = scene.engine.block("sample")
    unwanted, wanted = await sampled(scene, sampler, 1), await sampled(scene, sampler, 2)
    async with asyncio.timeout(WAIT_S):
        await held.inside(2)
        assert (await scene.post("cancel_future", {"request_id": unwanted}))[0] == 204
        outcome = await scene.redeem(unwanted)
        assert (outcome["category"], "cancelled" in outcome["error"]) == ("user", True)
        held.release()
        assert isinstance(await scene.redeem(wanted), bytes)
    for request in (unwanted, wanted, "unknown"):
        assert (await scene.post("cancel_future", {"request_id": request}))[0] == 204


@proves("promise:cancel")
async def test_the_sdk_cancels_a_sample_that_its_user_gave_up(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    sampling = await client.create_sampling_client(base_model=TINY)
    held = scene.engine.block("sample")
    future = sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=3))
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        while not any(future.wake._waiters for future in scene.service.futures.open()):
            await scene.get("/api/v1/healthz")  # until the client knows its future and waits for it
        assert scene.engine.under_way["sample"] == 1
        future.future().cancel()
        await until(lambda: scene.engine.under_way["sample"] == 0)
    await until(
        lambda: scene.rows("SELECT state FROM requests WHERE kind = 'sample'") == [("failed_user",)]
    )


@proves("sample:join")
async def test_every_copy_of_a_sampling_client_gets_a_number_of_its_own(scene: LiveService) -> None:
    sampler = await sampler_of(scene)
    answers = [
        await scene.post("join_sampling_session", {"sampling_session_id": sampler})
        for _ in range(8)
    ]
    counters = [answer["client_counter"] for status, answer in answers if status == 200]
    assert len(set(counters)) == 8
    assert all(counter > 0 and counter * 10**9 + 10**9 - 1 < 2**63 for counter in counters)
    last = await sampled(scene, sampler, max(counters) * 10**9 + 10**9 - 1)
    assert isinstance(await scene.redeem(last), bytes)
