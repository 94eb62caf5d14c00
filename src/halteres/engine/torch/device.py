"""Which device an engine computes on, and in which type: a GPU only where it computes what the CPU
computes, and where it pays.

A GPU is compared at start, in a process of its own, which it may take along: `python -m
halteres.engine.torch.device DEVICE DTYPE` prints how far apart the two are. The built-in model,
which is loaded in a second, samples there with an adapter, and a pass over what was sampled is
computed on both: prefill, decoding, shared prefixes, every gradient. Not compared: more than 200
tokens, heads of another width, cached prefixes, several adapters at once.

A GPU that fails is refused, with the reason: a large model that went on on the CPU would seem to
hang.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import torch

from halteres.engine.protocol import (
    Adam,
    Array,
    AskedType,
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

EXACT_SQUARE = 1e-6
"""Mean square of differences of log-probabilities that fp32 may have on a GPU. An estimate: the
CPU's own are 1e-12, TF32 would be some 1e-6, a token that sees another one too many 1e-2.
"""

ROUNDED_SQUARE = 2e-3
"""The same of bfloat16, at least: about what two right implementations differed by on the built-in
model (vLLM against this one: 1.1e-3 to 1.8e-3). A CPU without instructions for bfloat16 rounds less
than a GPU.
"""

LEAST_COSINE = {"float32": 0.999, "bfloat16": 0.95}
"""Between the gradients of any tensor on both devices; 0 where one is missing. A CPU's bfloat16 and
its fp32 have 0.998.
"""

MOST_STRETCH = {"float32": 1.01, "bfloat16": 1.25}
"""How many times the longer of those gradients has the length of the other. On a CPU 1.07."""

CHECKED_WITHIN_S = 180.0
CROSS_ENTROPY, PROMPT, NEW, SAMPLES = LossSpec(name="cross_entropy"), 64, 128, 4
WIDEST_HEAD = 256  # of a GPU's attention kernels, in steps of 8


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart a device and the CPU in fp32 are, for the built-in model."""

    dtype: BaseType  # of the device's weights
    sampled: float  # mean square difference of log-probabilities in nats: of sampled tokens
    trained: float  # of a pass
    rounding: float  # of a pass of the CPU in the device's type
    cosine: float  # the lowest between gradients of a tensor
    stretch: float  # the greatest ratio of their norms, 1 or more

    @property
    def problem(self) -> str | None:
        """What is too far apart; None where nothing is."""
        most = EXACT_SQUARE
        if self.dtype == "bfloat16":
            most = max(ROUNDED_SQUARE, 2 * self.rounding)
        for what, found in (("sampled", self.sampled), ("trained", self.trained)):
            if not found <= most:
                return (
                    f"The mean square difference of {what} log-probabilities from the CPU's is "
                    f"{found:.2g}, of which {most:.2g} is allowed."
                )
        least, longest = LEAST_COSINE[self.dtype], MOST_STRETCH[self.dtype]
        if not (self.cosine >= least and self.stretch <= longest):
            return (
                f"A gradient has the cosine {self.cosine:.3g} to the CPU's and {self.stretch:.3g} "
                f"times its length; {least:g} at least and {longest:g} at most are allowed."
            )
        return None


async def usable(device: str, folder: Path, dtype: AskedType) -> tuple[str, BaseType]:
    """The device, `cpu` or `cuda`, and the type of the weights, for a model in this folder.

    Args:
        device: `cpu`, `cuda`, or `auto`: a GPU if there is one and the model is not small.
        folder: of the model.
        dtype: or `auto`: on a GPU bfloat16 where its attention kernels have the width of the
            model's heads; otherwise fp32.

    Raises:
        InvalidConfig: the GPU that is asked for is not there or fails its check; or torch finds
            one, the model is large, and it fails.
    """
    narrow: BaseType = "bfloat16" if dtype == "bfloat16" else "float32"
    there = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not there:
        raise _refused(f"torch {torch.__version__} finds no GPU.", "install a torch build for it")
    shape = read_shape(folder) if there else None
    if shape is None or (device == "auto" and shape.parameters < SMALL):
        return "cpu", narrow
    has_kernels = shape.head_width % 8 == 0 and shape.head_width <= WIDEST_HEAD
    if dtype == "auto" and has_kernels:
        narrow = "bfloat16"
    if narrow == "bfloat16" and not has_kernels:
        raise _refused(
            f"No attention kernel for bfloat16 has heads of width {shape.head_width}.",
            "set inference.dtype to float32",
        )
    try:
        found = await _difference_in_a_process("cuda", narrow)
    except ProcessFailed as failure:
        raise _refused(f"Its check failed: {failure.why}", OTHER_BUILD) from failure
    if found.problem is not None:
        raise _refused(found.problem, OTHER_BUILD)
    log.info("The GPU computes what the CPU computes: %s.", found)
    return "cuda", narrow


OTHER_BUILD = "try another torch build or driver"


def _refused(why: str, otherwise: str) -> InvalidConfig:
    return InvalidConfig(
        "The engine cannot use the GPU.",
        why,
        f"Set inference.device (or HALTERES_DEVICE) to cpu, or {otherwise}.",
    )


async def _difference_in_a_process(device: str, dtype: BaseType) -> Difference:
    """`difference`, where a GPU that is lost ends that process alone."""
    argv = (sys.executable, "-m", __name__, device, dtype)
    try:
        ended = await asyncio.to_thread(run_caught, argv, Path.cwd(), CHECKED_WITHIN_S)
    except TimeoutError:
        raise ProcessFailed("The check did not end.", f"It had {CHECKED_WITHIN_S:.0f} s.") from None
    try:
        return msgspec.json.decode(ended.out, type=Difference)
    except msgspec.MsgspecError:
        last = ended.err.strip().splitlines() or [f"Exit code {ended.code}."]
        raise ProcessFailed("The check failed.", last[-1]) from None


async def difference(device: str, dtype: BaseType) -> Difference:
    """How far apart a device and the CPU are."""
    folder = builtin_path(TINY)
    assert folder is not None  # noqa: S101 - it is part of the package
    wanted: list[tuple[str, BaseType]] = [(device, dtype), ("cpu", "float32")]
    if dtype != "float32":
        wanted.append(("cpu", dtype))
    engines = [
        TorchEngine(folder, TINY, device=where, cache_gb=0.1, dtype=narrow)
        for where, narrow in wanted
    ]
    engine, on_cpu = engines[:2]
    try:
        with tempfile.TemporaryDirectory(prefix="halteres-check-") as scratch:
            await _take_one_adapter(engines, on_cpu, str(Path(scratch) / "adapter"))
        await engine.snapshot("check", "checked")
        prompt = np.arange(100, 100 + PROMPT, dtype=np.int32)
        result = await engine.sample(
            "checked", prompt.tobytes(), SAMPLES, SamplingParams(max_tokens=NEW, stop_tokens=())
        )
        data = tuple(
            _datum(np.concatenate([prompt, np.frombuffer(s.tokens, np.int32)]))
            for s in result.sequences
        )
        sampled_SN = np.stack([np.frombuffer(s.logprobs, np.float32) for s in result.sequences])
        passes = [await one.forward_backward("check", data, CROSS_ENTROPY) for one in engines]
        trained_SN, expected_SN, *rounded_SN = (
            np.stack([np.frombuffer(one.data, np.float32) for one in passed.logprobs])
            for passed in passes
        )
        expected = on_cpu.gradient("check")
        pairs = [
            (gradient.cpu().flatten(), expected[name].flatten())
            for name, gradient in engine.gradient("check").items()
        ]
    finally:
        await asyncio.gather(*(one.close() for one in engines))
    norms = [(float(found.norm()), float(right.norm())) for found, right in pairs]
    return Difference(
        dtype=dtype,
        sampled=_mean_square(sampled_SN - expected_SN[:, -NEW:]),
        trained=_mean_square(trained_SN - expected_SN),
        rounding=_mean_square(rounded_SN[0] - expected_SN) if rounded_SN else 0.0,
        cosine=min(
            float(found @ right) / max(one * other, LEAST_NORM)
            for (found, right), (one, other) in zip(pairs, norms, strict=True)
        ),
        stretch=max(max(pair) / max(min(pair), LEAST_NORM) for pair in norms),
    )


async def _take_one_adapter(
    engines: Sequence[TorchEngine], first: TorchEngine, folder: str
) -> None:
    """All of them have the adapter that one makes, a step away from B = 0, where A has no gradient.
    The first step of Adam goes by signs: steps of their own would lead apart.
    """
    await first.create_adapter("check", LoraConfig(rank=16))
    data = (_datum(np.arange(100, 164, dtype=np.int32)),)
    await first.forward_backward("check", data, CROSS_ENTROPY)
    await first.optim_step("check", Adam(learning_rate=1e-2))
    await first.save("check", folder, optimizer=False)
    for one in engines:
        await one.load("check", folder, optimizer=False)


LEAST_NORM = 1e-30  # of a gradient that is not zero


def _mean_square(apart: np.ndarray) -> float:
    return float(np.mean(np.square(apart, dtype=np.float64)))


def _datum(tokens: np.ndarray) -> Datum:
    targets, weights = tokens[1:].astype(np.int64), np.ones(len(tokens) - 1, np.float32)
    inputs = {
        "target_tokens": Array(dtype="int64", shape=targets.shape, data=targets.tobytes()),
        "weights": Array(dtype="float32", shape=weights.shape, data=weights.tobytes()),
    }
    return Datum(tokens=tokens[:-1].tobytes(), inputs=inputs)


def main(device: str, dtype: str) -> None:
    """Print how far apart a device and the CPU are, as JSON."""
    base_type: BaseType = next(one for one in get_args(BaseType) if one == dtype)
    found = asyncio.run(difference(device, base_type))
    sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
