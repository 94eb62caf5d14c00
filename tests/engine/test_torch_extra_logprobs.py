"""What a sampling request may ask for beside tokens, against float64 transformers; asking moves
nobody's bits.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from contract.requirements import proves

from halteres.engine.protocol import Array, ExtraLogprobs, SampleResult, SamplingParams, TopK
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.errors import InvalidData

from .requests import array, packed
from .torch_fixtures import (
    Reference,
    lists,
    logprobs_of,
    prompts,
    running,
    sample,
    tokens_of,
    trained,
    within,
)

PROMPT = prompts(1, low=70, high=71, seed=31)[0]


async def asked(
    engine: TorchEngine,
    extra: ExtraLogprobs,
    snapshot: str | None = None,
    n: int = 1,
    **params: Any,
) -> SampleResult:
    chosen = SamplingParams(**{"max_tokens": 6, "stop_tokens": (), "seed": 3, **params})
    return await engine.sample(snapshot, packed(PROMPT), n, chosen, extra)


@proves("sample:topk-prompt", "sample:topk-sampled")
async def test_the_likeliest_tokens_of_prompt_and_answer_are_those_of_the_model(
    model_folder: Path,
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=2)
        await engine.snapshot("a", "s")
        adapter = engine._adapters["a"]
        reference = Reference(
            model_folder, adapter.layout.named(adapter.flat.clone()), adapter.layout.scale
        )
        result = await asked(engine, ExtraLogprobs(topk_prompt=7, topk_sampled=4), "s", n=2)
    ids, logprobs = lists(result.topk_prompt)
    expected = reference.logits(PROMPT).log_softmax(-1).detach()
    assert (ids[0] == 0).all()
    assert (logprobs[0] == -99999).all()
    np.testing.assert_allclose(
        logprobs[1:], expected.topk(7).values[:-1].numpy(), atol=within(3e-5, 0.2)
    )
    np.testing.assert_allclose(
        np.take_along_axis(expected[:-1].numpy(), ids[1:], 1), logprobs[1:], atol=within(3e-5, 0.2)
    )
    for sequence in result.sequences:
        tokens = tokens_of(sequence)
        ids, logprobs = lists(sequence.top)
        rows = reference.logits([*PROMPT, *tokens]).log_softmax(-1).detach()[len(PROMPT) - 1 : -1]
        assert ids.shape == (len(tokens), 4)
        np.testing.assert_allclose(logprobs, rows.topk(4).values.numpy(), atol=within(3e-5, 0.2))
        for token, row, lps, told in zip(
            tokens, ids, logprobs, logprobs_of(sequence.logprobs), strict=True
        ):
            assert token not in row or lps[list(row).index(token)] == told


@proves("sample:targets")
async def test_given_targets_are_scored_and_skipped_cells_are_zero(model_folder: Path) -> None:
    random = np.random.default_rng(0)
    targets = random.integers(-1, 672, (len(PROMPT) - 1, 3))
    targets[:, 0] = PROMPT[1:]
    async with running(model_folder) as engine:
        result = await asked(
            engine, ExtraLogprobs(targets=array(targets, "int64"), prompt_logprobs=True)
        )
    assert result.target_logprobs is not None
    assert result.target_logprobs.shape == (len(PROMPT) - 1, 3)
    scored = logprobs_of(result.target_logprobs.data).reshape(-1, 3)
    assert result.prompt_logprobs is not None
    assert np.array_equal(scored[:, 0], logprobs_of(result.prompt_logprobs)[1:])
    expected = Reference(model_folder).logits(PROMPT).log_softmax(-1).detach()[:-1]
    known = expected.gather(1, torch.from_numpy(np.maximum(targets, 0))).numpy()
    np.testing.assert_allclose(scored, np.where(targets < 0, 0, known), atol=within(3e-5, 0.2))
    assert (scored[targets == -1] == 0).all()


@proves("sample:alternatives")
async def test_alternatives_are_drawn_from_the_model_at_the_requests_temperature(
    model_folder: Path,
) -> None:
    """Frequencies of 5 x 256 draws at one position; log-probabilities are the model's own, as a
    prompt's always are.
    """
    async with running(model_folder) as engine:
        for temperature in (1.0, 0.7):
            drawn: list[np.ndarray] = []
            for seed in range(5):
                result = await asked(
                    engine, ExtraLogprobs(alternatives=256), seed=seed, temperature=temperature
                )
                ids, logprobs = lists(result.alternatives)
                assert ids.shape == (len(PROMPT) - 1, 256)
                drawn.append(ids)
            expected = Reference(model_folder).logits(PROMPT).detach()[:-1]
            raw = expected.log_softmax(-1).numpy()
            np.testing.assert_allclose(
                logprobs, np.take_along_axis(raw, ids, 1), atol=within(3e-5, 0.2)
            )
            shares = (expected / temperature).softmax(-1).numpy()
            seen = np.stack(
                [np.bincount(row, minlength=672) for row in np.concatenate(drawn, 1)]
            ) / (5 * 256)
            assert np.abs(seen - shares).max() < 5 * np.sqrt(0.25 / (5 * 256))
            assert np.abs(seen - shares).sum(1).mean() < 0.35
        greedy = await asked(engine, ExtraLogprobs(alternatives=3), temperature=0.0)
        ids, _ = lists(greedy.alternatives)
        assert (ids == expected.argmax(-1).numpy()[:, None]).all()


async def test_what_is_asked_for_is_the_same_alone_and_in_company_and_moves_no_token(
    model_folder: Path,
) -> None:
    extra = ExtraLogprobs(
        prompt_logprobs=True,
        topk_prompt=5,
        topk_sampled=3,
        targets=array(np.tile(PROMPT[1:], (2, 1)).T, "int64"),
        alternatives=4,
    )
    results = []
    for limits in (Limits(), Limits(head_elements=8 * 672)):
        async with running(model_folder, limits) as engine:
            plain = await asked(engine, ExtraLogprobs(), n=3)
            alone = await asked(engine, extra, n=3)
            strangers = [
                asked(
                    engine,
                    ExtraLogprobs(topk_prompt=9, topk_sampled=6, alternatives=2),
                    n=2,
                    seed=9,
                    logprobs="tempered",
                ),
                asked(engine, ExtraLogprobs(), seed=8),
                sample(engine, None, prompts(1, low=90, high=91)[0], n=5, seed=1, temperature=0.4),
            ]
            *_, among, quiet = await asyncio.gather(
                *strangers, asked(engine, extra, n=3), asked(engine, ExtraLogprobs(), n=3)
            )
            assert among == alone or repr(among) == repr(alone)  # a NaN equals itself there
            assert quiet == plain
            stripped = [msgspec.structs.replace(s, top=None) for s in alone.sequences]
            assert stripped == list(plain.sequences)
            results.append(repr(alone))
    assert results[0] == results[1]


@proves("sample:raw-or-tempered")
async def test_log_probabilities_of_the_sampling_temperature_are_those_it_sampled_from(
    model_folder: Path,
) -> None:
    """`tempered`: of the whole vocabulary, before top-k and top-p; a greedy answer's are of
    temperature 1.
    """
    async with running(model_folder) as engine:
        for temperature in (0.5, 1.7):
            shape = {"temperature": temperature, "max_tokens": 12, "top_k": 20}
            raw = await asked(engine, ExtraLogprobs(topk_sampled=2), n=2, **shape)
            warm = await asked(
                engine,
                ExtraLogprobs(topk_sampled=2, prompt_logprobs=True),
                n=2,
                logprobs="tempered",
                **shape,
            )
            for cold, hot in zip(raw.sequences, warm.sequences, strict=True):
                tokens = tokens_of(hot)
                assert tokens == tokens_of(cold)
                logits = (
                    Reference(model_folder)
                    .logits([*PROMPT, *tokens])
                    .detach()[len(PROMPT) - 1 : -1]
                )
                known = (logits / temperature).log_softmax(-1)
                index = torch.tensor(tokens)[:, None]
                np.testing.assert_allclose(
                    logprobs_of(hot.logprobs), known.gather(1, index)[:, 0], atol=within(1e-4, 0.3)
                )
                np.testing.assert_allclose(
                    lists(hot.top)[1], known.topk(2).values, atol=within(1e-4, 0.3)
                )
                assert logprobs_of(cold.logprobs).tolist() != logprobs_of(hot.logprobs).tolist()
        for same in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1e-30}):
            assert await asked(engine, ExtraLogprobs(), logprobs="tempered", **same) == await asked(
                engine, ExtraLogprobs(), **same
            )
        plain = await asked(engine, ExtraLogprobs(prompt_logprobs=True))
        # a prompt's are always of temperature 1
        assert warm.prompt_logprobs == plain.prompt_logprobs


REFUSED: dict[str, tuple[ExtraLogprobs, str]] = {
    "k above the cap": (ExtraLogprobs(topk_prompt=257), "topk_prompt_logprobs is 257"),
    "a negative k": (ExtraLogprobs(topk_sampled=-1), "topk_sample_logprobs is -1"),
    "too many draws": (ExtraLogprobs(alternatives=1000), "prompt_alt_tokens_k is 1000"),
    "targets of another length": (
        ExtraLogprobs(targets=array(np.zeros((3, 2)), "int64")),
        r"shape \[69, K\]",
    ),
    "flat targets": (ExtraLogprobs(targets=array(np.zeros(69), "int64")), r"shape \[69, K\]"),
    "targets that are no integers": (
        ExtraLogprobs(targets=array(np.zeros((69, 1)))),
        "must be int64",
    ),
    "no column": (ExtraLogprobs(targets=array(np.zeros((69, 0)), "int64")), "0 columns"),
    "a token outside": (
        ExtraLogprobs(targets=array(np.full((69, 2), 672), "int64")),
        r"token 672 at position 0, 0",
    ),
    "a token below": (ExtraLogprobs(targets=array(np.full((69, 2), -2), "int64")), "token -2"),
    "bytes missing": (
        ExtraLogprobs(targets=Array(dtype="int64", shape=(69, 1), data=b"\0" * 8)),
        "8 bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_computed_is_refused_by_name(model_folder: Path, case: str) -> None:
    extra, says = REFUSED[case]
    async with running(model_folder) as engine:
        with pytest.raises(InvalidData, match=says):
            await asked(engine, extra)


async def test_a_request_for_too_many_values_together_is_refused(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        with pytest.raises(InvalidData, match="num_samples times max_tokens"):
            await asked(engine, ExtraLogprobs(topk_sampled=256), n=100, max_tokens=None)


async def test_a_prompt_of_one_token_has_nothing_to_score(model_folder: Path) -> None:
    extra = ExtraLogprobs(
        prompt_logprobs=True,
        topk_prompt=2,
        alternatives=2,
        targets=array(np.zeros((0, 1)), "int64"),
    )
    async with running(model_folder) as engine:
        result = await engine.sample(None, packed([5]), 1, SamplingParams(max_tokens=2), extra)
    assert result.prompt_logprobs is not None
    assert np.isnan(logprobs_of(result.prompt_logprobs)).tolist() == [True]
    assert lists(result.topk_prompt)[0].tolist() == [[0, 0]]
    assert result.alternatives == TopK(k=2, length=0, ids=b"", logprobs=b"")
    assert result.target_logprobs == Array(dtype="float32", shape=(0, 1), data=b"")
