"""What does not fit into the context is refused in the words by which each client knows it, or
shortened and said to be.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves
from tinker import types

from halteres.models import TINY
from halteres.service.service import Options

from .inference_fixtures import events, whole
from .live_service import LiveService, closing, prompt, serving

CONTEXT = 2048
LONG = [5] * 3000
OPENAI = "This model's maximum context length is 2048 tokens, the prompt has 3000."


@pytest.fixture
async def strict(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with serving(tmp_path / "strict", Options(strict_context=True)) as scene:
        yield scene


@proves("inference:overflow")
@pytest.mark.parametrize("prefix", ["", "/runs/r17"])
async def test_openais_routes_name_the_context_and_the_code(
    scene: LiveService, prefix: str
) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("v1/completions", {"prompt": LONG}),
        ("v1/completions", {"prompt": LONG, "stream": True}),
        ("inference/v1/generate", {"token_ids": LONG}),
    ]
    async with closing(await scene.client(halteres_run="r17")) as client:
        training = await client.create_lora_training_client(TINY, rank=4)
        await training.save_weights_and_get_sampling_client()
        for path, body in bodies:
            status, refusal = await scene.ask(f"{prefix}/{path}", **body)
            error = refusal["error"]
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(OPENAI)


async def test_a_chat_and_a_message_that_are_too_long_say_so_in_their_dialects(
    scene: LiveService,
) -> None:
    messages = [{"role": "user", "content": "1 2 " * 1000}]
    _, counted = await scene.ask("/v1/messages/count_tokens", messages=messages)
    tokens = counted["input_tokens"]
    assert tokens > CONTEXT
    status, refusal = await scene.ask("/v1/chat/completions", messages=messages)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    assert f"the prompt has {tokens}." in refusal["error"]["message"]
    status, refusal = await scene.ask("/v1/messages", messages=messages, max_tokens=9)
    assert (status, refusal["error"]["type"]) == (400, "invalid_request_error")
    assert refusal["error"]["message"] == f"prompt is too long: {tokens} tokens > 2048 maximum"
    status, refusal = await scene.ask("/generate", input_ids=LONG)
    assert (status, refusal["code"]) == (400, "context_length_exceeded")
    assert (refusal["prompt_tokens"], refusal["context_length"]) == (3000, CONTEXT)


async def test_a_text_that_is_too_long_to_be_tokenised_is_an_overflow_too(
    scene: LiveService,
) -> None:
    messages = [{"role": "user", "content": "1 " * 2**17}]
    status, refusal = await scene.ask("/v1/chat/completions", messages=messages)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    status, refusal = await scene.ask("/v1/messages", messages=messages, max_tokens=9)
    assert (status, refusal["error"]["message"][:19]) == (400, "prompt is too long:")


async def test_a_prompt_that_fills_the_context_leaves_no_room(scene: LiveService) -> None:
    status, _ = await scene.ask("/v1/completions", prompt=[5] * (CONTEXT - 1), max_tokens=1)
    assert status == 200
    status, refusal = await scene.ask("/v1/completions", prompt=[5] * CONTEXT, max_tokens=1)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_max_tokens_that_does_not_fit_is_shortened_and_the_answer_says_so(
    scene: LiveService,
) -> None:
    long = [5] * (CONTEXT - 8)
    sampling = {"max_tokens": 64, "ignore_eos": True}
    asked: dict[str, Any] = {"prompt": long, **sampling}
    answer = await whole(scene, "/v1/completions", **asked)
    assert (answer["truncated_max_tokens"], answer["usage"]["completion_tokens"]) == (8, 8)
    assert answer["choices"][0]["finish_reason"] == "length"
    *_, last, done = await events(scene, "/v1/completions", **asked)
    assert (last["truncated_max_tokens"], done) == (8, "[DONE]")
    for fits in (8, None):
        answer = await whole(scene, "/v1/completions", **(asked | {"max_tokens": fits}))
        assert "truncated_max_tokens" not in answer

    params = {"max_new_tokens": 64, "ignore_eos": True}
    answer = await whole(scene, "/generate", input_ids=long, sampling_params=params)
    assert answer["truncated_max_tokens"] == 8
    answer = await whole(scene, "/generate", prompt_token_ids=long, **sampling)
    assert answer["truncated_max_tokens"] == 8
    tokens = {"token_ids": long, "sampling_params": sampling}
    answer = await whole(scene, "/inference/v1/generate", **tokens)
    assert answer["truncated_max_tokens"] == 8

    messages: dict[str, Any] = {
        "messages": [{"role": "user", "content": "1 2"}],
        "max_tokens": CONTEXT,
        "ignore_eos": True,
    }
    answer = await whole(scene, "/v1/messages", **messages)
    room = CONTEXT - answer["usage"]["input_tokens"]
    assert (answer["stop_reason"], answer["truncated_max_tokens"]) == ("max_tokens", room)
    *_, end, _ = await events(scene, "/v1/messages", **messages)
    assert end["truncated_max_tokens"] == room
    answer = await whole(scene, "/v1/chat/completions", **messages)
    assert answer["truncated_max_tokens"] == room


async def test_a_strict_service_refuses_a_max_tokens_that_does_not_fit(
    strict: LiveService,
) -> None:
    long = [5] * (CONTEXT - 8)
    status, _ = await strict.ask("/v1/completions", prompt=long, max_tokens=8)
    assert status == 200
    status, refusal = await strict.ask("/v1/completions", prompt=long, max_tokens=64)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in refusal["error"]["message"]
    messages = [{"role": "user", "content": "1 2"}]
    status, refusal = await strict.ask("/v1/messages", messages=messages, max_tokens=CONTEXT)
    assert status == 400
    sentence = refusal["error"]["message"]
    assert re.match(
        r"input length and `max_tokens` exceed context limit: \d+ \+ 2048 > 2048", sentence
    )
    async with closing(await strict.client()) as client:
        sampling = await client.create_sampling_client(base_model=TINY)
        with pytest.raises(
            tinker.BadRequestError, match=r"2040 prompt tokens \+ 64 max_tokens > 2048"
        ):
            await sampling.sample(prompt(*long), 1, types.SamplingParams(max_tokens=64))


@proves("sample:max-tokens")
async def test_a_tinker_sample_that_is_too_long_is_refused_when_it_is_submitted(
    scene: LiveService,
) -> None:
    """The hosted service's words: the cookbook and Harbor look for them in the SDK's
    BadRequestError.
    """
    async with closing(await scene.client()) as client:
        sampling = await client.create_sampling_client(base_model=TINY)
        with pytest.raises(tinker.BadRequestError) as caught:
            await sampling.sample(prompt(*LONG), 1, types.SamplingParams(max_tokens=4))
        assert (
            "Prompt length plus max_tokens exceeds the model's context window: 3000 prompt tokens "
            "+ 4 max_tokens > 2048. The prompt is too long."
        ) in str(caught.value)
        with pytest.raises(tinker.BadRequestError):
            await sampling.compute_logprobs(prompt(*[5] * CONTEXT))
        told = await sampling.sample(
            prompt(*LONG[:2040]), 1, types.SamplingParams(max_tokens=64, stop=[])
        )
        assert (told.sequences[0].stop_reason, len(told.sequences[0].tokens)) == ("length", 8)
