"""What goes wrong with a PostgreSQL, and what is said: never a hang, never a secret."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from deadlines import wait_until

from halteres.errors import Conflict, InvalidConfig
from halteres.trajectories.records import (
    RunRecord,
)
from halteres.trajectories.stores import postgres
from halteres.trajectories.stores.postgres import PostgresStore
from halteres.trajectories.stores.store import Durability, StoreFailed

from .cluster import PASSWORD, Cluster
from .samples import arrived, turn

OpenStore = Callable[[], PostgresStore]

CUT = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE "
    "'halteres%'"
)


@pytest.fixture
def store(open_store: OpenStore) -> PostgresStore:
    """A store on an empty database, loaded, with one group."""
    store = open_store()
    store.load()
    turn(store, arrived(1))
    return store


def test_a_connection_lost_within_a_turn_fails_that_turn_only(
    store: PostgresStore, cluster: Cluster
) -> None:
    store.begin()
    cluster.execute(CUT)
    with pytest.raises(
        StoreFailed, match=r"^The changes were not stored\. postgresql://halteres:\*\*\*@"
    ) as failed:
        store.commit([arrived(2)])
    assert PASSWORD not in failed.value.sentence
    news = store.begin()
    store.commit([arrived(2)])
    assert news.afresh and [each.id for each in news.afresh.waiting] == [1]
    assert [each.id for each in store.load().waiting] == [1, 2]


def test_a_connection_lost_between_turns_is_made_again_unnoticed(
    store: PostgresStore, cluster: Cluster
) -> None:
    cluster.execute(CUT)
    assert turn(store, arrived(2)).changes == []
    cluster.execute(CUT)
    assert list(store.bodies([2]).values()) == [b"2"]


def test_a_turn_whose_connection_is_lost_can_be_abandoned(
    store: PostgresStore, cluster: Cluster
) -> None:
    store.begin()
    cluster.execute(CUT)
    store.abandon()
    assert turn(store, arrived(2)).changes == []


def test_a_postgresql_that_is_down_fails_turns_and_readers_until_it_is_back(
    store: PostgresStore, cluster: Cluster
) -> None:
    cluster.stop()
    try:
        with pytest.raises(
            StoreFailed,
            match=r"^The trajectory queue gave no turn\. .* Look whether PostgreSQL runs",
        ):
            store.begin()
        with pytest.raises(StoreFailed, match=r"^The trajectory database cannot be read\. "):
            list(store.bodies([1]).values())
    finally:
        cluster.start()
    assert turn(store, arrived(2)).changes == []
    assert sorted(store.bodies([1, 2])) == [1, 2]


def test_going_back_to_what_is_kept_waits_for_a_postgresql_that_starts_again(
    store: PostgresStore, cluster: Cluster
) -> None:
    cluster.stop()
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(store.load)
        cluster.start()
        assert [each.id for each in loaded.result(10).waiting] == [1]


def test_that_wait_has_an_end(
    store: PostgresStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "PATIENCE_S", 0.1)
    cluster.stop()
    try:
        with pytest.raises(StoreFailed, match="cannot be read"):
            store.load()
    finally:
        cluster.start()


def test_waiting_for_a_turn_has_an_end(
    store: PostgresStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LOCK_S", 0.2)
    other = open_store()
    store.begin()
    with pytest.raises(StoreFailed, match=r"^The trajectory queue gave no turn within"):
        other.begin()
    store.commit([arrived(2)])
    assert turn(other, arrived(3)).afresh  # it had loaded nothing yet


def test_a_server_that_starts_meanwhile_is_told_the_same(
    store: PostgresStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LOCK_S", 0.2)
    store.begin()
    with pytest.raises(
        StoreFailed, match=r"gave no turn within 0\.2 s\. Another server on it hangs"
    ):
        open_store()


def test_a_user_without_rights_is_told_what_is_missing(cluster: Cluster, database: str) -> None:
    cluster.execute("DROP ROLE IF EXISTS guest")
    cluster.execute("CREATE ROLE guest LOGIN")
    cluster.execute("GRANT USAGE ON SCHEMA public TO guest", database)
    with pytest.raises(
        StoreFailed,
        match=r"permission denied for schema public\. Give that user the right to create",
    ):
        PostgresStore(f"postgresql://guest@/{database}?host={cluster.folder}")


def test_a_server_that_hangs_within_its_turn_loses_it(
    open_store: OpenStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(postgres, "IDLE_S", 0.2)
        hangs = open_store()
        hangs.load()
        hangs.begin()
    other = open_store()
    assert turn(other, arrived(1)).afresh
    with pytest.raises(StoreFailed, match="The changes were not stored"):
        hangs.commit([arrived(1)])
    assert [each.id for each in other.load().waiting] == [1]


def test_changes_without_a_turn_are_refused(store: PostgresStore) -> None:
    with pytest.raises(StoreFailed, match="No turn was begun"):
        store.commit([arrived(2)])
    assert turn(store, arrived(2)).afresh


def test_a_turn_is_kept_whole_or_not_at_all(store: PostgresStore) -> None:
    store.begin()
    with pytest.raises(StoreFailed, match="duplicate key"):
        store.commit([RunRecord(step=9), arrived(2), arrived(2)])
    loaded = store.load()
    assert (loaded.run.step, [each.id for each in loaded.waiting]) == (0, [1])


def test_servers_that_start_at_once_make_the_tables_once(url: str) -> None:
    together = threading.Barrier(4)

    def start(_: int) -> PostgresStore:
        together.wait(10)
        return PostgresStore(url)

    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(start, range(4)))
    for number, store in enumerate(stores, 1):
        turn(store, arrived(number))
        store.close()


def test_a_database_of_another_version_is_refused(
    store: PostgresStore, open_store: OpenStore, cluster: Cluster, database: str
) -> None:
    cluster.execute("UPDATE schema_version SET version = 1", database)
    with pytest.raises(
        Conflict, match=r"^The trajectory database postgresql://halteres:\*\*\*@.* has version 1\."
    ):
        open_store()


def test_a_database_with_somebody_elses_tables_is_refused(
    open_store: OpenStore, cluster: Cluster, database: str
) -> None:
    cluster.execute("CREATE TABLE groups (name text)", database)
    with pytest.raises(
        Conflict, match=r"tables of the same names that are somebody else's: groups\."
    ):
        open_store()
    assert cluster.execute(
        "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'", database
    ) == [(1,)]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "It cannot be read as a URL."),
        ("postgresql://me:hunter22@db:port/x", "It cannot be read as a URL."),
        ("mysql://me:hunter22@db/x", "It begins with mysql://."),
        ("postgresql+asyncpg://me:hunter22@db/x", "It begins with postgresql+asyncpg://."),
    ],
)
def test_what_is_no_url_is_told_without_its_password(url: str, why: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        PostgresStore(url)
    assert refused.value.why == why
    assert "hunter22" not in refused.value.sentence


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_common_spelling_of_the_url_is_taken(url: str, scheme: str) -> None:
    PostgresStore(f"{scheme}:{url.partition(':')[2]}").close()


def test_a_server_that_is_not_there_is_one_sentence_without_a_password() -> None:
    with pytest.raises(StoreFailed) as failed:
        PostgresStore("postgresql://me:hunter22@127.0.0.1:1/x?sslmode=disable")
    sentence = failed.value.sentence
    assert sentence.startswith(
        "The trajectory database cannot be opened. postgresql://me:***@127.0.0.1:1/x: "
    )
    assert "hunter22" not in sentence and "\n" not in sentence


def test_a_database_that_is_not_there_is_named(cluster: Cluster) -> None:
    with pytest.raises(StoreFailed, match=r'database "nowhere" does not exist'):
        PostgresStore(f"postgresql://halteres@/nowhere?host={cluster.folder}")


def test_power_is_not_promised_where_postgresql_does_not_sync(url: str) -> None:
    with pytest.raises(Conflict, match="Its setting fsync is off"):
        PostgresStore(url, durability="power")


@pytest.fixture
def with_fsync(cluster: Cluster) -> Iterator[None]:
    """A PostgreSQL that writes through to its disk."""
    for value in ("on", "off"):
        cluster.execute(f"ALTER SYSTEM SET fsync = {value}")
        cluster.execute("SELECT pg_reload_conf()")
        wait_until(lambda: cluster.execute("SHOW fsync") == [(value,)], what=f"fsync is {value}")  # noqa: B023
        if value == "on":
            yield


@pytest.mark.usefixtures("with_fsync")
@pytest.mark.parametrize(("durability", "commits"), [("process", "off"), ("power", "on")])
def test_power_turns_on_what_the_database_turned_off(
    url: str, cluster: Cluster, database: str, durability: Durability, commits: str
) -> None:
    cluster.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
    store = PostgresStore(url, durability)
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == commits
    store.close()
