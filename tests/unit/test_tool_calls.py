"""Calls of tools: what the model wrote is what is called, whatever its strings hold and however the
text is cut.
"""

from __future__ import annotations

import json

import pytest

from halteres.tool_calls import CLOSE, OPEN, ToolCall, ToolReader, in_words, read_calls

Call = tuple[str, dict[str, object]]


def parts_of(pieces: list[str], *, keeps_broken: bool = False) -> tuple[str, list[Call]]:
    """The text and the calls of an answer that comes in pieces; a broken call is one without a
    name.
    """
    reader = ToolReader(keeps_broken=keeps_broken)
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.add("", last=True)
    prose = "".join(part for part in parts if isinstance(part, str))
    return prose, [
        (part.name, dict(part.arguments or {})) for part in parts if isinstance(part, ToolCall)
    ]


def call(name: str, **fields: object) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, **fields})}\n{CLOSE}"


TEXTS = [
    "close it with </tool_call> please",
    "</tool_call>",
    '"</tool_call>"',
    'a \\ and a \\" </tool_call> <tool_call>{"name": "other"}</tool_call>',
    "line\n</tool_call>\nline",
    "<tool_call>",
    "\\",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_call_ends_outside_of_its_strings_however_the_text_is_cut(text: str, size: int) -> None:
    answer = f"First.{call('write', arguments={'text': text})}{call('next', arguments={})}"
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    assert parts_of(pieces) == ("First.", [("write", {"text": text}), ("next", {})])


BROKEN = [
    '{"name": "add", "arguments": {"x": "open}}',
    '{"name": "add", "arguments": {"x": "line\nbreak"}}',
    'say "hi',
    "{'name': 'it\"s'}",
    '{"name": "add"} "',
    '\\"',
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_whose_quotes_do_not_match_takes_no_later_call_along(broken: str, size: int) -> None:
    first, rest = f"{OPEN}{broken}{CLOSE}", f" so {call('next', arguments={'y': 'ä'})}"
    pieces = [(first + rest)[at : at + size] for at in range(0, len(first + rest), size)]
    assert parts_of(pieces) == (f"{first} so", [("next", {"y": "ä"})])
    assert [name for name, _ in parts_of(pieces, keeps_broken=True)[1]] == ["", "next"]


@pytest.mark.parametrize(
    "fields", [{"parameters": {"x": 1}}, {"arguments": {"x": 1}, "id": "7", "more": 2}]
)
def test_arguments_by_either_of_their_names_are_those_of_the_call(
    fields: dict[str, object],
) -> None:
    assert parts_of([call("add", **fields)]) == ("", [("add", {"x": 1})])


@pytest.mark.parametrize("fields", [{}, {"id": "7", "type": "function"}])
def test_a_call_that_says_nothing_of_arguments_has_none(fields: dict[str, object]) -> None:
    assert parts_of([call("now", **fields)]) == ("", [("now", {})])


@pytest.mark.parametrize(
    "written",
    [
        call("add", args={"x": 1}),
        call("add", input={"x": 1}),
        call("add", x=1),
        call("add", arguments={"x": 1}, parameters={"x": 2}),
        call("add", arguments='{"x": 1}'),
        call("add", parameters=None),
        call("", arguments={}),
        f'{OPEN}{{"function": {{"name": "add", "arguments": {{"x": 1}}}}}}{CLOSE}',
        f'{OPEN}[{{"name": "add", "arguments": {{}}}}]{CLOSE}',
        f"{OPEN}{'[' * 100_000}{CLOSE}",
        f'{OPEN}{{"name": "add", "arguments": {{"x": 1}}, "arguments": {{"x": 2}}}}{CLOSE}',
        f'{OPEN}{{"name": "add", "name": "sub", "arguments": {{"x": 1}}}}{CLOSE}',
        f'{OPEN}{{"name": "add", "arguments": {{"x": {{"y": 1, "y": 2}}}}}}{CLOSE}',
        f'{OPEN}{{"name": "add", "arguments": {{"x": NaN}}}}{CLOSE}',
        f'{OPEN}{{"name": "add", "arguments": {{"x": 1}}}}',
        f'{OPEN}{{"name": "add", "arguments": {{"x": 1',
        OPEN,
    ],
)
def test_a_call_whose_arguments_cannot_be_read_is_text_or_an_error_and_never_a_call(
    written: str,
) -> None:
    assert parts_of([written]) == (written, [])
    (broken,) = read_calls(written)[1]
    assert broken.arguments is None
    assert broken.error


DRAFT, REAL = call("draft", arguments={"x": 1}), call("add", arguments={"x": 2})
THINKING = {
    f"<think>Shall I? {DRAFT} No. </think>\n\n{REAL}": f"<think>Shall I? {DRAFT} No. </think>",
    f"{REAL}<think>{DRAFT}": f"<think>{DRAFT}",
    f"A < b. <think>{OPEN} or </think>B.{REAL}": f"A < b. <think>{OPEN} or </think>B.",
}


@pytest.mark.parametrize("answer", THINKING)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_call_within_thinking_is_text_however_it_is_cut(answer: str, size: int) -> None:
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    assert parts_of(pieces) == (THINKING[answer], [("add", {"x": 2})])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thinking_that_the_prompt_began_makes_no_call(size: int) -> None:
    answer = f"Shall I? {DRAFT} No.</think>{REAL}"
    prose, calls = read_calls(answer)
    assert (prose, [one.name for one in calls]) == (f"Shall I? {DRAFT} No.</think>", ["add"])
    reader = ToolReader(in_thought=True)
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.add("", last=True)
    assert [part.name for part in parts if isinstance(part, ToolCall)] == ["add"]


def test_the_end_of_thinking_within_a_string_of_a_call_ends_none() -> None:
    assert [one.name for one in read_calls(call("say", arguments={"text": "</think>"}))[1]] == [
        "say"
    ]


def test_a_long_string_in_small_pieces_costs_no_time() -> None:
    """The test's own deadline holds it: looked at from its beginning for each piece, it would take
    minutes.
    """
    text = 'a"\\ </tool_call>' * 10_000
    answer = call("write", arguments={"text": text})
    pieces = [answer[at : at + 3] for at in range(0, len(answer), 3)]
    assert parts_of(pieces) == ("", [("write", {"text": text})])


@pytest.mark.parametrize("said", ["", "I write."])
@pytest.mark.parametrize("as_text", [True, False])
def test_calls_in_words_are_read_as_they_were_made(said: str, *, as_text: bool) -> None:
    """Arguments come as objects, or as the JSON text of OpenAI's API."""
    made = [{"text": text} for text in TEXTS]
    calls = [
        {"function": {"name": "write", "arguments": json.dumps(one) if as_text else one}}
        for one in made
    ]
    message = {"role": "assistant", "content": said or None, "tool_calls": calls}
    [worded] = in_words([message])
    prose, read = read_calls(worded["content"])
    assert (worded.keys(), prose) == ({"role", "content"}, said)
    assert [(call.name, call.arguments) for call in read] == [("write", one) for one in made]
