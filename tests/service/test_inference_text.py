"""From tokens to text, pieces as in the whole; calls of tools; chats as templates expect them."""

from __future__ import annotations

import random

import pytest

from halteres.errors import InvalidData
from halteres.service.context_window import ContextLengthExceeded
from halteres.service.inference.outputs import BROKEN, Cut, Detokenizer
from halteres.service.inference.requests import Chat, Prompt, render
from halteres.tokenizer import Tokenizer
from halteres.tool_calls import ToolCall, ToolReader

from .inference_fixtures import TOKENIZER


def pieces(things: list[int] | str, seed: int) -> list[list[int] | str]:
    """Cut at random places."""
    random_source, cut, at = random.Random(seed), [], 0
    while at < len(things):
        length = random_source.randint(1, 3)
        cut.append(things[at : at + length])
        at += length
    return cut


@pytest.mark.parametrize("seed", range(20))
def test_joined_pieces_are_the_text_of_the_whole_whatever_the_tokens(seed: int) -> None:
    """Random tokens are mostly broken characters: the hardest case."""
    tokens = random.Random(seed).choices(range(TOKENIZER.vocab_size), k=300)
    characters = Detokenizer(TOKENIZER)
    told = "".join(characters.add(piece) for piece in pieces(tokens, seed)) + characters.add(
        [], last=True
    )
    assert told == TOKENIZER.decode(tokens)


@pytest.mark.parametrize("seed", range(5))
def test_a_character_whose_bytes_are_spread_over_tokens_is_told_whole(seed: int) -> None:
    text = "héllo € wörld 😀 — done " * 20
    characters = Detokenizer(TOKENIZER)
    parts = [characters.add(piece) for piece in pieces(TOKENIZER.encode(text), seed)] + [
        characters.add([], last=True)
    ]
    assert "".join(parts) == text
    assert not any(BROKEN in part for part in parts)


def test_a_stop_string_is_never_told_in_part() -> None:
    for seed in range(20):
        cut = Cut(["END", "ENOUGH", "stop here"])
        parts = [
            cut.add(str(piece))
            for piece in pieces("One. EN two. stop her three. ENOUGH four.", seed)
        ]
        told = "".join(parts) + cut.add("", last=True)
        assert (told, cut.matched) == ("One. EN two. stop her three. ", "ENOUGH")
    kept = Cut(["END"], keep=True)
    assert kept.add("One END two", last=True) == "One END"
    unmatched = Cut(["END"])
    assert unmatched.add("One EN") + unmatched.add("", last=True) == "One EN"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'

ANSWERS = {
    "Plain text with < and <tool in it": ["Plain text with < and <tool in it"],
    f"I add.\n{CALL}": ["I add.", ("add", {"a": 1, "b": [2, "é"]})],
    f"\n{CALL}\n{CALL}\n": [("add", {"a": 1, "b": [2, "é"]}), ("add", {"a": 1, "b": [2, "é"]})],
    "<tool_call>not json</tool_call> so": ["<tool_call>not json</tool_call> so"],
    '<tool_call>{"name": "now"}': ['<tool_call>{"name": "now"}'],
    "<tool_call>{": ["<tool_call>{"],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls_are_told_from_text_whole_and_in_pieces(answer: str) -> None:
    for cut in ([answer], *(pieces(answer, seed) for seed in range(10))):
        reader = ToolReader()
        parts = [part for piece in cut for part in reader.add(str(piece))] + reader.add(
            "", last=True
        )
        told: list[str | tuple[str, dict[str, object]]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                assert part.index == sum(not isinstance(one, str) for one in told)
                told.append((part.name, dict(part.arguments or {})))
            elif told and isinstance(told[-1], str):
                told[-1] += part
            else:
                told.append(part)
        assert told == ANSWERS[answer]


def test_without_parallel_calls_the_first_alone_is_kept() -> None:
    reader = ToolReader(parallel=False)
    assert [
        part.index for part in reader.add(CALL + CALL, last=True) if isinstance(part, ToolCall)
    ] == [0]


def test_a_last_message_is_continued_where_it_ends() -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]
    text = render(TOKENIZER, Chat(messages=messages, continue_final_message=True))
    assert text == TOKENIZER.render(messages[:1]) + "1, 2,"


BAD_CHATS = [
    Chat(messages=[]),
    Chat(messages=[{"content": "no role"}]),
    Chat(
        messages=[
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
        ]
    ),
    Chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
    Chat(messages=[{"role": "user", "content": 5}]),
    Chat(messages=[{"role": "assistant", "tool_calls": "none"}]),
    Chat(messages=[{"role": "assistant", "tool_calls": [{"function": {}}]}]),
    Chat(messages=[{"role": "user", "content": "x"}], template_kwargs={"messages": []}),
    Chat(messages=[{"role": "user", "content": "x"}], template_kwargs={"eos_token": 1}),
    Chat(
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": {"parameters": {}}}],
    ),
]


@pytest.mark.parametrize("chat", BAD_CHATS)
def test_chats_that_the_template_cannot_take_are_refused(chat: Chat) -> None:
    with pytest.raises(InvalidData) as refusal:
        render(TOKENIZER, chat)
    assert refusal.value.what


def test_a_prompt_gets_the_token_that_begins_a_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setitem(TOKENIZER.specials, "bos_token", "<s>")
    Prompt.of("Hello", TOKENIZER, 100)
    Prompt.of("<s>Hello", TOKENIZER, 100)
    Prompt.of("<s>Hello", TOKENIZER, 100, special=True)
    assert asked == [True, False, True]


def test_a_long_text_has_the_tokens_of_its_parts_and_one_without_end_is_refused() -> None:
    line = "What is 17 + 25?\n"
    assert Prompt.of(line * 1000, TOKENIZER, 2**14).tokens == TOKENIZER.encode(line) * 1000
    with pytest.raises(ContextLengthExceeded):
        Prompt.of("x" * 129, TOKENIZER, 2)
