"""A run whose service and trajectory server are there: its policy is published, sessions of its
gateway are opened with its key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from service.live_service import KEY, LiveService, closing, serving, trainer
from trajectories.server_fixtures import TRAINER, ServerProcess

from halteres.runs.directory import RunDirectory
from halteres.runs.servers import WIRING
from halteres.service.service import Options

from .run_fixtures import make_run, supervised

__all__ = ["KEY", "GatewayScene", "gateway_of_a_run", "play"]


@dataclass(frozen=True, slots=True)
class GatewayScene:
    """The run, its service, its trajectory server."""

    run: RunDirectory
    service: LiveService
    trajectories: ServerProcess


@asynccontextmanager
async def gateway_of_a_run(folder: Path) -> AsyncIterator[GatewayScene]:
    """A run under supervision, in HALTERES_HOME, while the block runs."""
    trajectories = ServerProcess(folder / "queue.sqlite")
    try:
        trajectories.ask("/register", {**TRAINER, "batch_size": 2, "max_token_len": 2048})
        trajectories.ask("/batch")
        options = Options(own_key=KEY, trajectory_server=trajectories.url)
        run = make_run()
        async with serving(folder / "state", options) as service:
            (run.path / WIRING).write_text(json.dumps({"api_key": KEY}))
            with supervised(run, urls={"service": service.url}):
                async with closing(await service.client(halteres_run=run.run_id)) as client:
                    await (await trainer(client)).save_weights_and_get_sampling_client()
                    yield GatewayScene(run, service, trajectories)
    finally:
        trajectories.close()


def play(opened: dict[str, Any], text: str = "Hello.") -> None:
    """A program's one call, with what it is given."""
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 6}
    headers = {"Authorization": f"Bearer {opened['api_key']}"}
    url = f"{opened['openai_base_url']}/chat/completions"
    httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()
