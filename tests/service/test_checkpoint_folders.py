"""Adapters that are put into a service's state: what is refused before anything is copied."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from halteres.errors import HalteresError, InvalidData
from halteres.service.checkpoint_folders import add_adapter, parse, read_card

from .test_checkpoints_added import plain_adapter

OWN_STATE: dict[str, Any] = {"version": 3, "lora": {"rank": 4, "alpha": 8.0}, "adam_steps": 3}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return plain_adapter(tmp_path / "mine")


def own_checkpoint(folder: Path) -> Path:
    (folder / "state.json").write_text(json.dumps(OWN_STATE))
    save_file({"first.x": np.zeros(1, np.float32)}, folder / "optimizer.safetensors")
    return folder


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alora_invocation_tokens": [600, 601]}, "alora_invocation_tokens"),
        ({"lora_ga_config": {"direction": "ArB2r"}}, "lora_ga_config"),
        ({"of_a_later_version": True}, "of_a_later_version"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    ],
)
def test_an_adapter_that_computes_otherwise_is_refused_when_it_is_added(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        add_adapter(plain_adapter(tmp_path / "odd", **settings), "odd", tmp_path / "state")
    assert not list(tmp_path.glob("state/checkpoints/*/*/*"))


def test_a_trained_embedding_is_refused_when_it_is_added(adapter: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    save_file({name: np.zeros((4, 672), np.float32)}, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidData):
        add_adapter(adapter, "odd", tmp_path / "state")


BROKEN: dict[str, Callable[[Path], object]] = {
    "deep": lambda file: file.write_text("[" * 100_000),
    "a list": lambda file: file.write_text("[]"),
    "wrong types": lambda file: file.write_text('{"version": {}, "lora": 7}'),
    "a rank that none has": lambda file: file.write_text(
        '{"version": 1, "lora": {"rank": 1000000000}}'
    ),
    "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
    "endless": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "a link": lambda file: (
        file.rename(file.with_name("elsewhere")),
        file.symlink_to(file.with_name("elsewhere")),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_state_file_that_cannot_be_read_is_refused_when_it_is_added(
    adapter: Path, tmp_path: Path, case: str
) -> None:
    BROKEN[case](own_checkpoint(adapter) / "state.json")
    with pytest.raises(HalteresError):
        add_adapter(adapter, "odd", tmp_path / "state")
    assert not list(tmp_path.glob("state/checkpoints/*/*/*"))


def test_a_linked_optimiser_is_not_copied_into_the_state(adapter: Path, tmp_path: Path) -> None:
    own_checkpoint(adapter)
    secret = tmp_path / "secret"
    secret.write_text("a key")
    (adapter / "optimizer.safetensors").unlink()
    (adapter / "optimizer.safetensors").symlink_to(secret)
    with pytest.raises(InvalidData, match=r"optimizer\.safetensors is a symbolic link"):
        add_adapter(adapter, "odd", tmp_path / "state")
    assert not [
        file
        for file in (tmp_path / "state").rglob("*")
        if file.is_file() and "key" in file.read_text()
    ]


@pytest.mark.parametrize("name", ["checkpoint.json", "state.json", "adapter_config.json"])
@pytest.mark.parametrize("case", ["deep", "a list", "a FIFO", "endless"])
def test_a_folder_in_the_state_whose_files_cannot_be_read_is_no_checkpoint(
    tmp_path: Path, name: str, case: str
) -> None:
    """The service looks at each when it starts: one of them must not keep it from the others."""
    path = add_adapter(own_checkpoint(plain_adapter(tmp_path / "mine")), "mine", tmp_path)
    folder = path.folder(tmp_path)
    if name != "checkpoint.json":
        (folder / "checkpoint.json").unlink()
    assert read_card(parse(str(path)), folder) is not None
    BROKEN[case](folder / name)
    assert read_card(parse(str(path)), folder) is None
