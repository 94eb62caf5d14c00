"""An agent of OpenAI's Agents SDK with a tool; prints one JSON object. Runs in an environment of its
own.

python agents_program.py API MODEL...      OPENAI_BASE_URL and OPENAI_API_KEY say where

API: chat_completions, or responses, which is the SDK's default.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

SUMS: list[int] = []


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    SUMS.append(a + b)
    return a + b


async def main(api: str, *models: str) -> None:
    set_tracing_disabled(True)
    if api != "responses":
        set_default_openai_api("chat_completions")
    told: dict[str, object] = {"sums": SUMS}
    async with AsyncOpenAI(max_retries=0) as client:
        set_default_openai_client(client, use_for_tracing=False)
        for name in models:
            agent = Agent(
                name="Adder",
                instructions="Be brief.",
                model=name,
                tools=[add],
                model_settings=ModelSettings(max_tokens=120, temperature=0),
            )
            try:
                ended = await Runner.run(agent, "What is 17 + 25?", max_turns=3)
                streamed = Runner.run_streamed(agent, "What is 17 + 25?", max_turns=3)
                events = [event.type async for event in streamed.stream_events()]
                told[name] = {
                    "said": [ended.final_output, streamed.final_output],
                    "items": [[item.type for item in one.new_items] for one in (ended, streamed)],
                    "events": sorted(set(events)),
                }
            except Exception as error:  # noqa: BLE001 - whatever it raises is told
                told[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
