"""Reading a model folder: one of the families that are computed here, or whatever transformers
computes.

What a folder lacks transformers would draw at random, anew at each start; here it is refused.
`python -m halteres.engine.torch.loading FOLDER` looks for that without reading a weight: it prints
a JSON object of what is wrong, by which a folder is refused before anything waits for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from halteres.engine.torch.model import BaseModel, extract, understands
from halteres.engine.torch.transformers_model import wrap
from halteres.errors import HalteresError, InvalidConfig, NotFound, as_failure, boundary
from halteres.models.shape import BUFFER, FAMILIES, FEW, LAYERS, check_unquantised, read_config
from halteres.tokenizer import end_tokens


def load_base(
    folder: Path, dtype: torch.dtype, device: torch.device, *, shard: bool = False
) -> BaseModel:
    """Read a model folder in Hugging Face format; `shard`: in parts on all ranks, each of which
    reads it whole into main memory first.

    Raises:
        NotFound: the folder is missing or holds no config.json.
        InvalidConfig: an architecture or a variant of it that is not understood, or weights that
            are not there, or not finite.
    """
    config, model = _read(folder, dtype=dtype)
    with boundary(InvalidConfig, f"Reading the model in {folder}"):
        model.requires_grad_(False)
        if not shard:
            model.to(device)
        refuse_not_finite(folder, model)
        eos_tokens = end_tokens(folder)
    if shard:
        return wrap(model, eos_tokens, device)
    if understands(config):
        return extract(model, eos_tokens)
    return wrap(model, eos_tokens)


def check_weights(folder: Path) -> None:
    """Raise what `load_base` would of a folder's files, without reading a weight."""
    _read(folder, dtype=torch.float32, device_map="meta")


def _read(folder: Path, **how: Any) -> tuple[Any, Any]:
    """The configuration and the model, as transformers makes them."""
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"There is no model in {folder}.",
            "config.json is missing." if folder.is_dir() else "The folder does not exist.",
            "Name a model folder in Hugging Face format, or 'halteres/tiny'.",
        )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    asked: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with boundary(InvalidConfig, f"Reading the model in {folder}"):
        check_unquantised(read_config(folder))
        config: Any = AutoConfig.from_pretrained(folder, **asked)
        # With `output_loading_info` it returns a pair, which its type does not say.
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **how, **asked
        )
        model, report = found
    refuse_missing(folder, report["missing_keys"])
    if config.model_type in FAMILIES:
        refuse_surplus(folder, report["unexpected_keys"])
    return config, model


def refuse_missing(folder: Path, missing: Collection[str]) -> None:
    """InvalidConfig where transformers found no value for some weights of a model, with the first
    of their names.
    """
    if missing:
        first = ", ".join(sorted(missing)[:FEW])
        raise InvalidConfig(
            f"The model in {folder} is not whole.",
            f"Its files lack {len(missing)} of its weights, {first} first; they would be random, "
            "anew at each start.",
            "Download or save it again: every name in its weight files must be one of the model's.",
        )


def refuse_surplus(folder: Path, surplus: Collection[str]) -> None:
    """InvalidConfig where the layers in a model's files have more than its config.json says, so
    that not all would be computed.
    """
    layers = sorted(name for name in surplus if LAYERS in name and not name.endswith(BUFFER))
    if layers:
        raise InvalidConfig(
            f"The model in {folder} is not what its config.json says.",
            f"Its files have {len(layers)} tensors of layers that its model has not, {layers[0]} "
            "first.",
            "Take config.json and weights from one place.",
        )


def refuse_not_finite(folder: Path, model: torch.nn.Module) -> None:
    """InvalidConfig where weights of a model hold NaN or infinite values, with the first of their
    names. A core looks at 1.1 to 1.9 thousand million values each second, in fp32 and bfloat16.
    """
    broken = [
        name
        for name, weights in model.named_parameters()
        if weights.is_floating_point() and weights.numel() and not _is_finite(weights)
    ]
    if broken:
        raise InvalidConfig(
            f"The model in {folder} cannot be computed.",
            f"{len(broken)} of its weights hold NaN or infinite values, "
            f"{', '.join(broken[:FEW])} first.",
            "Download or save it again; of a checkpoint of a training, take an earlier one.",
        )


def _is_finite(weights: torch.Tensor) -> bool:
    """Whether all values are: the least and the greatest value are NaN where one is."""
    return all(bool(torch.isfinite(end)) for end in weights.detach().aminmax())


def main(folder: str) -> None:
    """Print what is wrong with a folder's weights: an empty object where nothing is."""
    try:
        check_weights(Path(folder))
        found: dict[str, str] = {}
    except HalteresError as error:
        found = as_failure(error)
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
