"""An episode of two turns through the capture proxy of tinker-cookbook, over each of its two APIs;
prints what its instrumentation captured, one JSON list. Runs in the cookbook's environment.

python capture_proxy_program.py MODEL TOKENIZER      TINKER_BASE_URL and TINKER_API_KEY say where
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import tinker
from aiohttp.test_utils import TestClient, TestServer
from tinker_cookbook.capture.exporter import CaptureExporter
from tinker_cookbook.capture.instrument import instrument_tinker
from tinker_cookbook.capture.proxy.app import ProxyDeps, make_app
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

FLUSHED_WITHIN_S = 30.0


class Kept:
    """The sink of what is captured."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def export(self, records: Sequence[dict[str, Any]], timeout: float | None = None) -> None:
        self.records += records


async def play(deps: ProxyDeps) -> None:
    async with TestClient(TestServer(make_app(deps))) as client:
        for path in ("/v1/chat/completions", "/v1/messages"):
            messages = [{"role": "user", "content": "What is 17 + 25?"}]
            for _ in range(2):
                body = {"max_tokens": 100, "messages": messages}
                async with client.post(f"/r/traj/0{path}", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                if path == "/v1/messages":
                    said = answer["content"][0]["text"]
                else:
                    said = answer["choices"][0]["message"]["content"]
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "Go on."},
                ]


def main(model: str, tokenizer: str) -> None:
    kept = Kept()
    exporter = CaptureExporter(kept)
    instrument_tinker(exporter)
    service = tinker.ServiceClient()
    sampling = service.create_sampling_client(base_model=model)
    renderer = get_renderer("qwen3_instruct", get_tokenizer(tokenizer), model_name=tokenizer)
    asyncio.run(play(ProxyDeps(renderer=renderer, sampling_client=sampling, model_label=model)))
    assert exporter.wait_pending(FLUSHED_WITHIN_S)
    assert exporter.force_flush(FLUSHED_WITHIN_S)
    exporter.shutdown()
    found = [
        [one["prompt_tokens"], sample["tokens"], sample["logprobs"]]
        for one in kept.records
        if one["kind"] == "sample"
        for sample in one["samples"]
    ]
    sys.stdout.write(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
