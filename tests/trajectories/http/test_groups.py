"""GET /v1/groups, /v1/groups/{id}, /metrics, the routes of leases: ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halteres.observe.prometheus import MEDIA_TYPE
from halteres.trajectories import service
from halteres.trajectories.options import Options, Rules
from halteres.trajectories.records import (
    GroupRecord,
    Place,
)
from halteres.trajectories.routes import page_of
from halteres.trajectories.schema import GroupsRequest
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import StoreFailed
from trajectories.server_fixtures import Json, ServerFixture, group, marks, opened


async def listed(scene: ServerFixture, **params: Any) -> list[int]:
    """The ids on a page."""
    return [each["id"] for each in (await scene.get("/v1/groups", **params))["groups"]]


async def test_groups_are_listed_with_what_became_of_them(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    env_id = await scene.register_env()
    await scene.send(
        group(2, env_id=env_id, policy_version=3), group(1, env_id=env_id), group(3), group(2)
    )
    await scene.batch()
    page = await scene.get("/v1/groups")
    assert page["next"] is None
    assert [
        (each["id"], each["place"], each["size"], each["env_id"]) for each in page["groups"]
    ] == [
        (1, "delivered", 2, env_id),
        (2, "buffered", 1, env_id),
        (3, "set_aside", 3, None),
        (4, "queued", 2, None),
    ]
    first, _, aside, _ = page["groups"]
    assert (first["policy_version"], first["received_at"], first["batch_id"]) == ([3, 3], 1000.0, 1)
    assert (aside["reason"], aside["why"]) == (
        "group_exceeds_batch",
        "The group has 3 sequences, a batch 2.",
    )
    assert not [each for each in page["groups"] if "element" in each]


async def test_a_page_can_be_narrowed_and_followed(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    await scene.send(*(group(2, env_id=number % 2) for number in range(6)))
    await scene.batch()
    assert await listed(scene, place="queued") == [2, 3, 4, 5, 6]
    assert await listed(scene, place=["queued", "delivered"]) == [1, 2, 3, 4, 5, 6]
    assert await listed(scene, env_id=1) == [2, 4, 6]
    assert await listed(scene, newest="1", limit=2) == [5, 6]
    first = await scene.get("/v1/groups", limit=4)
    assert first["next"] == 4
    assert await scene.get("/v1/groups", limit=4, after=4) == await scene.get(
        "/v1/groups", after=first["next"]
    )
    assert await listed(scene, after=4) == [5, 6]
    assert await listed(scene, after=-(2**62)) == [1, 2, 3, 4, 5, 6]
    assert await listed(scene, after=2**62) == []


async def test_bodies_are_what_the_trainer_gets(scene: ServerFixture) -> None:
    await scene.begin(batch_size=4)
    await scene.send(group(2, mark=1), group(2, mark=2))
    page = await scene.get("/v1/groups", bodies="1")
    one = await scene.get("/v1/groups/2")
    assert one == page["groups"][1]
    assert [each["element"] for each in page["groups"]] == await scene.batch()


@pytest.mark.parametrize(
    "body", [{"scores": [0.1, float("nan")]}, {"messages": [[{"role": "a", "content": "\ud800"}]]}]
)
async def test_what_json_cannot_say_is_listed_without_it(scene: ServerFixture, body: Json) -> None:
    await scene.send({**group(2), **body})
    (only,) = (await scene.get("/v1/groups", bodies="1"))["groups"]
    assert only["place"] == "set_aside" and only["element"] is None
    assert (await scene.get("/v1/groups/1")) == only


@pytest.mark.parametrize("group_id", ["0", "7", "-1", str(2**62)])
async def test_a_group_that_never_was_is_404(scene: ServerFixture, group_id: str) -> None:
    answer = await scene.http.get(f"/v1/groups/{group_id}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "after=" + "9" * 5000,
        "place=nowhere",
        "place=",
        "newest=2",
        "env_id=1.5",
    ],
)
async def test_a_query_that_does_not_fit_is_422_and_says_where(
    scene: ServerFixture, query: str
) -> None:
    answer = await scene.http.get(f"/v1/groups?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][:2] == ["query", query.partition("=")[0]]


def record(group_id: int, num_bytes: int) -> GroupRecord:
    return GroupRecord(
        id=group_id, env_id=None, size=1, num_bytes=num_bytes, received_at=0.0, place=Place.QUEUED
    )


@pytest.mark.parametrize(
    ("wanted", "most", "fits"),
    [
        (GroupsRequest(limit=3, bodies=True), 10, [1, 2]),
        (GroupsRequest(limit=3, bodies=True), 3, [1]),
        (GroupsRequest(limit=1, bodies=True), 99, [1]),
        (GroupsRequest(limit=3, bodies=True, newest=True), 10, [3, 4]),
        (GroupsRequest(limit=2, bodies=True, newest=True), 1, [4]),
        (GroupsRequest(limit=3), 1, [1, 2, 3]),
        (GroupsRequest(limit=3, newest=True), 1, [2, 3, 4]),
    ],
)
def test_a_page_of_bodies_is_bounded_in_bytes_and_never_empty(
    wanted: GroupsRequest, most: int, fits: list[int]
) -> None:
    found = [record(group_id, 5) for group_id in range(1, 5)]
    assert [each.id for each in page_of(found, wanted, most)] == fits


async def test_a_lease_is_told_acknowledged_extended_and_returned(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    await scene.send(group(2, mark=1), group(2, mark=2))
    first = await scene.get("/batch", lease=30)
    assert (first["batch_id"], first["lease_expires"], marks(first["batch"])) == (1, 1030.0, [1])
    assert "step" not in first
    extended = await scene.post("/v1/batches/1/extend?lease=60", b"")
    assert extended == {"batch_id": 1, "standing": "leased", "lease_expires": 1060.0}
    assert await scene.post("/v1/batches/1/extend", {"lease": 90}) == {
        **extended,
        "lease_expires": 1090.0,
    }
    done = {"batch_id": 1, "standing": "delivered", "step": 1}
    assert await scene.post("/v1/batches/1/ack", b"") == done
    assert await scene.post("/v1/batches/1/ack", b"") == done
    second = await scene.get("/batch", lease=30)
    assert await scene.post(f"/v1/batches/{second['batch_id']}/nack", b"") == {
        "batch_id": 2,
        "standing": "returned",
    }
    assert (await scene.get("/batch", lease=30))["batch"] == second["batch"]
    answer = await scene.raw_post("/v1/batches/2/ack", b"")
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/batches/7/ack", 404),
        ("/v1/batches/-1/nack", 404),
        ("/v1/batches/x/ack", 422),
        (f"/v1/batches/{'9' * 5000}/ack", 422),
        ("/v1/batches/1/extend", 422),
        ("/v1/batches/1/extend?lease=nan", 422),
        ("/v1/batches/1/extend?lease=0", 422),
        ("/batch?lease=-1", 422),
        ("/batch?lease=1e9", 422),
        ("/batch?wait=61", 422),
    ],
)
async def test_batches_that_never_were_and_times_that_cannot_be(
    scene: ServerFixture, path: str, status: int
) -> None:
    ask = scene.http.get if path.startswith("/batch") else scene.http.post
    assert (await ask(path)).status_code == status


async def test_ours_are_told_to_register_again_where_the_original_dies(
    scene: ServerFixture,
) -> None:
    """Unmodified clients are adopted instead (spec 5.4)."""
    ours = {"halteres-client": "0.1.0"}
    await scene.begin()
    answer = await scene.http.request("GET", "/status-env", json={"env_id": 9}, headers=ours)
    assert (answer.status_code, answer.json()["code"]) == (410, "environment_unknown")
    for path, body in (("/scored_data", group(env_id=9)), ("/scored_data_list", [group(env_id=9)])):
        answer = await scene.http.post(path, json=body, headers=ours)
        assert (answer.status_code, answer.json()["code"]) == (410, "environment_unknown")
    assert (await scene.get("/status"))["queue_size"] == 0
    assert (await scene.status_env(9))["current_step"] == 0
    assert (
        await scene.http.post("/scored_data", json=group(env_id=9), headers=ours)
    ).status_code == 200


async def figures(scene: ServerFixture) -> dict[str, float]:
    """GET /metrics as a scraper reads it."""
    answer = await scene.http.get("/metrics")
    assert answer.headers["content-type"] == MEDIA_TYPE
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("halteres_trajectories_"): float(figure) for name, figure in lines}


async def test_metrics_count_what_happened(scene: ServerFixture) -> None:
    before = await figures(scene)
    assert before["registered"] == before["queued_groups"] == before["groups_received_total"] == 0
    await scene.begin(batch_size=2)
    env_id = await scene.register_env()
    key = {"Idempotency-Key": "k"}
    await scene.post("/scored_data", group(2, env_id=env_id), **key)
    await scene.post("/scored_data", group(2, env_id=env_id), **key)
    await scene.send(group(2), group(2), group(3), group(1, env_id=env_id))
    await scene.batch()
    await scene.get("/batch", lease=30)
    scene.clock.now += 7
    found = await figures(scene)
    assert {name: found[name] for name in found if name not in ("waiting_bytes",)} == {
        "groups_received_total": 5,
        'groups_set_aside_total{reason="group_exceeds_batch"}': 1,
        "groups_repeated_total": 1,
        "batches_handed_out_total": 2,
        "step": 1,
        "registered": 1,
        "paused": 0,
        "queued_groups": 1,
        "queued_sequences": 2,
        "out_sequences": 2,
        "oldest_seconds": 7,
        "environments_live": 1,
        'open_batches{standing="leased"}': 1,
        'open_batches{standing="offered"}': 0,
        'open_batches{standing="returned"}': 0,
    }
    assert found["waiting_bytes"] > 3 * len('{"tokens":[[7,5,6]]}')


async def test_another_run_begins_with_counts_of_its_own(scene: ServerFixture) -> None:
    """Of what is received; repeated groups are counted since the start, batches over all runs."""
    await scene.begin(batch_size=2)
    for _ in range(2):
        await scene.post("/scored_data", group(2), **{"Idempotency-Key": "k"})
    await scene.send(group(3))
    await scene.batch()
    await scene.register(wandb_group="next", batch_size=2)
    found = await figures(scene)
    counters = {name: figure for name, figure in found.items() if "_total" in name}
    assert counters == {
        "groups_received_total": 0,
        "groups_repeated_total": 1,
        "batches_handed_out_total": 1,
    }


async def test_metrics_are_text_that_prometheus_reads(scene: ServerFixture) -> None:
    await scene.send(group(2, scores=[1, float("inf")]))
    lines = (await scene.http.get("/metrics")).text.splitlines()
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    told = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert list(kinds) == told == list(dict.fromkeys(told)), "each name once"
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        n for n in kinds if n.endswith("_total")
    }
    assert {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")} <= set(
        kinds
    )


async def test_a_full_queue_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FULL_HOLD_S", 0.01)
    options = Options(database="", rules=Rules(max_queue_bytes=2**20))
    async with opened(tmp_path / "queue.sqlite", options=options) as scene:
        await scene.send(group(2, images="x" * 2**19))
        answer = await scene.raw_post("/scored_data", group(2, images="x" * 2**19))
        assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (
            503,
            "queue_full",
            "5",
        )
        await scene.send(group(2))


async def test_a_store_that_fails_says_so_too(
    scene: ServerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFailed("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "commit", fail)
        answer = await scene.raw_post("/scored_data", group(2))
    assert (answer.status_code, answer.json()["detail"]) == (503, "The disk is full.")
    assert answer.headers["retry-after"] == "1"
    await scene.send(group(2))


async def test_a_key_longer_than_any_client_makes_is_refused(scene: ServerFixture) -> None:
    """All keys of a run are held in memory."""
    answer = await scene.raw_post("/scored_data", group(2), idempotency_key="k" * 257)
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (
        422,
        ["header", "Idempotency-Key"],
    )
    assert (
        await scene.raw_post("/scored_data", group(2, halteres_key="k" * 257))
    ).status_code == 422
