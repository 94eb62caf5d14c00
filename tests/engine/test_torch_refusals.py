"""What the torch engine refuses to train on, and what is left untouched then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from contract.requirements import proves
from safetensors.torch import load_file, save_file

from halteres.engine.checks import LossNotFinite, check_adam
from halteres.engine.protocol import Adam, Datum, LoraConfig, LossSpec
from halteres.errors import InvalidData, NotFound, UserError, as_failed_future
from halteres.losses import LOSSES

from .requests import CROSS_ENTROPY, IMPORTANCE_SAMPLING, array, packed
from .torch_fixtures import LORA, RATE, gradient, lessons, pair, prompts, running, trained, weights


@proves("optim:needs-gradient")
async def test_a_step_without_a_gradient_is_refused(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        with pytest.raises(UserError, match="no gradient"):
            await engine.optim_step("a", RATE)
        await engine.forward_backward("a", lessons(2), CROSS_ENTROPY, forward_only=True)
        with pytest.raises(UserError, match="no gradient"):
            await engine.optim_step("a", RATE)


@proves("optim:needs-gradient")
async def test_a_gradient_that_is_not_finite_moves_nothing_and_is_cleared(
    model_folder: Path,
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        before = weights(engine)
        await engine.forward_backward("a", lessons(2), CROSS_ENTROPY)
        engine._adapters["a"]._gradient[7] = float("inf")
        with pytest.raises(LossNotFinite, match="gradient is not finite"):
            await engine.optim_step("a", RATE)
        assert torch.equal(weights(engine), before)
        with pytest.raises(UserError, match="no gradient"):
            await engine.optim_step("a", RATE)
        await engine.forward_backward("a", lessons(2), CROSS_ENTROPY)
        assert (await engine.optim_step("a", RATE)).version == 2


async def test_a_ratio_that_overflows_is_refused_and_accumulates_nothing(
    model_folder: Path,
) -> None:
    tokens = prompts(1, low=10)[0]
    n = len(tokens) - 1
    q = [-5.0] * n
    q[3] = -1000.0
    bad = pair(tokens, logprobs=q, advantages=[1.0] * n)
    good = pair(tokens, logprobs=[-5.0] * n, advantages=[1.0] * n)
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        with pytest.raises(LossNotFinite) as caught:
            await engine.forward_backward("a", (good, bad), IMPORTANCE_SAMPLING)
        assert caught.value.code == "nan_loss"
        told = as_failed_future(caught.value)
        assert told["error"].startswith("[nan_loss] The loss is not finite at datum 1, position 3.")
        assert told["category"] == "user"
        assert not gradient(engine).any()
        await engine.forward_backward("a", (good,), IMPORTANCE_SAMPLING)
        assert torch.isfinite(gradient(engine)).all()


TOKENS = list(range(10, 20))
GOOD = pair(TOKENS, weights=[1.0] * 9)


def with_input(name: str, value: Any) -> Datum:
    inputs = {**GOOD.inputs, name: value}
    return msgspec.structs.replace(GOOD, inputs={k: v for k, v in inputs.items() if v is not None})


MALFORMED = {
    "token outside the vocabulary": (
        msgspec.structs.replace(GOOD, tokens=packed([99999, *TOKENS[1:9]])),
        "99999",
    ),
    "negative token": (msgspec.structs.replace(GOOD, tokens=packed([-1, *TOKENS[1:9]])), "-1"),
    "no tokens": (msgspec.structs.replace(GOOD, tokens=b""), "Datum 1"),
    "target outside": (
        with_input("target_tokens", array([5] * 8 + [672], "int64")),
        "target_tokens",
    ),
    "short targets": (with_input("target_tokens", array([5] * 8, "int64")), "target_tokens"),
    "several targets": (
        with_input("target_tokens", array(np.zeros((9, 2)), "int64")),
        "target_tokens",
    ),
    "no weights": (with_input("weights", None), "weights"),
    "weights not finite": (with_input("weights", array([1.0] * 8 + [float("nan")])), "weights"),
    "bytes missing": (
        with_input("weights", msgspec.structs.replace(array([1.0] * 9), data=b"\0" * 8)),
        "weights",
    ),
    "too long": (pair([5] * 2060, weights=[1.0] * 2059), "2048"),
}


@pytest.mark.parametrize("case", MALFORMED)
@proves("pass:bad-datum", "tenants:no-leak")
async def test_a_malformed_datum_is_refused_by_name_and_poisons_nobody(
    model_folder: Path, case: str
) -> None:
    bad, named = MALFORMED[case]
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        await engine.forward_backward("a", (GOOD,), CROSS_ENTROPY)
        before = gradient(engine)
        with pytest.raises(InvalidData, match="Datum 1") as caught:
            await engine.forward_backward("a", (GOOD, bad), CROSS_ENTROPY)
        assert named in caught.value.sentence
        assert torch.equal(gradient(engine), before)
        await engine.optim_step("a", RATE)


async def test_unknown_names_are_refused_with_the_known_ones(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        for wrong in ("cross_entropi", "q"):
            with pytest.raises(InvalidData, match="There is no loss") as caught:
                await engine.forward_backward("a", (GOOD,), LossSpec(name=wrong))
            assert all(name in caught.value.sentence for name in LOSSES)
            assert caught.value.sentence.count("importance_sampling") == 1
        with pytest.raises(NotFound, match="'b'"):
            await engine.forward_backward("b", (GOOD,), CROSS_ENTROPY)
        with pytest.raises(InvalidData, match="rank"):
            await engine.create_adapter("c", LoraConfig(rank=0))


@pytest.mark.parametrize(
    "field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]
)
@pytest.mark.parametrize("value", [1e39, 1e300, float("inf"), float("nan"), -1e-9])
@proves("optim:needs-gradient")
def test_a_number_that_float32_cannot_hold_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidData, match=re.escape(f"{field} is {value}.")):
        check_adam(msgspec.structs.replace(RATE, **{field: value}))


NO_WEIGHT = (pair(TOKENS, weights=[0.0] * 9),)

DESTROYING = {
    "weights that overflow": (lessons(2), Adam(learning_rate=3e38, beta1=0.99)),
    "a decay that overflows": (lessons(2), Adam(weight_decay=3e38, learning_rate=3e38)),
    "a decay of infinite weights": (lessons(2), Adam(weight_decay=3e38, learning_rate=1e3)),
    "0 divided by 0": (NO_WEIGHT, Adam(eps=0.0)),
    "an eps below float32's": (NO_WEIGHT, Adam(eps=1e-300)),
}


@pytest.mark.parametrize("case", DESTROYING)
@proves("optim:needs-gradient")
async def test_a_step_whose_result_is_not_finite_moves_nothing_and_what_follows_is_undisturbed(
    model_folder: Path, tmp_path: Path, case: str
) -> None:
    """Twice, as a replay executes it: the same refusal, and afterwards the bits of an adapter that
    never saw it.
    """
    data, destroying = DESTROYING[case]
    async with running(model_folder) as engine:
        for name in "ab":
            await engine.create_adapter(name, LORA)
            await engine.forward_backward(name, lessons(2), CROSS_ENTROPY)
            await engine.optim_step(name, Adam(learning_rate=1e-3, eps=1e-8, weight_decay=0.1))
        for again in range(2):
            await engine.forward_backward("a", data, CROSS_ENTROPY)
            if again == 0:
                with pytest.raises(InvalidData, match="learning_rate is 1e"):
                    await engine.optim_step("a", Adam(learning_rate=1e300))
            with pytest.raises(LossNotFinite, match="what it makes of the weights is not finite"):
                await engine.optim_step("a", destroying)
            with pytest.raises(UserError, match="no gradient"):
                await engine.optim_step("a", RATE)
        for name in "ab":
            await engine.forward_backward(name, lessons(4), CROSS_ENTROPY)
            assert (await engine.optim_step(name, RATE)).version == 2
            await engine.save(name, str(tmp_path / name), optimizer=True)
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            tensors = load_file(tmp_path / "a" / file)
            assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


async def test_a_step_out_of_range_leaves_the_gradient_to_a_better_one(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
            await engine.forward_backward(name, lessons(2), CROSS_ENTROPY)
        for number in (1e39, 1e300):
            for field in ("learning_rate", "weight_decay", "eps"):
                with pytest.raises(InvalidData, match=field):
                    await engine.optim_step("a", msgspec.structs.replace(RATE, **{field: number}))
        for name in "ab":
            await engine.optim_step(name, RATE)
        assert torch.equal(weights(engine), weights(engine, "b"))


async def test_a_checkpoint_that_is_not_finite_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.save("a", str(tmp_path / "a"), optimizer=False)
        tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
        with pytest.raises(InvalidData, match="NaN or infinite"):
            await engine.load("b", str(tmp_path / "a"), optimizer=False)


async def test_a_cross_entropy_that_is_not_finite_is_told_without_importance_ratios(
    model_folder: Path,
) -> None:
    huge = pair(TOKENS, weights=[1.0] * 8 + [3e38])
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        with pytest.raises(LossNotFinite, match="not finite at datum 0, position 8") as caught:
            await engine.forward_backward("a", (huge,), CROSS_ENTROPY)
        assert "'weights'" in caught.value.sentence
        assert "ratio" not in caught.value.sentence


async def test_a_target_of_minus_100_is_told_how_to_leave_a_position_out(
    model_folder: Path,
) -> None:
    masked = with_input("target_tokens", array([5] * 8 + [-100], "int64"))
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        with pytest.raises(
            InvalidData, match=r"token -100 at position 8.* give it 0 in 'weights' and any token id"
        ):
            await engine.forward_backward("a", (masked,), CROSS_ENTROPY)
