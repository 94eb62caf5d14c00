"""What the unmodified `openai` package gets from our service; prints one JSON object. Runs in its
own environment.

python openai_program.py SERVICE_URL TINKER_PATH
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

MESSAGES: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]


def completions(client: openai.OpenAI, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": "1 + 1 =",
        "max_tokens": 8,
        "seed": 1,
        "logprobs": 2,
        "n": 2,
    }
    whole = client.completions.create(**body)
    chunks = list(
        client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    return {
        "texts": [choice.text for choice in whole.choices],
        "streamed": texts,
        "usage": [whole.usage.total_tokens, chunks[-1].usage.total_tokens],
        "top": [
            len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens)
            for choice in whole.choices
        ],
        "version": whole.policy_version,
    }


def chats(client: openai.OpenAI, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8, "seed": 1}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    entries = whole.choices[0].logprobs.content
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(piece.delta.content or "" for piece in pieces),
        "finish": [whole.choices[0].finish_reason, pieces[-1].finish_reason],
        "top": [len(entry.top_logprobs) for entry in entries],
    }


def refusals(client: openai.OpenAI) -> dict[str, str]:
    told = {}
    asked: dict[str, dict[str, Any]] = {
        "model": {"model": "nobody", "messages": MESSAGES},
        "field": {"model": "halteres/tiny", "messages": MESSAGES, "logit_bias": {"5": 1}},
        "tools": {
            "model": "halteres/tiny",
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "length": {"model": "halteres/tiny", "messages": MESSAGES * 400},
    }
    for name, body in asked.items():
        try:
            client.chat.completions.create(**body)
        except openai.APIStatusError as error:
            told[name] = f"{type(error).__name__} {error.code} {error.param}"
    try:
        client.embeddings.create(model="halteres/tiny", input="x")
    except openai.APIStatusError as error:
        told["route"] = f"{type(error).__name__} {'There is no POST' in error.message}"
    return told


async def left(url: str) -> int:
    """How many chunks a reader saw that left a stream."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="tml-test") as client:
        stream = await client.chat.completions.create(
            model="halteres/tiny",
            messages=MESSAGES,
            stream=True,
            max_tokens=500,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            async for _ in stream:
                return 1
    return 0


def main(url: str, path: str) -> None:
    told: dict[str, Any] = {}
    for prefix in ("/v1", "/oai/api/v1"):
        with openai.OpenAI(base_url=url + prefix, api_key="tml-test", max_retries=0) as client:
            told[prefix] = {
                "models": [model.id for model in client.models.list()],
                "retrieved": client.models.retrieve(path).id,
                "base": completions(client, "halteres/tiny"),
                "path": completions(client, path),
                "chat": chats(client, path),
                "refusals": refusals(client),
            }
    told["left"] = asyncio.run(left(url))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
