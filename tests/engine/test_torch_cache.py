"""The cache of the torch engine: what a neighbour may leave in it, how large it gets, and who makes
way where it ends.

A sampler is driven by hand here, step by step, so that who shares a cache with whom is certain.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.requirements import proves

from halteres.engine.protocol import ExtraLogprobs, Piece, SampleResult, SamplingParams
from halteres.engine.protocol import Sequence as Sampled
from halteres.engine.stream_buffer import PieceQueue
from halteres.engine.torch.adapter import BASE, Snapshot
from halteres.engine.torch.cache import Block, PrefixCache, slot_length
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.rows import Rows, SampleRequest
from halteres.engine.torch.worker import Scheduler
from halteres.errors import UserError
from halteres.tokenizer import load_tokenizer

from .requests import packed
from .torch_fixtures import DTYPE, prompts, same_numbers, tokens_of

pytestmark = pytest.mark.runs

SICK = 650
"""A token no prompt here has by chance; `poisoned` makes its embedding NaN."""


@pytest.fixture(scope="module")
def base(model_folder: Path) -> BaseModel:
    torch.set_num_threads(1)
    return load_base(model_folder, getattr(torch, DTYPE), torch.device("cpu"))


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


def step(sampler: Scheduler, until: Sequence[SampleRequest] = ()) -> None:
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
    sampler = Scheduler(base, Limits())
    same = again(request)
    sampler.add(same)
    step(sampler, [same])
    return same.future.result()


def again(request: SampleRequest) -> SampleRequest:
    """The same, as it was before anybody answered it."""
    return replace(request, future=Future(), finished={}, scores=None)


def answers(*requests: SampleRequest) -> list[SampleResult]:
    return [request.future.result(timeout=0) for request in requests]


def sequences(*requests: SampleRequest) -> list[tuple[Sampled, ...]]:
    """What was sampled, whatever was found in the prefix cache."""
    return [result.sequences for result in answers(*requests)]


@same_numbers
def test_a_request_that_diverges_in_mid_answer_costs_its_neighbours_no_token(
    base: BaseModel,
) -> None:
    first, ill, last = (asked(p, n=2, seed=i) for i, p in enumerate(prompts(3, seed=5)))
    expected = [alone(base, request) for request in (first, last)]
    said = {token for result in expected for s in result.sequences for token in tokens_of(s)}
    said |= {int(token) for request in (first, ill, last) for token in request.tokens}
    own = tokens_of(alone(base, ill).sequences[0])
    sick = next(token for token in own[3:] if token not in {*said, *own[:3]})
    sampler = Scheduler(poisoned(base, sick), Limits())
    for request in (first, ill, last):
        sampler.add(request)
    step(sampler, [first, ill, last])
    with pytest.raises(UserError, match="diverged"):
        ill.future.result()
    assert answers(first, last) == expected


@proves("tenants:no-leak")
def test_a_slot_carries_nothing_of_a_tenant_that_diverged(base: BaseModel) -> None:
    """Attention weighs what lies behind a row with 0, and 0 * NaN is NaN."""
    sampler = Scheduler(poisoned(base, SICK), Limits())
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


def test_what_no_sequence_has_written_is_zero(base: BaseModel) -> None:
    """Chosen: simpler to hold than "finite and never overflowing"."""
    sampler = Scheduler(base, Limits())
    requests = [
        asked(p, n=3, limit=3 + 8 * i, seed=i)
        for i, p in enumerate(prompts(6, low=95, high=120, seed=8))
    ]
    lengths: set[int] = set()
    for request in requests:
        sampler.add(request)
        for _ in range(8):
            step(sampler)
            for block in sampler._batch.rows.blocks:
                lengths.add(block.cache.length)
                written = [row.length - 1 for row in block.rows] + [0] * block.vacant
                for slot, length in enumerate(written):
                    assert not block.cache.buffer[:, :, slot, :, length:].any()
    assert lengths == {128, 256}
    step(sampler, requests)
    assert held(sampler) == 0


def test_neighbours_with_stop_strings_or_a_long_context_change_no_bit(
    base: BaseModel, model_folder: Path
) -> None:
    """They leave at any step, so rows move, and they raise the bound of what attention reads from
    64 to 1,024.
    """
    tokenizer = load_tokenizer(str(model_folder))

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    me = asked(prompts(1, seed=11)[0], n=3, seed=9)
    expected = alone(base, me)
    sampler, strangers = Scheduler(base, Limits()), []
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


def held(sampler: Scheduler) -> int:
    """Bytes of all rows' blocks."""
    return sum(block.cache.buffer.nbytes for block in sampler._batch.rows.blocks)


def running(sampler: Scheduler) -> dict[SampleRequest, int]:
    """How many rows each request has."""
    rows = [row.request for row in sampler._batch.rows]
    return {request: rows.count(request) for request in rows}


def test_a_slot_has_the_shortest_length_that_holds_its_row() -> None:
    lengths = {positions: slot_length(positions, context=3000) for positions in range(1, 3001)}
    assert sorted(set(lengths.values())) == [128, 256, 384, 512, 768, 1024, 1536, 2048, 3008]
    assert all(positions <= length for positions, length in lengths.items())
    assert all(
        length <= 1.5 * positions for positions, length in lengths.items() if positions > 256
    )
    assert slot_length(5, context=64) == 128


@pytest.mark.parametrize("seed", range(2))
def test_the_cache_never_holds_more_than_its_bound_but_for_a_row_alone(
    base: BaseModel, seed: int
) -> None:
    """Whatever comes: every answer is that of a sampler that has memory for all, and the bound is
    made use of.
    """
    limits = Limits(cache_bytes=3072 * base.cache_bytes_per_token, decode_rows=40)
    random, sampler = np.random.default_rng(seed), Scheduler(base, limits)
    snapshots = [replace(BASE, version=version) for version in range(3)]
    requests, most, most_kept = [], 0, 0
    for arrival in range(12):
        prompt = random.integers(3, 600, random.integers(60, 150)).tolist()
        limit, snapshot = int(random.integers(1, 90)), snapshots[int(random.integers(3))]
        requests.append(
            asked(
                prompt, n=int(random.integers(1, 14)), limit=limit, seed=arrival, snapshot=snapshot
            )
        )
        sampler.add(requests[-1])
        for _ in range(int(random.integers(0, 12)) if arrival < 11 else 5000):
            if not sampler.busy:
                break
            step(sampler)
            kept = sampler.prefixes.area * base.cache_bytes_per_token
            assert held(sampler) + kept <= limits.cache_bytes
            assert held(sampler) == sampler.memory.used * base.cache_bytes_per_token
            assert sum(running(sampler).values()) <= limits.decode_rows
            most, most_kept = max(most, held(sampler)), max(most_kept, kept)
    assert most_kept
    assert most > 0.9 * limits.cache_bytes
    unbounded, same = Scheduler(base, Limits(prefixes=0)), [again(request) for request in requests]
    for request in same:
        unbounded.add(request)
    step(unbounded, same)
    assert sequences(*requests) == sequences(*same)


def test_rows_that_outgrow_the_cache_make_way_the_youngest_first_and_all_come_back_bit_for_bit(
    base: BaseModel,
) -> None:
    """All are in decode at once at first, and with a quarter of what they need in the end nobody
    loses a token.
    """
    groups = [
        asked(p, n=8, limit=80, seed=i) for i, p in enumerate(prompts(4, low=75, high=95, seed=3))
    ]
    sampler = Scheduler(base, Limits(cache_bytes=32 * 128 * base.cache_bytes_per_token))
    for request in groups:
        sampler.add(request)
    step(sampler)
    assert list(running(sampler).values()) == [8, 8, 8, 8]
    first, last = groups[0], groups[-1]
    made_way = 0
    while not first.future.done():
        step(sampler)
        made_way += running(sampler).get(last, 0) == 0 and not last.future.done()
        assert running(sampler).get(first) == 8 or first.future.done()
    assert made_way
    step(sampler, groups)
    assert answers(*groups) == [alone(base, request) for request in groups]


def test_a_request_that_outgrows_all_memory_runs_row_by_row(base: BaseModel) -> None:
    limits = Limits(cache_bytes=256 * base.cache_bytes_per_token)
    large, small = (
        asked(prompts(1, low=200, high=201)[0], n=2, limit=80, seed=1),
        asked([3, 4], n=2, limit=4),
    )
    sampler = Scheduler(base, limits)
    sampler.add(large)
    sampler.add(small)
    while not large.future.done():
        step(sampler)
        assert held(sampler) <= limits.cache_bytes or running(sampler) == {large: 1}
    step(sampler, [small])
    assert answers(large, small) == [alone(base, request) for request in (large, small)]


def test_an_open_ended_chat_delays_nobody_for_more_than_a_step(base: BaseModel) -> None:
    """It counts with the slot that it has, not with the 2,000 tokens that it may write."""
    sampler = Scheduler(base, Limits(cache_bytes=1024 * base.cache_bytes_per_token))
    chat = asked([1, 2, 3], limit=2000, seed=1)
    sampler.add(chat)
    for arrival in range(3):
        step(sampler)
        others = [asked(p, n=2, limit=6, seed=arrival) for p in prompts(2, seed=arrival)]
        for request in others:
            sampler.add(request)
        step(sampler)
        assert all(len(request.waiting) == 0 for request in others)
        for _ in range(5):
            step(sampler)
        assert answers(*others) == [alone(base, request) for request in others]
    assert not chat.future.done()


def test_short_rows_read_no_further_than_they_would_without_a_long_one(base: BaseModel) -> None:
    """Every block has a bound of its own."""
    sampler = Scheduler(base, Limits())
    short, long = (
        asked([5, 6, 7], n=20, limit=60),
        asked(prompts(1, low=1500, high=1501)[0], limit=20),
    )
    for request in (short, long):
        sampler.add(request)
    step(sampler)
    found = {block.cache.length: len(block.rows) for block in sampler._batch.rows.blocks}
    assert found == {128: 20, 1536: 1}
    step(sampler, [short, long])
    assert answers(short, long) == [alone(base, request) for request in (short, long)]


def test_a_caller_that_goes_away_leaves_the_room_of_its_rows(base: BaseModel) -> None:
    sampler = Scheduler(base, Limits(cache_bytes=2048 * base.cache_bytes_per_token))
    gone, next_one = (
        asked([1, 2], n=32),
        asked([1, 2], n=16, limit=120, snapshot=replace(BASE, version=1)),
    )
    sampler.add(gone)
    step(sampler)
    gone.future.cancel()
    sampler.add(next_one)
    step(sampler)
    assert len(sampler._batch.rows) == 16


def test_a_stream_whose_row_made_way_tells_every_token_once(base: BaseModel) -> None:
    told: dict[int, list[int]] = {}

    class Pieces(PieceQueue):
        def __init__(self) -> None:
            """Without the reader's event loop."""

        def put(self, piece: Piece) -> None:
            told.setdefault(piece.sample, []).extend(np.frombuffer(piece.tokens, np.int32).tolist())

    streaming = asked(prompts(1, low=100, high=101)[0], n=4, limit=60, seed=4)
    streaming.pieces = Pieces()
    sampler = Scheduler(base, Limits(cache_bytes=4 * 128 * base.cache_bytes_per_token))
    sampler.add(streaming)
    step(sampler, [streaming])
    (result,) = answers(streaming)
    assert [told[i] for i in range(4)] == [tokens_of(sequence) for sequence in result.sequences]
    assert result == alone(base, replace(streaming, pieces=None))


OFF = Limits(prefixes=0)


def conversation(
    sampler: Scheduler, turns: int, seed: int, snapshot: Snapshot = BASE
) -> list[SampleResult]:
    """Every turn's prompt is all that was said, and a little more."""
    text, found = prompts(1, low=90, high=110, seed=7)[0], list[SampleResult]()
    for turn in range(turns):
        request = asked(text, n=2, limit=21, seed=100 * seed + turn, snapshot=snapshot)
        sampler.add(request)
        step(sampler, [request])
        found += answers(request)
        text = [
            *text,
            *tokens_of(found[-1].sequences[turn % 2]),
            *prompts(1, low=15, high=25, seed=turn)[0],
        ]
    return found


@proves("sample:agrees")
def test_what_a_conversation_begins_with_is_computed_once_and_changes_no_bit(
    base: BaseModel,
) -> None:
    cached, plain = Scheduler(base, Limits()), Scheduler(base, OFF)
    for seed in range(2):
        found, expected = (conversation(sampler, turns=8, seed=seed) for sampler in (cached, plain))
        assert [result.sequences for result in found] == [result.sequences for result in expected]
        hits = [result.prompt_cache_hit_tokens for result in found]
        assert all(0 < hit < 100 + 45 * turn for turn, hit in enumerate(hits[1:], start=1))
        assert hits[0] == (0, 96)[seed] or seed == 0, "another conversation begins alike"
        assert {result.prompt_cache_hit_tokens for result in expected} == {0}
    prefixes, without = (sampler.prefixes for sampler in (cached, plain))
    assert prefixes.computed_tokens < without.computed_tokens / 2
    assert prefixes.computed_tokens + prefixes.hit_tokens == without.computed_tokens


def test_prefixes_of_different_lengths_are_prefilled_together_with_texts_that_have_none(
    base: BaseModel,
) -> None:
    sampler = Scheduler(base, Limits())
    first = [asked(p, limit=2, seed=1) for p in prompts(4, low=35, high=400, seed=21)]
    for request in first:
        sampler.add(request)
    step(sampler, first)
    longer = [
        asked([*request.tokens.tolist(), *extra], n=2, limit=30, seed=i)
        for i, (request, extra) in enumerate(
            zip(first, prompts(4, low=5, high=60, seed=22), strict=True)
        )
    ]
    longer += [asked(p, limit=30, seed=9) for p in prompts(2, low=50, high=60, seed=23)]
    for request in longer:
        sampler.add(request)
    step(sampler, longer)
    assert sequences(*longer) == [alone(base, request).sequences for request in longer]
    assert [result.prompt_cache_hit_tokens > 0 for result in answers(*longer)] == [True] * 4 + [
        False
    ] * 2


def test_who_asks_for_log_probabilities_of_a_prompt_gets_all_of_them(base: BaseModel) -> None:
    sampler, prompt = Scheduler(base, Limits()), prompts(1, low=100, high=101)[0]
    scored = replace(asked(prompt, limit=3), extra=ExtraLogprobs(prompt_logprobs=True))
    for request in (asked(prompt, limit=3), scored):
        sampler.add(request)
        step(sampler, [request])
    (result,) = answers(scored)
    assert result.prompt_cache_hit_tokens == 0
    assert repr(result) == repr(alone(base, scored))


def test_prefixes_make_way_for_rows_the_least_recently_used_first(base: BaseModel) -> None:
    limits = Limits(cache_bytes=5 * 128 * base.cache_bytes_per_token)
    sampler = Scheduler(base, limits)
    ended = [asked(p, limit=2) for p in prompts(3, low=100, high=101, seed=31)]
    for request in (*ended, again(ended[0])):
        sampler.add(request)
        step(sampler, [request])
    assert sampler.prefixes.area == 3 * 96
    crowd = asked([1, 2, 3], n=4, limit=4)
    sampler.add(crowd)
    step(sampler)
    assert held(sampler) == 4 * 128 * base.cache_bytes_per_token
    assert sampler.prefixes.area == 128
    step(sampler, [crowd])
    hits = []
    for request in map(again, ended):
        sampler.add(request)
        step(sampler, [request])
        hits += [result.prompt_cache_hit_tokens for result in answers(request)]
    assert hits == [96, 0, 32], "of the last one used before, as much as there was room for"


def test_prefixes_are_their_snapshots_alone_and_go_with_it(base: BaseModel) -> None:
    sampler, prompt = Scheduler(base, Limits()), prompts(1, low=100, high=101)[0]
    hits = []
    for _ in range(2):
        snapshot = replace(BASE, version=1)
        for _ in range(2):
            request = asked(prompt, limit=2, snapshot=snapshot)
            sampler.add(request)
            step(sampler, [request])
            hits += [result.prompt_cache_hit_tokens for result in answers(request)]
    assert hits == [0, 96, 0, 96]
    del snapshot, request
    gc.collect()
    sampler.prefixes.shrink(1 << 40)
    assert sampler.prefixes.area == 0


def test_rows_that_made_way_come_back_though_memory_ends_right_after(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [
        asked(p, n=8, limit=80, seed=i) for i, p in enumerate(prompts(4, low=75, high=95, seed=3))
    ]
    sampler = Scheduler(base, Limits(cache_bytes=32 * 128 * base.cache_bytes_per_token))
    move_on, failed = Rows.move_on, list[bool]()

    def scarce(rows: Rows, **named: Any) -> Any:
        if not failed:
            failed.append(True)
            raise MemoryError
        return move_on(rows, **named)

    monkeypatch.setattr(Rows, "move_on", scarce)
    for request in groups:
        sampler.add(request)
    step(sampler, groups)
    assert failed
    ends = [request.future.exception() for request in groups]
    assert sum(end is not None for end in ends) == 1, "the one that needed most"
    kept_going = [request for request, end in zip(groups, ends, strict=True) if end is None]
    assert answers(*kept_going) == [alone(base, request) for request in kept_going]


def test_a_prefix_that_cannot_be_kept_changes_no_answer(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Rows, "keep_prefixes", scarce)
    groups = [
        asked(p, n=3, limit=9, seed=i) for i, p in enumerate(prompts(2, low=40, high=60, seed=5))
    ]
    sampler = Scheduler(base, Limits())
    for request in groups:
        sampler.add(request)
    step(sampler, groups)
    monkeypatch.undo()
    assert answers(*groups) == [alone(base, request) for request in groups]


def test_what_texts_begin_with_alike_is_kept_once_and_the_rest_of_the_older_use_goes_first(
    base: BaseModel,
) -> None:
    """The first is used again, so that what only the second has goes first."""
    limits = Limits(cache_bytes=(3 * 128 + 96) * base.cache_bytes_per_token)
    sampler = Scheduler(base, limits)
    beginning, *ends = prompts(3, low=64, high=65, seed=41)
    first, second = (asked([*beginning, *end[:40]], limit=2) for end in ends)
    for request in (first, second, again(first)):
        sampler.add(request)
        step(sampler, [request])
    assert sampler.prefixes.area == 64 + 2 * 32
    crowd = asked([1, 2, 3], n=3, limit=4)
    sampler.add(crowd)
    step(sampler, [crowd])
    assert sampler.prefixes.area == 96
    hits: list[int] = []
    for request in (again(first), again(second)):
        sampler.add(request)
        step(sampler, [request])
        hits.append(request.future.result().prompt_cache_hit_tokens)
    assert hits == [96, 64]


class Texts:
    """Texts that begin alike, and a slot whose numbers follow from all tokens up to their
    position.
    """

    def __init__(self, base: BaseModel, seed: int) -> None:
        self.base, self.block, self._random = (
            base,
            Block(base, 2, 1024),
            np.random.default_rng(seed),
        )
        self._texts = [self._random.integers(3, 600, 200)]

    def draw(self) -> np.ndarray:
        """An earlier one up to anywhere, and something new."""
        earlier = self._texts[self._random.integers(len(self._texts))]
        kept = earlier[: self._random.integers(len(earlier) + 1)][:800]
        text = np.concatenate([kept, self._random.integers(3, 600, self._random.integers(1, 200))])
        self._texts.append(text)
        return text

    def fill(self, text: np.ndarray, snapshot: Snapshot) -> Block:
        """Its first slot holds what this snapshot computes of the text."""
        numbers_L = torch.from_numpy(np.cumsum(text * 7 % 61) + snapshot.version)
        data = self.block.buffer
        data.zero_()
        data[:, :, 0, :, : len(text)] = (numbers_L % 251)[:, None].to(data.dtype)
        data[1, :, 0, :, : len(text)] *= -1
        return self.block

    def restored(self, prefixes: PrefixCache, text: np.ndarray, snapshot: Snapshot) -> int:
        """How many tokens are found, and they are this text's, and nothing else is written."""
        data = self.fill(text, snapshot).buffer
        found = prefixes.restore(snapshot, text, self.block, 1)
        assert found < len(text)
        assert torch.equal(data[:, :, 1, :, :found], data[:, :, 0, :, :found])
        assert not data[:, :, 1, :, found:].any()
        return found


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_kept_and_goes_a_text_gets_its_own_keys_and_values(
    base: BaseModel, seed: int
) -> None:
    """Within its bounds, and nothing of a snapshot that is gone stays."""
    random, texts, prefixes = np.random.default_rng(seed), Texts(base, seed), PrefixCache(4096)
    snapshots = [replace(BASE, version=version) for version in range(3)]
    hits = 0
    for version in range(3, 400):
        text, snapshot = texts.draw(), snapshots[int(random.integers(3))]
        hits += texts.restored(prefixes, text, snapshot) > 0
        room = int(random.integers(-100, 6000))
        before = prefixes.area
        prefixes.keep(snapshot, text, texts.fill(text, snapshot), 0, room)
        assert prefixes.area <= max(before, min(room, 4096))
        pages = min(len(text), max(room, 0), 4096) // 32
        assert texts.restored(prefixes, np.append(text, 1), snapshot) >= pages * 32
        if random.random() < 0.2:
            area = int(random.integers(4096))
            prefixes.shrink(area)
            assert prefixes.area <= area
        if random.random() < 0.05:
            snapshots[int(random.integers(3))] = replace(BASE, version=version)
    assert hits > 50
    snapshots.clear()
    del snapshot
    gc.collect()
    prefixes.shrink(1 << 40)
    assert prefixes.area == 0


def calls(work: Callable[[], object]) -> int:
    """How many functions `work` calls, those of C among them."""
    counted = [0]

    def count(*_: object) -> None:
        counted[0] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted[0]


def work_of_one_text(base: BaseModel, number: int) -> list[int]:
    """What one text more takes of a full cache of so many that begin alike: to keep it, to find it,
    and to let go as much as it has for itself."""
    random, block = np.random.default_rng(0), Block(base, 2, 256)
    beginning = random.integers(3, 600, 128)
    prefixes = PrefixCache(128 + number * 96)
    *texts, last = [np.append(beginning, random.integers(3, 600, 96)) for _ in range(number + 1)]
    for text in texts:
        prefixes.keep(BASE, text, block, 0, 1 << 40)
    assert prefixes.area == 128 + number * 96
    found = [
        calls(lambda: prefixes.keep(BASE, last, block, 0, 1 << 40)),
        calls(lambda: prefixes.restore(BASE, last, block, 1)),
        calls(lambda: prefixes.shrink(prefixes.area - 96)),
    ]
    assert prefixes.area == 128 + number * 96 - 96
    return found


def test_finding_keeping_and_letting_go_take_the_work_of_one_text_however_many_are_kept(
    base: BaseModel,
) -> None:
    assert work_of_one_text(base, 16) == work_of_one_text(base, 1024)
