"""`halteres models` as a person calls it, and what `halteres variables` prints beside it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from runs.run_fixtures import large_model
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from halteres.cli.main import app
from halteres.errors import UserError
from halteres.models import TINY, builtin_path
from halteres.runs.planning import resources

pytestmark = pytest.mark.runs

NAME = "Qwen/Qwen3-4B-Instruct-2507"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return Path(shutil.copytree(folder, tmp_path / "my-model"))


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False)


def told(*arguments: str) -> Any:
    return json.loads(command(*arguments, "--json").output)


def test_a_model_is_added_listed_and_removed(own: Path, tmp_path: Path) -> None:
    added = command("add", str(own))
    assert "my-model: 0.87 M parameters" in added.output
    assert "Next: halteres train arithmetic --set model=my-model\n" in added.output
    assert "halteres serve --model my-model" in added.output
    assert (tmp_path / "hf" / "hub" / "models--my-model" / "refs" / "main").is_file()
    assert told("list")["registered"] == {"my-model": ["my-model"]}
    assert "registered: my-model" in command("list").output
    assert command("remove", "my-model").exit_code == 0
    assert told("list")["registered"] == {}


def test_a_model_that_was_added_is_trained_next_with_what_suits_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "CPU_INFO", tmp_path / "cpuinfo")
    large = large_model(tmp_path / "large")
    said = command("add", str(large)).output
    assert "Next: halteres train arithmetic --set model=large --set learning_rate=0.0003\n" in said
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16")
    said = command("add", str(large), "--as", "again").output
    assert "--set model=again --set learning_rate=0.0003 --set dtype=bfloat16\n" in said


def test_a_model_of_another_home_is_not_listed(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Homes may share the Hugging Face cache, where a model's tokenizer is found."""
    command("add", str(own))
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "another"))
    assert told("list")["registered"] == {}
    assert "my-model" not in command("list").output


def test_the_builtin_model_may_have_another_name_and_is_listed_once() -> None:
    assert told("add", TINY, "--as", NAME)["tokenizer_names"] == [NAME]
    names = [model["name"] for model in told("list")["models"] if model["present"]]
    assert names == [TINY] and told("list")["proposed"] == TINY
    assert told("list")["registered"] == {NAME: [NAME]}


def test_a_model_on_the_shelf_may_have_a_second_name(own: Path) -> None:
    command("add", str(own), "--copy")
    added = told("add", "my-model", "--as", NAME)
    assert Path(added["folder"]).resolve().name == "my-model"


def test_what_cannot_be_added_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for named in ("./nowhere", str(tmp_path / "nowhere"), "empty"):
        with pytest.raises(UserError, match="holds no whole model"):
            command("add", named)
    for named in ("a/b/c", "a" * 5000):
        with pytest.raises(UserError, match="cannot be called 'a"):
            command("add", named)


def test_a_name_of_the_hub_is_downloaded_and_put_on_the_shelf(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, Path]] = []
    snapshot = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("a" * 40)

    def snapshot_download(
        name: str,
        *,
        cache_dir: Path,
        allow_patterns: list[str],
        ignore_patterns: Sequence[str] = (),
    ) -> str:
        """As the library: a file is fetched where a pattern allows it and none leaves it out; `*`
        also means a `/`.
        """
        asked.append((name, cache_dir))
        for file in (one for one in own.rglob("*") if one.is_file()):
            inside = file.relative_to(own).as_posix()
            wanted = any(fnmatch(inside, pattern) for pattern in allow_patterns)
            if wanted and not any(fnmatch(inside, pattern) for pattern in ignore_patterns):
                (snapshot / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, snapshot / inside)
        if (snapshot.parents[1] / "refs").is_dir():
            return str(snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
        return str(snapshot)

    for inside in ("additional_chat_templates/tool_use.jinja", "onnx/model.safetensors"):
        (own / inside).parent.mkdir()
        (own / inside).write_text("{{ messages }}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    added = told("add", "Qwen/Qwen3-0.6B")
    assert set(asked) == {("Qwen/Qwen3-0.6B", tmp_path / "hf" / "hub")}
    assert (snapshot / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert not (snapshot / "onnx").exists()
    num_asked = len(asked)
    assert Path(added["folder"]).resolve() == snapshot
    assert added["tokenizer_names"] == ["Qwen/Qwen3-0.6B"]
    command("add", "Qwen/Qwen3-0.6B")
    assert len(asked) == num_asked, "it is here now"
    command("remove", "Qwen/Qwen3-0.6B")
    assert snapshot.is_dir()


VARIABLES = ["variables", "--url", "http://127.0.0.1:8001"]


def test_variables_name_the_flag_that_keeps_tokenizers_local(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    assert "NO_PROXY" not in CliRunner().invoke(app, VARIABLES).output
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    lines = CliRunner().invoke(app, VARIABLES).output.splitlines()
    assert any(line.startswith("export HF_HUB_OFFLINE=1 ") for line in lines)
    assert any(line.startswith("export NO_PROXY=") and "127.0.0.1" in line for line in lines)


def test_variables_are_those_that_a_script_for_the_hub_and_for_wandb_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script of GEM's games: service, key, tokenizers from this disk, W&B without an account, a
    name it knows.
    """
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    command("add", TINY, "--as", NAME)
    printed = CliRunner().invoke(app, VARIABLES).output
    shell = f"set -e; eval {shlex.quote(printed)}; env"
    told = subprocess.run(
        ["/bin/sh", "-c", shell], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    for line in (
        "TINKER_BASE_URL=http://127",
        "TINKER_API_KEY=tml-",
        "HF_HUB_OFFLINE=1",
        "WANDB_MODE=offline",
    ):
        assert f"\n{line}" in f"\n{told}"
    assert (
        f"# models here: {TINY}, {NAME}; a script's name for one: halteres models add MODEL --as "
        "NAME" in printed
    )
    monkeypatch.setenv("WANDB_API_KEY", "of-a-user-with-an-account")
    assert "WANDB_MODE" not in CliRunner().invoke(app, VARIABLES).output


def test_the_commands_of_the_page_on_models_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lines = [
        *blocks,
        'test "$HF_HUB_OFFLINE" = 1',
        "test -z \"$(find -L $HF_HOME -name 'models--*')\"",
    ]
    ended = subprocess.run(
        ["/bin/sh", "-ec", "\n".join(lines)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Qwen/Qwen3-4B-Instruct-2507: 0.87 M parameters" in ended.stdout


def test_the_list_says_how_a_model_that_is_not_here_is_got() -> None:
    assert "halteres models add NAME" in command("list").output


def random_model(folder: Path) -> Path:
    """A small model of a family that transformers computes."""
    import transformers

    config = transformers.MistralConfig(
        vocab_size=672,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    source = builtin_path(TINY)
    assert source is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder


def test_weights_that_would_be_random_are_refused_of_models_that_transformers_computes_too(
    tmp_path: Path,
) -> None:
    folder = random_model(tmp_path / "mistral")
    assert told("add", str(folder), "--as", "whole")["name"] == "whole"
    file = folder / "model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if ".layers.1." not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        command("add", str(folder), "--as", "half")


def test_a_model_whose_answers_nothing_ends_is_registered_with_a_remark(own: Path) -> None:
    assert told("add", str(own), "--as", "ends")["ends"] is True
    for name, field in (("tokenizer_config", "eos_token"), ("config", "eos_token_id")):
        content = json.loads((own / f"{name}.json").read_text())
        (own / f"{name}.json").write_text(json.dumps({**content, field: None}))
    (own / "generation_config.json").write_text('{"eos_token_id": null}')
    assert told("add", str(own), "--as", "endless")["ends"] is False
    assert "eos_token" in command("add", str(own), "--as", "endless").output


def test_an_end_token_beyond_the_vocabulary_is_named_with_its_file_and_the_vocabularys_size(
    own: Path,
) -> None:
    (own / "generation_config.json").write_text('{"eos_token_id": [2, 5000]}')
    output = command("add", str(own), "--as", "half").output
    assert all(part in output for part in ("generation_config.json", "5000", "672"))
    assert "Nothing ends" not in output
