"""A training on a file asks its service for nothing but the Tinker API: any such service will do."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from training.live_servers import opened

from halteres.config.file_training import resolve_file_training
from halteres.config.resolution import resolve_settings
from halteres.errors import NotFound
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.file_plan import plan_file_run, resolve_resumed
from halteres.runs.planning.models import ServiceUnusable
from halteres.runs.planning.plan import RunPlan, plan_run
from halteres.runs.start import start_run

from .run_fixtures import wait_for_end
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
    from deadlines import wait_until

    def plan() -> RunPlan | None:
        found = planned(data, url, *edits)
        return found if found.refusal is None else None

    found = wait_until(plan, 60, "the service answers")
    assert found is not None
    return found


def _check_what_is_refused(data: Path, url: str, run: RunDirectory) -> None:
    """Reinforcement learning, whose environments sample there; a tokenizer that is not here."""
    refused = plan_run(resolve_settings("arithmetic", None, ()), service_url=url).refusal
    assert isinstance(refused, ServiceUnusable) and "/runs/RUN" in refused.sentence
    unknown = planned(data, url, "model=Qwen/Qwen3-8B").refusal
    assert isinstance(unknown, NotFound) and "data.tokenizer=FOLDER" in unknown.sentence
    away = plan_file_run(resolve_resumed(run, ["total_steps=8"]), resume=run).refusal
    assert isinstance(away, NotFound) and "TINKER_BASE_URL" in away.sentence
