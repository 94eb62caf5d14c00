"""Polling a whole sampling session, cancelling, joining: by raw HTTP and by the real SDK 0.38.0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves
from deadlines import until
from tinker import types

from halteres.models import TINY
from halteres.service.service import Options

from .live_service import LiveService, closing, prompt, serving

WAIT_S = 20
POLLING = Options(client_flags={"sample_use_retrieve_futures": True})


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


async def polled(
    scene: LiveService, sampler: str, cursor: int = 0, *, clone: int = 0, timeout: float | None = 0
) -> tuple[dict[str, str], int]:
    """What was settled, by future, and the next cursor."""
    target = {
        "type": "sampling_session",
        "sampling_session_id": sampler,
        "cloned_sampler_id": clone,
    }
    status, answer = await scene.post(
        "retrieve_futures",
        {
            "target": target,
            "prev_cursor": cursor,
            "timeout": timeout,
            "retrieved_request_ids": ["x"],
        },
    )
    assert status == 200, answer
    return {one["request_id"]: one["state"] for one in answer["completions"]}, answer["cursor"]


async def settled(scene: LiveService, *requests: str) -> None:
    for request in requests:
        await scene.redeem(request)


@proves("promise:retrieve-futures")
async def test_what_was_settled_is_told_once_in_order_and_a_poll_is_held_until_something_is(
    scene: LiveService,
) -> None:
    sampler = await sampler_of(scene)
    early = await sampled(scene, sampler, 0)
    await settled(scene, early)
    seen, cursor = await polled(scene, sampler)  # settled before anybody asked: the journal tells
    assert seen == {early: "finished"}
    good, bad = await sampled(scene, sampler, 1), await sampled(scene, sampler, 2, temperature=-1.0)
    await settled(scene, good, bad)
    seen, later = await polled(scene, sampler, cursor)
    assert (seen, later > cursor) == ({good: "finished", bad: "failed"}, True)
    assert await polled(scene, sampler, cursor) == (seen, later)  # a repeated poll tells the same
    assert await polled(scene, sampler, later) == ({}, later)
    held = scene.engine.block("sample")
    last = await sampled(scene, sampler, 3)
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        waiting = asyncio.create_task(polled(scene, sampler, later, timeout=None))
        await polled(scene, sampler, later)
        assert not waiting.done()
        held.release()
        assert (await waiting)[0] == {last: "finished"}


@proves("promise:retrieve-futures")
async def test_each_client_of_a_sampling_session_hears_of_its_own_samples(
    scene: LiveService,
) -> None:
    sampler = await sampler_of(scene)
    mine, copys = await sampled(scene, sampler, 1), await sampled(scene, sampler, 7 * 10**9 + 1)
    await settled(scene, mine, copys)
    assert (await polled(scene, sampler))[0] == {mine: "finished"}
    assert (await polled(scene, sampler, clone=7))[0] == {copys: "finished"}
    assert (await polled(scene, sampler, clone=8))[0] == {}
    status, refusal = await scene.post("retrieve_futures", {"target": {"sampling_session_id": "x"}})
    assert (status, "sampling session" in refusal["detail"]) == (404, True)


async def test_an_empty_poll_ends_with_the_time_it_was_given(scene: LiveService) -> None:
    sampler = await sampler_of(scene)
    _, cursor = await polled(scene, sampler)
    scene.service.futures.poll_s = 0.01
    assert await polled(scene, sampler, cursor, timeout=None) == ({}, cursor)
    assert await polled(scene, sampler, cursor, timeout=1e9) == ({}, cursor)


async def test_what_left_the_memory_is_told_by_the_journal(scene: LiveService) -> None:
    sampler = await sampler_of(scene)
    _, cursor = await polled(scene, sampler)
    requests = [await sampled(scene, sampler, seq) for seq in range(5)]
    await settled(scene, *requests)
    scene.service.futures._keep_s = -1.0  # everything settled leaves the memory at the next outcome
    late = await sampled(scene, sampler, 9)
    await settled(scene, late)
    seen, after = await polled(scene, sampler, cursor)
    assert list(seen) == [*requests, late]
    assert await polled(scene, sampler, after) == ({}, after)


async def test_a_cursor_of_a_clock_that_was_ahead_begins_anew(scene: LiveService) -> None:
    sampler = await sampler_of(scene)
    first = await sampled(scene, sampler, 1)
    await settled(scene, first)
    seen, cursor = await polled(scene, sampler, 2**62)
    assert (seen, cursor < 2**62) == ({first: "finished"}, True)
    second = await sampled(scene, sampler, 2)
    await settled(scene, second)
    assert (await polled(scene, sampler, cursor))[0] == {second: "finished"}


async def test_an_earlier_lifes_samples_are_told_to_a_client_that_missed_them(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        sampler = await sampler_of(scene)
        seen = await sampled(scene, sampler, 1)
        await settled(scene, seen)
        _, cursor = await polled(scene, sampler)
        missed, failed = (
            await sampled(scene, sampler, 2),
            await sampled(scene, sampler, 3, top_p=7.0),
        )
        await settled(scene, missed, failed)
    async with serving(tmp_path) as scene:
        found, after = await polled(scene, sampler, cursor)
        assert {missed: "finished", failed: "failed"}.items() <= found.items()
        assert await polled(scene, sampler, after) == ({}, after)
        assert isinstance(await scene.redeem(missed), bytes)  # drawn again


async def reported(sampling: tinker.SamplingClient) -> None:
    """The client's poller has nothing left to tell: one that is closed in the middle of a poll may
    lose its end, and `ServiceClient.close()` of SDK 0.38.0 then waits for ever.
    """
    poller = sampling._futures_poller
    assert poller is not None
    await until(lambda: not poller._has_work.is_set())


@pytest.fixture
async def polling(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with serving(tmp_path, POLLING) as scene:
        yield scene


@proves("promise:retrieve-futures")
async def test_the_sdk_polls_its_session_where_the_flag_tells_it_to(polling: LiveService) -> None:
    async with closing(await polling.client()) as client:
        assert client.holder.get_client_config().sample_use_retrieve_futures
        sampling = await client.create_sampling_client(base_model=TINY)
        params = types.SamplingParams(max_tokens=3)
        async with asyncio.timeout(WAIT_S):
            drawn = await asyncio.gather(
                *(sampling.sample(prompt(5, 6), 2, params) for _ in range(100))
            )
        assert [len(one.sequences) for one in drawn] == [2] * 100
        with pytest.raises(tinker.RequestFailedError, match="temperature"):
            await sampling.sample(
                prompt(5, 6), 1, types.SamplingParams(max_tokens=1, temperature=-1.0)
            )
        await reported(sampling)


@proves("promise:retrieve-futures")
async def test_a_polling_sdk_rides_out_a_restart(tmp_path: Path) -> None:
    """Samples that were settled unseen, that were under way, and that come while nobody serves: all
    arrive.
    """
    state, params = tmp_path / "state", types.SamplingParams(max_tokens=3, stop=[])
    async with serving(state, POLLING) as scene:
        port = int(scene.url.rpartition(":")[2])
        client = await scene.client()
        sampling = await client.create_sampling_client(base_model=TINY)
        await sampling.sample(prompt(5, 6), 1, params)
        held = scene.engine.block("sample")
        waiting = [sampling.sample(prompt(5, 6), 1, params) for _ in range(8)]
        async with asyncio.timeout(WAIT_S):
            await held.inside(8)
    waiting += [sampling.sample(prompt(5, 6), 1, params) for _ in range(4)]
    async with serving(state, POLLING, port=port), closing(client), asyncio.timeout(2 * WAIT_S):
        drawn = await asyncio.gather(*waiting)
        assert [len(one.sequences[0].tokens) for one in drawn] == [3] * 12
        await reported(sampling)


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
