"""Our two clients against the real server: values, retries across restarts, lost replies, leases,
tokens.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

import halteres
from halteres.clients.retries import Retries
from halteres.clients.trajectories import (
    Address,
    EnvironmentClient,
    KeyReused,
    LeaseLost,
    NotAllowed,
    TrainerClient,
    TrainerRegistration,
    UnknownEnvironment,
    new_key,
)
from halteres.clients.trajectories.trainer import decoder
from halteres.config.environ import LARGEST_BATCH
from halteres.errors import InvalidConfig, InvalidData, NotFound, NotReady

from .server_fixtures import ServerProcess, group

RUN = TrainerRegistration(
    batch_size=4, max_token_len=64, num_steps=10, run_id="r1", max_staleness=0
)


@pytest.fixture
def trainer(server: ServerProcess) -> TrainerClient:
    client = TrainerClient(server.url)
    assert client.register(RUN) > 0
    with pytest.raises(NotReady, match="0 of 4 sequences are queued"):
        client.batch(0, deadline_s=0.05)
    return client


def test_optional_arrays_that_do_not_fit_their_tokens_are_left_out_by_our_trainer(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    cut = {"top_p": 0.9}
    server.ask(
        "/scored_data",
        group(2, mark=1, policy_version=0, advantages=[[1.0] * 4] * 2, generation_params=cut),
    )
    server.ask("/scored_data", group(2, mark=2, policy_version=0, ref_logprobs=[[-1.0]]))
    batch = trainer.batch(0, deadline_s=5)
    assert batch is not None
    assert [each.tokens[0][0] for each in batch.groups] == [1, 2]
    assert [(each.advantages, each.ref_logprobs) for each in batch.groups] == [((), ())] * 2
    assert [each.is_truncated for each in batch.groups] == [True, False]
    trainer.close()


@pytest.mark.parametrize(
    ("told", "cut"),
    [
        ("null", False),
        ("{}", False),
        ('{"top_p": 1.0, "top_k": -1, "min_p": 0, "temperature": 0.5}', False),
        ('{"top_p": null, "top_k": 0}', False),
        ('{"top_p": 0.95}', True),
        ('{"top_k": 20}', True),
        ('{"min_p": 0.05}', True),
        ('{"top_p": ["odd"]}', True),
    ],
)
def test_a_group_is_truncated_where_its_parameters_leave_tokens_out(told: str, cut: bool) -> None:
    element = f'{{"tokens": [[1]], "masks": [[1]], "scores": [0], "generation_params": {told}}}'
    reply = decoder.decode(f'{{"batch": [{element}]}}')
    assert reply.batch is not None and [each.as_group().is_truncated for each in reply.batch] == [
        cut
    ]


async def test_groups_go_round_from_environment_to_trainer(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    async with EnvironmentClient(server.url) as environment:
        registered = await environment.register_env(name="sums", group_size=2, max_token_length=64)
        assert (registered.name, registered.starting_step, registered.num_steps) == (
            "sums_0",
            0,
            10,
        )
        assert await environment.info() == (4, 64)
        assert await environment.wandb_info() == ("", "")
        status = await environment.status(registered.env_id)
        assert (status.allowance, status.current_step) == (2, 0)
        waiting = asyncio.create_task(asyncio.to_thread(trainer.batch, 0, deadline_s=10))
        for versions in (0, [[0, 0], [0, 0]]):
            sent = group(
                policy_version=versions,
                env_id=registered.env_id,
                overrides=[{"set_advantage_to_zero": True}, {}],
            )
            assert (await environment.post(sent, key=new_key())).status == "received"
        batch = await waiting
        assert batch is not None and batch.num_sequences == 4
        first, second = batch.groups
        assert (first.versions, second.versions) == (((0, 0), (0, 0)), ((0, 0), (0, 0)))
        assert first.tokens == ((7, 5, 6), (7, 5, 6))
        assert first.masks == ((-100, 5, 6), (-100, 5, 6))
        assert first.logprobs == ((1.0, -0.5, -0.25),) * 2
        assert first.scores == (0.0, 1.0)
        assert first.overrides == ({"set_advantage_to_zero": True}, {})
        assert (await environment.status(registered.env_id)).allowance == 0
        await environment.disconnect(registered.env_id)
    trainer.close()


async def test_a_nan_score_comes_back_as_a_sentence(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    async with EnvironmentClient(server.url) as environment:
        posted = await environment.post(group(scores=[float("nan"), 0.0]), key=new_key())
        assert posted.set_aside == "scores[0] is not a finite number."
        with pytest.raises(InvalidData, match="422"):
            await environment.post({"tokens": [[1]]}, key=new_key())
    trainer.close()


async def test_a_batch_that_is_too_large_is_refused_in_a_sentence(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    with pytest.raises(InvalidData) as caught:
        trainer.register(
            TrainerRegistration(batch_size=LARGEST_BATCH + 1, max_token_len=64, num_steps=1)
        )
    assert caught.value.why == "batch_size: A batch has at most 1048576 sequences, not 1048577."
    trainer.close()


@pytest.mark.runs
async def test_both_clients_bridge_a_kill_and_a_restart(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    async with EnvironmentClient(server.url) as environment:
        registered = await environment.register_env(name="sums", group_size=2, max_token_length=64)
        keys = [new_key(), new_key()]
        await environment.post(group(env_id=registered.env_id), key=keys[0])
        server.kill()
        restart = threading.Thread(target=server.start)
        restart.start()
        waiting = asyncio.create_task(asyncio.to_thread(trainer.batch, 0, deadline_s=20))
        await asyncio.gather(
            *(environment.post(group(env_id=registered.env_id), key=key) for key in keys)
        )
        batch = await waiting
        restart.join(20)
        assert batch is not None and batch.num_sequences == 4
        assert trainer.diagnostics()["groups_accepted"] == 2
    trainer.close()


def test_a_trainer_whose_reply_was_lost_gets_its_batch_from_the_next_question(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    for mark in range(1, 5):
        server.ask("/scored_data", group(2, mark=mark))
    first = trainer.batch(0, deadline_s=5)
    # the second batch: its reply never reaches our trainer
    server.ask("/batch?policy_version=0&after=1")
    second = trainer.batch(0, deadline_s=5)
    assert first is not None and second is not None
    assert [made.groups[0].tokens[0][0] for made in (first, second)] == [1, 3]
    assert trainer.diagnostics()["step"] == 2
    trainer.close()


@pytest.mark.parametrize("max_staleness", [0, 2, None])
def test_a_trainer_whose_first_reply_was_lost_gets_its_first_batch(
    server: ServerProcess, max_staleness: int | None
) -> None:
    client = TrainerClient(server.url)
    client.register(replace(RUN, max_staleness=max_staleness))
    marked(server, 1, 2, 3, 4)
    server.ask("/batch?policy_version=0&after=0")  # the reply never reaches our trainer
    first = client.batch(0, deadline_s=5)
    assert first is not None
    assert [each.tokens[0][0] for each in first.groups] == [1, 2]
    assert client.diagnostics()["step"] == 1
    client.close()


def test_a_trainer_that_trained_on_what_it_held_gets_the_batch_whose_reply_was_lost(
    server: ServerProcess,
) -> None:
    client = TrainerClient(server.url)
    client.register(replace(RUN, max_staleness=2))
    for mark in range(1, 7):
        server.ask("/scored_data", group(2, mark=mark, policy_version=0))
    assert client.batch(0, deadline_s=5)
    server.ask("/batch?policy_version=0&after=1")  # the reply never reaches our trainer
    second = client.batch(1, deadline_s=5)
    assert second is not None
    assert [each.tokens[0][0] for each in second.groups] == [3, 4]
    assert client.diagnostics()["step"] == 2
    client.close()


def test_waiting_for_a_batch_can_be_stopped(trainer: TrainerClient) -> None:
    assert trainer.batch(0, deadline_s=60, stopped=lambda: True) is None
    trainer.reset()
    with pytest.raises(NotReady, match="Register first"):
        trainer.batch(0, deadline_s=1)
    trainer.close()


def test_waiting_for_a_server_that_is_away_can_be_stopped_and_ends_at_its_deadline() -> None:
    """Not only when the patience is used up, which may be far longer."""
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) > 3

    patient = TrainerClient("http://127.0.0.1:9", Retries.for_seconds(3600, longest_wait_s=0.01))
    assert patient.batch(0, deadline_s=3600, stopped=stopped) is None
    with pytest.raises(NotReady, match="does not answer"):
        patient.batch(0, deadline_s=0.05)


async def test_a_server_that_stays_away_is_told_after_the_patience() -> None:
    nobody, brief = "http://127.0.0.1:9", Retries.for_seconds(0.2)
    with pytest.raises(NotReady, match="does not answer"):
        TrainerClient(nobody, brief).register(RUN)
    async with EnvironmentClient(nobody, brief) as environment:
        with pytest.raises(NotReady, match="does not answer"):
            await environment.info()


async def test_an_environment_without_a_trainer_gives_up_at_its_deadline(
    server: ServerProcess,
) -> None:
    async with EnvironmentClient(server.url) as environment:
        with pytest.raises(NotReady, match="No trainer asked"):
            await environment.register_env(
                name="sums", group_size=2, max_token_length=64, deadline_s=0.05
            )


def marked(server: ServerProcess, *marks: int) -> None:
    """Groups of two sequences; a batch takes two of them."""
    for mark in marks:
        server.ask("/scored_data", group(2, mark=mark))


def leased(trainer: TrainerClient, lease_s: float = 60) -> tuple[int, list[int]]:
    """The next batch under a lease: its id, its groups' marks."""
    batch = trainer.batch(0, deadline_s=5, lease_s=lease_s)
    assert batch is not None
    return trainer.leased.id, [each.tokens[0][0] for each in batch.groups]


@pytest.fixture
def off_policy(server: ServerProcess) -> TrainerClient:
    """A trainer that may hold several batches at a time."""
    client = TrainerClient(server.url)
    client.register(TrainerRegistration(batch_size=4, max_token_len=64, num_steps=10, run_id="r1"))
    return client


def test_a_leased_batch_counts_once_it_is_acknowledged(
    server: ServerProcess, off_policy: TrainerClient
) -> None:
    marked(server, 1, 2, 3, 4)
    (first, marks), (second, more) = leased(off_policy), leased(off_policy)
    assert (marks, more) == ([1, 2], [3, 4]), "a question does not settle what is leased"
    assert server.ask("/status") == {"current_step": 0, "queue_size": 4}
    for _ in range(2):
        off_policy.acknowledge(first)
    assert server.ask("/status") == {"current_step": 1, "queue_size": 2}
    off_policy.acknowledge(second)
    assert off_policy.diagnostics()["step"] == 2
    off_policy.close()


def test_a_batch_that_is_given_back_comes_again_under_another_id(
    server: ServerProcess, off_policy: TrainerClient
) -> None:
    marked(server, 1, 2)
    first, marks = leased(off_policy)
    off_policy.nack(first)
    again, same = leased(off_policy)
    assert (same, again != first) == (marks, True)
    with pytest.raises(LeaseLost, match="not yours any more"):
        off_policy.acknowledge(first)
    with pytest.raises(NotFound, match="no batch 99"):
        off_policy.nack(99)
    off_policy.close()


def test_a_lease_that_expires_returns_the_batch_unless_it_is_extended(
    server: ServerProcess, off_policy: TrainerClient
) -> None:
    marked(server, 1, 2, 3, 4)
    kept, _ = leased(off_policy, lease_s=0.2)
    off_policy.extend(kept, 60)
    lost, marks = leased(off_policy, lease_s=0.1)
    assert leased(off_policy)[1] == marks, "it waited for the lease to end"
    off_policy.acknowledge(kept)
    with pytest.raises(LeaseLost):
        off_policy.extend(lost, 60)
    off_policy.close()


def test_without_a_lease_there_is_none_to_settle() -> None:
    with pytest.raises(NotFound, match="No batch is leased"):
        _ = TrainerClient("http://127.0.0.1:9").leased


async def test_an_id_that_the_server_never_gave_is_told_to_register_again(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    """The protocol's own clients are adopted instead: they would die."""
    async with EnvironmentClient(server.url) as environment:
        with pytest.raises(UnknownEnvironment, match="no environment 7"):
            await environment.status(7)
        with pytest.raises(UnknownEnvironment):
            await environment.post(group(env_id=7), key=new_key())
    adopted = await asyncio.to_thread(server.ask, "/status-env", {"env_id": 7}, "GET")
    assert adopted["current_step"] == 0
    trainer.close()


async def test_a_key_that_another_group_came_with_is_refused(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    async with EnvironmentClient(server.url) as environment:
        key = new_key()
        await environment.post(group(), key=key)
        await environment.post(group(), key=key)
        with pytest.raises(KeyReused):
            await environment.post(group(mark=9), key=key)
    assert trainer.diagnostics()["groups_accepted"] == 1
    trainer.close()


TOKEN = "a-token-of-some-length"


async def test_a_token_comes_from_the_url_or_from_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("HALTERES_TRAJECTORY_TOKEN", TOKEN)
    guarded: ServerProcess = GuardedServer(tmp_path / "queue.sqlite")
    request.addfinalizer(guarded.close)
    knowing = TrainerClient(guarded.url)
    knowing.register(RUN)
    knowing.close()
    monkeypatch.delenv("HALTERES_TRAJECTORY_TOKEN")
    with_login = guarded.url.replace("//", f"//anybody:{TOKEN}@")
    async with EnvironmentClient(with_login) as environment:
        assert await environment.info() == (4, 64)
    async with EnvironmentClient(guarded.url) as environment:
        with pytest.raises(NotAllowed, match="HALTERES_TRAJECTORY_TOKEN"):
            await environment.info()
    with pytest.raises(NotAllowed, match="asks for a token"):
        TrainerClient(guarded.url).register(RUN)


class GuardedServer(ServerProcess):
    """A server that asks for the token in its variable."""

    def ask(self, path: str, body: object = None, method: str | None = None) -> object:
        client = TrainerClient(self.url)
        client.diagnostics()
        client.close()
        return {"message": "AtroposLib API"}


@pytest.mark.parametrize(
    ("url", "bare", "token", "is_here"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", None, True),
        ("http://localhost:8000/", "http://localhost:8000", None, True),
        ("http://[::1]:8000", "http://[::1]:8000", None, True),
        ("http://x:to%2Fken@10.0.0.7:8000", "http://10.0.0.7:8000", "to/ken", False),
        ("https://:secret@gpu7.lan/queue/?a=1", "https://gpu7.lan/queue", "secret", False),
        ("http://somebody@gpu7.lan", "http://gpu7.lan", None, False),
    ],
)
def test_an_address_is_told_without_its_login(
    url: str, bare: str, token: str | None, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HALTERES_TRAJECTORY_TOKEN", raising=False)
    address = Address.of(url)
    assert (address.url, address.token, address.is_here) == (bare, token, is_here)
    assert address.headers["Halteres-Client"] == halteres.__version__
    assert address.headers.get("Authorization") == (f"Bearer {token}" if token else None)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://:8000", "http://x:secret@host:many"]
)
def test_what_is_no_address_is_refused_without_its_login(url: str) -> None:
    with pytest.raises(InvalidConfig, match="is no address of a server") as caught:
        Address.of(url)
    assert "secret" not in caught.value.sentence


@asynccontextmanager
async def recording(seen: list[tuple[str | None, bytes]]) -> AsyncIterator[int]:
    """A server that keeps every body as it came, and compresses what it answers; gives its port."""

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Content-Encoding"), await request.content.read()))
        accepts = "gzip" in request.headers.get("Accept-Encoding", "")
        told = json.dumps({"status": "received", "batch": [group()], "batch_id": 1}).encode()
        headers = {"Content-Encoding": "gzip"} if accepts else {}
        return web.Response(body=gzip.compress(told) if accepts else told, headers=headers)

    app = web.Application(handler_args={"auto_decompress": False})
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("is_here", "encodings"), [(True, [None, None]), (False, ["gzip", None])])
async def test_what_goes_to_another_machine_is_compressed_and_what_stays_here_is_not(
    is_here: bool, encodings: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.clients.trajectories.address._is_here", lambda host: is_here)
    seen: list[tuple[str | None, bytes]] = []
    large, small = group(64), group(1)
    async with (
        recording(seen) as port,
        EnvironmentClient(f"http://127.0.0.1:{port}") as environment,
    ):
        for body in (large, small):
            await environment.post(body, key=new_key())
        trainer = TrainerClient(f"http://127.0.0.1:{port}")
        batch = await asyncio.to_thread(trainer.batch, 0, deadline_s=5)
        assert batch is not None and batch.groups[0].tokens == ((7, 5, 6), (7, 5, 6))
        trainer.close()
    posts = [(encoding, body) for encoding, body in seen if body]
    assert [encoding for encoding, _ in posts] == encodings
    bodies = [gzip.decompress(body) if encoding else body for encoding, body in posts]
    assert [json.loads(body) for body in bodies] == [large, small]
