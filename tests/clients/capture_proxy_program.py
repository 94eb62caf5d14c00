"""What the capture proxy of tinker-cookbook answers when its backend is our service; prints one JSON
object. Runs in the cookbook's environment.

python capture_proxy_program.py MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import tinker
from aiohttp.test_utils import TestClient, TestServer
from tinker_cookbook.capture.proxy.app import ProxyDeps, make_app
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

SHORT = [{"role": "user", "content": "What is 17 + 25?"}]
LONG = [{"role": "user", "content": "What is 17 + 25? " * 300}]


async def answers(deps: ProxyDeps) -> dict[str, Any]:
    told: dict[str, Any] = {}
    async with TestClient(TestServer(make_app(deps))) as client:
        for path in ("/v1/messages", "/v1/chat/completions"):
            told[path] = {}
            for name, messages in (("short", SHORT), ("long", LONG)):
                async with client.post(path, json={"max_tokens": 4, "messages": messages}) as one:
                    body = await one.json()
                error = body.get("error") or {}
                told[path][name] = [one.status, error.get("type"), error.get("message", "")]
    return told


def main(model: str) -> None:
    service = tinker.ServiceClient()
    sampling = service.create_sampling_client(base_model=model).result()
    renderer = get_renderer("qwen3_instruct", get_tokenizer(model), model_name=model)
    deps = ProxyDeps(renderer=renderer, sampling_client=sampling, model_label=model)
    sys.stdout.write(f"\n{json.dumps(asyncio.run(answers(deps)))}")


if __name__ == "__main__":
    main(sys.argv[1])
