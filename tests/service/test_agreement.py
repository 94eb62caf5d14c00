"""How far a sampler that is not exact is from the engine that trains: one in 64 of its answers is
computed again there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from deadlines import until

from halteres.engine.protocol import SampleResult, SamplingParams
from halteres.errors import ServerError
from halteres.service.sampling.agreement import RECOMPUTED

from .live_service import LiveService, closing, serving, trainer
from .test_durability import tokens, version

WAIT_S = 30
APART = 0.25  # nats by which the sampler differs
PROMPT = np.array([5, 6, 7], np.int32).tobytes()


@asynccontextmanager
async def inexact(place: Path) -> AsyncIterator[LiveService]:
    """A service whose one sampler says that it is not exact, as a vLLM does."""
    async with serving(place, samplers=1) as scene:
        (sampler,) = scene.samplers
        assert sampler.info is not None
        sampler.info = msgspec.structs.replace(sampler.info, exact=False)
        yield scene


async def answered(scene: LiveService, times: int, apart: float = 0.0, **params: object) -> None:
    """The sampler has answered, with log-probabilities that far from its own."""
    agreement, (sampler,) = scene.service.samples.agreement, scene.samplers
    how = SamplingParams(max_tokens=4, stop_tokens=(), **params)  # type: ignore[arg-type]
    for _ in range(times):
        result = await sampler.engine.sample(None, PROMPT, 1, how)
        (drawn,) = result.sequences
        logprobs = (np.frombuffer(drawn.logprobs, np.float32) + np.float32(apart)).tobytes()
        told = SampleResult(
            sequences=(msgspec.structs.replace(drawn, logprobs=logprobs),), version=0
        )
        agreement.note(sampler.engine, None, PROMPT, how, told)


async def settled(scene: LiveService) -> None:
    await until(lambda: not scene.service.samples.agreement._is_busy, within_s=WAIT_S)


async def test_one_in_64_answers_is_computed_again_by_the_trainer(tmp_path: Path) -> None:
    async with inexact(tmp_path) as scene, asyncio.timeout(WAIT_S):
        (sampler,) = scene.samplers
        for number in (1, 2):
            await answered(scene, RECOMPUTED, APART)
            await settled(scene)
            assert scene.engine.calls["sample"] == number
        facts = scene.service.samples.agreement.of(sampler)
        assert facts is not None
        assert (facts["answers"], facts["tokens"]) == (2, 8)
        assert facts["half_mean_square"] == pytest.approx(APART**2 / 2, rel=1e-4)
        assert facts["largest"] == pytest.approx(APART, rel=1e-4)


async def test_the_figures_of_each_sampler_are_in_the_services_answer(tmp_path: Path) -> None:
    """Of a version too: the trainer has the weights, or is given them again."""
    async with inexact(tmp_path) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        await version(training)
        sampling = await training.save_weights_and_get_sampling_client()
        await tokens(sampling)
        await settled(scene)
        _, told = await scene.get("/halteres/v1/info")
        assert told["samples_exactly"] is False
        facts = told["samplers"][0]["agreement"]
        assert facts["answers"] == 1
        assert facts["half_mean_square"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["exact", "tempered"])
async def test_an_answer_that_says_nothing_of_agreement_is_not_computed_again(
    tmp_path: Path, kind: str
) -> None:
    async with inexact(tmp_path) as scene, asyncio.timeout(WAIT_S):
        (sampler,) = scene.samplers
        params: dict[str, object] = {}
        if kind == "exact":
            assert sampler.info is not None
            sampler.info = msgspec.structs.replace(sampler.info, exact=True)
        else:
            params = {"logprobs": "tempered", "temperature": 0.5}
        await answered(scene, 3, **params)
        await settled(scene)
        assert scene.engine.calls["sample"] == 0
        assert scene.service.samples.agreement.of(sampler) is None


async def test_a_trainer_that_fails_at_it_costs_the_figure_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with inexact(tmp_path) as scene, asyncio.timeout(WAIT_S):
        (sampler,) = scene.samplers
        scene.engine.fail_next("sample", ServerError("The device is lost."))
        await answered(scene, 1)
        await settled(scene)
        assert "could not be computed again" in caplog.text
        await answered(scene, RECOMPUTED)
        await settled(scene)
        facts = scene.service.samples.agreement.of(sampler)
        assert facts is not None
        assert facts["answers"] == 1
