"""Base models under names of one's own: what may be put into the store, and that clients then find
its tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contract.requirements import proves

from halteres.config import environ
from halteres.errors import Conflict, NotFound, NotReady, UserError
from halteres.models import TINY, builtin_path, model_folder, names_of
from halteres.models.model_store import (
    LLAMA_3_TOKENIZERS,
    HubCache,
    ModelStore,
    checked_name,
    download,
    suggested_name,
)
from halteres.service.base import base_model
from halteres.tokenizer import load_tokenizer

TEXT = "What is 1 + 1?"
NAME = "Qwen/Qwen3-4B-Instruct-2507"


def tiny() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model folder of the user's."""
    return Path(shutil.copytree(tiny(), tmp_path / "own"))


@pytest.fixture
def models_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    return ModelStore(tmp_path / "home" / "models", HubCache(tmp_path / "hub"))


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with what files hold."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in found
    }


def entry(models_home: ModelStore, name: str) -> Path:
    return models_home.cache.folder / f"models--{name.replace('/', '--')}"


def downloaded(models_home: ModelStore, name: str, tokenizer: bytes) -> Path:
    """An entry as a hub's client leaves it."""
    snapshot = entry(models_home, name) / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_bytes(tokenizer)
    (entry(models_home, name) / "refs").mkdir()
    (entry(models_home, name) / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_registered_folder_is_found_by_its_name_and_its_tokenizer_in_the_cache(
    models_home: ModelStore, own: Path
) -> None:
    added = models_home.add(own, NAME)
    assert (added.name, added.shape.parameters, added.tokenizer_names) == (NAME, 873_856, (NAME,))
    assert added.folder == model_folder(NAME, models_home.folder) == models_home.folder / NAME
    assert added.folder.resolve() == own
    commit = (entry(models_home, NAME) / "refs" / "main").read_text()
    assert len(commit) == 40 and int(commit, 16)
    snapshot = entry(models_home, NAME) / "snapshots" / commit
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (snapshot / file).read_bytes() == (own / file).read_bytes()
    assert not list(snapshot.glob("*.safetensors"))


def test_registering_again_changes_nothing(models_home: ModelStore, own: Path) -> None:
    models_home.add(own, NAME)
    before = tree(models_home.cache.folder)
    assert models_home.add(own, NAME).name == NAME
    assert tree(models_home.cache.folder) == before


def test_a_changed_tokenizer_makes_another_commit_and_leaves_nothing_behind(
    models_home: ModelStore, own: Path
) -> None:
    models_home.add(own, NAME)
    (own / "chat_template.jinja").write_text("{{ messages }}")
    models_home.add(own, NAME)
    (snapshot,) = (entry(models_home, NAME) / "snapshots").iterdir()
    assert snapshot.name == (entry(models_home, NAME) / "refs" / "main").read_text()
    assert (snapshot / "chat_template.jinja").read_text() == "{{ messages }}"


def test_removing_takes_everything_that_adding_made_and_not_the_model(
    models_home: ModelStore, own: Path
) -> None:
    before = tree(own)
    models_home.add(own, NAME)
    models_home.add(own, "meta-llama/Llama-3.2-1B", copy=True)
    models_home.add(tiny(), TINY)
    assert models_home.registered().keys() == {NAME, "meta-llama/Llama-3.2-1B", TINY}
    for name in (NAME, "meta-llama/Llama-3.2-1B", TINY):
        models_home.remove(name)
    assert tree(models_home.folder) == tree(models_home.cache.folder) == {}
    assert tree(own) == before
    assert models_home.registered() == {}


def test_a_copy_stands_where_the_folder_goes(models_home: ModelStore, own: Path) -> None:
    (own / "pytorch_model.bin").write_bytes(b"not needed")
    added = models_home.add(own, "mine", copy=True)
    shutil.rmtree(own)
    assert base_model("mine").folder == added.folder
    assert (added.folder / "model.safetensors").read_bytes() == (
        tiny() / "model.safetensors"
    ).read_bytes()
    assert not (added.folder / "pytorch_model.bin").exists()


def test_a_link_whose_model_has_gone_can_be_removed_or_led_elsewhere(
    models_home: ModelStore, own: Path
) -> None:
    models_home.add(own, "mine")
    shutil.rmtree(own)
    assert "mine" in models_home.registered()
    assert models_home.add(tiny(), "mine").folder.resolve() == tiny()
    models_home.remove("mine")
    assert not (models_home.folder / "mine").is_symlink()


def test_a_llama_3_brings_the_names_under_which_clients_look_for_its_tokenizer(
    models_home: ModelStore, own: Path
) -> None:
    first = models_home.add(own, "meta-llama/Llama-3.2-1B")
    assert set(first.tokenizer_names) == {"meta-llama/Llama-3.2-1B", *LLAMA_3_TOKENIZERS}
    models_home.add(own, "meta-llama/Llama-3.1-8B-Instruct")
    models_home.remove("meta-llama/Llama-3.2-1B")
    assert all(models_home.cache.resolves(name) for name in LLAMA_3_TOKENIZERS), (
        "the other still needs them"
    )
    models_home.remove("meta-llama/Llama-3.1-8B-Instruct")
    assert tree(models_home.cache.folder) == {}


def test_an_entry_that_was_left_half_written_is_written_anew(
    models_home: ModelStore, own: Path
) -> None:
    models_home.add(own, NAME)
    whole = tree(models_home.cache.folder)
    (entry(models_home, NAME) / "refs" / "main").unlink()
    models_home.add(own, NAME)
    assert tree(models_home.cache.folder) == whole
    shutil.rmtree(entry(models_home, NAME) / "snapshots")
    (entry(models_home, NAME) / "halteres.json").unlink()
    models_home.add(own, NAME)
    assert tree(models_home.cache.folder) == whole


def test_somebody_elses_entry_with_another_tokenizer_is_refused_and_left(
    models_home: ModelStore, own: Path
) -> None:
    downloaded(models_home, NAME, b"another")
    before = tree(models_home.cache.folder)
    with pytest.raises(Conflict, match="was not made by `halteres models`"):
        models_home.add(own, NAME)
    assert tree(models_home.cache.folder) == before
    assert model_folder(NAME, models_home.folder) is None


def test_somebody_elses_entry_with_the_same_tokenizer_serves_as_it_is(
    models_home: ModelStore, own: Path
) -> None:
    downloaded(models_home, NAME, (own / "tokenizer.json").read_bytes())
    before = tree(models_home.cache.folder)
    assert models_home.add(own, NAME).tokenizer_names == (NAME,)
    models_home.remove(NAME)
    assert tree(models_home.cache.folder) == before


def test_what_a_hub_later_puts_into_our_entry_stays(models_home: ModelStore, own: Path) -> None:
    models_home.add(own, NAME)
    theirs = entry(models_home, NAME) / "snapshots" / ("b" * 40)
    theirs.mkdir()
    (theirs / "tokenizer.json").write_bytes((own / "tokenizer.json").read_bytes())
    (entry(models_home, NAME) / "refs" / "main").write_text("b" * 40)
    models_home.remove(NAME)
    assert theirs.is_dir() and (entry(models_home, NAME) / "refs" / "main").read_text() == "b" * 40


def test_a_model_put_on_the_shelf_by_hand_is_not_removed(models_home: ModelStore) -> None:
    shutil.copytree(tiny(), models_home.folder / "mine")
    with pytest.raises(Conflict, match="put into the store by hand"):
        models_home.remove("mine")
    assert (models_home.folder / "mine" / "config.json").is_file()


def test_a_name_that_is_taken_is_refused(models_home: ModelStore, own: Path) -> None:
    models_home.add(tiny(), "mine")
    for name in ("mine", TINY, "mine/inner"):
        with pytest.raises(Conflict, match=f"The name '{name}' is taken"):
            models_home.add(own, name)
    assert (models_home.folder / "mine").resolve() == tiny()


@pytest.mark.parametrize(
    "name", ["", "a/b/c", "../x", "a--b", "/x", "a b", "x" * 97, "a/..", "x.git", "ä", ".x"]
)
def test_a_name_is_what_the_hub_would_take(name: str) -> None:
    with pytest.raises(UserError, match="cannot be called"):
        checked_name(name)


def test_a_snapshot_of_the_cache_is_called_what_its_entry_is(tmp_path: Path) -> None:
    assert (
        suggested_name(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("c" * 40))
        == "Qwen/Qwen3-0.6B"
    )
    assert suggested_name(tmp_path / "mine") == "mine"


def test_a_folder_that_cannot_be_served_is_refused_with_the_reason(
    models_home: ModelStore, own: Path
) -> None:
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(
        json.dumps({**config, "model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(UserError, match="model_type 't5'"):
        models_home.add(own, "mine")
    (own / "config.json").write_text("[]")
    with pytest.raises(UserError, match="has another form"):
        models_home.add(own, "mine")
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        models_home.add(own, "mine")
    weights = own / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="is cut off"):
        models_home.add(own, "mine")
    assert tree(models_home.folder) == tree(models_home.cache.folder) == {}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "{home}/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "~/hf"}, "{home}/hf/hub"),
        ({"HF_HOME": "/y", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "/old"}, "{home}/new"),
    ],
)
def test_the_cache_is_where_hugging_face_looks(
    variables: dict[str, str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against huggingface_hub itself, which reads the variables when it is imported."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    script = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    theirs = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    ).stdout.strip()
    assert str(environ.hub_cache()) == theirs == place.format(home=tmp_path)


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        NotReady, match=r"halteres models add FOLDER --as Qwen/Qwen3-0\.6B"
    ) as refused:
        download("Qwen/Qwen3-0.6B", tmp_path)
    assert (
        "Name or service not known" in refused.value.why and "HF_HUB_OFFLINE" in refused.value.next
    )


def test_a_service_answers_to_every_name_of_its_model(models_home: ModelStore, own: Path) -> None:
    models_home.add(own, "mine")
    base = base_model("mine")
    assert (base.name, base.folder) == ("mine", models_home.folder / "mine")
    with pytest.raises(NotFound, match="serves 'mine'") as refused:
        base.check(NAME)
    assert str(base.folder) in refused.value.details["allowed"]
    models_home.add(own, NAME)
    for name in ("mine", NAME, str(own), str(models_home.folder / "mine")):
        assert base.check(name) == name, "as the client wrote it"
    assert set(names_of(own, models_home.folder)) == {"mine", NAME}
    for name in ("halteres/tiny", str(tiny()), "/\0", "/" + "x" * 5000, "../mine", ""):
        with pytest.raises(NotFound):
            base.check(name)


def test_a_service_of_the_builtin_model_answers_to_the_names_it_got(
    models_home: ModelStore,
) -> None:
    models_home.add(tiny(), NAME)
    assert base_model(TINY).check(NAME) == NAME
    assert base_model(NAME).check(TINY) == TINY
    assert base_model(str(tiny())).name == str(tiny())


def test_a_model_that_is_nowhere_is_a_sentence(models_home: ModelStore, own: Path) -> None:
    models_home.add(own, "mine")
    with pytest.raises(NotFound, match="halteres models add") as refused:
        base_model("mime")
    assert refused.value.details["did_you_mean"] == "mine"


@proves("session:sampler-tokenizer")
def test_the_sdk_and_transformers_find_the_tokenizer_offline(
    models_home: ModelStore, own: Path
) -> None:
    """SDK 0.38.0 by the base model's name; seed 003 and the cookbook by their own stand-in."""
    models_home.add(own, NAME)
    models_home.add(own, "meta-llama/Llama-3.2-1B")
    script = (
        "from halteres.process import block_torch\n"
        "block_torch()  # neither needs it, and it is slow to import\n"
        "import tinker\n"
        "from tinker.lib.public_interfaces.sampling_client import _load_tokenizer_from_model_info "
        "as load\n"
        "from transformers import AutoTokenizer\n"
        "from huggingface_hub import scan_cache_dir\n"
        f"found = [load(name) for name in ({NAME!r}, 'meta-llama/Llama-3.2-1B')]\n"
        f"found += [AutoTokenizer.from_pretrained(name) for name in ({NAME!r}, "
        f"*{LLAMA_3_TOKENIZERS!r})]\n"
        f"print({{(t.eos_token_id, *t.encode({TEXT!r})) for t in found}})\n"
        "print(len(scan_cache_dir().repos), scan_cache_dir().warnings)\n"
    )
    variables = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(models_home.cache.folder),
        "TINKER_TELEMETRY": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=60,
    )
    tokenizer = load_tokenizer(str(own))
    expected = (tokenizer.eos_token_id, *tokenizer.encode(TEXT))
    assert ended.stdout.splitlines() == [f"{{{expected}}}", "4 []"], ended.stderr[-2000:]
