"""Sampling through the real SDK 0.38.0."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves
from tinker import types

from halteres.errors import ProcessFailed
from halteres.models import TINY
from halteres.service.limits import Allowances, Limits
from halteres.service.sampling import snapshots
from halteres.service.sampling.snapshots import Snapshot
from halteres.service.service import Options

from .live_service import BASE, DATA, STEP, LiveService, closing, prompt, serving, trainer

WAIT_S = 20
END = 2  # the built-in model's end token


async def base_client(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return await client.create_sampling_client(base_model=TINY)


async def published(
    client: tinker.ServiceClient, steps: int = 0
) -> tuple[tinker.TrainingClient, tinker.SamplingClient]:
    training = await trainer(client)
    for _ in range(steps):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
    return training, await training.save_weights_and_get_sampling_client()


@proves("sample:seed")
async def test_the_same_seed_gives_the_same_tokens_and_samples_differ_among_themselves(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    params = types.SamplingParams(max_tokens=16, seed=3, stop=[])
    first, second = (
        await sampling.sample(prompt(5, 6), 4, params),
        await sampling.sample(prompt(5, 6), 4, params),
    )
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
    assert len({tuple(one.tokens) for one in first.sequences}) > 1


@proves("sample:stop")
async def test_stops_are_texts_tokens_or_nothing_at_all(client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)

    async def ends(stop: str | list[str] | list[int] | None) -> list[types.SampledSequence]:
        params = types.SamplingParams(max_tokens=400, seed=1, stop=stop)
        return list((await sampling.sample(prompt(5), 4, params)).sequences)

    assert all(one.tokens[-1] == END for one in await ends(None) if one.stop_reason == "stop")
    assert all(one.stop_reason == "length" and len(one.tokens) == 400 for one in await ends([]))
    any_token = (await ends([]))[0].tokens[7]
    assert (await ends([any_token]))[0].tokens.index(any_token) == len(
        (await ends([any_token]))[0].tokens
    ) - 1
    for stop in ("1", ["1", "2"]):
        assert any(one.stop_reason == "stop" and len(one.tokens) < 400 for one in await ends(stop))


@proves("sample:prompt-logprobs")
async def test_compute_logprobs_scores_every_prompt_token_but_the_first(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    scored = await sampling.compute_logprobs(prompt(5, 6, 7, 8))
    assert scored[0] is None
    assert all(logprob is not None and logprob < 0 for logprob in scored[1:])
    last = await sampling.compute_logprobs(prompt(5, 6, 7, 8), prompt_logprobs_last_n=1)
    assert last == [None, None, None, scored[3]]


@proves("sample:agrees")
async def test_sampled_logprobs_are_those_of_the_training_pass(
    client: tinker.ServiceClient,
) -> None:
    _, sampling = await published(client, steps=1)
    drawn = (await sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=5))).sequences[
        0
    ]
    scored = await sampling.compute_logprobs(prompt(5, 6, *drawn.tokens))
    assert scored[2:] == pytest.approx(drawn.logprobs, abs=1e-6)
    assert not any(math.isnan(logprob) for logprob in drawn.logprobs)


@proves("sample:snapshot")
async def test_a_snapshot_keeps_its_weights_while_training_goes_on(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training, before = await published(client)
    old = await before.compute_logprobs(prompt(5, 6, 7))
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    after = await training.save_weights_and_get_sampling_client()
    assert await before.compute_logprobs(prompt(5, 6, 7)) == old
    assert await after.compute_logprobs(prompt(5, 6, 7)) != old


async def test_named_weights_are_sampled_from_by_path(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training, ephemeral = await published(client, steps=1)
    path = (await training.save_weights_for_sampler("named")).path
    named = await client.create_sampling_client(model_path=path)
    assert named.get_base_model() == TINY
    assert await named.compute_logprobs(prompt(5, 6)) == await ephemeral.compute_logprobs(
        prompt(5, 6)
    )
    state = (await training.save_state("state")).path
    from_state = await client.create_sampling_client(model_path=state)
    assert await from_state.compute_logprobs(prompt(5, 6)) == await ephemeral.compute_logprobs(
        prompt(5, 6)
    )


@proves("error:unknown-model")
async def test_unknown_weights_are_answered_with_what_there_is(
    client: tinker.ServiceClient,
) -> None:
    training = await trainer(client)
    path = (await training.save_weights_for_sampler("named")).path
    with pytest.raises(tinker.NotFoundError, match=f"Did you mean {path}"):
        await client.create_sampling_client(model_path=path + "x")
    with pytest.raises(tinker.NotFoundError, match="This service serves"):
        await client.create_sampling_client(base_model="Qwen/Qwen3-8B")


UNUSABLE: list[tuple[list[int], dict[str, Any], str]] = [
    ([], {}, "prompt is empty"),
    ([700], {}, "token 700"),
    ([2**40], {}, "no token id"),
    ([5], {"temperature": -1.0}, "temperature"),
    ([5], {"top_p": 0.0}, "top_p"),
    ([5], {"seed": 2**64}, "seed"),
    ([5], {"stop": [""]}, "stop string is empty"),
    ([5], {"max_tokens": 0}, "max_tokens"),
    ([5], {"stop": [2**40]}, "no token id"),
]


async def test_a_prompt_or_parameter_that_cannot_be_used_is_a_user_error(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    for tokens, params, sentence in UNUSABLE:
        with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
            await sampling.sample(
                prompt(*tokens), 1, types.SamplingParams(**{"max_tokens": 4, **params})
            )
        assert caught.value.category is types.RequestErrorCategory.User


@proves("sample:topk-prompt", "sample:topk-sampled")
async def test_the_most_likely_tokens_come_with_their_logprobs(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    asked: dict[str, Any] = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 2,
    }
    drawn = await sampling.sample(prompt(5, 6, 7), 2, params, **asked)
    rows, scored = drawn.topk_prompt_logprobs, drawn.prompt_logprobs
    assert rows is not None
    assert scored is not None
    assert (rows[0], [len(row or []) for row in rows[1:]]) == (None, [3, 3])
    for row in rows[1:]:
        assert row is not None
        assert [logprob for _, logprob in row] == sorted(
            (logprob for _, logprob in row), reverse=True
        )
    for sequence in drawn.sequences:
        assert sequence.topk_logprobs is not None
        assert sequence.logprobs is not None
        best = [row[0] for row in sequence.topk_logprobs if row]
        assert best == list(zip(sequence.tokens, sequence.logprobs, strict=True))  # greedy
    alone = await sampling.sample(prompt(5, 6, 7), 1, params, topk_prompt_logprobs=1)
    assert (alone.prompt_logprobs, len(alone.topk_prompt_logprobs or [])) == (None, 3)
    assert alone.sequences[0].topk_logprobs is None


@proves("sample:prompt-logprobs", "sample:topk-prompt")
async def test_only_the_last_tokens_of_a_prompt_are_scored_where_that_is_asked(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    asked: dict[str, Any] = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    one = types.SamplingParams(max_tokens=1)
    whole = await sampling.sample(prompt(5, 6, 7, 8), 1, one, **asked)
    last = await sampling.sample(prompt(5, 6, 7, 8), 1, one, **asked, prompt_logprobs_last_n=2)
    assert whole.prompt_logprobs is not None
    assert whole.topk_prompt_logprobs is not None
    assert last.prompt_logprobs == [None, None, *whole.prompt_logprobs[2:]]
    assert last.topk_prompt_logprobs == [None, None, *whole.topk_prompt_logprobs[2:]]
    with pytest.raises(tinker.RequestFailedError, match="must be 1 to 3"):
        await sampling.compute_logprobs(prompt(5, 6, 7, 8), prompt_logprobs_last_n=4)


def ids(*rows: list[int]) -> types.TensorData:
    return types.TensorData(
        data=[token for row in rows for token in row],
        dtype="int64",
        shape=[len(rows), len(rows[0])],
    )


@proves("sample:targets")
async def test_chosen_tokens_are_scored_dense_or_sparse(client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)
    one = types.SamplingParams(max_tokens=1)
    scored = await sampling.compute_logprobs(prompt(5, 6, 7))
    dense = await sampling.sample(
        prompt(5, 6, 7), 1, one, target_prompt_logprobs=ids([6, -1], [-1, 7])
    )
    assert dense.target_prompt_logprobs is not None
    assert dense.target_prompt_logprobs.tolist() == [[scored[1], 0.0], [0.0, scored[2]]]
    csr = types.TensorData(
        data=[6, 7],
        dtype="int64",
        shape=[2, 9],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[8, 3],
    )
    sparse = await sampling.sample(prompt(5, 6, 7), 1, one, target_prompt_logprobs=csr)
    found = sparse.target_prompt_logprobs
    assert found is not None
    assert (found.data, found.shape) == (scored[1:], [2, 9])
    assert (found.sparse_crow_indices, found.sparse_col_indices) == ([0, 1, 2], [8, 3])


@proves("sample:alternatives")
async def test_alternatives_are_drawn_for_every_token_of_the_prompt(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    one = types.SamplingParams(max_tokens=1, seed=4)
    drawn = (
        await sampling.sample(prompt(5, 6, 7), 1, one, prompt_alt_tokens_k=5)
    ).prompt_alt_tokens
    again = (
        await sampling.sample(prompt(5, 6, 7), 1, one, prompt_alt_tokens_k=5)
    ).prompt_alt_tokens
    assert drawn is not None
    assert again is not None
    assert (drawn.tokens.shape, drawn.tokens.data) == ([2, 5], again.tokens.data)
    token = int(drawn.tokens.tolist()[1][2])
    assert (await sampling.compute_logprobs(prompt(5, 6, token)))[2] == pytest.approx(
        drawn.logprobs.tolist()[1][2]
    )


UNSCORABLE: list[tuple[dict[str, Any], str]] = [
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1"),
    ({"topk_sample_logprobs": 10**6}, "topk_sample_logprobs is 1000000"),
    ({"prompt_alt_tokens_k": 10**6}, "prompt_alt_tokens_k is 1000000"),
    ({"target_prompt_logprobs": ids([6])}, "target_prompt_logprobs is int64 of shape"),
    ({"target_prompt_logprobs": ids([6], [10**6])}, "token 1000000"),
    ({"target_prompt_logprobs": ids([-1], [-1])}, "names no token"),
]


async def test_what_cannot_be_scored_is_a_user_error_that_names_the_field(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    for asked, sentence in UNSCORABLE:
        with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
            await sampling.sample(prompt(5, 6, 7), 1, types.SamplingParams(max_tokens=1), **asked)
        assert caught.value.category is types.RequestErrorCategory.User


async def test_requests_reach_the_engine_together(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    sampling = await base_client(client)
    held = scene.engine.block("sample")
    waiting = [
        sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=2)) for _ in range(32)
    ]
    async with asyncio.timeout(WAIT_S):
        await held.inside(32)  # all of them, before any has an answer
        assert scene.engine.under_way["sample"] == 32
        held.release()
        answers = await asyncio.gather(*waiting)
    assert [len(answer.sequences) for answer in answers] == [1] * 32


@proves("retry:hold-back")
async def test_too_many_requests_at_once_are_asked_to_wait(tmp_path: Path) -> None:
    options = Options(limits=Allowances(default=Limits(samples=1)))
    async with serving(tmp_path, options) as scene, closing(await scene.client()) as client:
        sampling = await base_client(client)
        held = scene.engine.block("sample")
        waiting = [
            sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=2)) for _ in range(2)
        ]
        async with asyncio.timeout(WAIT_S):
            await held.inside()
            body = {
                "sampling_session_id": f"{client.holder.get_session_id()}:sample:0",
                "seq_id": 99,
                "prompt": {},
            }
            assert (await scene.post("asample", body))[0] == 429
            held.release()
            await asyncio.gather(*waiting)  # the SDK sends the refused one again by itself


@pytest.mark.runs
@proves("sample:many")
async def test_a_thousand_samples_in_flight_lose_nothing(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    sampling = await base_client(client)
    held = scene.engine.block("sample")
    params = types.SamplingParams(max_tokens=1, stop=[])
    waiting = [sampling.sample(prompt(5, 6), 1, params) for _ in range(1000)]
    async with asyncio.timeout(3 * WAIT_S):
        await held.inside(500)
        held.release()
        drawn = await asyncio.gather(*waiting)
    names = {one.sequences[0].sequence_id for one in drawn}
    assert (len(drawn), len(names)) == (1000, 1000)


async def test_snapshots_beyond_the_bound_leave_the_engine_and_come_back_when_asked_for(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    bound_snapshots(scene, 2)
    samplers = [await training.save_weights_and_get_sampling_client() for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        while len(held(scene)) > 2:
            await scene.get("/api/v1/healthz")  # they leave behind the answer
    scored = [await sampler.compute_logprobs(prompt(5, 6)) for sampler in samplers]
    assert scored == [scored[0]] * 4
    assert scene.engine.calls["hold"] >= 2


async def test_unnamed_snapshots_on_disk_are_bounded_and_the_oldest_say_that_they_are_gone(
    scene: LiveService, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_SPILLED", 1)
    training = await trainer(client)
    bound_snapshots(scene, 1)
    samplers = [await training.save_weights_and_get_sampling_client() for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        while len(held(scene)) > 1:
            await scene.get("/api/v1/healthz")
    assert len(list((scene.service.state / "spill").iterdir())) == 1
    with pytest.raises(tinker.RequestFailedError, match="newer ones took their place"):
        await samplers[0].compute_logprobs(prompt(5, 6))
    await samplers[3].compute_logprobs(prompt(5, 6))


async def test_sixty_publishes_that_nobody_samples_write_nothing(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    for _ in range(60):
        await training.save_weights_and_get_sampling_client()
    assert len(held(scene)) == 60
    assert not (scene.service.state / "spill").exists()
    assert scene.engine.calls["save_snapshot"] == 0


def bound_snapshots(scene: LiveService, count: int) -> None:
    """Memory for so many snapshots of the one training run."""
    snapshots, (model,) = scene.service.snapshots, scene.service.models.all()
    total = 2 * count * snapshots._budget.bytes_of(model.lora, trained=False)
    snapshots._budget = replace(snapshots._budget, total=total)


def held(scene: LiveService) -> list[Snapshot]:
    known = [sampler.snapshot for sampler in scene.service.samplers._known.values()]
    return [
        snapshot for snapshot in known if snapshot is not None and scene.engine in snapshot.engines
    ]


def test_the_base_model_is_known_by_name_and_by_folder() -> None:
    assert BASE.check(TINY) == TINY
    assert BASE.check(str(BASE.folder)) == str(BASE.folder)


async def test_a_sample_fails_with_the_reason_once_the_engine_was_given_up(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    """While an engine may come back the answer is 410, and the SDK submits the sample again: here
    for ever.
    """
    sampling = await base_client(client)
    scene.host.failure = ProcessFailed("The engine keeps dying and is not started again.")
    await scene.host.become("failed")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(tinker.RequestFailedError, match="keeps dying") as caught:
            await sampling.sample(prompt(5), 1, types.SamplingParams(max_tokens=1))
    assert caught.value.category is types.RequestErrorCategory.Server
