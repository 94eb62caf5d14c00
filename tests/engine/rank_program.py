"""One of several ranks, started by torchrun: plays the same training as `played` does in one
process, and writes what came of it. `python -m engine.rank_program OUT SHARED [--shard]`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from halteres.engine.protocol import Adam, Datum, LoraConfig, LossSpec
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.micro_batches import planned, read_examples
from halteres.engine.torch.passes import tokens_each
from halteres.engine.torch.ranks import Ranks, card_of
from halteres.errors import HalteresError
from halteres.models import TINY, builtin_path

from .requests import array
from .torch_fixtures import input_of, logprobs_of, pair, prompts

LIMITS = Limits(pass_tokens=256, cache_bytes=1 << 27)
# Adam divides what is nearly 0 by its own size: with the usual eps of 1e-12 the rounding of another
# order of sums moves such a weight by a whole step.
STEP = Adam(learning_rate=1e-3, eps=1e-6, grad_clip_norm=1.0)
STEPS = 8
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "custom")
ADAPTERS = {"a": LoraConfig(rank=16, seed=1), "b": LoraConfig(rank=4, seed=2)}

Found = dict[str, np.ndarray]


def folder() -> Path:
    found = builtin_path(TINY)
    assert found is not None
    return found


def data_of(loss: str, seed: int) -> tuple[Datum, ...]:
    """Twenty datums of unequal lengths."""
    random = np.random.default_rng(seed)
    found = []
    for tokens in prompts(20, low=10, high=60, seed=seed):
        size = len(tokens) - 1
        if loss == "cross_entropy":
            inputs = {"weights": random.standard_normal(size)}
        else:
            sampler = -np.abs(random.standard_normal(size)) - 3
            inputs = {"logprobs": sampler, "advantages": random.standard_normal(size)}
        found.append(pair(tokens, **inputs))
    return tuple(found)


def weighed(data: tuple[Datum, ...], logprobs: list[np.ndarray]) -> tuple[Datum, ...]:
    """What the SDK sends for a loss of the client's, here (lp + 2)² / 2: its negative gradient as
    weights.
    """
    return tuple(
        Datum(
            tokens=one.tokens,
            inputs={
                "target_tokens": one.inputs["target_tokens"],
                "weights": array(-(lp.astype(np.float64) + 2) / len(data)),
            },
        )
        for one, lp in zip(data, logprobs, strict=True)
    )


async def passed(
    engine: TorchEngine, adapter: str, data: tuple[Datum, ...], loss: str, found: Found, key: str
) -> None:
    """A pass, whose figures are kept; a custom loss is a forward and then a pass."""
    if loss == "custom":
        data = tuple(
            pair(
                [*np.frombuffer(one.tokens, np.int32).tolist(), 5],
                weights=np.zeros(len(one.tokens) // 4),
            )
            for one in data
        )
        spec = LossSpec(name="cross_entropy")
        forward = await engine.forward_backward(adapter, data, spec, forward_only=True)
        data = weighed(data, [logprobs_of(one) for one in forward.logprobs])
        loss = "cross_entropy"
    result = await engine.forward_backward(adapter, data, LossSpec(name=loss))
    found[f"logprobs {key}"] = np.concatenate([logprobs_of(one) for one in result.logprobs])
    found[f"loss {key}"] = np.array(result.metrics["loss:sum"])
    found[f"tokens {key}"] = np.array(result.metrics["num_loss_tokens:sum"])


async def figures_of(engine: TorchEngine) -> np.ndarray:
    """Log-probabilities of two passes, the second after a step of the first's gradient."""
    await engine.create_adapter("a", ADAPTERS["a"])
    found: Found = {}
    for number in range(2):
        data = data_of("cross_entropy", number)
        await passed(engine, "a", data, "cross_entropy", found, f"{number}")
        await engine.optim_step("a", STEP)
    return np.concatenate([found["logprobs 0"], found["logprobs 1"]])


def unusable(engine: TorchEngine, size: int) -> tuple[tuple[Datum, ...], int]:
    """Datums of which one has a loss that is not finite, in a micro-batch of the last rank."""
    data, spec = data_of("importance_sampling", 99), LossSpec(name="importance_sampling")
    examples = read_examples(data, spec, engine._info)
    plan = planned(examples, tokens_each(examples, LIMITS.pass_tokens, size))
    index = plan[size - 1][0].index
    old = data[index].inputs
    low = array(np.full_like(input_of(data[index], "logprobs").numpy(), -1e30))
    bad = Datum(tokens=data[index].tokens, inputs={**old, "logprobs": low})
    return (*data[:index], bad, *data[index + 1 :]), index


async def played(engine: TorchEngine, shared: Path, rank: int = 0, size: int = 1) -> Found:
    """Two adapters trained in turns; one made later and dropped, one loaded; what is refused."""
    found: Found = {}
    for name, config in ADAPTERS.items():
        await engine.create_adapter(name, config)
    for step in range(STEPS):
        adapter, loss = ("a", "b")[step % 2], LOSSES[(step // 2) % len(LOSSES)]
        for half in range(2):
            key = f"{step}.{half} {loss}"
            await passed(engine, adapter, data_of(loss, 10 * step + half), loss, found, key)
        stepped = await engine.optim_step(adapter, STEP)
        for name, value in stepped.metrics.items():
            found[f"{name} {step}"] = np.array(value)
    for name in ADAPTERS:
        found[f"weights {name}"] = weights_of(engine, name)

    await engine.create_adapter("late", LoraConfig(rank=8, seed=3))
    await passed(engine, "late", data_of("ppo", 77), "ppo", found, "late")
    await engine.drop("late")
    if rank == 0:
        await engine.save("a", str(shared / "saved"), optimizer=True)
    await together(engine)
    # rank 0 reads it for all of them
    seen = shared / "saved"
    if rank:
        seen = shared / "not seen by this rank"
    await engine.load("loaded", str(seen), optimizer=True)
    await passed(engine, "loaded", data_of("ppo", 78), "ppo", found, "loaded")
    await engine.optim_step("loaded", STEP)
    found["weights loaded"] = weights_of(engine, "loaded")

    await refused(engine, shared, size, found)
    return found


async def refused(engine: TorchEngine, shared: Path, size: int, found: Found) -> None:
    """A loss that is not finite on the last rank, a folder that rank 0 does not see."""
    adapter = engine._adapters["b"]
    await engine.forward_backward("b", data_of("ppo", 80), LossSpec(name="ppo"))
    before = adapter._gradient.clone()
    data, index = unusable(engine, size)
    try:
        await engine.forward_backward("b", data, LossSpec(name="importance_sampling"))
        raise AssertionError("it was taken")
    except HalteresError as error:
        assert f"datum {index}," in error.what, error
        found["refused"] = np.array(error.code)
    assert (adapter._gradient == before).all()
    await engine.optim_step("b", STEP)
    found["weights after a refusal"] = weights_of(engine, "b")

    try:
        await engine.load("b", str(shared / "missing"), optimizer=True)
        raise AssertionError("it was taken")
    except HalteresError as error:
        found["not read"] = np.array(error.code)
    assert (weights_of(engine, "b") == found["weights after a refusal"]).all()


def weights_of(engine: TorchEngine, name: str) -> np.ndarray:
    """All of an adapter's, in the order of PEFT's names: that of the buffer depends on how a model is
    computed.
    """
    adapter = engine._adapters[name]
    named = adapter.layout.named(adapter.flat)
    return np.concatenate([named[one].numpy().ravel() for one in sorted(named)])


async def together(engine: TorchEngine) -> None:
    """Wait until every rank is here."""
    if engine._ranks is not None:
        await asyncio.to_thread(engine._ranks.exchange, b"here")


def digest(found: Mapping[str, np.ndarray]) -> bytes:
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(name.encode() + found[name].tobytes())
    return whole.digest()


async def main(out: str, shared: str, *options: str) -> None:
    shard = "--shard" in options
    size = int(options[-1])
    ranks = Ranks.join(card_of(folder(), "float32", size, shard=shard), "cpu", 60)
    engine = TorchEngine(folder(), TINY, 1, LIMITS, ranks=ranks)
    ranks.watch()
    found = await played(engine, Path(shared), ranks.rank, ranks.size)
    digests = ranks.exchange(digest(found))
    assert len(set(digests)) == 1, "the ranks are not equal"
    if ranks.rank == 0:
        np.savez(out, digest=np.frombuffer(digests[0], np.uint8), **found)
    await together(engine)
    ranks.close()
    await engine.close()
    ranks.leave()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
