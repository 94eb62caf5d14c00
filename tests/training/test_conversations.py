"""Which tokens of a file's rows are trained on, and which rows are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halteres.errors import InvalidData
from halteres.models import TINY, builtin_path
from halteres.rewards.preference_files import read_rows
from halteres.rewards.preferences import read_preferences
from halteres.tokenizer import Tokenizer
from halteres.training.conversations import (
    AnsweredTokens,
    TokenRow,
    packed,
    read_conversations,
    read_pairs,
)

# as Qwen3's: thinking of earlier answers is left out, and the last answer has an empty one
REWRITES = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}"
    "{%- if m['role'] == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- endif -%}{{- m['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = builtin_path(TINY)
    assert folder is not None
    return Tokenizer(Path(folder))


def rows_of(tokenizer: Tokenizer, *rows: Any) -> tuple[TokenRow, ...]:
    return read_conversations(read_rows(rows), tokenizer)


def trained(tokenizer: Tokenizer, sequence: AnsweredTokens) -> str:
    """What is trained on, as a text."""
    tokens = sequence.tokens_T[sequence.answers_T].tolist()
    return tokenizer.decode(tokens, skip_special_tokens=False)


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]}


def test_answers_and_their_end_tokens_are_trained_on_and_nothing_else(tokenizer: Tokenizer) -> None:
    (row,) = rows_of(tokenizer, chat("What is 2 + 2?", "4", "And 3 + 3?", "6, of course"))
    (sequence,) = row.sequences
    assert trained(tokenizer, sequence) == "4<|im_end|>6, of course<|im_end|>"
    whole = tokenizer.decode(sequence.tokens_T.tolist(), skip_special_tokens=False)
    # nothing stands behind the last end token: it would never be read
    assert whole.startswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4")
    assert whole.endswith("6, of course<|im_end|>")
    assert row.num_answers == int(sequence.answers_T.sum())


def test_what_sampling_would_be_asked_is_what_stands_before_an_answer(tokenizer: Tokenizer) -> None:
    """The tokens before the answer are those of the rendered prompt, to the last one."""
    (row,) = rows_of(tokenizer, chat("Say something.", "\n\n  spaced out"))
    (sequence,) = row.sequences
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Say something."}])
    first = int(np.flatnonzero(sequence.answers_T)[0])
    assert sequence.tokens_T[:first].tolist() == asked


def test_a_prompt_and_a_completion_of_text_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    (row,) = rows_of(tokenizer, {"prompt": "2 + 2 =", "completion": " 4"})
    (sequence,) = row.sequences
    assert trained(tokenizer, sequence) == " 4<|im_end|>"
    whole = tokenizer.decode(sequence.tokens_T.tolist(), skip_special_tokens=False)
    assert whole == "2 + 2 = 4<|im_end|>"


def test_a_message_of_weight_0_and_answers_of_the_prompt_are_context(tokenizer: Tokenizer) -> None:
    weighted = chat("a", "no", "b", "yes")
    weighted["messages"][1]["weight"] = 0
    messages = chat("a", "no", "b", "yes")["messages"]
    apart = {"prompt": messages[:3], "completion": messages[3:]}
    for row in rows_of(tokenizer, weighted, apart):
        assert trained(tokenizer, row.sequences[0]) == "yes<|im_end|>"


def test_a_weight_is_0_or_1_and_1_where_a_parquet_file_has_null(tokenizer: Tokenizer) -> None:
    weighted = chat("a", "no", "b", "yes")
    for message, weight in zip(weighted["messages"], (None, 0, None, None), strict=True):
        message["weight"] = weight
    (row,) = rows_of(tokenizer, weighted)
    assert trained(tokenizer, row.sequences[0]) == "yes<|im_end|>"
    weighted["messages"][1]["weight"] = 0.5
    with pytest.raises(InvalidData, match="row 1: the 'weight' of a message is neither 0 nor 1"):
        rows_of(tokenizer, weighted)


def test_a_template_that_rewrites_earlier_answers_makes_a_sequence_of_each(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shutil.copytree(tokenizer.folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(REWRITES)
    rewriting = Tokenizer(tmp_path / "model")
    (row,) = rows_of(rewriting, chat("a", "one", "b", "two"))
    assert [trained(rewriting, sequence) for sequence in row.sequences] == [
        "<think>\n\n</think>\n\none<|im_end|>",
        "<think>\n\n</think>\n\ntwo<|im_end|>",
    ]


def test_every_wrong_row_is_named_once_by_its_number(tokenizer: Tokenizer) -> None:
    rows = [
        chat("a", "b"),
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a"},
        {"text": "a"},
        chat("a", "  "),
        {"prompt": "a", "completion": " "},
        {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
        {"messages": "hello"},
        {"messages": [{"role": "assistant"}]},
        {"prompt": "a"},
    ]
    with pytest.raises(InvalidData, match="9 of 10 rows are wrong") as refused:
        rows_of(tokenizer, *rows)
    named = {one["problem"]: one["rows"] for one in refused.value.details["problems"]}
    assert named == {
        "no assistant message has a text to train on": [2],
        "'completion' is missing": [3, 10],
        "has neither 'messages' nor 'prompt' and 'completion'": [4],
        "an answer is empty": [5],
        "'completion' is empty": [6],
        "one of 'prompt' and 'completion' is a string, the other is not": [7],
        "'messages' is not a list of messages": [8],
        "a message of 'messages' has no 'content'": [9],
    }


def pairs_of(tokenizer: Tokenizer, folder: Path, *rows: Any) -> tuple[TokenRow, ...]:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_preferences(file)
    return read_pairs(found.source, found.comparisons, tokenizer)


def test_a_pair_is_two_answers_to_one_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    asked, answered = chat("What?", "4")["messages"]
    messages = {
        "prompt": [asked],
        "chosen": [answered],
        "rejected": [{"role": "assistant", "content": "no idea"}],
    }
    (one,) = pairs_of(tokenizer, tmp_path, text)
    assert [trained(tokenizer, side) for side in one.sequences] == [
        " 4<|im_end|>",
        " 5<|im_end|>",
    ]
    (other,) = pairs_of(tokenizer, tmp_path, messages)
    assert [trained(tokenizer, side) for side in other.sequences] == [
        "4<|im_end|>",
        "no idea<|im_end|>",
    ]


def test_without_a_prompt_answers_begin_where_they_first_differ(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"chosen": "Human: hi Assistant: hello", "rejected": "Human: hi Assistant: go away"}
    (one,) = pairs_of(tokenizer, tmp_path, row)
    chosen, rejected = one.sequences
    shared = int(np.flatnonzero(chosen.answers_T)[0])
    assert np.array_equal(chosen.tokens_T[:shared], rejected.tokens_T[:shared])
    assert chosen.tokens_T[shared] != rejected.tokens_T[shared]
    assert "hello<|im_end|>".endswith(trained(tokenizer, chosen).lstrip())


def test_several_ranked_answers_are_as_many_pairs_as_differ_in_rank(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"prompt": "a", "completions": ["b", "c", "d"], "ranks": [1, 0, 1], "weight": 3.0}
    found = pairs_of(tokenizer, tmp_path, row)
    sides = [[trained(tokenizer, side) for side in pair.sequences] for pair in found]
    assert sides == [["c<|im_end|>", "b<|im_end|>"], ["c<|im_end|>", "d<|im_end|>"]]
    assert [pair.weight for pair in found] == [1.5, 1.5]


def test_a_tie_is_no_preference(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidData, match="row 1: is a tie"):
        pairs_of(tokenizer, tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c", "tie": True})


def test_packing_keeps_every_token_and_no_sequence_too_long() -> None:
    generator = np.random.default_rng(0)
    sequences: list[AnsweredTokens] = []
    for length in generator.integers(2, 40, size=50):
        answers_T = np.arange(length) > 0
        sequences.append(AnsweredTokens(generator.integers(0, 99, size=length), answers_T))
    joined = packed(sequences, 64)
    assert max(len(one.tokens_T) for one in joined) <= 64
    assert len(joined) < len(sequences) / 2
    before, after = (
        sorted(np.concatenate([one.tokens_T for one in many]).tolist())
        for many in (sequences, joined)
    )
    assert before == after
    assert sum(one.num_answers for one in joined) == sum(one.num_answers for one in sequences)


@pytest.mark.parametrize(
    ("before", "behind"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], ids=lambda count: str(count)
)
def test_a_plain_text_has_the_tokens_that_the_tokenizer_puts_before_it(
    tokenizer: Tokenizer, tmp_path: Path, before: int, behind: int
) -> None:
    """None of those that it puts behind a text stands before the prompt."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer.folder, folder)
    names = {"first": "<|im_start|>", "last": "<|im_end|>"}
    parts = [
        *[{"SpecialToken": {"id": names["first"], "type_id": 0}}] * before,
        {"Sequence": {"id": "A", "type_id": 0}},
        *[{"SpecialToken": {"id": names["last"], "type_id": 0}}] * behind,
    ]
    ids = {name: tokenizer.special_tokens[name] for name in names.values()}
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ids.items()
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (row,) = rows_of(Tokenizer(folder), {"prompt": "2 + 2 =", "completion": " 4"})
    (sequence,) = row.sequences
    begin = [ids[names["first"]]] * before
    text = [*tokenizer.encode("2 + 2 = 4"), tokenizer.eos_token_id]
    assert sequence.tokens_T.tolist() == [*begin, *text]
