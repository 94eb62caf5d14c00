"""Our tokenizer is transformers' tokenizer, without torch."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

import halteres
from halteres.errors import InvalidData, NotFound
from halteres.models import TINY, builtin_path
from halteres.tokenizer import LONGEST_WHOLE, Tokenizer, end_tokens, load_tokenizer

TEXTS = [
    "",
    " ",
    "What is 3 + 4 * 12?",
    r"\boxed{42}",
    "tabs\tand\r\nlines\n\n  indented",
    "Zürich — naïve café, ½ × π ≈ 1,57",
    "日本語のテキスト。中文，한국어 العربية עברית हिन्दी",
    "👩‍🚀👍🏽 e\u0301 \u00e9 \u200b \ufeff \u202e",
    "<|im_start|>user\nspecials in text<|im_end|>",
    "1234567890 " * 20,
    "\x00\x01\x7f control",
]

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Grüße, 世界 👋"},
    ],
    [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": r"I say \boxed{5}."},
        {"role": "user", "content": "higher"},
    ],
    [{"role": "user", "content": "  spaces kept  \n"}, {"role": "assistant", "content": ""}],
    [{"role": "tool", "content": "an unusual role"}],
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = builtin_path(TINY)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_equals_transformers_and_returns_the_text(
    ours: Tokenizer, theirs: Any, text: str
) -> None:
    tokens = ours.encode(text)
    for skip in (True, False):
        assert ours.decode(tokens, skip_special_tokens=skip) == theirs.decode(
            tokens, skip_special_tokens=skip
        )
    assert ours.decode(tokens, skip_special_tokens=False) == text


def test_any_token_decodes_as_in_transformers(ours: Tokenizer, theirs: Any) -> None:
    for token in range(ours.vocab_size):
        assert ours.token(token) == theirs.decode([token])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_of_tokens_are_the_text_in_parts(ours: Tokenizer, text: str, skip: bool) -> None:
    tokens = [*ours.encode(text), ours.eos_token_id]
    texts = ours.token_texts(tokens, skip_special_tokens=skip)
    assert len(texts) == len(tokens)
    assert "".join(texts) == ours.decode(tokens, skip_special_tokens=skip)
    assert (texts[-1] == "") == skip
    words = [ours.token(token) for token in tokens[:-1]]
    if text.isascii() and "<|" not in text:
        assert texts[:-1] == words


def test_any_tokens_in_any_order_have_texts_that_make_their_text(ours: Tokenizer) -> None:
    drawn = random.Random(3)
    for _ in range(200):
        tokens = [drawn.randrange(ours.vocab_size) for _ in range(drawn.randrange(1, 30))]
        assert "".join(ours.token_texts(tokens)) == ours.decode(tokens)


def test_a_token_that_follows_another_keeps_its_space(tmp_path: Path) -> None:
    """Vocabularies of SentencePiece drop the space before a text's first word alone."""
    made, trainer = unigram()
    made.train_from_iterator(["one two three", "two three one", "three one two"] * 9, trainer)
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    tokens = ours.encode("one two three")
    texts = ours.token_texts(tokens)
    assert "".join(texts) == "one two three" == ours.decode(tokens)
    assert not texts[0].startswith(" ")
    assert sum(text.startswith(" ") for text in texts) == 2


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("messages", CHATS)
def test_chats_render_and_tokenise_as_in_transformers(
    ours: Tokenizer, theirs: Any, messages: list[dict[str, Any]], generation: bool
) -> None:
    text = theirs.apply_chat_template(messages, add_generation_prompt=generation, tokenize=False)
    assert ours.render(messages, add_generation_prompt=generation) == text
    tokens = theirs.apply_chat_template(
        messages, add_generation_prompt=generation, return_dict=False
    )
    assert ours.apply_chat_template(messages, add_generation_prompt=generation) == tokens


def test_a_chat_renders_to_a_prefix_of_its_continuation(ours: Tokenizer) -> None:
    for length in range(1, 4):
        shorter = ours.render(CHATS[2][: length - 1], add_generation_prompt=False)
        assert ours.render(CHATS[2][:length], add_generation_prompt=False).startswith(shorter)


def test_special_tokens_are_those_transformers_names(ours: Tokenizer, theirs: Any) -> None:
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)


def test_a_template_that_refuses_says_so(folder: Path, tmp_path: Path) -> None:
    tokenizer = _copy_with_template(
        folder, tmp_path, "{{ raise_exception('No system messages here.') }}"
    )
    with pytest.raises(InvalidData, match="No system messages here"):
        tokenizer.render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"]
)
def test_a_template_cannot_leave_its_sandbox(folder: Path, tmp_path: Path, template: str) -> None:
    tokenizer = _copy_with_template(folder, tmp_path, template)
    with pytest.raises(InvalidData, match="refused the messages"):
        tokenizer.render([])


def test_broken_messages_are_a_typed_error(folder: Path, tmp_path: Path) -> None:
    tokenizer = _copy_with_template(
        folder, tmp_path, "{% for m in messages %}{{ m.content + m.name }}{% endfor %}"
    )
    broken: list[Any] = [
        {"role": "user", "content": 3},
        "Hello",
        None,
        {"content": [{"type": "image"}]},
        {"content": [4]},
    ]
    for message in broken:
        with pytest.raises(InvalidData):
            tokenizer.render([message])
    with pytest.raises(InvalidData, match="refused the messages"):
        tokenizer.render([{"role": "user", "content": "a"}])


PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]


@pytest.mark.parametrize(
    "content", [PARTS, tuple(PARTS), [{"text": "What is 2 + 2?"}], PARTS[:1] + PARTS[1:]]
)
def test_content_in_parts_is_rendered_as_its_text(ours: Tokenizer, content: Any) -> None:
    whole = ours.render([{"role": "user", "content": "What is 2 + 2?"}])
    assert ours.render([{"role": "user", "content": content}]) == whole


ROOMS = ("rewards", "rollouts", "environments", "agent/trial")
OTHERS = {
    "environments/games/wrappers.py": "the wrapper's own messages",
    "rewards/preferences.py": "columns that are not read, in other projects' forms",
    "agent/trial/testing.py": "tokens of a tokenizer's file",
}


def test_content_of_messages_is_read_in_one_place() -> None:
    """Elsewhere a list of parts, or null, would become Python's text of it."""
    found: set[str] = set()
    source = Path(halteres.__file__).parent
    for file in (file for room in ROOMS for file in (source / room).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        read = {
            id(one) for call in calls if ast.unparse(call.func) == "text_of" for one in call.args
        }
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(slice=ast.Constant("content"), ctx=ast.Load()):
                    is_content = True
                case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant("content"), *_]):
                    is_content = True
                case _:
                    is_content = False
            if is_content and id(node) not in read:
                found.add(file.relative_to(source).as_posix())
    assert found == OTHERS.keys()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[]"),
        ("{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}", "[]"),
        ("{% for m in messages %}{% if m['content'] is none %}call{% endif %}{% endfor %}", "call"),
        (
            "{% for m in messages %}{% if m.content is not none %}said{% else %}call{% endif %}{% "
            "endfor %}",
            "call",
        ),
        (
            "{% for m in messages %}{% if m.content is defined and m.content is none %}call{% "
            "endif %}{% endfor %}",
            "call",
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% if content is none %}call{% "
            "endif %}{% endfor %}",
            "call",
        ),
    ],
)
def test_content_that_is_null_is_an_empty_text_but_for_a_template_that_asks(
    folder: Path, tmp_path: Path, template: str, text: str
) -> None:
    calls = [{"function": {"name": "add", "arguments": {}}}]
    tokenizer = _copy_with_template(folder, tmp_path, template)
    assert tokenizer.render([{"role": "assistant", "content": None, "tool_calls": calls}]) == text
    assert tokenizer.render([{"role": "assistant", "content": None}]) == text


def test_content_that_is_missing_is_an_empty_text_next_to_calls_alone(ours: Tokenizer) -> None:
    calls = [{"function": {"name": "add", "arguments": {}}}]
    empty = ours.render([{"role": "assistant", "content": ""}])
    assert ours.render([{"role": "assistant", "tool_calls": calls}]) == empty
    with pytest.raises(InvalidData, match="refused the messages"):
        ours.render([{"role": "user"}])


def test_a_folder_without_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    tokenizer = _copy_with_template(folder, tmp_path, None)
    assert tokenizer.encode("plain text works")
    with pytest.raises(InvalidData, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)


def test_a_tokenizer_may_begin_with_a_byte_order_mark(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    text = "A text of 2 lines.\n"
    assert Tokenizer(tmp_path).encode(text) == Tokenizer(folder).encode(text)


def test_a_tokenizer_without_an_end_token_says_so(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(NotFound, match="names no end token"):
        _ = Tokenizer(tmp_path).eos_token_id


END, OTHER = "<|im_end|>", "<|endoftext|>"
DECODER = {"2": {"content": END, "special": True}, "0": {"content": OTHER, "special": True}}
SPECIAL_FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in the config": ({"eos_token": END}, {}),
    "in the map alone": ({}, {"eos_token": END, "pad_token": OTHER}),
    "in the map, as an object": (
        {},
        {"eos_token": {"content": END, "lstrip": False, "special": True}},
    ),
    "in both: the map counts": ({"eos_token": OTHER}, {"eos_token": END}),
    "in both, with the added tokens: the config counts": (
        {"eos_token": OTHER, "added_tokens_decoder": DECODER},
        {"eos_token": END, "pad_token": END},
    ),
    "in the map, null in the config": ({"eos_token": None}, {"eos_token": END}),
    "nowhere": ({}, {}),
}


@pytest.mark.parametrize("case", SPECIAL_FILES)
def test_end_and_padding_tokens_are_resolved_as_in_transformers(
    folder: Path, tmp_path: Path, case: str
) -> None:
    from transformers import AutoTokenizer

    config, special = SPECIAL_FILES[case]
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    if special:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert {name: ours.specials.get(name) for name in ("eos_token", "pad_token")} == {
        "eos_token": theirs.eos_token,
        "pad_token": theirs.pad_token,
    }


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [7, 5, 7]}, {"eos_token_id": 6}, (7, 5)),
        ({"eos_token_id": None}, {"eos_token_id": 6}, (6,)),
        ({"eos_token_id": []}, {"eos_token_id": 6}, (6,)),
        (None, {"eos_token_id": [6, 8]}, (6, 8)),
        ({"eos_token_id": None}, {"eos_token_id": None, "text_config": {"eos_token_id": 9}}, (9,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (2,)),
        (None, None, (2,)),
    ],
)
def test_the_engine_and_the_text_end_answers_at_the_same_tokens(
    folder: Path, tmp_path: Path, generation: Any, config: Any, ends: tuple[int, ...]
) -> None:
    """By the settings of the model, else by its tokenizer: null names none."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer(tmp_path).eos_token_ids == end_tokens(tmp_path) == ends


TEMPLATES: dict[str, tuple[Any, dict[str, str]]] = {
    "one file": (None, {"chat_template.jinja": "FILE"}),
    "the file before the config": ("CONFIG", {"chat_template.jinja": "FILE"}),
    "the config alone": ("CONFIG", {}),
    "a list in the config": (
        [
            {"name": "default", "template": "CONFIG"},
            {"name": "tool_use", "template": "CONFIG-TOOLS"},
        ],
        {},
    ),
    "a file and one for tools": (
        None,
        {"chat_template.jinja": "FILE", "additional_chat_templates/tool_use.jinja": "TOOLS"},
    ),
    "a file and one of another name": (
        None,
        {"chat_template.jinja": "FILE", "additional_chat_templates/rag.jinja": "RAG"},
    ),
    "files before a list": (
        [
            {"name": "default", "template": "CONFIG"},
            {"name": "tool_use", "template": "CONFIG-TOOLS"},
        ],
        {"chat_template.jinja": "FILE", "additional_chat_templates/rag.jinja": "RAG"},
    ),
    "a default among the names": (
        None,
        {"chat_template.jinja": "FILE", "additional_chat_templates/default.jinja": "NAMED"},
    ),
    "lines ended as on Windows": (None, {"chat_template.jinja": "A{# comment #}\r\nB\r\n"}),
}


@pytest.mark.parametrize("case", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add"}}]])
def test_chat_templates_of_all_files_are_resolved_as_in_transformers(
    folder: Path, tmp_path: Path, case: str, tools: Any
) -> None:
    from transformers import AutoTokenizer

    in_config, files = TEMPLATES[case]
    shutil.copy(folder / "tokenizer.json", tmp_path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": in_config,
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    expected = theirs.apply_chat_template(CHATS[0], tools=tools, tokenize=False)
    assert (
        Tokenizer(tmp_path).render(CHATS[0], add_generation_prompt=False, tools=tools) == expected
    )


def test_reading_a_tokenizer_loads_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from halteres.tokenizer import load_tokenizer; "
        "load_tokenizer(sys.argv[1]).encode('a');"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def _copy_with_template(folder: Path, place: Path, template: str | None) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, place)
    config = json.loads((place / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    return Tokenizer(place)


BORROWED = (
    "{% for message in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ message | "
    "tojson }}"
    "{% generation %}[{{ message.content }}]{% endgeneration %}{% endfor %}{{ strftime_now('%Y') "
    "| length }}"
)


def test_what_templates_of_other_models_use_renders_as_in_transformers(
    folder: Path, tmp_path: Path
) -> None:
    """Loop controls, `tojson`, the generation mark, the date: each is found in published
    templates.
    """
    from transformers import AutoTokenizer

    ours = _copy_with_template(folder, tmp_path, BORROWED)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.render(CHATS[1]) == theirs.apply_chat_template(
        CHATS[1], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ 'x'.nothing() }}", "{{ range(10**9) | list }}"]
)
def test_whatever_a_template_raises_is_a_typed_error(
    folder: Path, tmp_path: Path, template: str
) -> None:
    tokenizer = _copy_with_template(folder, tmp_path, template)
    with pytest.raises(InvalidData, match="The chat template refused the messages"):
        tokenizer.render(CHATS[0])


def test_a_chat_template_that_loops_without_end_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path(TINY) or Path(), tmp_path / "model")
    rounds = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(
        "{% macro turn() %}" + rounds + "{% endmacro %}{{ turn() }}"
    )
    with pytest.raises(InvalidData, match="go round more than"):
        Tokenizer(folder).render([{"role": "user", "content": "Hi"}])


def test_a_loop_of_a_chat_template_knows_its_places(tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path(TINY) or Path(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {{ "
        "loop.revindex }};"
        "{% endfor %}"
        "{% for x in nothing %}{% else %}none{% endfor %}"
        "{% for m in messages recursive %}{{ loop.depth }}"
        "{% if loop.depth < 2 %}{{ loop(messages) }}{% endif %}{% endfor %}"
    )
    rendered = Tokenizer(folder).render([{"role": "user"}] * 2)
    assert rendered == "1/2False 2;2/2True 1;none122122"


OTHER_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Python's encoding is ASCII then, for files, arguments and the terminal."""


def test_a_chat_has_the_same_tokens_whatever_the_locale(tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path(TINY) or Path(), tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        "{# größer € #}größer € 你好\n" + template, encoding="utf-8"
    )
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from halteres.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer(Path(sys.argv[1]))\n"
        "chat = [{'role': 'user', 'content': 'gr\\u00f6\\u00dfer'}]\n"
        "print(tokenizer.apply_chat_template(chat), tokenizer.eos_token_ids)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, **OTHER_LOCALE},
        capture_output=True,
        timeout=60,
        check=True,
    )
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "größer"}])
    assert ended.stdout.decode().strip() == f"{tokens} {tokenizer.eos_token_ids}"


SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen split a text, digits by threes."""

PIECES = ["the", "quick", "browner", "x", "don't", "12345", "7", "3.14", "--", "(", "...", "naïve"]
PIECES += [
    "日本語。",
    "中文",
    "👍🏽",
    "e\u0301",
    "<|end|>",
    "a_b",
    "CamelCase",
    "aaaaaaaaaaaa",
    "!?\n",
]
GAPS = [" "] * 8 + ["", "", "\n", "\n\n", "  ", "\t", "\r\n", " \n ", "\u3000"]


def random_text(drawn: random.Random, num_pieces: int) -> str:
    return "".join(drawn.choice(PIECES) + drawn.choice(GAPS) for _ in range(num_pieces))


def bytes_of_llama_3() -> tuple[Any, Any]:
    made = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return made, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)


def bytes_of_gpt_2() -> tuple[Any, Any]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return made, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)


def pieces_of_llama_2() -> tuple[Any, Any]:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # Only in training: the tokenizer itself reads a text as one word.
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return made, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])


def unigram() -> tuple[Any, Any]:
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return made, trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>"
    )


def word_pieces() -> tuple[Any, Any]:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"])


def trained(kind: Any, folder: Path) -> Tokenizer:
    made, trainer = kind()
    drawn = random.Random(0)
    made.train_from_iterator([random_text(drawn, 100) for _ in range(100)], trainer)
    if kind is pieces_of_llama_2:
        made.pre_tokenizer = pre_tokenizers.Sequence([])
    made.add_special_tokens(["<s>", "<|end|>"])
    template = {"single": "<s> $A <|end|>", "pair": "$A $B"}
    special = [(name, made.token_to_id(name)) for name in ("<s>", "<|end|>")]
    made.post_processor = processors.TemplateProcessing(**template, special_tokens=special)
    made.decoder = decoders.ByteLevel()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    "kind", [None, bytes_of_llama_3, bytes_of_gpt_2, pieces_of_llama_2, unigram, word_pieces]
)
def test_the_first_and_last_tokens_of_a_long_text_are_those_of_the_whole(
    ours: Tokenizer, tmp_path: Path, kind: Any
) -> None:
    tokenizer = trained(kind, tmp_path / "model") if kind else ours
    drawn = random.Random(1)
    num_cut = 0
    for _ in range(200):
        text = random_text(drawn, 400)
        most = drawn.choice([1, 7, 32, 100])
        adds = drawn.choice([True, False])
        whole = tokenizer.encode(text, add_special_tokens=adds)
        first = tokenizer.encode_first(text, most, add_special_tokens=adds)
        last = tokenizer.encode_last(text, most, add_special_tokens=adds)
        assert len(whole) >= len(first) > most and len(whole) >= len(last) > most
        assert first[:most] == whole[:most]
        assert last[-most:] == whole[-most:]
        num_cut += (len(first) < len(whole)) + (len(last) < len(whole))
    assert num_cut > 200


def test_a_short_text_is_encoded_whole_whatever_is_asked_for(ours: Tokenizer) -> None:
    for text in TEXTS:
        for most in (1, 1000):
            assert len(ours.encode_first(text, most)) >= min(most + 1, len(ours.encode(text)))
        assert ours.encode_first(text, 1000) == ours.encode_last(text, 1000) == ours.encode(text)


def test_a_text_without_a_place_to_cut_is_read_whole_or_refused(ours: Tokenizer) -> None:
    """The tokens of its end depend on its beginning: digits by threes are an example."""
    text = "1234567" * 2000
    assert ours.encode_first(text, 8) == ours.encode_last(text, 8) == ours.encode(text)
    for encode in (ours.encode_first, ours.encode_last):
        with pytest.raises(InvalidData):
            encode("1" * (LONGEST_WHOLE + 1), 8)


def test_a_vocabulary_with_tokens_across_words_is_never_cut(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.train_from_iterator(
        ["of the " * 50], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "of the " * 999
    assert tokenizer.encode_last(text, 4) == tokenizer.encode(text)


def test_a_tokenizer_file_that_cuts_texts_and_pads_them_does_neither(
    folder: Path, ours: Tokenizer, tmp_path: Path
) -> None:
    """As transformers reads it."""
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    found = tokenizers.Tokenizer.from_file(str(file))
    found.enable_truncation(4)
    found.enable_padding(length=64)
    found.save(str(file))
    text = "1 2 3 4 5 6"
    assert Tokenizer(tmp_path / "model").encode(text) == ours.encode(text)
