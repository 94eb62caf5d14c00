"""Which sampler a request goes to: by adapter and conversation, and past one that has too much."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import msgspec
import pytest

from halteres.engine.protocol import (
    EngineGone,
    ExtraLogprobs,
    LoraConfig,
    ModelInfo,
    Samples,
    SamplingParams,
)
from halteres.service.fleet import Fleet, with_failover
from halteres.service.sampling.router import Router

from .live_service import InProcess

WAIT_S = 20

INFO = ModelInfo(
    name="m",
    folder="/m",
    architecture="a",
    vocab_size=8,
    max_context_length=64,
    num_parameters=1,
    dtype="float32",
    device="cpu",
    threads=1,
    max_rank=8,
    targets=("attn", "mlp"),
)


def router(*infos: ModelInfo) -> tuple[Router, list[InProcess]]:
    hosts = [InProcess() for _ in infos]
    for host, info in zip(hosts, infos, strict=True):
        host.state, host.info = "ready", info
    return Router(Fleet.of(InProcess(), *hosts)), hosts


def picked(routes: Router, adapter: str, prompt: bytes) -> InProcess:
    with routes.route(adapter, prompt) as pick:
        return pick(())  # type: ignore[return-value]


async def test_a_conversation_stays_with_the_sampler_that_has_its_beginning() -> None:
    routes, hosts = router(INFO, INFO, INFO)
    firsts = [bytes([number]) * 16 for number in range(32)]
    homes = [picked(routes, "a", prompt) for prompt in firsts]
    assert set(map(id, homes)) == set(map(id, hosts))
    for turn in (1, 2):
        longer = [prompt + b"answer, and what was said next" * turn for prompt in firsts]
        assert [picked(routes, "a", prompt) for prompt in longer] == homes
    # of two prompts that it begins with, the longest one decides
    moved = firsts[0] + b"answer"
    other = next(host for host in hosts if host is not homes[0])
    routes._remember(("a", *routes._checksums("a", moved)[-1]), other)
    assert picked(routes, "a", moved + b" and more") is other
    assert [picked(routes, "a", prompt) for prompt in firsts] == homes


async def test_one_that_has_too_much_under_way_is_spared() -> None:
    """A sampler that is slow keeps its requests for longer, and so gets fewer."""
    routes, (slow, fast) = router(INFO, INFO)
    with ExitStack() as under_way:
        given = {id(slow): 0, id(fast): 0}
        for number in range(64):
            with routes.route("a", bytes([number])) as pick:
                host = pick(())
                given[id(host)] += 1
            if host is slow and given[id(slow)] <= 8:
                under_way.enter_context(routes.route("a", bytes([number]), lambda _: True))
                routes._under_way[slow] += 1
        assert given[id(slow)] < given[id(fast)]
    routes, (first, second) = router(INFO, INFO)
    with ExitStack() as under_way:
        homes = [
            under_way.enter_context(routes.route("a", b"the same prompt"))(()) for _ in range(16)
        ]
        assert {id(host) for host in homes} == {id(first), id(second)}
        assert abs(homes.count(first) - homes.count(second)) <= 4
    assert routes._under_way.total() == 0


async def test_one_that_is_away_is_passed_over_and_comes_back() -> None:
    routes, hosts = router(INFO, INFO)
    home = picked(routes, "a", b"prompt")
    (other,) = [host for host in hosts if host is not home]
    home.state = "starting"
    assert picked(routes, "a", b"prompt") is other
    for host in hosts:
        host.state = "starting"
    assert picked(routes, "a", b"prompt") in hosts


async def test_one_that_died_under_a_request_is_not_waited_for_while_another_is_ready() -> None:
    """Its host may say that it is ready for seconds more."""
    routes, hosts = router(INFO, INFO)
    first = picked(routes, "a", b"prompt")
    (second,) = [host for host in hosts if host is not first]
    asked = list[Samples]()

    async def call(engine: Samples) -> str:
        asked.append(engine)
        if len(asked) == 1:
            raise EngineGone("It died.")
        return "answer"

    async with asyncio.timeout(WAIT_S):
        with routes.route("a", b"prompt") as pick:
            assert await with_failover(pick, call) == "answer"
    assert first.state == "ready"
    assert asked == [first.engine, second.engine]


async def test_where_all_died_under_a_request_a_successor_is_waited_for() -> None:
    routes, hosts = router(INFO, INFO)
    asked, all_died = list[Samples](), asyncio.Event()

    async def call(engine: Samples) -> str:
        asked.append(engine)
        if len(asked) == len(hosts):
            all_died.set()
        if len(asked) <= len(hosts):
            raise EngineGone("It died.")
        return "answer"

    with routes.route("a", b"prompt") as pick:
        waiting = asyncio.create_task(with_failover(pick, call))
        async with asyncio.timeout(WAIT_S):
            await all_died.wait()
            assert not waiting.done()
            for host in hosts:
                await host.die()
            assert await waiting == "answer"
    assert len(set(map(id, asked))) == 3
    assert asked[-1] in [host.engine for host in hosts]


@pytest.mark.parametrize(
    ("params", "extra", "rank", "unembed"),
    [
        (SamplingParams(), ExtraLogprobs(alternatives=1), 4, False),
        (SamplingParams(), ExtraLogprobs(topk_sampled=30), 4, False),
        (SamplingParams(logprobs="tempered", temperature=0.5), ExtraLogprobs(), 4, False),
        (SamplingParams(), ExtraLogprobs(), 16, False),
        (SamplingParams(), ExtraLogprobs(), 4, True),
    ],
)
async def test_a_request_goes_to_a_sampler_that_can_answer_it(
    params: SamplingParams, extra: ExtraLogprobs, rank: int, unembed: bool
) -> None:
    few = msgspec.structs.replace(INFO, logprobs=("raw",), extras=("topk_sampled",), most_likely=20)
    every = msgspec.structs.replace(INFO, max_rank=512, targets=("attn", "mlp", "unembed"))
    routes, (_, able) = router(few, every)
    lora = LoraConfig(rank=rank, train_unembed=unembed)

    def fits(model: ModelInfo) -> bool:
        return model.takes(lora) and not model.lacks(params, extra)

    for number in range(16):
        with routes.route("a", bytes([number]), fits) as pick:
            assert pick(()) is able


async def test_no_more_prompts_are_remembered_than_are_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halteres.service.sampling.router.REMEMBERED", 8)
    routes, _ = router(INFO, INFO)
    for number in range(64):
        picked(routes, f"adapter-{number % 4}", bytes(number + 1))
    assert len(routes._answered) == 8
    assert sum(lengths.total() for lengths in routes._lengths.values()) == 8
