"""Losses, gradients, optimiser, micro-batches of the torch engine; what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.requirements import proves

from halteres.engine.protocol import UPDATE_METRIC, Adam, LoraConfig
from halteres.engine.torch.adapter import Adapter
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.micro_batches import Example, MicroBatch, plan
from halteres.errors import ServerError

from .requests import CROSS_ENTROPY, IMPORTANCE_SAMPLING
from .torch_fixtures import (
    LORA,
    RATE,
    Reference,
    gradient,
    input_of,
    lessons,
    logprobs_of,
    of_answer,
    pair,
    prompts,
    running,
    sample,
    trained,
    weights,
    within,
)


@proves("loss:importance_sampling", "loss:gradients")
async def test_importance_sampling_and_its_gradient_equal_the_formula(model_folder: Path) -> None:
    """-sum exp(lp - q) * A, in float64 over transformers; a token without advantage may carry any
    finite q.
    """
    random = np.random.default_rng(1)
    async with running(model_folder) as engine:
        await trained(engine, steps=2)
        adapter = engine._adapters["a"]
        reference = Reference(
            model_folder, adapter.layout.named(adapter.flat.clone()), LORA.alpha / LORA.rank
        )
        expected, data = torch.zeros((), dtype=torch.float64), []
        for tokens in prompts(5, seed=2):
            logprobs = reference.logprobs(pair(tokens))
            advantages = random.standard_normal(len(tokens) - 1)
            advantages[: len(tokens) // 2] = 0
            q = logprobs.detach().numpy() + random.normal(0, 0.3, len(advantages))
            data.append(
                pair(tokens, logprobs=np.where(advantages == 0, -10000.0, q), advantages=advantages)
            )
            ratio = (
                logprobs
                - input_of(data[-1], "logprobs").where(torch.tensor(advantages != 0), logprobs)
            ).exp()
            expected = expected - (ratio * input_of(data[-1], "advantages")).sum()
        passed = await engine.forward_backward("a", tuple(data), IMPORTANCE_SAMPLING)
        expected.backward()
        assert passed.metrics["loss:sum"] == pytest.approx(expected.item(), abs=within(1e-3, 0.5))
        ours = adapter.layout.named(adapter._gradient)
        for name, theirs in reference.adapter.items():
            assert theirs.grad is not None
            tolerance = within(1e-4, 0.15) * max(1.0, theirs.grad.abs().max().item())
            torch.testing.assert_close(ours[name].double(), theirs.grad, rtol=1e-4, atol=tolerance)


@proves("pass:logprobs")
async def test_log_probabilities_are_real_where_the_weight_is_zero(model_folder: Path) -> None:
    (tokens,) = prompts(1, low=20)
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        zero = await engine.forward_backward(
            "a", (pair(tokens, weights=[0.0] * (len(tokens) - 1)),), CROSS_ENTROPY
        )
        one = await engine.forward_backward(
            "a", (pair(tokens, weights=[1.0] * (len(tokens) - 1)),), CROSS_ENTROPY
        )
        assert zero.logprobs == one.logprobs
        assert (logprobs_of(zero.logprobs[0]) < 0).all()
        assert zero.metrics["loss:sum"] == 0
        assert one.metrics["loss:sum"] == pytest.approx(
            -logprobs_of(one.logprobs[0]).sum(), rel=1e-5
        )


@proves("pass:metric-names")
async def test_metric_names_hold_one_colon_and_a_known_reduction(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        passed = await engine.forward_backward("a", lessons(2), CROSS_ENTROPY)
        stepped = await engine.optim_step("a", RATE)
        for name in [*passed.metrics, *stepped.metrics]:
            assert name.count(":") == 1
            assert name.rpartition(":")[2] in ("sum", "mean", "min", "max")


@proves("pass:accumulates")
async def test_gradients_accumulate_over_calls_and_forward_only_adds_none(
    model_folder: Path,
) -> None:
    data = lessons(6)
    async with running(model_folder) as engine:
        for name in "ab":
            await engine.create_adapter(name, LORA)
        await engine.forward_backward("a", data, CROSS_ENTROPY)
        for half in (data[:3], data[3:]):
            await engine.forward_backward("b", half, CROSS_ENTROPY)
        forward = await engine.forward_backward("b", data, CROSS_ENTROPY, forward_only=True)
        torch.testing.assert_close(
            gradient(engine, "a"), gradient(engine, "b"), rtol=1e-4, atol=within(1e-4, 0.2)
        )
        again = await engine.forward_backward("b", data, CROSS_ENTROPY)
        assert forward.logprobs == again.logprobs


async def test_the_same_request_gives_the_same_bits(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        results = []
        for name in "ab":
            await trained(engine, name, steps=2)
            results.append(await engine.forward_backward(name, lessons(9, seed=7), CROSS_ENTROPY))
        assert results[0] == results[1]
        assert torch.equal(gradient(engine, "a"), gradient(engine, "b"))


async def test_micro_batches_of_one_equal_one_micro_batch(model_folder: Path) -> None:
    """1x8 = 8x1: equal within rounding, and the difference leans to neither side."""
    data, found = lessons(8, seed=4), []
    for limits in (Limits(pass_tokens=1), Limits(pass_tokens=1 << 20)):
        async with running(model_folder, limits) as engine:
            await trained(engine, steps=1)
            passed = await engine.forward_backward("a", data, CROSS_ENTROPY)
            found.append(
                (np.concatenate([logprobs_of(row) for row in passed.logprobs]), gradient(engine))
            )
    (one_lp, one), (eight_lp, eight) = found
    assert np.abs(one_lp - eight_lp).max() < within(3e-5, 0.3)
    difference = (one - eight).double()
    torch.testing.assert_close(one, eight, rtol=1e-3, atol=within(1e-3, 2.0))
    standard_error = difference.std() / len(difference) ** 0.5
    assert difference.mean().abs() < 5 * standard_error + 1e-9


def strangers(lengths: Sequence[int]) -> list[np.ndarray]:
    """Sequences that begin with a token of their own."""
    return [np.arange(i, i + length) for i, length in enumerate(lengths)]


def padded(batch: Sequence[int], sequences: Sequence[np.ndarray]) -> int:
    """Tokens of the micro-batch that a pass really computes."""
    made = MicroBatch.of(
        [Example(sequences[i], sequences[i], {}) for i in batch], torch.device("cpu")
    )
    return made.tokens_N.numel() if made.trie is None else len(made.trie.tokens_N)


def test_the_plan_is_longest_first_within_the_budget_and_loses_nobody() -> None:
    sequences = strangers([3, 90, 17, 90, 5, 200, 17, 1])
    batches = plan(sequences, tokens=196)
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert all(len(batch) == 1 or padded(batch, sequences) <= 196 for batch in batches)
    lengths = [len(sequence) for sequence in sequences]
    assert [lengths[i] for batch in batches for i in batch] == sorted(lengths, reverse=True)
    assert plan(sequences, tokens=196) == batches


@pytest.mark.parametrize("lengths", [[1] * 2048, [17] * 300, [9, 1, 33, 2039, 5] * 40])
def test_a_micro_batch_holds_no_more_padded_tokens_than_the_bound_however_short_its_data(
    lengths: list[int],
) -> None:
    bound, sequences = Limits().pass_tokens, strangers(lengths)
    batches = plan(sequences, bound)
    assert max(padded(batch, sequences) for batch in batches) <= bound
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))


@proves("optim:adamw")
async def test_the_optimiser_is_torch_adamw(model_folder: Path) -> None:
    adam = Adam(learning_rate=3e-3, beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.1)
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        theirs = torch.nn.Parameter(weights(engine))
        optimizer = torch.optim.AdamW(
            [theirs], lr=3e-3, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1
        )
        for step in range(5):
            await engine.forward_backward("a", lessons(4, seed=step), CROSS_ENTROPY)
            theirs.grad = gradient(engine)
            optimizer.step()
            stepped = await engine.optim_step("a", adam)
            assert stepped.version == step + 1
            assert stepped.metrics["grad_norm:mean"] == pytest.approx(
                theirs.grad.norm().item(), rel=1e-5
            )
            torch.testing.assert_close(weights(engine), theirs.detach(), rtol=1e-5, atol=1e-6)
            assert not gradient(engine).any()


@proves("optim:clipping")
async def test_the_gradient_is_clipped_by_its_global_norm(model_folder: Path) -> None:
    """With eps far above the gradient Adam's step is proportional to it, so the clip is seen in the
    weights.
    """
    moves = []
    async with running(model_folder) as engine:
        for name, clip in (("a", 0.0), ("b", 0.5), ("c", 1e9)):
            await engine.create_adapter(name, LORA)
            before = weights(engine, name)
            await engine.forward_backward(name, lessons(4), CROSS_ENTROPY)
            adam = Adam(learning_rate=1e6, beta1=0.0, beta2=0.0, eps=1e6, grad_clip_norm=clip)
            norm = (await engine.optim_step(name, adam)).metrics["grad_norm:mean"]
            moves.append((weights(engine, name) - before).norm().item())
        assert moves[1] == pytest.approx(moves[0] * 0.5 / norm, rel=1e-2)
        assert moves[2] == moves[0]


async def test_a_step_tells_how_far_the_adapter_has_moved_the_base_weights(
    model_folder: Path,
) -> None:
    """Both norms once more, with the products made: what the metric stands for, and not how it is
    computed.
    """
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        await engine.forward_backward("a", lessons(4), CROSS_ENTROPY)
        told = (await engine.optim_step("a", Adam(learning_rate=3e-3))).metrics[UPDATE_METRIC]
        adapted = engine._adapters["a"].weights.items()
        moved = sum(
            (lora.scaled_b_ER.float() @ lora.a_RD).square().sum().item() for _, lora in adapted
        )
        weights = sum(
            projection.weight_ED.float().square().sum().item() for projection, _ in adapted
        )
        assert told == pytest.approx((moved / weights) ** 0.5, rel=within(1e-4, 1e-2)) and told > 0


async def test_a_pass_that_breaks_in_its_middle_accumulates_nothing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_folder, Limits(pass_tokens=64)) as engine:
        await engine.create_adapter("a", LORA)

        def refuse(self: Adapter) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(Adapter, "end_pass", refuse)
        with pytest.raises(ServerError, match="out of memory"):
            await engine.forward_backward("a", lessons(8), CROSS_ENTROPY)
        monkeypatch.undo()
        await engine.forward_backward("a", lessons(8), CROSS_ENTROPY)
        once = gradient(engine)
        await engine.create_adapter("b", LORA)
        await engine.forward_backward("b", lessons(8), CROSS_ENTROPY)
        assert torch.equal(once, gradient(engine, "b"))


async def test_on_policy_the_ratio_is_one(model_folder: Path) -> None:
    """So the loss is minus the sum of the advantages, and the gradient that of plain policy
    gradient.
    """
    async with running(model_folder) as engine:
        await trained(engine)
        await engine.snapshot("a", "s")
        prompt = prompts(1, seed=3)[0]
        answers = await sample(engine, "s", prompt, n=4, seed=5)
        data = tuple(
            of_answer(prompt, s, a) for s, a in zip(answers.sequences, (1, -1, 0.5, 2), strict=True)
        )
        passed = await engine.forward_backward("a", data, IMPORTANCE_SAMPLING)
        assert passed.metrics["loss:sum"] == pytest.approx(-2.5 * 12, rel=1e-5)
        assert passed.metrics["num_loss_tokens:sum"] == 4 * 12


async def test_training_teaches(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LoraConfig(rank=16, seed=3))
        tokens = prompts(1, low=30)[0]
        losses = []
        for _ in range(15):
            passed = await engine.forward_backward(
                "a", (pair(tokens, weights=[1.0] * (len(tokens) - 1)),), CROSS_ENTROPY
            )
            await engine.optim_step("a", Adam(learning_rate=1e-2))
            losses.append(passed.metrics["loss:sum"])
        assert losses[-1] < 0.5 * losses[0]
