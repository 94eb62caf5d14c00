"""Turns: prompts in, actions of the policy out, sampled with retries and within the limits of
tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from halteres.clients.inference import Completion, InferenceClient, Sampling, ServerType
from halteres.clients.retries import Retries
from halteres.errors import EnvironmentFailed, InvalidData, NotReady, SamplerFailed, ServerError
from halteres.rollouts.rng import next_sampling_seed, pinned_version
from halteres.rollouts.sampling_clock import sampling
from halteres.tokenizer import Message, Tokenizer
from halteres.types import PolicyVersion, Turn

UNTAGGED = PolicyVersion(-1)
"""The version of a turn whose server does not tell it."""


class ContextOverflow(EnvironmentFailed):
    """The prompt leaves no room for an answer."""

    code = "context_overflow"


class Sampler:
    """Samples from one inference server.

    Args:
        defaults: sampling parameters of a call that names none of its own.
        max_sequence: tokens; prompt and action together stay below it; 0 or less: no limit.
        server_type: "openai" has no tokens: its turns cannot be trained on, only scored.
    """

    def __init__(
        self,
        client: InferenceClient,
        tokenizer: Tokenizer,
        defaults: Sampling,
        *,
        max_sequence: int,
        server_type: ServerType = "sglang",
        retries: Retries | None = None,
    ) -> None:
        self.client, self.tokenizer, self.defaults = client, tokenizer, defaults
        self.max_sequence, self.server_type, self.retries = (
            max_sequence,
            server_type,
            retries or Retries(),
        )
        # requests that the server failed, whether or not repeating them helped
        self.num_failed_calls = 0

    async def chat(
        self,
        messages: Sequence[Message],
        n: int = 1,
        *,
        temperature: float | None = None,
        prompt: Sequence[int] | None = None,
    ) -> tuple[Turn, ...]:
        """Sample `n` answers to a chat, in one request. Raises as `sample` does.

        Args:
            prompt: the chat's tokens, where they are known (`rollouts.chat`).
        """
        prompt = self.tokenizer.apply_chat_template(messages) if prompt is None else prompt
        if self.server_type == "sglang":
            return await self.sample(prompt, n, temperature=temperature)
        return await self._turns(prompt, partial(self.client.chat, messages), n, temperature)

    async def sample(
        self,
        prompt: Sequence[int],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> tuple[Turn, ...]:
        """Sample `n` actions for one prompt of tokens, in one request.

        The seed is the running rollout's next one, so that a repeated run asks for the same
        samples.

        Raises:
            ContextOverflow: the prompt leaves no room for an answer.
            SamplerFailed: the server refused, broke, or was not ready within its deadline.
        """
        if self.server_type != "sglang":
            raise SamplerFailed(
                "This inference server cannot continue tokens.",
                f"Its server_type is '{self.server_type}'.",
                "Use server_type sglang, or ask with messages.",
            )
        return await self._turns(
            prompt, partial(self.client.generate, prompt), n, temperature, max_new_tokens
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    async def _turns(
        self,
        prompt: Sequence[int],
        ask: Callable[[Sampling, int], Awaitable[tuple[Completion, ...]]],
        n: int,
        temperature: float | None,
        max_new_tokens: int | None = None,
    ) -> tuple[Turn, ...]:
        room = self.defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
        if self.max_sequence > 0:
            room = min(room, self.max_sequence - 1 - len(prompt))
        if room < 1:
            raise ContextOverflow(
                f"A prompt of {len(prompt)} tokens leaves no room for an answer.",
                f"max_token_length is {self.max_sequence}.",
                "Raise max_token_length, or shorten the prompts.",
                prompt_tokens=len(prompt),
            )
        request = replace(
            self.defaults,
            max_new_tokens=room,
            temperature=self.defaults.temperature if temperature is None else temperature,
            seed=next_sampling_seed(),
            policy_version=pinned_version(),
        )

        async def counted() -> tuple[Completion, ...]:
            try:
                return await ask(request, n)
            except ServerError:
                self.num_failed_calls += 1
                raise

        try:
            with sampling():
                completions = await self.retries.call(counted, on=(ServerError,))
        except (InvalidData, NotReady, ServerError) as error:
            raise SamplerFailed(error.what, error.why, error.next) from error
        prompt, turns = tuple(prompt), list[Turn]()
        for completion in completions:
            tokens, logprobs = len(completion.tokens), len(completion.logprobs)
            if self.server_type == "sglang" and tokens != logprobs:
                raise SamplerFailed(
                    f"A completion has {tokens} tokens and {logprobs} log-probabilities."
                )
            first, last = completion.versions or (UNTAGGED, UNTAGGED)
            turn = Turn(
                prompt=prompt,
                action=completion.tokens or tuple(self.tokenizer.encode(completion.text)),
                logprobs=completion.logprobs,
                text=completion.text,
                version_min=PolicyVersion(first),
                version_max=PolicyVersion(last),
                stop_reason=completion.finish,
            )
            turns.append(turn)
        return tuple(turns)
