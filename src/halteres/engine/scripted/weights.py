"""The scripted engine's weights: a version and a shape, in real PEFT folders.

Owns: what such a folder holds, written and read.
Never: computes with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import LoraConfig, Saved
from halteres.engine.shapes import foreign_shape
from halteres.errors import InvalidData, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the scripted engine knows of an adapter's or a snapshot's weights."""

    lora: LoraConfig
    version: int

    def write(self, folder: Path, optimizer: bool, base_model: str, hidden_size: int) -> Saved:
        """Write a PEFT folder with its state; whole or not at all."""
        with written(folder) as place:
            (place / "adapter_config.json").write_text(json.dumps(_adapter_config(self.lora, base_model)))
            state = {"version": self.version, "lora": msgspec.to_builtins(self.lora)}
            (place / "state.json").write_text(json.dumps(state))
            save_file(_tensors(self, hidden_size), place / "adapter_model.safetensors")
            if optimizer:
                save_file({"step": np.asarray([self.version])}, place / "optimizer.safetensors")
        return Saved(folder=str(folder), size_bytes=size_of(folder), version=self.version)

    @classmethod
    def read(cls, folder: Path, optimizer: bool) -> Weights:
        """Read a folder that `write` wrote or, without the optimiser, any plain PEFT adapter: that has version 0.

        Raises:
            NotFound: a file is missing; the message names it.
            InvalidData: a file cannot be read, or the adapter is none that an engine computes.
        """
        needed = ["adapter_config.json", "adapter_model.safetensors"]
        needed += ["optimizer.safetensors", "state.json"] * optimizer
        missing = [name for name in needed if not (folder / name).is_file()]
        if missing:
            raise NotFound(
                f"The folder {folder} is not the checkpoint that was asked for.",
                f"It lacks {', '.join(missing)}.",
                "Name a folder written by save, or a PEFT adapter; only one saved with the optimiser restores it.",
            )
        try:
            names = load_file(folder / "adapter_model.safetensors").keys()
            if not (folder / "state.json").is_file():
                return cls(lora=foreign_shape(folder, names), version=0)
            return msgspec.json.decode((folder / "state.json").read_bytes(), type=cls)
        except (msgspec.MsgspecError, SafetensorError) as error:
            raise InvalidData(f"The checkpoint {folder} cannot be read.", f"{error}.", "Use another one.") from error


def _adapter_config(lora: LoraConfig, base_model: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": ["q_proj"],
        "bias": "none",
        "inference_mode": True,
    }


def _tensors(weights: Weights, hidden_size: int) -> dict[str, np.ndarray]:
    """One adapted projection: A from the seed, B filled with the version."""
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    generator = np.random.default_rng((weights.lora.seed or 0) % 2**64)
    shape = (weights.lora.rank, hidden_size)
    return {
        f"{prefix}.lora_A.weight": generator.standard_normal(shape, np.float32),
        f"{prefix}.lora_B.weight": np.full(shape[::-1], float(weights.version), np.float32),
    }
