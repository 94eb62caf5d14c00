"""/generate in the shapes of sglang and vLLM: many prompts, log-probabilities of the prompt,
streams.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
from contract.requirements import proves

from .inference_fixtures import TOKENIZER, events
from .live_service import LiveService

TEXT = "What is 17 + 25?"
TOKENS = TOKENIZER.encode(TEXT)
PARAMS = {"max_new_tokens": 5, "seed": 1, "ignore_eos": True}


async def whole(scene: LiveService, **body: Any) -> Any:
    status, answer = await scene.ask("/generate", **body)
    assert status == 200, answer
    return answer


@proves("inference:generate")
async def test_lists_of_prompts_are_answered_with_a_list_prompt_by_prompt(
    scene: LiveService,
) -> None:
    for given in ({"text": [TEXT, "1"]}, {"input_ids": [TOKENS, TOKENIZER.encode("1")]}):
        answers = await whole(scene, **given, sampling_params={**PARAMS, "n": 2})
        assert [one["meta_info"]["prompt_tokens"] for one in answers] == [len(TOKENS)] * 2 + [1] * 2
        assert len({one["meta_info"]["id"] for one in answers}) == 4
    [one] = await whole(scene, text=[TEXT], sampling_params=PARAMS)
    single = await whole(scene, text=TEXT, sampling_params=PARAMS)
    assert isinstance(single, dict)
    assert (one["text"], one["output_ids"]) == (single["text"], single["output_ids"])


@proves("inference:generate")
async def test_log_probabilities_of_the_prompt_begin_where_they_are_asked_for(
    scene: LiveService,
) -> None:
    body = {
        "input_ids": TOKENS,
        "sampling_params": PARAMS,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answer = await whole(scene, **body, logprob_start_len=0, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    assert [row[1] for row in meta["input_token_logprobs"]] == TOKENS
    assert [row[2] for row in meta["input_token_logprobs"]] == [
        TOKENIZER.token(token) for token in TOKENS
    ]
    assert meta["input_token_logprobs"][0][0] is meta["input_top_logprobs"][0] is None
    assert all(row[0] < 0 for row in meta["input_token_logprobs"][1:])
    assert [len(row) for row in meta["input_top_logprobs"][1:]] == [2] * (len(TOKENS) - 1)
    assert [len(row) for row in meta["output_top_logprobs"]] == [2] * 5
    later = (await whole(scene, **body, logprob_start_len=4))["meta_info"]
    assert later["input_token_logprobs"][0] == [None, TOKENS[4], None]
    assert [row[0] for row in later["input_token_logprobs"][1:]] == [
        row[0] for row in meta["input_token_logprobs"][5:]
    ]
    beyond = (await whole(scene, **body, logprob_start_len=1000))["meta_info"]
    assert (beyond["input_token_logprobs"], beyond["input_top_logprobs"]) == ([], [])
    without = (await whole(scene, **body))["meta_info"]
    assert "input_token_logprobs" not in without


async def test_a_prompt_can_be_scored_without_writing_anything(scene: LiveService) -> None:
    params = {"max_new_tokens": 0}
    body = {
        "input_ids": TOKENS,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await whole(scene, **body)
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == (
        "",
        [],
        0,
    )
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(TOKENS)


@proves("inference:generate", "inference:streaming")
async def test_sglangs_stream_repeats_what_is_written_so_far(scene: LiveService) -> None:
    body = {
        "text": [TEXT, "1"],
        "sampling_params": {**PARAMS, "n": 2},
        "return_logprob": True,
        "top_logprobs_num": 1,
    }
    expected = await whole(scene, **body)
    chunks = await events(scene, "/generate", **body)
    assert chunks.pop() == "[DONE]"
    for index, one in enumerate(expected):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        lengths = [len(chunk["output_ids"]) for chunk in mine]
        # a reader that is late gets longer pieces
        assert (lengths, lengths[-1]) == (sorted(set(lengths)), 5)
        assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(mine))
        assert all(chunk["meta_info"]["finish_reason"] is None for chunk in mine[:-1])
        one["meta_info"]["id"] = mine[0]["meta_info"]["id"]
        assert mine[-1] == {"index": index, **one}
    single = await events(scene, "/generate", text=TEXT, sampling_params=PARAMS)
    assert "index" not in single[0]


@proves("inference:generate")
async def test_vllms_shape_is_known_by_its_fields(scene: LiveService) -> None:
    asked = {"max_tokens": 5, "seed": 1, "ignore_eos": True, "n": 2}
    plain = await whole(scene, prompt=TEXT, **asked)
    assert [text.startswith(TEXT) for text in plain["text"]] == [True, True]
    assert "logprobs" not in plain
    for given in (
        {"prompt": {"prompt_token_ids": TOKENS}},
        {"prompt_token_ids": TOKENS},
        {"prompt": TOKENS},
        {"prompt": {"prompt": TEXT}},
    ):
        answer = await whole(scene, **given, **asked, logprobs=0)
        assert (answer["text"], answer["token_ids"]) == (plain["text"], plain["token_ids"])
        assert (answer["finish_reasons"], answer["policy_version"]) == (["length"] * 2, [0, 0])
        for tokens, rows in zip(answer["token_ids"], answer["logprobs"], strict=True):
            assert [[int(token) for token in row[0]] for row in rows] == [
                [token] for token in tokens
            ]
    top = await whole(scene, prompt=TEXT, **asked, logprobs=3)
    for tokens, rows in zip(top["token_ids"], top["logprobs"], strict=True):
        assert all(
            next(iter(row[0])) == str(token) for token, row in zip(tokens, rows, strict=True)
        )
        assert {len(row[0]) for row in rows} <= {3, 4}


async def test_vllms_prompt_log_probabilities_are_those_of_sglang(scene: LiveService) -> None:
    vllm = await whole(scene, prompt={"prompt_token_ids": TOKENS}, prompt_logprobs=2, max_tokens=1)
    sglang = await whole(
        scene,
        input_ids=TOKENS,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 1},
    )
    first, *rows = vllm["prompt_logprobs"]
    assert first is None
    told = [row[str(token)] for token, row in zip(TOKENS[1:], rows, strict=True)]
    np.testing.assert_array_equal(
        told, [row[0] for row in sglang["meta_info"]["input_token_logprobs"][1:]]
    )


async def test_vllms_stream_is_lines_with_all_that_is_written_so_far(scene: LiveService) -> None:
    body = {"prompt": TEXT, "max_tokens": 5, "seed": 1, "ignore_eos": True, "n": 2}
    async with scene.http.post(f"{scene.url}/generate", json={**body, "stream": True}) as response:
        lines = [json.loads(line) async for line in response.content]
    assert lines[-1] == await whole(scene, **body)
    assert len(lines) > 4


@proves("sample:no-images")
async def test_images_and_experts_are_refused_with_a_sentence(scene: LiveService) -> None:
    for field, value in (
        ("image_data", "x"),
        ("return_routed_experts", True),
        ("return_hidden_states", True),
    ):
        for given in ({"text": TEXT}, {"prompt": TEXT}):
            status, refusal = await scene.ask("/generate", **given, **{field: value})
            assert (status, f"`{field}` is not supported" in refusal["detail"]) == (400, True)
