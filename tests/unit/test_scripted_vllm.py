"""benchmarks/scripted_vllm.py: our client of vLLM takes it for one, and its answers come when they
should.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from halteres.engine.protocol import ExtraLogprobs, SamplingParams
from halteres.engine.vllm.adapters import AdapterFolders, Projections
from halteres.engine.vllm.client import Demands, VllmSamples
from halteres.errors import InvalidData
from halteres.loopback import open_listener, url_of
from halteres.models import TINY, builtin_path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from scripted_vllm import (
    CONTEXT,
    LOWEST,
    VOCABULARY,
    Rates,
    ScriptedVllm,
    serve,
)

PROMPT = np.arange(LOWEST, LOWEST + 10, dtype=np.int32).tobytes()
WAIT_S = 30


@asynccontextmanager
async def sampler(place: Path, rates: Rates) -> AsyncIterator[tuple[VllmSamples, ScriptedVllm]]:
    """A scripted one, and a client that has looked at it."""
    folder = builtin_path(TINY)
    assert folder is not None
    with open_listener(0) as bound:
        (server,), (scripted,) = await serve([bound], rates)
        client = VllmSamples(
            Demands(name=TINY, folder=folder),
            Projections.of(folder),
            AdapterFolders(place),
            address=url_of(bound, "http"),
        )
        try:
            async with asyncio.timeout(WAIT_S):
                await client.open()
                yield client, scripted
        finally:
            await client.disconnect()
            server.close()


async def test_our_client_finds_all_that_it_asks_of_a_vllm(tmp_path: Path) -> None:
    async with sampler(tmp_path, Rates(0.0)) as (client, scripted):
        info = await client.info()
        assert (info.vocab_size, info.max_context_length) == (VOCABULARY, CONTEXT)
        assert info.logprobs == ("raw",)
        assert scripted.adapters == set()  # the probe was unloaded


async def test_answers_are_as_long_as_was_asked_for(tmp_path: Path) -> None:
    async with sampler(tmp_path, Rates(0.0)) as (client, _):
        result = await client.sample(None, PROMPT, 3, SamplingParams(max_tokens=20))
        assert len(result.sequences) == 3
        for one in result.sequences:
            tokens = np.frombuffer(one.tokens, np.int32)
            logprobs = np.frombuffer(one.logprobs, np.float32)
            assert len(tokens) == len(logprobs) == 20
            assert tokens.min() >= LOWEST and tokens.max() < VOCABULARY
            assert logprobs.max() < 0
        likely = ExtraLogprobs(topk_sampled=4)
        result = await client.sample(None, PROMPT, 1, SamplingParams(max_tokens=5), likely)
        top = result.sequences[0].top
        assert top is not None and (top.length, top.k) == (5, 4)
        assert (np.frombuffer(top.logprobs, np.float32) > -99999).all()


async def test_an_answer_comes_after_the_time_that_its_tokens_take(tmp_path: Path) -> None:
    rates = Rates(token_s=0.01, prompt_token_s=0.005)
    assert rates.seconds(10, 20) == pytest.approx(0.25)
    async with sampler(tmp_path, rates) as (client, _):
        began = asyncio.get_running_loop().time()
        params = SamplingParams(max_tokens=20)
        await asyncio.gather(*(client.sample(None, PROMPT, 1, params) for _ in range(8)))
        # all eight at a time
        assert 0.25 <= asyncio.get_running_loop().time() - began < 8 * 0.25


async def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    async with sampler(tmp_path, Rates(0.0)) as (client, _):
        with pytest.raises(InvalidData):
            beyond = np.array([VOCABULARY], np.int32).tobytes()
            await client.sample(None, beyond, 1, SamplingParams(max_tokens=1))
