"""/inference/v1/generate: tokens in, tokens out, by the wire of vLLM and of verifiers' train client."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from contract.requirements import proves

from halteres.engine.vllm.answers import Generated, piece_of, sequence_of
from halteres.models import TINY

from .inference_fixtures import TOKENIZER, events, whole
from .live_service import LiveService, closing, trainer

PATH = "/inference/v1/generate"
PROMPT = TOKENIZER.encode("What is 17 + 25?")

VERIFIERS = {
    "model": TINY,
    "token_ids": PROMPT,
    "sampling_params": {
        "temperature": 1.0,
        "max_tokens": 12,
        "stop_token_ids": [TOKENIZER.eos_token_id],
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 4,
        "reasoning_effort": "low",
    },
    "cache_salt": "x",
    "priority": 0,
}
"""A body as verifiers 0.4.0 sends it."""

VLLM_CLIENT = {
    "model": TINY,
    "token_ids": PROMPT,
    "stream": False,
    "sampling_params": {
        "n": 2,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "logprobs": 3,
        "ignore_eos": True,
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "detokenize": False,
        "prompt_logprobs": 2,
    },
}
"""A body as our own client of vLLM sends it."""


@proves("inference:tokens")
async def test_verifiers_train_client_gets_what_it_checks(scene: LiveService) -> None:
    async with closing(await scene.client(halteres_run="r17")) as client:
        training = await trainer(client)
        await training.save_weights_and_get_sampling_client()
        for prefix in ("", "/runs/r17"):
            answer = await whole(scene, f"{prefix}{PATH}", **VERIFIERS)
            [choice] = answer["choices"]
            content = choice["logprobs"]["content"]
            assert len(content) == len(choice["token_ids"])
            for token, entry in zip(choice["token_ids"], content, strict=True):
                assert entry["token"] == f"token_id:{token}"
                assert math.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0
            assert choice["finish_reason"] in ("stop", "length")
            assert answer["usage"]["prompt_tokens"] == len(PROMPT)
            assert (answer["policy_version"], bool(answer["request_id"])) == ([0, 0], True)
            _, models = await scene.get(f"{prefix}/v1/models")
            [card] = [one for one in models["data"] if one["id"] == TINY]
            assert card["max_model_len"] == 2048


async def test_the_stop_token_is_among_the_tokens_and_without_max_tokens_the_context_is_filled(
    scene: LiveService,
) -> None:
    stop = VERIFIERS["sampling_params"] | {"max_tokens": None, "seed": 1}
    answer = await whole(scene, PATH, **(VERIFIERS | {"sampling_params": stop}))
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["token_ids"][-1]) == ("stop", TOKENIZER.eos_token_id)
    endless = {"ignore_eos": True}
    answer = await whole(scene, PATH, token_ids=PROMPT, sampling_params=endless)
    assert len(answer["choices"][0]["token_ids"]) == 2048 - len(PROMPT)
    assert answer["choices"][0]["logprobs"] is None


@proves("inference:tokens")
async def test_our_own_client_of_vllm_reads_the_answer_whole_and_streamed(
    scene: LiveService,
) -> None:
    """One set of structs at both ends; the tokens are those of the other routes."""
    _, raw = await scene.ask(PATH, **VLLM_CLIENT)
    answer = msgspec.convert(raw, Generated)
    sequences = [sequence_of(choice, 2) for choice in answer.choices]
    assert [len(one.tokens) // 4 for one in sequences] == [5, 5]
    assert all(one.top is not None and (one.top.k, one.top.length) == (2, 5) for one in sequences)
    scores = answer.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(PROMPT)
    assert all(str(token) in (row or {}) for token, row in zip(PROMPT[1:], scores[1:], strict=True))

    sampling: dict[str, Any] = VLLM_CLIENT["sampling_params"] | {"prompt_logprobs": None}
    streamed = VLLM_CLIENT | {"sampling_params": sampling, "stream": True}
    *told, done = await events(scene, PATH, **streamed)
    pieces = [
        piece_of(choice, 0, 0, 2)
        for event in told
        for choice in msgspec.convert(event, Generated).choices
    ]
    joined = [b"".join(one.tokens for one in pieces if one.sample == at) for at in range(2)]
    assert (joined, done) == ([one.tokens for one in sequences], "[DONE]")

    known = {"n": 2, "max_tokens": 5, "seed": 7, "ignore_eos": True}
    completion = await whole(scene, "/v1/completions", prompt=PROMPT, **known)
    assert [one["token_ids"] for one in completion["choices"]] == [
        list(one.token_ids or ()) for one in answer.choices
    ]
