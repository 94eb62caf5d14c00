"""A base model whose layers lie in parts on all ranks (PyTorch's FSDP2), for one that fits no
device.

Only frozen weights are sharded: adapters are flat buffers outside of all modules, so that they are
made, trained and dropped as ever. Every rank gathers a layer's weights when it computes the layer,
forward and backward, and lets them go after it; so all ranks compute in lockstep
(`passes.compute_in_step`). Embedding, final norm and head stay whole, for they are read in parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class ShardedLinear:
    """A linear module's weights as they are now: this rank's part, or whole while its layer is
    computed. See `projections.Linear`.
    """

    module: nn.Linear
    whole_norm: float  # of all ranks' parts

    @classmethod
    def of(cls, module: nn.Linear) -> ShardedLinear:
        """Called by all ranks together, at load: a later call that fails on one rank alone must
        leave no other waiting.
        """
        return cls(module, _norm(module.weight))

    @property
    def weight(self) -> Tensor:
        """E x D; of all ranks."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """E, where there is one."""
        return self.module.bias

    def norm(self) -> float:
        """See `Linear`."""
        return self.whole_norm


def _norm(weight_ED: Tensor) -> float:
    if not isinstance(weight_ED, DTensor):
        return float(torch.linalg.vector_norm(weight_ED, dtype=torch.float32))
    square = torch.linalg.vector_norm(weight_ED.to_local(), dtype=torch.float32).square()
    # a norm of the DTensor itself would be of this rank's part alone (torch 2.13)
    dist.all_reduce(square, group=weight_ED.device_mesh.get_group())
    return math.sqrt(float(square))


def shard(model: Any, layers: nn.ModuleList, device: torch.device) -> None:
    """Shard a model of transformers over all ranks, layer by layer, on its way to their devices."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    in_layers = set(layers.parameters())
    whole = {one for one in model.parameters() if one not in in_layers}
    with torch.no_grad():
        for one in (*whole, *model.buffers()):
            one.data = one.data.to(device)
    fully_shard(model.base_model, mesh=mesh, ignored_params=whole)
