"""A chat as tokens, on templates of several kinds: what was sampled stays, what is new is added,
once.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from halteres.environments.scored import items_of
from halteres.rollouts.chat import Chat
from halteres.tokenizer import Tokenizer
from halteres.types import MASKED, PolicyVersion, Trajectory, Turn

from .fakes import FOLDER, TOKENIZER

LLAMA_3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + "
    "m.content | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% "
    "endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% "
    "endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ "
    "m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
END_OF = {"llama-3": "<|eot_id|>", "qwen-3": "<|im_end|>", "mistral": "</s>"}
TEMPLATES = {"llama-3": LLAMA_3, "qwen-3": QWEN_3, "mistral": MISTRAL}
MORE_TOKENS = (
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
)

Borrow = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def borrow(tmp_path_factory: pytest.TempPathFactory) -> Borrow:
    """The built-in model's tokenizer with the template and the special tokens of another kind of
    model.
    """
    made = {"tiny": TOKENIZER}

    def of(kind: str) -> Tokenizer:
        if kind not in made:
            made[kind] = _borrowed(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of


def _borrowed(folder: Path, kind: str) -> Tokenizer:
    assert FOLDER is not None
    shutil.copy(FOLDER / "tokenizer_config.json", folder)
    content = json.loads((FOLDER / "tokenizer.json").read_text())
    size = TOKENIZER.vocab_size
    added = content["added_tokens"]
    added += [
        {**added[0], "id": size + place, "content": token}
        for place, token in enumerate(MORE_TOKENS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": END_OF[kind]}))
    (folder / "chat_template.jinja").write_text(TEMPLATES[kind])
    return Tokenizer(folder)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(prompt: tuple[int, ...], action: Sequence[int]) -> Turn:
    return Turn(
        prompt=prompt,
        action=tuple(action),
        logprobs=tuple(-0.5 for _ in action),
        text="",
        version_min=PolicyVersion(0),
        version_max=PolicyVersion(0),
        stop_reason="stop",
    )


def talk(tokenizer: Tokenizer, said: Sequence[tuple[str, bool]]) -> tuple[Chat, list[Turn]]:
    """A chat in which the policy says these in turn; False: it is cut off before its end token."""
    chat, turns = Chat(tokenizer, [user("Guess.")]), list[Turn]()
    for number, (text, ended) in enumerate(said):
        action = [*tokenizer.encode(text), *([tokenizer.eos_token_id] if ended else [])]
        turns.append(turn(chat.prompt, action))
        chat.go_on(action, [user(f"No {number}.")])
    return chat, turns


def squeezed(text: str) -> str:
    return "".join(text.split())


KINDS = ("tiny", *TEMPLATES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [True, False])
def test_the_next_prompt_is_the_last_one_the_action_and_new_context(
    borrow: Borrow, kind: str, ended: bool
) -> None:
    """The end token stands there once, sampled or, where the action was cut off, as context."""
    tokenizer = borrow(kind)
    chat, (first, second) = talk(tokenizer, [("It is 5.", ended), ("Is it 7?", ended)])
    assert second.prompt[: len(first.prompt) + len(first.action)] == first.prompt + first.action
    assert chat.prompt[: len(second.prompt) + len(second.action)] == second.prompt + second.action
    whole = tokenizer.decode(chat.prompt, skip_special_tokens=False)
    assert squeezed(whole) == squeezed(tokenizer.render(chat.messages))
    assert len(items_of(Trajectory(turns=(first, second), score=0.0))) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["  5 \n", "", "\n", "a\n\nb ", "½ ☃"])
def test_white_space_that_a_template_trims_begins_no_new_sequence(
    borrow: Borrow, kind: str, text: str
) -> None:
    tokenizer = borrow(kind)
    chat, (only,) = talk(tokenizer, [(text, True)])
    before = only.prompt + only.action
    assert chat.prompt[: len(before)] == before
    assert chat.prompt.count(tokenizer.eos_token_id) == tokenizer.encode(
        chat_text(chat, tokenizer)
    ).count(tokenizer.eos_token_id)


def chat_text(chat: Chat, tokenizer: Tokenizer) -> str:
    return tokenizer.render(chat.messages)


def test_another_end_token_than_the_templates_is_not_doubled_either(
    borrow: Borrow, tmp_path: Path
) -> None:
    """Llama 3 ends messages with <|eot_id|>, and some of its answers with <|end_of_text|>."""
    folder = shutil.copytree(borrow("llama-3").folder, tmp_path / "model")
    eot, other = (borrow("llama-3").encode(token)[0] for token in ("<|eot_id|>", "</s>"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eot, other]}))
    tokenizer = Tokenizer(folder)
    chat = Chat(tokenizer, [user("Guess.")])
    action = [*tokenizer.encode("5"), other]
    before = chat.prompt
    chat.go_on(action, [user("No.")])
    news = chat.prompt[len(before) + len(action) :]
    assert tokenizer.decode(news, skip_special_tokens=False).startswith("<|start_header_id|>user")


def test_where_the_template_leaves_out_old_thinking_a_new_sequence_begins(borrow: Borrow) -> None:
    tokenizer = borrow("qwen-3")
    chat, turns = talk(tokenizer, [("<think>\nHm.\n</think>\n\n5", True), ("7", True)])
    items = items_of(Trajectory(turns=tuple(turns), score=1.0))
    assert len(items) == 2
    assert turns[1].prompt == tuple(tokenizer.apply_chat_template(chat.messages[:3]))
    assert "Hm." not in tokenizer.decode(turns[1].prompt)
    assert "Hm." in tokenizer.decode(items[0]["tokens"])


def test_thinking_stays_while_the_template_keeps_it(borrow: Borrow) -> None:
    """A tool's answer is no new question: the template leaves the thinking before it where it
    was.
    """
    tokenizer = borrow("qwen-3")
    chat = Chat(tokenizer, [user("Add.")])
    action = [*tokenizer.encode("<think>\nHm.\n</think>\n\nI call."), tokenizer.eos_token_id]
    before = chat.prompt + tuple(action)
    chat.go_on(action, [{"role": "tool", "content": "7"}])
    assert chat.prompt[: len(before)] == before


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampled_token_is_in_one_sequence_and_one_span(borrow: Borrow, kind: str) -> None:
    """Whatever is said: text, thinking, stray ends of thinking, special tokens, tokens that make no
    whole character.
    """
    tokenizer, rng = borrow(kind), random.Random(3)
    pieces = ["5", " ", "\n", "<think>", "</think>", "so", "½", "<|im_start|>"]
    for _ in range(60):
        chat, turns = Chat(tokenizer, [user("Guess.")]), list[Turn]()
        for number in range(rng.randint(1, 5)):
            action = [
                token
                for _ in range(rng.randint(1, 6))
                for token in tokenizer.encode(rng.choice(pieces))
            ]
            action = action[: rng.randint(1, len(action))] + [tokenizer.eos_token_id] * rng.randint(
                0, 1
            )
            turns.append(turn(chat.prompt, action))
            chat.go_on(action, [user(f"No {number}.")])
        items = items_of(Trajectory(turns=tuple(turns), score=1.0))
        sampled = [token for one in turns for token in one.action]
        assert [token for item in items for token in item["masks"] if token != MASKED] == sampled
        spans = [(item, span) for item in items for span in item.get("spans", [])]
        assert [
            token for item, (start, stop, _) in spans for token in item["tokens"][start:stop]
        ] == sampled
        assert len(spans) == len(turns)


TOOLS = [{"type": "function", "function": {"name": "add"}}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + QWEN_3


def test_a_template_that_reads_tools_is_given_them_and_their_results(
    borrow: Borrow, tmp_path: Path
) -> None:
    folder = shutil.copytree(borrow("qwen-3").folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(WITH_TOOLS)
    tokenizer = Tokenizer(folder)
    chat = Chat(tokenizer, [user("Add.")], TOOLS)
    assert tokenizer.decode(chat.prompt, skip_special_tokens=False) == tokenizer.render(
        [user("Add.")], tools=TOOLS
    )
    chat.go_on(
        [*tokenizer.encode("<tool_call>{}</tool_call>"), tokenizer.eos_token_id],
        [{"role": "tool", "content": "7"}],
    )
    assert "<|im_start|>tool\n7<|im_end|>" in tokenizer.decode(
        chat.prompt, skip_special_tokens=False
    )


def test_tools_told_in_words_stand_behind_the_system_prompt() -> None:
    chat = Chat(
        TOKENIZER, [{"role": "system", "content": "Be brief."}, user("Add.")], TOOLS, in_words=True
    )
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.messages[0]["content"].startswith("Be brief.\n\nYou may call tools.")
    assert '{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}' in chat.messages[0]["content"]
