"""What an SDK seldom shows and the protocol demands all the same, over raw HTTP against the
scripted engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from service.live_service import LiveService, serving

from halteres.models import TINY

from .requirements import proves

PARAMS = {"max_tokens": 4, "seed": 1}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with serving(tmp_path) as scene:
        yield scene


async def sampler(scene: LiveService, session: str | None = None) -> str:
    """A sampling session of the base model."""
    session = session or await scene.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": TINY}
    status, made = await scene.post("create_sampling_session", body)
    assert status == 200, made
    return made["sampling_session_id"]


def asked(sampling_session: str, seq: int = 0, **more: Any) -> dict[str, Any]:
    """The body of a sample."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    base = {
        "sampling_session_id": sampling_session,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": prompt,
    }
    return {**base, "sampling_params": PARAMS, **more}


@proves("connect:start-up", "connect:capabilities")
async def test_a_client_connects_in_the_order_of_the_sdk(scene: LiveService) -> None:
    for path in ("client/config", "client/dynamic_config"):
        status, flags = await scene.post(path, {"sdk_version": "0.38.0"})
        assert status == 200 and isinstance(flags, dict)
    status, made = await scene.post(
        "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    )
    assert status == 200 and made["session_id"]
    status, told = await scene.get("/api/v1/get_server_capabilities")
    assert status == 200 and told["supported_models"][0]["model_name"] == TINY


@proves("session:telemetry")
async def test_telemetry_is_accepted_and_not_kept(scene: LiveService) -> None:
    body = {
        "events": [{"event": "SESSION_START"}],
        "platform": "x",
        "sdk_version": "x",
        "session_id": "x",
    }
    status, told = await scene.post("telemetry", body)
    assert status == 200 and told["status"] == "accepted"
    assert not scene.rows("select * from requests where kind = 'telemetry'")


@proves("retry:create")
async def test_a_repeated_number_makes_one_model(scene: LiveService) -> None:
    session = await scene.session()
    first, second = [await scene.model(session, 3) for _ in range(2)]
    assert first == second == f"{session}:train:3"
    _, listed = await scene.get("/api/v1/training_runs")
    assert [run["training_run_id"] for run in listed["training_runs"]] == [first]


@proves("promise:metadata")
async def test_metadata_are_sent_only_where_they_are_allowed(scene: LiveService) -> None:
    session = await sampler(scene)
    _, promised = await scene.post("asample", asked(session))
    request_id = promised["request_id"]
    status, whole = await scene.post(
        "retrieve_future", {"request_id": request_id, "allow_metadata_only": False}
    )
    assert status == 200 and not (
        isinstance(whole, dict) and whole.get("status") == "complete_metadata"
    )
    accepts = {"Accept": "application/x-protobuf"}
    status, told = await scene.post(
        "retrieve_future", {"request_id": request_id, "allow_metadata_only": True}, **accepts
    )
    assert status == 200
    if isinstance(told, dict):
        assert told["status"] == "complete_metadata" and told["response_payload_size"] > 0


@proves("id:sequences", "id:int64")
async def test_a_sample_is_promised_with_an_id_per_sequence_whatever_its_number(
    scene: LiveService,
) -> None:
    session = await sampler(scene)
    seen: set[str] = set()
    for seq in (0, 123_456_789_012_345_678):
        status, promised = await scene.post("asample", asked(session, seq, num_samples=3))
        assert status == 200 and len(promised["sample_sequence_ids"]) == 3
        seen.update(promised["sample_sequence_ids"])
    assert len(seen) == 6


@proves("promise:cancel")
async def test_a_cancelled_sample_is_answered_204_and_the_others_go_on(scene: LiveService) -> None:
    session = await sampler(scene)
    _, first = await scene.post("asample", asked(session, 0))
    status, _ = await scene.post("cancel_future", {"request_id": first["request_id"]})
    assert status == 204
    _, second = await scene.post("asample", asked(session, 1))
    assert await scene.redeem(second["request_id"])


@proves("sample:join")
async def test_every_client_that_joins_a_sampling_session_gets_a_number_of_its_own(
    scene: LiveService,
) -> None:
    """A client's numbers start at its own times 1e9, so the largest must leave room below 2**63."""
    session = await sampler(scene)
    told = [
        (await scene.post("join_sampling_session", {"sampling_session_id": session}))[1]
        for _ in range(20)
    ]
    numbers = {one["client_counter"] for one in told}
    assert len(numbers) == 20 and min(numbers) >= 1 and (max(numbers) + 1) * 10**9 < 2**63


@proves("sample:ephemeral-session")
async def test_an_ephemeral_save_answers_with_a_session_and_no_path(scene: LiveService) -> None:
    model = await scene.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    _, promised = await scene.post("save_weights_for_sampler", body)
    saved = await scene.redeem(promised["request_id"])
    assert saved["path"] is None and saved["sampling_session_id"]


@proves("id:path")
@pytest.mark.parametrize("name", ["a/b", "../up", "..", "", "a" * 300, "nul\x00", "/etc/passwd"])
async def test_a_name_that_is_no_name_is_a_user_error(scene: LiveService, name: str) -> None:
    model = await scene.model()
    status, promised = await scene.post(
        "save_weights", {"model_id": model, "seq_id": 1, "path": name}
    )
    told = (
        await scene.redeem(promised["request_id"])
        if status == 200
        else {"category": "user", **promised}
    )
    assert told["category"] == "user" and (told.get("error") or told.get("detail"))
    assert not list(scene.service.state.parent.glob("up*"))


@proves("lora:absurd")
@pytest.mark.parametrize("rank", [0, -1, 10**9, 2**40])
async def test_an_absurd_rank_is_refused_with_a_sentence(scene: LiveService, rank: int) -> None:
    session = await scene.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"rank": rank},
    }
    status, told = await scene.post("create_model", body)
    if status == 200:
        told = await scene.redeem(told["request_id"])
        assert told["category"] == "user"
    assert "rank" in (told.get("error") or told.get("detail")), told
    assert await scene.model(session, 1), "the next one is made"


@pytest.mark.runs
@proves("sample:many")
async def test_a_thousand_samples_in_flight_lose_nothing(scene: LiveService) -> None:
    session = await sampler(scene)
    async with asyncio.timeout(60):
        promised = await asyncio.gather(
            *(scene.post("asample", asked(session, seq)) for seq in range(1000))
        )
        ids = {told["request_id"] for status, told in promised if status == 200}
        assert len(ids) == 1000
        outcomes = await asyncio.gather(*(scene.redeem(one) for one in ids))
    assert len(outcomes) == 1000 and all(outcomes)
