"""One request for inference, whatever its shape: weights, prompts, how to sample, what to tell.

Owns: prompts as tokens, what a request wants of the engine beside tokens.
Never: knows HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from halteres.engine.protocol import Wanted
from halteres.errors import InvalidData
from halteres.service.inference.addresses import Weights
from halteres.service.tenancy.tenants import Tenant
from halteres.service.wire.inference.common import Sampled
from halteres.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be continued. `text` is None where tokens were sent."""

    tokens: list[int]
    text: str | None = None

    @staticmethod
    def of(given: str | list[int], tokenizer: Tokenizer, longest: int, special: bool | None = None) -> Prompt:
        """A text or tokens.

        Args:
            given: as it was sent.
            tokenizer: the model's.
            longest: characters that a text may have.
            special: whether a text gets the tokens that begin and end one; None: unless it begins so already.

        Raises:
            InvalidData: the text is longer than any model reads.
        """
        if not isinstance(given, str):
            return Prompt(tokens=given)
        if len(given) > longest:
            raise InvalidData(f"A prompt has {len(given)} characters.", f"{longest} are the limit.", "Shorten it.")
        begins = tokenizer.specials.get("bos_token")
        added = not (begins and given.startswith(begins)) if special is None else special
        return Prompt(tokens=tokenizer.encode(given, add_special_tokens=added), text=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a request brings."""

    run: str | None  # of the URL
    tenant: Tenant
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for inference."""

    call: Call
    weights: Weights
    prompts: tuple[Prompt, ...]
    sampled: Sampled
    max_tokens: int | None  # None: up to the context limit; 0: score the prompt, write nothing
    seed: int | None  # None: drawn; prompt i uses seed + i
    top: int = 0  # most likely tokens at each sampled position
    prompt_top: int | None = None  # ... and at each position of the prompt; None: nothing is told of the prompt
    prompt_start: int = 0  # the first position of the prompt that is told of

    @property
    def subject(self) -> str:
        """Whom the journal's row concerns: the run, or the name of the weights."""
        return self.call.run or self.weights.name

    @property
    def wanted(self) -> Wanted:
        """For the engine."""
        if self.prompt_top is None:
            return Wanted(topk_sampled=self.top)
        return Wanted(topk_sampled=self.top, prompt_logprobs=True, topk_prompt=self.prompt_top)

    @property
    def scores(self) -> int:
        """Log-probabilities of prompts in the answer, where those of a prompt may stand beside each sequence."""
        if self.prompt_top is None:
            return 0
        positions = sum(max(0, len(prompt.tokens) - self.prompt_start) for prompt in self.prompts)
        return self.sampled.n * positions * (1 + self.prompt_top)

    @property
    def scores_only(self) -> bool:
        """Whether the prompt's log-probabilities are all that is wanted."""
        return self.max_tokens == 0 and self.prompt_top is not None
