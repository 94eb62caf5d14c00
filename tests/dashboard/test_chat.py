"""A question to a run's policies over the page's routes, with a service that says what it is told
to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from agent import control, run_fixtures, run_results
from agent.run_fixtures import RUN
from deadlines import until

from halteres.dashboard import chat
from halteres.runs import conversation, servers
from halteres.runs.directory import RunDirectory
from halteres.runs.kept_service import ServiceSearch
from halteres.runs.servers import Server

from .conftest import HOSTILE, Client

PATH = f"/api/runs/{RUN}/chat"
TEXTS = ("4", "\u2028", HOSTILE)
ORIGIN = {"origin": "http://127.0.0.1:8080"}


@dataclass(slots=True)
class Service:
    """A service's completions: what it was asked, and whether its client has left."""

    texts: Sequence[str] = TEXTS
    finish: str = "stop"
    refusals: int = 0  # so many requests are refused first, as too long
    is_silent: bool = False  # after its texts it says nothing more
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.asked.append((head.split()[1], body))
        if self.refusals:
            self.refusals -= 1
            refusal = b'{"error": {"message": "Too long."}}'
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + refusal)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            for text in self.texts:
                writer.write(self._event({"index": 0, "text": text, "delta": {"content": text}}))
            if self.is_silent:
                await reader.read()
                self.left.set()
            writer.write(self._event({"index": 0, "text": "", "finish_reason": self.finish}))
            writer.write(b"data: [DONE]\n\n")
        writer.close()

    def _event(self, choice: dict[str, Any]) -> bytes:
        return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


@asynccontextmanager
async def answering(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Every question is asked of this service."""
    server = await asyncio.start_server(service.answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = Server(url=f"http://127.0.0.1:{port}")
    monkeypatch.setattr(ServiceSearch, "look", lambda _: found)
    async with server:
        yield


def make_run(**changes: Any) -> RunDirectory:
    run = run_fixtures.make_run(**changes)
    (run.path / "config.yaml").write_text("env: {}")
    return run


@pytest.fixture
def run(home: object) -> RunDirectory:
    """A run that has ended, with checkpoints of steps 2 and 4."""
    run = make_run()
    for step, name in ((0, "step-000000"), (2, "step-000002"), (4, "final")):
        run_results.add_checkpoint(run, step, name)
    return run


async def asked(page: Client, **body: Any) -> list[dict[str, Any]]:
    """The lines of an answer."""
    async with page(**ORIGIN) as http:
        answer = await http.post(PATH, json={"policy": "newest", "question": "2 + 2", **body})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.split("\n") if line]


async def test_the_view_is_told_what_can_be_asked_and_how(page: Client, run: RunDirectory) -> None:
    async with page() as http:
        told = (await http.get(PATH)).json()
    assert told["policies"] == [
        {"name": "base", "label": "base: halteres/tiny"},
        {"name": "newest", "label": "newest: step 4"},
        {"name": f"{RUN}@2", "label": "step 2"},
    ]
    assert (told["temperature"], told["max_tokens"], told["history"]) == (0.0, 128, True)
    assert "first question starts one" in told["service"]
    assert "too few prompts" in told["words"]


async def test_without_a_checkpoint_there_is_the_base_model_alone(
    page: Client, home: object
) -> None:
    run = make_run()
    with run_fixtures.supervised(run):
        async with page(**ORIGIN) as http:
            told = (await http.get(PATH)).json()
            newest = await http.post(PATH, json={"policy": "newest", "question": "2 + 2"})
    assert [one["name"] for one in told["policies"]] == ["base"]
    assert "no checkpoint yet" in told["service"] and "own service" in told["service"]
    assert newest.status_code == 404 and "no weights" in newest.json()["error"]


async def test_a_reward_models_run_says_that_it_answers_nothing(page: Client, home: object) -> None:
    make_run(kind="reward", environment="reward-model")
    async with page(**ORIGIN) as http:
        for answer in (
            await http.get(PATH),
            await http.post(PATH, json={"policy": "base", "question": "2 + 2"}),
        ):
            assert answer.status_code == 422
            assert "trains a reward model" in answer.json()["error"]
            assert "reward" in answer.json()["next"]


async def test_an_answer_comes_in_pieces_whatever_they_hold(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(finish="length")
    async with answering(service, monkeypatch):
        lines = await asked(page, temperature=0.5, max_tokens=7)
    assert lines[0] == {"about": "newest: step 4"}
    assert [line["text"] for line in lines if line.get("text")] == list(TEXTS)
    assert lines[-1]["about"].endswith("cut off at 7 tokens")
    ((path, body),) = service.asked
    assert path == f"/runs/{RUN}/v1/chat/completions"
    assert body["model"].endswith("/sampler_weights/final")
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.5, 7, True)


async def test_each_policy_is_asked_by_its_own_weights(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    async with answering(service, monkeypatch):
        for policy in ("base", "newest", f"{RUN}@2", f"{RUN}@4"):
            await asked(page, policy=policy)
    models = [body["model"].rpartition("/")[2] for _, body in service.asked]
    assert models == ["tiny", "final", "step-000002", "final"]


async def test_the_turns_before_are_read_and_the_oldest_go_first_where_they_are_too_long(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(refusals=1)
    turns = [{"question": f"question {n}", "answer": f"answer {n}"} for n in (1, 2)]
    async with answering(service, monkeypatch):
        lines = await asked(page, turns=turns)
    first, second = (
        [message["content"] for message in body["messages"]] for _, body in service.asked
    )
    assert first == ["question 1", "answer 1", "question 2", "answer 2", "2 + 2"]
    assert second == first[2:]
    assert chat.FORGOTTEN in lines[-1]["about"]


async def test_a_refusal_is_the_last_line_in_the_services_own_words(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(Service(refusals=1), monkeypatch):
        lines = await asked(page)
    assert (lines[-1]["code"], "Too long." in lines[-1]["error"]) == ("process_exited", True)


async def test_a_service_that_says_nothing_more_is_given_up_and_what_came_stays(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SILENT_S", 0.3)
    service = Service(is_silent=True)
    async with answering(service, monkeypatch):
        lines = await asked(page)
        await asyncio.wait_for(service.left.wait(), 5)
    assert [line["text"] for line in lines if "text" in line] == list(TEXTS)
    assert lines[-1]["code"] == "not_ready" and lines[-1]["next"]


async def test_an_answer_that_takes_too_long_is_given_up(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "WHOLE_ANSWER_S", 0.0)
    async with answering(Service(), monkeypatch):
        lines = await asked(page)
    assert "not whole after 0 s" in lines[-1]["error"]


async def test_while_a_service_starts_the_seconds_are_told(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(Service(), monkeypatch):
        found = ServiceSearch.look
        looks = iter([True, True])
        monkeypatch.setattr(
            ServiceSearch, "look", lambda self: None if next(looks, False) else found(self)
        )
        lines = await asked(page)
    assert {"about": "newest: step 4 · a service starts: 0 s"} in lines


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"policy": "newest"},
        {"policy": "newest", "question": ""},
        {"policy": "newest", "question": 7},
        {"policy": "newest", "question": "a", "temperature": -1},
        {"policy": "newest", "question": "a", "max_tokens": 0},
        {"policy": "newest", "question": "a", "max_tokens": 1.5},
        {"policy": "newest", "question": "a", "turns": [{"question": "b"}]},
        {"policy": "newest", "question": "a", "n": 256},
        {"policy": "newest", "question": "\ud800"},
    ],
)
async def test_what_is_no_question_is_refused(
    page: Client, run: RunDirectory, body: dict[str, Any]
) -> None:
    async with page(**ORIGIN) as http:
        answer = await http.post(PATH, content=json.dumps(body))
    assert answer.status_code == 400
    assert answer.json()["next"]


@pytest.mark.parametrize("policy", ["", "best", f"{RUN}@3", "tinker://x/sampler_weights/final"])
async def test_weights_that_the_run_does_not_have_are_refused_with_those_that_it_has(
    page: Client, run: RunDirectory, policy: str
) -> None:
    async with page(**ORIGIN) as http:
        answer = await http.post(PATH, json={"policy": policy, "question": "2 + 2"})
        missing = await http.post("/api/runs/none/chat", json={"policy": "base", "question": "a"})
    assert (answer.status_code, missing.status_code) == (404, 404)
    assert "steps 4, 2" in answer.json()["error"]


@pytest.mark.parametrize("foreign", [{"origin": "http://127.0.0.1:9999"}, {"origin": "null"}, {}])
async def test_another_page_cannot_ask(
    page: Client, run: RunDirectory, foreign: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    async with answering(service, monkeypatch), page(**foreign) as http:
        answer = await http.post(PATH, json={"policy": "base", "question": "2 + 2"})
    assert answer.status_code == 403
    assert not service.asked


async def test_so_many_answers_at_once_are_the_limit(
    page: Client, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.dashboard.routes.MOST_ANSWERS", 0)
    async with page(**ORIGIN) as http:
        answer = await http.post(PATH, json={"policy": "base", "question": "2 + 2"})
    assert answer.status_code == 503


async def test_a_browser_that_leaves_ends_the_sampling(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(is_silent=True)
    question = {"policy": "newest", "question": "2 + 2"}
    async with (
        answering(service, monkeypatch),
        control.serving() as (_, url),
        httpx.AsyncClient(headers=control.bearer(), trust_env=False) as http,
    ):
        async with http.stream("POST", url + PATH, json=question) as answer:
            async for line in answer.aiter_lines():
                if "text" in line:
                    break
        await asyncio.wait_for(service.left.wait(), 5)


async def test_a_server_that_ends_says_so_in_the_last_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(is_silent=True)
    question = {"policy": "newest", "question": "2 + 2"}
    async with (
        answering(service, monkeypatch),
        control.serving() as (server, url),
        httpx.AsyncClient(headers=control.bearer(), trust_env=False) as http,
    ):
        asking = asyncio.create_task(http.post(url + PATH, json=question))
        await until(lambda: service.asked)
        server.end()
        answer = await asyncio.wait_for(asking, 10)
        await asyncio.wait_for(service.left.wait(), 5)
    last = json.loads(answer.text.strip().split("\n")[-1])
    assert (last["code"], "server ends" in last["error"]) == ("not_ready", True)
