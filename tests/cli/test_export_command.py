"""`halteres export` and `halteres checkpoints add`, as a person starts them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from halteres.models import TINY, builtin_path
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.named_weights import vllm_command

Program = Callable[..., subprocess.CompletedProcess[str]]

PEFT = {"adapter_config.json", "adapter_model.safetensors"}
MODULE = "model.layers.0.self_attn.q_proj"

pytestmark = pytest.mark.runs

CONVERTER = """#!/usr/bin/env python3
import pathlib, sys
model, flag, out = sys.argv[1:]
assert flag == "--outfile" and (pathlib.Path(model) / "model.safetensors").is_file()
pathlib.Path(out).write_bytes(b"GGUF" + (pathlib.Path(model) / "config.json").read_bytes())
"""
"""Stands in for llama.cpp's convert_hf_to_gguf.py, with its arguments."""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A PEFT folder that adapts one projection of the built-in model."""
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": TINY})
    )
    tensors = {
        "lora_A": np.full((2, 128), 0.5, np.float32),
        "lora_B": np.full((128, 2), 0.25, np.float32),
    }
    named = {f"base_model.model.{MODULE}.{part}.weight": values for part, values in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_run_is_exported_as_a_peft_folder(
    finished: RunDirectory, adapter: Path, halteres: Program
) -> None:
    shutil.copytree(adapter, finished.path / "adapter", dirs_exist_ok=True)
    out = finished.path.parents[1] / "out"
    told = halteres("export", finished.run_id[:4], "--out", str(out))
    assert told.returncode == 0, told.stderr
    assert names(out) == PEFT | {"README.md"}
    assert (
        f"Next: vllm serve {builtin_path(TINY)} --enable-lora --lora-modules out={out}\n"
        in told.stdout
    )


@pytest.mark.parametrize(
    ("rank", "room"), [(2, None), (16, None), (17, "32"), (64, "64"), (300, "320")]
)
def test_the_line_for_vllm_names_folders_and_makes_room_for_the_rank(
    tmp_path: Path, rank: int, room: str | None
) -> None:
    """vLLM looks for a name on the hub, and refuses adapters above rank 16 unless it is told one of
    its own figures.
    """
    folder = tmp_path / "my adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    words = shlex.split(vllm_command("/models/base", folder, "mine"))
    made = ["--max-lora-rank", room] if room else []
    assert words == [
        "vllm",
        "serve",
        "/models/base",
        "--enable-lora",
        "--lora-modules",
        f"mine={folder}",
        *made,
    ]


def test_a_run_without_a_result_names_its_checkpoint(
    finished: RunDirectory, halteres: Program, tmp_path: Path
) -> None:
    told = halteres("export", finished.run_id, "--out", str(tmp_path / "out"))
    assert told.returncode == 1
    assert "tinker://x/weights/final" in told.stderr


def test_an_added_adapter_is_exported_by_its_path(
    adapter: Path, halteres: Program, tmp_path: Path
) -> None:
    added = halteres("checkpoints", "add", str(adapter), "--as", "mine")
    assert (added.returncode, added.stdout) == (0, "tinker://added/weights/mine\n"), added.stderr
    assert (
        halteres("export", "tinker://added/weights/mine", "--out", str(tmp_path / "out")).returncode
        == 0
    )
    assert names(tmp_path / "out") == PEFT | {"README.md"}
    again = halteres("checkpoints", "add", str(adapter), "--as", "mine")
    assert (again.returncode, "exists" in again.stderr) == (1, True)
    missing = halteres("export", "tinker://added/weights/other", "--out", str(tmp_path / "o"))
    assert (missing.returncode, "--state" in missing.stderr) == (1, True)


def test_a_full_folder_is_not_written_over(
    adapter: Path, halteres: Program, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter").write_text("dear")
    told = halteres("export", str(adapter), "--out", str(tmp_path / "out"))
    assert (told.returncode, names(tmp_path / "out")) == (1, {"letter"})


def test_without_a_converter_gguf_is_refused_before_anything_is_merged(
    adapter: Path, halteres: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = halteres("export", str(adapter), "--format", "gguf", "--out", str(tmp_path / "out"))
    assert (told.returncode, "--converter FILE" in told.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


def test_a_merged_model_is_the_base_plus_the_adapter_and_a_converter_gets_it(
    adapter: Path, halteres: Program, tmp_path: Path
) -> None:
    base = builtin_path(TINY)
    assert base is not None
    merged = tmp_path / "merged"
    told = halteres("export", str(adapter), "--format", "merged", "--out", str(merged))
    assert told.returncode == 0, told.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names(merged)
    tool = tmp_path / "convert_hf_to_gguf.py"
    tool.write_text(CONVERTER)
    _assert_merged(base / "model.safetensors", merged / "model.safetensors")
    options = ("--dtype", "float32", "--converter", str(tool))
    told = halteres(
        "export", str(adapter), "--format", "gguf", "--out", str(tmp_path / "g"), *options
    )
    assert told.returncode == 0, told.stderr
    form, _, config = (tmp_path / "g" / "model.gguf").read_bytes().partition(b"{")
    assert (form, json.loads(b"{" + config)["dtype"]) == (b"GGUF", "float32")


def _assert_merged(base: Path, merged: Path) -> None:
    """2 * (0.25 * 0.5 * 2) is added to every value of one projection; every other tensor is the
    base's.
    """
    import torch
    from safetensors.torch import load_file as load

    before, after = load(base), load(merged)
    changed = {
        name for name in after if name in before and not torch.equal(before[name], after[name])
    }
    assert changed == {f"{MODULE}.weight"}
    weight = f"{MODULE}.weight"
    expected = (before[weight].float() + 0.5).to(before[weight].dtype)
    assert torch.equal(after[weight], expected)
