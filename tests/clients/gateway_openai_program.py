"""A loop with a tool of the unmodified `openai` package; it knows nothing of Halteres. Runs in its
own environment.

python gateway_openai_program.py      OPENAI_BASE_URL and OPENAI_API_KEY say where
"""

from __future__ import annotations

import json
from typing import Any

import openai

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def streamed(client: openai.OpenAI, messages: Any) -> dict[str, Any]:
    """An answer from its pieces, as programs put them together."""
    content, calls = "", dict[int, dict[str, Any]]()
    stream = client.chat.completions.create(
        model="gpt-4o", messages=messages, tools=TOOLS, max_tokens=64, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for one in choice.delta.tool_calls or ():
                call = calls.setdefault(one.index, {"name": "", "arguments": ""})
                call["id"] = one.id or call.get("id")
                if one.function is not None:
                    call["name"] += one.function.name or ""
                    call["arguments"] += one.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    message["tool_calls"] = [
        {
            "id": call["id"],
            "type": "function",
            # read and written again, with the keys in another order
            "function": {
                "name": call["name"],
                "arguments": json.dumps(
                    dict(reversed(json.loads(call["arguments"]).items())), indent=1
                ),
            },
        }
        for call in calls.values()
    ]
    return message


def main() -> None:
    client = openai.OpenAI(max_retries=3)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Add 1 and 2, three times."}]
    for turn in range(3):
        if turn == 1:
            message = streamed(client, messages)
        else:
            answer = client.chat.completions.create(
                model="gpt-4o",
                messages=messages,  # pyright: ignore[reportArgumentType]
                tools=TOOLS,
                max_tokens=64,
            )
            message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message["tool_calls"]:
            total = sum(json.loads(call["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})


main()
