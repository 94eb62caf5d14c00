"""OpenAI's completions and chats: streams as wholes, log-probabilities, names of weights, tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tinker
from contract.requirements import proves

from halteres.models import TINY
from halteres.rollouts.chat import Chat as EnvironmentChat
from halteres.service.inference.outputs import BROKEN

from .inference_fixtures import TOKENIZER, events, speaking, whole
from .live_service import BASE, DATA, STEP, LiveService, closing, serving, trainer

PROMPT = "What is 17 + 25?"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "n": 2}
HI = [{"role": "user", "content": "Hi"}]


@proves("inference:streaming")
@pytest.mark.parametrize(
    "extra", [{}, {"stop": ["e", "3 "]}, {"ignore_eos": True}, {"temperature": 0}]
)
async def test_streamed_completions_are_the_whole_ones(
    scene: LiveService, extra: dict[str, Any]
) -> None:
    body = ASKED | {"prompt": [PROMPT, "1 + 1"], "logprobs": 2, "return_token_ids": True, **extra}
    expected = await whole(scene, "/v1/completions", **body)
    chunks = await events(scene, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], expected["usage"])
    assert last["policy_version"] == [0, 0]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(chunks) >= len(expected["choices"])
    for choice in expected["choices"]:
        pieces = [
            chunk["choices"][0]
            for chunk in chunks
            if chunk["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]


@proves("inference:streaming")
async def test_streamed_chats_are_the_whole_ones(scene: LiveService) -> None:
    body = {
        "messages": HI,
        "max_tokens": 24,
        "seed": 3,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
    }
    expected = await whole(scene, "/v1/chat/completions", **body)
    chunks = await events(scene, "/v1/chat/completions", **body, return_token_ids=True)
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["prompt_token_ids"] == expected["prompt_token_ids"]
    assert chunks[-1]["policy_version"] == [0, 0]
    for choice in expected["choices"]:
        pieces = [
            chunk["choices"][0]
            for chunk in chunks
            if chunk["choices"][0]["index"] == choice["index"]
        ]
        assert pieces[0]["delta"]["role"] == "assistant"
        assert (
            "".join(piece["delta"].get("content", "") for piece in pieces)
            == choice["message"]["content"]
        )
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        told = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    assert "usage" not in chunks[-1]


async def test_log_probabilities_name_the_likeliest_tokens_and_the_one_that_was_drawn(
    scene: LiveService,
) -> None:
    answer = await whole(scene, "/v1/completions", **ASKED, logprobs=3)
    for choice in answer["choices"]:
        told = choice["logprobs"]
        for token, logprob, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert 1 <= len(top) <= 4
            assert token in top
            assert logprob <= max(top.values())
    without = await whole(scene, "/v1/completions", **ASKED, logprobs=0)
    assert without["choices"][0]["logprobs"]["top_logprobs"] is None
    assert (await whole(scene, "/v1/completions", **ASKED))["choices"][0]["logprobs"] is None
    as_ids = await whole(
        scene, "/v1/completions", **ASKED, logprobs=1, return_tokens_as_token_ids=True
    )
    choice = as_ids["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(
        name.startswith("token_id:") for row in choice["logprobs"]["top_logprobs"] for name in row
    )
    chat = await whole(
        scene, "/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=2, max_tokens=8
    )
    for entry in chat["choices"][0]["logprobs"]["content"]:
        assert [len(entry["top_logprobs"]), entry["logprob"] <= 0] == [2, True]
        assert entry["bytes"] == (
            None if BROKEN in entry["token"] else list(entry["token"].encode())
        )


async def test_echo_scores_the_prompt_as_compute_logprobs_does(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    tokens = TOKENIZER.encode(PROMPT)
    sampler = await client.create_sampling_client(base_model=TINY)
    scored = await sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens))
    for path in ("/v1/completions", "/oai/api/v1/completions"):
        answer = await whole(scene, path, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
        choice = answer["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (
            PROMPT,
            [],
            "length",
        )
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        np.testing.assert_allclose(told["token_logprobs"][1:], scored[1:], rtol=1e-6)
        assert told["text_offset"] == [
            sum(map(len, told["tokens"][:at])) for at in range(len(tokens))
        ]
        assert answer["usage"]["completion_tokens"] == 0
    grown = await whole(
        scene, "/v1/completions", prompt=tokens, echo=True, logprobs=2, max_tokens=3, seed=1
    )
    choice = grown["choices"][0]
    assert choice["text"].startswith(PROMPT)
    assert len(choice["logprobs"]["tokens"]) == len(tokens) + len(choice["token_ids"])
    chunks = await events(
        scene, "/v1/completions", prompt=tokens, echo=True, logprobs=2, max_tokens=3, seed=1
    )
    assert chunks[0]["choices"][0]["text"] == choice["text"]
    chunks = await events(scene, "/v1/completions", prompt=PROMPT, echo=True, max_tokens=3, seed=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]


async def test_prompt_log_probabilities_come_in_vllms_shape(scene: LiveService) -> None:
    tokens = TOKENIZER.encode(PROMPT)
    answer = await whole(scene, "/v1/completions", prompt=PROMPT, prompt_logprobs=2, max_tokens=1)
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, row in zip(tokens[1:], others, strict=True):
        assert 2 <= len(row) <= 3
        assert row[str(token)]["decoded_token"] == TOKENIZER.token(token)
        assert [one["rank"] for key, one in row.items() if key != str(token)] == sorted(
            one["rank"] for key, one in row.items() if key != str(token)
        )


async def test_stop_tokens_and_strings_end_the_text_before_them_unless_it_is_to_keep_them(
    scene: LiveService,
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    free = (await whole(scene, "/v1/completions", **body))["choices"][0]
    stop = free["token_ids"][7]
    at = free["token_ids"].index(stop)
    cut = (await whole(scene, "/v1/completions", **body, stop_token_ids=[stop]))["choices"][0]
    assert cut["token_ids"] == free["token_ids"][: at + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == TOKENIZER.decode(cut["token_ids"][:-1])
    kept = await whole(
        scene, "/v1/completions", **body, stop_token_ids=[stop], include_stop_str_in_output=True
    )
    assert kept["choices"][0]["text"] == TOKENIZER.decode(cut["token_ids"])
    word = free["text"][5:7]
    kept = await whole(scene, "/v1/completions", **body, stop=word, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == free["text"][: free["text"].index(word) + len(word)]
    assert kept["choices"][0]["stop_reason"] == word


@pytest.mark.parametrize("shape", ["one", "list", "mixed", "both fields"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@proves("inference:stop-tokens")
async def test_stop_takes_token_ids_alone_in_lists_and_beside_texts(
    scene: LiveService, path: str, shape: str
) -> None:
    """Whatever names the token, what was sampled is cut at its first place."""

    async def sampled(stop: dict[str, Any]) -> list[int]:
        params = {"seed": 1, "ignore_eos": True, **stop}
        if path == "/generate":  # sglang's
            sent = {"text": PROMPT, "sampling_params": {**params, "max_new_tokens": 40}}
            return (await whole(scene, path, **sent))["output_ids"]
        given = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": HI}
        return (await whole(scene, path, **given, **params, max_tokens=40))["choices"][0][
            "token_ids"
        ]

    free = await sampled({})
    token, other = free[7], free[15]
    stops: dict[str, dict[str, Any]] = {
        "one": {"stop": token},
        "list": {"stop": [token, other]},
        "mixed": {"stop": ["never this text", token]},
        "both fields": {"stop": ["never this text", other], "stop_token_ids": [token]},
    }
    first = min(
        free.index(one) for one in (token, *([other] if shape in ("list", "both fields") else []))
    )
    assert len(free) == 40
    assert await sampled(stops[shape]) == free[: first + 1]


@pytest.mark.parametrize("stop", [2**40, 1.5, [[5]], {"a": 1}, True])
async def test_a_stop_that_is_neither_text_nor_token_id_is_refused_by_name(
    scene: LiveService, stop: Any
) -> None:
    status, answer = await scene.ask("/v1/completions", prompt=PROMPT, stop=stop)
    assert (status, "stop" in str(answer)) == (400, True)


@proves("inference:openai")
async def test_every_name_of_weights_answers_with_its_own_version(scene: LiveService) -> None:
    async with closing(await scene.client(halteres_run="r17")) as client:
        training = await trainer(client)
        zero = (await training.save_weights_for_sampler("zero")).path
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        state = (await training.save_state("one")).path
        one = (await training.save_weights_for_sampler("one")).path
        assert (zero, state, one) == tuple(
            path for path in (zero, state, one) if path.startswith("tinker://")
        )
        expected = {
            None: 0,
            TINY: 0,
            "halteres--tiny": 0,
            str(BASE.folder): 0,
            zero: 0,
            state: 1,
            one: 1,
            f"{TINY};{one}": 1,
            "r17": 1,
        }
        for prefix in ("", "/runs/r17", "/oai/api"):
            for model, version in expected.items():
                if prefix == "/runs/r17" and model is None:
                    version = 1
                named = {} if model is None else {"model": model}
                answer = await whole(
                    scene, f"{prefix}/v1/completions", prompt="1", max_tokens=1, **named
                )
                assert answer["policy_version"] == [version, version], (prefix, model)
                assert answer["model"] == (model or ("r17" if prefix == "/runs/r17" else TINY))
        status, refusal = await scene.ask("/v1/completions", prompt="1", model="r1")
        assert (status, refusal["error"]["code"], refusal["error"]["param"]) == (
            404,
            "model_not_found",
            "model",
        )
        listed = (await scene.get("/v1/models"))[1]["data"]
        assert [one["id"] for one in listed] == [TINY, "halteres--tiny", "r17", zero, one]
        assert {one["max_model_len"] for one in listed} == {2048}
        assert [one["policy_version"] for one in listed] == [0, 0, 1, 0, 1]
        for name in (TINY, "halteres--tiny", "r17", one, state):
            status, found = await scene.get(f"/v1/models/{name}")
            assert (status, found["id"]) == (200, name)
        assert (await scene.get("/v1/models/other"))[0] == 404
        assert (await scene.get("/runs/r17/v1/models/other"))[0] == 404


async def test_models_are_listed_before_any_engine_was_ready(scene: LiveService) -> None:
    scene.host.info = None
    listed = (await scene.get("/v1/models"))[1]["data"]
    assert [(one["id"], one["max_model_len"]) for one in listed] == [
        (TINY, None),
        ("halteres--tiny", None),
    ]


async def test_a_run_that_has_published_nothing_is_not_ready_and_an_unknown_one_is_not_found(
    scene: LiveService,
) -> None:
    await scene.session(halteres_run="young")
    status, refusal = await scene.ask("/v1/chat/completions", messages=HI, model="young")
    assert (status, refusal["error"]["type"]) == (503, "service_unavailable_error")
    assert (await scene.ask("/v1/chat/completions", messages=HI, model="never"))[0] == 404


async def test_probes_of_inference_servers_are_answered(scene: LiveService) -> None:
    for path in ("/health", "/health_generate", "/ping", "/v1/health", "/version"):
        assert (await scene.get(path))[0] == 200, path
    _, info = await scene.get("/get_model_info")
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == (
        str(BASE.folder),
        "0",
        True,
    )
    await scene.host.become("starting")
    assert (await scene.get("/health"))[0] == 503


async def test_texts_become_tokens_and_tokens_texts(scene: LiveService) -> None:
    tokens = TOKENIZER.encode(PROMPT)
    answer = await whole(scene, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert (answer["tokens"], answer["count"]) == (tokens, len(tokens))
    assert answer["token_strs"] == [TOKENIZER.token(token) for token in tokens]
    chat = await whole(scene, "/tokenize", messages=HI)
    assert chat["tokens"] == TOKENIZER.apply_chat_template(HI)
    assert (await whole(scene, "/detokenize", tokens=tokens)) == {"prompt": PROMPT}


REFUSED: list[tuple[str, Any]] = [
    ("repeat_penalty", 1.1),
    ("logit_bias", {"5": 3}),
    ("bad_words", ["x"]),
    ("min_tokens", 2),
    ("ebnf", 'root ::= "x"'),
    ("guided_regex", "a+"),
    ("structured_outputs", {"choice": ["a"]}),
    ("response_format", {"type": "json_schema"}),
    ("use_beam_search", True),
    ("return_routed_experts", True),
    ("truncate_prompt_tokens", 5),
]
HARMLESS = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_p": 0,
    "response_format": {"type": "text"},
    "guided_json": None,
    "stop": None,
    "seed": None,
    "n": None,
    "use_beam_search": False,
}


@proves("sample:no-images")
async def test_fields_that_would_change_the_answer_are_refused_by_name_and_harmless_ones_pass(
    scene: LiveService,
) -> None:
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": HI})):
        for name, value in REFUSED:
            status, refusal = await scene.ask(f"/v1/{path}", **body, **{name: value})
            assert (status, refusal["error"]["param"]) == (400, name)
            assert f"`{name}`" in refusal["error"]["message"]
        await whole(scene, f"/v1/{path}", **body, **HARMLESS, max_tokens=2)
    parts = (
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
    )
    for part in parts:
        status, refusal = await scene.ask(
            "/v1/chat/completions", messages=[{"role": "user", "content": [part]}]
        )
        assert (status, part["type"] in refusal["error"]["message"]) == (400, True)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}},
    }
]
SAYS = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_tools_reach_the_template_and_calls_come_back_whole_and_streamed(
    tmp_path: Path,
) -> None:
    async with speaking(tmp_path, SAYS) as (scene, speaker):
        history = [
            *HI,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 2}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
        answer = await whole(scene, "/v1/chat/completions", messages=history, tools=TOOLS)
        text = TOKENIZER.decode(speaker.prompts[-1], skip_special_tokens=False)
        assert json.dumps(TOOLS[0]) in text
        assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in text
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
        [call] = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]) == (
            "function",
            {"name": "add", "arguments": '{"a": 1}'},
        )
        chunks = await events(scene, "/v1/chat/completions", messages=HI, tools=TOOLS)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == "I add."
        [streamed] = [one for delta in deltas for one in delta.get("tool_calls", [])]
        assert (streamed["index"], streamed["function"]) == (0, call["function"])
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        plain = await whole(
            scene, "/v1/chat/completions", messages=HI, tools=TOOLS, tool_choice="none"
        )
        assert (
            plain["choices"][0]["message"]["content"],
            plain["choices"][0]["finish_reason"],
        ) == (SAYS, "stop")
        assert "# Tools" not in TOKENIZER.decode(speaker.prompts[-1])


async def test_tools_are_told_in_words_where_the_template_has_no_place_for_them(
    tmp_path: Path,
) -> None:
    """As an environment's own chat does it: both prompts have the same tokens."""
    async with speaking(tmp_path, SAYS, template=None) as (scene, speaker):
        system = {"role": "system", "content": "Be brief."}
        asked = {"messages": [system, *HI], "tools": TOOLS}
        first = await whole(scene, "/v1/chat/completions", **asked)
        chat = EnvironmentChat(TOKENIZER, [system, *HI], TOOLS)
        assert tuple(speaker.prompts[-1]) == chat.prompt
        message = first["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert (message["content"], call["function"]["arguments"]) == ("I add.", '{"a": 1}')

        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        history = [*asked["messages"], message, result]
        chunks = await events(scene, "/v1/chat/completions", messages=history, tools=TOOLS)
        chat.go_on(first["choices"][0]["token_ids"], [result])
        assert tuple(speaker.prompts[-1]) == chat.prompt
        [streamed] = [
            one
            for chunk in chunks[:-1]
            for one in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert streamed["function"] == call["function"]

        asked = {"messages": history, "tools": TOOLS, "tool_choice": "none"}
        plain = await whole(scene, "/v1/chat/completions", **asked)
        prompt = TOKENIZER.decode(speaker.prompts[-1])
        assert ("You may call tools." in prompt, "<tool_response>" in prompt) == (False, True)
        assert plain["choices"][0]["message"]["content"] == SAYS


async def test_thinking_that_the_prompt_began_makes_no_call(tmp_path: Path) -> None:
    draft = '<tool_call>{"name": "draft", "arguments": {}}</tool_call>'
    thought = f"Shall I? {draft} No.</think>"
    begun = [*HI, {"role": "assistant", "content": "<think>"}]
    asked = {"messages": begun, "tools": TOOLS, "continue_final_message": True}
    async with speaking(tmp_path, f"{thought}{SAYS}") as (scene, _):
        answer = await whole(scene, "/v1/chat/completions", **asked, add_generation_prompt=False)
    message = answer["choices"][0]["message"]
    assert message["content"] == f"{thought}I add."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]


async def test_keywords_of_the_template_are_passed_on(tmp_path: Path) -> None:
    async with speaking(tmp_path, "Yes.") as (scene, speaker):
        await whole(
            scene,
            "/v1/chat/completions",
            messages=HI,
            chat_template_kwargs={"enable_thinking": False},
        )
        assert TOKENIZER.decode(speaker.prompts[-1]).endswith("<think></think>")
        await whole(
            scene,
            "/v1/chat/completions",
            messages=[*HI, {"role": "assistant", "content": "We"}],
            continue_final_message=True,
        )
        assert TOKENIZER.decode(speaker.prompts[-1], skip_special_tokens=False).endswith(
            "assistant\nWe"
        )


async def test_the_operators_kind_of_log_probabilities_is_told_here_too(tmp_path: Path) -> None:
    from halteres.service.service import Options

    body = ASKED | {"temperature": 0.5, "logprobs": 0, "n": 1}
    told = []
    for kind in ("raw", "tempered"):
        async with serving(tmp_path / kind, Options(sample_logprobs=kind)) as scene:
            told.append((await whole(scene, "/v1/completions", **body))["choices"][0])
    assert told[0]["token_ids"] == told[1]["token_ids"]
    assert told[0]["logprobs"]["token_logprobs"] != told[1]["logprobs"]["token_logprobs"]


async def test_a_request_may_name_its_kind_of_log_probabilities_where_the_sampler_has_it(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = ASKED | {"temperature": 0.5, "logprobs": 0, "n": 1}
    kinds = (None, "raw_logprobs", "processed_logprobs")
    told = [await whole(scene, "/v1/completions", **body, logprobs_mode=kind) for kind in kinds]
    default, raw, processed = [one["choices"][0]["logprobs"]["token_logprobs"] for one in told]
    assert default == raw != processed
    raw_alone = msgspec.structs.replace(await scene.engine.info(), logprobs=("raw",))
    monkeypatch.setattr(scene.engine, "_info", raw_alone)
    for kind, expected in (("raw_logprobs", 200), ("processed_logprobs", 400)):
        status, _ = await scene.ask("/v1/completions", **body, logprobs_mode=kind)
        assert status == expected


async def test_a_hundred_streams_at_once_do_not_mix(scene: LiveService) -> None:
    async def one(seed: int) -> tuple[str, str]:
        body = {"prompt": f"{seed} + 1 =", "max_tokens": 12, "seed": seed}
        answer, chunks = await asyncio.gather(
            whole(scene, "/v1/completions", **body), events(scene, "/v1/completions", **body)
        )
        return answer["choices"][0]["text"], "".join(
            chunk["choices"][0]["text"] for chunk in chunks[:-1]
        )

    for text, streamed in await asyncio.gather(*(one(seed) for seed in range(100))):
        assert streamed == text
