"""Sequence numbers and repeated requests, by raw HTTP: what the SDK does only when the network
fails.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import tinker
from contract.requirements import proves
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from halteres.models import TINY

from .live_service import DATA, LiveService

PROTO = {"Content-Type": "application/x-protobuf"}
WAIT_S = 20


def pass_body(model: str, seq: int, data: list[tinker.Datum] | None = None) -> bytes:
    """forward_backward as the SDK writes it."""
    inputs = ForwardBackwardInput(data=data or DATA, loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=inputs, model_id=model, seq_id=seq)
    return forward_backward_request_to_proto(request).SerializeToString()


async def passed(scene: LiveService, model: str, seq: int) -> str:
    status, promised = await scene.post("forward_backward", pass_body(model, seq), **PROTO)
    assert status == 200, promised
    return promised["request_id"]


async def stepped(scene: LiveService, model: str, seq: int) -> str:
    status, promised = await scene.post(
        "optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}}
    )
    assert status == 200, promised
    return promised["request_id"]


@proves("order:seq-id")
async def test_requests_run_in_the_order_of_their_numbers(scene: LiveService) -> None:
    model = await scene.model()
    last = await stepped(scene, model, 3)
    middle = await passed(scene, model, 2)
    assert scene.engine.calls["forward_backward"] == 0
    first = await passed(scene, model, 1)
    for request_id in (first, middle):
        assert isinstance(await scene.redeem(request_id), bytes)
    assert "metrics" in await scene.redeem(last)


@proves("order:burnt-number")
async def test_a_refused_request_uses_up_its_number(scene: LiveService) -> None:
    model = await scene.model()
    status, refusal = await scene.post(
        "optim_step", {"model_id": model, "seq_id": 1, "adam_params": 5}
    )
    assert (status, "adam_params" in refusal["detail"]) == (400, True)
    broken = pass_body(model, 2)[:-3]
    status, refusal = await scene.post("forward_backward", broken, **PROTO)
    assert (status, "ForwardBackwardRequest" in refusal["detail"]) == (400, True)
    assert isinstance(await scene.redeem(await passed(scene, model, 3)), bytes)
    assert "metrics" in await scene.redeem(await stepped(scene, model, 4))
    assert scene.rows("SELECT seq FROM burnt ORDER BY seq") == [(1,), (2,)]


async def test_a_number_that_was_used_up_fails_typed_when_it_comes_after_all(
    scene: LiveService,
) -> None:
    model = await scene.model()
    await scene.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": 5})
    await scene.redeem(await passed(scene, model, 2))
    outcome = await scene.redeem(await stepped(scene, model, 1))
    assert outcome["category"] == "user"
    assert "comes too late" in outcome["error"]


@proves("retry:training")
async def test_a_repeated_request_gets_the_first_promise_and_runs_once(scene: LiveService) -> None:
    session = await scene.session()
    model = await scene.model(session)
    posts: list[tuple[str, Any, dict[str, str]]] = [
        ("create_model", {"session_id": session, "model_seq_id": 0, "base_model": TINY}, {}),
        ("forward_backward", pass_body(model, 1), PROTO),
        ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}, {}),
        ("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}, {}),
        (
            "load_weights",
            {
                "model_id": model,
                "seq_id": 4,
                "path": f"tinker://{model}/weights/a",
                "optimizer": True,
            },
            {},
        ),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "b"}, {}),
    ]
    for path, body, headers in posts:
        first, second = await asyncio.gather(
            scene.post(path, body, **headers), scene.post(path, body, **headers)
        )
        assert first == second
        assert await scene.redeem(first[1]["request_id"]) == await scene.redeem(
            first[1]["request_id"]
        )
        assert (await scene.post(path, body, **headers)) == first
    for call in ("create_adapter", "forward_backward", "optim_step", "load", "snapshot"):
        assert scene.engine.calls[call] == 1, call
    assert scene.engine.calls["save"] == 2  # the second is the restore point of what was loaded


@proves("retry:ephemeral-save")
async def test_a_repeated_ephemeral_save_brings_a_new_session_number_and_gets_the_first_sampler(
    scene: LiveService,
) -> None:
    model = await scene.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    _, first = await scene.post("save_weights_for_sampler", body)
    _, second = await scene.post("save_weights_for_sampler", {**body, "sampling_session_seq_id": 1})
    assert first == second
    outcome = await scene.redeem(first["request_id"])
    assert outcome["sampling_session_id"].endswith(":sample:0")
    assert outcome["path"] is None


@proves("retry:sampling")
async def test_repeated_sampling_requests_get_the_same_session_and_the_same_sample(
    scene: LiveService,
) -> None:
    session = await scene.session()
    body = {"session_id": session, "sampling_session_seq_id": 7, "base_model": TINY}
    first, second = (
        await scene.post("create_sampling_session", body),
        await scene.post("create_sampling_session", body),
    )
    assert first == second
    asked = {
        "sampling_session_id": first[1]["sampling_session_id"],
        "seq_id": 10**18,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3},
    }
    drawn, again = await scene.post("asample", asked), await scene.post("asample", asked)
    assert drawn == again
    assert await scene.redeem(drawn[1]["request_id"]) == await scene.redeem(drawn[1]["request_id"])
    assert scene.engine.calls["sample"] == 1


@proves("order:models-apart")
async def test_models_do_not_wait_for_each_other(scene: LiveService) -> None:
    session = await scene.session()
    stuck, free = await scene.model(session, 0), await scene.model(session, 1)
    await stepped(scene, stuck, 2)  # its first request never comes
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await scene.redeem(await passed(scene, free, 1)), bytes)


BAD_BODIES: list[tuple[str, Any]] = [
    ("create_session", b"{"),
    ("create_model", {"session_id": "x"}),
    ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": TINY}),
    ("get_info", {"model_id": "x"}),
    ("optim_step", {"model_id": "x", "seq_id": 1}),
    ("optim_step", {"model_id": "x", "seq_id": -1}),
    ("forward_backward", {"model_id": "x"}),
    ("load_weights", {"path": "x"}),
    ("asample", {"sampling_session_id": "x", "seq_id": 0, "prompt": {}}),
    ("retrieve_future", {"request_id": "x"}),
    ("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": 0}),
    ("weights_info", {"tinker_path": "../../etc/passwd"}),
    ("weights_info", {"tinker_path": "tinker://../weights/x"}),
    ("session_heartbeat", {"session_id": "x"}),
    ("forward", {}),
]


@proves("error:sentence")
async def test_every_bad_body_is_answered_with_a_sentence(scene: LiveService) -> None:
    for path, body in BAD_BODIES:
        status, refusal = await scene.post(path, body)
        assert 400 <= status < 500, (path, body)
        assert len(refusal["detail"]) > 20, (path, body)
    assert (await scene.get("/api/v1/healthz"))[0] == 200


async def test_a_number_that_was_used_up_before_its_turn_fails_typed_and_later_ones_run(
    scene: LiveService,
) -> None:
    model = await scene.model()
    await scene.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": 5})
    async with asyncio.timeout(WAIT_S):
        assert "comes too late" in (await scene.redeem(await stepped(scene, model, 3)))["error"]
        for seq in (1, 2, 4):
            assert isinstance(await scene.redeem(await passed(scene, model, seq)), bytes)


async def test_a_request_that_runs_is_not_told_to_wait_for_itself(scene: LiveService) -> None:
    model = await scene.model()
    scene.service.futures.poll_s = 0.01
    held = scene.engine.block("forward_backward")
    second, first = await passed(scene, model, 2), await passed(scene, model, 1)
    for request_id in (first, second):
        async with asyncio.timeout(WAIT_S):
            await held.inside()
        status, state = await scene.post("retrieve_future", {"request_id": request_id})
        assert (status, state["queue_state_reason"]) == (408, "it is being executed")
        held.release()
        held = scene.engine.block("forward_backward")
    held.release()


@proves("order:burnt-number")
async def test_the_number_of_a_body_that_is_cut_off_or_sent_as_another_type_is_used_up(
    scene: LiveService,
) -> None:
    model = await scene.model()
    cut = json.dumps(
        {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
    ).encode()[:-9]
    assert (await scene.post("optim_step", cut, **{"Content-Type": "application/json"}))[0] == 400
    assert (
        await scene.post(
            "forward_backward", pass_body(model, 2), **{"Content-Type": "application/json"}
        )
    )[0] == 400
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await scene.redeem(await passed(scene, model, 3)), bytes)


async def test_what_a_load_asks_for_and_cannot_have_is_a_user_error(scene: LiveService) -> None:
    session = await scene.session()
    model = await scene.model(session)
    save = {"model_id": model, "seq_id": 1, "path": "a"}
    path = (await scene.redeem((await scene.post("save_weights", save))[1]["request_id"]))["path"]
    load = {"session_id": session, "path": path}
    for seq, (asked, says) in enumerate(
        [
            ({"optimizer_config": {"type": "dimuon", "version": 1}}, "no optimiser 'dimuon'"),
            ({"weights_access_token": "zz"}, "access tokens"),
        ]
    ):
        status, promised = await scene.post(
            "load_weights", {**load, **asked, "model_seq_id": 40 + seq}
        )
        outcome = await scene.redeem(promised["request_id"])
        assert (status, outcome["category"], says in outcome["error"]) == (200, "user", True)
    body = {**load, "optimizer": True, "optimizer_config": {"type": "dimuon"}, "model_seq_id": 50}
    assert "model_id" in await scene.redeem(
        (await scene.post("load_weights", body))[1]["request_id"]
    )


async def test_a_loss_setting_that_is_a_text_fails_its_promise(scene: LiveService) -> None:
    model = await scene.model()
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(pass_body(model, 1))
    message.loss_fn_config_v2["clip_low_threshold"].text = "abc"
    status, promised = await scene.post("forward_backward", message.SerializeToString(), **PROTO)
    outcome = await scene.redeem(promised["request_id"])
    assert (status, outcome["category"], "clip_low_threshold" in outcome["error"]) == (
        200,
        "user",
        True,
    )
