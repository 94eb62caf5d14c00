"""Connecting: flags, sessions, keys, losses, and what is refused; by raw HTTP and by the real SDK
0.38.0.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from contract.requirements import proves
from tinker.cli.auth_api import AuthApiError, TinkerAuthApi

from halteres.models import TINY
from halteres.service.service import Options

from .live_service import DATA, STEP, LiveService, serving, trainer

WAIT_S = 20


@proves("connect:start-up")
async def test_the_flags_steer_the_client(scene: LiveService, client: tinker.ServiceClient) -> None:
    config, dynamic = client.holder.get_client_config(), client.holder._client_dynamic_config
    assert (
        config.pjwt_auth_enabled,
        config.parallel_fwdbwd_chunks,
        config.custom_loss_server_side,
    ) == (
        False,
        True,
        False,
    )
    assert (config.sample_use_retrieve_futures, dynamic.sample_cancel_enabled) == (False, True)


@proves("sample:raw-or-tempered")
@pytest.mark.parametrize(
    ("logprobs", "said"), [("raw", "temperature 1,"), ("tempered", "temperature they were drawn")]
)
async def test_a_new_session_is_told_what_log_probabilities_mean(
    tmp_path: Path, logprobs: Any, said: str
) -> None:
    async with serving(tmp_path, Options(sample_logprobs=logprobs)) as scene:
        status, made = await scene.post(
            "create_session", {"tags": None, "user_metadata": None, "sdk_version": "0.9.0"}
        )
        assert (status, said in made["info_message"]) == (200, True)


@proves("connect:capabilities")
async def test_what_is_served_is_told(scene: LiveService, client: tinker.ServiceClient) -> None:
    assert (await scene.get("/api/v1/healthz"))[1]["status"] == "ok"
    found = await tinker.RestClient(client.holder).get_server_capabilities()
    assert [(one.model_name, one.trainable, one.sampleable) for one in found.supported_models] == [
        (TINY, True, True)
    ]


@proves("session:finish", "session:heartbeat")
async def test_the_first_reason_of_an_end_stays_and_ends_the_heartbeat(scene: LiveService) -> None:
    session = await scene.session()
    assert (await scene.post("session_heartbeat", {"session_id": session}))[0] == 200
    for reason in ("errored", "success"):
        status, _ = await scene.post(
            f"sessions/{session}/finish", {"reason": {"type": reason}, "detail": "x"}
        )
        assert status == 204
    # after it, what was posted before is written
    await scene.service.journal.transact(lambda _: None)
    assert scene.rows("SELECT finished FROM sessions") == [("errored",)]
    assert (await scene.post("session_heartbeat", {"session_id": session}))[0] == 410
    status, refusal = await scene.post(f"sessions/{session}/finish", {"reason": {"type": "bored"}})
    assert (status, "$.reason.type" in refusal["detail"]) == (400, True)


@proves("session:telemetry")
async def test_telemetry_is_accepted(scene: LiveService) -> None:
    sent = {
        "events": [{"event": "SESSION_START"}],
        "platform": "x",
        "sdk_version": "x",
        "session_id": "x",
    }
    assert await scene.post("telemetry", sent) == (200, {"status": "accepted"})


async def test_the_sdks_command_line_finds_its_key_and_gets_no_token(scene: LiveService) -> None:
    def login() -> str:
        with httpx.Client() as http:
            api = TinkerAuthApi(http, base_url=scene.url)
            found = api.get_self_api_key("tml-any")
            api.delete_self_api_key("tml-any")
            return found.name

    assert await asyncio.to_thread(login) == "local"
    status, refusal = await scene.post("auth/token", {})
    assert (status, "sent plainly" in refusal["detail"]) == (400, True)


async def test_a_key_tells_whose_it_is_and_revokes_itself(tmp_path: Path) -> None:
    from halteres.service.keys import KeyFile

    made = KeyFile(tmp_path).create("laptop", tenant="alice", note="for tests")
    other = KeyFile(tmp_path).create("desk", tenant="alice")
    async with serving(tmp_path) as scene:

        def course() -> tuple[str, str, str]:
            with httpx.Client() as http:
                api = TinkerAuthApi(http, base_url=scene.url)
                found = api.get_self_api_key(made.text)
                api.delete_self_api_key(made.text)
                with pytest.raises(AuthApiError, match="revoked"):
                    api.get_self_api_key(made.text)
                assert api.get_self_api_key(other.text).name == "desk"
                return found.name, found.note, found.details.org_details.name

        assert await asyncio.to_thread(course) == ("laptop", "for tests", "alice")


@proves("error:sentence")
@pytest.mark.parametrize("path", ["nothing", "sessions/x/nothing", "v2", "training_runs/x/y/z"])
async def test_what_there_is_not_is_said(scene: LiveService, path: str) -> None:
    status, refusal = await scene.get(f"/api/v1/{path}")
    assert (status, path in refusal["detail"]) == (404, True)
    status, refusal = await scene.get("/api/v1/asample")
    assert (status, "GET" in refusal["detail"]) == (405, True)


@proves("custom:not-on-the-server")
async def test_a_graph_of_operations_is_refused_with_what_to_do_instead(scene: LiveService) -> None:
    """An operator may turn the flag on; the SDK then uploads the loss."""
    body = {
        "session_id": await scene.session(),
        "custom_loss_seq_id": 0,
        "name": "f",
        "inputs": [],
        "graph": {},
    }
    status, refused = await scene.post("create_custom_loss", body)
    assert status == 400
    assert "forward_backward_custom" in str(refused)


async def test_a_client_that_knows_unload_gives_its_adapter_back_and_goes_on(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    """Only SDKs before 0.25 have this call, none of their public methods makes it."""
    training = await trainer(client)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    status, promised = await scene.post("unload_model", {"model_id": training.model_id})
    assert status == 200
    assert await scene.redeem(promised["request_id"]) == {
        "type": "unload_model",
        "model_id": training.model_id,
    }
    assert training.model_id not in scene.engine._adapters
    async with asyncio.timeout(WAIT_S):
        await training.forward_backward(DATA, "cross_entropy")
