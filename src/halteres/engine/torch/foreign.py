"""PEFT adapters that somebody else wrote, brought into our layout.

Owns: which tensors of such a folder count, what is zero because it is not there, what cannot be right.
Never: reads the configuration (`shapes` does); invents a step count: such an adapter begins at version 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from halteres.engine.shapes import canonical, foreign_shape
from halteres.engine.torch.adapter import Checkpoint
from halteres.engine.torch.lora import Layout
from halteres.engine.torch.model import BaseModel
from halteres.errors import InvalidData


def read_foreign(folder: Path, tensors: Mapping[str, Tensor], base: BaseModel) -> Checkpoint:
    """An adapter without optimiser, its missing modules zero.

    Raises:
        InvalidData: a tensor is unknown, of a wrong shape, half of a pair, or holds a value that is not finite.
    """
    layout = Layout.of(base, foreign_shape(folder, tensors))
    flat = torch.zeros(layout.size)
    views = layout.named(flat)
    found = {canonical(name): tensor for name, tensor in tensors.items() if not _is_a_copy(name, tensor, base)}
    for name, tensor in found.items():
        why = _flaw(name, tensor, views, found)
        if why:
            raise InvalidData(
                f"The adapter in {folder} does not fit this base model.",
                why,
                "Load it with the base model it was trained on, and export it again if it is damaged.",
            )
        views[name].copy_(tensor)
    return Checkpoint(layout=layout, flat=flat.to(base.device), version=0, adam=None)


def _flaw(name: str, tensor: Tensor, views: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    if name not in views:
        return f"'{name}' is no LoRA tensor of a module that the base model has."
    if not tensor.is_floating_point() or tensor.shape != views[name].shape:
        return f"'{name}' is {tensor.dtype} of shape {list(tensor.shape)}, not {list(views[name].shape)}."
    other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
    if other not in found:
        return f"'{name}' is there and '{other}' is not."
    if not bool(torch.isfinite(tensor).all()):
        return f"'{name}' holds a NaN or infinite value."
    return ""


def _is_a_copy(name: str, tensor: Tensor, base: BaseModel) -> bool:
    """PEFT writes embeddings beside an adapter of lm_head, unchanged ones too; those say nothing."""
    module = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".base_layer")
    own = {"model.embed_tokens": base.embedding_VD, "lm_head": base.head.weight_ED}.get(module)
    if own is None or own.shape != tensor.shape:
        return False
    return torch.allclose(tensor.to(own), own, rtol=2**-8, atol=1e-6)  # it may have been rounded to bfloat16
