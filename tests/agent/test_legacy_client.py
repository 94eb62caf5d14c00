"""The seed's client, unmodified, drives the control server from the list of environments to the
results of a run.

The same course is gone by raw HTTP, as that client speaks it, so that the promise is held where the
seeds are not beside this checkout. Protocol: seed 001 (routes), spec agent-tools 1.2 (keys) and
1.10 (replies).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halteres.process import alive
from halteres.runs.directory import list_runs

from . import control

pytestmark = pytest.mark.runs

CLIENT = Path(__file__).parents[3] / "shared" / "seeds" / "restored" / "rl_training_tool_http.py"

QUICK = {
    "inference.engine": "scripted",
    "group_size": 4,
    "batch_size": 16,
    "eval_tasks": 4,
    "eval_samples": 2,
}
"""Real processes around an engine that computes nothing."""

OF_A_RUN = {"run_id", "status", "environment", "wandb_project", "wandb_run_name"}
KEYS = {
    "environment": {"name", "class_name", "file_path", "description"},
    "list": {"environments", "count", "tips"},
    "select": {"message", "environment", "file_path"},
    "config": {"environment", "configurable_fields", "locked_fields", "tip"},
    "field": {"name", "type", "default", "description", "current_value"},
    "edit": {"message", "field", "value", "config"},
    "start": OF_A_RUN | {"config", "config_path", "logs", "message"},
    "status": OF_A_RUN | {"running_time_minutes", "processes", "logs"},
    "stop": {"message", "run_id", "status"},
    "results": OF_A_RUN | {"final_metrics", "history"},
    "runs": {"runs", "count"},
    "run": {"run_id", "environment", "status", "wandb_run_name"},
    "test": {"environment", "environment_file", "test_config", "models_tested", "summary"},
}


class RawClient:
    """What the seed's client sends, without it."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def rl_list_environments(self) -> str:
        found = await self._ask("GET", "/environments")
        return json.dumps({"environments": found, "count": len(found), "tips": []})

    async def rl_select_environment(self, name: str) -> str:
        return json.dumps(await self._ask("POST", f"/environments/{name}/select"))

    async def rl_get_current_config(self) -> str:
        return json.dumps(await self._ask("GET", "/config"))

    async def rl_edit_config(self, field: str, value: Any) -> str:
        return json.dumps(await self._ask("POST", "/config", {"field": field, "value": value}))

    async def rl_start_training(self) -> str:
        return json.dumps(await self._ask("POST", "/runs", {}))

    async def rl_check_status(self, run_id: str) -> str:
        return json.dumps(await self._ask("GET", f"/runs/{run_id}"))

    async def rl_stop_training(self, run_id: str) -> str:
        return json.dumps(await self._ask("POST", f"/runs/{run_id}/stop"))

    async def rl_get_results(self, run_id: str) -> str:
        return json.dumps(await self._ask("GET", f"/runs/{run_id}/metrics"))

    async def rl_test_inference(
        self, prompts: list[str], max_tokens: int = 256, temperature: float = 1.0
    ) -> str:
        sent = {"prompts": prompts, "max_tokens": max_tokens, "temperature": temperature}
        return json.dumps(await self._ask("POST", "/test/inference", sent))

    async def rl_list_runs(self) -> str:
        return json.dumps(await self._ask("GET", "/runs"))

    async def rl_health_check(self) -> str:
        return json.dumps(await self._ask("GET", "/health"))

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(30)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self._url + path, json=body, timeout=timeout) as answer,
        ):
            assert (answer.status, answer.content_type) == (200, "application/json")
            return await answer.json()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A control server of its own home; whatever run is left is ended."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALTERES_HOME", str(home))
        for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "WANDB_API_KEY", "OPENROUTER_API_KEY"):
            patch.delenv(name, raising=False)
        with control.process(home) as where:
            yield where
        _end_runs()


@pytest.fixture(params=["seed", "raw"])
def client(request: pytest.FixtureRequest, url: str) -> Any:
    """Something with the functions of seed 001."""
    if request.param == "raw":
        return RawClient(url)
    if not CLIENT.is_file():
        pytest.skip(
            f"the seeds are not beside this checkout ({CLIENT}); the raw course covers the routes"
        )
    return _client(url)


def _client(url: str) -> Any:
    """The seed's client where it is there."""
    if not CLIENT.is_file():
        return RawClient(url)
    spec = importlib.util.spec_from_file_location("rl_training_tool_http", CLIENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RL_API_URL = url
    return module


def _end_runs() -> None:
    for run in list_runs():
        state = run.state()
        for who in (state.supervisor, *state.processes.values()):
            if who and alive(who):
                os.kill(who["pid"], signal.SIGKILL)


async def answered(call: Any, *keys: str) -> dict[str, Any]:
    """The answer, which has at least the seed's keys of these names."""
    answer = json.loads(await call)
    for name in keys:
        assert KEYS[name] <= answer.keys(), answer
    return answer


async def test_the_course_from_environments_to_results(client: Any, url: str) -> None:
    listed = await answered(client.rl_list_environments(), "list")
    arithmetic = next(found for found in listed["environments"] if found["name"] == "arithmetic")
    assert KEYS["environment"] <= arithmetic.keys()
    assert Path(arithmetic["file_path"]).is_file()

    selected = await answered(client.rl_select_environment("arithmetic"), "select")
    # behind it the other client's edits are told, which go
    assert selected["message"].startswith("Selected environment: arithmetic")
    config = await answered(client.rl_get_current_config(), "config")
    fields = {field["name"]: field for field in config["configurable_fields"]}
    assert all(KEYS["field"] <= field.keys() for field in fields.values())
    for field, value in QUICK.items():
        edited = await answered(client.rl_edit_config(field, value), "edit")
        assert (edited["message"], edited["value"]) == (f"Updated {field} = {value}", value)
    await answered(client.rl_edit_config("total_steps", 100_000), "edit")

    tested = await answered(client.rl_test_inference(["What is 1 + 1?"], max_tokens=8), "test")
    assert [response["prompt"] for response in tested["responses"]] == ["What is 1 + 1?"]

    started = await answered(client.rl_start_training(), "start")
    run_id = started["run_id"]
    assert started["status"] == "starting"
    assert started["logs"].keys() >= {"api", "trainer", "env"}
    assert Path(started["config_path"]).is_file()
    await _running(url, run_id)

    looked = await answered(client.rl_check_status(run_id), "status")
    assert (looked["run_id"], looked["status"]) == (run_id, "running")
    assert looked["processes"].keys() >= {"api", "trainer", "env"}
    assert looked["processes"]["trainer"] == "running"

    began = time.monotonic()
    stopped = await answered(client.rl_stop_training(run_id), "stop")
    assert time.monotonic() - began < 25
    assert (stopped["run_id"], stopped["status"]) == (run_id, "stopped")

    results = await answered(client.rl_get_results(run_id), "results")
    assert (results["run_id"], results["status"]) == (run_id, "stopped")
    runs = await answered(client.rl_list_runs(), "runs")
    mine = next(run for run in runs["runs"] if run["run_id"] == run_id)
    assert KEYS["run"] <= mine.keys()
    assert mine["status"] == "stopped"


async def _running(url: str, run_id: str) -> None:
    """Look as another client may: the seed's looks at a run only once in 30 minutes."""
    ends = time.monotonic() + 30
    while True:
        answer = json.loads(await RawClient(url).rl_check_status(run_id))
        assert answer["status"] in ("pending", "starting", "running"), answer
        if answer["status"] == "running" and answer["step"] >= 1:
            return
        assert time.monotonic() < ends, answer


async def test_errors_have_the_seeds_keys_and_words(client: Any) -> None:
    unknown = await answered(client.rl_select_environment("arithmetik"))
    assert (unknown["code"], "arithmetic" in unknown["available"]) == (
        "environment_not_found",
        True,
    )
    assert "'arithmetik' not found" in unknown["error"]
    await answered(client.rl_select_environment("arithmetic"), "select")
    field = await answered(client.rl_edit_config("group_sise", 4))
    assert (field["code"], "group_size" in str(field["available_fields"])) == (
        "unknown_field",
        True,
    )
    wrong = await answered(client.rl_edit_config("group_size", "banana"))
    assert wrong["code"] == "invalid_config"
    for call in (client.rl_check_status, client.rl_stop_training, client.rl_get_results):
        missing = await answered(call("nothing"))
        assert (missing["code"], missing["active_runs"]) == ("run_not_found", [])
        assert missing["error"].startswith("Run 'nothing' not found")
    assert (await answered(client.rl_check_status("")))["code"] in (
        "run_not_found",
        "run_ambiguous",
    )


async def test_health_is_told(client: Any) -> None:
    health = await answered(client.rl_health_check())
    assert health["status"] in ("ok", "degraded")
    assert "error" not in health


async def test_nothing_is_selected_in_a_new_home_and_the_url_may_hold_the_token(
    tmp_path: Path,
) -> None:
    with control.process(tmp_path, *control.SERVE, "--auth", "token") as url:
        _, _, port = url.rpartition(":")
        token = (tmp_path / "token").read_text().strip()
        client = _client(f"http://halteres:{token}@localhost:{port}")
        said = "No environment selected. Use rl_select_environment(name) first."
        for call in (
            client.rl_get_current_config(),
            client.rl_edit_config("group_size", 4),
            client.rl_start_training(),
            client.rl_test_inference(["1 + 1?"]),
        ):
            answer = await answered(call)
            assert (answer["error"], answer["code"]) == (said, "no_environment")
        assert (await answered(client.rl_list_runs(), "runs"))["count"] == 0
        async with aiohttp.ClientSession() as session, session.get(f"{url}/runs") as refused:
            assert refused.status == 401
