"""Which device an engine computes on: a GPU only where it computes what the CPU computes, and where it pays.

A GPU is compared at start, with the built-in model, which is loaded in a second: prefill, decoding, a pass with shared
prefixes and its gradient. Where it differs or fails, the engine says so and takes the CPU.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import torch

from halteres.engine.protocol import Adam, Array, BaseType, Datum, LoraConfig, LossSpec, SamplingParams
from halteres.engine.torch.engine import TorchEngine
from halteres.errors import HalteresError, InvalidConfig
from halteres.models import TINY, builtin_path
from halteres.models.shape import read_shape

log = logging.getLogger(__name__)

SMALL = 50_000_000
"""Parameters of a model that stays on the CPU where the choice is ours. An estimate: no GPU has been measured yet."""

CLOSE = {"float32": 1e-3, "bfloat16": 0.1}
"""How far apart the same log-probability may be; in bfloat16 two CPUs differ by .03 on such tokens."""

PROMPT, NEW = 32, 32


async def usable_device(asked: str, folder: Path, dtype: BaseType) -> str:
    """`cpu` or `cuda`, for a model in this folder.

    Args:
        asked: `cpu`, `cuda`, or `auto`: a GPU if there is one and the model is not small.
        folder: of the model.
        dtype: of its base weights.

    Raises:
        InvalidConfig: `cuda`, and torch finds no GPU.
    """
    there = asked != "cpu" and torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise InvalidConfig(
            "The engine cannot use CUDA here.",
            f"torch {torch.__version__} finds no GPU.",
            "Set inference.device (or HALTERES_DEVICE) to cpu, or install a torch build for your GPU.",
        )
    if not there or (asked == "auto" and read_shape(folder).parameters < SMALL):
        return "cpu"
    try:
        apart = await difference("cuda", dtype)
    except (HalteresError, RuntimeError, ImportError) as error:
        log.warning("The GPU failed its check, so the CPU computes: %s", str(error).strip().splitlines()[0])
        return "cpu"
    if not apart <= CLOSE[dtype]:
        log.warning("The GPU's log-probabilities are %.2g apart from the CPU's, so the CPU computes.", apart)
        return "cpu"
    log.info("The GPU's log-probabilities are within %.2g of the CPU's.", apart)
    return "cuda"


async def difference(device: str, dtype: BaseType) -> float:
    """The largest difference of log-probabilities between a device and the CPU, both with the built-in model.

    What the device samples is computed again by a pass on each: prefill, decoding and pass are compared, and, relative
    to its norm, the gradient.
    """
    folder = builtin_path(TINY)
    assert folder is not None  # noqa: S101 - it is part of the package
    engines = [TorchEngine(folder, TINY, device=where, cache_gb=0.1, dtype=dtype) for where in (device, "cpu")]
    prompt = np.arange(100, 100 + PROMPT, dtype=np.int32)
    try:
        result = await engines[0].sample(None, prompt.tobytes(), 2, SamplingParams(max_tokens=NEW, stop_tokens=()))
        sampled = [np.frombuffer(one.logprobs, np.float32) for one in result.sequences]
        data = tuple(_datum(np.concatenate([prompt, np.frombuffer(s.tokens, np.int32)])) for s in result.sequences)
        passed, norms = [], []
        for engine in engines:
            await engine.create_adapter("check", LoraConfig(rank=16))
            found = await engine.forward_backward("check", data, LossSpec(name="cross_entropy"))
            passed.append([np.frombuffer(one.data, np.float32) for one in found.logprobs])
            norms.append(await _gradient_norm(engine))
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    on_device, on_cpu = passed
    apart = [one - other for one, other in zip(on_device, on_cpu, strict=True)]
    apart += [one - other[-NEW:] for one, other in zip(sampled, on_cpu, strict=True)]
    largest = max(float(np.abs(found).max()) for found in apart)
    return max(largest, abs(norms[0] / norms[1] - 1))


async def _gradient_norm(engine: TorchEngine) -> float:
    return (await engine.optim_step("check", Adam(learning_rate=0.0))).metrics["grad_norm:mean"]


def _datum(tokens: np.ndarray) -> Datum:
    targets, weights = tokens[1:].astype(np.int64), np.ones(len(tokens) - 1, np.float32)
    inputs = {
        "target_tokens": Array(dtype="int64", shape=targets.shape, data=targets.tobytes()),
        "weights": Array(dtype="float32", shape=weights.shape, data=weights.tobytes()),
    }
    return Datum(tokens=tokens[:-1].tobytes(), inputs=inputs)
