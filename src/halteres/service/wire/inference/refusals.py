"""Fields that would change an answer and that nobody here reads: refused by name, never passed over.

Owns: which fields these are on which route, the values at which they change nothing, and the sentence for each.
Never: refuses what is harmless (`user`, `metadata`, `store`, ...), or what a route's own struct reads.
Source: OpenAI's and Anthropic's API references, vLLM 0.11 `SamplingParams` and its protocol, sglang 0.5
`GenerateReqInput` and `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from halteres.errors import InvalidData
from halteres.service.wire.inference.common import read

T = TypeVar("T")


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
        """Refuse a body that asks for what nobody does here; it has been read by its own struct before.

        Raises:
            InvalidData: names the first such field; or `sampling_params` is no object.
        """
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
