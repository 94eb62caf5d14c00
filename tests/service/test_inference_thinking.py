"""What a model thinks and says, told apart in pieces as in the whole."""

from __future__ import annotations

import pytest

from halteres.service.inference.thinking import MessageTokens, Sections

from .test_inference_text import pieces

WRITTEN: list[tuple[str, list[tuple[str, str]]]] = [
    ("17 + 25 is 42.", [("message", "17 + 25 is 42.")]),
    ("<think>\nhm\n</think>\n\nYes. ", [("reasoning", "hm"), ("message", "Yes. ")]),
    ("<think>\n\n</think>\n\nYes.", [("message", "Yes.")]),
    ("One <think>two</think> three", [("message", "One"), ("reasoning", "two"), ("message", "three")]),
    ("<think>never ends", [("reasoning", "never ends")]),
    ("a < b, </think> is no mark here", [("message", "a < b, </think> is no mark here")]),
    (" <thin", [("message", " <thin")]),
    ("", []),
]  # fmt: skip


def joined(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one kind as one."""
    found = list[tuple[str, str]]()
    for kind, text in parts:
        if found and found[-1][0] == kind:
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


@pytest.mark.parametrize(("text", "expected"), WRITTEN)
def test_thinking_and_text_are_told_apart_wherever_the_pieces_break(
    text: str, expected: list[tuple[str, str]]
) -> None:
    assert joined(Sections(in_thought=False).add(text, last=True)) == expected
    for seed in range(20):
        sections = Sections(in_thought=False)
        parts = [part for piece in pieces(text, seed) for part in sections.add(str(piece))]
        assert joined([*parts, *sections.add("", last=True)]) == expected


def test_thinking_that_the_prompt_began_needs_no_mark_to_begin() -> None:
    parts = Sections(in_thought=True).add("\nhm</think>\nYes.", last=True)
    assert parts == [("reasoning", "hm"), ("message", "Yes.")]


def test_a_text_that_may_become_a_mark_is_held_and_nothing_else_is() -> None:
    sections = Sections(in_thought=False)
    assert (sections.add("a <th"), sections.held) == ([("message", "a")], " <th")
    assert (sections.add("e"), sections.held) == ([("message", " <the")], "")


@pytest.mark.parametrize("seed", range(10))
def test_each_token_is_thought_called_or_of_one_message_however_marks_are_cut(seed: int) -> None:
    thought, call = "<think>hm</think>", '<tool_call>{"name": "f"}</tool_call>'
    parts = [pieces(part, seed) for part in (thought, "One.", call, "Two.", "<end>")]
    tokens = MessageTokens(Sections(in_thought=False, with_calls=True))
    texts = [str(piece) for part in parts for piece in part]
    for place, text in enumerate(texts):
        tokens.add((place, -0.5, []), text)
    tokens.end()
    messages = [tokens.of_message(number) for number in (0, 1, 2)]
    said = ["".join(texts[place] for place, _, _ in message) for message in messages]
    assert said == ["One.", "Two.<end>", ""]
    assert tokens.num_thought == len(parts[0])
