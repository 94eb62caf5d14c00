"""OpenAI's Responses API: items in and out, whole and as typed events; what is refused, in a
sentence.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from contract.requirements import proves

from halteres.models import TINY
from halteres.service.context_window import ContextLengthExceeded

from .inference_fixtures import TOKENIZER, TOOL_TEMPLATE, events, speaking, whole
from .live_service import LiveService, closing
from .recorded_responses import CALL, RECORDED, SAYS_TO_RESULTS, THINKS, own
from .test_fuzz import spoiled
from .test_inference_streams import fail_under_way

RUN = "r17"
ASKED = "What is 17 + 25?"
TOOL = {
    "type": "function",
    "name": "add",
    "description": "a + b",
    "parameters": {"type": "object"},
    "strict": True,
}
WITH_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def prompt_of(speaker: Any) -> str:
    return TOKENIZER.decode(speaker.prompts[-1], skip_special_tokens=False)


@proves("inference:responses", "inference:cloud-paths")
async def test_a_response_is_answered_at_every_path(scene: LiveService) -> None:
    async with closing(await scene.client(halteres_run=RUN)) as client:
        training = await client.create_lora_training_client(TINY, rank=4)
        await training.save_weights_and_get_sampling_client()
        body: dict[str, Any] = {"input": ASKED, "max_output_tokens": 8, "seed": 1}
        body |= {"ignore_eos": True, "metadata": {"task": "7"}}
        answers = [
            await whole(scene, f"{prefix}/v1/responses", **body)
            for prefix in ("", "/oai/api", f"/runs/{RUN}")
        ]
    assert [answer["model"] for answer in answers] == [TINY, TINY, RUN]
    assert own({**answers[2], "model": TINY}) == own(answers[0]) == own(answers[1])
    answer = answers[0]
    assert (answer["object"], answer["status"]) == ("response", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (answer["metadata"], answer["previous_response_id"]) == ({"task": "7"}, None)
    assert answer["policy_version"] == [0, 0]
    rendered = TOKENIZER.apply_chat_template([{"role": "user", "content": ASKED}])
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(rendered), 8)
    assert usage["total_tokens"] == len(rendered) + 8
    [message] = answer["output"]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "incomplete",
    )
    chat = await whole(
        scene,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": ASKED}],
        max_tokens=8,
        seed=1,
        ignore_eos=True,
    )
    [part] = message["content"]
    assert (part["type"], part["logprobs"]) == ("output_text", [])
    assert part["text"] == chat["choices"][0]["message"]["content"]


@proves("inference:streaming")
@pytest.mark.parametrize(
    "extra",
    [{}, {"stop": ["e", "3"]}, {"max_output_tokens": 3}, WITH_LOGPROBS],
    ids=["plain", "stopped", "cut", "logprobs"],
)
async def test_events_tell_the_whole_response(scene: LiveService, extra: dict[str, Any]) -> None:
    body = {"input": ASKED, "max_output_tokens": 40, "seed": 2, **extra}
    expected = await whole(scene, "/v1/responses", **body)
    told = await events(scene, "/v1/responses", **body)
    assert own(told[-1]["response"]) == own(expected)
    check_events(told)
    assert told[-1]["type"] == f"response.{expected['status']}"


def check_events(told: list[Any]) -> None:
    """What the types of the official client ask of a stream; each item is what its deltas make."""
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[0]["response"]["status"] == "in_progress"
    assert told[0]["response"]["id"] == told[-1]["response"]["id"]
    items, texts, entries = [], list[str](), list[Any]()
    for event in told[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts, entries = [], []
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        is_call = kind.startswith("function_call_arguments")
        assert is_call or event["content_index"] == 0
        if kind.endswith(".delta"):
            texts.append(event["delta"])
            entries += event.get("logprobs", [])
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == "".join(texts)
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == "".join(texts)
        elif kind == "content_part.done":
            assert event["part"]["text"] == "".join(texts)
            # The last tokens have no text: what ends an answer stands in the whole list alone.
            assert event["part"].get("logprobs", [])[: len(entries)] == entries
        else:
            assert (kind, event["part"]["text"]) == ("content_part.added", "")
    assert items == told[-1]["response"]["output"]


async def test_log_probabilities_are_those_of_a_chat(scene: LiveService) -> None:
    asked = {"seed": 4, "ignore_eos": True}
    answer = await whole(
        scene, "/v1/responses", input=ASKED, max_output_tokens=9, **asked, **WITH_LOGPROBS
    )
    asked |= {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 9}
    chat = await whole(scene, "/v1/chat/completions", **asked, logprobs=True, top_logprobs=2)
    expected = chat["choices"][0]["logprobs"]["content"]
    found = answer["output"][0]["content"][0]["logprobs"]
    assert len(found) == 9
    for entry, other in zip(found, expected, strict=True):
        assert (entry["token"], entry["logprob"]) == (other["token"], other["logprob"])
        assert entry["bytes"] == (other["bytes"] or [])
        assert len(entry["top_logprobs"]) == 2


@proves("inference:responses")
async def test_thinking_text_and_calls_are_items_of_their_own(tmp_path: Path) -> None:
    async with speaking(tmp_path, THINKS) as (scene, _):
        body = {"input": ASKED, "tools": [TOOL], "tool_choice": "auto"}
        answer = await whole(scene, "/v1/responses", **body)
        thinking, message, call = answer["output"]
        assert (thinking["type"], thinking["summary"]) == ("reasoning", [])
        assert thinking["content"] == [{"type": "reasoning_text", "text": "I add."}]
        assert message["content"][0]["text"] == "Let me see."
        assert (call["type"], call["name"], call["arguments"]) == (
            "function_call",
            "add",
            '{"a": 17, "b": 25}',
        )
        assert call["call_id"] != call["id"]
        assert {item["status"] for item in answer["output"]} == {"completed"}
        assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
        thought = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
        written = len(TOKENIZER.encode("<think>\nI add.\n</think>"))
        assert written - 1 <= thought <= written + 1  # a mark may share a token with its neighbour
        told = await events(scene, "/v1/responses", **body)
        check_events(told)
        assert own(told[-1]["response"]) == own(answer)
        plain = await whole(scene, "/v1/responses", **(body | {"tool_choice": "none"}))
        assert plain["output"][1]["content"][0]["text"] == f"Let me see.\n{CALL}"


async def test_log_probabilities_of_a_message_are_without_those_of_thinking_and_calls(
    tmp_path: Path,
) -> None:
    async with speaking(tmp_path, THINKS) as (scene, _):
        body = {"input": ASKED, "tools": [TOOL], "include": WITH_LOGPROBS["include"]}
        answer = await whole(scene, "/v1/responses", **body)
        told = await events(scene, "/v1/responses", **body)
    entries = answer["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries).strip() == "Let me see."
    check_events(told)
    assert own(told[-1]["response"]) == own(answer)


async def test_an_answer_that_ends_in_its_thinking_says_nothing(tmp_path: Path) -> None:
    async with speaking(tmp_path, THINKS) as (scene, speaker):
        begun = len(TOKENIZER.encode("<think>\nI"))
        body = {"input": ASKED, "max_output_tokens": begun, "ignore_eos": True}
        told = await events(scene, "/v1/responses", **body)
        check_events(told)
        assert told[-1]["type"] == "response.incomplete"
        [item] = told[-1]["response"]["output"]
        assert (item["type"], item["content"][0]["text"]) == ("reasoning", "I")
        assert item["status"] == "incomplete"
        speaker.says = ""
        [empty] = (await whole(scene, "/v1/responses", input=ASKED))["output"]
        assert (empty["type"], empty["content"][0]["text"]) == ("message", "")


READS_THINKING = TOOL_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}{{ message.content }}",
)
HISTORY: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sums."}]},
    {"role": "user", "content": ASKED},
    {"type": "reasoning", "id": "rs_1", "summary": [],
     "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add",
     "arguments": '{"a": 2}', "status": "completed"},
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 3}'},
    {"type": "function_call_output", "call_id": "c1", "output": "7"},
    {"type": "function_call_output", "call_id": "c2",
     "output": [{"type": "input_text", "text": "8"}]},
]  # fmt: skip


@proves("inference:responses")
@pytest.mark.parametrize("template", [TOOL_TEMPLATE, READS_THINKING], ids=["without", "with"])
async def test_items_are_the_chat_that_they_would_be(tmp_path: Path, template: str) -> None:
    """Thinking, text and calls of one turn are one message; thinking is read where the template
    reads it.
    """
    async with speaking(tmp_path, "15", template) as (scene, speaker):
        body = {"input": HISTORY, "instructions": "Be brief.", "tools": [TOOL]}
        await whole(scene, "/v1/responses", **body)
        prompt = prompt_of(speaker)
        function = {name: TOOL[name] for name in ("name", "description", "parameters")}
        calls = [
            {"type": "function", "id": f"c{number}",
             "function": {"name": "add", "arguments": f'{{"a": {number + 1}}}'}}
            for number in (1, 2)
        ]  # fmt: skip
        turn = {"role": "assistant", "content": "Well.", "tool_calls": calls}
        messages = [
            {"role": "system", "content": "Be brief.\n\nSums."},
            {"role": "user", "content": ASKED},
            turn | {"reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "tool", "tool_call_id": "c2", "content": "8"},
        ]
        tools = [{"type": "function", "function": function}]
        await whole(scene, "/v1/chat/completions", messages=messages, tools=tools)
        assert prompt == prompt_of(speaker)
        assert ("<think>hm</think>Well." in prompt) == (template is READS_THINKING)
        assert '"strict"' not in prompt


async def test_what_was_answered_is_taken_back_as_it_came(tmp_path: Path) -> None:
    async with speaking(tmp_path, THINKS, template=None) as (scene, speaker):
        asked = [{"role": "user", "content": ASKED}]
        answer = await whole(scene, "/v1/responses", input=asked, tools=[TOOL])
        call = answer["output"][-1]
        given = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        again = [*asked, *answer["output"], given]
        await whole(scene, "/v1/responses", input=again, tools=[TOOL])
        prompt = prompt_of(speaker)
        assert f"Let me see.\n{CALL}" in prompt
        assert "<tool_response>\n1\n</tool_response>" in prompt
        assert "I add." not in prompt


async def test_thinking_comes_back_from_a_client_that_keeps_its_encoded_form_alone(
    tmp_path: Path,
) -> None:
    """As Inspect does, which asks for it."""
    async with speaking(tmp_path, THINKS, READS_THINKING) as (scene, speaker):
        body = {"input": ASKED, "include": ["reasoning.encrypted_content"]}
        answer = await whole(scene, "/v1/responses", **body)
        thinking, message = answer["output"]
        kept = {**thinking, "content": [], "summary": []}
        for item in (thinking, kept):
            await whole(scene, "/v1/responses", input=[item, message])
            assert "<think>I add.</think>Let me see." in prompt_of(speaker)
        foreign = {**kept, "encrypted_content": "gAAAAA"}
        await whole(scene, "/v1/responses", input=[foreign, message])
        assert "<think>" not in prompt_of(speaker)
        broken = {**kept, "encrypted_content": thinking["encrypted_content"] + "?"}
        status, refusal = await scene.ask("/v1/responses", input=[broken, message])
        assert (status, "as it came" in refusal["error"]["message"]) == (400, True)


async def test_messages_of_the_assistant_in_a_row_stay_several(tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    async with speaking(tmp_path, "Three.") as (scene, speaker):
        await whole(scene, "/v1/responses", input=[*said, {"role": "user", "content": "?"}])
        assert prompt_of(speaker).count("<|im_start|>assistant") == 3


@proves("inference:responses")
@pytest.mark.parametrize("harness", sorted(RECORDED))
async def test_harnesses_are_served_as_they_ask(tmp_path: Path, harness: str) -> None:
    """Requests that were recorded: each is answered, and what a tool gave is in its prompt."""
    async with speaking(tmp_path, THINKS, template=None, context=8192) as (scene, speaker):
        speaker.says_to_results = SAYS_TO_RESULTS
        for body in RECORDED[harness]:
            if body.get("stream"):
                told = await events(scene, "/v1/responses", **body)
                check_events(told)
                answer = told[-1]["response"]
            else:
                answer = await whole(scene, "/v1/responses", **body)
            assert answer["status"] == "completed"
            kinds = [item["type"] for item in answer["output"]]
            has_result = any(item.get("type") == "function_call_output" for item in body["input"])
            if has_result:
                results = prompt_of(speaker).partition("<tool_response>")[2]
                assert "42\n" in results and "</tool_response>" in results
                assert kinds == ["message"]
            else:
                assert f'"name": "{body["tools"][0]["name"]}"' in prompt_of(speaker)
                assert kinds == ["reasoning", "message", "function_call"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "Send the whole conversation"),
    ({"conversation": "conv_1"}, "conversation", "Send the whole conversation"),
    ({"background": True}, "background", "read a stream"),
    ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "name"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "ad"}}, "tool_choice", "add"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "by its name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "no schema"),
    ({"text": {"format": {}}}, "text.format", "json_schema"),
    ({"text": {"verbosity": "low"}}, "verbosity", "not supported"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "template does not read it"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"n": 2}, "n", "Send several requests"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "messages", "`input`"),
    ({"input": []}, "input", "no message"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "nothing is kept here"),
    ({"input": [{"role": "critic", "content": "Hi"}]}, "input", "'critic'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text only"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input", "no name"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens", "`max_output_tokens` is 0"),
]  # fmt: skip


async def test_what_is_not_served_is_refused_in_a_sentence(scene: LiveService) -> None:
    for extra, param, words in REFUSED:
        status, refusal = await scene.ask("/v1/responses", **{"input": ASKED, **extra})
        error = refusal["error"]
        assert (status, error["type"]) == (400, "invalid_request_error"), (extra, refusal)
        assert error["param"] in (param, None), (extra, refusal)
        assert words in error["message"], (extra, refusal)


async def test_what_asks_for_nothing_is_passed_over(scene: LiveService) -> None:
    neutral = {
        "previous_response_id": None,
        "background": False,
        "store": True,
        "truncation": "auto",
        "user": "me",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "stream_options": {"include_obfuscation": False},
        "tools": None,
        "temperature": None,
    }
    body = {"input": ASKED, "max_output_tokens": 4, "seed": 1}
    answers = [await whole(scene, "/v1/responses", **body, **more) for more in ({}, neutral)]
    assert own(answers[0]) == own(answers[1])


@proves("inference:overflow")
async def test_a_conversation_that_is_too_long_is_an_overflow_in_openais_words(
    scene: LiveService,
) -> None:
    for extra in ({}, {"stream": True}, {"truncation": "auto"}):
        status, refusal = await scene.ask("/v1/responses", input="1 2 " * 1500, **extra)
        error = refusal["error"]
        assert (status, error["code"]) == (400, ContextLengthExceeded.code)
        assert error["message"].startswith("This model's maximum context length is 2048 tokens")
    answer = await whole(
        scene, "/v1/responses", input=ASKED, max_output_tokens=5000, ignore_eos=True
    )
    assert answer["truncated_max_tokens"] == answer["usage"]["output_tokens"] < 5000


async def test_a_response_that_fails_under_way_says_so_in_its_last_event(
    scene: LiveService,
) -> None:
    fail_under_way(scene)
    told = await events(scene, "/v1/responses", input=ASKED, ignore_eos=True)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    failed = told[-1]["response"]
    assert (told[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert failed["error"]["code"] == "server_error"
    assert "The device is lost" in failed["error"]["message"]
    assert failed["id"] == told[0]["response"]["id"]


@pytest.mark.parametrize("seed", range(4))
async def test_strange_bodies_are_refused_with_a_sentence(scene: LiveService, seed: int) -> None:
    """Whatever stands in whatever place: an answer or one sentence, never a fault of ours."""
    chance = random.Random(seed)
    right: dict[str, Any] = {
        "input": HISTORY,
        "instructions": "Be brief.",
        "max_output_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None},
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "seed": 1,
        **WITH_LOGPROBS,
    }
    statuses = Counter[int]()
    for _ in range(100):
        body = spoiled(right, chance)
        for _ in range(chance.randint(0, 2)):
            body = spoiled(body, chance)
        sent = json.dumps(body).encode()
        async with scene.http.post(f"{scene.url}/v1/responses", data=sent) as response:
            answer = await response.json()
            statuses[response.status] += 1
        assert response.status in (200, 400, 404), (seed, sent, answer)
        if response.status != 200:
            message = answer["error"]["message"]
            assert 15 < len(message) < 1500, (sent, message)
    assert statuses[200] and statuses[400] > 20, statuses
