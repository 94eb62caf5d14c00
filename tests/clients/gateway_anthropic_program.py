"""A loop with a tool of the unmodified `anthropic` package; it knows nothing of Halteres. Runs in its
own environment.

python gateway_anthropic_program.py      ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY say where
"""

from __future__ import annotations

from typing import Any

import anthropic

TOOLS: Any = [{"name": "add", "input_schema": {"type": "object"}}]


def main() -> None:
    client = anthropic.Anthropic(max_retries=3)
    messages: list[Any] = [{"role": "user", "content": "Add 1 and 2, three times."}]
    for turn in range(3):
        asked: Any = {
            "model": "claude-x",
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": 64,
            "system": "You add.",
        }
        if turn == 1:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        messages.append(
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
        )
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": str(sum(block.input.values())),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


main()
