"""The scene of unmodified atroposlib environments: settings, something to sample from, a server
that can be killed.

The recipe is section 11 of the trajectory API's specification.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from halteres.models import TINY, builtin_path

from .conftest import process

REQUIREMENT = ("atroposlib", "atroposlib==0.4.0")
GROUP_SIZE = 4
BATCH_SIZE = 8

FOLDER = builtin_path(TINY)
assert FOLDER is not None
SPOKEN, EOS = (30, 31, 32), 2

Json = dict[str, Any]


async def atropos_python(client_python: Callable[..., str]) -> str:
    """The interpreter that has atroposlib and nothing of ours."""
    return await asyncio.to_thread(client_python, *REQUIREMENT)


def environment_config(name: str, inference_url: str, trajectories: str, **changes: Any) -> Json:
    """What `serve --config` reads."""
    return {
        "env": {
            "group_size": GROUP_SIZE,
            "batch_size": BATCH_SIZE,
            "tokenizer_name": str(FOLDER),
            "use_wandb": False,
            "wandb_name": name,
            "rollout_server_url": trajectories,
            "ensure_scores_are_not_same": False,
            "max_token_length": 512,
            "total_steps": 1000,
            "max_batches_offpolicy": 2,
            "max_num_workers": 4,
            **changes,
        },
        "openai": [
            {
                "server_type": "sglang",
                "base_url": inference_url,
                "api_key": "x",
                "model_name": TINY,
                "tokenizer_name": str(FOLDER),
            }
        ],
    }


def environment(
    python: str, folder: Path, config: Json
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """`python atropos_sums.py serve`, offline; its log is NAME.log of the folder."""
    name = config["env"]["wandb_name"]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    argv = [python, Path(__file__).parent / "atropos_sums.py", "serve", "--config", file]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    return process(argv, log_of(folder, name), env=offline, cwd=folder)


def log_of(folder: Path, name: str) -> Path:
    """What an environment has said."""
    return folder / f"{name}.log"


@asynccontextmanager
async def inference() -> AsyncIterator[str]:
    """An sglang-shaped server that says the same few tokens to everybody at once; gives its /v1."""
    app = web.Application()
    app.add_routes(
        [web.post("/generate", _generate), web.post("/v1/{kind:.*completions}", _complete)]
    )
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def _generate(request: web.Request) -> web.Response:
    wanted = (await request.json())["sampling_params"].get("n", 1)
    return web.json_response([_answer() for _ in range(wanted)])


def _answer() -> Json:
    tokens = [*random.choices(SPOKEN, k=3), EOS]
    logprobs = [[-0.5, token, None] for token in tokens]
    return {
        "text": "",
        "meta_info": {"output_token_logprobs": logprobs, "finish_reason": {"type": "stop"}},
    }


async def _complete(request: web.Request) -> web.Response:
    """What health is asked by."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "text": "4",
        "message": {"role": "assistant", "content": "4"},
    }
    return web.json_response(
        {"id": "1", "object": "x", "created": 0, "model": TINY, "choices": [choice]}
    )


class TrajectoryServer:
    """Our server as a process whose socket outlives it, as under a supervisor; and the trainer that
    it serves.
    """

    def __init__(self, folder: Path, *options: str, token: str | None = None) -> None:
        self._folder, self._options, self._token = folder, options, token
        self._listening = socket.create_server(("127.0.0.1", 0))
        place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.url = f"http://{place}" if token is None else f"http://x:{token}@{place}"
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> TrajectoryServer:
        self.start()
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self.kill()
        self._listening.close()

    def start(self) -> None:
        """Start it; whoever asks before it is up waits."""
        descriptor = self._listening.fileno()
        argv = ("-m", "halteres.trajectories", "--database", str(self._folder / "api.sqlite"))
        with (self._folder / "api.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *argv, "--listen-fd", str(descriptor), *self._options],
                env={**os.environ, "HALTERES_TRAJECTORY_TOKEN": self._token or ""},
                pass_fds=[descriptor],
                stdout=log,
                stderr=log,
            )

    async def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, 10)
            self._process = None

    def said(self) -> str:
        """The end of its log."""
        return (self._folder / "api.log").read_text()[-1500:]

    async def register(self) -> None:
        """A trainer begins."""
        trainer = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": BATCH_SIZE,
            "max_token_len": 512,
            "checkpoint_dir": "unused",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 1000,
        }
        async with self._http.post(f"{self.url}/register", json=trainer) as answer:
            assert isinstance((await answer.json())["uuid"], int)

    async def batch(self) -> list[Json] | None:
        """One question for a batch, as the protocol's trainers put it."""
        async with self._http.get(f"{self.url}/batch") as answer:
            return (await answer.json())["batch"]

    async def diagnostics(self) -> Json:
        async with self._http.get(f"{self.url}/v1/diagnostics") as answer:
            return await answer.json()

    async def accepted(self, name: str) -> int:
        """Groups that this environment has sent; 0 before it is known."""
        known = await self.known(name)
        return known["accepted"] if known else 0

    async def known(self, name: str) -> Json | None:
        """What the server knows of an environment."""
        told = await self.diagnostics()
        return next(
            (env for env in told["environments"] if env["name"].startswith(f"{name}_")), None
        )


def check_exact(batch: list[Json]) -> None:
    """A batch has the sequences that were asked for, in whole groups."""
    assert sum(len(group["tokens"]) for group in batch) == BATCH_SIZE, json.dumps(batch)[:500]
    assert {len(group["tokens"]) for group in batch} == {GROUP_SIZE}
