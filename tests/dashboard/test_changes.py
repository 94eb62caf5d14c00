"""News of the runs: what is told, to whom, until when."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from agent import control, run_fixtures
from agent.run_fixtures import RUN

from halteres.dashboard import events, routes
from halteres.dashboard.events import changes, stamps
from halteres.runs.notes import change_notes


@pytest.fixture(autouse=True)
def quick(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.02)


@asynccontextmanager
async def listening(url: str) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of an event stream, once it has begun."""
    async with (
        httpx.AsyncClient(headers=control.bearer(), timeout=10, trust_env=False) as http,
        http.stream("GET", f"{url}/api/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert [await anext(lines) for _ in range(2)] == ["retry: 1000", ""]
        yield lines


async def changed(lines: AsyncIterator[str]) -> set[str]:
    """The runs of the next change."""
    async with asyncio.timeout(5):
        async for line in lines:
            if line.startswith("data: "):
                return set(json.loads(line.removeprefix("data: "))["runs"])
    raise AssertionError("the stream has ended")


async def test_a_change_of_any_file_that_is_shown_is_told() -> None:
    run = run_fixtures.make_run()
    with run_fixtures.supervised(run):
        async with control.serving() as (_, url), listening(url) as lines:
            run_fixtures.add_step(run, 1)
            assert await changed(lines) == {RUN}
            run_fixtures.add_alert(run)
            assert await changed(lines) == {RUN}
            run_fixtures.change(run, step=1)
            assert await changed(lines) == {RUN}
            change_notes(run, add=["best"])
            assert await changed(lines) == {RUN}


async def test_runs_that_come_and_go_are_told() -> None:
    async with control.serving() as (_, url), listening(url) as lines:
        run = run_fixtures.make_run("aaaa1111")
        assert await changed(lines) == {"aaaa1111"}
        shutil.rmtree(run.path)
        assert await changed(lines) == {"aaaa1111"}


async def test_a_run_whose_supervisor_dies_has_changed_though_nobody_wrote_it() -> None:
    run = run_fixtures.make_run()
    with run_fixtures.supervised(run):
        before = stamps()
    assert stamps() != before
    assert run.state().code == "supervisor_lost"


async def test_where_nothing_happens_a_word_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    async with control.serving() as (_, url), listening(url) as lines:
        async with asyncio.timeout(5):
            assert await anext(lines) == ": alive"


async def test_the_stream_ends_with_the_server_and_does_not_hold_it_up() -> None:
    async with control.serving() as (server, url), listening(url) as lines:
        server.end()
        async with asyncio.timeout(1.5):  # answers under way would be waited for longer
            assert [line async for line in lines] in ([], [": alive", ""])


async def test_a_look_that_fails_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{}, OSError("disk"), {"a": (1,)}])

    def look() -> object:
        answer = next(answers, {"a": (1,)})
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(events, "stamps", look)
    async with asyncio.timeout(5):
        stream = changes(asyncio.Event())
        assert await anext(stream) == "retry: 1000\n\n"
        assert await anext(stream) == 'event: change\ndata: {"runs": ["a"]}\n\n'


async def test_more_pages_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_STREAMS", 1)
    async with control.serving() as (_, url):
        async with (
            listening(url),
            httpx.AsyncClient(headers=control.bearer(), trust_env=False) as http,
        ):
            answer = await http.get(f"{url}/api/events")
            assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        async with asyncio.timeout(5), listening(url) as lines:  # there is room again
            run_fixtures.make_run()
            assert await changed(lines) == {RUN}
