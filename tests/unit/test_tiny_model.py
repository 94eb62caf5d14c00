"""The built-in model's folder: the tokenizer's promises, the template, the manifest.

What the model can do is measured by `recipes/tiny/accept.py`; here stands what a broken folder
would break.
"""

import importlib.util
import json
import random
import socket
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from halteres.environments.problems import draw_problem, user_message, worked_answer
from halteres.models import TINY, builtin_path

REPOSITORY = Path(__file__).parents[2]
FOLDER = builtin_path(TINY)
assert FOLDER is not None
MANIFEST = json.loads((FOLDER / "halteres.json").read_text())
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]

GENERAL_PROMPT = (
    "<|im_start|>user\nQuestion: What is 3 + 4?"
    "\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GAME_PROMPT = (
    "<|im_start|>user\nYou are playing language games. Make valid actions to win.\nObservation: "
    "Enter your next guess."
    "\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def random_text(rng: random.Random) -> str:
    """Characters of every plane: half of them ASCII, no surrogates."""
    codes = (
        rng.randrange(128) if rng.random() < 0.5 else rng.randrange(0x110000) for _ in range(24)
    )
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def recipe_manifest() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tiny_manifest", REPOSITORY / "recipes" / "tiny" / "manifest.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == {
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "halteres.json",
    }
    assert sum(sizes.values()) <= 8_000_000


def test_only_built_in_names_have_a_folder() -> None:
    assert builtin_path("Qwen/Qwen3-8B") is None
    assert builtin_path("tiny") is None


def test_the_manifest_names_the_files_that_are_here() -> None:
    recipe = recipe_manifest()
    assert MANIFEST["name"] == TINY
    assert MANIFEST["version"] == "1"
    assert MANIFEST["weights_sha256"] == recipe.file_hash(FOLDER / "model.safetensors")
    assert MANIFEST["tokenizer_sha256"] == recipe.file_hash(FOLDER / "tokenizer.json")


def test_the_recipe_is_the_one_that_made_the_weights() -> None:
    """A change of the recipe, the tokenizer or the problems asks for new weights, or for the old
    files back.
    """
    assert MANIFEST["recipe_hash"] == recipe_manifest().recipe_hash()


def test_the_acceptance_table_is_of_these_weights_and_every_row_passed() -> None:
    table = json.loads((REPOSITORY / "recipes" / "tiny" / "acceptance.json").read_text())
    assert table["weights_sha256"] == MANIFEST["weights_sha256"]
    assert table["tasks"] >= 512
    assert [row["test"] for row in table["rows"] if not row["passed"]] == []


def test_any_unicode_round_trips(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    for text in [random_text(rng) for _ in range(500)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a\t\n\n b \r\n",
        "e\u0301 is not \u00e9",
        "don't . stop , now !",
        "\u212b\ufb01",
        "\x00\x7f",
        "🎲👩‍👩‍👧",
    ],
)
def test_text_is_neither_normalised_nor_cleaned(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_atomic_and_numbered(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [tokenizer.encode(special) for special in SPECIALS] == [[number] for number in range(7)]
    assert tokenizer.encode("a<think>b</think>") == [
        *tokenizer.encode("a"),
        3,
        *tokenizer.encode("b"),
        4,
    ]


def test_pad_eos_and_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 2, None)


def test_only_control_tokens_are_left_out_of_plain_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(list(range(7)), skip_special_tokens=True) == "".join(SPECIALS[3:])


def test_each_digit_is_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.encode("90210")) == 5


def test_every_token_decodes_to_something(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 672
    assert all(tokenizer.decode([number]) for number in range(672))


@pytest.mark.parametrize(
    ("prompt", "content"),
    [
        (
            GENERAL_PROMPT,
            GENERAL_PROMPT[len("<|im_start|>user\n") : GENERAL_PROMPT.index("<|im_end|>")],
        ),
        (GAME_PROMPT, GAME_PROMPT[len("<|im_start|>user\n") : GAME_PROMPT.index("<|im_end|>")]),
    ],
)
def test_the_template_renders_the_prompts_of_seed_003(
    tokenizer: PreTrainedTokenizerBase, prompt: str, content: str
) -> None:
    messages = [{"role": "user", "content": content}]
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        == prompt
    )
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokens == tokenizer.encode(prompt, add_special_tokens=False)


def test_the_template_stands_alone_and_in_the_tokenizer_equally(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert tokenizer.chat_template == (FOLDER / "chat_template.jinja").read_text()


def test_k_messages_render_to_a_prefix_of_k_plus_1(tokenizer: PreTrainedTokenizerBase) -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    messages = [
        {"role": role, "content": f" {role} says\n<b>{i}</b>\n\n"} for i, role in enumerate(roles)
    ]
    renders = [
        tokenizer.apply_chat_template(messages[:k], tokenize=False)
        for k in range(1, len(roles) + 1)
    ]
    for shorter, longer in pairwise(renders):
        assert longer.startswith(shorter)
    assert renders[0] == "<|im_start|>system\n system says\n<b>0</b>\n\n<|im_end|>\n"


def test_prompts_and_answers_are_as_long_as_documented(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    for problem in [draw_problem(rng, "train") for _ in range(300)]:
        messages = [{"role": "user", "content": user_message(problem)}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert 44 <= len(prompt) <= 66
        assert 11 <= len(tokenizer.encode(worked_answer(problem))) + 1 <= 36


def test_it_loads_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the built-in model asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert sum(parameter.numel() for parameter in model.parameters()) == 873_856
    assert model.config.model_type == "qwen3"
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    assert model.config.max_position_embeddings == 2048
