"""What every test has: a home of its own, so that none touches ~/.halteres."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def home_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HALTERES_HOME for tests that name none; its cache of descriptions spares them asking again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALTERES_HOME", str(tmp_path_factory.mktemp("halteres")))
        patch.delenv("HALTERES_ENVIRONMENTS", raising=False)
        yield
