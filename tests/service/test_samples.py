"""Samples of an engine that is not exact: nothing can draw them again, so each has one answer, the
first.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tinker
from contract.requirements import proves
from deadlines import until
from inexact import PROGRAM
from tinker import types

from halteres.loopback import open_listener
from halteres.models import TINY
from halteres.service.durable import futures
from halteres.service.durable.futures import KEEP_S
from halteres.service.keys import LOCAL
from halteres.service.limits import Allowances, Limits
from halteres.service.service import Options
from halteres.training.folder import Wiring
from halteres.training.policy import samples_exactly

from .live_service import KEY, LiveService, closing, prompt, serving, trainer
from .test_durability import NEVER, tokens, version

WAIT_S = 30
SAMPLING = {"X-Tinker-Request-Type": "Sample", "Accept": "application/x-protobuf"}
HOUR_S = 3600.0


async def sampling_session(scene: LiveService) -> str:
    body = {"session_id": await scene.session(), "sampling_session_seq_id": 0, "base_model": TINY}
    return (await scene.post("create_sampling_session", body))[1]["sampling_session_id"]


def sample_body(sampler: str, seq: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 8, "seed": 3, "stop": []},
        "num_samples": 2,
    }


async def asked(scene: LiveService, sampler: str, seq: int) -> str:
    """A sampling request; returns its id."""
    status, promised = await scene.post("asample", sample_body(sampler, seq))
    assert status == 200, promised
    return promised["request_id"]


async def answers(scene: LiveService, ids: list[str]) -> list[Any]:
    return [await scene.redeem(request_id) for request_id in ids]


async def polled(scene: LiveService, request_id: str) -> tuple[int, Any]:
    """As a sampling client asks."""
    return await scene.post("retrieve_future", {"request_id": request_id}, **SAMPLING)


async def settled(scene: LiveService) -> None:
    """Wait until the journal has every outcome."""
    await until(lambda: not scene.rows("SELECT id FROM requests WHERE state = 'accepted'"))


async def test_an_engine_that_is_not_exact_draws_other_tokens_for_the_same_request(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, exact=False) as scene:
        sampler = await sampling_session(scene)
        first, second = await answers(scene, [await asked(scene, sampler, seq) for seq in (1, 2)])
        assert first != second


@proves("promise:same-bytes")
@pytest.mark.parametrize("exact", [True, False])
async def test_a_sample_has_the_same_bytes_after_a_restart(tmp_path: Path, exact: bool) -> None:
    async with serving(tmp_path, exact=exact) as scene:
        sampler = await sampling_session(scene)
        ids = [await asked(scene, sampler, seq) for seq in range(8)]
        first = await answers(scene, ids)
    async with serving(tmp_path, exact=exact) as scene:
        assert await answers(scene, ids) == first
        assert [await asked(scene, sampler, seq) for seq in range(8)] == ids
        assert scene.engine.calls["sample"] == (8 if exact else 0)


async def test_a_result_that_cannot_be_drawn_again_is_given_only_once_the_journal_has_it(
    tmp_path: Path,
) -> None:
    """A service that was killed in between would give another one."""
    async with serving(tmp_path, exact=False) as scene:
        scene.service.futures.poll_s = 0.2
        held = scene.engine.block("sample")
        request_id = await asked(scene, await sampling_session(scene), 1)
        await held.inside()
        with writing_elsewhere(tmp_path):
            held.release()
            await until(lambda: scene.engine.under_way["sample"] == 0)
            assert (await polled(scene, request_id))[0] == 408
        assert isinstance(await scene.redeem(request_id), bytes)


async def test_samples_stay_in_memory_while_the_journal_refuses_their_outcomes_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "KEEP_BYTES", 500)
    async with serving(tmp_path, exact=False) as scene:
        scene.service.futures.poll_s = 0.2
        sampler = await sampling_session(scene)
        await until(lambda: not list(scene.service.futures.open()))

        async def execute(statement: str) -> None:
            await scene.service.journal.transact(
                lambda connection: connection.exec_driver_sql(statement)
            )

        await execute(
            "CREATE TRIGGER refuses BEFORE UPDATE ON requests "
            "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )
        ids = list[str]()
        status = 200
        while status == 200 and len(ids) < 50:
            status, promised = await scene.post("asample", sample_body(sampler, len(ids)))
            if status == 200:
                ids.append(promised["request_id"])
                await until(lambda: not list(scene.service.futures.open()))
        assert status == 503 and 1 < len(ids) < 50
        assert "memory" in promised["detail"]
        assert all(scene.service.futures.find(one, LOCAL) for one in ids)
        assert [(await polled(scene, one))[0] for one in ids] == [408] * len(ids)
        await execute("DROP TRIGGER refuses")
        first = await answers(scene, ids)
        assert scene.engine.calls["sample"] == len(ids)
        assert (await scene.post("asample", sample_body(sampler, 99)))[0] == 200
        assert await answers(scene, ids) == first


@contextmanager
def writing_elsewhere(state: Path) -> Iterator[None]:
    """Another process writes into the journal's file while the block runs: the service has to
    wait.
    """
    connection = sqlite3.connect(state / "journal.sqlite", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


async def gone(scene: LiveService, request_id: str) -> bool:
    """The poll says that the result is gone; another kind of answer is no error."""
    status, outcome = await polled(scene, request_id)
    assert status == 200
    return isinstance(outcome, dict) and (outcome["category"], "is gone" in outcome["error"]) == (
        "server",
        True,
    )


async def test_results_are_dropped_some_time_after_their_session_finished_and_say_so(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, exact=False) as scene:
        kept, ended = await sampling_session(scene), await sampling_session(scene)
        ids = [await asked(scene, sampler, 1) for sampler in (kept, ended)]
        await answers(scene, ids)
        await scene.post(
            f"sessions/{ended.partition(':')[0]}/finish", {"reason": {"type": "success"}}
        )
        await settled(scene)
        await scene.service.reap(time.time() + KEEP_S)
    async with serving(tmp_path, exact=False) as scene:
        assert [await gone(scene, request_id) for request_id in ids] == [False, True]
        assert scene.engine.calls["sample"] == 0


async def test_beyond_a_tenants_bytes_the_oldest_results_are_dropped(tmp_path: Path) -> None:
    options = Options(limits=Allowances(default=Limits(result_bytes=400)))
    async with serving(tmp_path, options, exact=False) as scene:
        sampler = await sampling_session(scene)
        ids = [await asked(scene, sampler, seq) for seq in range(4)]
        sizes = [len(answer) for answer in await answers(scene, ids)]
        assert sum(sizes[2:]) <= 400 < sum(sizes[1:])
        await settled(scene)
        order = [
            row[0]
            for row in scene.rows(
                "SELECT id FROM requests WHERE kind = 'sample' ORDER BY settled_at"
            )
        ]
        await scene.service.reap(time.time())
    async with serving(tmp_path, options, exact=False) as scene:
        assert [await gone(scene, request_id) for request_id in order] == [True, True, False, False]


async def test_a_result_older_than_requests_are_kept_is_gone_rather_than_drawn_again(
    tmp_path: Path,
) -> None:
    """Of an exact engine the client submits the sample again by itself: its answer would be the
    same.
    """
    for exact in (False, True):
        state = tmp_path / str(exact)
        async with serving(state, exact=exact) as scene:
            request_id = await asked(scene, await sampling_session(scene), 1)
            await scene.redeem(request_id)
            await settled(scene)
            await scene.service.reap(time.time() + 2 * HOUR_S)
        async with serving(state, exact=exact) as scene:
            if exact:
                assert (await polled(scene, request_id))[0] == 410
            else:
                assert await gone(scene, request_id)
            assert scene.engine.calls["sample"] == 0


async def test_what_an_exact_engine_drew_is_gone_where_an_inexact_one_took_its_place(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        request_id = await asked(scene, await sampling_session(scene), 1)
        await scene.redeem(request_id)
        await settled(scene)
    async with serving(tmp_path, exact=False) as scene:
        assert await gone(scene, request_id)
        assert await gone(scene, request_id)
        assert scene.engine.calls["sample"] == 0


async def test_a_journal_of_an_earlier_version_gets_the_index_of_kept_results(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("DROP INDEX requests_kept")
    async with serving(tmp_path) as scene:
        assert scene.rows("SELECT name FROM sqlite_master WHERE name = 'requests_kept'")


async def test_an_inexact_engine_gets_a_restore_point_after_each_optimiser_step(
    tmp_path: Path,
) -> None:
    """Steps taken a second time would be others; so would weights published after them."""
    async with (
        serving(tmp_path, NEVER, exact=False) as scene,
        closing(await scene.client()) as client,
    ):
        training = await trainer(client)
        assert [await version(training) for _ in range(3)] == [1, 2, 3]
        await scene.host.die()
        assert await version(training) == 4
        assert scene.engine.calls["optim_step"] == 1
        assert scene.engine.calls["load"] == 1


async def test_samples_of_one_answer_are_drawn_on_by_the_next_engine_before_it_is_given(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, exact=False) as scene, closing(await scene.client()) as client:
        sampling = await client.create_sampling_client(base_model=TINY)
        held = scene.engine.block("sample")
        async with asyncio.timeout(WAIT_S):
            waiting = asyncio.create_task(tokens(sampling))
            await held.inside()
            await scene.host.die()
            assert len(await waiting) == 2


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("samplers", [0, 1])
async def test_the_service_says_whether_what_samples_is_exact_and_a_trainer_reads_it(
    tmp_path: Path, samplers: int, exact: bool
) -> None:
    async with serving(tmp_path, samplers=samplers, exact=exact) as scene:
        wiring = Wiring(run_id="r1", service_url=scene.url, api_url="", base_model=TINY)
        assert await samples_exactly(wiring) is exact


async def test_of_a_service_that_does_not_say_whether_it_is_exact_nothing_is_assumed() -> None:
    with open_listener(0) as bound:
        port = bound.getsockname()[1]
    wiring = Wiring(
        run_id="r1", service_url=f"http://127.0.0.1:{port}", api_url="", base_model=TINY
    )
    assert await samples_exactly(wiring) is True


@contextmanager
def service(state: Path, bound: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    argv = [
        "--state",
        str(state),
        "--engine",
        "scripted",
        "--threads",
        "1",
        "--listen-fd",
        str(bound.fileno()),
    ]
    with (state / "service.log").open("ab") as log:
        popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *argv], pass_fds=[bound.fileno()], stderr=log
        )
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait(WAIT_S)


def outcomes(state: Path) -> dict[str, bytes]:
    """What the journal has of samples that have ended, by id."""
    with suppress(sqlite3.OperationalError):
        connection = sqlite3.connect(f"file:{state}/journal.sqlite?mode=ro", uri=True)
        try:
            query = "SELECT id, outcome FROM requests WHERE kind = 'sample' AND state = 'done'"
            return dict(connection.execute(query).fetchall())
        finally:
            connection.close()
    return {}


@pytest.mark.runs
@proves("durable:one-answer")
async def test_of_64_samples_under_way_at_kill_9_each_has_one_answer_the_first(
    tmp_path: Path,
) -> None:
    """The SDK rides it out; what was given before the end, and what is given after it, stays."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        given = dict[str, bytes]()

        async def poll(http: aiohttp.ClientSession, request_id: str) -> bytes:
            body = {"request_id": request_id}
            async with http.post(
                f"{url}/api/v1/retrieve_future", json=body, headers=SAMPLING
            ) as response:
                assert response.status == 200, await response.text()
                return await response.read()

        async with asyncio.timeout(3 * WAIT_S), aiohttp.ClientSession() as http:
            with service(tmp_path, bound) as first:
                client = await asyncio.to_thread(tinker.ServiceClient, base_url=url, api_key=KEY)
                await asyncio.to_thread(lambda: client.holder)
                sampling = await client.create_sampling_client(base_model=TINY)
                params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
                waiting = [asyncio.create_task(_tokens(sampling, params)) for _ in range(64)]
                await until(lambda: len(outcomes(tmp_path)) >= 16, within_s=WAIT_S)
                given = {
                    request_id: await poll(http, request_id)
                    for request_id in list(outcomes(tmp_path))[:16]
                }
                first.send_signal(signal.SIGKILL)
                first.wait(WAIT_S)
            recorded = outcomes(tmp_path)
            assert 16 <= len(recorded) < 64, "some wait"
            with service(tmp_path, bound):
                drawn = await asyncio.gather(*waiting)
                await until(lambda: len(outcomes(tmp_path)) == 64, within_s=WAIT_S)
                final = outcomes(tmp_path)
                assert recorded.items() <= final.items()
                assert given.items() <= final.items()
                for request_id, outcome in final.items():
                    assert await poll(http, request_id) == outcome
                assert sorted(drawn) == sorted(map(_tokens_in, final.values()))
                assert len(set(drawn)) > 1, "the engine is not exact"
                await client.close("success")


async def _tokens(sampling: tinker.SamplingClient, params: types.SamplingParams) -> str:
    drawn = await sampling.sample(prompt(5, 6), 2, params)
    return json.dumps([list(sequence.tokens) for sequence in drawn.sequences])


def _tokens_in(outcome: bytes) -> str:
    from halteres.service.wire.results import as_json

    return json.dumps(
        [sequence["tokens"] for sequence in json.loads(as_json(outcome))["sequences"]]
    )
