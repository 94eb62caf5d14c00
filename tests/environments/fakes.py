"""What the tests of this folder share: stand-ins for the two servers, small environments, ways to
run them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from aiohttp import web

from halteres.clients.trajectories import (
    EnvStatus,
    Posted,
    Registered,
    TrainerClient,
    TrainerRegistration,
)
from halteres.config import environ
from halteres.environments.base import BaseEnv
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.serving import Serving
from halteres.environments.single_turn import SingleTurnEnv
from halteres.environments.trajectory_link import TrajectoryLink
from halteres.models import TINY, builtin_path
from halteres.tokenizer import load_tokenizer
from halteres.types import Batch

FOLDER = builtin_path(TINY)
assert FOLDER is not None
TOKENIZER = load_tokenizer(str(FOLDER))
ENVIRONMENTS = Path(sys.modules[BaseEnv.__module__].__file__ or "").parent
ARITHMETIC = ENVIRONMENTS / "arithmetic.py"


@dataclass
class Inference:
    """An inference server: answers are a function of prompt and seed; requests are kept."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # by any request
    failures: list[int] = field(default_factory=list)  # status codes of the next answers
    version: int = 0
    tells_logprobs: bool = True
    answer: Callable[[str, int], str] = (
        lambda prompt, digest: f"So the answer is \\boxed{{{digest % 10}}}."
    )

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.asked.set()
        if self.failures:
            return web.json_response({"detail": "not now"}, status=self.failures.pop(0))
        params = {**body["sampling_params"], "policy_version": body.get("policy_version")}
        items = [self._item(body["input_ids"], params, number) for number in range(params["n"])]
        return web.json_response(items if params["n"] > 1 else items[0])

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        choices = [
            {
                "message": {"role": "assistant", "content": f"answer {number}"},
                "finish_reason": "stop",
            }
            for number in range(body["n"])
        ]
        return web.json_response({"choices": choices})

    def _item(self, prompt: list[int], params: dict[str, Any], number: int) -> dict[str, Any]:
        seed = number if params["temperature"] else -1
        # other weights give other answers, where they are asked for by version
        pinned = params["policy_version"]
        said = f"{prompt}/{params.get('sampling_seed') if params['temperature'] else ''}/{seed}"
        said += "" if pinned is None else f"/{pinned}"
        text = self.answer(
            TOKENIZER.decode(prompt),
            int.from_bytes(hashlib.sha256(said.encode()).digest()[:4], "big"),
        )
        tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id][: params["max_new_tokens"]]
        return {
            "text": TOKENIZER.decode(tokens),
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {
                    "type": "stop" if tokens[-1] == TOKENIZER.eos_token_id else "length"
                },
                "output_token_logprobs": [
                    [-0.5, token, None] for token in tokens if self.tells_logprobs
                ],
                "policy_version": [self.version, self.version]
                if pinned is None
                else [pinned, pinned],
            },
        }


@asynccontextmanager
async def inference_server() -> AsyncIterator[Inference]:
    inference = Inference()
    app = web.Application()
    app.add_routes(
        [
            web.post("/runs/r/generate", inference.generate),
            web.post("/runs/r/v1/chat/completions", inference.chat),
        ]
    )
    async with serving(app) as url:
        inference.url = f"{url}/runs/r/v1"
        yield inference


@asynccontextmanager
async def serving(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Trainer:
    """A trajectory server and its trainer in one, in memory: says how many groups it wants, takes
    whole batches.

    `max_staleness` is 0: after a batch it wants nothing until `ask` is called.
    """

    def __init__(
        self, *, batch_size: int, group_size: int, num_steps: int = 100, extended: bool = True
    ) -> None:
        self.batch_size, self.group_size, self.num_steps = batch_size, group_size, num_steps
        self.extended = extended  # False: as the original server, which gives no allowance
        self.step = 0
        self.groups: list[dict[str, Any]] = []  # all that were accepted, each key once
        self.keys: list[str] = []  # of every post
        self._accepted: set[str] = set()
        self.disconnected = False
        self.parked = False
        self.batches: list[list[dict[str, Any]]] = []
        self.changed = asyncio.Event()
        self._queued: list[dict[str, Any]] = []
        self.refuse: list[Exception] = []  # of the next posts; nothing is stored
        self.polls = 0
        # batches delivered -> the version with which it asked for the next one
        self.asked: dict[int, int] = {}
        self.registrations = 0

    async def register_env(self, **values: Any) -> Registered:
        self.registered = values
        self.registrations += 1
        return Registered(
            env_id=self.registrations - 1,
            name=f"{values['name']}_{self.registrations - 1}",
            checkpoint_dir="",
            starting_step=self.step,
            checkpoint_interval=0,
            num_steps=self.num_steps,
        )

    async def info(self) -> tuple[int, int]:
        return self.batch_size, 256

    async def status(self, env_id: int, asked_for: int | None = None) -> EnvStatus:
        await asyncio.sleep(0)
        self.polls += 1
        self.changed.set()
        return EnvStatus(
            current_step=self.step,
            queue_size=len(self._queued),
            self_queue_size=len(self._queued),
            max_group_size=self.group_size,
            unallocated_fraction=1.0,
            env_weight=1.0,
            allowance=self._allowance() if self.extended else None,
            asked_version=None if asked_for is None else self.asked.get(max(asked_for, 0)),
        )

    def _allowance(self) -> int:
        return 0 if self.parked else self.batch_size // self.group_size - len(self._queued)

    async def post(self, group: Mapping[str, Any], *, key: str) -> Posted:
        await asyncio.sleep(0)
        self.keys.append(key)
        self.changed.set()
        if self.refuse:
            raise self.refuse.pop(0)
        if key in self._accepted:
            return Posted(status="received")
        self._accepted.add(key)
        self.groups.append(json.loads(json.dumps(group, allow_nan=False)))
        self._queued.append(self.groups[-1])
        self._form()
        return Posted(status="received")

    async def disconnect(self, env_id: int) -> None:
        self.disconnected = True

    def ask(self) -> None:
        """The trainer wants the next batch."""
        self.parked = False

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def _form(self) -> None:
        if self.extended and len(self._queued) * self.group_size >= self.batch_size:
            self.batches.append(self._queued)
            self._queued, self.parked = [], True
            self.step += 1


class Digits(SingleTurnEnv):
    """Asks for a digit; pays when the answer's box holds an even one."""

    name = "digits"

    async def get_next_item(self) -> Any:
        return self.rng.randint(0, 1000)

    def prompt(self, item: Any) -> str:
        return f"Question: {item}?"

    def score(self, item: Any, text: str) -> float:
        return float(text[-3] in "02468")

    def eval_items(self) -> Sequence[int]:
        return range(self.config.eval_tasks)


def config(**changes: Any) -> BaseEnvConfig:
    values = {
        "group_size": 4,
        "max_new_tokens": 32,
        "max_token_length": 256,
        "ensure_scores_are_not_same": False,
        "total_steps": -1,
        "max_num_workers": 16,
    }
    return BaseEnvConfig(**{**values, **changes})


def server(inference: Inference, **changes: Any) -> APIServerConfig:
    return APIServerConfig(**{"base_url": inference.url, "ready_within": 5.0, **changes})


@asynccontextmanager
async def at_work(env: BaseEnv, trainer: Trainer) -> AsyncIterator[asyncio.Task[None]]:
    """The environment serves inside."""
    link = TrajectoryLink(cast(Any, trainer), env.config, env.wandb_name)
    task = asyncio.create_task(Serving(env, link).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.leave()
        await env.server.close()


@dataclass(frozen=True)
class Ended:
    code: int | None
    stdout: str
    stderr: str


async def start(
    file: Path, *arguments: str, pass_fds: Sequence[int] = (), **variables: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(file),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ.for_child(**variables),
        pass_fds=pass_fds,
    )


async def run(file: Path, *arguments: str, within_s: float = 20, **variables: str) -> Ended:
    process = await start(file, *arguments, **variables)
    async with asyncio.timeout(within_s):
        stdout, stderr = await process.communicate()
    return Ended(process.returncode, stdout.decode(), stderr.decode())


def processes_naming(file: Path) -> list[int]:
    """The processes whose command line names this file."""
    found = list[int]()
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(file).encode() in arguments.read_bytes():
                found.append(int(arguments.parent.name))
    return found


class TrajectoryServer:
    """The real trajectory server as a process, on a port of its own; it can be killed and started
    again.
    """

    def __init__(self, database: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = ("--database", str(database), "--port", str(self.port))
        self.trainer = TrainerClient(self.url)
        self._process: asyncio.subprocess.Process | None = None

    async def take(self, version: int) -> Batch:
        """The batch for the trainer's version."""
        batch = await asyncio.to_thread(self.trainer.batch, version, deadline_s=15)
        assert batch is not None
        return batch

    async def start(self) -> None:
        command = (sys.executable, "-m", "halteres.trajectories", *self._arguments)
        self._process = await asyncio.create_subprocess_exec(*command, env=environ.for_child())

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def trajectory_server(
    folder: Path, *, batch_size: int, num_steps: int
) -> AsyncIterator[TrajectoryServer]:
    """Inside, the server runs and a trainer is registered with max_staleness 0."""
    server = TrajectoryServer(folder / "trajectories.sqlite")
    await server.start()
    try:
        registration = TrainerRegistration(
            batch_size=batch_size,
            max_token_len=256,
            num_steps=num_steps,
            max_staleness=0,
            run_id="r",
        )
        await asyncio.to_thread(server.trainer.register, registration)
        yield server
    finally:
        server.trainer.close()
        await server.kill()


@asynccontextmanager
async def environment(file: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """An environment file that runs inside; at the end it is killed if it still does."""
    process = await start(file, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def write_config(folder: Path, inference: Inference, **env: Any) -> Path:
    """A config file in the seeds' format, as the supervisor writes it."""
    openai = [
        {"model_name": TINY, "base_url": inference.url, "api_key": "x", "server_type": "sglang"}
    ]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"env": env, "openai": openai, "tinker": {"lora_rank": 16}}))
    return file
