"""What bodies for inference have in common: sampling fields, and fields that nobody here reads.

A field that would change an answer is refused by name, never passed over; one that is harmless (`user`, `metadata`,
`store`, ...) is ignored.

Source: OpenAI's and Anthropic's API references, vLLM 0.11 `SamplingParams` and its protocol, sglang 0.5
`GenerateReqInput` and `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from halteres.errors import InvalidData
from halteres.service.wire import bodies

T = TypeVar("T")

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

TopCount = Annotated[int, msgspec.Meta(ge=0, le=256)]
"""Of the most likely tokens at a position; 256 is the engine's limit."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every such request says of the weights and of sampling. Defaults are OpenAI's and vLLM's."""

    model: str | None = None
    stream: bool = False
    n: int = 1
    max_tokens: TokenCount | None = None  # None: up to the context limit; 0: score the prompt, write nothing
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: TokenId = -1
    stop: str | TokenId | list[str | TokenId] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None: drawn; prompt i uses seed + i

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return tuple(stop for stop in self._stops if isinstance(stop, str) and stop)

    @property
    def named_stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end the answer beside the model's own: those of both fields."""
        return (*(stop for stop in self._stops if isinstance(stop, int)), *(self.stop_token_ids or ()))

    @property
    def _stops(self) -> Sequence[str | int]:
        return self.stop if isinstance(self.stop, list) else [] if self.stop is None else [self.stop]


def several(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """The prompts of a field that holds a text, a list of texts, a list of token ids or a list of such lists."""
    if isinstance(given, str):
        return [given]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [tokens]
    if tokens:
        raise InvalidData(f"`{field}` mixes token ids with prompts.", next="Send one list of ids, or a list of lists.")
    return [one for one in given if not isinstance(one, int)]


Refused = Mapping[str, tuple[str, str, Any]]
"""By field: why, what to do instead, and the value that changes nothing; null, false, 0 and what is empty never do."""


def _refused(why: str, next: str, names: str = "", **neutral: Any) -> Refused:
    return {name: (why, next, value) for name, value in (dict.fromkeys(names.split()) | neutral).items()}


_MEDIA = ("The model reads and writes text only.", "Send text.")
_SERVER = ("There is nothing behind this server but the model.", "Give the model what it needs in the prompt.")
_GRAMMAR = ("Answers are not constrained to a grammar, a schema or a choice.", "Ask for the format in the prompt.")
_PROMPT = ("The prompt is taken as it comes.", "Send it as it should be read.")
_REASONING = ("No budget is kept for reasoning.", "Use chat_template_kwargs, where the model's template reads it.")

_SAMPLING: Refused = {
    **_refused(
        "Tokens are drawn from the model's own distribution: there are no penalties and no biases.",
        "Leave it out.",
        "presence_penalty frequency_penalty logit_bias bad_words allowed_token_ids min_tokens min_new_tokens",
        repetition_penalty=1,
    ),
    **_refused(
        "Only temperature, top_k and top_p shape the distribution.",
        "Use top_p or top_k.",
        "min_p xtc_probability xtc_threshold dry_multiplier",
        typical_p=1,
        tfs_z=1,
    ),
    **_refused(
        *_GRAMMAR,
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern structured_outputs"
        " structural_tag json_schema regex ebnf stop_regex",
        response_format={"type": "text"},
    ),
    **_refused(
        "Sequences are sampled independently; none is searched for or ranked.",
        "Use n.",
        "use_beam_search early_stopping",
        length_penalty=1,
    ),
    **_refused(
        "Clients' code and hooks are not run here.",
        "Leave it out.",
        "logits_processors custom_logit_processor custom_params vllm_xargs kv_transfer_params",
    ),
    **_refused(
        "The engine serves dense models: no routing to experts exists or is recorded.",
        "Leave it out.",
        "return_routed_experts routed_experts routing_matrices return_expert_ids",
    ),
    **_refused(
        "What happens inside the model is not told.",
        "Ask for log-probabilities.",
        "return_hidden_states return_entropy token_ids_logprob logprob_token_ids",
    ),
    **_refused(*_PROMPT, "truncate_prompt_tokens prompt_embeds input_embeds"),
    **_refused(*_MEDIA, "image_data video_data audio_data multi_modal_data mm_processor_kwargs"),
    **_refused("Weights are named by `model`.", "Put the tinker:// path into `model`.", "lora_path lora_request"),
    **_refused(*_REASONING, "thinking_token_budget"),
}

COMPLETIONS: Refused = {**_SAMPLING, **_refused(*_PROMPT, "suffix")}

CHAT: Refused = {
    **_SAMPLING,
    **_refused(*_MEDIA, "audio", modalities=["text"]),
    **_refused("This is the older form of tools.", "Send `tools` and `tool_choice`.", "functions function_call"),
    **_refused(
        "The model's own chat template is used.",
        "Render the chat yourself and send a completion.",
        "chat_template documents echo",
    ),
    **_refused(*_SERVER, "web_search_options", verbosity="medium"),
}

GENERATE: Refused = {**_SAMPLING, **_refused(*_SERVER, "session_params", modalities=["text"])}

MESSAGES: Refused = {
    **_refused(*_REASONING, thinking={"type": "disabled"}),
    **_refused(*_GRAMMAR, "output_format output_config"),
    **_refused(*_SERVER, "mcp_servers container context_management"),
    **_SAMPLING,
}


def read(body: bytes, kind: type[T], refused: Refused | None = None) -> T:
    """What a body asks for.

    Args:
        refused: fields that may not be at its top, nor among its `sampling_params`.

    Raises:
        InvalidData: it does not fit, or asks for what nobody does here.
    """
    found = bodies.read(body, kind, deep=False)
    if refused is None:
        return found
    decode, raw = msgspec.json.decode, dict[str, msgspec.Raw]
    try:
        fields = decode(body, type=raw)
        params = decode(fields.get("sampling_params", b"null"), type=raw | None) or {}
        sent = [(name, decode(part[name])) for part in (fields, params) for name in refused if name in part]
    except msgspec.ValidationError as error:
        raise InvalidData("The body does not fit.", f"{error}.") from error
    for name, value in sent:
        why, next, neutral = refused[name]
        if value and value != neutral:
            raise InvalidData(f"`{name}` is not supported.", why, next, param=name)
    return found
