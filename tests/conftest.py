"""What every test has: a home of its own, so that none touches ~/.halteres; servers that end when
they are told to; a command line that is put together once.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Generator, Iterator
from types import ModuleType

import pytest
import typer.main
import uvicorn.server
from works_with import PAGE, ROWS, Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is played where our games are compared with GEM's; whether docs/works-with.md is
    written.
    """
    parser.addoption(
        "--works-with", action="store_true", help="record what was run (clients, harnesses)"
    )
    parser.addoption(
        "--game-actions", type=int, default=300, help="actions for each family of games (clients)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Each worker notes, the controller writes."""
    if config.getoption("works_with"):
        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(Recorder(ROWS, PAGE, is_worker=is_worker))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that a collection makes is garbage: looking for some takes a quarter of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


UVICORN_ASKS_EVERY_S = 0.005
"""Whether it is to end; by itself every 0.1 s, and it rests as long again before it ends: 0.2 s for
each test.
"""


@pytest.fixture(scope="session", autouse=True)
def home_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HALTERES_HOME for tests that name none; its cache of descriptions spares them asking
    again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALTERES_HOME", str(tmp_path_factory.mktemp("halteres")))
        patch.delenv("HALTERES_ENVIRONMENTS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_that_end_at_once() -> Iterator[None]:
    """uvicorn's server in a test's own process knows an asyncio whose sleeps are short; in
    processes it is as it is.
    """
    hurried = ModuleType("asyncio")
    vars(hurried).update(
        vars(asyncio), sleep=lambda delay_s: asyncio.sleep(min(delay_s, UVICORN_ASKS_EVERY_S))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", hurried)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """Typer reads the signatures of all verbs at every call: for a process that is one call, here
    for hundreds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield
