"""Limits over real HTTP, and that one tenant's flood does not keep another waiting (we chose
it).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves
from deadlines import until

from halteres.engine.protocol import SampleResult
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.models import TINY
from halteres.service.keys import KeyFile
from halteres.service.limits import Allowances, Limits
from halteres.service.sampling.samples import MOST_PLACES, PLACES
from halteres.service.service import Options

from .live_service import DATA, STEP, LiveService, closing, serving, trainer
from .test_order import PROTO, pass_body

pytestmark = pytest.mark.runs

WAIT_S = 20
FLOOD, PASSES = 1000, 500


@asynccontextmanager
async def limited(state: Path, **limits: Any) -> AsyncIterator[LiveService]:
    async with serving(state, Options(limits=Allowances(default=Limits(**limits)))) as scene:
        yield scene


def sample(sampler: str, seq: int, token: int = 5) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [token]}]}
    params = {"max_tokens": 1, "seed": 1}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": prompt,
        "sampling_params": params,
    }


async def base_sampler(scene: LiveService, **headers: str) -> str:
    _, made = await scene.post("create_session", {}, **headers)
    body = {"session_id": made["session_id"], "sampling_session_seq_id": 0, "base_model": TINY}
    return (await scene.post("create_sampling_session", body, **headers))[1]["sampling_session_id"]


@proves("keys:limits")
async def test_too_many_requests_are_429_and_say_when_to_come_again(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_s=0.4) as scene:
        for path in ("/api/v1/sessions", "/api/v1/training_runs"):
            assert (await scene.get(path))[0] == 200
        async with scene.http.get(f"{scene.url}/api/v1/sessions") as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "3")
            assert "0.4 a second" in (await response.json())["detail"]
        async with scene.http.post(f"{scene.url}/runs/r/generate", json={"text": "a"}) as response:
            assert response.status == 429


async def test_the_sdk_rides_out_a_429(tmp_path: Path) -> None:
    """Requests beyond the burst are sent again by the SDK itself, and nothing is lost or out of
    order.
    """
    async with (
        limited(tmp_path, requests_per_s=4) as scene,
        closing(await scene.client()) as client,
    ):
        training = await trainer(client)
        promised = [training.forward_backward(DATA, "cross_entropy") for _ in range(8)]
        stepped = training.optim_step(STEP)
        assert len([await one for one in promised]) == 8
        assert (await stepped).metrics == {"grad_norm:mean": 16.0, "policy_version:max": 1.0}


@proves("keys:limits")
async def test_samples_beyond_a_tenants_number_are_429_and_the_others_go_on(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    alice, bob = ({"X-API-Key": keys.create(name).text} for name in ("alice", "bob"))
    async with limited(tmp_path, samples=2) as scene:
        hers, his = await base_sampler(scene, **alice), await base_sampler(scene, **bob)
        held = scene.engine.block("sample")
        for seq in range(2):
            assert (await scene.post("asample", sample(hers, seq), **alice))[0] == 200
        await held.inside(2)
        status, answer = await scene.post("asample", sample(hers, 2), **alice)
        assert (status, "2 is the limit" in answer["detail"]) == (429, True)
        assert (await scene.post("asample", sample(hers, 1), **alice))[0] == 200, (
            "a repetition is no further one"
        )
        assert (await scene.post("asample", sample(his, 0), **bob))[0] == 200
        held.release()


@proves("keys:limits")
async def test_requests_that_wait_are_bounded_in_bytes_and_the_one_they_wait_for_is_let_in(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path, waiting_bytes=300) as scene:
        model, sampler = await scene.model(), await base_sampler(scene)
        for seq in (3, 4, 5):
            step = {"model_id": model, "seq_id": seq, "optimizer_params": {"x": "x" * 100}}
            assert (await scene.post("optim_step", step))[0] == (429 if seq == 5 else 200)
        status, answer = await scene.post("asample", sample(sampler, 0))
        assert (status, "wait for their turn" in answer["detail"]) == (429, True)
        for seq in (1, 2):
            _, promised = await scene.post("optim_step", {"model_id": model, "seq_id": seq})
            await scene.redeem(promised["request_id"])
        await until(lambda: scene.service.futures.open_bytes("local") == 0)
        assert (await scene.post("asample", sample(sampler, 0)))[0] == 200


@proves("keys:limits")
async def test_the_next_requests_of_many_training_runs_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.service.limits.MAX_BODY_BYTES", 1)
    async with limited(tmp_path, waiting_bytes=200) as scene:
        session = await scene.session()
        models = [await scene.model(session, seq) for seq in range(4)]
        body = len(pass_body(models[0], 1))
        assert 200 <= body < 400
        held = scene.engine.block("forward_backward")
        statuses = [
            (await scene.post("forward_backward", pass_body(model, 1), **PROTO))[0]
            for model in models
        ]
        assert statuses == [200, 200, 429, 429]
        held.release()
        await until(lambda: scene.service.futures.open_bytes("local") == 0)
        assert (await scene.post("forward_backward", pass_body(models[3], 1), **PROTO))[0] == 200


@proves("keys:limits")
async def test_sampling_sessions_are_bounded_and_a_repetition_is_none_more(tmp_path: Path) -> None:
    async with limited(tmp_path, samplers=2) as scene:
        body = {"session_id": await scene.session(), "base_model": TINY}
        for seq, status in ((0, 200), (1, 200), (2, 400), (1, 200)):
            answered = await scene.post(
                "create_sampling_session", {**body, "sampling_session_seq_id": seq}
            )
            assert answered[0] == status, answered


@proves("keys:limits")
async def test_sampling_sessions_count_while_their_session_is_alive_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path, samplers=2) as scene:
        done = await scene.session()
        for seq in (0, 1):
            body = {"session_id": done, "sampling_session_seq_id": seq, "base_model": TINY}
            assert (await scene.post("create_sampling_session", body))[0] == 200
        await scene.ask(f"/api/v1/sessions/{done}/finish", reason={"type": "success"})
        assert (
            await scene.post("create_sampling_session", {**body, "sampling_session_seq_id": 2})
        )[0] == 400
        await scene.service.journal.flush()
    async with limited(tmp_path, samplers=2) as scene:
        session = await scene.session()
        for seq, status in ((0, 200), (1, 200), (2, 400)):
            body = {"session_id": session, "sampling_session_seq_id": seq, "base_model": TINY}
            assert (await scene.post("create_sampling_session", body))[0] == status
        assert (await scene.get(f"/api/v1/sessions/{done}"))[1]["sampler_ids"] == [
            f"{done}:sample:0",
            f"{done}:sample:1",
        ]


async def test_a_body_that_is_too_large_is_413_whether_or_not_it_says_so(tmp_path: Path) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 600

    async with limited(tmp_path, body_bytes=2000) as scene:
        status, answer = await scene.post("create_session", b" " * 2001)
        assert (status, "2.0 KiB are the limit" in answer["detail"]) == (413, True)
        async with scene.http.post(
            f"{scene.url}/api/v1/create_session", data=unannounced()
        ) as response:
            assert response.status == 413
        assert (await scene.post("create_session", {}))[0] == 200


@proves("keys:limits")
async def test_sessions_training_runs_and_ranks_are_bounded_and_a_repetition_is_none_more(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path, sessions=2, models=1, rank=8) as scene:
        session, other = await scene.session(), await scene.session()
        status, answer = await scene.post("create_session", {})
        assert (status, "2 sessions of yours are alive" in answer["detail"]) == (400, True)
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": TINY,
            "lora_config": {"rank": 9},
        }
        status, answer = await scene.post("create_model", body)
        assert (status, "rank 9" in answer["detail"]) == (400, True)
        body["lora_config"] = {"rank": 8}
        for _ in range(2):
            assert (await scene.post("create_model", body))[0] == 200
        assert (await scene.post("create_model", {**body, "model_seq_id": 1}))[0] == 400
        await scene.ask(f"/api/v1/sessions/{session}/finish", reason={"type": "success"})
        assert (await scene.post("create_model", {**body, "session_id": other}))[0] == 200
        assert (await scene.post("create_session", {}))[0] == 200


# Nobody is kept waiting by another


class Recording:
    """Samples in the order in which the engine gets them; each stops inside until it is let on."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._sample = engine.sample
        self.tokens: list[int] = []
        self._news = asyncio.Condition()
        self._let_on = 0

    async def __call__(self, snapshot: str | None, prompt: bytes, *others: Any) -> SampleResult:
        async with self._news:
            number = len(self.tokens)
            self.tokens.append(int.from_bytes(prompt[:4], "little"))
            self._news.notify_all()
            await self._news.wait_for(lambda: number < self._let_on)
        return await self._sample(snapshot, prompt, *others)

    async def let_on(self, count: int) -> None:
        """Let the first so many end."""
        async with self._news:
            self._let_on = count
            self._news.notify_all()

    async def inside(self, count: int) -> None:
        """Wait until the engine got so many."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(lambda: len(self.tokens) >= count)


@proves("keys:limits")
async def test_a_sample_waits_for_no_flood_and_when_all_places_are_taken_for_one_of_the_engines_turns(
    tmp_path: Path,
) -> None:
    """Alice has 1,000 samples: Bob's first is in the engine at once. Bob then takes the rest of the
    places and has as many waiting: Carol's first is the next to enter, once one sample of anybody
    has ended.
    """
    keys = KeyFile(tmp_path)
    people = {name: {"X-API-Key": keys.create(name).text} for name in ("alice", "bob", "carol")}
    tokens = {"alice": 5, "bob": 9, "carol": 7}
    async with limited(tmp_path, requests_per_s=1e6) as scene:
        recording = Recording(scene.engine)
        scene.engine.sample = recording  # type: ignore[method-assign]
        samplers = {name: await base_sampler(scene, **people[name]) for name in people}

        async def send(name: str, *seqs: int) -> None:
            asked = (
                scene.post("asample", sample(samplers[name], seq, tokens[name]), **people[name])
                for seq in seqs
            )
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}

        await send("alice", *range(FLOOD))
        await recording.inside(MOST_PLACES)
        assert len(recording.tokens) == MOST_PLACES, (
            "the rest of the flood waits outside the engine"
        )
        await send("bob", 0)
        await recording.inside(MOST_PLACES + 1)
        assert recording.tokens[-1] == tokens["bob"]

        await send("bob", *range(1, 2 * (PLACES - MOST_PLACES)))
        await recording.inside(PLACES)
        await send("carol", 0)
        assert tokens["carol"] not in recording.tokens
        await recording.let_on(1)
        await recording.inside(PLACES + 1)
        assert recording.tokens[PLACES] == tokens["carol"]
        await recording.let_on(10 * FLOOD)


@proves("keys:limits")
async def test_a_pass_of_one_tenant_is_in_the_engine_while_another_has_500_waiting(
    tmp_path: Path,
) -> None:
    keys = KeyFile(tmp_path)
    alice, bob = (keys.create(name).text for name in ("alice", "bob"))
    async with limited(tmp_path, requests_per_s=1e6) as scene:
        clients = [await asyncio.to_thread(connected, scene.url, key) for key in (alice, bob)]
        hers, his = [await trainer(client) for client in clients]
        held = scene.engine.block("forward_backward")
        flood = [hers.forward_backward(DATA, "cross_entropy") for _ in range(PASSES)]
        await held.inside()
        one = his.forward_backward(DATA, "cross_entropy")
        async with asyncio.timeout(WAIT_S):
            await held.inside()
        assert scene.engine.calls["forward_backward"] == 2
        held.release()
        assert (await one).metrics
        assert len([await passed for passed in flood]) == PASSES
        for client in clients:
            await client.close("success")


def connected(url: str, key: str) -> tinker.ServiceClient:
    """A client of the SDK with a session; it blocks."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    assert client.holder.get_session_id()
    return client


async def test_repeated_polls_of_nothing_are_counted_too(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_s=1) as scene:
        answers = [await scene.post("retrieve_future", {"request_id": "none"}) for _ in range(6)]
        assert [status for status, _ in answers] == [404] * 5 + [429]
        assert json.dumps(answers[-1][1])
