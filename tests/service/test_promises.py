"""Futures and long polls."""

from __future__ import annotations

import asyncio

import tinker
from contract.requirements import proves

from .live_service import DATA, LiveService, closing, trainer
from .test_order import passed

WAIT_S = 20


@proves("promise:not-ready")
async def test_a_poll_of_an_open_promise_ends_with_408_and_says_what_it_waits_for(
    scene: LiveService,
) -> None:
    model = await scene.model()
    scene.service.futures.poll_s = 0.01
    request_id = await passed(scene, model, 2)
    status, state = await scene.post("retrieve_future", {"request_id": request_id})
    assert (status, state["queue_state"]) == (408, "paused_capacity")
    assert "request 1 of this model comes first" in state["queue_state_reason"]


@proves("promise:not-ready")
async def test_the_sdk_polls_again_until_the_result_is_there(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    scene.service.futures.poll_s = 0.01
    held = scene.engine.block("forward_backward")
    output = training.forward_backward(DATA, "cross_entropy")
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        for _ in range(5):
            await scene.get("/api/v1/healthz")
        held.release()
        assert len((await output).loss_fn_outputs) == 2


async def test_a_poll_that_waits_is_answered_when_its_promise_is_settled(
    scene: LiveService,
) -> None:
    model = await scene.model()
    held = scene.engine.block("forward_backward")
    request_id = await passed(scene, model, 1)
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        polls = [asyncio.create_task(scene.redeem(request_id)) for _ in range(3)]
        held.release()
        first, second, third = await asyncio.gather(*polls)
    assert first == second == third


@proves("promise:same-bytes")
async def test_an_older_outcome_is_read_from_the_journal_with_the_same_bytes(
    scene: LiveService,
) -> None:
    model = await scene.model()
    request_id = await passed(scene, model, 1)
    first = await scene.redeem(request_id)
    scene.service.futures._keep_s = -1.0  # everything settled leaves the memory at the next outcome
    await scene.redeem(await passed(scene, model, 2))
    assert request_id not in scene.service.futures._by_id
    assert await scene.redeem(request_id) == first
    assert await passed(scene, model, 1) == request_id


async def test_polls_end_when_the_service_does(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    model = await scene.model()
    request_id = await passed(scene, model, 2)
    poll = asyncio.create_task(scene.post("retrieve_future", {"request_id": request_id}))
    async with asyncio.timeout(WAIT_S):
        while not any(future.wake._waiters for future in scene.service.futures.open()):
            await scene.get("/api/v1/healthz")
        scene.service.futures.close()
        assert (await poll)[0] == 408


@proves("session:heartbeat")
async def test_a_session_that_finished_gets_410_for_its_heartbeat(scene: LiveService) -> None:
    session = await scene.session()
    assert (await scene.post("session_heartbeat", {"session_id": session}))[0] == 200
    assert (await scene.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}}))[
        0
    ] == 204
    assert (await scene.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}))[
        0
    ] == 204
    status, gone = await scene.post("session_heartbeat", {"session_id": session})
    assert (status, gone["detail"]) == (410, "The session has finished: errored.")


@proves("connect:capabilities")
async def test_health_is_503_until_the_engine_is_ready(scene: LiveService) -> None:
    assert (await scene.get("/api/v1/healthz"))[1]["status"] == "ok"
    scene.host.state = "starting"
    status, why = await scene.get("/api/v1/healthz")
    assert (status, why["detail"]) == (503, "The engine is not ready. It is starting.")


@proves("session:finish")
async def test_a_finished_session_leaves_the_engine_and_what_it_saved_stays(
    scene: LiveService,
) -> None:
    client = await scene.client(halteres_run="r9")
    async with closing(client):
        training = await trainer(client)
        state = (await training.save_state("kept")).path
        await training.save_weights_and_get_sampling_client()
        busy = await scene.model(client.holder.get_session_id(), 7)
        waiting = await passed(scene, busy, 2)  # its first request has not come
    assert set(scene.engine._adapters) == {busy}
    # it comes back
    assert isinstance(await scene.redeem(await passed(scene, training.model_id, 3)), bytes)
    status, _ = await scene.ask(
        "/runs/r9/generate", text="1", sampling_params={"max_new_tokens": 1}
    )
    assert status == 200
    await passed(scene, busy, 1)
    assert isinstance(await scene.redeem(waiting), bytes)
    async with closing(await scene.client()) as other:
        await other.create_training_client_from_state_with_optimizer(state)
