"""The known consumer, as section 10 of the specification describes it, and an unmodified atroposlib
environment.

Neither knows us: the trainer speaks to our training service by the `tinker` SDK and to our
trajectory server, samples for its environment itself, and is the very same whichever servers it
has.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from deadlines import until

from halteres.models import TINY

from .atropos_fixtures import (
    BATCH_SIZE,
    TrajectoryServer,
    atropos_python,
    environment,
    environment_config,
    log_of,
)
from .conftest import process, server

pytestmark = pytest.mark.clients

STEPS = 3
PROGRAM = Path(__file__).parent / "tinker_trainer.py"


def trainer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The environment's file with the trainer's part, as that trainer reads it."""
    return {
        **config,
        "env": {**config["env"], "total_steps": STEPS},
        "tinker": {
            "lora_rank": 8,
            "learning_rate": 1e-2,
            "max_token_trainer_length": 512,
            "checkpoint_dir": "./temp/",
            "save_checkpoint_interval": 0,
            "wandb_project": "tinker-atropos",
            "wandb_group": None,
            "wandb_run_name": "sums",
        },
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lines(log: Path) -> list[dict[str, Any]]:
    """What the trainer has printed, without what its libraries say."""
    found = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in found if line.startswith("{") and line.endswith("}")]


async def test_the_known_trainer_learns_from_an_unmodified_environment_over_a_kill(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    python = await atropos_python(client_python)
    argv = ("--state", tmp_path / "service", "--engine", "torch", "--model", TINY, "--threads", "1")
    log = tmp_path / "trainer.log"
    async with (
        server(
            "halteres.service", *argv, probe="/api/v1/healthz", log=tmp_path / "service.log"
        ) as service,
        TrajectoryServer(tmp_path) as trajectories,
    ):
        sampled = f"http://127.0.0.1:{free_port()}/v1"
        config = environment_config("sums", sampled, trajectories.url, max_batches_offpolicy=1)
        file = tmp_path / "trainer.yaml"
        file.write_text(yaml.safe_dump(trainer_config(config)))
        told = {
            "TINKER_BASE_URL": service.url,
            "TINKER_API_KEY": "tml-test",
            "TINKER_TELEMETRY": "0",
        }
        async with (
            process([sys.executable, PROGRAM, file], log, env=told, cwd=tmp_path) as trainer,
            environment(python, tmp_path, config) as running,
        ):

            def said() -> str:
                return (
                    log.read_text()[-3000:]
                    + log_of(tmp_path, "sums").read_text()[-2000:]
                    + trajectories.said()
                )

            await until(lambda: lines(log), 90, said)
            await trajectories.kill()
            trajectories.start()
            await until(lambda: "ended" in (lines(log) or [{}])[-1], 60, said)
            assert await trainer.wait() == 0
            assert running.returncode is None, said()
            diagnosis = await trajectories.diagnostics()
    *steps, ended = lines(log)
    assert ended == {"ended": "training complete"}
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {row["sequences"] for row in steps} == {BATCH_SIZE}
    assert diagnosis["step"] == STEPS
    assert all(row.keys() >= {"train/loss", "reward/mean", "logprobs/diff"} for row in steps)
    assert steps[0].get("logprobs/diff", 0.0) < 1e-4, (
        "its first batch was sampled by the weights that it trains"
    )
