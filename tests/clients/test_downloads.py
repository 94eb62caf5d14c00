"""Weights leave by other people's programs: tinker-cookbook 0.6.1's `weights`, and the archive of
SDKs up to 0.35.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from halteres.models import TINY, builtin_path

from .conftest import server
from .registered import script
from .test_cookbook import Cookbook, cookbook

__all__ = ["cookbook"]

pytestmark = pytest.mark.clients

PEFT = {"adapter_config.json", "adapter_model.safetensors"}
WEIGHTS = "adapter_model.safetensors"
UNEMBED = "base_model.model.model.unembed_tokens"

DOWNLOAD = """
import sys
from tinker_cookbook import weights
path, base, out = sys.argv[1:]
weights.download(tinker_path=path, output_dir=out + "/adapter")
weights.build_hf_model(base_model=base, adapter_path=out + "/adapter", output_path=out + "/merged")
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """A service, and weights that were saved there."""

    url: str
    state: str  # weights/
    exported: str  # external_weights/


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))


@asynccontextmanager
async def trained(folder: Path) -> AsyncIterator[Trained]:
    """One step of training with the built-in model and the real engine."""
    argv = ("--state", folder / "service", "--model", TINY, "--threads", "1")
    async with server(
        "halteres.service", *argv, probe="/api/v1/healthz", log=folder / "service.log"
    ) as running:
        state, exported = await asyncio.to_thread(_train, running.url)
        yield Trained(running.url, state, exported)


def _train(url: str) -> tuple[str, str]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    training = client.create_lora_training_client(TINY, rank=4, seed=0).result()
    tokens = list(range(5, 25))
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[19]),
        "weights": types.TensorData(data=[1.0] * 19, dtype="float32", shape=[19]),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    saved = (
        training.save_state("final").result().path,
        training.save_weights_external("final").result().path,
    )
    client.close("success").result()
    return saved


@pytest.mark.parametrize("kind", ["state", "exported"])
async def test_the_cookbook_downloads_and_merges(
    cookbook: Cookbook, tmp_path: Path, kind: str
) -> None:
    """Training weights by an export encrypted to a key of its own, which it deletes; exports as
    they are.

    The built-in model's output matrix is its embedding, and there the cookbook merges what was
    trained of it.
    """
    base = builtin_path(TINY)
    assert base is not None
    async with trained(tmp_path) as saved:
        await cookbook.run(
            "-c", DOWNLOAD, getattr(saved, kind), base, tmp_path, url=saved.url, cwd=tmp_path
        )
        listed = await asyncio.to_thread(_paths, saved.url)
    assert listed == {saved.state, saved.exported}
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == PEFT
    _assert_merged(base, tmp_path / "adapter", tmp_path / "merged")


def _paths(url: str) -> set[str]:
    client = tinker.RestClient(base_url=url, api_key="tml-test")
    return {
        checkpoint.tinker_path for checkpoint in client.list_user_checkpoints().result().checkpoints
    }


def _assert_merged(base: Path, adapter: Path, merged: Path) -> None:
    """Every adapted weight is W + alpha / r * B @ A, in the base's type."""
    config, lora = (
        json.loads((adapter / "adapter_config.json").read_bytes()),
        load_file(adapter / WEIGHTS),
    )
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    modules = {
        name.removesuffix(".lora_A.weight") for name in lora if name.endswith(".lora_A.weight")
    }
    assert UNEMBED in modules
    for module in modules:
        own = module.removeprefix("base_model.model.").replace("unembed_tokens", "embed_tokens")
        delta = scale * lora[f"{module}.lora_B.weight"] @ lora[f"{module}.lora_A.weight"]
        expected = (before[f"{own}.weight"].float() + delta).to(before[f"{own}.weight"].dtype)
        assert delta.abs().max() > 0
        torch.testing.assert_close(after[f"{own}.weight"], expected, rtol=2**-7, atol=1e-6)


async def test_an_sdk_of_the_archive_generation_downloads(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """`tinker checkpoint download` of 0.25.0: a redirect to a tar, unpacked."""
    python = client_python("tinker-0.25.0", "tinker==0.25.0")
    async with trained(tmp_path) as saved:
        command = (
            "-m",
            "tinker.cli",
            "checkpoint",
            "download",
            saved.state,
            "-o",
            tmp_path / "out",
        )
        log = tmp_path / "download.log"
        (tmp_path / "out").mkdir()
        await script(python, *command, url=saved.url, log=log, cwd=tmp_path)
    (folder,) = (tmp_path / "out").iterdir()
    assert {file.name for file in folder.iterdir()} == {*PEFT, "checkpoint_complete"}
    assert "base_model.model.lm_head.lora_A.weight" in load_file(folder / WEIGHTS)
