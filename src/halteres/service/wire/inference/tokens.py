"""JSON bodies of /tokenize and /detokenize.

Owns: one struct per request.
Never: encodes.
Source: vLLM 0.11, `TokenizeRequest` and `DetokenizeRequest`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Tokenize(msgspec.Struct, kw_only=True):
    """POST tokenize: a prompt or a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class Detokenize(msgspec.Struct, kw_only=True):
    """POST detokenize."""

    tokens: list[int]
    model: str | None = None
