"""Graphs of custom losses at work: those that the real SDK traces, and those that would harm their host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker.types
import torch
import torch.nn.functional as F
from contract.requirements import proves
from tinker.lib.public_interfaces.custom_loss import run_loss_handle, trace_loss
from torch import Tensor

from halteres.engine.checks import LossNotFinite
from halteres.engine.protocol import Adam, Datum, LossSpec
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch import custom_loss
from halteres.engine.torch.custom_loss import MAX_ELEMENTS, Program
from halteres.engine.torch.limits import Limits
from halteres.errors import InvalidData, UserError

from .custom_losses import LOGPROBS, custom, handmade, node, traced
from .requests import CROSS_ENTROPY, IMPORTANCE_SAMPLING, array, packed
from .torch_fixtures import LORA, gradient, logprobs_of, pair, prompts, running, trained

WAIT_S = 20.0


def run(graph: Program, *inputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    values = graph.run(inputs, "Datum 0", time.monotonic() + WAIT_S)
    return values[graph.loss], {key: values[name] for key, name in graph.metrics.items()}


# What clients write


def importance(logprobs: Tensor, q: Tensor, w: Tensor) -> Any:
    ratio = torch.exp(logprobs - q)
    return -(ratio * w).sum(), {"custom/ratio:mean": ratio.mean(), "custom/n:sum": (w != 0).sum()}


def dual_clip(logprobs: Tensor, q: Tensor, w: Tensor) -> Any:
    ratio = (logprobs - q).exp()
    lower = torch.minimum(ratio * w, torch.clamp(ratio, 0.8, 1.2) * w)
    loss = torch.where(w < 0, torch.maximum(lower, 3.0 * w), lower)
    kl = (q - logprobs) - 1 + (logprobs - q).exp()
    clipped = ((ratio < 0.8) | (ratio > 1.2)) & ~(w == 0)
    return -loss.sum() + 0.01 * kl.sum(), {"custom/clip/frac:mean": clipped.float().mean()}


def pairwise(logprobs: Tensor, q: Tensor, w: Tensor) -> Any:
    """Indexing, shapes, factories, products."""
    n = logprobs.shape[0]
    score = logprobs[None, :] - logprobs.unsqueeze(1)
    upper = torch.ones((n, n), device=logprobs.device).triu(1)
    position = torch.arange(n, dtype=logprobs.dtype) / logprobs.size(0)
    halves = logprobs[: n // 2].sum() - logprobs[..., -2:].mean()
    best = logprobs[logprobs.argmax()] + torch.max(logprobs, dim=0)[0] + logprobs[w > 0].sum()
    joined = torch.cat([logprobs, q.detach()]).view(2, -1).T.flatten()
    loss = -(F.logsigmoid(score) * upper).sum() / math.sqrt(n) + halves + best + joined @ joined
    return loss + (position * logprobs).sum(), {"custom/max:sum": logprobs.max()}


def reductions(logprobs: Tensor, q: Tensor, w: Tensor) -> Any:
    z = torch.logsumexp(logprobs, dim=0) + logprobs.softmax(-1).square().sum() + F.log_softmax(q + logprobs, dim=0)[0]
    z = z + logprobs.cumsum(0).mean(dim=-1) + logprobs.std() + torch.var(logprobs, dim=0, unbiased=False)
    z = z + F.mse_loss(logprobs, q) + F.smooth_l1_loss(logprobs, q, reduction="sum") + torch.norm(logprobs)
    z = z + logprobs.masked_fill(w > 0, 0.0).abs().pow(2).sum(dim=(0,)) + logprobs.sort()[0][0] + logprobs.topk(2)[0][1]
    z = z + logprobs.chunk(2)[1].to(torch.float64).prod().float() + F.softplus(logprobs).sum() + 2 ** logprobs[0]
    return z, {"custom/z:sum": z, "custom/entropy:mean": -(logprobs.exp() * logprobs).sum(dim=-1)}


LOSSES = (importance, dual_clip, pairwise, reductions)
RANKS = {"logprobs": 1, "q": 1, "w": 1}


@pytest.mark.parametrize("function", LOSSES)
@proves("custom:server-side")
def test_what_the_sdk_traces_computes_what_the_function_computes(function: Callable[..., Any]) -> None:
    random = torch.Generator().manual_seed(3)
    q, w = torch.randn(12, generator=random) - 2, torch.randn(12, generator=random)
    ours, theirs = [(q + 0.1).clone().requires_grad_() for _ in range(2)]
    (loss, metrics), (expected, named) = run(Program(traced(function, **RANKS)), ours, q, w), function(theirs, q, w)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs))
    torch.testing.assert_close(metrics, named)


@pytest.mark.parametrize("function", LOSSES)
@proves("custom:server-side")
async def test_it_moves_the_adapter_as_the_client_side_computation_does(
    model_folder: Path, function: Callable[..., Any]
) -> None:
    """The client's way: forward, autograd in the SDK's own code, then cross_entropy with weights -dC/dlp."""
    handle = trace_loss(function, RANKS, "session")
    data = [scored(text, seed) for seed, text in enumerate(prompts(5, low=12, seed=4))]
    async with running(model_folder, Limits(pass_tokens=96)) as engine:
        for name in "ab":
            await trained(engine, name, steps=2)
        forward = await engine.forward_backward("a", tuple(unweighted(one) for one in data), CROSS_ENTROPY, True)
        logprobs = [torch.tensor(logprobs_of(row)).requires_grad_() for row in forward.logprobs]
        loss, metrics = run_loss_handle(handle, [theirs(one) for one in data], logprobs)
        loss.backward()
        weights = [-one.grad for one in logprobs if one.grad is not None]
        surrogate = tuple(reweighted(one, w) for one, w in zip(data, weights, strict=True))
        await engine.forward_backward("a", surrogate, CROSS_ENTROPY)
        passed = await engine.forward_backward("b", tuple(data), custom(function, **RANKS))
        assert passed.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-4)
        assert {key: passed.metrics[key] for key in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        assert passed.logprobs == forward.logprobs
        torch.testing.assert_close(gradient(engine, "b"), gradient(engine, "a"), rtol=1e-5, atol=1e-5)


def scored(text: Sequence[int], seed: int) -> Datum:
    random, n = np.random.default_rng(seed), len(text) - 1
    return pair(text, q=random.normal(-6, 0.5, n), w=random.standard_normal(n))


def unweighted(datum: Datum) -> Datum:
    return reweighted(datum, torch.ones(len(datum.tokens) // 4))


def reweighted(datum: Datum, weights: Tensor) -> Datum:
    targets = datum.inputs["target_tokens"]
    return Datum(tokens=datum.tokens, inputs={"target_tokens": targets, "weights": array(weights.numpy())})


def theirs(datum: Datum) -> tinker.types.Datum:
    inputs = {
        name: torch.from_numpy(np.frombuffer(one.data, one.dtype).reshape(one.shape).copy())
        for name, one in datum.inputs.items()
    }
    tokens = np.frombuffer(datum.tokens, np.int32).tolist()
    return tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def distillation(logprobs: Tensor, teacher: Tensor, scale: Tensor, target_tokens: Tensor) -> Any:
    kept = (target_tokens > 3).unsqueeze(-1).any(-1)
    loss = -(teacher * logprobs * kept * scale).sum()
    return loss, {"custom/mass:mean": logprobs.exp().sum(-1).mean(), "custom/scale:sum": scale}


async def test_logprobs_of_rank_two_and_inputs_of_every_rank_and_dtype(model_folder: Path) -> None:
    """It equals cross_entropy with the same weights."""
    text = prompts(1, low=10)[0]
    targets = array(np.random.default_rng(1).integers(4, 600, (len(text), 4)), "int64")
    weights = np.random.default_rng(2).random((len(text), 4)).astype(np.float32)
    datum = Datum(
        tokens=packed(text), inputs={"target_tokens": targets, "teacher": array(weights), "scale": array(2.0)}
    )
    plain = Datum(tokens=packed(text), inputs={"target_tokens": targets, "weights": array(2 * weights)})
    loss = custom(distillation, logprobs=2, teacher=2, scale=0, target_tokens=2)
    async with running(model_folder) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
        ours = await engine.forward_backward("a", (datum, datum), loss)
        expected = await engine.forward_backward("b", (plain, plain), CROSS_ENTROPY)
        assert ours.logprobs == expected.logprobs
        assert ours.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        mass = np.exp(logprobs_of(ours.logprobs[0])).sum(-1).mean()
        assert ours.metrics["custom/mass:mean"] == pytest.approx(mass, rel=1e-5)
        assert ours.metrics["custom/scale:sum"] == 4.0
        torch.testing.assert_close(gradient(engine, "a"), gradient(engine, "b"), rtol=1e-5, atol=1e-5)


def nothing(logprobs: Tensor) -> Any:
    return logprobs.detach().sum(), {}


def infinite(logprobs: Tensor) -> Any:
    return torch.log(logprobs.sum() * 0), {}


def steep(logprobs: Tensor) -> Any:
    return torch.sqrt(logprobs - logprobs).sum(), {}


def vector(logprobs: Tensor) -> Any:
    return logprobs * 2, {}


def vector_metric(logprobs: Tensor) -> Any:
    return logprobs.sum(), {"custom/a:sum": logprobs * 2}


def misfit(logprobs: Tensor) -> Any:
    return (logprobs + torch.zeros(logprobs.shape[0] + 1)).sum(), {}


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        (nothing, InvalidData, "Datum 0: the custom loss does not depend on logprobs"),
        (infinite, LossNotFinite, "Datum 0: the custom loss, node 'log', is not finite"),
        (steep, LossNotFinite, "Datum 0: the gradient of the custom loss is not finite. First at position 0"),
        (vector, InvalidData, "Datum 0: the loss, node 'mul', is no scalar"),
        (vector_metric, InvalidData, "the metric 'custom/a:sum', node 'mul', is no scalar"),
        (misfit, InvalidData, r"Datum 0: node 'add_1' \(operator.add\)"),
    ],
)
async def test_a_graph_that_fails_is_told_and_nothing_is_accumulated(
    model_folder: Path, function: Callable[..., Any], kind: type[UserError], says: str
) -> None:
    data = tuple(scored(text, 1) for text in prompts(2))
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        with pytest.raises(kind, match=says):
            await engine.forward_backward("a", data, custom(function))
        assert not gradient(engine).any()
        with pytest.raises(UserError, match="no gradient"):
            await engine.optim_step("a", Adam())


async def test_data_that_a_custom_loss_cannot_read_is_named(model_folder: Path, scripted: ScriptedEngine) -> None:
    text = [5, 6, 7, 8]
    good = scored(text, 1)
    spec = custom(importance, **RANKS)
    cases = {
        r"Datum 1 has no loss function input 'q'": unweighted(good),
        r"Datum 1: 'w' has shape \[3, 1\].*rank 1: shape \[3\]": pair(text, q=[0, 0, 0], w=np.zeros((3, 1))),
        r"Datum 1: 'w' has shape \[2\].*rank 1: shape \[3\]": pair(text, q=[0, 0, 0], w=[0, 0]),
        r"Datum 1: 'w' holds a NaN": pair(text, q=[0, 0, 0], w=[0, float("nan"), 0]),
        r"Datum 1: 'target_tokens' has shape \[3, 1\]": Datum(
            tokens=good.tokens, inputs={**good.inputs, "target_tokens": array([[6], [7], [8]], "int64")}
        ),
    }
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        for says, bad in cases.items():
            with pytest.raises(InvalidData, match=says):
                await engine.forward_backward("a", (good, bad), spec)
        with pytest.raises(InvalidData, match="sent with a graph"):
            await engine.forward_backward("a", (good,), LossSpec(name="ppo", custom=spec.custom))
    await scripted.create_adapter("a", LORA)
    with pytest.raises(UserError, match="scripted engine computes no custom losses"):
        await scripted.forward_backward("a", (good,), spec)


# What nobody should send


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def shape(*sizes: int) -> dict[str, list[int]]:
    return {"tuple": [*sizes]}


def chain(first: dict[str, Any], target: str, count: int, *rest: Any) -> list[dict[str, Any]]:
    return [first, *(node(target, ref(first["name"]), *rest, name=f"n{i}") for i in range(count))]


def doubling(count: int) -> list[dict[str, Any]]:
    nodes = [node("torch.cat", [LOGPROBS, LOGPROBS], name="n0")]
    return nodes + [node("torch.cat", [ref(f"n{i}"), ref(f"n{i}")], name=f"n{i + 1}") for i in range(count)]


def squaring(count: int) -> list[dict[str, Any]]:
    nodes = [node("operator.mul", 3, 3, name="n0")]
    return nodes + [node("operator.mul", ref(f"n{i}"), ref(f"n{i}"), name=f"n{i + 1}") for i in range(count)]


WIDE = [node("torch.ones", shape(50_000, 1), name="a"), node("torch.ones", shape(1, 50_000), name="b")]
LARGE, SQUARE = node("torch.ones", MAX_ELEMENTS, name="z"), node("torch.ones", shape(2800, 2800), name="z")

HARMFUL: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a tensor of 10**12": ([node("torch.zeros", 10**12)], r"'x' \(torch.zeros\).*too large"),
    "one of 10**18": ([node("torch.eye", 10**9)], "too large"),
    "a range of 10**13": ([node("torch.arange", 0, 10**13)], "too large"),
    "a range without end": ([node("torch.arange", 0, 1, 1e-300)], r"\(torch.arange\)"),
    "expand": ([node("expand", LOGPROBS, 10**12, -1, op="call_method")], "too large"),
    "repeat": ([node("repeat", LOGPROBS, 10**12, op="call_method")], "too large"),
    "tile": ([node("torch.tile", LOGPROBS, shape(10**12))], "too large"),
    "pad": ([node("torch.nn.functional.pad", LOGPROBS, shape(0, 10**13))], "too large"),
    "new_zeros": ([node("new_zeros", LOGPROBS, 10**13, op="call_method")], "too large"),
    "an outer product": ([*WIDE, node("operator.mul", ref("a"), ref("b"), name="y")], "'y'.*too large"),
    "a mask that widens": (
        [*WIDE, node("operator.gt", ref("b"), 0, name="m"), node("torch.masked_select", ref("a"), ref("m"), name="y")],
        "'y'.*too large",
    ),
    "one inside a mean": (
        [*WIDE, node("torch.nn.functional.mse_loss", ref("a"), ref("b"), name="y")],
        "'y'.*too large",
    ),
    "repeated squaring by cat": (doubling(60), "too large"),
    "many large results": (chain(LARGE, "operator.add", 900, 1), "more than 512 MiB"),
    "many sums of large ones": (chain(LARGE, "torch.sum", 900), "reads too much"),
    "many sorts": (chain(LARGE, "torch.argsort", 900), "reads too much"),
    "many products": (chain(SQUARE, "torch.matmul", 900, ref("z")), "reads too much"),
    "many dimensions": ([node("torch.reshape", LOGPROBS, shape(*[1] * 60, 16))], "too large"),
    "many pieces": ([LARGE, node("torch.unbind", ref("z"), name="y")], "more than 256 pieces"),
    "a hidden loop": ([LARGE, node("torch.diff", ref("z"), 10**6, name="y")], "at most 8 times"),
    "a decomposition": ([SQUARE, node("torch.functional.norm", ref("z"), "nuc", name="y")], "'nuc' is not computed"),
    "an integer power": ([node("operator.pow", 10, 10**9)], r"\(operator.pow\)"),
    "squared integers": (squaring(60), "beyond 64 bits"),
    "a text repeated": ([node("operator.mul", "a", 10**9)], "take tensors and numbers, not str, int"),
    "a text formatted": ([node("operator.mod", "%1000000000d", 1)], "take tensors and numbers"),
    "a list repeated": ([node("operator.mul", [1], 10**9)], "take tensors and numbers"),
    "an index out of range": ([node("operator.getitem", LOGPROBS, 10**9)], r"'x' \(operator.getitem\)"),
    "indices out of range": (
        [node("torch.full", shape(1), 10**15, name="i"), node("torch.take", LOGPROBS, ref("i"), name="y")],
        r"'y' \(torch.take\)",
    ),
    "a function of numbers on a tensor": ([node("math.exp", LOGPROBS)], "take numbers"),
    "a method on a number": ([node("exp", 3, op="call_method")], "called on tensors"),
}


@pytest.mark.parametrize("case", HARMFUL)
@proves("custom:whitelist")
def test_a_graph_that_would_harm_its_host_is_stopped_and_named(case: str) -> None:
    nodes, says = HARMFUL[case]
    graph = Program(handmade(*nodes))
    with pytest.raises(InvalidData, match=says):
        run(graph, torch.randn(16, requires_grad=True))


def test_a_graph_changes_none_of_its_inputs() -> None:
    """Also not through a view, or by operations that torch has in place too."""
    given = torch.randn(16)
    before = given.clone()
    graph = handmade(
        node("view", LOGPROBS, 4, 4, op="call_method", name="v"),
        node("torch.nn.functional.relu", ref("v"), name="a", inplace=False),
        node("torch.nn.functional.elu", ref("v"), name="b"),
        node("operator.gt", ref("v"), 0, name="m"),
        node("masked_fill", ref("v"), ref("m"), 0.0, op="call_method", name="c"),
        node("torch.arange", 4, name="i"),
        node("torch.index_add", ref("v"), 0, ref("i"), ref("v"), name="d"),
    )
    run(Program(graph), given)
    assert torch.equal(given, before)


async def test_a_graph_that_takes_too_long_is_stopped(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_loss, "SECONDS", 0.0)
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        with pytest.raises(InvalidData, match=r"Datum 0: node 'sub' .*takes too long"):
            await engine.forward_backward("a", (scored([5, 6, 7], 1),), custom(importance, **RANKS))
        with pytest.raises(InvalidData, match="no loss function input 'logprobs'"):
            await engine.forward_backward("a", (scored([5, 6, 7], 1),), IMPORTANCE_SAMPLING)
