"""Sampling of the torch engine: agreement, reproducibility, limits, company."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.requirements import proves

from halteres.engine.protocol import ExtraLogprobs, Grammar, SampleResult, SamplingParams
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.token_sampling import Shaping, choose, uniforms
from halteres.engine.torch.worker import Scheduler
from halteres.errors import InvalidData, NotReady, ServerError, UserError
from halteres.tokenizer import load_tokenizer

from .requests import CROSS_ENTROPY, IMPORTANCE_SAMPLING, packed
from .torch_fixtures import (
    LORA,
    RATE,
    lessons,
    logprobs_of,
    of_answer,
    prompts,
    running,
    sample,
    tokens_of,
    trained,
)

DIGITS = Grammar(kind="regex", text="[0-9]*[02468]")


async def test_sampled_prompt_and_training_log_probabilities_agree_also_after_steps(
    model_folder: Path,
) -> None:
    """p99.9 of the difference at most 1e-5, half its mean square below 1e-9; a stale adapter would
    show.
    """
    async with running(model_folder) as engine:
        await trained(engine, steps=3)
        for step in range(3):
            await engine.snapshot("a", "s")
            asked = prompts(6, seed=step)
            answers = await asyncio.gather(
                *(sample(engine, "s", p, n=4, seed=step, max_tokens=40) for p in asked)
            )
            pairs = [
                (p, s) for p, answer in zip(asked, answers, strict=True) for s in answer.sequences
            ]
            passed = await engine.forward_backward(
                "a", tuple(of_answer(p, s, 1.0) for p, s in pairs), IMPORTANCE_SAMPLING
            )
            sampled = np.concatenate([logprobs_of(s.logprobs) for _, s in pairs])
            rows = zip(passed.logprobs, pairs, strict=True)
            learned = np.concatenate([logprobs_of(row)[len(p) - 1 :] for row, (p, _) in rows])
            again = []
            for p, s in pairs:
                params = SamplingParams(max_tokens=1)
                result = await engine.sample(
                    "s", packed([*p, *tokens_of(s)]), 1, params, ExtraLogprobs(prompt_logprobs=True)
                )
                assert result.prompt_logprobs is not None
                assert np.isnan(logprobs_of(result.prompt_logprobs)[0])
                again.append(logprobs_of(result.prompt_logprobs)[len(p) :])
            for other in (learned, np.concatenate(again)):
                difference = np.abs(sampled.astype(np.float64) - other)
                assert np.quantile(difference, 0.999) <= 1e-5
                assert 0.5 * (difference**2).mean() < 1e-9
            await engine.optim_step("a", RATE)


@pytest.mark.parametrize("length", [5, 60, 185, 380, 600])
@proves("sample:agrees")
async def test_sampled_and_trained_log_probabilities_have_the_same_bits(
    model_folder: Path, length: int
) -> None:
    """Chosen, for fp32 on a CPU: the importance ratio of an on-policy batch is exactly 1, at any
    length.
    """
    async with running(model_folder) as engine:
        await trained(engine, steps=2)
        await engine.snapshot("a", "s")
        prompt = prompts(1, low=length, high=length + 1)[0]
        answer = await sample(engine, "s", prompt, n=5, seed=1, max_tokens=24)
        data = tuple(of_answer(prompt, s, 1.0) for s in answer.sequences)
        for shown in (data, data[:1]):
            passed = await engine.forward_backward("a", shown, IMPORTANCE_SAMPLING)
            for row, sequence in zip(passed.logprobs, answer.sequences, strict=False):
                assert row.data[4 * (length - 1) :] == sequence.logprobs


@proves("sample:seed", "tenants:no-leak")
async def test_a_sequence_is_the_same_alone_and_among_strangers(model_folder: Path) -> None:
    """Tokens and log-probabilities, bit for bit, whatever else is in the batch and however it is
    sampled.
    """
    prompt = prompts(1, seed=11)[0]
    async with running(model_folder) as engine:
        await trained(engine)
        await engine.snapshot("a", "s")
        await engine.snapshot("a", "t")
        alone = await sample(engine, "s", prompt, n=3, seed=9, max_tokens=40)
        for company in (1, 6, 40):
            others = prompts(company, low=3, high=120, seed=company)
            strangers = []
            for i, stranger in enumerate(others):
                shape: dict[str, Any] = {
                    "temperature": 0.1 * (i % 15),
                    "top_k": i % 4,
                    "min_p": 0.1 * (i % 3),
                    "max_tokens": 5 + 3 * (i % 20),
                    "repetition_penalty": 1 + 0.5 * (i % 2),
                    "frequency_penalty": 0.5 * (i % 5 == 1),
                    "grammar": [None, None, DIGITS][i % 3],
                }
                strangers.append(
                    sample(engine, "st"[i % 2], stranger, n=1 + i % 5, seed=i, **shape)
                )
            *_, among = await asyncio.gather(
                *strangers, sample(engine, "s", prompt, n=3, seed=9, max_tokens=40)
            )
            assert among == alone


@pytest.mark.runs
async def test_a_request_that_does_not_fit_at_once_is_the_same_as_one_that_does(
    model_folder: Path,
) -> None:
    prompt = prompts(1, seed=12)[0]
    results = []
    for limits in (
        Limits(),
        Limits(decode_rows=5),
        Limits(cache_bytes=200_000),
        Limits(head_elements=8 * 672),
    ):
        async with running(model_folder, limits) as engine:
            results.append(await sample(engine, None, prompt, n=14, seed=2, max_tokens=20))
    assert all(result == results[0] for result in results)


async def test_members_of_a_group_are_distinct_and_reproducible(model_folder: Path) -> None:
    prompt = prompts(1)[0]
    async with running(model_folder) as engine:
        one, two = [
            await sample(engine, None, prompt, n=16, seed=4, temperature=1.5, max_tokens=30)
            for _ in range(2)
        ]
        other = await sample(engine, None, prompt, n=16, seed=5, temperature=1.5, max_tokens=30)
        fewer = [
            await sample(engine, None, prompt, n=n, seed=4, temperature=1.5, max_tokens=30)
            for n in (1, 2, 3, 7)
        ]
    assert one.sequences == two.sequences
    assert len({s.tokens for s in one.sequences}) == 16
    assert not {s.tokens for s in one.sequences} & {s.tokens for s in other.sequences}
    assert all(few.sequences == one.sequences[: len(few.sequences)] for few in fewer), (
        "kernels change below 4 rows"
    )


@pytest.mark.runs
async def test_equal_prompts_that_wait_together_are_prefilled_once(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    original = DecodeBatch._prefill_chunk

    def counted(self: DecodeBatch, prompts: list[object], *rest: object) -> torch.Tensor:
        rows.append(len(prompts))
        return original(self, prompts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeBatch, "_prefill_chunk", counted)
    prompt = prompts(1)[0]
    async with running(model_folder) as engine:
        first = asyncio.create_task(
            sample(engine, None, prompts(1, seed=8)[0], n=16, max_tokens=300)
        )
        equal = [
            asyncio.create_task(sample(engine, None, prompt, n=16, seed=seed)) for seed in range(6)
        ]
        answers = await asyncio.gather(first, *equal)
    assert len({s.tokens for answer in answers for s in answer.sequences}) > 16
    assert sum(rows) <= 3  # the first one's, and the others' in at most two arrivals


async def test_every_way_of_ending(model_folder: Path) -> None:
    prompt = prompts(1, seed=21)[0]
    tokenizer = load_tokenizer(str(model_folder))
    async with running(model_folder) as engine:
        free = await sample(engine, None, prompt, seed=1, max_tokens=60, temperature=1.0)
        tokens = tokens_of(free.sequences[0])
        assert (len(tokens), free.sequences[0].stop_reason) == (60, "length")
        first = tokens.index(tokens[20])
        stopped = await sample(
            engine, None, prompt, seed=1, max_tokens=60, stop_tokens=(tokens[20], 671)
        )
        assert tokens_of(stopped.sequences[0]) == tokens[: first + 1]
        assert stopped.sequences[0].stop_reason == "stop"
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        middle = len(text) // 2
        stop = text[middle : middle + 3]
        by_text = await sample(
            engine, None, prompt, seed=1, max_tokens=60, stop_strings=("never such", stop)
        )
        ended = tokens_of(by_text.sequences[0])
        assert by_text.sequences[0].stop_reason == "stop"
        assert stop in tokenizer.decode(ended, skip_special_tokens=False)
        assert stop not in tokenizer.decode(ended[:-1], skip_special_tokens=False)
        assert ended == tokens[: len(ended)]


@pytest.mark.runs
async def test_by_default_the_models_end_token_stops(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        assert engine._base.eos_tokens == (2,)
        chat = load_tokenizer(str(model_folder)).apply_chat_template(
            [{"role": "user", "content": "1 + 1"}]
        )
        params = SamplingParams(max_tokens=200, temperature=1.3, seed=3)
        answer = await engine.sample(None, packed(chat), 32, params)
    ended = [tokens_of(s) for s in answer.sequences if s.stop_reason == "stop"]
    assert ended
    assert all(tokens[-1] == 2 and 2 not in tokens[:-1] for tokens in ended)


@proves("sample:max-tokens")
async def test_the_context_limit_is_respected(model_folder: Path) -> None:
    prompt = [7] * 2040
    async with running(model_folder) as engine:
        unlimited = await engine.sample(
            None, packed(prompt), 2, SamplingParams(stop_tokens=(), temperature=0.0)
        )
        asked = await sample(engine, None, prompt, max_tokens=100, temperature=0.0)
        for sequence in (*unlimited.sequences, *asked.sequences):
            assert len(tokens_of(sequence)) == 8
            assert sequence.stop_reason == "length"
        with pytest.raises(InvalidData, match="2048"):
            await sample(engine, None, [7] * 2048)


async def test_bad_requests_are_refused_one_by_one(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        good = asyncio.create_task(sample(engine, None, [1, 2, 3], n=2))
        refused: list[tuple[list[int], dict[str, Any]]] = [
            ([], {}),
            ([672], {}),
            ([1], {"top_p": 0.0}),
            ([1], {"temperature": -1.0}),
        ]
        for prompt, params in refused:
            with pytest.raises(InvalidData):
                await sample(engine, None, prompt, **params)
        assert len((await good).sequences) == 2


@proves("tenants:no-leak")
async def test_a_snapshot_that_has_diverged_fails_its_own_requests_only(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.snapshot("a", "good")
        await engine.snapshot("a", "bad")
        flat = engine._snapshots["bad"].flat
        assert flat is not None
        flat.fill_(float("nan"))
        for lora in engine._snapshots["bad"].weights.values():
            lora.fuse()
        results = await asyncio.gather(
            *(sample(engine, name, [1, 2, 3], n=3, seed=1) for name in ("good", "bad", "good")),
            return_exceptions=True,
        )
        assert isinstance(results[1], UserError)
        assert "diverged" in results[1].sentence
        assert isinstance(results[0], SampleResult)
        assert results[0] == results[2]
        assert await sample(engine, "good", [1, 2, 3], n=3, seed=1) == results[0]


async def test_a_training_request_is_served_while_a_long_decode_runs(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LORA)
        long = asyncio.create_task(sample(engine, None, [1, 2, 3], n=16, max_tokens=2000))
        for step in range(3):
            await engine.forward_backward("a", lessons(4, seed=step), CROSS_ENTROPY)
            await engine.optim_step("a", RATE)
        short = await sample(engine, None, [4, 5, 6], n=1, max_tokens=3)
        assert len(tokens_of(short.sequences[0])) == 3
        assert not long.done()
        long.cancel()


async def test_a_decode_goes_on_while_a_long_pass_runs(model_folder: Path) -> None:
    async with running(model_folder, Limits(pass_tokens=64)) as engine:
        await engine.create_adapter("a", LORA)
        long = asyncio.create_task(engine.forward_backward("a", lessons(60), CROSS_ENTROPY))
        await sample(engine, None, [1, 2, 3], max_tokens=2)
        assert not long.done()
        await long


async def test_a_caller_that_goes_away_frees_its_rows(model_folder: Path) -> None:
    async with running(model_folder, Limits(decode_rows=8)) as engine:
        long = asyncio.create_task(sample(engine, None, [1, 2, 3], n=8, max_tokens=2000))
        await sample_started(engine)
        long.cancel()
        answer = await asyncio.wait_for(sample(engine, None, [4, 5, 6], n=8, max_tokens=4), 20)
        assert len(answer.sequences) == 8


async def sample_started(engine: TorchEngine) -> None:
    """Another call went through the worker, so what was sent before has entered."""
    await engine.drop("nothing")


@pytest.mark.runs
async def test_a_sampler_that_breaks_answers_with_an_error_and_goes_on(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("out of memory")

    async with running(model_folder) as engine:
        for place, name in ((Scheduler, "step"), (DecodeBatch, "step"), (DecodeBatch, "prefill")):
            monkeypatch.setattr(place, name, broken)
            with pytest.raises(ServerError, match="out of memory"):
                await sample(engine, None, [1, 2, 3], n=3)
            monkeypatch.undo()
            assert len((await sample(engine, None, [1, 2, 3], n=3)).sequences) == 3


async def test_closing_answers_everything(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        long = asyncio.create_task(sample(engine, None, [1, 2, 3], n=4, max_tokens=2000))
        await sample_started(engine)
        await engine.close()
        with pytest.raises(NotReady, match="closed"):
            await long
        with pytest.raises(NotReady, match="closed"):
            await engine.create_adapter("a", LORA)
        with pytest.raises(NotReady, match="closed"):
            await sample(engine, None, [1, 2, 3])


def shaping(
    count: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    tempered: bool = False,
) -> Shaping:
    draws = (np.arange(count, dtype=np.float32) + 0.5) / count
    ones = np.ones(count, dtype=np.float32)
    return Shaping(
        uniforms_N=draws,
        temperature_N=ones * np.float32(temperature),
        top_k_N=np.full(count, top_k),
        top_p_N=ones * np.float32(top_p),
        min_p_N=np.zeros(count, np.float32),
        tempered_N=np.full(count, tempered),
        num_top_N=np.zeros(count, np.int64),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion_and_log_probabilities_stay_raw(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 40).expand(20000, 40)
    chosen = choose(logits, shaping(20000, temperature))
    tokens, logprobs = chosen.tokens_N, chosen.logprobs_N
    seen = torch.bincount(tokens, minlength=40) / 20000
    torch.testing.assert_close(seen, (logits[0] / temperature).softmax(-1), atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


@proves("sample:top")
def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    logits = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])).expand(4000, 5)
    assert set(choose(logits, shaping(4000, top_k=2)).tokens_N.tolist()) == {1, 3}
    assert set(choose(logits, shaping(4000, top_p=0.75)).tokens_N.tolist()) == {1, 3, 4}
    assert set(choose(logits, shaping(4000, top_p=1e-6)).tokens_N.tolist()) == {1}
    assert set(choose(logits, shaping(4000, temperature=0.0)).tokens_N.tolist()) == {1}
    tokens = choose(logits, shaping(4000, top_k=2)).tokens_N
    assert (tokens == 1).float().mean().item() == pytest.approx(4 / 7, abs=1e-3)


def test_draws_are_uniform_and_a_function_of_their_coordinates() -> None:
    grid = np.meshgrid(*(np.arange(40, dtype=np.uint64),) * 3)
    seeds, samples, positions = (axis.ravel() for axis in grid)
    values = uniforms(seeds, samples, positions)
    assert values.dtype == np.float32
    assert 0 <= values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    assert abs(values.std() - 12**-0.5) < 0.005
    assert len(np.unique(values)) > 0.99 * len(values)
    assert np.array_equal(uniforms(seeds[5:6], samples[5:6], positions[5:6]), values[5:6])
    for axis in (seeds, samples, positions):
        assert abs(np.corrcoef(axis.astype(float), values)[0, 1]) < 0.02
