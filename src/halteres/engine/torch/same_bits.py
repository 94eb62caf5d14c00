"""Whether an engine is exact: the same request has the same bits another time, and trainer and
sampler agree to the bit. On a CPU it is tried, since kernels differ (`cpu_kernels`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from halteres.engine.torch.attention import KEY_BLOCK, QUERY_BLOCK, weighted, weights
from halteres.engine.torch.model import BaseModel, FusedModel
from halteres.engine.torch.projections import LEAST_ROWS, linear, reduced, unrounded

log = logging.getLogger(__name__)

ROWS = 33 * LEAST_ROWS
"""Of a training pass; a step of the decoder has fewer."""

FEWER = (LEAST_ROWS, 2 * LEAST_ROWS, 5 * LEAST_ROWS, 9 * LEAST_ROWS)

HEADS = 6


def is_exact(base: BaseModel) -> bool:
    """What `ModelInfo.exact` says of this base; the log names a CPU that is not."""
    if not isinstance(base, FusedModel) or base.device.type != "cpu":
        return False
    if keeps_bits(base):
        return True
    log.warning(
        "The kernels of this processor give a row other bits among other rows, so that this engine "
        "is not exact: what it has sampled is kept instead of being drawn again, and training "
        "corrects for the difference. See docs/training-service.md, 'What a crash costs'."
    )
    return False


def keeps_bits(base: BaseModel) -> bool:
    """Whether a few rows have the bits that they have among many: tried with the base's own
    matrices, one of each shape, and with attention of its width. It takes milliseconds for a shape
    of a small model, and at most a second for one of 8 billion parameters.
    """
    drawn = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=drawn).to(dtype)

    layers = {
        projection.weight_ED.shape: projection
        for layer in base.layers
        for projection in (*layer.attention, *layer.mlp)
    }
    with torch.no_grad():
        for one in layers.values():
            x_ND, a_RD = (random(rows, one.inputs, dtype=base.operands) for rows in (ROWS, 16))
            dy_NE = random(ROWS, one.weight_ED.shape[0], dtype=base.operands)
            if not (
                _same(lambda x, one=one: linear(x, one.weight_ED, one.bias_E), x_ND)
                and _same(lambda dy, one=one: linear(dy, one.weight_ED.t()), dy_NE)
                and _same(lambda x, a_RD=a_RD: reduced(x, a_RD), x_ND)
            ):
                return False
        head, x_ND = base.head, random(ROWS, base.head.inputs, dtype=base.operands)
        if not _same(lambda x: unrounded(x, head.weight_ED, head.bias_E), x_ND):
            return False
        q_XMW, k_XLW, v_XLW = (
            random(HEADS, rows, base.head_width)
            for rows in (QUERY_BLOCK, 2 * KEY_BLOCK, 2 * KEY_BLOCK)
        )
        mask_ML = torch.zeros(1, 2 * KEY_BLOCK)

        def attended(q_MXW: Tensor) -> Tensor:
            p_XML = weights(q_MXW.transpose(0, 1).contiguous(), k_XLW, mask_ML)
            return weighted(p_XML, v_XLW).transpose(0, 1)

        return _same(attended, q_XMW.transpose(0, 1))


def _same(compute: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    whole = compute(rows)
    return all(
        torch.equal(compute(rows[start : start + count].contiguous()), whole[start : start + count])
        for count in FEWER
        if count <= len(rows)
        for start in (0, len(rows) - count)
    )
