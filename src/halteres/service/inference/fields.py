"""Fields of inference requests: each one is read, refused with a reason, or known to change
nothing.

    read        a field of the route's own struct
    refused     it would change the answer, and nothing here does that: 400 with its name; null,
                false, 0 and the field's own neutral values ask for nothing
    harmless    no answer depends on it: passed over, by the table below, with the source that says
                what it is
    unknown     400 with its name and the one that was most likely meant

The Tinker API passes over what it does not know: its newer clients send more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from halteres.errors import InvalidData, nearest, shortened
from halteres.service.wire import bodies

T = TypeVar("T")


class Refusal(NamedTuple):
    """Why a field is refused."""

    why: str
    next: str  # what to do instead
    # a value that changes nothing, as null, false and 0 do; what is empty does so for the fields of
    # `NOTHING_IF_EMPTY` alone
    neutral: Any


NOTHING_IF_EMPTY = frozenset(
    (
        # lists and objects of additions: without an entry nothing is added
        *("logit_bias", "bad_words", "logits_processors", "custom_params", "vllm_xargs"),
        *("extra_args", "token_ids_logprob", "logprob_token_ids", "functions", "documents"),
        *("image_data", "video_data", "audio_data", "multi_modal_data", "mm_processor_kwargs"),
        *("media_io_kwargs", "mcp_servers", "suffix", "stop_regex", "kv_transfer_params"),
        *("ec_transfer_params", "sampling_params"),
    )
)
"""Fields of which an empty text, list or object asks for nothing: what they list is added to an
answer. Of all others an empty value is one: `web_search_options: {}` asks for a search,
`allowed_token_ids: []` allows no token. Source: OpenAI's API reference; vLLM 0.11 `SamplingParams`
and `StructuredOutputsParams`, which ask whether a field is None.
"""


def _refused(why: str, next: str, names: str = "", **neutral: Any) -> dict[str, Refusal]:
    return {
        name: Refusal(why, next, value)
        for name, value in (dict.fromkeys(names.split()) | neutral).items()
    }


_PENALTIES = (
    "There are repetition_penalty, presence_penalty and frequency_penalty, no others, and no "
    "biases.",
    "Leave it out.",
)
_FILTERS = (
    "Only temperature, min_p, top_k and top_p shape the distribution.",
    "Use top_p, top_k or min_p.",
)
_GRAMMAR = (
    "An answer is held to a JSON schema, a regular expression, a choice or a Lark grammar.",
    "Send `response_format` or `structured_outputs`.",
)
_EBNF = (
    "Grammars are read in llguidance's form of Lark.",
    "Send it as Lark: structured_outputs.grammar.",
)
_SEARCH = ("Sequences are sampled independently; none is searched for or ranked.", "Use n.")
_CODE = ("Clients' code and hooks are not run here.", "Leave it out.")
_EXPERTS = (
    "The engine serves dense models: no routing to experts exists or is recorded.",
    "Leave it out.",
)
_INSIDE = ("Hidden states and entropies are not returned.", "Ask for log-probabilities.")
_PROMPT = ("The prompt is taken as it comes.", "Send it as it should be read.")
_MEDIA = ("The model reads and writes text only.", "Send text.")
_WEIGHTS = ("Weights are named by `model`.", "Put the tinker:// path into `model`.")
_REASONING = (
    "No budget is kept for reasoning.",
    "Use chat_template_kwargs, where the model's template reads it.",
)
_TOOLS = ("This is the older form of tools.", "Send `tools` and `tool_choice`.")
_TEMPLATE = (
    "The model's own chat template is used.",
    "Render the chat yourself and send a completion.",
)
_SERVER = (
    "There is nothing behind this server but the model.",
    "Give the model what it needs in the prompt.",
)
_KEPT = (
    "Nothing is kept here between requests.",
    "Send the whole conversation as `input`: messages, calls and what they gave.",
)
_LATER = ("Answers are not kept here, to be fetched later.", "Leave it out, or read a stream.")
_USAGE = ("A stream counts its tokens once, at its end.", "Send include_usage=true.")
_TOP = ("Sampling parameters stand at the top of this body.", "Send them next to the prompt.")

_SAMPLING: dict[str, Refusal] = {
    **_refused(*_PENALTIES, "logit_bias bad_words allowed_token_ids"),
    **_refused(*_PENALTIES, "min_tokens min_new_tokens no_repeat_ngram_size", repeat_penalty=1),
    **_refused(*_PENALTIES, "repeat_last_n repetition_detection watermarking"),
    **_refused(
        *_FILTERS,
        "xtc_probability xtc_threshold dry_multiplier mirostat",
        typical_p=1,
        tfs_z=1,
    ),
    **_refused(*_GRAMMAR, "guided_whitespace_pattern whitespace_pattern disable_any_whitespace"),
    **_refused(*_GRAMMAR, "disable_additional_properties structural_tag json_schema regex"),
    **_refused(*_GRAMMAR, "stop_regex response_schema"),
    **_refused(*_EBNF, "ebnf grammar"),
    **_refused(*_SEARCH, "use_beam_search early_stopping", length_penalty=1, num_beams=1),
    **_refused(
        *_CODE,
        "logits_processors custom_logit_processor custom_params vllm_xargs kv_transfer_params",
    ),
    **_refused(*_CODE, "ec_transfer_params extra_args"),
    **_refused(
        *_EXPERTS, "return_routed_experts routed_experts routing_matrices return_expert_ids"
    ),
    **_refused(*_INSIDE, "return_hidden_states return_entropy token_ids_logprob logprob_token_ids"),
    **_refused(*_PROMPT, "truncate_prompt_tokens prompt_embeds input_embeds"),
    **_refused(
        *_MEDIA,
        "image_data video_data audio_data multi_modal_data mm_processor_kwargs media_io_kwargs",
    ),
    **_refused(*_WEIGHTS, "lora_path lora_request lora_id"),
    **_refused(*_REASONING, "thinking_token_budget max_thinking_tokens"),
    **_refused(*_USAGE, "continuous_usage_stats"),
}


def _harmless(source: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), source)


_OPENAI_ACCOUNT = "OpenAI's API reference: whose request it is, and what is stored"
_OPENAI_SPEED = (
    "OpenAI's API reference: how soon an answer comes, or how it is padded; not what it is"
)
_RESPONSES_EMPTY = (
    "openai 3.57.0 response_create_params: bounds on what is refused here; what to do with a "
    "conversation that is too long, which is refused; summaries of thinking, which comes whole"
)
_VLLM_SCHEDULING = (
    "vLLM 0.11 protocol: the name and the place of a request; caches, which change no answer here"
)
_VLLM_EMPTY = (
    "vLLM 0.11 protocol: how to return what another field asks for, which is refused, or by which "
    "library a grammar is followed"
)
_VLLM_FORM = (
    "vLLM 0.11 SamplingParams: of slow tokenizers, of clients without text, of how often "
    "a stream speaks"
)
_RENDERED = (
    "verifiers 0.4.0 train client: what shaped the prompt's text, which comes as tokens; it sends "
    "all that its user set"
)
_SGLANG_SCHEDULING = "sglang 0.5 GenerateReqInput: names, places, caches and logs of a request"
_ANTHROPIC_ACCOUNT = (
    "Anthropic's API reference: the user that a request is counted for, how soon it is "
    "answered, what is cached"
)

_VLLM_HARMLESS = {
    **_harmless(_VLLM_SCHEDULING, "priority request_id session_id cache_salt"),
    **_harmless(
        _VLLM_EMPTY,
        "routed_experts_prompt_start include_reasoning truncation_side guided_decoding_backend",
    ),
    **_harmless(_VLLM_FORM, "spaces_between_special_tokens stream_interval"),
}

_OPENAI_HARMLESS = {
    **_VLLM_HARMLESS,
    **_harmless(_OPENAI_ACCOUNT, "user metadata store safety_identifier"),
    **_harmless(
        _OPENAI_SPEED,
        "service_tier prompt_cache_key prompt_cache_retention prediction include_obfuscation",
    ),
}

_RESPONSES_ONLY = frozenset(
    (
        *("input", "instructions", "include", "reasoning", "max_output_tokens"),
        *("previous_response_id", "background"),
    )
)
"""Fields of v1/responses that no other route of OpenAI's has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Fields of one route's bodies beside those that it reads."""

    refused: Mapping[str, Refusal]
    harmless: Mapping[str, str]  # name -> source


COMPLETIONS = Dialect(
    refused={**_SAMPLING, **_refused(*_PROMPT, "suffix"), **_refused(*_TOP, "sampling_params")},
    harmless=_OPENAI_HARMLESS,
)

CHAT = Dialect(
    refused={
        **_SAMPLING,
        **_refused(*_MEDIA, "audio", modalities=["text"]),
        **_refused(*_TOOLS, "functions function_call"),
        **_refused(*_TEMPLATE, "chat_template documents echo"),
        **_refused(*_SERVER, "web_search_options", verbosity="medium"),
        **_refused(*_TOP, "sampling_params"),
    },
    harmless=_OPENAI_HARMLESS,
)

RESPONSES = Dialect(
    refused={
        **_SAMPLING,
        **_refused(*_KEPT, "previous_response_id conversation prompt"),
        **_refused(*_LATER, "background"),
        **_refused(*_PROMPT, "context_management"),
        **_refused(*_REASONING, context="auto", mode="standard"),
        **_refused(*_SERVER, "moderation", verbosity="medium"),
        **_refused(*_TOP, "sampling_params"),
    },
    harmless={
        **{name: source for name, source in _OPENAI_HARMLESS.items() if name != "metadata"},
        **_harmless(
            _RESPONSES_EMPTY,
            "truncation max_tool_calls image summary generate_summary background_options",
        ),
        **_harmless(_OPENAI_ACCOUNT, "access_programs"),
        **_harmless("Codex 0.171.0: which of its sessions and turns asks", "client_metadata"),
        **_harmless(_OPENAI_SPEED, "stream_options prompt_cache_options"),
    },
)

SGLANG = Dialect(
    refused={
        **_SAMPLING,
        **_refused(*_SERVER, "session_params require_reasoning", modalities=["text"]),
    },
    harmless={
        **_VLLM_HARMLESS,
        **_harmless(
            _SGLANG_SCHEDULING,
            "rid extra_key conversation_id routing_key routed_dp_rank data_parallel_rank",
        ),
        **_harmless(
            _SGLANG_SCHEDULING,
            "log_metrics no_logs custom_labels external_trace_header received_time",
        ),
        **_harmless(_SGLANG_SCHEDULING, "background kv_router_hint routed_experts_start_len"),
    },
)

VLLM = Dialect(
    refused={**_SAMPLING, **_refused(*_TOP, "sampling_params")},
    harmless={**_VLLM_HARMLESS, **_harmless(_VLLM_FORM, "detokenize")},
)

TOKENS = Dialect(
    refused={**_SAMPLING, **_refused(*_MEDIA, "features content_parts")},
    harmless={
        **_VLLM_HARMLESS,
        **_harmless(_VLLM_FORM, "detokenize"),
        **_harmless(_RENDERED, "reasoning_effort chat_template_kwargs"),
    },
)

MESSAGES = Dialect(
    refused={
        **_refused(*_REASONING, thinking={"type": "disabled"}),
        **_refused(*_SERVER, "mcp_servers container context_management"),
        **_SAMPLING,
    },
    harmless={
        **_VLLM_HARMLESS,
        **_harmless(_ANTHROPIC_ACCOUNT, "metadata service_tier cache_control"),
    },
)

TOKENIZE = Dialect(
    refused={
        **_refused(*_TEMPLATE, "chat_template"),
        **_refused(*_MEDIA, "mm_processor_kwargs media_io_kwargs"),
    },
    harmless=_VLLM_HARMLESS,
)

_SAME = (
    (
        "max_tokens",
        "max_new_tokens",
        "n_predict",
        "num_predict",
        "max_output_tokens",
        "max_gen_len",
    ),
    ("stop", "stop_sequences", "stop_strings"),
    ("n", "num_samples", "num_return_sequences", "candidate_count"),
    ("messages", "system", "input", "instructions"),
    ("seed", "sampling_seed", "random_seed"),
    ("reasoning_effort", "reasoning"),
    ("chat_template_kwargs", "enable_thinking"),
)
"""Names that servers have for one thing, ours among them."""


def read(body: bytes, kind: type[T], dialect: Dialect | None = None) -> T:
    """The fields of a body; InvalidData where they do not fit, or where one, at its top or within
    another field that is a struct, is neither read nor harmless.
    """
    found = bodies.read(body, kind, deep=False)
    if dialect is not None:
        _check(msgspec.json.decode(body, type=dict[str, msgspec.Raw]), kind, dialect)
    return found


def _check(given: Mapping[str, msgspec.Raw], kind: type, dialect: Dialect) -> None:
    known = _fields_of(kind)
    for name, raw in given.items():
        if name in known:
            inner = known[name]
            if inner is not None and bytes(raw).startswith(b"{"):
                _check(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), inner, dialect)
            continue
        refusal = dialect.refused.get(name)
        if refusal is not None:
            value = _value(raw)
            asks_for_nothing = value in (None, False, 0) or value == refusal.neutral
            if name in NOTHING_IF_EMPTY:
                asks_for_nothing = asks_for_nothing or not value
            if not asks_for_nothing:
                raise InvalidData(
                    f"`{name}` is not supported.", refusal.why, refusal.next, param=name
                )
        elif bytes(raw) != b"null" and name not in dialect.harmless:
            raise _unknown(name, known)


def _value(raw: msgspec.Raw) -> Any:
    """The value of a field; the bytes where they have none: a number beyond every range, or a text
    that is not UTF-8.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return bytes(raw)


def _unknown(name: str, known: Mapping[str, type | None]) -> InvalidData:
    what = f"`{shortened(name)}` is no field of this request."
    why = "Nothing here reads it, and the answer would be another than it asks for."
    place = next(
        (
            outer
            for outer, inner in known.items()
            if inner is not None and name in _fields_of(inner)
        ),
        None,
    )
    if place is not None:
        return InvalidData(what, why, f"Send it within `{place}`.", param=name)
    if name in _RESPONSES_ONLY:
        why = "It is a field of OpenAI's Responses API: of POST v1/responses."
    same = [other for names in _SAME if name in names for other in names if other in known]
    meant = same[0] if same else nearest(name, known)
    if meant is not None:
        return InvalidData(what, why, f"Did you mean `{meant}`?", did_you_mean=meant, param=name)
    return InvalidData(what, why, "Leave it out.", param=name)


@cache
def _fields_of(kind: type) -> Mapping[str, type | None]:
    """The names that a struct reads, each with the struct that its value may be."""
    return {field.encode_name: _struct_in(field.type) for field in msgspec.structs.fields(kind)}


def _struct_in(kind: Any) -> type | None:
    """The struct that a value of this type may be, unless it is one of a list."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if get_origin(kind) in (Union, UnionType):
        return next(
            (found for one in get_args(kind) if (found := _struct_in(one)) is not None), None
        )
    return None
