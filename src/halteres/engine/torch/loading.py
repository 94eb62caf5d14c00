"""Reading a model folder: one of the families that are computed here, or whatever transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halteres.engine.torch.model import BaseModel, extract, understands
from halteres.engine.torch.transformers_model import wrap
from halteres.errors import InvalidConfig, NotFound, boundary


def load_base(folder: Path, dtype: torch.dtype, device: torch.device) -> BaseModel:
    """Read a model folder in Hugging Face format.

    Raises:
        NotFound: the folder is missing or holds no config.json.
        InvalidConfig: an architecture or a variant of it that is not understood.
    """
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"There is no model in {folder}.",
            "config.json is missing." if folder.is_dir() else "The folder does not exist.",
            "Name a model folder in Hugging Face format, or 'halteres/tiny'.",
        )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with boundary(InvalidConfig, f"Reading the model in {folder}"):
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        model.requires_grad_(False).to(device)
    return extract(model) if understands(config) else wrap(model)
