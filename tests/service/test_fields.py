"""Every field of an inference request is read, refused by name, or known to change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from contract.requirements import proves
from starlette.routing import Route

from halteres.service.inference import fields
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import Dialect
from halteres.service.inference.routes import InferenceRoutes

from .inference_fixtures import whole
from .live_service import LiveService

HI = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "1", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 2}}),
    ("/generate", {"prompt": "1", "max_tokens": 2}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
    ("/tokenize", {"prompt": "1"}),
    ("/detokenize", {"tokens": [5]}),
]
SAMPLED = [one for one in BODIES if "tok" not in one[0]]
DIALECTS = {name: value for name, value in vars(fields).items() if isinstance(value, Dialect)}

UNREAD: list[dict[str, Any]] = [
    {"repeat_penalty": 1.3},
    {"grammar": 'root ::= "x"'},
    {"n_predict": 3},
    {"no_repeat_ngram_size": 2},
    {"response_schema": {"type": "object"}},
    {"reasoning": {"effort": "high"}},
    {"num_beams": 4},
    {"max_length": 3},
    {"min_length": 3},
    {"do_sample": False},
    {"include": ["message.output_text.logprobs"]},
    {"stop_strings": ["1"]},
    {"watermarking": True},
    {"mirostat": 2},
    {"enable_thinking": False},
    {"logits_bias": {"5": 1}},
]


READ = {"/v1/responses": {"reasoning", "include"}}
"""Of these, what a route reads."""


def named(refusal: Any) -> str:
    """What a refusal says of the field, in any route's shape."""
    error = refusal.get("error")
    return error["message"] if isinstance(error, dict) else refusal["detail"]


async def refused(scene: LiveService, path: str, body: dict[str, Any], name: str) -> bool:
    status, refusal = await scene.ask(path, **body)
    assert status == 400, (path, body, refusal)
    return f"`{name}`" in named(refusal)


async def test_no_inference_route_passes_over_a_field_that_nobody_reads(scene: LiveService) -> None:
    """Also one that is added later: it needs a body here."""
    routes = InferenceRoutes(Inference(scene.service)).table()
    posted = {
        one.path for one in routes if isinstance(one, Route) and "POST" in (one.methods or ())
    }
    assert posted == {path for path, _ in BODIES}
    for path, body in BODIES:
        await whole(scene, path, **body)
        assert await refused(scene, path, {**body, "nobody_reads_this": 1}, "nobody_reads_this")
        await whole(scene, path, **body, nobody_reads_this=None)


@pytest.mark.parametrize(("path", "body"), SAMPLED)
async def test_fields_of_other_servers_that_would_change_the_answer_are_refused_by_name(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    for field in UNREAD:
        [name] = field
        if name not in READ.get(path, ()):
            assert await refused(scene, path, {**body, **field}, name)


EMPTY: list[tuple[str, Any, bool]] = [
    ("guided_json", {}, True),
    ("guided_choice", [], True),
    ("guided_regex", "", True),
    ("response_format", {}, True),
    ("structured_outputs", {}, True),
    ("allowed_token_ids", [], True),
    ("guided_json", None, False),
    ("response_format", None, False),
    ("response_format", {"type": "text"}, False),
    ("min_p", 0.0, False),
    ("use_beam_search", False, False),
    ("logit_bias", {}, False),
    ("bad_words", [], False),
    ("vllm_xargs", {}, False),
    ("repetition_penalty", 1, False),
]
"""A field, an empty or neutral value, and whether it asks for something."""


@pytest.mark.parametrize(("path", "body"), SAMPLED)
async def test_an_empty_value_is_refused_where_it_asks_for_something(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    for name, value, asks in EMPTY:
        given = {**body, name: value}
        if "sampling_params" in body:
            given = {**body, "sampling_params": {**body["sampling_params"], name: value}}
        if asks:
            assert await refused(scene, path, given, name)
        else:
            await whole(scene, path, **given)


async def test_an_empty_search_is_a_search(scene: LiveService) -> None:
    body = {"messages": HI, "max_tokens": 2, "web_search_options": {}}
    assert await refused(scene, "/v1/chat/completions", body, "web_search_options")


def test_every_refused_field_that_may_be_empty_is_a_field() -> None:
    refused_fields = {name for dialect in DIALECTS.values() for name in dialect.refused}
    assert refused_fields >= fields.NOTHING_IF_EMPTY


async def test_a_field_within_another_is_read_or_refused_like_one_at_the_top(
    scene: LiveService,
) -> None:
    for path, body, name in (
        ("/generate", {"text": "1", "sampling_params": {"max_tokens": 2}}, "max_tokens"),
        ("/generate", {"text": "1", "sampling_params": {"repeat_penalty": 2}}, "repeat_penalty"),
        ("/generate", {"prompt": {"prompt": "1", "cache": 1}}, "cache"),
        (
            "/v1/completions",
            {"prompt": "1", "structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "whitespace_pattern",
        ),
        (
            "/v1/completions",
            {"prompt": "1", "stream": True, "stream_options": {"every": 1}},
            "every",
        ),
        (
            "/v1/messages",
            {"messages": HI, "max_tokens": 2, "tool_choice": {"type": "auto", "force": 1}},
            "force",
        ),
    ):
        assert await refused(scene, path, body, name)


async def test_a_refusal_names_the_field_that_was_meant_or_the_place_of_it(
    scene: LiveService,
) -> None:
    for path, body, meant in (
        ("/v1/completions", {"prompt": "1", "n_predict": 3}, "max_tokens"),
        ("/v1/completions", {"prompt": "1", "stop_sequences": ["1"]}, "stop"),
        ("/v1/completions", {"prompt": "1", "max_tokes": 3}, "max_tokens"),
        ("/v1/chat/completions", {"messages": HI, "system": "Be brief."}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": HI, "reasoning": {"effort": "low"}},
            "reasoning_effort",
        ),
        ("/v1/responses", {"input": "1", "messages": HI}, "input"),
        ("/v1/responses", {"input": "1", "max_completion_tokens": 3}, "max_output_tokens"),
        ("/generate", {"text": "1", "sampling_params": {"n_predict": 3}}, "max_new_tokens"),
        ("/generate", {"text": "1", "max_new_tokens": 3}, "sampling_params"),
    ):
        status, refusal = await scene.ask(path, **body)
        assert (status, f"`{meant}`" in named(refusal)) == (400, True), refusal


async def test_an_answer_of_no_length_is_refused_by_the_name_that_was_sent(
    scene: LiveService,
) -> None:
    for path, body, name in (
        ("/v1/completions", {"prompt": "1", "max_tokens": 0}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": HI, "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        ("/v1/responses", {"input": "1", "max_output_tokens": 0}, "max_output_tokens"),
        ("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ):
        status, refusal = await scene.ask(path, **body)
        assert (status, f"`{name}` is 0" in named(refusal)) == (400, True), refusal


async def test_vllms_generate_refuses_sampling_params_rather_than_pass_over_them(
    scene: LiveService,
) -> None:
    body = {"prompt": "1", "sampling_params": {"max_tokens": 3}}
    assert await refused(scene, "/generate", body, "sampling_params")


@pytest.mark.parametrize("max_tokens", [None, 2, 8])
async def test_max_completion_tokens_is_the_newer_name_of_max_tokens_and_wins(
    scene: LiveService, max_tokens: int | None
) -> None:
    body = {
        "messages": HI,
        "max_tokens": max_tokens,
        "max_completion_tokens": 5,
        "ignore_eos": True,
    }
    answer = await whole(scene, "/v1/chat/completions", **body)
    assert answer["usage"]["completion_tokens"] == 5


async def test_sglangs_own_seed_wins_over_ours(scene: LiveService) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True}

    async def drawn(**seeds: int) -> list[int]:
        return (await whole(scene, "/generate", text="1", sampling_params={**params, **seeds}))[
            "output_ids"
        ]

    assert await drawn(sampling_seed=1, seed=2) == await drawn(seed=1) != await drawn(seed=2)


async def test_a_message_ends_at_the_texts_of_either_field(scene: LiveService) -> None:
    body = {"messages": HI, "max_tokens": 200, "seed": 1}
    text = (await whole(scene, "/v1/messages", **body))["content"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    for field in ("stop", "stop_sequences"):
        answer = await whole(scene, "/v1/messages", **body, **{field: [stop]})
        assert answer["stop_sequence"] == stop


async def test_several_messages_at_once_are_refused(scene: LiveService) -> None:
    assert await refused(scene, "/v1/messages", {"messages": HI, "max_tokens": 2, "n": 2}, "n")
    await whole(scene, "/v1/messages", messages=HI, max_tokens=2, n=1)


@proves("inference:harmless")
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_harmless_fields_of_each_dialect_change_nothing(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    dialect = {
        "/v1/completions": fields.COMPLETIONS,
        "/v1/chat/completions": fields.CHAT,
        "/v1/responses": fields.RESPONSES,
        "/generate": fields.VLLM if "prompt" in body else fields.SGLANG,
        "/inference/v1/generate": fields.TOKENS,
    }.get(path, fields.MESSAGES if "messages" in path else fields.TOKENIZE)
    assert {"cache_salt", "priority", "routed_experts_prompt_start"} <= set(dialect.harmless)
    seeded = dict(body)
    if (path, body) in SAMPLED:
        seeded["seed"] = 3
    if "sampling_params" in body:
        seeded = {**body, "sampling_params": {**body["sampling_params"], "seed": 3}}
    without = await whole(scene, path, **seeded)
    for name in dialect.harmless:
        answer = await whole(scene, path, **seeded, **{name: 7})
        assert comparable(answer) == comparable(without), name
    answer = await whole(scene, path, **seeded, **dict.fromkeys(dialect.harmless, 7))
    assert comparable(answer) == comparable(without)


def comparable(answer: Any) -> Any:
    """An answer without what differs from request to request: its id, its times."""
    if isinstance(answer, dict):
        own = ("id", "created", "created_at", "completed_at", "e2e_latency", "request_id")
        return {name: comparable(value) for name, value in answer.items() if name not in own}
    if isinstance(answer, list):
        return [comparable(value) for value in answer]
    return answer


def test_each_harmless_field_has_a_source_and_is_neither_refused_nor_read() -> None:
    assert DIALECTS
    for dialect in DIALECTS.values():
        assert all(dialect.harmless.values())
        assert not set(dialect.harmless) & set(dialect.refused)


async def test_the_tinker_api_goes_on_passing_over_what_it_does_not_know(
    scene: LiveService,
) -> None:
    assert (await scene.post("create_session", {"tags": [], "nobody_reads_this": 1}))[0] == 200
