"""A batch that was decided reaches a trainer: questions side by side, clients that hang up, stores
that fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from halteres.trajectories.schema import BatchQuery
from halteres.trajectories.service import Batch, TrajectoryService
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import StoreFailed

from .server_fixtures import ServerFixture, group, marks, num_sequences, opened


class Unreadable(SqliteStore):
    """A store that cannot be read a few times."""

    failures = 0

    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        if self.failures:
            self.failures -= 1
            raise StoreFailed("The disk is away.")
        return super().bodies(group_ids)


class Client:
    """A client that can hang up in the middle of a reply, below any HTTP library."""

    def __init__(self, scene: ServerFixture, *, hangs_up: bool) -> None:
        self._app = scene.app
        self._hangs_up = hangs_up
        self.body = b""

    async def ask(self, path: str, **params: Any) -> bytes:
        """GET; gives what arrived."""
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": urlencode(params).encode(),
            "headers": [(b"host", b"127.0.0.1")],
        }
        await self._app(scope, self._receive, self._send)
        return self.body

    async def _receive(self) -> dict[str, Any]:
        if self.body and self._hangs_up:
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()  # a request without a body says nothing more
        raise AssertionError

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.body += message.get("body", b"")


async def taken(scene: ServerFixture) -> tuple[TrajectoryService, Batch]:
    """A batch on its way to a client that is still there."""

    async def gone() -> bool:
        return False

    service: TrajectoryService = scene.app.state.service
    batch = await service.batch(BatchQuery(), gone)
    assert batch is not None
    return service, batch


async def asked(scene: ServerFixture, **params: Any) -> asyncio.Task[Any]:
    """A question that is held: the server has looked once, and found nothing."""
    turns, seen = scene.app.state.service.decisions, asyncio.Event()
    submit = turns.submit

    def noted(*arguments: Any) -> Any:
        seen.set()
        return submit(*arguments)

    turns.submit = noted
    question = asyncio.create_task(scene.batch(**params))
    await seen.wait()
    turns.submit = submit
    return question


async def test_questions_side_by_side_deliver_each_group_once(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    await scene.send(*(group(mark=mark) for mark in range(1, 13)))
    async with asyncio.timeout(20):
        batches = await asyncio.gather(*(scene.batch() for _ in range(8)))
    assert sorted(marks(batch) for batch in batches) == [[mark] for mark in range(1, 9)]


async def test_three_questions_for_four_groups_lose_none(scene: ServerFixture) -> None:
    await scene.begin(batch_size=4)
    await scene.send(*(group(mark=mark) for mark in range(1, 5)))
    async with asyncio.timeout(20):
        batches = await asyncio.gather(*(scene.batch() for _ in range(3)))
    assert sorted(marks(batch) for batch in batches) == [[], [1, 2], [3, 4]]


@pytest.mark.parametrize("bound", [{}, {"max_staleness": 2}, {"max_staleness": 0}])
async def test_a_batch_whose_client_hung_up_within_the_reply_answers_the_next_question(
    scene: ServerFixture, bound: dict[str, int]
) -> None:
    asks = {"policy_version": 0} if bound else {}
    await scene.begin(**bound)
    await scene.send(*(group(mark=mark, policy_version=0) for mark in range(1, 7)))
    cut = await Client(scene, hangs_up=True).ask("/batch", **asks)
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)
    again = await scene.get("/batch", **asks)
    assert marks(again["batch"]) == [1, 2]
    after = {"after": again["batch_id"]} if bound else {}
    assert marks(await scene.batch(**asks, **after)) == [3, 4]
    assert (await scene.get("/status"))["current_step"] == 2


async def test_a_batch_that_arrived_whole_is_not_served_again(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(*(group(mark=mark) for mark in range(1, 5)))
    whole = await Client(scene, hangs_up=False).ask("/batch")
    assert marks(json.loads(whole)["batch"]) == [1, 2]
    assert marks(await scene.batch()) == [3, 4]
    assert await scene.batch() is None


async def test_a_batch_that_came_back_late_is_kept_though_a_later_one_was_served(
    scene: ServerFixture,
) -> None:
    """The tokens of the earlier batch are no longer in the database then."""
    await scene.begin()
    await scene.send(*(group(mark=mark) for mark in range(1, 7)))
    service, first = await taken(scene)
    assert marks(await scene.batch()) == [3, 4]
    service.give_back(first.delivery)
    assert marks(await scene.batch()) == [1, 2]
    assert marks(await scene.batch()) == [5, 6]


async def test_a_held_question_gets_the_batch_that_came_back(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(group(mark=1), group(mark=2))
    service, first = await taken(scene)
    async with asyncio.timeout(5):
        question = await asked(scene, wait=60)
        service.give_back(first.delivery)
        assert marks(await question) == [1, 2]


async def test_a_batch_that_came_back_belongs_to_its_run(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(group(mark=1), group(mark=2))
    await Client(scene, hangs_up=True).ask("/batch")
    await scene.register(wandb_group="other")
    assert await scene.batch() is None


async def test_a_batch_that_cannot_be_read_now_is_served_when_it_can(tmp_path: Path) -> None:
    store = Unreadable(tmp_path / "queue.sqlite")
    async with opened(store.file, store=store) as scene:
        await scene.begin()
        await scene.send(*(group(mark=mark) for mark in range(1, 5)))
        store.failures = 2
        for _ in range(2):
            assert (await scene.http.get("/batch")).status_code == 503
        assert marks(await scene.batch()) == [1, 2]
        assert marks(await scene.batch()) == [3, 4]
        assert (await scene.get("/status"))["current_step"] == 2


async def test_a_question_by_head_takes_no_batch(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(group(mark=1), group(mark=2))
    assert (await scene.http.head("/batch")).status_code == 405
    assert num_sequences(await scene.batch()) == 4


@pytest.mark.chaos
async def test_a_batch_of_more_groups_than_sqlite_takes_parameters_is_served(
    tmp_path: Path,
) -> None:
    num_groups = 33_000
    store = SqliteStore(tmp_path / "queue.sqlite")
    async with opened(store.file, store=store) as scene:
        await scene.begin(batch_size=num_groups)
        for _ in range(3):
            await scene.post(
                "/scored_data_list",
                [{"tokens": [[1]], "masks": [[1]], "scores": [0.0]}] * (num_groups // 3),
            )
        assert num_sequences(await scene.batch()) == num_groups


class Lost(SqliteStore):
    """A store whose disk goes away."""

    lost = False

    def commit(self, changes: Sequence[Any]) -> None:
        if self.lost:
            raise StoreFailed("The group was not stored.")
        super().commit(changes)

    def load(self) -> Any:
        if self.lost:
            raise StoreFailed("The disk is gone.")
        return super().load()


async def test_a_lost_store_is_told_to_the_owner_and_nobody_waits_for_it(tmp_path: Path) -> None:
    store = Lost(tmp_path / "queue.sqlite")
    told: asyncio.Queue[StoreFailed] = asyncio.Queue()
    async with (
        opened(store.file, store=store, on_loss=told.put_nowait) as scene,
        asyncio.timeout(10),
    ):
        await scene.begin()
        store.lost = True
        answers = await asyncio.gather(*(scene.raw_post("/scored_data", group()) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [503] * 3
        assert (await told.get()).what == "The disk is gone."
        assert (await scene.raw_post("/scored_data", group())).status_code == 503


async def test_a_question_that_is_held_belongs_to_its_run(scene: ServerFixture) -> None:
    await scene.begin()
    async with asyncio.timeout(10):
        question = await asked(scene, wait=30)
        await scene.register(wandb_group="other")
        assert await question is None
        await scene.send(group(mark=1), group(mark=2))
        assert marks(await scene.batch()) == [1, 2]


async def test_questions_of_different_versions_end_in_time_and_wake_nobody(
    scene: ServerFixture,
) -> None:
    await scene.register()
    await scene.send(group(mark=1, policy_version=1))
    turns = scene.app.state.service.decisions
    took, submit = [], turns.submit
    turns.submit = lambda *asked: took.append(1) or submit(*asked)
    async with asyncio.timeout(10):
        assert (
            await asyncio.gather(
                *(scene.batch(wait=0.3, policy_version=version) for version in (1, 2))
            )
            == [None] * 2
        )
    assert len(took) < 10


async def test_a_damaged_batch_that_is_asked_for_again_is_given_up(tmp_path: Path) -> None:
    """It was counted; without its tokens nobody can have it, and the next one must not wait for
    it.
    """

    class Damaged(SqliteStore):
        gone: tuple[int, ...] = ()

        def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
            found = super().bodies(group_ids)
            return {group_id: body for group_id, body in found.items() if group_id not in self.gone}

    store = Damaged(tmp_path / "queue.sqlite")
    async with opened(store.file, store=store) as scene:
        await scene.begin(max_staleness=0)
        await scene.send(group(mark=1, policy_version=0), group(mark=2, policy_version=0))
        first = await scene.get("/batch", policy_version=0)
        assert marks(first["batch"]) == [1, 2]
        store.gone = (1,)
        assert await scene.batch(policy_version=0) is None
        await scene.send(group(mark=3, policy_version=0), group(mark=4, policy_version=0))
        assert marks(await scene.batch(policy_version=0)) == [3, 4]
