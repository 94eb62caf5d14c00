"""Which device an engine computes on: a GPU only where it computes what the CPU computes, and where
it pays.

A GPU is compared at start, in a process of its own, which it may take along: `python -m
halteres.engine.torch.device DEVICE DTYPE` prints how far apart the two are. The built-in model,
which is loaded in a second, samples there with an adapter, and a pass over what was sampled is
computed on both: prefill, decoding, shared prefixes, every gradient. Not compared: more than 100
tokens, heads of another width, cached prefixes, several adapters at once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from halteres.engine.protocol import (
    Adam,
    Array,
    BaseType,
    Datum,
    LoraConfig,
    LossSpec,
    SamplingParams,
)
from halteres.engine.torch.engine import TorchEngine
from halteres.errors import InvalidConfig, ProcessFailed
from halteres.models import TINY, builtin_path
from halteres.models.shape import read_shape
from halteres.process import run_caught

log = logging.getLogger(__name__)

SMALL = 50_000_000
"""Parameters of a model that stays on the CPU where the choice is ours. An estimate: no GPU has
been measured yet.
"""

CLOSE = {"float32": 2e-3, "bfloat16": 0.15}
"""How far apart log-probabilities may be, and, relative to its norm, the gradient of any tensor.
Estimates: an emulated GPU's bfloat16 differed by 0.06; a gradient that is missing somewhere differs
by 1.
"""

CHECKED_WITHIN_S = 180.0
CROSS_ENTROPY, PROMPT, NEW = LossSpec(name="cross_entropy"), 32, 32
WIDEST_HEAD = 256  # of a GPU's attention kernels, in steps of 8


async def usable_device(device: str, folder: Path, dtype: BaseType) -> str:
    """`cpu` or `cuda`, for a model in this folder, by the setting `cpu`, `cuda` or `auto`.

    `auto` is a GPU if there is one and the model is not small. InvalidConfig: `cuda`, and torch
    finds no GPU.
    """
    there = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not there:
        raise InvalidConfig(
            "The engine cannot use CUDA here.",
            f"torch {torch.__version__} finds no GPU.",
            "Set inference.device (or HALTERES_DEVICE) to cpu, or install a torch build for your "
            "GPU.",
        )
    shape = read_shape(folder) if there else None
    if shape is None or (device == "auto" and shape.parameters < SMALL):
        return "cpu"
    if dtype == "bfloat16" and (shape.head_width % 8 or shape.head_width > WIDEST_HEAD):
        log.warning("Heads of width %d are no GPU kernel's, so the CPU computes.", shape.head_width)
        return "cpu"
    try:
        apart = await _difference_in_a_process("cuda", dtype)
    except ProcessFailed as failure:
        log.warning("The GPU failed its check, so the CPU computes: %s", failure.why)
        return "cpu"
    if not apart <= CLOSE[dtype]:
        log.warning("The GPU's numbers are %.2g apart from the CPU's, so the CPU computes.", apart)
        return "cpu"
    log.info("The GPU's numbers are within %.2g of the CPU's.", apart)
    return "cuda"


async def _difference_in_a_process(device: str, dtype: BaseType) -> float:
    """`difference`, where a GPU that is lost ends that process alone."""
    argv = (sys.executable, "-m", __name__, device, dtype)
    try:
        ended = await asyncio.to_thread(run_caught, argv, Path.cwd(), CHECKED_WITHIN_S)
    except TimeoutError:
        raise ProcessFailed("The check did not end.", f"It had {CHECKED_WITHIN_S:.0f} s.") from None
    try:
        return float(ended.out)
    except ValueError:
        last = ended.err.strip().splitlines() or [f"Exit code {ended.code}."]
        raise ProcessFailed("The check failed.", last[-1]) from None


async def difference(device: str, dtype: BaseType) -> float:
    """The largest difference between a device and the CPU: of log-probabilities (in nats), and of
    the gradient of any tensor, relative to its norm.
    """
    folder = builtin_path(TINY)
    assert folder is not None  # noqa: S101 - it is part of the package
    engine, on_cpu = (
        TorchEngine(folder, TINY, device=where, cache_gb=0.1, dtype=dtype)
        for where in (device, "cpu")
    )
    try:
        for one in (engine, on_cpu):  # a step away from B = 0, where A has no gradient
            await one.create_adapter("check", LoraConfig(rank=16))
            await one.forward_backward(
                "check", (_datum(np.arange(100, 164, dtype=np.int32)),), CROSS_ENTROPY
            )
            await one.optim_step("check", Adam(learning_rate=1e-3))
            await one.snapshot("check", "checked")
        prompt = np.arange(100, 100 + PROMPT, dtype=np.int32)
        result = await engine.sample(
            "checked", prompt.tobytes(), 2, SamplingParams(max_tokens=NEW, stop_tokens=())
        )
        data = tuple(
            _datum(np.concatenate([prompt, np.frombuffer(s.tokens, np.int32)]))
            for s in result.sequences
        )
        sampled = [np.frombuffer(one.logprobs, np.float32) for one in result.sequences]
        passes = [
            await one.forward_backward("check", data, CROSS_ENTROPY) for one in (engine, on_cpu)
        ]
        found, expected = (
            [np.frombuffer(one.data, np.float32) for one in passed.logprobs] for passed in passes
        )
        gradients, expected_gradients = (one.gradient("check") for one in (engine, on_cpu))
    finally:
        await asyncio.gather(engine.close(), on_cpu.close())
    apart = [np.abs(one - other).max() for one, other in zip(found, expected, strict=True)]
    apart += [
        np.abs(one - other[-NEW:]).max() for one, other in zip(sampled, expected, strict=True)
    ]
    for name, right in expected_gradients.items():
        apart.append(float((gradients[name].cpu() - right).norm() / right.norm().clamp(min=1e-12)))
    return float(max(apart))


def _datum(tokens: np.ndarray) -> Datum:
    targets, weights = tokens[1:].astype(np.int64), np.ones(len(tokens) - 1, np.float32)
    inputs = {
        "target_tokens": Array(dtype="int64", shape=targets.shape, data=targets.tobytes()),
        "weights": Array(dtype="float32", shape=weights.shape, data=weights.tobytes()),
    }
    return Datum(tokens=tokens[:-1].tobytes(), inputs=inputs)


def main(device: str, dtype: str) -> None:
    """Print how far apart a device and the CPU are."""
    base_type: BaseType = next(one for one in get_args(BaseType) if one == dtype)
    sys.stdout.write(f"{asyncio.run(difference(device, base_type))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
