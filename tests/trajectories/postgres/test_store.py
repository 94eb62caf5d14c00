"""The store on PostgreSQL alone: what it takes it gives back; which tokens it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halteres.trajectories.records import (
    EnvSeen,
    Place,
    Remembered,
    Tally,
)
from halteres.trajectories.stores import postgres
from halteres.trajectories.stores.postgres import PostgresStore

from .cluster import Cluster
from .samples import CHANGES, arrived, batch, delivered, group, turn

OpenStore = Callable[[], PostgresStore]


@pytest.fixture
def store(open_store: OpenStore) -> PostgresStore:
    """A store on an empty database, loaded."""
    store = open_store()
    assert store.load() == Remembered()
    return store


def test_what_is_committed_is_loaded_by_another_server(
    store: PostgresStore, open_store: OpenStore
) -> None:
    run, env, seen, aside, *_ = CHANGES
    turn(store, *map(arrived, (1, 2, 3)), arrived(4, place=Place.BUFFERED, position=0))
    turn(store, *delivered(1, 1, 2, step=4), run, env, seen, aside, batch(2, 3, expires_at=2060.5))

    loaded = open_store().load()
    assert loaded.run == run
    assert loaded.envs == (env,)
    assert loaded.seen == (EnvSeen(0, 1234.5),)
    assert loaded.waiting == (
        group(4, place=Place.BUFFERED, position=0),
        group(3, place=Place.OUT, delivery=2),
    )
    assert loaded.deliveries == (batch(2, 3, expires_at=2060.5),)
    assert [key.key for key in loaded.keyed] == ["k" * 200]
    assert Tally(env_id=0, place=Place.DELIVERED, reason=None, num_groups=2) in loaded.tallies
    assert (
        Tally(env_id=None, place=Place.SET_ASIDE, reason="not_finite", num_groups=1)
        in loaded.tallies
    )
    assert (loaded.last_group, loaded.last_position, loaded.last_delivery) == (5, 3, 2)


def test_tokens_come_back_byte_for_byte_in_the_order_asked(
    store: PostgresStore, open_store: OpenStore
) -> None:
    bodies = [bytes(range(256)) * 1000, b"\\x00'\"", "∞".encode()]
    turn(store, *(arrived(number, body) for number, body in enumerate(bodies, 1)))
    assert list(store.bodies([3, 1, 2]).values()) == [bodies[2], bodies[0], bodies[1]]
    assert open_store().bodies([1, 4]) == {1: bodies[0]}


def test_tokens_are_not_pressed_again(
    store: PostgresStore, cluster: Cluster, database: str
) -> None:
    turn(store, arrived(1, b"a" * 300_000))
    assert cluster.execute("SELECT pg_total_relation_size('bodies') > 300000", database) == [
        (True,)
    ]


def test_tokens_of_all_but_the_last_delivered_batch_are_released(store: PostgresStore) -> None:
    turn(store, *map(arrived, range(1, 8)))
    turn(store, batch(1, 1, 2), batch(2, 3))
    turn(store, *delivered(2, 3, step=1))
    assert sorted(store.bodies(range(1, 8))) == [1, 2, 3, 4, 5, 6, 7]
    turn(store, *delivered(1, 1, 2, step=2))
    assert sorted(store.bodies(range(1, 8))) == [1, 2, 4, 5, 6, 7]
    turn(store, *delivered(3, 4, step=3), *delivered(4, 5, 6, step=4))
    assert sorted(store.bodies(range(1, 8))) == [5, 6, 7]


def test_evidence_is_kept_within_its_budget_the_newest(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "PRUNED_EVERY", 1)
    store = PostgresStore(url, keep_bytes=25)  # two groups of 10 bytes
    store.load()
    turn(store, *map(arrived, range(1, 8)), *delivered(1, 1, step=1))
    aside = (group(number, place=Place.SET_ASIDE, reason="stale") for number in (2, 3))
    archived = (group(number, place=Place.ARCHIVED) for number in (4, 5))
    turn(store, *aside, *archived)
    assert sorted(store.bodies(range(1, 8))) == [1, 4, 5, 6, 7]  # 1: delivered last; 6, 7 wait
    store.close()


def test_the_latest_example_is_what_entered_the_queue_last(store: PostgresStore) -> None:
    assert store.latest_body() is None
    turn(store, arrived(1), arrived(2), arrived(3))
    turn(
        store,
        arrived(4, place=Place.SET_ASIDE, reason="stale", position=9),
        arrived(5, place=Place.BUFFERED),
    )
    assert store.latest_body() == b"3"
    turn(store, *delivered(1, 1, 2, 3, step=1))
    assert store.latest_body() == b"3"
