"""The unmodified `openai` and `anthropic` packages talk to our service, each in its own
environment.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from contract.requirements import proves

from halteres.models import TINY

from .conftest import process, server

RUN = "talk"

pytestmark = pytest.mark.clients


def published(service: str) -> str:
    """Weights one step away from the base model; their path."""
    client = tinker.ServiceClient(
        base_url=service, api_key="tml-test", user_metadata={"halteres_run": RUN}
    )
    trainer = client.create_lora_training_client(TINY, rank=8, seed=0).result()
    example = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": np.array([6, 7, 8]), "weights": np.ones(3, np.float32)},
    )
    trainer.forward_backward([example], "cross_entropy").result()
    trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return trainer.save_weights_for_sampler("one").result().path


async def told_by(
    package: str, engine: str, client_python: Callable[..., str], tmp_path: Path
) -> tuple[str, Any]:
    """The path that was sampled from, and what the program saw."""
    python = await asyncio.to_thread(client_python, package, package)
    argv = ("--state", tmp_path / "service", "--engine", engine, "--model", TINY, "--threads", "1")
    async with server(
        "halteres.service", *argv, probe="/health", log=tmp_path / "service.log"
    ) as service:
        path = await asyncio.to_thread(published, service.url)
        program = Path(__file__).parent / f"{package}_program.py"
        log = tmp_path / "program.log"
        async with (
            process([python, program, service.url, path], log) as child,
            asyncio.timeout(120),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
    return path, json.loads(log.read_text().splitlines()[-1])


@proves("inference:openai", "inference:streaming", "inference:cloud-paths")
@pytest.mark.parametrize("engine", ["scripted", "torch"])
async def test_the_openai_package_is_served(
    engine: str, client_python: Callable[..., str], tmp_path: Path
) -> None:
    path, told = await told_by("openai", engine, client_python, tmp_path)
    for prefix in ("/v1", "/oai/api/v1"):
        seen = told[prefix]
        assert (seen["models"], seen["retrieved"]) == ([TINY, "halteres--tiny", RUN, path], path)
        for name, version in (("base", [0, 0]), ("path", [1, 1])):
            assert seen[name]["texts"] == seen[name]["streamed"]
            assert seen[name]["usage"][0] == seen[name]["usage"][1]
            assert (seen[name]["top"], seen[name]["version"]) == ([True, True], version)
        assert seen["chat"]["text"] == seen["chat"]["streamed"]
        assert seen["chat"]["finish"][0] == seen["chat"]["finish"][1]
        assert set(seen["chat"]["top"]) == {2}
        assert seen["refusals"] == {
            "model": "NotFoundError model_not_found model",
            "field": "BadRequestError invalid_data presence_penalty",
            "tools": "BadRequestError invalid_data tool_choice",
            "length": "BadRequestError context_length_exceeded None",
            "route": "NotFoundError True",
        }
    assert told["/v1"] == told["/oai/api/v1"]
    assert told["left"] == 1


@proves("inference:cloud-paths")
async def test_the_anthropic_package_is_served(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    _, told = await told_by("anthropic", "scripted", client_python, tmp_path)
    assert told[""] == told["/anthropic/api"]
    seen = told[""]
    assert seen["text"] == seen["streamed"] == seen["final"]
    assert seen["reasons"][0] == seen["reasons"][1]
    assert seen["usage"][0] == seen["usage"][1]
    assert seen["usage"][0][0] == seen["counted"]
    assert seen["image"] == seen["unknown"] == "BadRequestError invalid_request_error"
