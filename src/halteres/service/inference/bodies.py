"""What bodies for inference have in common: sampling fields, and fields that nobody here reads.

A field that would change an answer is refused by name, never passed over; one that is harmless (`user`, `metadata`,
`store`, ...) is ignored.

Source: OpenAI's and Anthropic's API references, vLLM 0.11 `SamplingParams` and its protocol, sglang 0.5
`GenerateReqInput` and `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from halteres.engine.protocol import SamplingParams
from halteres.errors import InvalidData

T = TypeVar("T")

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

TopCount = Annotated[int, msgspec.Meta(ge=0, le=256)]
"""Of the most likely tokens at a position; 256 is the engine's limit."""


class Sampled(msgspec.Struct, kw_only=True):
    """What every such request says about sampling. Defaults are OpenAI's and vLLM's."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: TokenId = -1
    stop: str | TokenId | list[str | TokenId] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None

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
        stop = self.stop
        return stop if isinstance(stop, list) else [] if stop is None else [stop]

    @property
    def keeps_stop(self) -> bool:
        """Whether the text holds what stopped it."""
        return self.include_stop_str_in_output

    def params(self, max_tokens: int | None, end_tokens: Sequence[int], seed: int) -> SamplingParams:
        """For the engine; the model's end tokens stop it beside those that were named."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            stop_tokens=(*self.named_stop_tokens, *(() if self.ignore_eos else end_tokens)),
            stop_strings=self.stop_strings,
        )


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


def read(body: bytes, kind: type[T]) -> T:
    """Parse a body; a null at its top, or among its sampling parameters, means that the field is absent."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            return msgspec.convert(_without_nulls(msgspec.json.decode(body)), type=kind)
    except msgspec.ValidationError as error:
        raise InvalidData("The body does not fit.", f"{error}.") from error
    except msgspec.DecodeError as error:
        raise InvalidData("The body is not JSON.", f"{error}.") from error
    except RecursionError as error:
        raise InvalidData("The body is nested too deeply to be read.") from error


def _without_nulls(body: Any) -> Any:
    """Deeper nulls stay: within a message or a tool's schema they are the client's own words."""
    if not isinstance(body, dict):
        return body
    params = body.get("sampling_params")
    kept = {name: value for name, value in body.items() if value is not None}
    return {**kept, "sampling_params": _without_nulls(params)} if isinstance(params, dict) else kept


@dataclass(frozen=True, slots=True)
class Reason:
    """Why fields are refused, and what to do instead."""

    why: str
    next: str = "Leave it out."


Rules = dict[str, tuple[Reason, tuple[Any, ...]]]
"""By field: the reason, and values that change nothing (null, false, 0 and what is empty never do)."""


def _rules(reason: Reason, *names: str, **neutral: Any) -> Rules:
    rules: Rules = dict.fromkeys(names, (reason, ()))
    return rules | {name: (reason, (value,)) for name, value in neutral.items()}


_PENALTIES = Reason("Tokens are drawn from the model's own distribution: there are no penalties and no biases.")
_FILTERS = Reason("Only temperature, top_k and top_p shape the distribution.", "Use top_p or top_k.")
_GRAMMAR = Reason(
    "Answers are not constrained to a grammar, a schema or a choice.", "Ask for the format in the prompt."
)
_MEDIA = Reason("The model reads and writes text only.", "Send text.")
_EXPERTS = Reason("The engine serves dense models: no routing to experts exists or is recorded.")
_INSIDE = Reason("What happens inside the model is not told.", "Ask for log-probabilities.")
_SEARCH = Reason("Sequences are sampled independently; none is searched for or ranked.", "Use n.")
_PROMPT = Reason("The prompt is taken as it comes.", "Send it as it should be read.")
_WEIGHTS = Reason("Weights are named by `model`.", "Put the tinker:// path into `model`.")
_TEMPLATE = Reason("The model's own chat template is used.", "Render the chat yourself and send a completion.")
_TOOLS = Reason("This is the older form of tools.", "Send `tools` and `tool_choice`.")
_CODE = Reason("Clients' code and hooks are not run here.")
_SERVER = Reason("There is nothing behind this server but the model.", "Give the model what it needs in the prompt.")
_REASONING = Reason(
    "No budget is kept for reasoning.", "Use chat_template_kwargs, where the model's template reads it."
)

_SAMPLING: Rules = (
    _rules(_PENALTIES, "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids")
    | _rules(_PENALTIES, "min_tokens", "min_new_tokens", repetition_penalty=1)
    | _rules(_FILTERS, "min_p", "xtc_probability", "xtc_threshold", "dry_multiplier", typical_p=1, tfs_z=1)
    | _rules(_GRAMMAR, "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern")
    | _rules(_GRAMMAR, "structured_outputs", "structural_tag", "json_schema", "regex", "ebnf", "stop_regex")
    | _rules(_GRAMMAR, response_format={"type": "text"})
    | _rules(_SEARCH, "use_beam_search", "early_stopping", length_penalty=1)
    | _rules(_CODE, "logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "kv_transfer_params")
    | _rules(_EXPERTS, "return_routed_experts", "routed_experts", "routing_matrices", "return_expert_ids")
    | _rules(_INSIDE, "return_hidden_states", "return_entropy", "token_ids_logprob", "logprob_token_ids")
    | _rules(_PROMPT, "truncate_prompt_tokens", "prompt_embeds", "input_embeds")
    | _rules(_MEDIA, "image_data", "video_data", "audio_data", "multi_modal_data", "mm_processor_kwargs")
    | _rules(_WEIGHTS, "lora_path", "lora_request")
    | _rules(_REASONING, "thinking_token_budget")
)

COMPLETIONS: Rules = _SAMPLING | _rules(_PROMPT, "suffix")

CHAT: Rules = (
    _SAMPLING
    | _rules(_MEDIA, "audio", modalities=["text"])
    | _rules(_TOOLS, "functions", "function_call")
    | _rules(_TEMPLATE, "chat_template", "documents", "echo")
    | _rules(_SERVER, "web_search_options", verbosity="medium")
)

SGLANG: Rules = _SAMPLING | _rules(_SERVER, "session_params", modalities=["text"])

MESSAGES: Rules = (
    _rules(_REASONING, thinking={"type": "disabled"})
    | _rules(_GRAMMAR, "output_format", "output_config")
    | _rules(_SERVER, "mcp_servers", "container", "context_management")
    | _SAMPLING
)


class Refusals:
    """The fields that one route refuses, at the top of its body and among its `sampling_params`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        names = [(name, Any, None) for name in rules]
        inner = msgspec.defstruct("Inner", names)
        outer = msgspec.defstruct("Outer", [*names, ("sampling_params", inner | None, None)])
        self._decoder = msgspec.json.Decoder[Any](outer)

    def read(self, body: bytes, kind: type[T]) -> T:
        """What a body asks for.

        Raises:
            InvalidData: it does not fit, or asks for what nobody does here.
        """
        asked = read(body, kind)
        self.check(body)
        return asked

    def check(self, body: bytes) -> None:
        """Refuse a body that asks for what nobody does here; it has been read by its own struct before."""
        try:
            found = self._decoder.decode(body)
        except msgspec.ValidationError:
            raise InvalidData("`sampling_params` is no object.", next="Leave it out, or send an object.") from None
        for part in (found, found.sampling_params):
            if part is not None:
                self._check(msgspec.structs.asdict(part))

    def _check(self, fields: Mapping[str, Any]) -> None:
        for name, (reason, neutral) in self._rules.items():
            value = fields[name]
            if value and value not in neutral:
                raise InvalidData(f"`{name}` is not supported.", reason.why, reason.next, param=name)
