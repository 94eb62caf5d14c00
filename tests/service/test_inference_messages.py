"""Anthropic's messages: whole, as events, with tools, under the hosted service's path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from contract.requirements import proves

from .inference_fixtures import TOKENIZER, events, speaking
from .live_service import LiveService

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "add", "description": "a + b", "input_schema": {"type": "object"}}
SAYS = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def whole(scene: LiveService, **body: Any) -> Any:
    status, answer = await scene.ask("/anthropic/api/v1/messages", **body)
    assert status == 200, answer
    return answer


@proves("inference:cloud-paths")
async def test_a_message_is_answered_at_every_path(scene: LiveService) -> None:
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    body = {
        "messages": HI,
        "system": system,
        "max_tokens": 8,
        "seed": 1,
        "temperature": 0.5,
        "metadata": {},
    }
    answers = []
    for path in ("/v1/messages", "/anthropic/api/v1/messages"):
        status, answer = await scene.ask(path, **body)
        assert status == 200
        assert (answer.pop("id")[:4], answer["type"], answer["role"]) == (
            "msg_",
            "message",
            "assistant",
        )
        answers.append(answer)
    assert answers[0] == answers[1]
    rendered = TOKENIZER.apply_chat_template([{"role": "system", "content": "Be brief."}, *HI])
    assert answers[0]["usage"]["input_tokens"] == len(rendered)
    assert answers[0]["policy_version"] == [0, 0]
    [block] = answers[0]["content"]
    assert block["type"] == "text"
    _, counted = await scene.ask("/v1/messages/count_tokens", messages=HI, system=system)
    assert counted == {"input_tokens": len(rendered)}


@proves("inference:streaming")
@pytest.mark.parametrize("extra", [{}, {"stop_sequences": ["e", "3"]}, {"max_tokens": 2}])
async def test_events_tell_the_whole_message(scene: LiveService, extra: dict[str, Any]) -> None:
    body = {"messages": HI, "max_tokens": 40, "seed": 2, **extra}
    expected = await whole(scene, **body)
    told = await events(scene, "/v1/messages", **body)
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert told[0]["message"]["usage"] == {
        "input_tokens": expected["usage"]["input_tokens"],
        "output_tokens": 0,
    }
    text = "".join(
        event["delta"]["text"] for event in told if event["type"] == "content_block_delta"
    )
    assert text == expected["content"][0]["text"]
    assert told[-2]["delta"] == {name: expected[name] for name in ("stop_reason", "stop_sequence")}
    assert (told[-2]["usage"], told[-2]["policy_version"]) == (expected["usage"], [0, 0])


async def test_the_reason_why_a_message_ended_is_told_in_its_own_words(tmp_path: Path) -> None:
    async with speaking(tmp_path, "One, two, three.") as (scene, _):
        ended = await whole(scene, messages=HI, max_tokens=100)
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
        stopped = await whole(scene, messages=HI, max_tokens=100, stop_sequences=["four", "three"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
        assert stopped["content"][0]["text"] == "One, two, "


async def test_a_message_of_the_assistant_at_the_end_is_continued(tmp_path: Path) -> None:
    async with speaking(tmp_path, " two") as (scene, speaker):
        await whole(scene, messages=[*HI, {"role": "assistant", "content": "One,"}], max_tokens=5)
        assert TOKENIZER.decode(speaker.prompts[-1], skip_special_tokens=False).endswith(
            "assistant\nOne,"
        )


async def test_tools_are_called_and_their_results_read(tmp_path: Path) -> None:
    async with speaking(tmp_path, SAYS) as (scene, speaker):
        history = [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Well."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "7"}],
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ]
        body = {
            "messages": history,
            "max_tokens": 99,
            "tools": [TOOL],
            "tool_choice": {"type": "auto"},
        }
        answer = await whole(scene, **body)
        prompt = TOKENIZER.decode(speaker.prompts[-1], skip_special_tokens=False)
        assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in prompt
        assert "tool\n7<|im_end|>\n<|im_start|>user\nGo on." in prompt
        assert '"parameters": {"type": "object"}' in prompt
        assert "hm" not in prompt
        text, call = answer["content"]
        assert text == {"type": "text", "text": "I add."}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        told = await events(scene, "/v1/messages", **body)
        starts = [
            event["content_block"]["type"]
            for event in told
            if event["type"] == "content_block_start"
        ]
        assert starts == ["text", "tool_use"]
        arguments = [
            event["delta"]["partial_json"]
            for event in told
            if event.get("index") == 1 and "delta" in event
        ]
        assert json.loads("".join(arguments)) == {"a": 1}
        assert told[-2]["delta"]["stop_reason"] == "tool_use"
        status, refusal = await scene.ask(
            "/v1/messages", **(body | {"tool_choice": {"type": "sometimes"}})
        )
        assert (status, refusal["error"]["type"]) == (400, "invalid_request_error")


async def test_tools_are_told_in_words_where_the_template_has_no_place_for_them(
    tmp_path: Path,
) -> None:
    """The call that comes back is written into the next prompt as the model wrote it."""
    async with speaking(tmp_path, SAYS, template=None) as (scene, speaker):
        body = {"messages": HI, "max_tokens": 99, "tools": [TOOL]}
        answer = await whole(scene, **body)
        told = TOKENIZER.decode(speaker.prompts[-1])
        assert '"name": "add", "parameters": {"type": "object"}' in told
        [text, call] = answer["content"]
        assert (text["text"], call["input"], answer["stop_reason"]) == (
            "I add.",
            {"a": 1},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "7"}
        history = [
            *HI,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]
        streamed = await events(scene, "/v1/messages", **(body | {"messages": history}))
        told = TOKENIZER.decode(speaker.prompts[-1])
        assert SAYS in told and "<tool_response>\n7\n</tool_response>" in told
        assert streamed[-2]["delta"]["stop_reason"] == "tool_use"
        _, counted = await scene.ask("/v1/messages/count_tokens", messages=history, tools=[TOOL])
        assert counted == {"input_tokens": len(speaker.prompts[-1])}
