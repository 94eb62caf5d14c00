"""A text becomes the same tokens in training and in scoring, those that transformers makes; what is
cut is told.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from halteres.errors import InvalidConfig, InvalidData
from halteres.models import TINY, builtin_path
from halteres.rewards.model_folder import ScoringTemplate, padding_token, template_for
from halteres.rewards.preferences import Comparison
from halteres.scores import Scorable
from halteres.tokenizer import Message, Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
]


def tiny() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny())


def changed(folder: Path, **settings: Any) -> Tokenizer:
    """The built-in tokenizer with other settings."""
    shutil.copytree(tiny(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return Tokenizer(folder)


def test_prompt_and_completion_are_tokenised_end_to_end_with_one_end_token(
    tokenizer: Tokenizer,
) -> None:
    template = template_for(tokenizer, form="standard")
    rendered = template.render(tokenizer, Scorable(prompt="2 + 2 =", completion=" 4"))
    assert list(rendered.tokens) == tokenizer.encode("2 + 2 = 4<|im_end|>")
    ended = template.render(tokenizer, Scorable(prompt="2 + 2 =", completion=" 4<|im_end|>"))
    assert ended.tokens == rendered.tokens
    assert not rendered.converted


def test_a_chat_is_what_the_chat_template_makes_of_prompt_and_completion_together(
    tokenizer: Tokenizer,
) -> None:
    template = template_for(tokenizer, form="conversational")
    rendered = template.render(tokenizer, Scorable(prompt=CHAT[:-1], completion=CHAT[-1:]))
    assert list(rendered.tokens) == tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert template.render(tokenizer, CHAT).tokens == rendered.tokens
    assert rendered.ended_with_eos


def test_a_text_in_another_form_is_put_into_the_models_own_and_it_is_told(
    tokenizer: Tokenizer,
) -> None:
    chats, strings = (template_for(tokenizer, form=form) for form in ("conversational", "standard"))
    wrapped = chats.render(tokenizer, Scorable(prompt="2 + 2?", completion="4"))
    expected = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert wrapped.tokens == chats.render(tokenizer, expected).tokens
    assert wrapped.converted
    joined = strings.render(tokenizer, Scorable(prompt=expected[:1], completion=expected[1:]))
    assert joined.tokens == strings.render(tokenizer, "2 + 2?4").tokens
    assert joined.converted


def test_content_in_parts_or_null_is_its_text_in_both_forms(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    chat = [{"role": "user", "content": parts}, call, {"role": "tool", "content": "4"}]
    plain = [
        {"role": "user", "content": "It is 4."},
        {**call, "content": ""},
        {"role": "tool", "content": "4"},
    ]
    for form in ("standard", "conversational"):
        template = template_for(tokenizer, form=form)
        ends = template_for(tokenizer, form=form, max_length=8)
        starts = template_for(tokenizer, form=form, max_length=8, truncation="keep_start")
        for one in (template, ends, starts):
            odd = one.render(
                tokenizer,
                Scorable(prompt=chat, completion=[{"role": "assistant", "content": parts}]),
            )
            even = one.render(
                tokenizer,
                Scorable(prompt=plain, completion=[{"role": "assistant", "content": "It is 4."}]),
            )
            assert odd == even and odd.ended_with_eos
        with pytest.raises(InvalidData):
            template.render(tokenizer, [{"role": "assistant", "content": [{"type": "image"}]}])


def test_token_ids_pass_as_they_are(tokenizer: Tokenizer) -> None:
    template = template_for(tokenizer)
    row = Comparison(completions=((5, 6, 7), (5, 8)), ranks=(0, 1))
    assert [one.tokens for one in template.render_comparison(tokenizer, row)] == [(5, 6, 7), (5, 8)]


def test_a_row_that_the_chat_template_refuses_is_named(tmp_path: Path) -> None:
    shutil.copytree(tiny(), tmp_path / "it", ignore=shutil.ignore_patterns("*.safetensors"))
    template = tmp_path / "it" / "chat_template.jinja"
    template.write_text("{{ messages[0].none.such }}", encoding="utf-8")
    refusing = Tokenizer(tmp_path / "it")
    chat = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"})
    row = Comparison(completions=(chat, chat), ranks=(0, 0), row=7)
    with pytest.raises(InvalidData) as refused:
        template_for(refusing, form="conversational").render_comparison(refusing, row)
    assert "Row 7 " in refused.value.what and "UndefinedError" in refused.value.why


def test_keep_end_drops_the_oldest_messages_and_keeps_the_system_message(
    tokenizer: Tokenizer,
) -> None:
    shortened = [CHAT[0], *CHAT[3:]]
    fits = len(tokenizer.apply_chat_template(shortened, add_generation_prompt=False))
    whole = len(tokenizer.apply_chat_template(CHAT, add_generation_prompt=False))
    template = template_for(tokenizer, form="conversational", max_length=fits)
    rendered = template.render(tokenizer, CHAT)
    assert list(rendered.tokens) == tokenizer.apply_chat_template(
        shortened, add_generation_prompt=False
    )
    assert rendered.num_lost == whole - fits


def test_a_long_chat_is_rendered_a_few_times_and_not_once_for_each_message(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    render = tokenizer.render

    def counted(messages: Sequence[Message], **options: Any) -> str:
        rendered.append(len(messages))
        return render(messages, **options)

    monkeypatch.setattr(tokenizer, "render", counted)
    roles = ("user", "assistant")
    chat = [
        {"role": roles[number % 2], "content": f"This is message {number}."}
        for number in range(1200)
    ]
    cut = template_for(tokenizer, max_length=64).render(tokenizer, chat)
    assert 32 < len(cut.tokens) <= 64
    assert len(rendered) <= 13 and sum(rendered) <= len(chat) + 64


@pytest.mark.parametrize("form", ["standard", "conversational"])
@pytest.mark.parametrize("truncation", ["keep_end", "keep_start", "drop"])
def test_where_lost_tokens_are_not_counted_the_kept_ones_are_the_same(
    tokenizer: Tokenizer, form: Any, truncation: Any
) -> None:
    drawn = random.Random(2)
    words = ["the", "fox", "12345", "7", "<|im_end|>", "日本語", "don't", "aaaa", "(x)"]

    def text(num_words: int) -> str:
        return "".join(
            drawn.choice(words) + drawn.choice(["", " ", "\n"]) for _ in range(num_words)
        )

    for _ in range(60):
        length = drawn.choice([1, 20, 300])
        chat = [
            {"role": ("user", "assistant")[place % 2], "content": text(length)}
            for place in range(8)
        ]
        template = template_for(
            tokenizer, form=form, truncation=truncation, max_length=drawn.choice([8, 40, 200])
        )
        counted = template.render(tokenizer, chat)
        quick = template.render(tokenizer, chat, counts_lost=False)
        assert bool(quick.num_lost) == bool(counted.num_lost)
        assert quick.num_lost <= counted.num_lost
        if truncation != "drop":
            assert quick.tokens == counted.tokens
            assert quick.ended_with_eos == counted.ended_with_eos


def test_of_a_text_of_megabytes_only_what_is_kept_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    long = "the quick brown fox is 2 + 2 and so on, " * 50_000
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": long}]
    for text in (long, chat):
        for truncation in ("keep_end", "keep_start", "drop"):
            template = template_for(tokenizer, max_length=64, truncation=truncation)
            assert template.render(tokenizer, text, counts_lost=False).num_lost > 0
    assert sum(encoded) < 50_000


ALTERNATING = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == "
    "0) %}"
    "{{ raise_exception('users and assistants alternate') }}{% endif %}{{ m.content "
    "}}<|im_end|>{% endfor %}"
)
NONE_SHORTER = (
    "{% if messages | length < 9 %}{{ raise_exception('too few') }}{% endif %}" + ALTERNATING
)


@pytest.mark.parametrize("jinja", [None, ALTERNATING, NONE_SHORTER])
@pytest.mark.parametrize("max_length", [2, 5, 9, 17, 33, 65, 129])
def test_the_fewest_oldest_messages_are_dropped_that_the_template_lets_go(
    tmp_path: Path, jinja: str | None, max_length: int
) -> None:
    """As when every place is tried, one after another."""
    one = changed(tmp_path / "model")
    if jinja is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(jinja, encoding="utf-8")
        one = Tokenizer(tmp_path / "model")
    template = template_for(one, max_length=max_length)
    chat = [{"role": "user", "content": "w " * (5 * place % 13)} for place in range(14)]
    for place in range(1, 14, 2):
        chat[place]["role"] = "assistant"
    whole = one.apply_chat_template(chat, add_generation_prompt=False)
    shorter: list[list[int]] = [whole]
    for oldest in range(1, len(chat)):
        with suppress(InvalidData):
            shorter.append(one.apply_chat_template(chat[oldest:], add_generation_prompt=False))
    expected = next((tokens for tokens in shorter if len(tokens) <= max_length), shorter[-1])
    assert list(template.render(one, chat).tokens) == expected[-max_length:]


def test_keep_end_then_cuts_from_the_left_so_that_the_end_token_survives(
    tokenizer: Tokenizer,
) -> None:
    long = "1 2 3 4 5 6 7 8 9 " * 4
    template = template_for(tokenizer, form="standard", max_length=10)
    rendered = template.render(tokenizer, long)
    whole = tokenizer.encode(f"{long}<|im_end|>")
    assert list(rendered.tokens) == whole[-10:]
    assert rendered.num_lost == len(whole) - 10
    assert rendered.ended_with_eos


def test_keep_start_cuts_before_the_end_token(tokenizer: Tokenizer) -> None:
    long = "1 2 3 4 5 6 7 8 9 " * 4
    template = template_for(tokenizer, form="standard", max_length=10, truncation="keep_start")
    rendered = template.render(tokenizer, long)
    assert list(rendered.tokens) == [*tokenizer.encode(long)[:9], *tokenizer.encode("<|im_end|>")]
    assert rendered.ended_with_eos


@pytest.mark.parametrize("truncation", ["drop", "error"])
def test_drop_and_error_leave_the_text_whole_and_say_how_much_is_too_much(
    tokenizer: Tokenizer, truncation: Any
) -> None:
    template = template_for(tokenizer, form="standard", max_length=3, truncation=truncation)
    rendered = template.render(tokenizer, "1 2 3 4 5 6")
    assert rendered.num_lost == len(rendered.tokens) - 3 > 0


def test_a_begin_token_survives_truncation(tmp_path: Path) -> None:
    tokenizer = changed(tmp_path / "bos", bos_token="<|im_start|>")
    file = tokenizer.folder / "tokenizer.json"
    content = json.loads(file.read_text())
    begin = tokenizer.special_tokens["<|im_start|>"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [begin], "tokens": ["<|im_start|>"]}
        },
    }
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer(tokenizer.folder)
    rendered = template_for(tokenizer, form="standard", max_length=6).render(
        tokenizer, "1 2 3 4 5 6 7 8"
    )
    assert len(rendered.tokens) == 6
    assert rendered.tokens[0] == begin


def test_prompt_and_completion_of_two_forms_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidData, match="two forms"):
        template_for(tokenizer).render(tokenizer, Scorable(prompt="2 + 2?", completion=CHAT))


def test_an_end_token_that_the_tokenizer_does_not_know_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidConfig, match="not in the vocabulary"):
        template_for(tokenizer, eos_token="</never>")


def test_the_padding_token_is_never_the_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert padding_token(tokenizer, "<|im_end|>") == "<|endoftext|>"
    same = changed(tmp_path / "same", pad_token="<|im_end|>")
    assert padding_token(same, "<|im_end|>") not in ("<|im_end|>", None)


def test_a_template_is_stored_and_read_whole(tokenizer: Tokenizer) -> None:
    template = template_for(tokenizer, max_length=77, truncation="drop", form="standard")
    again = ScoringTemplate.model_validate_json(template.model_dump_json())
    assert again == template
    assert again.digest == template.digest != template_for(tokenizer).digest
