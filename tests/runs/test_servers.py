"""A run's own servers: where they are, whom they answer, and who knows their secret."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.cli.train import attend
from halteres.clients import json_client
from halteres.clients.trajectories import NotAllowed, TrainerClient, TrainerRegistration
from halteres.config.resolution import resolve_settings
from halteres.observe.metrics import merge_by_step, series
from halteres.runs.directory import RunDirectory, stop_run
from halteres.runs.planning.models import ServiceUnusable
from halteres.runs.planning.plan import plan_run
from halteres.runs.reading import no_batch
from halteres.runs.reading.report import report_of
from halteres.runs.servers import Server, servers_of, with_login
from halteres.runs.start import start_run
from halteres.runs.supervision import roles
from halteres.runs.supervision.roles import WELL_KNOWN, listen

from .run_fixtures import StartRun, wait, wait_for_end

pytestmark = pytest.mark.runs

EDITS = (
    *(
        "inference.engine=scripted",
        "env.group_size=4",
        "env.batch_size=16",
        "env.eval_tasks=4",
        "env.eval_samples=2",
    ),
    "trainer.checkpoint_every=2",
)


def test_a_runs_servers_take_no_port_at_which_clients_look_unasked(start: StartRun) -> None:
    state = wait_for_end(start())
    assert not {state.processes[role]["port"] for role in ("service", "api")} & set(WELL_KNOWN)


def test_a_well_known_port_that_the_system_offers_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        offered = other.getsockname()[1]
    monkeypatch.setattr(roles, "WELL_KNOWN", (offered,))
    make, asked = socket.create_server, iter((offered, 0))
    monkeypatch.setattr(
        socket, "create_server", lambda at, **given: make((at[0], next(asked)), **given)
    )
    listener = listen()
    assert listener.port != offered
    listener.socket.close()


def test_whoever_does_not_know_a_runs_secret_can_neither_register_nor_train_nor_sample(
    home: Path,
) -> None:
    """A trainer of somebody else's, and the `tinker` SDK with a key of its own, at the run's very
    addresses.
    """
    import tinker

    run = start_run(
        plan_run(resolve_settings("arithmetic", None, [*EDITS, "trainer.total_steps=1000"]))
    )
    wait(run, lambda state: state.status == "running" and state.step >= 2, within_s=60)
    service, api = _both(run)
    other = TrainerRegistration(batch_size=4, max_token_len=64, num_steps=5, run_id="other")
    with closing(TrainerClient(api.url)) as trainer, pytest.raises(NotAllowed):
        trainer.register(other)
    for path in ("/scored_data", "/register-env", "/disconnect-env"):
        with pytest.raises(json_client.Refused) as refused:
            json_client.post_json(f"{api.url}{path}", {}, 5)
        assert refused.value.answered == 401
    for url in (f"{api.url}/reset_data", f"{service.url}/runs/{run.run_id}/v1/models"):
        with pytest.raises(json_client.Refused) as refused:
            json_client.get_json(url, 5)
        assert refused.value.answered == 401
    with pytest.raises(tinker.AuthenticationError, match="halteres runs connect"):
        tinker.ServiceClient(base_url=service.url, api_key="tml-other").holder.get_session_id()
    step = run.state().step
    wait(run, lambda state: state.step >= step + 2, within_s=60)
    stop_run(run)
    assert {size for _, size in series(merge_by_step(run.metrics()), "sequences/count")} == {16}


def test_a_runs_secret_is_in_two_files_of_its_owner_and_nowhere_else(home: Path) -> None:
    run = start_run(
        plan_run(
            resolve_settings(
                "arithmetic", None, [*EDITS, "trainer.total_steps=2", "trainer.eval_every=1"]
            )
        )
    )
    state = wait(run, lambda state: state.status == "running", within_s=60)
    secret = (_both(run)[0].key or "").encode()
    assert len(secret) == 32
    pids = [facts["pid"] for facts in state.processes.values() if facts.get("pid")]
    assert not [pid for pid in pids if secret in _read(Path(f"/proc/{pid}/cmdline"))]
    assert wait_for_end(run, within_s=60).status == "completed"
    holding = {
        file
        for file in home.rglob("*")
        if file.is_file() and not file.is_symlink() and secret in _read(file)
    }
    assert holding == {run.path / "wiring.json", run.path / "config.yaml"}
    assert {file.stat().st_mode & 0o777 for file in holding} == {0o600}


def test_connect_prints_what_reaches_a_runs_servers_while_they_are_there(home: Path) -> None:
    run = start_run(
        plan_run(resolve_settings("arithmetic", None, [*EDITS, "trainer.total_steps=1000"]))
    )
    wait(run, lambda state: state.status == "running", within_s=60)
    printed = CliRunner().invoke(app, ["runs", "connect", run.run_id])
    told = _variables(printed.output)
    with closing(TrainerClient(told["ROLLOUT_SERVER_URL"])) as trajectories:
        assert trajectories.diagnostics()["environments"]
    json_client.get_json(
        f"{told['TINKER_BASE_URL']}/api/v1/get_server_capabilities", 5, told["TINKER_API_KEY"]
    )
    json_client.get_json(f"{told['OPENAI_BASE_URL']}/models", 5, told["OPENAI_API_KEY"])
    stop_run(run)
    over = CliRunner().invoke(app, ["runs", "connect", run.run_id])
    assert isinstance(over.exception, Exception) and "has no servers now" in str(over.exception)


def test_a_run_of_an_older_version_has_servers_without_a_key(start: StartRun) -> None:
    run = start()
    wait_for_end(run)
    urls = run.state().urls
    for content in (b'{"run_id": "r", "api_url": "http://127.0.0.1:1"}', b"{", b"[]", None):
        (run.path / "wiring.json").unlink()
        if content is not None:
            (run.path / "wiring.json").write_bytes(content)
        assert servers_of(run).service == Server(url=urls["service"])
        assert servers_of(run).trajectories == Server(url=urls["api"])
        (run.path / "wiring.json").touch()


def test_the_tools_ask_a_runs_trajectory_server_with_its_secret(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    wait_for_end(run)
    asked: list[tuple[str, str | None]] = []

    def get_json(url: str, deadline_s: float, key: str | None = None) -> Mapping[str, Any]:
        asked.append((url, key))
        return {"why": "No groups."}

    monkeypatch.setattr(no_batch.json_client, "get_json", get_json)
    monkeypatch.setattr(no_batch, "_waits", lambda *_: True)
    assert report_of(run).no_batch == "No groups."
    api = servers_of(run).trajectories
    assert api is not None and api.key
    assert asked == [(f"{api.url}/v1/diagnostics", api.key)]


def test_a_run_trains_on_a_service_that_has_keys_and_chat_and_measurements_bring_its_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = start_run(
        plan_run(resolve_settings("arithmetic", None, [*EDITS, "trainer.total_steps=1000"]))
    )
    wait(host, lambda state: state.status == "running", within_s=60)
    service, _ = _both(host)
    with pytest.raises(ServiceUnusable, match="refuses the key"):
        start_run(plan_run(resolve_settings("arithmetic", None, [*EDITS]), service_url=service.url))
    monkeypatch.setenv("TINKER_API_KEY", str(service.key))
    guest = start_run(
        plan_run(
            resolve_settings("arithmetic", None, [*EDITS, "trainer.total_steps=2"]),
            service_url=service.url,
        )
    )
    state = wait_for_end(guest, within_s=60)
    assert (state.status, state.step) == ("completed", 2)
    attend(guest.run_id, detach=True)
    assert f"trains on the service at {service.url}" in capsys.readouterr().out
    monkeypatch.delenv("TINKER_API_KEY")
    for run in (host, guest):  # one that goes on, one that has ended
        asked = CliRunner().invoke(app, ["chat", run.run_id, "3 * 4"])
        assert asked.exit_code == 0, asked.output
        measured = CliRunner().invoke(
            app, ["env", "eval", "arithmetic", "--run", run.run_id, "--json"]
        )
        assert measured.exit_code == 0, measured.output
    stop_run(host)


def test_a_login_is_put_into_an_address_and_found_there_again() -> None:
    parts = urlsplit(with_login("http://127.0.0.1:7/prefix", "tml-run-1"))
    assert (parts.username, parts.password, parts.hostname, parts.port, parts.path) == (
        *("run", "tml-run-1", "127.0.0.1", 7, "/prefix"),
    )


def _both(run: RunDirectory) -> tuple[Server, Server]:
    servers = servers_of(run)
    assert servers.service is not None and servers.trajectories is not None
    return servers.service, servers.trajectories


def _variables(printed: str) -> dict[str, str]:
    return dict(
        word.split("=", 1)
        for line in printed.splitlines()
        for word in shlex.split(line, comments=True)[1:]
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
