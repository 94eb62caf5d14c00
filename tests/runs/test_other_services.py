"""A run asks a service elsewhere for nothing but the Tinker API: any such service will do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from deadlines import wait_until
from training.live_servers import opened

from halteres.config.file_training import resolve_file_training
from halteres.config.resolution import resolve_settings
from halteres.errors import InvalidConfig, NotFound
from halteres.models import TINY, builtin_path
from halteres.runs.conversation import NEWEST, Conversation, Piece, Sampling, policy_named
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.file_plan import plan_file_run, resolve_resumed
from halteres.runs.planning.models import ServiceUnusable
from halteres.runs.planning.plan import RunPlan, plan_run
from halteres.runs.servers import end_kept
from halteres.runs.start import start_run

from .run_fixtures import survivors, wait, wait_for_end
from .test_file_training import rows, series

# our service, with the routes that are our own taken away
TINKER_API_ALONE = """
import sys
from halteres.service import server

made = server.create_app

def create_app(*parts):
    app = made(*parts)

    async def others(scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith(("/runs", "/halteres")):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            await app(scope, receive, send)

    return others

server.create_app = create_app
sys.exit(server.main())
"""


def planned(data: Path, url: str, *edits: str) -> RunPlan:
    resolved = resolve_file_training("sft", str(data), ["batch_size=8", *edits])
    return plan_file_run(resolved, service_url=url)


@pytest.mark.runs
@pytest.mark.timeout(400)
def test_a_service_of_the_tinker_api_alone_trains_on_files(home: Path, tmp_path: Path) -> None:
    data = rows(tmp_path)
    program = ("-c", TINKER_API_ALONE)
    (tmp_path / "service").mkdir()
    with opened(tmp_path / "service", engine="torch", program=program) as world:
        url = world.service_url
        # it is still loading its model: the plan says so, and a run waits
        run = start_run(_once_there(data, url, "total_steps=4", "checkpoint_every=2"))
        state = wait_for_end(run, within_s=120)
        assert (state.status, state.error) == ("completed", None), run.log_tail("trainer")
        assert state.service_given and set(state.processes) == {"trainer"}
        course = series(run, "eval/loss_per_token")
        assert course[4] < course[0]
        resumed = start_run(
            plan_file_run(resolve_resumed(run, ["total_steps=6"]), resume=run, service_url=url)
        )
        state = wait_for_end(resumed, within_s=120)
        assert (state.status, state.step) == ("completed", 6), resumed.log_tail("trainer")
        try:
            assert asyncio.run(_answered(resumed)), "a chat asks what it has trained"
        finally:
            end_kept(resumed)
        _check_what_is_refused(data, url, run)


class NothingThere(BaseHTTPRequestHandler):
    """A web server without any route."""

    def do_GET(self) -> None:
        self.send_error(404)


def test_a_server_that_is_no_training_service_is_refused(home: Path, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), NothingThere) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            refusal = planned(rows(tmp_path), f"http://127.0.0.1:{server.server_port}").refusal
        finally:
            server.shutdown()
            thread.join()
    assert isinstance(refusal, ServiceUnusable) and "healthz" in refusal.sentence


def _once_there(data: Path, url: str, *edits: str) -> RunPlan:
    return _possible(lambda: planned(data, url, *edits))


def _possible(make: Callable[[], RunPlan]) -> RunPlan:
    """The plan once the service has loaded its model."""
    refusals: list[str] = []

    def plan() -> RunPlan | None:
        found = make()
        if found.refusal is None:
            return found
        refusals.append(found.refusal.sentence)
        return None

    with refused_with(refusals):
        found = wait_until(plan, 120, "the service answers")
    assert found is not None
    return found


@contextmanager
def refused_with(refusals: list[str]) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(refusals[-1]) from error


def _check_what_is_refused(data: Path, url: str, run: RunDirectory) -> None:
    """A model that the service does not have; a tokenizer that is not here; another service."""
    unknown = planned(data, url, "model=Qwen/Qwen3-8B").refusal
    assert isinstance(unknown, InvalidConfig) and "halteres/tiny" in unknown.sentence
    nowhere = planned(data, url, "data.tokenizer=nowhere").refusal
    assert isinstance(nowhere, NotFound) and "data.tokenizer=FOLDER" in nowhere.sentence
    away = plan_file_run(resolve_resumed(run, ["total_steps=8"]), resume=run).refusal
    assert isinstance(away, NotFound) and "TINKER_BASE_URL" in away.sentence


# -- reinforcement learning, through the sampling relay

SMALL = (
    "env.group_size=8",
    "env.batch_size=64",
    "env.eval_tasks=16",
    "env.eval_samples=1",
    "trainer.checkpoint_every=2",
)


def rl_plan(url: str, *edits: str, environment: str = "arithmetic") -> RunPlan:
    return plan_run(resolve_settings(environment, None, [*SMALL, *edits]), service_url=url)


@pytest.mark.runs
@pytest.mark.timeout(900)
def test_a_policy_is_sampled_by_the_sdk_where_the_service_has_no_runs(
    home: Path, tmp_path: Path
) -> None:
    """The reward rises; a killed relay is started again; after a killed trainer the run goes on; a
    chat asks what it has trained.
    """
    (tmp_path / "service").mkdir()
    with opened(tmp_path / "service", engine="torch", program=("-c", TINKER_API_ALONE)) as world:
        url = world.service_url
        run = start_run(_possible(lambda: rl_plan(url, "trainer.total_steps=400")))
        state = wait(run, lambda state: state.step >= 1, within_s=240)
        assert state.is_relayed and set(state.processes) == {"relay", "api", "trainer", "env"}
        os.kill(state.processes["relay"]["pid"], signal.SIGKILL)
        state = wait(run, lambda state: state.step >= 4, within_s=240)
        assert {"type": "restart", "role": "relay"}.items() <= _event(run, "restart").items()
        os.kill(state.processes["trainer"]["pid"], signal.SIGKILL)
        state = wait_for_end(run, within_s=60)
        assert (state.status, state.resumable, survivors(state)) == ("failed", True, [])

        assert state.last_checkpoint is not None
        total = state.last_checkpoint["step"] + 6
        resumed = start_run(
            plan_run(
                resolve_settings(None, None, [f"trainer.total_steps={total}"], base=run.settings()),
                resume=run,
                service_url=url,
            )
        )
        state = wait_for_end(resumed, within_s=300)
        assert (state.status, state.step, state.error) == ("completed", total, None)
        rewards = list(series(resumed, "reward/mean").values())
        assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1
        # the last evaluation samples the final weights, when no trainer is there any more
        assert series(resumed, "eval/percent_correct")[total] > 0
        _check_what_it_wrote(resumed)
        try:
            assert asyncio.run(_answered(resumed))
        finally:
            end_kept(resumed)


async def _answered(run: RunDirectory) -> bool:
    """Whether its newest weights answer in a chat, by a relay that is kept for it."""
    conversation = Conversation.with_run(run)
    asked, policy = conversation.asked("1 + 2"), policy_named(run, NEWEST)
    async with asyncio.timeout(120):
        pieces = conversation.answer(asked, policy, Sampling(max_tokens=8))
        ends = [piece.finish async for piece in pieces if isinstance(piece, Piece)]
    return bool(ends) and ends[-1] in ("stop", "length")


def _event(run: RunDirectory, kind: str) -> dict[str, Any]:
    return next(event for event in run.events() if event["type"] == kind)


def _check_what_it_wrote(run: RunDirectory) -> None:
    assert _event(run, "sampler_not_exact")["correction"] == "truncate"
    # each token is of the version that the trainer compares it with
    compared, differences = series(run, "tokens/compared"), series(run, "kl_sample_train_v2")
    assert min(compared.values()) > 0 and max(differences.values()) < 1e-9
    assert set(series(run, "policy/staleness_max").values()) == {0.0}


class TinkerApi(BaseHTTPRequestHandler):
    """What a service of the Tinker API says of itself before a run: a model of 128 tokens."""

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/api/v1/healthz": {"status": "ok"},
            "/api/v1/get_server_capabilities": {
                "supported_models": [
                    {"model_name": "halteres/tiny", "max_context_length": 128},
                    {"model_name": "vendor/large", "max_context_length": "128"},
                    {"model_name": 7},
                ]
            },
        }
        if self.path not in answers:
            self.send_error(404)
            return
        body = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def tinker_api() -> Iterator[str]:
    """The address of a service that is asked by plans alone."""
    with HTTPServer(("127.0.0.1", 0), TinkerApi) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


FITTING = "env.max_token_length=128"


def test_a_tokenizer_in_a_folder_without_weights_will_do(home: Path, tinker_api: str) -> None:
    tiny = builtin_path(TINY)
    assert tiny is not None
    folder = home / "models" / "vendor" / "large"
    without_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny, folder, ignore=without_weights)
    plan = rl_plan(tinker_api, FITTING, "model=vendor/large")
    assert plan.refusal is None and plan.model is not None
    assert (plan.model.name, plan.model.tokenizer) == ("vendor/large", str(folder))
    assert plan.model.context is None, "a text is no number of tokens"


def test_a_plan_says_that_a_relay_samples(home: Path, tinker_api: str) -> None:
    plan = rl_plan(tinker_api, FITTING)
    assert plan.refusal is None and plan.model is not None and plan.model.is_relayed
    assert any("the Tinker API alone" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("edits", "field"),
    [
        ([FITTING, "trainer.deterministic=true"], "trainer.deterministic"),
        (["env.max_token_length=512"], "env.max_token_length"),
        ([FITTING, "model=vendor/larg"], "inference.model"),
        # there is no tokenizer of it here
        ([FITTING, "model=vendor/large"], "inference.model"),
    ],
)
def test_what_a_service_of_the_tinker_api_cannot_do_is_refused(
    home: Path, tinker_api: str, edits: list[str], field: str
) -> None:
    refusal = rl_plan(tinker_api, *edits).refusal
    assert refusal is not None
    named = [
        refusal.details.get("field"),
        *(p["field"] for p in refusal.details.get("problems", [])),
    ]
    assert field in named, refusal.sentence
