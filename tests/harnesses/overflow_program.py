"""When the compaction of verifiers' chat programs starts, against our service; prints one JSON object.
Runs in the environment of verifiers.

python overflow_program.py SERVICE_URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from verifiers.v1.harnesses.utils.compaction import discover_threshold, is_context_overflow

MODEL = "halteres/tiny"
LONG: list[Any] = [{"role": "user", "content": "What is 17 + 25? " * 300}]


async def main(url: str) -> None:
    told: dict[str, Any] = {}
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="tml-test", max_retries=0
    ) as client:
        told["threshold"] = await discover_threshold(client, MODEL)
        try:
            await client.chat.completions.create(model=MODEL, messages=LONG)
        except openai.APIStatusError as error:
            told["overflow"] = is_context_overflow(error)
    sys.stdout.write(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
