"""Several servers on one database: their turns exclude each other, and each begins with what the
others did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from deadlines import wait_until

from halteres.trajectories.records import (
    GroupArrived,
    KnownKey,
    Place,
    RunRecord,
    Update,
)
from halteres.trajectories.stores import postgres
from halteres.trajectories.stores.postgres import PostgresStore

from .cluster import Cluster
from .samples import arrived, bare, delivered, group, keyed, turn

OpenStore = Callable[[], PostgresStore]
Pair = tuple[PostgresStore, PostgresStore]

WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture
def pair(open_store: OpenStore) -> Pair:
    """Two servers on one database, loaded."""
    one, other = open_store(), open_store()
    one.load()
    other.load()
    return one, other


def test_turns_exclude_each_other(pair: Pair, cluster: Cluster) -> None:
    one, other = pair
    one.begin()
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(other.begin)
        wait_until(
            lambda: cluster.execute(WAITS) == [(1,)], what="the other server waits for its turn"
        )
        assert not begun.done()
        one.commit([arrived(1)])
        assert begun.result(10) == Update(changes=[bare(arrived(1))])
    other.abandon()


def test_a_turn_that_is_abandoned_changed_nothing_and_lets_others_in(pair: Pair) -> None:
    one, other = pair
    one.begin()
    one.abandon()
    assert turn(other) == Update(changes=[])
    one.abandon()  # safe to repeat


def test_news_are_what_others_did_in_order(pair: Pair) -> None:
    one, other = pair
    turn(one, arrived(1))
    turn(one, RunRecord(step=1), arrived(2))
    assert other.catch_up() == Update(
        changes=[bare(arrived(1)), RunRecord(step=1), bare(arrived(2))]
    )


def test_news_are_told_once_inside_a_turn_or_outside_and_never_of_oneself(pair: Pair) -> None:
    one, other = pair
    turn(one, arrived(1))
    assert turn(other, RunRecord(step=1)) == Update(changes=[bare(arrived(1))])
    assert other.catch_up() == Update(changes=[])
    assert one.begin() == Update(changes=[RunRecord(step=1)])
    one.abandon()
    moved = group(1, place=Place.BUFFERED)
    turn(one, moved)
    assert other.begin() == Update(changes=[moved])
    other.abandon()
    assert one.catch_up() == other.catch_up() == Update(changes=[])


def test_what_was_loaded_is_no_news(pair: Pair, open_store: OpenStore) -> None:
    turn(pair[0], arrived(1))
    late = open_store()
    assert [each.id for each in late.load().waiting] == [1]
    assert late.catch_up() == Update(changes=[])


def test_keys_come_with_the_groups_of_other_servers(pair: Pair) -> None:
    one, other = pair
    turn(one, keyed(1, "a"), arrived(2))
    assert other.begin().changes == [bare(keyed(1, "a")), bare(arrived(2))]
    other.abandon()


def test_keys_of_another_run_are_unknown(pair: Pair) -> None:
    turn(pair[0], keyed(1, "a"), RunRecord(first_group=2), keyed(2, "b"))
    assert pair[1].load().keyed == (KnownKey("b", 2**33, b'{"status":"received"}'),)


def test_a_server_that_was_away_too_long_begins_afresh(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "KEPT_S", -1)
    monkeypatch.setattr(postgres, "PRUNED_EVERY", 1)
    one, other = pair
    turn(one, arrived(1))
    turn(one, arrived(2))
    news = other.begin()
    other.abandon()
    assert (
        news.changes == () and news.afresh and [each.id for each in news.afresh.waiting] == [1, 2]
    )
    assert turn(one, arrived(3)) == Update(changes=[]), "the newest turn is never pruned"
    assert other.catch_up().afresh
    assert other.catch_up() == Update(changes=[])


def test_a_server_that_is_too_far_behind_begins_afresh(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "MOST_READ", 2)
    one, other = pair
    turn(one, arrived(1))
    assert other.catch_up().afresh is None
    turn(one, arrived(2))
    turn(one, arrived(3))
    assert other.catch_up().afresh


def test_a_database_that_went_back_in_time_is_noticed(
    pair: Pair, cluster: Cluster, database: str
) -> None:
    """E.g. a replica took over that had not caught up, and other servers went on there."""
    one, other = pair
    turn(one, arrived(1))
    assert other.catch_up().changes
    cluster.execute("UPDATE turns SET nonce = 1 WHERE number = 1", database)
    assert other.catch_up().afresh and one.catch_up().afresh


def test_a_group_is_in_the_log_without_its_tokens(
    pair: Pair, cluster: Cluster, database: str
) -> None:
    turn(pair[0], arrived(1, b"x" * 10_000))
    assert cluster.execute("SELECT max(length(changes)) < 300 FROM turns", database) == [(True,)]
    assert pair[1].catch_up() == Update(changes=[bare(arrived(1))])
    assert list(pair[1].bodies([1]).values()) == [b"x" * 10_000]


def test_delivered_tokens_are_released_whoever_delivers(pair: Pair) -> None:
    one, other = pair
    turn(one, arrived(1), arrived(2), arrived(3))
    turn(other, *delivered(1, 1, step=1))
    turn(one, *delivered(2, 2, step=2))
    assert sorted(other.bodies([1, 2, 3])) == [2, 3]


def test_ids_from_memory_never_meet(open_store: OpenStore) -> None:
    """Four servers give ids at once, each the next after what it knows: nobody else gives any in
    its turn.
    """
    num_servers, num_turns = 4, 25
    together = threading.Barrier(num_servers)

    def serve(store: PostgresStore) -> None:
        last = store.load().last_group
        together.wait(10)
        for _ in range(num_turns):
            news = store.begin()
            last = (
                max(
                    [
                        last,
                        *(each.group.id for each in news.changes if isinstance(each, GroupArrived)),
                    ]
                )
                + 1
            )
            store.commit([arrived(last)])

    with ThreadPoolExecutor(num_servers) as threads:
        list(threads.map(serve, [open_store() for _ in range(num_servers)]))
    ids = [each.id for each in open_store().load().waiting]
    assert ids == list(range(1, num_servers * num_turns + 1))
