"""JSON bodies of /generate: sglang's and vLLM's, told apart by their fields.

Owns: one struct per shape, which of them a body has.
Never: samples.
Source: sglang 0.5 `GenerateReqInput`; vLLM 0.11 `entrypoints/api_server.py` and what atroposlib 0.4 sends it.
"""

from __future__ import annotations

import msgspec

from halteres.errors import InvalidData
from halteres.service.wire.inference.common import Count, Sampled, TopCount, read, several


class SglangParams(Sampled, kw_only=True):
    """sglang's sampling parameters."""

    max_new_tokens: Count | None = 128
    sampling_seed: int | None = None
    no_stop_trim: bool = False

    @property
    def keeps_stop(self) -> bool:
        """Whether the text holds what stopped it."""
        return self.no_stop_trim or self.include_stop_str_in_output

    @property
    def chosen_seed(self) -> int | None:
        """Under either name."""
        return self.sampling_seed if self.seed is None else self.seed


class Sglang(msgspec.Struct, kw_only=True):
    """POST generate, sglang's."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SglangParams = msgspec.field(default_factory=SglangParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: TopCount = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    model: str | None = None
    policy_version: int | None = None  # ours: exactly these weights of the run; None: its newest

    @property
    def many(self) -> bool:
        """Whether the answer is a list whatever its length: several prompts were sent."""
        given = self.text if self.input_ids is None else self.input_ids
        return isinstance(given, list) and bool(given) and not isinstance(given[0], int)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several.

        Raises:
            InvalidData: none, or texts and tokens at once.
        """
        given = self.text if self.input_ids is None else self.input_ids
        if given is None or (self.input_ids is not None and self.text is not None):
            raise InvalidData("The request names no prompt, or two.", next="Send input_ids, text or prompt.")
        return several(given, "input_ids" if self.text is None else "text")


class PromptParts(msgspec.Struct, kw_only=True):
    """A prompt as vLLM's object."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


class Vllm(Sampled, kw_only=True):
    """POST generate, vLLM's."""

    prompt: str | list[int] | PromptParts | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: Count | None = 16
    logprobs: TopCount | None = None
    prompt_logprobs: TopCount | None = None
    best_of: int | None = None
    stream: bool = False
    model: str | None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """A text or tokens.

        Raises:
            InvalidData: none, or several.
        """
        parts = self.prompt if isinstance(self.prompt, PromptParts) else PromptParts()
        given = (None if isinstance(self.prompt, PromptParts) else self.prompt, parts.prompt, parts.prompt_token_ids)
        found = [one for one in (*given, self.prompt_token_ids) if one is not None]
        if len(found) != 1:
            raise InvalidData("The request names no prompt, or two.", next="Send prompt, or prompt_token_ids.")
        return found[0]


NOTHING = msgspec.Raw(b"null")


class _Fields(msgspec.Struct, kw_only=True):
    prompt: msgspec.Raw = NOTHING
    prompt_token_ids: msgspec.Raw = NOTHING
    input_ids: msgspec.Raw = NOTHING
    text: msgspec.Raw = NOTHING


def read_generate(body: bytes) -> Sglang | Vllm:
    """A body in either shape: `prompt` and `prompt_token_ids` are vLLM's, `text` and `input_ids` sglang's.

    Raises:
        InvalidData: it is neither.
    """
    named = read(body, _Fields)
    of_sglang = named.input_ids != NOTHING or named.text != NOTHING
    of_vllm = named.prompt != NOTHING or named.prompt_token_ids != NOTHING
    return read(body, Vllm) if of_vllm and not of_sglang else read(body, Sglang)
