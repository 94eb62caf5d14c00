"""What was acknowledged survives: kill -9, restarts, full disks (spec §5.1)."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halteres.trajectories.records import (
    Change,
    GroupArrived,
)
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import StoreFailed

from .server_fixtures import (
    ENV,
    TRAINER,
    ServerFixture,
    ServerProcess,
    group,
    marks,
    opened,
    within,
)

pytestmark = pytest.mark.runs


def test_acknowledged_groups_survive_kill_9(server: ServerProcess) -> None:
    """Killed while four clients post: every group whose reply arrived is delivered after the
    restart, once.
    """
    server.ask("/register", {**TRAINER, "batch_size": 2})
    server.ask("/batch")
    acknowledged: list[int] = []
    enough, killed = threading.Event(), threading.Event()

    def post(first: int) -> None:
        try:
            for mark in range(first, first + 10_000):
                server.ask("/scored_data", group(2, mark=mark))
                acknowledged.append(mark)
                if len(acknowledged) >= 40:
                    enough.set()
                if killed.is_set():
                    return
        except (OSError, http.client.HTTPException):
            return  # the server was killed under this request

    clients = [threading.Thread(target=post, args=(10_000 * number + 1,)) for number in range(1, 5)]
    for client in clients:
        client.start()
    assert enough.wait(20)
    server.kill()
    killed.set()
    server.start()  # a client that had connected, but was not accepted, is answered by this one
    for client in clients:
        client.join(20)
    delivered: list[int] = []
    while batch := server.ask("/batch")["batch"]:
        delivered += marks(batch)
    assert len(delivered) == len(set(delivered))
    assert set(acknowledged) <= set(delivered)
    assert len(delivered) - len(acknowledged) <= len(clients)  # those whose reply the kill cut off


def test_a_delivered_batch_is_not_delivered_again_after_kill_9(server: ServerProcess) -> None:
    server.ask("/register", TRAINER)
    for mark in range(1, 7):
        server.ask("/scored_data", group(2, mark=mark))
    first = marks(server.ask("/batch")["batch"])
    assert server.ask("/status")["current_step"] == 1  # counted: a kill before this could repeat it
    server.kill()
    server.start()
    assert first + marks(server.ask("/batch")["batch"]) + marks(server.ask("/batch")["batch"]) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_registration_step_and_ids_survive_kill_9(server: ServerProcess) -> None:
    server.ask("/register", {**TRAINER, "run_id": "r1", "max_staleness": 0})
    server.ask("/batch?policy_version=0")
    env_id = server.ask("/register-env", ENV)["env_id"]
    for _ in range(2):
        server.ask("/scored_data", group(2, env_id=env_id, policy_version=0))
    server.ask("/batch?policy_version=0")
    assert server.ask("/status")["current_step"] == 1  # counted: a kill before this could repeat it
    server.kill()
    server.start()
    assert server.ask("/info") == {"batch_size": 4, "max_token_len": 64}
    status = server.ask("/status-env", {"env_id": env_id}, "GET")
    assert (status["current_step"], status["allowance"]) == (1, 0)  # still paused
    assert len(server.ask("/batch?policy_version=0")["batch"]) == 2  # the lost reply, again
    assert server.ask("/register-env", ENV)["wandb_name"] == "sums_1"
    assert server.ask("/batch?policy_version=1")["batch"] is None
    assert server.ask("/status-env", {"env_id": env_id}, "GET")["allowance"] > 0


async def test_everything_is_as_before_after_a_restart(tmp_path: Path) -> None:
    database = tmp_path / "queue.sqlite"

    async def picture(scene: ServerFixture) -> dict[str, Any]:
        found = await scene.diagnostics()
        for env in found["environments"]:
            del env["last_seen_s"], env["last_rejection"]  # of this process
        return {
            **found,
            "latest": await scene.get("/latest_example"),
            "status": await scene.get("/status"),
        }

    async with opened(database) as scene:
        await scene.begin(max_staleness=1, batch_size=4)
        env_id = await scene.register_env(group_size=4)
        await scene.send(
            group(2, env_id=77),
            group(4, policy_version=0),
            group(3, env_id=env_id),
            group(9),
            group(2),
        )
        await scene.batch(policy_version=0)
        await scene.send(group(2, policy_version=0), group(1, mark=3, policy_version=4))
        await scene.batch(policy_version=4)
        await scene.post("/disconnect-env", {"env_id": 77})
        before = await picture(scene)
    async with opened(database) as scene:
        assert await picture(scene) == before
        assert before["set_aside"] == {"group_exceeds_batch": 1, "stale": 2}


class FullDisk(SqliteStore):
    """A store whose disk can be full."""

    full = False

    def commit(self, changes: Sequence[Change]) -> None:
        if self.full and any(isinstance(change, GroupArrived) for change in changes):
            raise StoreFailed(
                "The group was not stored.", "database or disk is full.", "Make room on the disk."
            )
        super().commit(changes)


async def test_a_group_that_could_not_be_stored_is_not_acknowledged_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    store = FullDisk(tmp_path / "queue.sqlite")
    async with opened(tmp_path / "queue.sqlite", store=store) as scene:
        await scene.begin()
        await scene.send(group(mark=1))
        store.full = True
        answer = await scene.raw_post("/scored_data", group(mark=2), idempotency_key="k")
        assert answer.status_code == 503
        assert "Make room on the disk." in answer.json()["detail"]
        assert (await scene.get("/status"))["queue_size"] == 1
        store.full = False
        await scene.post("/scored_data", group(mark=3), idempotency_key="k")
        assert marks(await scene.batch()) == [1, 3]


async def test_tokens_of_delivered_batches_do_not_pile_up(tmp_path: Path) -> None:
    """Beyond what is kept as evidence: here nothing, in files of one turn each."""
    store = SqliteStore(tmp_path / "queue.sqlite", keep_bytes=0, segment_bytes=1)
    async with opened(tmp_path / "queue.sqlite", store=store) as scene:
        await scene.begin(batch_size=2)
        await scene.send(*(group(mark=mark) for mark in range(1, 6)))
        for _ in range(5):
            await scene.batch()
        assert list(store.bodies(range(1, 6))) == [5]


def test_a_batch_is_not_lost_to_a_client_that_hung_up(server: ServerProcess) -> None:
    """Both known trainers give up after 10 s; in the original that loses the batch."""
    server.ask("/register", TRAINER)
    with socket.create_connection(server.listener.getsockname()) as client:
        client.sendall(b"GET /batch?wait=30 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        within(
            10,
            "the question is held",
            lambda: server.ask("/register-env", ENV)["status"] == "success",
        )
    server.ask("/scored_data", group(2, mark=1))
    server.ask("/scored_data", group(2, mark=2))
    assert marks(server.ask("/batch")["batch"]) == [1, 2]
    assert server.ask("/status")["current_step"] == 1


def test_a_batch_is_not_lost_to_a_client_that_gave_up_within_the_reply(
    server: ServerProcess,
) -> None:
    """A reply larger than every buffer on the way, so the server knows that it was not read."""
    server.ask("/register", {**TRAINER, "batch_size": 2})
    large = {
        "tokens": [[123456] * 1_000_000] * 2,
        "masks": [[123456] * 1_000_000] * 2,
        "scores": [0.0, 1.0],
    }
    server.ask("/scored_data", large)
    with socket.create_connection(server.listener.getsockname()) as client:
        client.settimeout(10)
        client.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    within(10, "the batch is back", lambda: server.ask("/batch")["batch"])
    assert server.ask("/status")["current_step"] == 1


def test_the_held_socket_bridges_a_restart(server: ServerProcess) -> None:
    """Clients that connect while nobody serves are answered by the next server, not refused."""
    server.kill()
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(server.ask("/info")))
    client.start()
    server.start()
    within(10, "the early client is answered", lambda: bool(answers))
    client.join(10)
