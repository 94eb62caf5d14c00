"""The slot caches of the torch engine: what a neighbour may leave in them, and how large they get.

A sampler is driven by hand here, step by step, so that who shares a cache with whom is certain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.requirements import proves

from halteres.engine.protocol import SampleResult, SamplingParams
from halteres.engine.torch.adapter import BASE, Snapshot
from halteres.engine.torch.admission import Admission, CachePool
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import SampleRequest
from halteres.engine.torch.sampler import Sampler
from halteres.errors import UserError
from halteres.text import load_tokenizer

from .scenes import packed
from .torch_scenes import prompts, tokens_of

SICK = 650
"""A token no prompt here has by chance; `poisoned` makes its embedding NaN."""


@pytest.fixture(scope="module")
def base(model_folder: Path) -> BaseModel:
    torch.set_num_threads(1)
    return load_base(model_folder, torch.float32, torch.device("cpu"))


def poisoned(base: BaseModel, token: int) -> BaseModel:
    """Who reads this token diverges; nobody else does."""
    embedding_VD = base.embedding_VD.clone()
    embedding_VD[token] = float("nan")
    return replace(base, embedding_VD=embedding_VD)


def asked(
    prompt: Sequence[int],
    n: int = 1,
    limit: int = 40,
    snapshot: Snapshot = BASE,
    decode: Callable[[list[int]], str] = str,
    **params: Any,
) -> SampleRequest:
    return SampleRequest(
        snapshot=snapshot,
        prompt=packed(prompt),
        tokens=np.array(prompt, np.int64),
        num_samples=n,
        params=SamplingParams(max_tokens=limit, **params),
        limit=limit,
        stop_tokens=frozenset(),
        decode=decode,
        future=Future(),
    )


def step(sampler: Sampler, until: Sequence[SampleRequest] = ()) -> None:
    """One step, or as many as these need."""
    with torch.inference_mode():
        sampler.step()
        for _ in range(5000):
            if all(request.future.done() for request in until):
                return
            sampler.step()
    raise AssertionError("not answered within 5,000 steps")


def alone(base: BaseModel, request: SampleRequest) -> SampleResult:
    """The answer of a sampler that never had anything else."""
    sampler = Sampler(base, Limits())
    same = replace(request, future=Future(), finished={})
    sampler.add(same)
    step(sampler, [same])
    return same.future.result()


def answers(*requests: SampleRequest) -> list[SampleResult]:
    return [request.future.result(timeout=0) for request in requests]


def test_a_request_that_diverges_in_mid_answer_costs_its_neighbours_no_token(base: BaseModel) -> None:
    first, ill, last = (asked(p, n=2, seed=i) for i, p in enumerate(prompts(3, seed=5)))
    expected = [alone(base, request) for request in (first, last)]
    said = {token for result in expected for s in result.sequences for token in tokens_of(s)}
    said |= {int(token) for request in (first, ill, last) for token in request.tokens}
    own = tokens_of(alone(base, ill).sequences[0])
    sick = next(token for token in own[3:] if token not in {*said, *own[:3]})
    sampler = Sampler(poisoned(base, sick), Limits())
    for request in (first, ill, last):
        sampler.add(request)
    step(sampler, [first, ill, last])
    with pytest.raises(UserError, match="diverged"):
        ill.future.result()
    assert answers(first, last) == expected


@proves("tenants:no-leak")
def test_a_slot_carries_nothing_of_a_tenant_that_diverged(base: BaseModel) -> None:
    """Attention weighs what lies behind a row with 0, and 0 * NaN is NaN."""
    sampler = Sampler(poisoned(base, SICK), Limits())
    before, after = (asked(p, limit=90, seed=1) for p in prompts(2, seed=6))
    ill = asked([SICK, *prompts(1, low=150, high=151)[0]], n=5)
    tenants = asked([5, 6, 7], n=4, seed=2)
    for request in (before, ill, after):
        sampler.add(request)
    step(sampler)
    assert isinstance(ill.future.exception(timeout=0), UserError)
    sampler.add(tenants)
    step(sampler, [before, after, tenants])
    assert answers(before, after, tenants) == [alone(base, r) for r in (before, after, tenants)]


def test_the_next_batch_may_take_over_the_cache_of_one_that_diverged(base: BaseModel) -> None:
    sampler = Sampler(poisoned(base, SICK), Limits())
    ill = asked([SICK, *prompts(1, low=150, high=151)[0]], n=8)
    sampler.add(ill)
    step(sampler, [ill])
    spare = sampler._pool.spare
    assert spare is not None
    other = Snapshot(layout=None, flat=None, weights={}, version=1)
    healthy = asked([5, 6, 7], n=8, seed=2, snapshot=other)
    sampler.add(healthy)
    step(sampler)
    assert [batch.cache for batch in sampler._batches] == [spare]
    step(sampler, [healthy])
    assert answers(healthy) == [alone(base, healthy)]


def test_what_no_sequence_has_written_is_zero(base: BaseModel) -> None:
    """Chosen: simpler to hold than "finite and never overflowing". Position 0 is what idle slots of a step write."""
    sampler = Sampler(base, Limits())
    requests = [asked(p, n=3, limit=3 + 7 * i, seed=i) for i, p in enumerate(prompts(6, seed=8))]
    for request in requests:
        sampler.add(request)
        step(sampler)
        batch = sampler._batches[0]
        written = [len(row.request.tokens) + len(row.tokens) - 1 for row in batch.rows]
        written += [1] * (batch.cache.extent.slots - len(written))
        for buffer in (*batch.cache._keys, *batch.cache._values):
            assert not any(slot[:, length:].any() for slot, length in zip(buffer, written, strict=True))
    step(sampler, requests)
    spare = sampler._pool.spare
    assert spare is not None
    assert not any(buffer[:, :, 1:].any() for buffer in (*spare._keys, *spare._values))


def test_neighbours_with_stop_strings_or_a_long_context_change_no_bit(base: BaseModel, model_folder: Path) -> None:
    """They leave at any step, so rows move, and they raise the bound of what attention reads from 64 to 1,024."""
    tokenizer = load_tokenizer(str(model_folder))

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    me = asked(prompts(1, seed=11)[0], n=3, seed=9)
    expected = alone(base, me)
    sampler, strangers = Sampler(base, Limits()), []
    for i, prompt in enumerate(prompts(6, seed=12)):
        text = decode(tokens_of(alone(base, asked(prompt, seed=i)).sequences[0]))
        stop = text[len(text) * (i + 1) // 8 :][:2]
        strangers.append(asked(prompt, n=2, seed=i, decode=decode, stop_strings=(stop,)))
    long = asked(prompts(1, low=1000, high=1001)[0], n=2, limit=10)
    for request in (*strangers[:3], me, *strangers[3:]):
        sampler.add(request)
    for _ in range(4):
        step(sampler)
    sampler.add(long)
    step(sampler, [me, long, *strangers])
    assert answers(me) == [expected]
    assert any(s.stop_reason == "stop" for result in answers(*strangers) for s in result.sequences)


def held(sampler: Sampler) -> int:
    """Bytes of all caches."""
    spare = sampler._pool.spare
    return sum(batch.cache.bytes for batch in sampler._batches) + (spare.bytes if spare else 0)


@pytest.mark.parametrize("seed", range(2))
def test_the_caches_never_hold_more_than_the_bound_but_for_a_request_alone(base: BaseModel, seed: int) -> None:
    limits = Limits(cache_bytes=2048 * base.cache_bytes_per_token, decode_rows=40)
    random, sampler = np.random.default_rng(seed), Sampler(base, limits)
    snapshots = [replace(BASE, version=version) for version in range(3)]
    requests, most, lone = [], 0, set()
    for arrival in range(24):
        prompt = [9] * int(random.integers(1, 150 if arrival % 4 else 20))
        limit = 280 if arrival % 12 == 7 else int(random.integers(1, 60))  # 8 slots of 512 positions: too large
        snapshot = snapshots[int(random.integers(3))]
        requests.append(asked(prompt, n=int(random.integers(1, 14)), limit=limit, seed=arrival, snapshot=snapshot))
        sampler.add(requests[-1])
        for _ in range(int(random.integers(0, 12)) if arrival < 23 else 5000):
            if not sampler.busy:
                break
            step(sampler)
            running = {request for batch in sampler._batches for request in batch.requests}
            if held(sampler) > limits.cache_bytes:
                assert len(running) == 1
                lone |= running
            else:
                most = max(most, held(sampler))
            assert sum(len(batch.rows) for batch in sampler._batches) <= limits.decode_rows
    assert all(
        len(result.sequences) == request.num_samples
        for request, result in zip(requests, answers(*requests), strict=True)
    )
    assert most > limits.cache_bytes / 2
    assert lone
    assert all(request.full_length > 256 for request in lone)
    assert held(sampler) <= limits.cache_bytes


def test_a_long_request_waits_where_its_length_times_all_rows_is_too_much(base: BaseModel) -> None:
    """Every slot of a cache is as long as the longest: 512 rows of 2,048 positions, not 511 of 100 and one of 2,048."""
    limits = Limits(cache_bytes=512 * 1024 * base.cache_bytes_per_token)

    def entering(*requests: SampleRequest) -> int:
        entries = Admission(deque(), base, CachePool(base, limits), limits).fill(deque(requests))
        return sum(count for found in entries.values() for _, count in found)

    short, long = asked([1] * 60, n=511), asked([1] * 2000, limit=48)
    assert entering(short, long) == 511
    assert entering(long, short) == 256
    assert entering(asked([1] * 60, n=255), long) == 256


def test_a_spare_cache_makes_way(base: BaseModel) -> None:
    """It counts within the bound, so it goes when somebody needs its room, or a smaller cache than it."""
    limits = Limits(cache_bytes=2048 * base.cache_bytes_per_token)
    sampler = Sampler(base, limits)
    wide, tall = asked([1, 2], n=32, limit=5), asked([1, 2], n=8, limit=200)
    for request in (wide, tall, wide):
        again = replace(request, future=Future(), finished={})
        sampler.add(again)
        step(sampler)
        assert held(sampler) <= limits.cache_bytes
        step(sampler, [again])
        assert sampler._pool.spare is not None


def test_a_caller_that_goes_away_leaves_the_room_of_its_cache(base: BaseModel) -> None:
    sampler = Sampler(base, Limits(cache_bytes=2048 * base.cache_bytes_per_token))
    gone, next_one = asked([1, 2], n=32), asked([1, 2], n=16, limit=120, snapshot=replace(BASE, version=1))
    sampler.add(gone)
    step(sampler)
    gone.future.cancel()
    sampler.add(next_one)
    step(sampler)
    assert [len(batch.rows) for batch in sampler._batches] == [16]
