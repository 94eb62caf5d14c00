"""The tools for harnesses that speak OpenAI's chat format.

messages.append(choice.message)
for tool_call in choice.message.tool_calls: messages.append(await answer(tool_call.model_dump()))
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from halteres.agent.call import call, refused
from halteres.agent.table import TOOLS
from halteres.agent.tool import Caller
from halteres.documents import DocumentError, parse_json
from halteres.errors import UserError


def definitions() -> list[dict[str, Any]]:
    """The value of `tools` in a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema(),
            },
        }
        for tool in TOOLS
    ]


async def answer(tool_call: Mapping[str, Any], caller: Caller | None = None) -> dict[str, Any]:
    """The `tool` message for one tool call of an assistant message; its content is compact JSON.
    Raises nothing.
    """
    function, caller = tool_call.get("function") or {}, caller or Caller.own()
    name = str(function.get("name") or "")
    try:
        reply = await call(name, _arguments(name, function.get("arguments")), caller)
    except UserError as error:
        reply = refused(name, error, {}, caller)
    content = json.dumps(reply.for_agents, ensure_ascii=False, separators=(",", ":"))
    return {"role": "tool", "tool_call_id": tool_call.get("id"), "content": content}


def _arguments(name: str, given: Any) -> dict[str, Any]:
    """The arguments a model wrote: JSON in a text, as a rule; nothing means none."""
    if isinstance(given, str):
        try:
            if given.strip():
                given = parse_json(given, most_values=len(given))
            else:
                given = None
        except DocumentError as error:
            raise UserError(
                f"{name} was called with arguments that are no JSON: {error}."
            ) from error
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{name} takes a JSON object of arguments, not {reprlib.repr(given)}.")
    return given or {}
