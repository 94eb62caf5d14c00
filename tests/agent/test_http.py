"""The HTTP transport: who is let in, how requests are read, how a call ends."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from halteres.agent.call import Reply
from halteres.agent.stop_training import WITHIN_S
from halteres.agent.table import TOOLS
from halteres.agent.tool import OPEN_CALLS
from halteres.agent.transports import http_routes
from halteres.agent.transports.access import is_token, token
from halteres.agent.trial import testing
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.request import Request
from halteres.config import program
from halteres.config.discovery import EnvironmentBroken
from halteres.errors import InvalidConfig, NotReady
from halteres.runs.planning import models

from . import control

LEGACY = [
    ("GET", "/environments"),
    ("POST", "/environments/arithmetic/select"),
    ("GET", "/config"),
    ("POST", "/config"),
    ("POST", "/runs"),
    ("GET", "/runs"),
    ("GET", "/runs/aaaa1111"),
    ("POST", "/runs/aaaa1111/stop"),
    ("GET", "/runs/aaaa1111/metrics"),
    ("POST", "/test/inference"),
    ("GET", "/health"),
]
GUARDED = [
    ("GET", "/api/tools"),
    ("POST", "/api/tools/rl_list_runs"),
    ("GET", "/openapi.json"),
    ("POST", "/mcp"),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


class Waiting:
    """Stands in for `call`: a call of `rl_check_status` waits until it is let go or cancelled."""

    def __init__(self) -> None:
        self.inside, self.go, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(
        self, name: str, arguments: Mapping[str, Any] | None, caller: object
    ) -> Reply:
        if name != "rl_check_status":
            return Reply(body={"next": "rl_list_runs()"})
        self.inside.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Reply(body={"run_id": "aaaa1111", "next": "rl_list_runs()"})


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    found = Waiting()
    monkeypatch.setattr(http_routes, "call", found)
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any], str]]]:
    """The calls that reach the table: tool, arguments, draft."""
    calls_seen: list[tuple[str, dict[str, Any], str]] = []

    async def call(name: str, arguments: Mapping[str, Any] | None, caller: Any) -> Reply:
        calls_seen.append((name, dict(arguments or {}), caller.draft))
        return Reply(body={"environments": [], "next": "rl_list_runs()"})

    monkeypatch.setattr(http_routes, "call", call)
    yield calls_seen


async def test_the_table_is_told_whole() -> None:
    async with control.client() as http:
        told = (await http.get("/api/tools")).json()["tools"]
    assert [tool["name"] for tool in told] == [tool.name for tool in TOOLS]
    stop = next(tool for tool in told if tool["name"] == "rl_stop_training")
    assert stop["hints"] == {
        "read_only": False,
        "idempotent": True,
        "destructive": True,
        "open_world": False,
    }
    assert stop["input_schema"]["properties"]["mode"]["enum"] == ["now", "after_step"]
    assert "next" in stop["output_schema"]["required"]


async def test_the_openapi_document_has_every_tool_and_no_loose_reference() -> None:
    async with control.client() as http:
        document = (await http.get("/openapi.json")).json()
    assert list(document["paths"]) == [f"/api/tools/{tool.name}" for tool in TOOLS]
    text = json.dumps(document)
    assert '"$defs"' not in text
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("route", "called"),
    [
        ("GET /environments", ("rl_list_environments", {})),
        ("POST /environments/my-env.v2/select", ("rl_select_environment", {"name": "my-env.v2"})),
        ("GET /config", ("rl_get_current_config", {"detail": "full"})),
        ("POST /config", ("rl_edit_config", {})),
        ("POST /runs", ("rl_start_training", {})),
        ("GET /runs", ("rl_list_runs", {})),
        ("GET /runs/aaaa1111", ("rl_check_status", {"run_id": "aaaa1111"})),
        ("POST /runs/aaaa1111/stop", ("rl_stop_training", {"run_id": "aaaa1111"})),
        ("GET /runs/aaaa1111/metrics", ("rl_get_results", {"run_id": "aaaa1111"})),
        ("GET /runs/", ("rl_check_status", {"run_id": ""})),
        ("POST /test/inference", ("rl_test_inference", {"wait_s": 20})),
        ("GET /health", ("rl_health_check", {})),
    ],
)
async def test_each_route_of_the_seed_is_a_tool(
    seen: list[tuple[str, dict[str, Any], str]], route: str, called: tuple[str, dict[str, Any]]
) -> None:
    method, path = route.split()
    async with control.client(authorization="", content_type="application/octet-stream") as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert seen == [(*called, "default")]


RUNS_SOMETHING: list[tuple[str, dict[str, Any]]] = [
    ("/environments//opt/envs/a.py/select", {}),
    ("/environments/a.py/select", {}),
    ("/environments/arithmetic/select", {"changes": {"interpreter": "/tmp/python"}}),
    ("/config", {"field": "run.interpreter", "value": "/tmp/python"}),
    ("/config", {"changes": {"group_size": 8, "run.interpreter": "/tmp/python"}}),
    ("/runs", {"environment": "/opt/envs/a.py"}),
    ("/runs", {"changes": {"run.interpreter": "/tmp/python"}}),
]

REACHES_A_FOLDER: list[tuple[str, dict[str, Any]]] = [
    ("/config", {"field": "spool_dir", "value": "groups"}),
    ("/config", {"field": "inference.model", "value": "/home/another/model"}),
    ("/config", {"field": "model_name", "value": "~/model"}),
    ("/config", {"changes": {"group_size": 8, "dataset": "../../private.jsonl"}}),
    ("/environments/arithmetic/select", {"changes": {"spool_dir": "/tmp/groups"}}),
    ("/runs", {"changes": {"model": "Qwen/../../model"}}),
    ("/test/inference", {"models": ["local:/home/another/model"]}),
    ("/test/inference", {"models": ["private/m"]}),
    ("/test/inference", {"models": ["local:private/m"]}),
    ("/config", {"field": "inference.model", "value": "private/m"}),
    ("/config", {"field": "env.files", "value": ["tasks.jsonl", "/etc/passwd"]}),
    ("/config", {"field": "env.files", "value": {"train": ["file:///etc/passwd"]}}),
    ("/config", {"field": "env.dataset", "value": ".env"}),
    ("/runs", {"changes": {"run.sinks": ["wandb"]}}),
]


@pytest.fixture
def below_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The tests that would be started; none is."""
    requests: list[Request] = []

    def start(request: Request) -> TestFolder:
        requests.append(request)
        raise NotReady("It is begun.")

    monkeypatch.setattr(testing, "start", start)
    return requests


@pytest.mark.parametrize(("path", "body"), [*RUNS_SOMETHING, *REACHES_A_FOLDER])
async def test_without_the_token_nobody_chooses_what_runs_or_which_folder_is_reached(
    begun: list[Request], below_a_folder: Path, path: str, body: dict[str, Any]
) -> None:
    """Every user of the machine reaches the open routes, and what these name is run, read or
    written as the server's user; also a model below its working directory.
    """
    (below_a_folder / "private/m").mkdir(parents=True)
    (below_a_folder / "private/m/config.json").write_text("{}")
    body = {**body, "dry_run": True} if path == "/runs" else body
    async with control.client(authorization="") as http:
        await http.post("/environments/arithmetic/select")
        for given in ({}, {"Authorization": "Bearer guessed"}):
            answer = await http.post(path, json=body, headers=given)
            assert (answer.status_code, answer.json()["code"]) == (200, "unauthorized")
            assert "TOKEN" in answer.json()["next"]
        assert not begun
        known = await http.post(path, json=body, auth=("halteres", token()))
        assert known.json().get("code") != "unauthorized"


SPENDS_A_KEY: list[tuple[dict[str, Any], str]] = [
    ({"backend": "openrouter"}, "OPENROUTER_API_KEY"),
    ({"models": ["qwen/qwen3-8b"]}, "OPENROUTER_API_KEY"),
    ({"models": ["local:halteres/tiny", "qwen/qwen3-8b"]}, "OPENROUTER_API_KEY"),
    ({"models": ["halteres/tiny"], "backend": "openrouter"}, "OPENROUTER_API_KEY"),
    ({"models": ["local:Qwen/Big"]}, "TINKER_API_KEY"),
    ({}, "TINKER_API_KEY"),  # the draft's model, which only the service has
]


@pytest.mark.parametrize(("body", "key"), SPENDS_A_KEY)
async def test_without_the_token_nobody_spends_the_operators_key(
    monkeypatch: pytest.MonkeyPatch, begun: list[Request], body: dict[str, Any], key: str
) -> None:
    """Whatever the call names, it is what the test would be given that counts."""
    for name, value in (
        ("OPENROUTER_API_KEY", "sk-or"),
        ("TINKER_API_KEY", "tml-x"),
        ("TINKER_BASE_URL", "http://x"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(models, "_ask", lambda path, url: {"model": {"name": "Qwen/Big"}})
    async with control.client(authorization="") as http:
        select = ("/environments/arithmetic/select", {"changes": {"inference.model": "Qwen/Big"}})
        await http.post(select[0], json=select[1])
        answer = (await http.post("/test/inference", json=body)).json()
        assert (answer["code"], key in answer["error"]) == ("unauthorized", True), answer
        assert not begun
        known = ("halteres", token())
        await http.post(select[0], json=select[1], auth=known)
        await http.post("/test/inference", json=body, auth=known)
        assert len(begun) == 1


async def test_without_the_token_models_of_this_machine_and_weights_of_its_runs_are_tested(
    begun: list[Request],
) -> None:
    named = ["halteres/tiny", "local:nowhere", "tinker://3fa9c1d2/sampler_weights/000010"]
    async with control.client(authorization="") as http:
        await http.post("/environments/arithmetic/select")
        for name in named:
            await http.post("/test/inference", json={"models": [name]})
        refused = (
            await http.post("/test/inference", json={"models": ["/home/me/runs/3fa9c1d2/adapter"]})
        ).json()
    assert [request.models[0].base for request in begun] == [
        name.removeprefix("local:") for name in named
    ]
    assert "not a folder" in refused["error"] and "KEY" not in refused["error"]


async def test_selections_of_a_slow_environment_without_the_token_hold_up_nobody_else(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a thread until the environment has described itself, also after its client has
    given up.
    """
    folder = home / "environments"
    folder.mkdir()
    (folder / "slow.py").write_text("class Slow(BaseEnv): ...\n")
    ask = program._ask  # pyright: ignore[reportPrivateUsage] - what takes its time
    loop, asked, go = asyncio.get_running_loop(), asyncio.Semaphore(0), threading.Event()

    def slowly(
        environment: program.EnvironmentProgram, values: Mapping[str, Any]
    ) -> program.Description:
        if environment.name == "slow":
            loop.call_soon_threadsafe(asked.release)
            assert go.wait(60)
            raise EnvironmentBroken("It is broken.")
        return ask(environment, values)

    monkeypatch.setattr(program, "_ask", slowly)
    # the bound is no matter of how many threads there are
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with control.client(authorization="") as http, asyncio.timeout(60):
        try:
            given_up = [
                asyncio.create_task(http.post("/environments/slow/select"))
                for _ in range(OPEN_CALLS)
            ]
            for _ in range(OPEN_CALLS):
                await asked.acquire()
            for one in given_up:
                one.cancel()
            for answer in await asyncio.gather(
                *(http.post("/environments/slow/select") for _ in range(12))
            ):
                assert (answer.json()["code"], "token" in answer.json()["next"]) == ("busy", True)
            assert (await http.get("/runs")).json()["count"] == 0
            selected = await http.post("/environments/arithmetic/select", headers=control.bearer())
            assert selected.json()["environment"] == "arithmetic"
        finally:
            go.set()


async def test_without_the_token_a_name_a_setting_and_a_run_are_anybodys(
    seen: list[tuple[str, dict[str, Any], str]], home: Path
) -> None:
    (home / "token").write_text("broken\n")  # these routes do without it
    async with httpx.AsyncClient(transport=control.wireless(), base_url="http://localhost") as http:
        await http.post("/environments/my-env.v2/select", json={"changes": {"group_size": 8}})
        await http.post("/config", json={"field": "inference.model", "value": "Qwen/Qwen3-0.6B"})
        await http.post("/config", json={"field": "system_prompt", "value": "/no_think"})
        await http.post("/config", json={"field": "env.answer_pattern", "value": ".*"})
        await http.post("/runs", json={"name": "first/try", "environment": "arithmetic"})
        # no tool takes it, and the tool says so
        await http.post("/config", json={"field": 7, "changes": []})
    assert len(seen) == 6


async def test_arguments_come_from_the_body_and_the_draft_from_a_header(
    seen: list[tuple[str, dict[str, Any], str]],
) -> None:
    async with control.client(**{"X-Halteres-Session": "mine"}) as http:
        await http.post("/config", json={"field": "group_size", "value": None})
        await http.post(
            "/test/inference", json={"prompts": ["1 + 1?"], "max_tokens": 8, "temperature": 1.0}
        )
        await http.post("/api/tools/rl_list_runs", json={"limit": 3})
        await http.post("/api/tools/rl_list_runs")
    assert seen == [
        ("rl_edit_config", {"field": "group_size", "value": None}, "mine"),
        (
            "rl_test_inference",
            {"prompts": ["1 + 1?"], "max_tokens": 8, "temperature": 1.0, "wait_s": 20},
            "mine",
        ),
        ("rl_list_runs", {"limit": 3}, "mine"),
        ("rl_list_runs", {}, "mine"),
    ]


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Basic !", "Basic aGFsdGVyZXM=", "Token x"]
)
async def test_without_the_token_nothing_but_the_seeds_routes_answers(
    method: str, path: str, given: str
) -> None:
    async with control.client(authorization=given) as http:
        answer = await http.request(method, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert answer.json()["code"] == "unauthorized"
    assert token() not in answer.text


async def test_the_seeds_routes_want_the_token_where_they_are_told_to(
    seen: list[tuple[str, dict[str, Any], str]],
) -> None:
    async with control.client("token", authorization="") as http:
        for method, path in LEGACY:
            assert (await http.request(method, path)).status_code == 401
        assert not seen
        for method, path in LEGACY:
            assert (await http.request(method, path, auth=("halteres", token()))).status_code == 200
        assert len(seen) == len(LEGACY)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8080"},
        {"Host": "127.0.0.1:8080, evil.example"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    ],
)
async def test_a_foreign_page_is_refused_whatever_it_asks_for(
    seen: list[tuple[str, dict[str, Any], str]], headers: dict[str, str]
) -> None:
    async with control.client() as http:
        for method, path in (*LEGACY, *GUARDED):
            answer = await http.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) == (403, "application/json")
    assert not seen


@pytest.mark.parametrize("peer", ["10.0.0.7", "fe80::1", "testclient"])
async def test_another_machine_is_refused_whatever_host_it_names(peer: str) -> None:
    async with control.client(peer=peer, host="localhost:8080") as http:
        answer = await http.get("/health")
    assert answer.status_code == 403
    assert answer.json()["code"] == "forbidden"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"limit": 3', 400),
        (b"[]", 400),
        (b'"rl_list_runs"', 400),
        (b'{"limit": NaN}', 400),
        (b'{"limit": "three"}', 400),
        (b'{"limit": true}', 400),
        (b'{"limit": 0}', 400),
        (b'{"limit": ' + b"9" * 5000 + b"}", 400),
        (b'{"limit": 99999999999999999999999}', 400),
        (b'{"limits": 3}', 400),
        (b'{"status": "\xff"}', 400),
        (b'{"status": "\\ud800"}', 400),
        (b'{"status": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"status": "' + b"x" * 2**20 + b'"}', 413),
    ],
)
async def test_a_body_that_cannot_be_used_is_told_in_the_tools_own_form(
    body: bytes, status: int
) -> None:
    async with control.client() as http:
        answer = await http.post("/api/tools/rl_list_runs", content=body)
        old = await http.post("/environments/arithmetic/select", content=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert answer.json()["code"] == "invalid_arguments"
    assert {"error", "next"} <= answer.json().keys()
    assert (old.status_code, old.json()["code"]) == (200, "invalid_arguments")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("DELETE", "/runs", 405),
        ("GET", "/api/tools/rl_list_runs", 405),
        ("POST", "/api/tools/", 404),
    ],
)
async def test_what_is_not_there_is_json_too(method: str, path: str, status: int) -> None:
    async with control.client() as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert {"error", "code", "next"} <= answer.json().keys()


async def test_a_planted_secret_is_in_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-or-v1-planted0123456789"
    monkeypatch.setenv("OPENROUTER_API_KEY", secret)
    async with control.client() as http:
        for method, path in (
            ("POST", f"/environments/{secret}/select"),
            ("GET", f"/runs/{secret}"),
            ("GET", f"/{secret}"),
        ):
            answer = await http.request(method, path)
            assert "***" in answer.text
            assert secret not in answer.text


async def test_a_locked_field_is_told_with_the_value_that_holds(home: Path) -> None:
    (home / "policy.yaml").write_text("lock: {env.group_size: 8}\n")
    async with control.client() as http:
        assert "error" not in (await http.post("/environments/arithmetic/select")).json()
        refused = await http.post("/config", json={"field": "group_size", "value": 4})
        locked = (await http.get("/config")).json()["locked_fields"]
    assert (refused.status_code, refused.json()["code"], refused.json()["locked_value"]) == (
        200,
        "locked_field",
        8,
    )
    assert "locked and cannot be changed" in refused.json()["error"]
    assert ("group_size", 8) in [(field["name"], field["locked_value"]) for field in locked]


async def test_drafts_of_two_sessions_do_not_meet() -> None:
    async with control.client() as http:
        chosen = await http.post(
            "/environments/arithmetic/select", headers={http_routes.SESSION: "one"}
        )
        assert chosen.json()["draft"] == "one"
        assert (await http.get("/config", headers={http_routes.SESSION: "one"})).json()[
            "environment"
        ] == "arithmetic"
        for headers in ({http_routes.SESSION: "two"}, {}):
            assert (await http.get("/config", headers=headers)).json()["code"] == "no_environment"
        strange = await http.post(
            "/api/tools/rl_get_current_config", headers={http_routes.SESSION: "../one"}
        )
    assert (strange.status_code, strange.json()["code"]) == (400, "invalid_arguments")


async def test_a_waiting_call_keeps_nobody_waiting_and_is_answered(waiting: Waiting) -> None:
    async with (
        control.serving() as (_, url),
        httpx.AsyncClient(base_url=url, headers=control.bearer()) as http,
    ):
        async with asyncio.timeout(10):
            asked = asyncio.create_task(http.post("/api/tools/rl_check_status"))
            await waiting.inside.wait()
            assert (await http.get("/runs")).status_code == 200
            assert not asked.done()
            waiting.go.set()
            assert (await asked).json()["run_id"] == "aaaa1111"


async def test_a_client_that_goes_away_takes_its_call_along(waiting: Waiting) -> None:
    async with control.serving() as (_, url), asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /runs/aaaa1111 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await waiting.inside.wait()
        writer.close()
        await waiting.cancelled.wait()
        await writer.wait_closed()


async def test_a_server_that_ends_answers_those_who_wait(waiting: Waiting) -> None:
    async with (
        control.serving() as (server, url),
        httpx.AsyncClient(base_url=url, headers=control.bearer()) as http,
    ):
        async with asyncio.timeout(10):
            asked = asyncio.create_task(http.post("/api/tools/rl_check_status"))
            await waiting.inside.wait()
            server.end()
            answer = await asked
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert answer.json()["next"] == "rl_list_runs()"


async def test_the_seeds_client_is_answered_before_it_gives_up(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(http_routes.TEST_WAIT_S, WITHIN_S) < http_routes.LIMIT_S < 30
    monkeypatch.setattr(http_routes, "LIMIT_S", 0.01)
    async with control.client() as http, asyncio.timeout(10):
        answer = await http.get("/runs/aaaa1111")
    assert (answer.status_code, answer.json()["code"]) == (200, "not_ready")
    assert waiting.cancelled.is_set()


async def test_mcp_answers_beside_the_tools_to_who_has_the_token() -> None:
    asked = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "0"},
        },
    }
    headers = {"Accept": "application/json, text/event-stream"}
    async with (
        control.serving() as (_, url),
        httpx.AsyncClient(base_url=url, headers=headers, timeout=10) as http,
    ):
        assert (await http.post("/mcp", json=asked)).status_code == 401
        answer = await http.post("/mcp", json=asked, headers=control.bearer())
    assert answer.status_code == 200
    assert '"protocolVersion":"2025-11-25"' in answer.text.replace(" ", "")


def test_the_token_is_made_once_for_its_owner_alone(home: Path) -> None:
    made: list[str] = []
    together = threading.Barrier(8)

    def make() -> None:
        together.wait(5)
        made.append(token())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(made) == 8
    assert len(set(made)) == 1
    assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
    assert [file.name for file in home.iterdir()] == ["token"]
    assert is_token(made[0])
    assert not is_token("")
    assert not is_token(made[0][:-1])


def test_a_token_file_that_is_replaced_holds_at_once(home: Path) -> None:
    first = token()
    (home / "next").write_text("another-token-0123456789\n")
    (home / "next").replace(home / "token")
    assert is_token("another-token-0123456789")
    assert not is_token(first)


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40])
async def test_a_token_file_that_is_none_lets_nobody_in(home: Path, content: bytes) -> None:
    (home / "token").write_bytes(content)
    with pytest.raises(InvalidConfig, match="token file"):
        token()
    basic = base64.b64encode(b"halteres:" + content).decode()
    async with httpx.AsyncClient(transport=control.wireless(), base_url="http://localhost") as http:
        for given in ("Bearer ", f"Basic {basic}"):
            assert (
                await http.get("/api/tools", headers={"Authorization": given})
            ).status_code == 400


def uvicorn(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "uvicorn", "halteres.rl_api_server:app", "--port", str(port))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@pytest.mark.runs
@pytest.mark.parametrize("program", ["halteres", "uvicorn"])
def test_both_documented_commands_serve_and_end_in_order(home: Path, program: str) -> None:
    command, code = ((), 0) if program == "halteres" else (uvicorn(free_port()), -signal.SIGTERM)
    with control.process(home, *command, ends_with=code) as url:
        assert httpx.get(f"{url}/runs/nothing").json()["code"] == "run_not_found"
        missing = httpx.post(
            f"{url}/api/tools/rl_check_status", json={"run_id": "x"}, headers=control.bearer()
        )
        assert (missing.status_code, missing.json()["code"]) == (404, "run_not_found")


def test_importing_the_app_does_nothing() -> None:
    heavy = "{'torch', 'peft', 'tinker', 'halteres.agent.table'}"
    script = (
        "import logging, sys, halteres.rl_api_server\n"
        f"sys.exit(bool({heavy} & set(sys.modules) or logging.getLogger().handlers))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0


@pytest.mark.runs
def test_under_uvicorn_a_process_that_cannot_begin_ends(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_LOG", "loudly")
    ended = subprocess.run(uvicorn(free_port()), capture_output=True, text=True, timeout=30)
    assert ended.returncode != 0
    assert "HALTERES_LOG" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.runs
def test_under_uvicorn_the_process_is_one_of_ours(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No torch, and no secret in the log: uvicorn's own handlers would tell every address that is
    asked for.
    """
    secret = "sk-or-v1-planted0123456789"
    monkeypatch.setenv("OPENROUTER_API_KEY", secret)
    port = free_port()
    script = (
        "import atexit, sys, uvicorn\n"
        "atexit.register(lambda: print('torch is', sys.modules.get('torch', 'free'), "
        "file=sys.stderr))\n"
        f"sys.argv = ['uvicorn', *{uvicorn(port)[3:]}]\n"
        "uvicorn.main()"
    )
    command = [sys.executable, "-c", script]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = [next(line for line in server.stderr if control.ANSWERS_ON.search(line))]
        assert httpx.get(f"http://127.0.0.1:{port}/runs/{secret}").json()["code"] == "run_not_found"
        server.send_signal(signal.SIGINT)
        said += server.communicate(timeout=20)[0:2][1].splitlines()
    finally:
        server.kill()
        server.wait()
    text = "\n".join(said)
    assert "GET /runs/***" in text
    assert secret not in text
    assert "torch is None" in text


@pytest.mark.runs
def test_a_port_that_is_taken_is_one_sentence(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        command = [*control.SERVE[:-1], str(busy.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: Port ")
    assert len(ended.stderr.splitlines()) == 1
