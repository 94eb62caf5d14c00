"""What a store on SQLite takes it gives back, to this server and to the next one."""

from __future__ import annotations

import pytest

from halteres.trajectories.records import (
    Change,
    EnvRecord,
    EnvSeen,
    GroupArrived,
    KnownKey,
    Place,
    Remembered,
    RunRecord,
    Standing,
    Tally,
    Update,
)
from halteres.trajectories.schema import GroupsRequest
from halteres.trajectories.stores import store as tables
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import Store
from trajectories.postgres.samples import ENV, REGISTRATION, arrived, batch, delivered, group, keyed

from .conftest import OpenStore


def tallies(store: Store) -> dict[tuple[int | None, Place, str | None], int]:
    return {
        (each.env_id, each.place, each.reason): each.num_groups for each in store.load().tallies
    }


def test_a_new_store_remembers_nothing(store: SqliteStore) -> None:
    store_of_the_protocol: Store = store
    assert store_of_the_protocol.load() == Remembered()
    assert store_of_the_protocol.latest_body() is None
    assert store_of_the_protocol.groups(GroupsRequest()) == []
    assert not store_of_the_protocol.is_shared


def test_every_change_reaches_the_next_server(open_store: OpenStore) -> None:
    store = open_store()
    done = batch(1, 2, 1, standing=Standing.DELIVERED, step=4)
    run = RunRecord(
        registration=REGISTRATION,
        uuid=str(2**127 + 1),
        started=True,
        step=4,
        asked_version=2**31,
        last=done,
        parked=True,
    )
    env = EnvRecord(id=0, name="sums_0", desired_name="sums", registration=ENV, connected=False)
    adopted = EnvRecord(id=7, name="adopted_7", desired_name="adopted_7", registration=None)
    aside = group(
        6,
        env_id=None,
        place=Place.SET_ASIDE,
        position=0,
        versions=(2, 3),
        reason="not_finite",
        why="scores[0] is NaN — ‘no number’.",
        key="k" * 200,
        fingerprint=2**62,
        verdict=b'{"status":"received"}',
    )
    store.commit([env, adopted, EnvSeen(0, 1234.5)])
    store.commit(
        [
            arrived(1),
            arrived(2),
            arrived(3, versions=(0, 4)),
            arrived(4),
            arrived(5, place=Place.BUFFERED),
        ]
    )
    store.commit([batch(1, 2, 1), done, run])
    store.commit([batch(2, 4, 3, expires_at=2060.5, version=1), GroupArrived(aside, b"{}")])

    loaded = open_store().load()
    assert loaded == Remembered(
        run=run,
        envs=(env, adopted),
        waiting=(
            group(3, place=Place.OUT, delivery=2, versions=(0, 4)),
            group(4, place=Place.OUT, delivery=2),
            group(5, place=Place.BUFFERED),
        ),
        deliveries=(batch(2, 4, 3, expires_at=2060.5, version=1),),
        settled=(done,),
        keyed=(KnownKey("k" * 200, 2**62, b'{"status":"received"}'),),
        seen=(EnvSeen(0, 1234.5),),
        tallies=loaded.tallies,
        first_group_at=1001.0,
        last_group=6,
        last_position=5,
        last_delivery=2,
    )
    assert set(loaded.tallies) == {
        Tally(env_id=0, place=Place.DELIVERED, reason=None, num_groups=2),
        Tally(env_id=0, place=Place.OUT, reason=None, num_groups=2),
        Tally(env_id=0, place=Place.BUFFERED, reason=None, num_groups=1),
        Tally(env_id=None, place=Place.SET_ASIDE, reason="not_finite", num_groups=1),
    }
    assert open_store().groups(GroupsRequest(after=5)) == [aside]


def test_an_environment_that_is_saved_again_was_still_seen(store: SqliteStore) -> None:
    env = EnvRecord(id=0, name="sums_0", desired_name="sums", registration=ENV)
    store.commit([env, EnvSeen(0, 5.0), env, EnvSeen(0, 7.0), EnvSeen(99, 8.0)])
    assert store.load().seen == (EnvSeen(0, 7.0),)


@pytest.mark.parametrize(
    ("changes", "places", "standings"),
    [
        ([], [Place.OUT, Place.OUT], {1: Standing.LEASED}),
        (
            [batch(1, 1, 2, standing=Standing.OFFERED)],
            [Place.OUT, Place.OUT],
            {1: Standing.OFFERED},
        ),
        (
            [batch(1, 1, 2, standing=Standing.RETURNED)],
            [Place.OUT, Place.OUT],
            {1: Standing.RETURNED},
        ),
        (
            [batch(1, 1, 2, standing=Standing.REPLACED), batch(2, 1, 2)],
            [Place.OUT, Place.OUT],
            {1: Standing.REPLACED, 2: Standing.LEASED},
        ),
        (
            [
                batch(1, 1, 2, standing=Standing.BROKEN),
                group(1),
                group(2, place=Place.SET_ASIDE, reason="stale", why="Too old."),
            ],
            [Place.QUEUED, Place.SET_ASIDE],
            {1: Standing.BROKEN},
        ),
        (
            [*delivered(1, 1, 2, step=1)],
            [Place.DELIVERED, Place.DELIVERED],
            {1: Standing.DELIVERED},
        ),
    ],
)
def test_where_a_batch_stands_its_groups_are(
    store: SqliteStore, changes: list[Change], places: list[Place], standings: dict[int, Standing]
) -> None:
    store.commit([arrived(1), arrived(2), batch(1, 1, 2)])
    store.commit(changes)
    groups = store.groups(GroupsRequest())
    assert [each.place for each in groups] == places
    assert [each.position for each in groups] == [1, 2]
    loaded = store.load()
    assert {each.id: each.standing for each in (*loaded.settled, *loaded.deliveries)} == standings
    holder = max(standings)
    gone = standings[holder] is Standing.BROKEN
    assert {each.delivery for each in groups} == {None if gone else holder}


def test_a_batch_keeps_the_order_of_its_groups(open_store: OpenStore) -> None:
    store = open_store()
    order = (3, 1, 900, 2, *range(899, 3, -1))
    store.commit([arrived(number) for number in range(1, 901)])
    store.commit([batch(1, *order)])
    assert open_store().load().deliveries[0].groups == order


def test_a_group_that_arrives_and_moves_within_one_turn(store: SqliteStore) -> None:
    store.commit(
        [
            arrived(1, place=Place.BUFFERED, position=0),
            arrived(2, place=Place.BUFFERED, position=0),
            group(1, position=1),
            group(2, position=2),
            arrived(3),
            batch(1, 1, 2),
        ]
    )
    assert [(each.id, each.place, each.position) for each in store.load().waiting] == [
        (1, Place.OUT, 1),
        (2, Place.OUT, 2),
        (3, Place.QUEUED, 3),
    ]


def test_tokens_come_back_byte_for_byte_in_the_order_asked_for(open_store: OpenStore) -> None:
    bodies = [bytes(range(256)) * 1000, b"\\x00'\"", "∞".encode()]
    store = open_store()
    store.commit([arrived(number, body) for number, body in enumerate(bodies, 1)])
    for reader in (store, open_store()):
        assert list(reader.bodies([3, 1, 2]).values()) == [bodies[2], bodies[0], bodies[1]]
        assert reader.bodies([4, 1]) == {1: bodies[0]}


def test_any_number_of_groups_can_be_asked_for(store: SqliteStore) -> None:
    store.commit([arrived(number) for number in range(1, 2001)])
    assert list(store.bodies(range(2000, 0, -1)).values()) == [
        b"%d" % number for number in range(2000, 0, -1)
    ]


def test_the_latest_body_is_of_the_group_that_entered_the_queue_last(store: SqliteStore) -> None:
    store.commit([arrived(1), arrived(2), arrived(3, place=Place.BUFFERED, position=9)])
    store.commit([arrived(4, place=Place.SET_ASIDE, position=8, reason="stale", why="Too old.")])
    assert store.latest_body() == b"2"
    store.commit([batch(1, 2), *delivered(1, 2, step=1)])
    assert store.latest_body() == b"2"
    store.commit([group(1, place=Place.ARCHIVED), RunRecord(first_group=5)])
    assert store.latest_body() is None


def test_keys_live_for_their_run(open_store: OpenStore) -> None:
    store = open_store()
    store.commit([keyed(1, "a"), keyed(2, "b"), arrived(3)])
    store.commit([RunRecord(first_group=4), keyed(4, "a")])
    again = KnownKey("a", 4 * 2**32, b'{"status":"received"}')
    assert open_store().load().keyed == (again,)


def test_only_the_newest_settled_batches_are_loaded(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "KEPT_SETTLED", 2)
    store.commit([arrived(number) for number in range(1, 6)])
    store.commit([batch(1, 1, standing=Standing.RETURNED), batch(5, 5)])
    store.commit(
        [change for number in (2, 3, 4) for change in delivered(number, number, step=number)]
    )
    loaded = store.load()
    assert [each.id for each in loaded.settled] == [3, 4]
    assert [each.id for each in loaded.deliveries] == [1, 5]


def test_groups_are_counted_once_wherever_they_go(open_store: OpenStore) -> None:
    store = open_store()
    late = {"place": Place.SET_ASIDE, "reason": "stale", "why": "Too old."}
    store.commit(
        [
            arrived(1),
            arrived(2),
            arrived(3, env_id=None),
            arrived(4, **late),
            arrived(5, place=Place.BUFFERED),
        ]
    )
    store.commit([batch(1, 1, 3), *delivered(1, 1, 3, step=1), *delivered(1, 1, 3, step=1)])
    store.commit([group(2, **late), group(2, **late)])
    for reader in (store, open_store()):
        assert tallies(reader) == {
            (0, Place.DELIVERED, None): 1,
            (None, Place.DELIVERED, None): 1,
            (0, Place.SET_ASIDE, "stale"): 2,
            (0, Place.BUFFERED, None): 1,
        }


def test_another_run_counts_from_nothing(store: SqliteStore) -> None:
    late = {"place": Place.SET_ASIDE, "reason": "stale", "why": "Too old.", "position": 0}
    store.commit([arrived(1), arrived(2), arrived(3, **late), *delivered(1, 1, step=1)])
    store.commit(
        [
            arrived(4, **late),
            group(2, place=Place.ARCHIVED),
            RunRecord(first_group=5),
            arrived(5, **late),
        ]
    )
    loaded = store.load()
    assert tallies(store) == {(0, Place.SET_ASIDE, "stale"): 1}
    assert (loaded.waiting, loaded.first_group_at, loaded.last_group) == ((), None, 5)
    store.commit([arrived(6), RunRecord(first_group=5, step=2)])
    assert tallies(store) == {(0, Place.SET_ASIDE, "stale"): 1, (0, Place.QUEUED, None): 1}
    assert store.load().first_group_at == 1006.0


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        (GroupsRequest(), [1, 2, 3, 4, 5, 6]),
        (GroupsRequest(limit=2), [1, 2]),
        (GroupsRequest(after=2, limit=3), [3, 4, 5]),
        (GroupsRequest(limit=2, newest=True), [5, 6]),
        (GroupsRequest(place=(Place.QUEUED,)), [2, 5]),
        (GroupsRequest(place=(Place.DELIVERED, Place.QUEUED), limit=3), [1, 2, 3]),
        (GroupsRequest(place=(Place.DELIVERED, Place.QUEUED), limit=3, newest=True), [2, 3, 5]),
        (GroupsRequest(env_id=9), [4, 6]),
        (GroupsRequest(env_id=9, place=(Place.BUFFERED,), after=4), [6]),
        (GroupsRequest(place=(Place.ARCHIVED,)), []),
    ],
)
def test_groups_are_listed_by_id(store: SqliteStore, query: GroupsRequest, ids: list[int]) -> None:
    elsewhere = {"place": Place.BUFFERED, "env_id": 9}
    store.commit(
        [
            arrived(1),
            arrived(2),
            arrived(3),
            arrived(4, **elsewhere),
            arrived(5),
            arrived(6, **elsewhere),
        ]
    )
    store.commit(delivered(1, 1, 3, step=1))
    assert [each.id for each in store.groups(query)] == ids


def test_turns_need_no_beginning(store: SqliteStore) -> None:
    store.commit([])
    assert store.begin() == Update()
    store.abandon()
    assert store.catch_up() == Update()
    assert store.load() == Remembered()
