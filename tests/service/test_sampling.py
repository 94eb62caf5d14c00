"""Sampling through the real SDK 0.38.0."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import tinker
from tinker import types

from halteres.errors import ProcessFailed
from halteres.models import TINY
from halteres.service import snapshots
from halteres.service.snapshots import Snapshot

from .scenes import BASE, DATA, STEP, Scene, prompt, trainer

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


async def test_the_same_seed_gives_the_same_tokens_and_samples_differ_among_themselves(
    client: tinker.ServiceClient,
) -> None:
    sampling = await base_client(client)
    params = types.SamplingParams(max_tokens=16, seed=3, stop=[])
    first, second = await sampling.sample(prompt(5, 6), 4, params), await sampling.sample(prompt(5, 6), 4, params)
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
    assert len({tuple(one.tokens) for one in first.sequences}) > 1


async def test_stops_are_texts_tokens_or_nothing_at_all(client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)

    async def ends(stop: str | list[str] | list[int] | None) -> list[types.SampledSequence]:
        params = types.SamplingParams(max_tokens=400, seed=1, stop=stop)
        return list((await sampling.sample(prompt(5), 4, params)).sequences)

    assert all(one.tokens[-1] == END for one in await ends(None) if one.stop_reason == "stop")
    assert all(one.stop_reason == "length" and len(one.tokens) == 400 for one in await ends([]))
    any_token = (await ends([]))[0].tokens[7]
    assert (await ends([any_token]))[0].tokens.index(any_token) == len((await ends([any_token]))[0].tokens) - 1
    for stop in ("1", ["1", "2"]):
        assert any(one.stop_reason == "stop" and len(one.tokens) < 400 for one in await ends(stop))


async def test_compute_logprobs_scores_every_prompt_token_but_the_first(client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)
    scored = await sampling.compute_logprobs(prompt(5, 6, 7, 8))
    assert scored[0] is None
    assert all(logprob is not None and logprob < 0 for logprob in scored[1:])
    last = await sampling.compute_logprobs(prompt(5, 6, 7, 8), prompt_logprobs_last_n=1)
    assert last == [None, None, None, scored[3]]


async def test_sampled_logprobs_are_those_of_the_training_pass(client: tinker.ServiceClient) -> None:
    _, sampling = await published(client, steps=1)
    drawn = (await sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=5))).sequences[0]
    scored = await sampling.compute_logprobs(prompt(5, 6, *drawn.tokens))
    assert scored[2:] == pytest.approx(drawn.logprobs, abs=1e-6)
    assert not any(math.isnan(logprob) for logprob in drawn.logprobs)


async def test_a_snapshot_keeps_its_weights_while_training_goes_on(scene: Scene, client: tinker.ServiceClient) -> None:
    training, before = await published(client)
    old = await before.compute_logprobs(prompt(5, 6, 7))
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    after = await training.save_weights_and_get_sampling_client()
    assert await before.compute_logprobs(prompt(5, 6, 7)) == old
    assert await after.compute_logprobs(prompt(5, 6, 7)) != old


async def test_named_weights_are_sampled_from_by_path(scene: Scene, client: tinker.ServiceClient) -> None:
    training, ephemeral = await published(client, steps=1)
    path = (await training.save_weights_for_sampler("named")).path
    named = await client.create_sampling_client(model_path=path)
    assert named.get_base_model() == TINY
    assert await named.compute_logprobs(prompt(5, 6)) == await ephemeral.compute_logprobs(prompt(5, 6))
    state = (await training.save_state("state")).path
    from_state = await client.create_sampling_client(model_path=state)
    assert await from_state.compute_logprobs(prompt(5, 6)) == await ephemeral.compute_logprobs(prompt(5, 6))


async def test_unknown_weights_are_answered_with_what_there_is(client: tinker.ServiceClient) -> None:
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
    ([5] * 2048, {}, "leaves no room"),
    ([5], {"temperature": -1.0}, "temperature"),
    ([5], {"top_p": 0.0}, "top_p"),
    ([5], {"seed": 2**64}, "seed"),
    ([5], {"stop": [""]}, "stop string is empty"),
    ([5], {"max_tokens": 0}, "max_tokens"),
]


async def test_a_prompt_or_parameter_that_cannot_be_used_is_a_user_error(client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)
    for tokens, params, sentence in UNUSABLE:
        with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
            await sampling.sample(prompt(*tokens), 1, types.SamplingParams(**{"max_tokens": 4, **params}))
        assert caught.value.category is types.RequestErrorCategory.User


async def test_what_is_not_built_yet_says_so(client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)
    with pytest.raises(tinker.RequestFailedError, match="topk_prompt_logprobs comes later"):
        await sampling.sample(prompt(5), 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=3)


async def test_requests_reach_the_engine_together(scene: Scene, client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)
    held = scene.engine.hold("sample")
    waiting = [sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=2)) for _ in range(32)]
    async with asyncio.timeout(WAIT_S):
        await held.inside(32)  # all of them, before any has an answer
        held.release()
        await asyncio.gather(*waiting)


async def test_too_many_requests_at_once_are_asked_to_wait(scene: Scene, client: tinker.ServiceClient) -> None:
    sampling = await base_client(client)
    scene.service.samples._max_under_way = 1
    held = scene.engine.hold("sample")
    waiting = [sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=2)) for _ in range(2)]
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        body = {"sampling_session_id": f"{client.holder.get_session_id()}:sample:0", "seq_id": 99, "prompt": {}}
        assert (await scene.post("asample", body))[0] == 429
        held.release()
        await asyncio.gather(*waiting)  # the SDK sends the refused one again by itself


async def test_snapshots_beyond_the_bound_leave_the_engine_and_come_back_when_asked_for(
    scene: Scene, client: tinker.ServiceClient
) -> None:
    scene.service.snapshots._max_held = 2
    training = await trainer(client)
    samplers = [await training.save_weights_and_get_sampling_client() for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        while len(held(scene)) > 2:
            await scene.get("/api/v1/healthz")  # they leave behind the answer
    scored = [await sampler.compute_logprobs(prompt(5, 6)) for sampler in samplers]
    assert scored == [scored[0]] * 4
    assert scene.engine.calls["load_snapshot"] >= 2


async def test_unnamed_snapshots_on_disk_are_bounded_and_the_oldest_say_that_they_are_gone(
    scene: Scene, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.service.snapshots._max_held = 1
    monkeypatch.setattr(snapshots, "MAX_SPILLED", 1)
    training = await trainer(client)
    samplers = [await training.save_weights_and_get_sampling_client() for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        while len(held(scene)) > 1:
            await scene.get("/api/v1/healthz")
    assert len(list((scene.service.state / "spill").iterdir())) == 1
    with pytest.raises(tinker.RequestFailedError, match="newer ones took their place"):
        await samplers[0].compute_logprobs(prompt(5, 6))
    await samplers[3].compute_logprobs(prompt(5, 6))


def held(scene: Scene) -> list[Snapshot]:
    known = [sampler.snapshot for sampler in scene.service.samplers._known.values()]
    return [snapshot for snapshot in known if snapshot is not None and snapshot.home is scene.engine]


def test_the_base_model_is_known_by_name_and_by_folder() -> None:
    assert BASE.check(TINY) == TINY
    assert BASE.check(str(BASE.folder)) == str(BASE.folder)


async def test_a_sample_fails_with_the_reason_once_the_engine_was_given_up(
    scene: Scene, client: tinker.ServiceClient
) -> None:
    """While an engine may come back the answer is 410, and the SDK submits the sample again: here for ever."""
    sampling = await base_client(client)
    scene.host.failure = ProcessFailed("The engine keeps dying and is not started again.")
    await scene.host.become("failed")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(tinker.RequestFailedError, match="keeps dying") as caught:
            await sampling.sample(prompt(5), 1, types.SamplingParams(max_tokens=1))
    assert caught.value.category is types.RequestErrorCategory.Server
