"""A PostgreSQL for this folder: one cluster per test process, begun by the first test that asks for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from halteres.trajectories.stores.postgres import PostgresStore

from .cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The server of this test process."""
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def database(cluster: Cluster) -> str:
    """The name of an empty database."""
    return cluster.empty_database()


@pytest.fixture
def url(cluster: Cluster, database: str) -> str:
    """Its URL, with a password."""
    return cluster.url(database)


@pytest.fixture
def open_store(url: str) -> Iterator[Callable[[], PostgresStore]]:
    """Opens stores on one database, as many servers would; closed at the end."""
    opened: list[PostgresStore] = []

    def open_one() -> PostgresStore:
        opened.append(PostgresStore(url))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
