"""The journal, read as another process reads it."""

from __future__ import annotations

import asyncio
import json

import tinker
from contract.requirements import proves
from sqlalchemy import Connection
from tinker import types

from halteres.errors import NotReady, ServerError
from halteres.service.durable.journal import Entry
from halteres.service.keys import LOCAL
from halteres.service.training_runs import Session

from .live_service import DATA, STEP, LiveService, datum, prompt, trainer
from .test_order import PROTO, pass_body

WAIT_S = 20


@proves("durable:journal")
async def test_a_request_is_a_row_before_it_is_executed(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    held = scene.engine.block("forward_backward")
    output = training.forward_backward(DATA, "cross_entropy")
    async with asyncio.timeout(WAIT_S):
        await held.inside()
    query = "SELECT state, key, body, outcome FROM requests WHERE kind = 'forward_backward'"
    assert scene.rows(query) == [
        ("accepted", f"{training.model_id}/1", pass_body(training.model_id, 1), None)
    ]
    held.release()
    await output
    await training.optim_step(STEP)  # its row is committed after the first one's outcome
    [(state, _, _, outcome)] = scene.rows(query)
    assert (state, len(outcome) > 0) == ("done", True)


@proves("durable:journal")
async def test_seeds_that_the_service_drew_are_recorded(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client, seed=None)
    sampling = await training.save_weights_and_get_sampling_client()
    drawn = await sampling.sample(prompt(5), 1, types.SamplingParams(max_tokens=8))
    await sampling.sample(prompt(5), 1, types.SamplingParams(max_tokens=8, seed=11))
    rows = dict(
        scene.rows(
            "SELECT kind || seq, drawn FROM requests WHERE kind IN ('sample', 'create_model')"
        )
    )
    assert "seed" in json.loads(rows["create_model0"])
    assert json.loads(rows["sample1"]) == {"weights": 1}  # of the request that published them
    seed = json.loads(rows["sample0"])["seed"]
    again = await sampling.sample(prompt(5), 1, types.SamplingParams(max_tokens=8, seed=seed))
    assert again.sequences[0].tokens == drawn.sequences[0].tokens


async def test_a_full_disk_refuses_requests_with_a_sentence_and_loses_nothing(
    scene: LiveService,
) -> None:
    model = await scene.model()
    large = [datum(list(range(1, 600))) for _ in range(40)]

    def limit(pages: int) -> None:
        def run(connection: Connection) -> None:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

        scene.service.journal.post(run)

    limit(1)  # as many as there are
    status, refusal = await scene.post("forward_backward", pass_body(model, 1, large), **PROTO)
    assert status == 503
    assert "full" in refusal["detail"]
    status, health = await scene.get("/api/v1/healthz")
    assert (status, "full" in health["detail"]) == (503, True)
    limit(10**6)
    status, promised = await scene.post("forward_backward", pass_body(model, 1, large), **PROTO)
    assert status == 200
    assert isinstance(await scene.redeem(promised["request_id"]), bytes)
    assert scene.engine.calls["forward_backward"] == 1
    assert (await scene.get("/api/v1/healthz"))[0] == 200
    assert (scene.service.state / "journal.sqlite").stat().st_mode & 0o077 == 0


def nobodys() -> Session:
    return Session(tenant=LOCAL, tags=[], user_metadata={})


async def test_requests_that_come_together_share_commits(scene: LiveService) -> None:
    commits = 0
    commit = scene.service.journal._commit

    def counted(group: list) -> list:
        nonlocal commits
        commits += 1
        return commit(group)

    scene.service.journal._commit = counted  # type: ignore[method-assign]
    await asyncio.gather(*(scene.service.sessions.add(nobodys()) for _ in range(50)))
    assert commits <= 2
    assert scene.rows("SELECT count(*) FROM sessions") == [(50,)]


async def test_a_record_that_fails_in_an_unforeseen_way_fails_alone_and_at_once(
    scene: LiveService,
) -> None:
    def broken(connection: Connection) -> None:
        raise ValueError("unforeseen")

    async with asyncio.timeout(WAIT_S):
        failed, _ = await asyncio.gather(
            scene.service.journal.transact(broken),
            scene.service.sessions.add(session := nobodys()),
            return_exceptions=True,
        )
    assert isinstance(failed, ServerError)
    assert "unforeseen" in failed.sentence
    assert scene.rows("SELECT id FROM sessions") == [(session.id,)]


async def test_a_repetition_that_comes_while_the_first_cannot_be_recorded_is_recorded_for_itself(
    scene: LiveService,
) -> None:
    model = await scene.model()
    accept, inside, full = scene.service.journal.accept, asyncio.Event(), asyncio.Event()

    async def refused(entry: Entry) -> str:
        if inside.is_set():
            return await accept(entry)
        inside.set()
        await full.wait()
        raise NotReady("The disk is full.")

    scene.service.journal.accept = refused  # type: ignore[method-assign]
    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(scene.post("forward_backward", pass_body(model, 1), **PROTO))
        await inside.wait()
        second = asyncio.create_task(scene.post("forward_backward", pass_body(model, 1), **PROTO))
        [future] = scene.service.futures.open()
        while not future.recorded._waiters and not second.done():
            await scene.get("/api/v1/healthz")
        full.set()
        assert (await first)[0] == 503
        status, promised = await second
        assert status == 200
        assert isinstance(await scene.redeem(promised["request_id"]), bytes)
    assert scene.engine.calls["forward_backward"] == 1
