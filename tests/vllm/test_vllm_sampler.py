"""A real vLLM on a CPU beside the embedded engine, on the built-in model in fp32: same tokens, the
right version, nothing that poisons it.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from engine.test_vllm_client import damaged_folders

from halteres.engine.folders import digest
from halteres.engine.process import EngineProcess, RestartPolicy
from halteres.engine.protocol import (
    Adam,
    Array,
    Called,
    Calls,
    Datum,
    ExtraLogprobs,
    Grammar,
    GrammarKind,
    LoraConfig,
    LossSpec,
    SamplingParams,
    Weights,
)
from halteres.engine.torch.engine import TorchEngine
from halteres.engine.vllm.adapters import AdapterFolders, Projections
from halteres.engine.vllm.client import Demands, VllmSamples
from halteres.engine.vllm.server import VllmCommand
from halteres.errors import HalteresError, InvalidData
from halteres.models import TINY, builtin_path
from halteres.tokenizer import load_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

PROMPT = np.array([5, 60, 70, 80, 90], np.int32).tobytes()
GREEDY = SamplingParams(max_tokens=12, temperature=0, stop_tokens=())


@dataclass(frozen=True, slots=True)
class Pair:
    """Both samplers of one model."""

    host: EngineProcess[VllmSamples]
    ours: TorchEngine
    place: Path

    @property
    def vllm(self) -> VllmSamples:
        return self.host.engine

    async def publish(self, run: str, seed: int, version: int) -> Weights:
        """Train a run for one step on tokens of its own; its weights, as they are published."""
        tokens = np.random.default_rng(seed).integers(5, 600, 24).astype(np.int32)
        inputs = {
            "target_tokens": array(np.roll(tokens, -1).astype(np.int64)),
            "weights": array(np.ones(24, np.float32)),
        }
        await self.ours.forward_backward(
            run, (Datum(tokens=tokens.tobytes(), inputs=inputs),), LossSpec(name="cross_entropy")
        )
        await self.ours.optim_step(run, Adam(learning_rate=3e-3))
        name, folder = f"{run}-{version}", self.place / f"{run}-{version}"
        await self.ours.snapshot(run, name)
        saved = await self.ours.save_snapshot(name, str(folder))
        return Weights(name=name, version=version, folder=str(folder), sha256=saved.sha256)


def array(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, data=values.tobytes())  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(vllm_command: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    place, model = tmp_path_factory.mktemp("vllm"), builtin_path(TINY)
    assert model is not None
    command = VllmCommand(
        given=vllm_command,
        demands=Demands(name=TINY, folder=model, context=512, rank=32, places=8),
        base=Projections.of(model),
        folders=AdapterFolders(place / "held"),
    )
    host = EngineProcess(command, place / "vllm.log", policy=RestartPolicy(ready_s=600))
    began = time.monotonic()
    await host.start()
    print(f"\nvLLM is ready after {time.monotonic() - began:.0f} s")  # noqa: T201 - a figure
    ours = TorchEngine(model, TINY, 1, cache_gb=0.2)
    try:
        yield Pair(host, ours, place)
    finally:
        await host.stop()
        await ours.close()


async def test_greedy_tokens_and_the_prompts_logprobs_are_the_embedded_engines(pair: Pair) -> None:
    await pair.ours.create_adapter("alike", LoraConfig(rank=16, seed=1, train_unembed=False))
    for version in (1, 2, 3):
        await pair.vllm.hold(f"snapshot-alike-{version}", await pair.publish("alike", 1, version))
    for name in (None, 1, 2, 3):
        theirs, own = None, None
        if name is not None:
            theirs, own = f"snapshot-alike-{name}", f"alike-{name}"
        extra = ExtraLogprobs(prompt_logprobs=True)
        drawn = await pair.vllm.sample(theirs, PROMPT, 1, GREEDY, extra)
        expected = await pair.ours.sample(own, PROMPT, 1, GREEDY, extra)
        assert drawn.sequences[0].tokens == expected.sequences[0].tokens
        apart = [
            float(np.nanmax(np.abs(floats(a) - floats(b))))
            for a, b in (
                (drawn.sequences[0].logprobs, expected.sequences[0].logprobs),
                (drawn.prompt_logprobs, expected.prompt_logprobs),
            )
        ]
        assert max(apart) < 1e-4


def floats(data: bytes | None) -> np.ndarray:
    assert data is not None
    return np.frombuffer(data, np.float32)


CALLS = Calls(tools=(Called(name="add", arguments={"properties": {"a": {"enum": [1, 2]}}}),))
FORMS: tuple[tuple[GrammarKind, str, str], ...] = (
    ("json_schema", '{"enum":["ab","cd"]}', '"(ab|cd)"'),
    ("regex", "[0-9]{3}x", "[0-9]{3}x"),
    ("choice", '["yes","no"]', "yes|no"),
    ("lark", 'start: "a" "b" "c"', "abc"),
    ("calls", msgspec.json.encode(CALLS).decode(), r'<tool_call>\n\{"name": "add".*</tool_call>'),
)


async def test_penalties_and_grammars_reach_it_and_hold(pair: Pair) -> None:
    """Greedy tokens under penalties are the embedded engine's, so both compute the same; answers
    have their form, and log-probabilities that are the model's own.
    """
    shy = msgspec.structs.replace(
        GREEDY,
        max_tokens=40,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    )
    drawn = await pair.vllm.sample(None, PROMPT, 1, shy)
    expected = await pair.ours.sample(None, PROMPT, 1, shy)
    assert drawn.sequences[0].tokens == expected.sequences[0].tokens
    own, theirs = expected.sequences[0].logprobs, drawn.sequences[0].logprobs
    assert np.abs(floats(own) - floats(theirs)).max() < 1e-4
    plain = await pair.vllm.sample(None, PROMPT, 1, msgspec.structs.replace(GREEDY, max_tokens=40))
    assert plain.sequences[0].tokens != drawn.sequences[0].tokens

    tokenizer = load_tokenizer((await pair.ours.info()).folder)
    for kind, text, form in FORMS:
        params = SamplingParams(
            max_tokens=200, seed=3, grammar=Grammar(kind=kind, text=text), min_p=0.01
        )
        result = await pair.vllm.sample(None, PROMPT, 3, params, ExtraLogprobs(topk_sampled=2))
        for one in result.sequences:
            said = tokenizer.decode(np.frombuffer(one.tokens, np.int32).tolist())
            assert one.stop_reason == "stop", (kind, said)
            assert re.fullmatch(form, said, re.DOTALL), (kind, said)
            scored = await pair.ours.sample(
                None,
                PROMPT + one.tokens,
                1,
                SamplingParams(max_tokens=1),
                ExtraLogprobs(prompt_logprobs=True),
            )
            own = floats(scored.prompt_logprobs)[len(PROMPT) // 4 :]
            assert np.abs(own - floats(one.logprobs)).max() < 1e-3
    with pytest.raises(InvalidData):
        bad = Grammar(kind="regex", text="(a")
        await pair.vllm.sample(None, PROMPT, 1, SamplingParams(max_tokens=3, grammar=bad))
    assert pair.host.restarts == 0


async def test_how_long_a_version_takes_to_its_first_token(pair: Pair) -> None:
    """Figures; on a quiet machine 15 ms and 100 ms are the aims."""
    await pair.ours.create_adapter("fast", LoraConfig(rank=16, seed=2, train_unembed=False))
    loaded, first = list[float](), list[float]()
    for version in range(15):
        weights = await pair.publish("fast", version, version)
        began = time.perf_counter()
        assert await pair.vllm.hold(f"snapshot-fast-{version}", weights) == version
        loaded.append(time.perf_counter() - began)
        await pair.vllm.sample(f"snapshot-fast-{version}", PROMPT, 1, SamplingParams(max_tokens=1))
        first.append(time.perf_counter() - began)
    median_load, median_first = (1000 * statistics.median(one) for one in (loaded, first))
    print(f"\nloaded after {median_load:.1f} ms, first token after {median_first:.1f} ms")  # noqa: T201
    assert len(pair.vllm.names.now().names) <= 8


async def test_many_long_prompts_with_seeds_at_once_end_nothing(pair: Pair) -> None:
    """More tokens than one step takes: none may be read in parts."""
    prompts = [
        np.random.default_rng(number).integers(5, 600, 300).astype(np.int32).tobytes()
        for number in range(48)
    ]
    params = SamplingParams(max_tokens=4, seed=1, stop_tokens=())
    results = await asyncio.gather(
        *(pair.vllm.sample(None, prompt, 2, params) for prompt in prompts)
    )
    assert [len(result.sequences) for result in results] == [2] * 48
    assert pair.host.restarts == 0


async def test_forty_versions_of_three_runs_each_answer_for_themselves(pair: Pair) -> None:
    """Eight are loaded at a time, 64 requests are under way, every second one a stream."""
    published = list[Weights]()
    for run in ("r0", "r1", "r2"):
        await pair.ours.create_adapter(run, LoraConfig(rank=8, seed=3, train_unembed=False))
    for number in range(40):
        published.append(await pair.publish(f"r{number % 3}", number, number))
        await pair.vllm.hold(f"snapshot-{number}", published[-1])
    expected = [
        (await pair.ours.sample(one.name, PROMPT, 1, GREEDY)).sequences[0] for one in published
    ]
    gate = asyncio.Semaphore(64)

    async def ask(number: int) -> None:
        version = number % 40
        async with gate:
            if number % 80 >= 40:
                pieces = [
                    piece
                    async for piece in pair.vllm.stream(f"snapshot-{version}", PROMPT, 1, GREEDY)
                ]
                versions = {piece.version for piece in pieces}
                tokens = b"".join(piece.tokens for piece in pieces)
                logprobs = b"".join(piece.logprobs for piece in pieces)
            else:
                result = await pair.vllm.sample(f"snapshot-{version}", PROMPT, 1, GREEDY)
                versions = {result.version}
                tokens, logprobs = result.sequences[0].tokens, result.sequences[0].logprobs
        assert versions == {version}
        assert tokens == expected[version].tokens
        assert np.abs(floats(logprobs) - floats(expected[version].logprobs)).max() < 1e-3

    await asyncio.gather(*map(ask, range(160)))
    assert pair.host.restarts == 0
    assert len({one.logprobs for one in expected}) == 40


async def test_what_would_poison_it_is_refused_and_others_keep_their_bits(pair: Pair) -> None:
    await pair.ours.create_adapter("tenant", LoraConfig(rank=4, seed=4, train_unembed=False))
    good = await pair.publish("tenant", 4, 1)
    await pair.vllm.hold("snapshot-tenant", good)
    params = SamplingParams(max_tokens=12, seed=9, stop_tokens=())
    before = (await pair.vllm.sample("snapshot-tenant", PROMPT, 2, params)).sequences
    assert good.folder is not None
    folders = damaged_folders(Path(good.folder))
    for name, (kind, _) in folders.items():
        source = Weights(name=name, version=1, folder=str(Path(good.folder).parent / name))
        with pytest.raises(HalteresError) as refused:
            await pair.vllm.hold(f"snapshot-{name}", source)
        assert type(refused.value) is kind
        after = await pair.vllm.sample("snapshot-tenant", PROMPT, 2, params)
        assert after.sequences == before
    assert pair.host.restarts == 0
    assert digest(Path(good.folder)) == good.sha256
