"""Sampling requests, executed.

Owns: the translation of sampling parameters, seeds drawn where the client sent none, the bound on requests under way.
Never: waits for another request: every one goes to the engine at once, which batches those that wait together.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence

from halteres.engine.protocol import Engine, SampleResult, SamplingParams
from halteres.errors import HalteresError, InvalidData, NotReady, UserError
from halteres.service.host import Host, survived
from halteres.service.lanes import outcome_of
from halteres.service.promises import LOST_SAMPLE, Outcome, Promise, Promises, binary_result
from halteres.service.samplers import Sampler, refuse_lost
from halteres.service.snapshots import Snapshot, Snapshots
from halteres.service.wire.bodies import Prompt, Sample, Sampling
from halteres.service.wire.codec import write_sample

MAX_UNDER_WAY = 2048
"""Sampling requests at a time; beyond it clients are asked to hold back (429)."""

MAX_SAMPLES = 1024
"""Sequences of one request."""


class Overloaded(HalteresError):
    """Too many sampling requests at once."""

    code, status = "overloaded", 429


class Samples:
    """Sampling from snapshots."""

    def __init__(
        self, host: Host, promises: Promises, snapshots: Snapshots, *, max_under_way: int = MAX_UNDER_WAY
    ) -> None:
        self._host, self._promises, self._snapshots = host, promises, snapshots
        self._max_under_way, self._under_way = max_under_way, 0

    def refuse_if_full(self) -> None:
        """Raise Overloaded rather than take more work than can be held."""
        if self._under_way >= self._max_under_way:
            raise Overloaded(
                f"{self._under_way} sampling requests are under way.",
                f"{self._max_under_way} is the limit.",
                "Wait a second and send it again.",
            )

    async def draw(
        self,
        snapshot: Snapshot | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        prompt_logprobs: bool = False,
    ) -> SampleResult:
        """Sample from a snapshot, or from the base model (None). The seed is given: another engine draws the same."""
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidData(f"num_samples is {num_samples}.", f"It must be 1 to {MAX_SAMPLES}.")

        async def call(engine: Engine) -> SampleResult:
            async with self._snapshots.resident(snapshot, engine):
                name = None if snapshot is None else snapshot.name
                return await engine.sample(name, prompt, num_samples, params, prompt_logprobs)

        self._under_way += 1
        try:
            return await survived(self._host, call)
        finally:
            self._under_way -= 1

    async def keep(self, promise: Promise, sampler: Sampler, asked: Sample, seed: int) -> None:
        """Execute a client's request and settle its promise."""
        self._promises.settle(promise, await outcome_of(promise, lambda: self._sample(sampler, asked, seed)))

    async def _sample(self, sampler: Sampler, asked: Sample, seed: int) -> Outcome:
        refuse_lost(sampler)
        _refuse_unbuilt(asked)
        prompt = prompt_of(asked.prompt)
        try:
            params = params_of(asked.sampling_params, seed)
            sampled = await self.draw(sampler.snapshot, prompt, asked.num_samples, params, asked.prompt_logprobs)
        except NotReady:
            # Another engine can do the same, and the client submits the sample again by itself: for ever, so it must
            # hear when the engine was given up. A service that stops may have a successor.
            if self._host.state == "failed" or (sampler.snapshot is not None and sampler.snapshot.folder is None):
                raise
            return LOST_SAMPLE
        return binary_result(write_sample(sampled, last_n=asked.prompt_logprobs_last_n))


def drawn_seed() -> int:
    """A seed for a request without one."""
    return secrets.randbits(32)


def checked_seed(seed: int) -> int:
    """The seed.

    Raises:
        InvalidData: it does not fit 64 bits.
    """
    if not -(2**63) <= seed < 2**63 - MAX_SAMPLES:
        raise InvalidData(f"The seed {seed} is out of range.", "It must fit 64 bits.")
    return seed


def params_of(asked: Sampling, seed: int) -> SamplingParams:
    """The engine's sampling parameters.

    `stop` as text stops at text and at the model's end token; as token ids it replaces the end token; an empty list
    disables every stop.
    """
    stop = [asked.stop] if isinstance(asked.stop, str | int) else asked.stop
    strings = tuple(one for one in stop or () if isinstance(one, str))
    tokens = tuple(one for one in stop or () if isinstance(one, int))
    if any(not text for text in strings):
        raise InvalidData("A stop string is empty.", next="Leave it out, or send stop=[] to disable every stop.")
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=checked_seed(seed),
        stop_tokens=None if stop is None or (strings and not tokens) else tokens,
        stop_strings=strings,
    )


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as int32.

    Raises:
        InvalidData: an id that int32 cannot hold.
    """
    try:
        return array("i", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidData("The prompt holds something that is no token id.", f"{error}.") from error


def prompt_of(prompt: Prompt) -> bytes:
    """A prompt's tokens as int32."""
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise InvalidData(f"The prompt holds a chunk of type '{chunk.type}'.", "The model reads text tokens only.")
    return b"".join(packed(chunk.tokens) for chunk in prompt.chunks)


def _refuse_unbuilt(asked: Sample) -> None:
    last_n = asked.prompt_logprobs_last_n
    if last_n is not None and not (asked.prompt_logprobs and last_n >= 1):
        raise InvalidData("prompt_logprobs_last_n needs prompt_logprobs and a number of at least 1.")
    unbuilt = {
        "topk_prompt_logprobs": asked.topk_prompt_logprobs,
        "topk_sample_logprobs": asked.topk_sample_logprobs,
        "target_prompt_logprobs": asked.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": asked.prompt_alt_tokens_k,
    }
    for name, wanted in unbuilt.items():
        if wanted:
            raise UserError(f"{name} comes later.", next="Use include_prompt_logprobs or compute_logprobs.")
