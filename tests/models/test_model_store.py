"""Which folders are put into the store, and what their tokenizers take along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from halteres.errors import UserError
from halteres.models.model_store import HubCache, ModelStore
from halteres.tokenizer import Tokenizer

from .conftest import Change, change_weights, edit, prefixed, without

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CHAT = [{"role": "user", "content": "1 + 1"}]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models", HubCache(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (prefixed("_orig_mod."), "model.embed_tokens.weight"),
        (without(".layers.3."), "model.layers.3.input_layernorm.weight"),
    ],
)
def test_a_model_whose_weights_would_be_random_is_not_registered(
    store: ModelStore, own: Path, change: Change, says: str
) -> None:
    change_weights(own, change)
    with pytest.raises(UserError, match=says):
        store.add(own, "mine")
    assert store.registered() == {}


BROKEN: dict[str, tuple[str, str]] = {
    "tokenizer.json": ("tokenizer.json", '{"version": "1.0"'),
    "a tokenizer of another format": ("tokenizer.json", '{"model": {"type": "Sorcery"}}'),
    "tokenizer_config.json": ("tokenizer_config.json", "{eos_token: x}"),
    "a list": ("tokenizer_config.json", "[]"),
    "a token that is a number": ("tokenizer_config.json", '{"eos_token": 7}'),
    "generation_config.json": ("generation_config.json", '{"eos_token_id": "two"}'),
    "special_tokens_map.json": ("special_tokens_map.json", "[" * 10_000),
    "a chat template": ("chat_template.jinja", "{% for message in messages %}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_of_the_tokenizer_is_refused_when_it_is_registered(
    store: ModelStore, own: Path, case: str
) -> None:
    file, content = BROKEN[case]
    (own / file).write_text(content)
    with pytest.raises(UserError, match="The tokenizer in") as refused:
        store.add(own, "mine")
    assert refused.value.why and refused.value.next
    assert store.registered() == {}


def test_quantised_weights_are_refused_when_they_are_registered(
    store: ModelStore, own: Path
) -> None:
    edit(own / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UserError, match="quantised"):
        store.add(own, "mine")


@pytest.mark.parametrize("copy", [False, True])
def test_chat_templates_with_names_go_where_the_tokenizer_goes(
    store: ModelStore, own: Path, copy: bool
) -> None:
    named = own / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("TOOLS {{ tools | tojson }}")
    added = store.add(own, "me/mine", copy=copy)
    entry = store.cache.folder / "models--me--mine"
    snapshot = entry / "snapshots" / (entry / "refs" / "main").read_text()
    shutil.copy(own / "tokenizer.json", snapshot)
    for folder in (added.folder, snapshot):
        assert Tokenizer(folder).render(CHAT, tools=TOOLS).startswith("TOOLS [")
        assert not Tokenizer(folder).render(CHAT).startswith("TOOLS")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, True),
        ({"generation_config.json": {"eos_token_id": None}}, True),
        ({"generation_config.json": {"eos_token_id": 672}}, False),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": None}}, True),
        (
            {
                "generation_config.json": {"eos_token_id": None},
                "config.json": {"eos_token_id": None},
                "tokenizer_config.json": {"eos_token": None},
            },
            False,
        ),
    ],
)
def test_a_model_that_nothing_ends_is_registered_and_known_as_that(
    store: ModelStore, own: Path, files: dict[str, dict[str, Any]], ends: bool
) -> None:
    for name, fields in files.items():
        kept = json.loads((own / name).read_text()) if fields else {}
        (own / name).write_text(json.dumps({**kept, **fields}))
    assert store.add(own, "mine").ends == ends


@pytest.mark.parametrize(
    ("name", "ids", "unknown"),
    [
        ("generation_config.json", 672, (672,)),
        ("generation_config.json", [2, 900], (900,)),
        ("config.json", 5000, (5000,)),
        ("generation_config.json", 2, ()),
    ],
)
def test_end_tokens_beyond_the_vocabulary_are_known_with_the_file_that_names_them(
    store: ModelStore, own: Path, name: str, ids: Any, unknown: tuple[int, ...]
) -> None:
    if name == "config.json":
        (own / "generation_config.json").unlink()
    edit(own / name, eos_token_id=ids)
    added = store.add(own, "mine")
    assert (added.end_token_file, added.unknown_end_tokens) == (name, unknown)
    assert added.ends == (unknown != added.end_tokens)
