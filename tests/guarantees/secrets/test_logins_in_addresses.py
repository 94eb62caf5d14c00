"""A login within an address is in one file, which its owner alone may read, and in no answer, log
or other file.

It is planted in every setting that takes a text, by the settings' own models: one that is added
later is here, too.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
import yaml
from agent.test_open_access import LEAVES, Leaf
from pydantic import BaseModel
from runs.run_fixtures import wait_for_end
from starlette.datastructures import Headers
from starlette.routing import Route
from typer.testing import CliRunner

from halteres.agent.table import TOOLS
from halteres.agent.transports.access import cookie_name, page_key, token
from halteres.agent.transports.http_server import create_app
from halteres.cli.main import app
from halteres.config.operator_policy import Policy
from halteres.config.program import find_program
from halteres.config.resolution import resolve_settings
from halteres.config.settings import (
    ENV_WIRING,
    InferenceSettings,
    RunSettings,
    Settings,
    TrainerSettings,
)
from halteres.environments.config import BaseEnvConfig
from halteres.errors import InvalidConfig, as_answer, as_http
from halteres.models import TINY
from halteres.observe.sinks import Job
from halteres.redaction import Redactor
from halteres.rewards.components import JudgeSpec, RewardSpec
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.models import RunModel, with_absolute_folders
from halteres.runs.planning.plan import RunPlan, plan_run
from halteres.runs.start import start_run
from halteres.runs.state import read_state, write_state
from halteres.runs.supervision.supervisor import conclude

KEY = "planted~KEY-0123456789"
ADDRESS = f"http://any:{KEY}@127.0.0.1:9"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def texts_of(model: type[BaseModel], *but: str) -> list[str]:
    """Fields that take a text."""

    def takes_text(annotation: Any) -> bool:
        return annotation is str or any(map(takes_text, get_args(annotation)))

    return [
        name
        for name, field in model.model_fields.items()
        if takes_text(field.annotation) and name not in but
    ]


def planted() -> Settings:
    """Settings with the login wherever a text can stand."""
    judge = dict.fromkeys(texts_of(JudgeSpec), ADDRESS)
    component = {**dict.fromkeys(texts_of(RewardSpec), ADDRESS), "judge": judge}
    env = dict.fromkeys(texts_of(BaseEnvConfig, *ENV_WIRING), ADDRESS)
    env |= {
        "rewards": [component],
        "panel": yaml.safe_dump([component]),
        "of_its_own": {"places": [ADDRESS]},
    }
    env |= {"judge_api_key": KEY, "group_size": 4, "batch_size": 16}
    run = dict.fromkeys(texts_of(RunSettings, "environment", "on_drift", "sinks", "tags"), ADDRESS)
    inference = dict.fromkeys(texts_of(InferenceSettings, "dtype", "device", "engine"), ADDRESS)
    return Settings(
        run=RunSettings.model_validate({**run, "environment": "arithmetic", "tags": (ADDRESS,)}),
        env=env,
        inference=InferenceSettings.model_validate(inference),
        trainer=TrainerSettings(),
    )


def made_run(home: Path, settings: Settings) -> RunDirectory:
    """A run's directory as its start makes it, and its end leaves it."""
    plan = RunPlan(
        settings=with_absolute_folders(settings),
        sources={},
        policy=Policy(lock={"env.x": ADDRESS}),
        service_url=None,
        is_open=False,
        environment=find_program("arithmetic"),
        model=RunModel(name=TINY, tokenizer=""),
        resume=None,
        checks=(),
    )
    run = start_run(plan, supervisor=(sys.executable, "-S", "-c", "pass"))
    state = read_state(run.path / "run.json")
    words = f"{ADDRESS} gave no scores."
    ended = msgspec.structs.replace(
        state, status="failed", code="scorer_failed", error=words, ended_at=2.0
    )
    write_state(run.path / "run.json", ended)
    assert conclude(run, read_state(run.path / "run.json")) == []
    return run


def holding(folder: Path, secret: str = KEY) -> dict[str, int]:
    """Files that hold it, and who may read them."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return {
        file.name: file.stat().st_mode & 0o777
        for file in files
        if secret.encode() in file.read_bytes()
    }


def test_of_a_runs_files_config_yaml_alone_has_it_and_its_owner_alone_reads_that(
    home: Path,
) -> None:
    settings = planted()
    run = made_run(home, settings)
    assert {
        "settings.json",
        "config.resolved.json",
        "STATUS.md",
        "results.json",
        "policy.json",
    } <= {file.name for file in run.path.iterdir()}
    assert holding(home) == {"config.yaml": 0o600}


def test_a_run_that_goes_on_has_it_again(home: Path) -> None:
    settings = planted()
    run = made_run(home, settings)
    assert run.settings().env == {**settings.env, "panel": settings.env["rewards"]}
    (run.path / "config.yaml").unlink()
    assert KEY not in run.settings().model_dump_json(), (
        "where it cannot be read it stays struck out"
    )


def test_a_sink_is_given_settings_without_it(home: Path) -> None:
    settings = planted()
    run = made_run(home, settings)
    jobs = Job(path=run.path, settings=settings), Job(path=run.path, settings=run.settings())
    assert [KEY in json.dumps(job.config) for job in jobs] == [False, False]


@asynccontextmanager
async def control_server() -> AsyncIterator[tuple[httpx.AsyncClient, list[Route]]]:
    """The control server's app, for the browser that was let in and holds the token as well."""
    app = create_app()
    here = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(
        transport=here, base_url="http://localhost:8080", timeout=100
    ) as client:
        client.headers["Authorization"] = f"Bearer {token()}"
        client.cookies.set(cookie_name(Headers({"host": "localhost:8080"})), page_key())
        yield client, [route for route in app.routes if isinstance(route, Route)]


UNENDING = ("/api/events", "/mcp")


async def test_no_route_and_no_tool_that_reads_shows_it(home: Path) -> None:
    run = made_run(home, planted())
    (run.path / "logs" / "env.log").write_text(f"{ADDRESS} refused the request.\n")
    async with control_server() as (client, routes):
        asked = 0
        for route in routes:
            if "GET" not in (route.methods or ()) or route.path in UNENDING:
                continue
            path = route.path.replace("{run_id:path}", run.run_id).replace("{run_id}", run.run_id)
            answer = await client.get(path)
            assert KEY not in answer.text, path
            asked += answer.status_code == 200
        assert asked >= 14
        for tool in TOOLS:
            if not tool.hints.read_only:
                continue
            given = {"run_id": run.run_id, "run_ids": [run.run_id], "role": "env", "detail": "full"}
            takes = tool.arguments.model_fields
            arguments = {name: value for name, value in given.items() if name in takes}
            answer = await client.post(f"/api/tools/{tool.name}", json=arguments)
            assert KEY not in answer.text, tool.name


async def test_no_answer_about_a_draft_shows_it_and_a_copied_one_is_refused(home: Path) -> None:
    component = {"name": "r", "model": ADDRESS}
    judge = {"name": "j", "judge": {"base_url": f"{ADDRESS}/v1"}}
    changes = {
        "reward_model_path": ADDRESS,
        "panel": [judge],
        "rewards": json.dumps([component]),
        "wandb_project": ADDRESS,
    }
    calls: list[tuple[str, dict[str, Any]]] = [
        ("rl_select_environment", {"name": "arithmetic"}),
        *(("rl_edit_config", {"field": name, "value": value}) for name, value in changes.items()),
        ("rl_edit_config", {"field": f"no_{ADDRESS}", "value": ADDRESS}),
        ("rl_edit_config", {"field": "group_size", "value": ADDRESS}),
        ("rl_edit_config", {"field": "interpreter", "value": ADDRESS}),
        ("rl_get_current_config", {"detail": "full"}),
        ("rl_start_training", {"dry_run": True}),
        ("rl_start_training", {"dry_run": True, "changes": {"model": ADDRESS, "dataset": ADDRESS}}),
        ("rl_get_results", {"run_id": ADDRESS}),
    ]
    async with control_server() as (client, _):
        for name, arguments in calls:
            answer = await client.post(f"/api/tools/{name}", json=arguments)
            assert KEY not in answer.text, (name, arguments)
        copied = {"field": "reward_model_path", "value": "http://any:***@127.0.0.1:9"}
        refused = (await client.post("/api/tools/rl_edit_config", json=copied)).json()
    assert refused["code"] == "invalid_config"
    assert refused["problems"][0]["field"] == "reward_model_path"
    assert set(holding(home).values()) == {0o600}, "its draft has it, for its owner alone"
    assert {file.parent.name for file in home.rglob("*.json") if KEY in file.read_text()} == {
        "drafts"
    }


MISTYPED = (f"http://any:{KEY} 1@h", f'http://any:{KEY}"@h', f"//any:{KEY}@h", f"any:{KEY}@h:9")
PLACES = {"env.reward_model_path": (), "env.rewards": (0, "model"), "env.panel": (0, "model")}
ADDRESSED = {
    (leaf.key, leaf.inside): leaf
    for leaf in LEAVES
    if leaf.reach == "address" or PLACES.get(leaf.key) == leaf.inside
}
"""Every setting of ours, and of the environments that come with the package, that takes one."""


@pytest.mark.parametrize("leaf", ADDRESSED.values(), ids=str)
def test_a_mistyped_address_is_refused_by_every_setting_and_quoted_without_its_login(
    home: Path, leaf: Leaf
) -> None:
    for address in MISTYPED[1::2]:
        value: Any = address
        for step in reversed(leaf.inside):
            value = {"name": "a", step: value} if step != 0 else [value]
        for edits, changes in (([f"{leaf.key}={json.dumps(value)}"], {}), ([], {leaf.key: value})):
            with pytest.raises(InvalidConfig) as error:
                resolve_settings(leaf.environment, None, edits, changes=changes)
            shown = f"{error.value} {as_answer(error.value)} {as_http(error.value)}"
            assert KEY not in shown, shown
            assert error.value.details["problems"][0]["field"] == leaf.key


@pytest.mark.parametrize(
    "arguments",
    [[], ["models"], ["runs"], ["train", "arithmetic", "--set"], ["variables", "--url"]],
)
@pytest.mark.parametrize("address", [ADDRESS, *MISTYPED])
def test_a_command_that_is_refused_quotes_no_login(
    home: Path, arguments: list[str], address: str
) -> None:
    ended = CliRunner().invoke(app, [*arguments, address])
    if arguments[:1] == ["variables"] and address == ADDRESS:
        return
    assert ended.exit_code != 0
    assert KEY not in f"{ended.output} {ended.exception}"


def test_a_copied_address_is_refused_on_every_way_in(home: Path) -> None:
    with pytest.raises(InvalidConfig) as refused:
        resolve_settings("arithmetic", None, ["env.panel=[{name: p, model: 'http://any:***@h'}]"])
    assert [problem["field"] for problem in refused.value.details["problems"]] == ["env.panel"]


class Scores(BaseHTTPRequestHandler):
    """A reward server that scores, and a judge that refuses the key, and repeats it."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_POST(self) -> None:
        """/score, or a chat."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/score":
            items = [{"score": place % 3 / 2, "tokens": 3} for place, _ in enumerate(body["items"])]
            code, answer = 200, {"items": items, "output": "standardised"}
        else:
            code, answer = 401, {"error": f"Nobody has the key {KEY}, nor {ADDRESS}."}
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def scorer() -> Iterator[str]:
    """The address, with the login, of a server of scores."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Scores) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://any:{KEY}@127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.runs
def test_of_all_that_a_run_writes_config_yaml_alone_has_it(home: Path) -> None:
    with scorer() as address:
        rewards = [{"name": "served", "model": address}, {"name": "own", "environment": True}]
        panel = [{"name": "judged", "judge": {"base_url": f"{address}/v1", "request_timeout_s": 5}}]
        edits = (
            *(
                "inference.engine=scripted",
                "env.group_size=4",
                "env.batch_size=16",
                "env.eval_tasks=4",
            ),
            *(
                "env.eval_samples=2",
                "trainer.total_steps=2",
                "trainer.eval_every=1",
                "run.sinks=[tensorboard]",
            ),
            *(f"env.rewards={json.dumps(rewards)}", f"env.panel={json.dumps(panel)}"),
        )
        run = start_run(plan_run(resolve_settings("arithmetic", None, edits)))
        state = wait_for_end(run, within_s=100)
    assert (state.status, state.step) == ("completed", 2), state.error
    assert any("reward/served" in row for row in run.metrics()), "the login was sent"
    assert "Nobody has the key ***" in run.log("eval").read_text()
    assert holding(home) == {"config.yaml": 0o600}
    assert Redactor.of_this_process().text(address) != address
