"""Stand-ins for service, engine, api and trainer: what a supervisor sees of them, and nothing else.

`python standin_roles.py supervisor DIR --lock-fd N` is a real supervisor whose roles are these.
STANDIN_STEPS: the trainer does so many steps, then waits for a signal (default: all).
STANDIN_TRAINER: `obeys` requests to stop too, `forgetful` of final weights.
STANDIN_CONCLUSION=raises: a defect in what writes the results. STANDIN_DIES: ROLE@start dies before
it is ready. STANDIN_NOTICE: what the trainer notices before its first step. STANDIN_SINKS: the
process that forwards metrics `dies`, `hangs`, or tells its `variables`; else it is the real one,
with less patience. STANDIN_REFUSES: in which words the service has refused all that the environment
asked. STANDIN_FIGURES: more metrics of the trainer's rows, in JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    role, *rest = sys.argv[1:]
    if role == "supervisor":
        # the first probe would: stand-ins may have done all their steps by then
        importlib.import_module("httpx")

        from halteres.observe import plots
        from halteres.runs.diagnosis import alerts as diagnosis
        from halteres.runs.supervision import controller, run_processes, supervisor
        from halteres.runs.supervision.supervisor import main as supervise

        if "STANDIN_REFUSES" in os.environ:
            controller.HEARTBEAT_S, diagnosis.LASTING_S = 0.05, 0.1
        controller.LEAST_FREE_BYTES = int(os.environ.get("STANDIN_LEAST_FREE", "0"))
        controller.CAP_GRACE_S = float(os.environ.get("STANDIN_CAP_GRACE_S", "30"))
        run_processes.SINKS, run_processes.SINKS_END_WITHIN_S = (
            (sys.executable, __file__, "sinks"),
            15,
        )
        if os.environ.get("STANDIN_SINKS") == "hangs":
            run_processes.SINKS_END_WITHIN_S = 0.5
        # what a start would refuse, the supervisor must still hold to
        if policy := os.environ.get("STANDIN_POLICY"):
            Path(rest[0], "policy.json").write_text(policy)
        if os.environ.get("STANDIN_CONCLUSION") == "raises":
            supervisor.conclude = lambda *_: 1 / 0
        plots.plot_run = (
            lambda rows, file, *rest: file.touch()
        )  # a picture costs half a second; one test has a real one
        sys.exit(supervise(rest, roles_of=stand_ins))
    if role == "sinks":
        forward(*rest)
    if role != "engine":
        watch_lifeline()
    if os.environ.get("STANDIN_DIES") == f"{role}@start":
        sys.stderr.write(f"error: The {role} has no legs. It was born so.\n")
        sys.exit(7)
    {"service": service, "api": api, "trainer": trainer, "engine": engine}[role](*rest)


def stand_ins(scene: Any) -> Any:
    from halteres.runs.supervision.roles import roles_of

    def command(name: str) -> tuple[str, ...]:
        me = (sys.executable, __file__, name)
        if name == "service":
            return (*me, str(scene.path), str(scene.service.descriptor))
        return (*me, str(scene.api.descriptor)) if name == "api" else (*me, str(scene.path))

    def stand_in(role: Any) -> Any:
        if role.name == "env":  # it stands in already: the environment file of these runs
            return replace(role, ready_within_s=within, grace_s=0.2)
        return replace(role, ready_within_s=within, grace_s=3.0, command=command(role.name))

    within = float(os.environ.get("STANDIN_READY_WITHIN_S", "30"))
    return tuple(stand_in(role) for role in roles_of(scene))


def forward(run: str) -> None:
    how = os.environ.get("STANDIN_SINKS")
    Path(run, "sinks.pid").write_text(str(os.getpid()))
    if how == "dies":
        sys.exit(7)
    if how == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    if how == "variables":
        Path(run, "variables.json").write_text(json.dumps(dict(os.environ)))
        sys.exit()
    from halteres.observe import sinks

    sinks.SERVER_WITHIN_S = 2
    sinks.main([run])


def watch_lifeline() -> None:
    descriptor = int(os.environ["HALTERES_LIFELINE_FD"])

    def watch() -> None:
        os.read(descriptor, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def engine(lifeline: str) -> None:
    os.read(int(lifeline), 1)


def service(run: str, descriptor: str) -> None:
    state = Path(run, "service")
    state.mkdir(exist_ok=True)
    ours, theirs = os.pipe()
    os.set_inheritable(ours, True)
    child = subprocess.Popen(
        [sys.executable, __file__, "engine", str(ours)], pass_fds=(ours,), process_group=0
    )
    with (state / "engine.log").open("a") as log:
        log.write("an engine started\n")
    (state / "service.json").write_text(json.dumps({"pid": os.getpid(), "engine_pid": child.pid}))
    refusal = {"status": 400, "path": "/generate", "why": os.environ.get("STANDIN_REFUSES", "")}
    requests = {
        "answered": 0,
        "refused_in_a_row": 9 * bool(refusal["why"]),
        "last_refusal": refusal,
    }
    ok = {"status": "ok"}
    routes = {"/api/v1/healthz": ok, "/runs/preflight/v1/models": ok}
    routes[f"/halteres/v1/runs/{Path(run).name}/requests"] = requests
    serve(int(descriptor), {path: lambda told=told: told for path, told in routes.items()})
    os.close(theirs)


def api(descriptor: str) -> None:
    registered: list[dict[str, Any]] = []

    def register() -> dict[str, Any]:
        registered.append({"env_id": len(registered)})
        return {"status": "success"}

    serve(
        int(descriptor),
        {
            "/v1/diagnostics": lambda: {"environments": registered, "queued_sequences": 0},
            "/register-env": register,
        },
    )


def serve(descriptor: int, routes: dict[str, Any]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path in routes
            body = json.dumps(routes[self.path]() if found else {"detail": "Not Found"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=descriptor)
    server.serve_forever()


def trainer(run: str) -> None:
    folder = Path(run)
    wiring = json.loads((folder / "wiring.json").read_text())
    urllib.request.urlopen(f"{wiring['service_url']}/api/v1/healthz", timeout=30).read()  # noqa: S310 - ours
    settings = json.loads((folder / "settings.json").read_text())
    total, resumed = settings["trainer"]["total_steps"], wiring["resume_from"]
    if resumed:
        assert place(folder, resumed["state_path"]).is_dir(), (
            f"{resumed['state_path']} is not in this service's state"
        )
    step: int = resumed["step"] if resumed else 0
    stopped: list[
        int
        # no Event: its `wait` holds, for an instant, the lock that a handler's `set` would wait for
    ] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    if not resumed:
        checkpoint(folder, "step-000000", 0, weights=False)
    (folder / "control" / "trainer.ready").touch()
    until = min(total, int(os.environ.get("STANDIN_STEPS", total)))
    if notice := os.environ.get("STANDIN_NOTICE"):
        append(
            folder / "events.jsonl",
            {"type": "notice", "rule": "nan_loss", "step": 1, "evidence": notice},
        )
    while step < until:
        step += 1
        rewards = {
            "reward/mean": step / total,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "groups/without_signal": 1.0,
        }
        figures = {
            **rewards,
            "tokens/action": 100.0,
            **json.loads(os.environ.get("STANDIN_FIGURES", "{}")),
        }
        append(
            folder / "metrics.jsonl", {"step": step, "src": "trainer", **figures, "t": time.time()}
        )
        if step < total and step % settings["trainer"]["checkpoint_every"] == 0:
            checkpoint(folder, f"step-{step:06d}", step)
    obeys = os.environ.get("STANDIN_TRAINER") == "obeys"
    while (
        step < total and not stopped and not (obeys and (folder / "control" / "stop.json").exists())
    ):
        time.sleep(0.02)
    checkpoint(folder, "final", step, final=os.environ.get("STANDIN_TRAINER") != "forgetful")


def checkpoint(
    folder: Path, name: str, step: int, weights: bool = True, final: bool = False
) -> None:
    row: dict[str, Any] = {
        "name": name,
        "step": step,
        "final": final,
        "t": time.time(),
        "sampler_path": None,
        "state_path": None,
    }
    row["sampler_path"] = f"tinker://{folder.name}:0/sampler_weights/{name}"
    if weights:
        row["state_path"] = f"tinker://{folder.name}:0/weights/{name}"
    for path in (row["sampler_path"], row["state_path"]):
        if path:
            place(folder, path).mkdir(parents=True)
            (place(folder, path) / "adapter_config.json").write_text("{}")
    append(folder / "checkpoints.jsonl", row)
    early = (
        {"reason": os.environ["STANDIN_REASON"]} if final and "STANDIN_REASON" in os.environ else {}
    )
    append(folder / "events.jsonl", {**row, "type": "checkpoint", **early})


def place(folder: Path, path: str) -> Path:
    return folder / "service" / "checkpoints" / path.removeprefix("tinker://").replace(":", "_")


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
