"""What is asked of `/inference/v1/generate`, at both ends: by our client of vLLM, and of our own
service, whose other routes read the same fields of sampling.

Source: vLLM 0.32 `SamplingParams`, `StructuredOutputsParams` and
`entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from halteres.engine.protocol import Called, Calls, Grammar
from halteres.tool_calls import CLOSE, OPEN

MOST_STOPS = 1024  # texts and tokens of one list that ends a sample

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# of the most likely tokens; 256 is our engine's limit
TopCount = Annotated[int, msgspec.Meta(ge=0, le=256)]

AFewStops = msgspec.Meta(max_length=MOST_STOPS)


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an answer is held to: one of these."""

    json: str | dict[str, Any] | None = None  # a schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark; some vLLMs also read EBNF
    structural_tag: str | None = None  # of vLLM alone: JSON within text, which calls of tools are


class Sampling(msgspec.Struct, kw_only=True):
    """How to sample. Defaults are OpenAI's and vLLM's."""

    n: int = 1
    # None: up to the context limit; 0, of our service: score the prompt, write nothing
    max_tokens: TokenCount | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: TokenId = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | TokenId | Annotated[list[str | TokenId], AFewStops] | None = None
    stop_token_ids: Annotated[list[TokenId], AFewStops] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None: drawn; our service: prompt i uses seed + i
    structured_outputs: StructuredOutputs | None = None


class TokenSampling(Sampling, kw_only=True):
    """... of tokens."""

    logprobs: TopCount | None = None  # of the likeliest tokens at each position; None: none at all
    prompt_logprobs: TopCount | None = None
    detokenize: bool = False


class TokenPrompt(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    stream: bool = False


def structured(grammar: Grammar | None) -> StructuredOutputs | None:
    """A grammar in vLLM's fields."""
    if grammar is None:
        return None
    if grammar.kind == "json_schema":
        return StructuredOutputs(json=grammar.text)
    if grammar.kind == "regex":
        return StructuredOutputs(regex=grammar.text)
    if grammar.kind == "choice":
        return StructuredOutputs(choice=msgspec.json.decode(grammar.text, type=list[str]))
    if grammar.kind == "calls":
        calls = msgspec.json.decode(grammar.text, type=Calls)
        return StructuredOutputs(structural_tag=_tag_of_calls(calls))
    return StructuredOutputs(grammar=grammar.text)


def _tag_of_calls(calls: Calls) -> str:
    """Calls of tools as a structural tag of xgrammar 0.2."""
    answer: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [_tag(tool) for tool in calls.tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not calls.several,
    }
    if calls.otherwise is not msgspec.UNSET:
        value = {"type": "json_schema", "json_schema": calls.otherwise}
        answer = {"type": "or", "elements": [answer, value]}
    return json.dumps({"type": "structural_tag", "format": answer})


def _tag(tool: Called) -> dict[str, Any]:
    name = json.dumps(tool.name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'{OPEN}\n{{"name": {name}, "arguments": ',
        "content": {
            "type": "json_schema",
            "json_schema": {"type": "object", **tool.arguments},
        },
        "end": f"}}\n{CLOSE}",
    }
