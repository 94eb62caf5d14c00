"""The trainer's real surroundings: service with the scripted engine, trajectory server, and
somebody who plays.

Processes are started on sockets that are already listening, and end with the test.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadlines import wait_until

from halteres.config.settings import Settings
from halteres.observe.metrics import Row, read_rows

RUN_ID = "0123abcd"
GROUP, BATCH = 4, 8
PROMPT = [1, 2, 3, 4, 5]
CONTEXT = 1.0


def within(seconds: float, what: str, ready: Callable[[], Any]) -> Any:
    """The first true value of `ready`, asked again until the deadline."""
    return wait_until(ready, seconds, what)


def ask(url: str, body: Any = None, method: str | None = None) -> Any:
    """One JSON request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)  # noqa: S310 - our own http URL
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - as above
        return json.load(answer)


class Process:
    """One process of ours, its output kept: a module, or after "-c" a program."""

    def __init__(self, log: Path, *arguments: str, listener: socket.socket | None = None) -> None:
        descriptors = () if listener is None else (listener.fileno(),)
        self.log = log
        program = arguments if arguments[0] == "-c" else ("-m", *arguments)
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, *program],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"},
            )

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def exit_code(self, within_s: float = 30.0) -> int:
        try:
            return self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {within_s} s:\n{self.text[-3000:]}"
            ) from None

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(12)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("error: ")]


@dataclass(frozen=True)
class LiveServers:
    """Addresses, and a folder for run directories."""

    folder: Path
    service_url: str
    service: Process

    def run(self, name: str, **settings: Any) -> Run:
        """A run directory, and a trajectory server of its own."""
        return Run(self, self.folder / name, settings)


class Run:
    """One run: its directory, its trajectory server, its trainer."""

    def __init__(self, world: LiveServers, path: Path, settings: dict[str, Any]) -> None:
        self.world, self.path = world, path
        self.run_id = f"{RUN_ID}-{path.name}"
        (path / "control").mkdir(parents=True)
        self._started: list[Process] = []
        self._players: list[FakeEnvironment] = []
        self.api_url = self._start_api()
        self.settings = Settings.model_validate(
            {"env": {"batch_size": BATCH, "group_size": GROUP}, **settings}
        )

    def train(self, resume_from: Row | None = None) -> Process:
        """Start the trainer."""
        wiring = {
            "run_id": self.run_id,
            "run_dir": str(self.path),
            "service_url": self.world.service_url,
            "api_url": self.api_url,
            "api_key": None,
            "base_model": "halteres/tiny",
            "resume_from": resume_from,
        }
        (self.path / "settings.json").write_text(self.settings.model_dump_json())
        (self.path / "wiring.json").write_text(json.dumps(wiring))
        return self._start("trainer", "halteres.training", "--run", str(self.path))

    def play(self, scores: tuple[float, ...] = (0.0, 1.0, 0.0, 1.0)) -> FakeEnvironment:
        """Somebody samples the policy and sends scored groups, as many as the trajectory server
        allows.
        """
        player = FakeEnvironment(
            f"{self.world.service_url}/runs/{self.run_id}", self.api_url, scores
        )
        self._players.append(player)
        return player

    def post_batch(self, logprob: float = -1.0) -> None:
        """Post a whole batch that nobody sampled."""
        row = [*[CONTEXT] * len(PROMPT), logprob]
        group = {
            "tokens": [[*PROMPT, 9]] * GROUP,
            "masks": [[*[-100] * len(PROMPT), 9]] * GROUP,
            "inference_logprobs": [row] * GROUP,
            "scores": [0.0, 1.0] * (GROUP // 2),
        }
        for _ in range(BATCH // GROUP):
            ask(f"{self.api_url}/scored_data", group)

    def rows(self) -> list[Row]:
        return read_rows(self.path / "metrics.jsonl")

    def checkpoints(self) -> list[Row]:
        return read_rows(self.path / "checkpoints.jsonl")

    def events(self, kind: str) -> list[Row]:
        return [event for event in read_rows(self.path / "events.jsonl") if event["type"] == kind]

    def after_step(self, step: int) -> None:
        """Wait until this step is done."""
        within(20, f"step {step}", lambda: any(row["step"] >= step for row in self.rows()))

    def close(self) -> None:
        for player in self._players:
            player.stop()
        for process in reversed(self._started):
            process.end()

    def _start_api(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            database = str(self.path / "trajectories.sqlite")
            descriptor = str(listener.fileno())
            self._start(
                "api",
                "halteres.trajectories",
                "--database",
                database,
                "--listen-fd",
                descriptor,
                listener=listener,
            )
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _start(self, role: str, *arguments: str, listener: socket.socket | None = None) -> Process:
        process = Process(
            self.path / f"{role}-{len(self._started)}.log", *arguments, listener=listener
        )
        self._started.append(process)
        return process


class FakeEnvironment:
    """Samples from the run's policy and posts groups while it is allowed to."""

    def __init__(self, policy_url: str, api_url: str, scores: tuple[float, ...]) -> None:
        self._policy, self._api, self._scores = policy_url, api_url, scores
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play, name="player", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(20)

    def _play(self) -> None:
        env_id: int | None = None
        while not self._over.wait(0.02):
            try:
                if env_id is None:
                    env_id = self._register()
                else:
                    self._fill(env_id)
            except OSError:
                continue  # a peer is not up yet, or gone already

    def _register(self) -> int | None:
        body = {
            "max_token_length": 64,
            "desired_name": "player",
            "weight": 1.0,
            "group_size": GROUP,
        }
        return ask(f"{self._api}/register-env", body).get("env_id")

    def _fill(self, env_id: int) -> None:
        for _ in range(ask(f"{self._api}/status-env", {"env_id": env_id}, "GET")["allowance"]):
            ask(f"{self._api}/scored_data", {**self._group(), "env_id": env_id})

    def _group(self) -> dict[str, Any]:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 6, "n": GROUP, "temperature": 1.0},
            "return_logprob": True,
        }
        answers = [answer["meta_info"] for answer in ask(f"{self._policy}/generate", body)]
        sampled = [
            [(lp, token) for lp, token, _ in answer["output_token_logprobs"]] for answer in answers
        ]
        return {
            "tokens": [[*PROMPT, *(token for _, token in row)] for row in sampled],
            "masks": [[*[-100] * len(PROMPT), *(token for _, token in row)] for row in sampled],
            "inference_logprobs": [
                [*[CONTEXT] * len(PROMPT), *(lp for lp, _ in row)] for row in sampled
            ],
            "scores": list(self._scores),
            "policy_version": [answer["policy_version"] for answer in answers],
        }


@contextmanager
def opened(
    folder: Path, engine: str = "scripted", program: tuple[str, ...] = ("halteres.service",)
) -> Iterator[LiveServers]:
    """A world whose service answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        service = Process(
            folder / "service.log",
            *program,
            *(
                "--state",
                str(folder / "service"),
                "--listen-fd",
                str(listener.fileno()),
                "--engine",
                engine,
            ),
            listener=listener,
        )
    try:
        yield LiveServers(folder=folder, service_url=url, service=service)
    finally:
        service.end()
