"""The tools over MCP: what is listed, how answers look, waiting, cancelling, resources, prompts;
both revisions.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import yaml
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, CallToolRequestParams, ImageContent, TextContent

from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Caller, Result
from halteres.agent.transports.mcp import content
from halteres.agent.transports.mcp.content import INSTRUCTIONS, PROMPTS
from halteres.agent.transports.mcp.server import Endpoint, build, report_progress
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState, write_state

from .run_fixtures import make_run, supervised
from .transports import BEFORE, MODES, TODAY, body, home_of, http_client, standing_in

PNG = b"\x89PNG\r\n\x1a\n and so on: nobody here looks inside"

RESULTS = {
    "run_id": "r",
    "status": "completed",
    "environment": "e",
    "wandb_project": "p",
    "wandb_run_name": "n",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


@pytest.fixture(params=[TODAY, BEFORE])
def revision(request: pytest.FixtureRequest) -> str:
    return request.param


def answered(name: str, **fields: Any) -> Result:
    return BY_NAME[name].result(**fields, next="x")


@asynccontextmanager
async def connected(revision: str) -> AsyncIterator[Client]:
    """A client of a server in this process."""
    server = build(lambda _: Caller(draft="mine"), 0.01)
    async with Client(server, mode=MODES[revision]) as client:
        assert client.protocol_version == revision
        yield client


async def test_every_tool_is_listed_with_its_schemas_and_all_four_hints(revision: str) -> None:
    async with connected(revision) as client:
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == [tool.name for tool in TOOLS]
        for told, tool in zip(listed, TOOLS, strict=True):
            assert (told.title, told.description) == (tool.title, tool.description)
            assert (told.input_schema, told.output_schema) == (
                tool.input_schema(),
                tool.output_schema(),
            )
            assert told.annotations is not None
            assert told.annotations.model_dump(by_alias=True, exclude_none=True) == {
                "readOnlyHint": tool.hints.read_only,
                "destructiveHint": tool.hints.destructive,
                "idempotentHint": tool.hints.idempotent,
                "openWorldHint": tool.hints.open_world,
            }


async def test_the_server_says_who_it_is_and_how_the_tools_go_together(revision: str) -> None:
    async with connected(revision) as client:
        assert client.server_info is not None
        assert client.server_info.name == "halteres"
        assert client.instructions == INSTRUCTIONS


@pytest.mark.parametrize("text", [INSTRUCTIONS, *(prompt.text for prompt in PROMPTS)])
def test_what_a_model_is_told_names_only_tools_and_arguments_that_there_are(text: str) -> None:
    assert set(re.findall(r"rl_\w+", text)) <= set(BY_NAME)
    for name, arguments in re.findall(r"(rl_\w+)\(([^()]*)\)", text):
        assert set(re.findall(r"(\w+)=", arguments)) <= set(BY_NAME[name].arguments.model_fields)


async def test_an_answer_is_the_same_as_text_and_as_structure(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is null stays, so do keys that the schema does not declare; what is not ASCII is not
    escaped.
    """
    async with connected(revision) as client:
        answer = answered(
            "rl_list_runs",
            runs=[],
            count=1,
            one={"run_id": "é", "reward": None},
            more=[None, float("nan")],
        )
        standing_in(monkeypatch, "rl_list_runs", lambda caller: answer)
        result = await client.call_tool("rl_list_runs", {})
        assert not result.is_error
        assert body(result) == {
            "runs": [],
            "count": 1,
            "one": {"run_id": "é", "reward": None},
            "more": [None, None],
            "next": "x",
        }


async def test_pictures_follow_the_text(
    revision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with connected(revision) as client:
        picture = tmp_path / "plot.png"
        picture.write_bytes(PNG)
        answer = answered("rl_get_results", **RESULTS)
        answer.showing(picture, tmp_path / "gone.png")
        standing_in(monkeypatch, "rl_get_results", lambda caller: answer)
        first, *others = (await client.call_tool("rl_get_results", {})).content
        assert isinstance(first, TextContent)
        assert others == [ImageContent(data=base64.b64encode(PNG).decode(), mime_type="image/png")]


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("rl_invented", {}, "invalid_arguments"),
        ("rl_list_runs", {"limits": 3}, "invalid_arguments"),
        ("rl_list_runs", {"limit": "three"}, "invalid_arguments"),
        ("rl_health_check", {}, "internal"),
    ],
)
async def test_whatever_goes_wrong_is_an_answer(
    revision: str, monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any], code: str
) -> None:
    """An error of the protocol never reaches the model; an answer with `is_error` does."""
    async with connected(revision) as client:

        def broken(caller: Caller) -> Any:
            raise ZeroDivisionError("a defect")

        standing_in(monkeypatch, "rl_health_check", broken)
        result = await client.call_tool(name, arguments)
        assert result.is_error
        answer = body(result)
        assert answer["code"] == code
        assert answer["error"] and answer["next"]


async def test_a_waiting_call_tells_its_progress_to_who_asked(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(revision) as client:
        heard: list[tuple[float, float | None, str | None]] = []
        twice = asyncio.Event()

        async def waits(caller: Caller, **arguments: Any) -> Result:
            await asyncio.wait_for(twice.wait(), 5)
            return answered("rl_check_status", run_id="r")

        async def progress(done: float, total: float | None, message: str | None) -> None:
            heard.append((done, total, message))
            if len(heard) == 2:
                twice.set()

        standing_in(monkeypatch, "rl_check_status", waits)
        result = await client.call_tool(
            "rl_check_status", {"wait_s": 45.0}, progress_callback=progress
        )
        assert not result.is_error
        (first, total, message), (second, *_) = heard[:2]
        assert 0 < first < second < 5
        assert total == 45
        assert message == "rl_check_status: 0 s"


async def test_cancelling_a_call_cancels_what_it_does(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(revision) as client:
        inside, cancelled = asyncio.Event(), asyncio.Event()

        async def waits(caller: Caller) -> Result:
            inside.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        standing_in(monkeypatch, "rl_check_status", waits)
        async with asyncio.timeout(5), anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "rl_check_status", {})
            await inside.wait()
            tasks.cancel_scope.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)


class Line:
    """A request's context whose progress goes to `told`."""

    def __init__(self, told: Callable[[], Awaitable[None]]) -> None:
        self.session = self
        self.told = told

    async def report_progress(self, *_: Any) -> None:
        await self.told()


def call_of(line: Line) -> AbstractAsyncContextManager[None]:
    return report_progress(
        cast(Any, line), CallToolRequestParams(name="rl_check_status", arguments={}), 0.001
    )


async def test_a_progress_that_cannot_be_told_spoils_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = asyncio.Event()

    async def gone() -> None:
        tried.set()
        raise ConnectionError("the client is gone")

    async with asyncio.timeout(5), call_of(Line(gone)):
        await tried.wait()
    assert "The progress of rl_check_status could not be sent." in caplog.text


async def test_a_call_that_is_cancelled_while_its_progress_ends_is_cancelled() -> None:
    telling, ending, never = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        telling.set()
        try:
            await never.wait()
        finally:
            ending.set()
            await never.wait()

    async def calling() -> None:
        async with call_of(Line(slow)):
            await telling.wait()

    async with asyncio.timeout(5):
        call = asyncio.create_task(calling())
        await ending.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_over_http_progress_is_heard_and_a_call_ends_with_its_client(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, inside, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def waits(caller: Caller) -> Result:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async def progress(*_: Any) -> None:
        heard.set()

    standing_in(monkeypatch, "rl_check_status", waits)
    async with (
        asyncio.timeout(10),
        http_client(revision=revision, endpoint=Endpoint(0.01)) as client,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "rl_check_status", {}, None, progress)
            await inside.wait()
            await heard.wait()
            tasks.cancel_scope.cancel()
        await cancelled.wait()


# Resources and prompts


@pytest.fixture
def run(home: Path) -> RunDirectory:
    """A run of two steps that has ended."""
    run = RunDirectory(home / "runs" / "aaaa1111")
    (run.path / "logs").mkdir(parents=True)
    (run.path / "config.yaml").write_text("env:\n  group_size: 8\n")
    for step in (1, 2):
        append_row(
            run.path / "metrics.jsonl", {"step": step, "src": "trainer", "reward/mean": 0.25 * step}
        )
    append_row(run.path / "metrics.jsonl", {"step": 2, "src": "eval", "eval/percent_correct": 0.5})
    write_state(
        run.path / "run.json",
        RunState(
            run_id="aaaa1111",
            name="sums",
            environment="arithmetic",
            environment_file="/nowhere.py",
            interpreter="python",
            base_model="halteres/tiny",
            tokenizer="/nowhere",
            total_steps=2,
            created_at=1.0,
            status="completed",
            step=2,
        ),
    )
    return run


async def test_runs_are_listed_as_resources(revision: str, run: RunDirectory) -> None:
    async with connected(revision) as client:
        listed = (await client.list_resources()).resources
        assert [resource.uri for resource in listed] == ["rl://runs", "rl://runs/aaaa1111/status"]
        templates = (await client.list_resource_templates()).resource_templates
        assert "rl://envs/{name}/source" in [template.uri_template for template in templates]


@pytest.mark.parametrize(
    ("uri", "kind", "text"),
    [
        ("rl://runs/aaaa1111/config", "application/yaml", "env:\n  group_size: 8\n"),
        (
            "rl://runs/aaaa/metrics.csv",
            "text/csv",
            "step,eval/percent_correct,reward/mean\n1,,0.25\n2,0.5,0.5\n",
        ),
    ],
)
async def test_a_run_can_be_read(
    revision: str, run: RunDirectory, uri: str, kind: str, text: str
) -> None:
    async with connected(revision) as client:
        (contents,) = (await client.read_resource(uri)).contents
        assert contents.model_dump(exclude_none=True) == {
            "uri": uri,
            "mime_type": kind,
            "text": text,
        }


async def test_what_a_resource_holds_is_what_the_tool_says(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(revision) as client:
        standing_in(
            monkeypatch, "rl_list_runs", lambda caller: answered("rl_list_runs", runs=[], count=0)
        )
        (contents,) = (await client.read_resource("rl://runs")).contents
        assert contents.model_dump()["text"] == '{"runs":[],"count":0,"next":"x"}'


async def test_reading_a_runs_state_uses_up_nobodys_look(revision: str, home: Path) -> None:
    """Where the policy limits how often an agent looks, a host may attach the state as often as it
    likes.
    """
    (home / "policy.yaml").write_text("min_status_interval_s: 1800\n")
    with supervised(make_run("bbbb2222", steps=3), status="running"):
        async with connected(revision) as client:
            for _ in range(2):
                (contents,) = (await client.read_resource("rl://runs/bbbb2222/status")).contents
                told = json.loads(contents.model_dump()["text"])
                assert (told["run_id"], told["status"], told["step"]) == ("bbbb2222", "running", 3)
            assert "rate_limited" not in body(
                await client.call_tool("rl_check_status", {"run_id": "bbbb2222"})
            )
            assert (
                body(await client.call_tool("rl_check_status", {"run_id": "bbbb2222"}))[
                    "rate_limited"
                ]
                is True
            )


async def test_a_plot_is_a_picture(
    revision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with connected(revision) as client:
        (tmp_path / "plot.png").write_bytes(PNG)
        answer = answered("rl_get_results", **RESULTS)
        answer.showing(tmp_path / "plot.png")
        standing_in(monkeypatch, "rl_get_results", lambda caller, run_id, plot: answer)
        (contents,) = (await client.read_resource("rl://runs/bbbb2222/plot.png")).contents
        assert base64.b64decode(contents.model_dump()["blob"]) == PNG


@pytest.mark.parametrize(
    "uri",
    [
        "rl://nothing",
        "rl://runs/nope/status",
        "rl://runs/nope/metrics.csv",
        "rl://runs/../../x/config",
    ],
)
async def test_a_resource_that_is_not_there_is_the_protocols_error(revision: str, uri: str) -> None:
    async with connected(revision) as client:
        with pytest.raises(MCPError) as raised:
            await client.read_resource(uri)
        assert raised.value.code == (-32602 if client.protocol_version == TODAY else -32002)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a defect")


@pytest.mark.parametrize("uri", ["rl://runs", "rl://runs/aaaa1111/metrics.csv"])
async def test_a_defect_is_told_as_one_with_an_id_that_the_log_has(
    revision: str,
    uri: str,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a tool that the resource asks, and in reading it ourselves."""
    async with connected(revision) as client:
        standing_in(monkeypatch, "rl_list_runs", broken)
        monkeypatch.setattr(content, "merge_by_step", broken)
        with pytest.raises(MCPError) as raised:
            await client.read_resource(uri)
    assert raised.value.code == INTERNAL_ERROR
    number = re.search(r"the log has it as ([0-9a-f]{8})", str(raised.value))
    assert number is not None and f"({number[1]})" in caplog.text
    assert "ZeroDivisionError: a defect" in caplog.text


async def test_a_file_that_a_run_does_not_have_is_not_there(
    revision: str, run: RunDirectory
) -> None:
    (run.path / "config.yaml").unlink()
    async with connected(revision) as client:
        with pytest.raises(MCPError, match=r"There is no file .*config\.yaml") as raised:
            await client.read_resource("rl://runs/aaaa1111/config")
        assert raised.value.code != INTERNAL_ERROR


async def test_a_key_among_a_runs_settings_is_not_told(revision: str, run: RunDirectory) -> None:
    key = "tml-6f1e8d0c9b2a"
    config = {
        "env": {"group_size": 8, "judge_api_key": key},
        "openai": [{"api_key": key, "server_type": "sglang"}],
    }
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    async with connected(revision) as client:
        (contents,) = (await client.read_resource("rl://runs/aaaa1111/config")).contents
    told = yaml.safe_load(contents.model_dump()["text"])
    assert told["env"] == {"group_size": 8, "judge_api_key": "***"}
    assert told["openai"] == [{"api_key": "***", "server_type": "sglang"}]


async def test_prompts_are_filled_in(revision: str) -> None:
    async with connected(revision) as client:
        listed = {prompt.name: prompt.arguments for prompt in (await client.list_prompts()).prompts}
        assert list(listed) == ["train", "debug_run", "write_environment"]
        train = await client.get_prompt("train", {"environment": "gsm8k", "goal": ""})
        text = train.messages[0].content
        assert isinstance(text, TextContent)
        assert "Environment: gsm8k. Goal: a held-out gain" in text.text
        for name in ("write_environment", "dance"):
            with pytest.raises(MCPError, match=r"needs: task|there are train, debug_run"):
                await client.get_prompt(name, {})
