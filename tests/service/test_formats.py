"""Formats, guides and forced calls: one grammar, of whatever dialect, and answers that fit it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from halteres.engine.protocol import Calls, Grammar
from halteres.engine.torch import TorchEngine
from halteres.errors import InvalidData, NotReady
from halteres.loopback import open_listener
from halteres.service.fleet import Fleet
from halteres.service.gateway.gateway import gateway_over
from halteres.service.inference.formats import (
    FormatFields,
    callable_tools,
    grammar_of_answer,
    grammar_of_format,
)
from halteres.service.server import ServiceServer
from halteres.service.service import locked, opened

from .inference_fixtures import events, read, whole
from .live_service import BASE, InProcess, LiveService

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "tell"}}
HI = [{"role": "user", "content": "What is 9 + 8?"}]
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA},
}


def fields(**given: Any) -> FormatFields:
    return msgspec.convert(given, FormatFields)


def calls_of(grammar: Grammar | None) -> Calls:
    assert grammar is not None
    assert grammar.kind == "calls"
    return msgspec.json.decode(grammar.text, type=Calls)


# One grammar


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": STRICT}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_json": {}}, "json_schema", {}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "start: /a/"}, "lark", "start: /a/"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ],
)
def test_every_way_to_ask_for_a_form_is_one_grammar(
    given: dict[str, Any], kind: str | None, value: Any
) -> None:
    found = fields(**given).grammar
    if kind is None:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.field) == (kind, next(iter(given)))
    written = found.text
    assert (written if kind in ("regex", "lark") else json.loads(written)) == value


def test_a_format_is_read_in_openais_and_in_anthropics_form() -> None:
    flat = {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}
    own, other = grammar_of_format(STRICT, "text"), grammar_of_format(flat, "text")
    assert own == other
    assert own is not None
    assert own.field == "text"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": STRICT, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs"),
    ],
)
def test_what_asks_for_no_form_or_for_two_is_refused_by_name(
    given: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidData) as refused:
        _ = fields(**given).grammar
    assert refused.value.details["param"] == name


# Calls


def test_a_forced_call_is_all_of_the_answer() -> None:
    for required in ("required", "any", {"type": "any"}):
        calls = calls_of(grammar_of_answer(fields(), [TOOL, OTHER], required, several=True))
        assert [one.name for one in calls.tools] == ["add", "tell"]
        assert calls.several
        assert calls.otherwise is msgspec.UNSET
    for named in (
        {"type": "function", "function": {"name": "tell"}},
        {"type": "function", "name": "tell"},
        {"type": "tool", "name": "tell"},
    ):
        calls = calls_of(grammar_of_answer(fields(), [TOOL, OTHER], named, several=False))
        assert [(one.name, one.arguments) for one in calls.tools] == [("tell", {"type": "object"})]
        assert not calls.several


def test_where_a_call_is_free_the_answer_may_also_be_of_the_format() -> None:
    """Not of a guide, which is all of the answer whatever it says."""
    asked = fields(response_format=STRICT)
    for choice in (None, "auto", {"type": "auto"}):
        assert calls_of(grammar_of_answer(asked, [TOOL], choice, several=True)).otherwise == SCHEMA
    for tools, choice in (([], None), ([], "none")):
        assert grammar_of_answer(asked, tools, choice, several=True) == asked.grammar
    guided = fields(guided_json=SCHEMA)
    assert grammar_of_answer(guided, [TOOL], "auto", several=True) == guided.grammar
    assert grammar_of_answer(fields(), [TOOL], "auto", several=True) is None


def test_no_tool_is_told_of_where_none_may_be_called() -> None:
    assert callable_tools([TOOL], "none") == callable_tools([TOOL], {"type": "none"}) == []
    assert callable_tools([TOOL], "required") == callable_tools([TOOL], None) == [TOOL]


@pytest.mark.parametrize(
    ("given", "tools", "choice", "name"),
    [
        ({}, [], "required", "tool_choice"),
        ({}, [TOOL], {"type": "function", "function": {"name": "ad"}}, "tool_choice"),
        ({}, [TOOL], "sometimes", "tool_choice"),
        ({}, [TOOL], 5, "tool_choice"),
        ({}, [TOOL], {"type": "allowed_tools"}, "tool_choice"),
        ({"response_format": STRICT}, [TOOL], "required", "response_format"),
        ({}, [{"type": "function"}], "required", "tools"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused_by_name(
    given: dict[str, Any], tools: list[dict[str, Any]], choice: Any, name: str
) -> None:
    with pytest.raises(InvalidData) as refused:
        grammar_of_answer(fields(**given), tools, choice, several=True)
    assert refused.value.details["param"] == name


# Answers of the built-in model


class RealEngine(InProcess):
    """A host of the built-in model's own engine."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = TorchEngine(BASE.folder, BASE.name)  # type: ignore[assignment]

    async def die(self) -> None:
        self.failure = NotReady("The engine (process 1) died.")
        await self.scripted.close()
        self.scripted = TorchEngine(BASE.folder, BASE.name)  # type: ignore[assignment]
        self.restarts += 1
        await self.become(self.state)


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[LiveService]:
    """A service over the built-in model."""
    host = RealEngine()
    with locked(tmp_path / "state"), open_listener(0) as bound:
        async with (
            opened(tmp_path / "state", BASE, Fleet.of(host)) as service,
            gateway_over(service) as gateway,
            aiohttp.ClientSession() as http,
        ):
            await host.start()
            server = ServiceServer(service, gateway)
            running = asyncio.create_task(server.serve(sockets=[bound]))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            try:
                yield LiveService(url, service, host, http, server, gateway)
            finally:
                await http.close()
                server.end()
                server.force_exit = True
                await running


def fits(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["sum"] and 0 <= value["sum"] <= 99


async def test_every_dialect_holds_an_answer_to_its_form(real: LiveService) -> None:
    common: dict[str, Any] = {"max_tokens": 200, "seed": 3}
    chat = {"messages": HI, **common}

    answer = await whole(real, "/v1/chat/completions", **chat, n=3, response_format=STRICT)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert fits(choice["message"]["content"])
    told = await events(real, "/v1/chat/completions", **chat, n=3, response_format=STRICT)
    for at, choice in enumerate(answer["choices"]):
        pieces = [one["choices"][0] for one in told if one != "[DONE]"]
        own = [one["delta"].get("content", "") for one in pieces if one["index"] == at]
        assert "".join(own) == choice["message"]["content"]

    answer = await whole(
        real, "/v1/chat/completions", **chat, response_format={"type": "json_object"}
    )
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)

    answer = await whole(
        real, "/v1/completions", prompt="9 + 8 = ", **common, guided_regex="1[0-9]"
    )
    assert re.fullmatch("1[0-9]", answer["choices"][0]["text"])

    for params in ({"json_schema": json.dumps(SCHEMA)}, {"regex": r'\{"sum": [1-9]\}'}):
        sampling = {"max_new_tokens": 200, "sampling_seed": 3, **params}
        answer = await whole(real, "/generate", text="9 + 8", sampling_params=sampling)
        assert fits(answer["text"])

    guides = {"structured_outputs": {"json": SCHEMA}}
    answer = await whole(real, "/generate", prompt="9 + 8", **common, **guides)
    assert fits(answer["text"][0].removeprefix("9 + 8"))

    sampling = {**common, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = await whole(real, "/inference/v1/generate", token_ids=[5, 9], sampling_params=sampling)
    [choice] = answer["choices"]
    said = real.service.tokenizer.decode(choice["token_ids"])
    assert (said in ("yes", "no"), choice["finish_reason"]) == (True, "stop")

    form = {"type": "json_schema", "name": "sum", "schema": SCHEMA}
    body = {"input": "What is 9 + 8?", "max_output_tokens": 200, "text": {"format": form}}
    answer = await whole(real, "/v1/responses", **body)
    assert fits(answer["output"][0]["content"][0]["text"])
    assert answer["text"]["format"] == form

    for form in (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ):
        answer = await whole(real, "/v1/messages", messages=HI, max_tokens=200, **form)
        assert fits(answer["content"][0]["text"])


async def test_a_forced_call_comes_back_as_a_call_in_every_dialect(real: LiveService) -> None:
    chat = {"messages": HI, "max_tokens": 300, "seed": 1, "tools": [TOOL, OTHER]}
    named = {"type": "function", "function": {"name": "add"}}
    for choice, parallel in (("required", False), (named, False), (named, True)):
        body = {**chat, "tool_choice": choice, "parallel_tool_calls": parallel}
        answer = await whole(real, "/v1/chat/completions", **body)
        [found] = answer["choices"]
        if found["finish_reason"] == "length":
            continue
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        calls = found["message"]["tool_calls"]
        assert calls if parallel else len(calls) == 1
        for call in calls:
            if call["function"]["name"] == "add":
                assert fits(call["function"]["arguments"])
            else:
                assert choice == "required"
    told = await events(
        real, "/v1/chat/completions", **{**chat, "tool_choice": named, "parallel_tool_calls": False}
    )
    deltas = [one["choices"][0]["delta"] for one in told if one != "[DONE]"]
    [call] = [call for one in deltas for call in one.get("tool_calls", ())]
    assert fits(call["function"]["arguments"])

    body = {"input": "What is 9 + 8?", "max_output_tokens": 300, "parallel_tool_calls": False}
    body["tools"] = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    for choice in ("required", {"type": "function", "name": "add"}):
        answer = await whole(real, "/v1/responses", **body, tool_choice=choice)
        [item] = answer["output"]
        assert (item["type"], fits(item["arguments"])) == ("function_call", True)

    tool = {"name": "add", "input_schema": SCHEMA}
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        answer = await whole(
            real,
            "/v1/messages",
            messages=HI,
            max_tokens=300,
            tools=[tool],
            tool_choice={**choice, "disable_parallel_tool_use": True},
        )
        assert answer["stop_reason"] == "tool_use"
        [block] = answer["content"]
        assert (block["type"], fits(json.dumps(block["input"]))) == ("tool_use", True)


async def test_after_an_engines_death_its_successor_writes_the_same_answer(
    real: LiveService,
) -> None:
    """Whole and as a stream, which goes on where it ended."""
    body = {"prompt": "9 + 8 = ", "max_tokens": 400, "seed": 4, "n": 2, "guided_regex": "[0-9 ]*"}
    body |= {"presence_penalty": 0.2, "temperature": 1.5, "min_p": 0.02}
    answer = await whole(real, "/v1/completions", **body)
    tokens = [one["token_ids"] for one in answer["choices"]]
    asked = asyncio.create_task(whole(real, "/v1/completions", **body))
    stream = {**body, "stream": True, "return_token_ids": True}
    async with real.http.post(f"{real.url}/v1/completions", json=stream) as response:
        lines = [await response.content.readline()]
        await real.host.die()
        lines += [line async for line in response.content]
    assert [one["token_ids"] for one in (await asked)["choices"]] == tokens
    chunks = [read(line)["choices"][0] for line in lines if b"token_ids" in line]
    for at, own in enumerate(tokens):
        told = [one["token_ids"] for one in chunks if one["index"] == at]
        assert [token for some in told for token in some] == own
    assert real.host.restarts == 1


async def test_a_grammar_that_cannot_be_used_is_a_400_also_for_a_stream(real: LiveService) -> None:
    """In one sentence, with the name of the field."""
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "format": "nope"}}}
    for stream in (False, True):
        status, refusal = await real.ask(
            "/v1/chat/completions", messages=HI, response_format=bad, stream=stream
        )
        assert (status, refusal["error"]["param"]) == (400, "response_format")
        assert "nope" in refusal["error"]["message"]


async def test_an_engine_without_grammars_refuses_them_by_name(scene: LiveService) -> None:
    for name, value in (("response_format", STRICT), ("guided_regex", "a")):
        status, refusal = await scene.ask(
            "/v1/chat/completions", messages=HI, max_tokens=3, **{name: value}
        )
        assert status == 400
        assert f"`{name}`" in refusal["error"]["message"]
    status, refusal = await scene.ask(
        "/v1/chat/completions", messages=HI, max_tokens=3, tools=[TOOL], tool_choice="required"
    )
    assert (status, "`tool_choice`" in refusal["error"]["message"]) == (400, True)


async def test_penalties_and_min_p_are_read_in_every_dialect(scene: LiveService) -> None:
    """With a frequency penalty of 2 the scripted model repeats less than without; a value out of
    range is a 400 with its name.
    """
    common = {"max_tokens": 64, "seed": 7, "temperature": 0, "ignore_eos": True}
    shy = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.3}
    for path, body, tokens_of in (
        ("/v1/completions", {"prompt": [5]}, lambda it: it["choices"][0]["token_ids"]),
        ("/v1/chat/completions", {"messages": HI}, lambda it: it["choices"][0]["token_ids"]),
        ("/generate", {"prompt": "5"}, lambda it: it["token_ids"][0]),
        ("/generate", {"text": "5"}, lambda it: it["output_ids"]),
        ("/inference/v1/generate", {"token_ids": [5]}, lambda it: it["choices"][0]["token_ids"]),
    ):

        def asked(path: str, body: dict[str, Any], **extra: Any) -> dict[str, Any]:
            sampling = {**common, **extra}
            if "text" in body:
                sampling["max_new_tokens"] = sampling.pop("max_tokens")
            if "text" in body or "token_ids" in body:
                sampling = {"sampling_params": sampling}
            return {**body, **sampling}

        plain = tokens_of(await whole(scene, path, **asked(path, body)))
        told = tokens_of(await whole(scene, path, **asked(path, body, **shy)))
        assert len(set(told)) > len(set(plain))
        for name, value in (("min_p", 1.5), ("frequency_penalty", 3), ("repetition_penalty", 0)):
            status, refusal = await scene.ask(path, **asked(path, body, **{name: value}))
            assert (status, name in json.dumps(refusal)) == (400, True)
