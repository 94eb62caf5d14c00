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
from service.inference_fixtures import speaking
from service.recorded_responses import SAYS_TO_RESULTS, THINKS

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
            "field": "BadRequestError invalid_data logit_bias",
            "tools": "BadRequestError invalid_data tool_choice",
            "length": "BadRequestError context_length_exceeded None",
            "route": "NotFoundError True",
        }
    assert told["/v1"] == told["/oai/api/v1"]
    assert told["left"] == 1


@proves("inference:responses", "inference:cloud-paths")
async def test_the_openai_package_reads_responses_and_their_typed_events(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """Every answer and event fits the package's own types."""
    python = await asyncio.to_thread(client_python, "openai", "openai")
    program = Path(__file__).parent / "openai_responses_program.py"
    log = tmp_path / "program.log"
    async with speaking(tmp_path, THINKS, template=None) as (scene, speaker):
        speaker.says_to_results = SAYS_TO_RESULTS
        async with (
            process([python, program, scene.url, "speaker"], log) as child,
            asyncio.timeout(120),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    assert told["/v1"] == told["/oai/api/v1"]
    seen = told["/v1"]
    assert (
        seen["shapes"]
        == [
            [
                ["reasoning", ["I add."]],
                ["message", ["Let me see."]],
                ["function_call", "add", {"a": 17, "b": 25}],
            ]
        ]
        * 3
    )
    assert seen["logprobs"] == "Let me see."
    assert without_repeats(seen["kinds"]) == [
        f"response.{kind}"
        for kind in (
            "created",
            "in_progress",
            *item_events("reasoning_text"),
            *item_events("output_text"),
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        )
    ]
    assert seen["same_kinds"] and seen["numbers"] and all(seen["usage"])
    assert seen["answered"] == SAYS_TO_RESULTS
    assert seen["cut"] == ["incomplete", "max_output_tokens"]
    assert seen["previous"] == ["invalid_data", "previous_response_id"]
    assert seen["length"] == "context_length_exceeded"


def item_events(part: str) -> tuple[str, ...]:
    """The events of an item with one part of text."""
    return (
        "output_item.added",
        "content_part.added",
        f"{part}.delta",
        f"{part}.done",
        "content_part.done",
        "output_item.done",
    )


def without_repeats(kinds: list[str]) -> list[str]:
    """Several deltas in a row as one."""
    return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]


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
