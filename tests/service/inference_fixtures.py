"""Scenes of inference: streams read as events, and an engine that says what a test wants it to
say.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from halteres.engine.protocol import ExtraLogprobs, Piece, SampleResult, SamplingParams, Sequence
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.loopback import open_listener
from halteres.service.base import BaseModel
from halteres.service.fleet import Fleet
from halteres.service.gateway.gateway import gateway_over
from halteres.service.server import ServiceServer
from halteres.service.service import locked, opened
from halteres.tokenizer import load_tokenizer

from .live_service import BASE, InProcess, LiveService

TOKENIZER = load_tokenizer(str(BASE.folder))

RESULT = "<tool_response>"

TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif -%}
"""


async def whole(scene: LiveService, path: str, **body: Any) -> Any:
    """What is answered at once."""
    status, answer = await scene.ask(path, **body)
    assert status == 200, answer
    return answer


async def events(scene: LiveService, path: str, **body: Any) -> list[Any]:
    """What a stream tells: the JSON of every event, and "[DONE]" as it is."""
    async with scene.http.post(f"{scene.url}{path}", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return [read(line) async for line in response.content if line.startswith(b"data: ")]


def read(line: bytes) -> Any:
    told = line.removeprefix(b"data: ").strip()
    return "[DONE]" if told == b"[DONE]" else json.loads(told)


class Speaker(ScriptedEngine):
    """Every sequence is this text and the end token, whatever is asked; each token a piece."""

    def __init__(self, folder: Path, name: str, says: str) -> None:
        super().__init__(folder, name)
        self.says = says
        # where it is set, what a prompt with a tool's result is answered with
        self.says_to_results: str | None = None
        self.result_mark = RESULT  # by which such a prompt is known
        # where it is set, an answer's text is split into tokens as no tokenizer splits it, each
        # time otherwise, and log-probabilities differ
        self.varied: np.random.Generator | None = None
        self.prompts: list[list[int]] = []  # as they came

    def _tokens(self, prompt: bytes, params: SamplingParams) -> np.ndarray:
        self.prompts.append(np.frombuffer(prompt, np.int32).tolist())
        says = self.says
        if self.says_to_results is not None and self.result_mark in TOKENIZER.decode(
            self.prompts[-1]
        ):
            says = self.says_to_results
        said = [*self._encoded(says), TOKENIZER.eos_token_id]
        return np.asarray(said[: params.max_tokens], np.int32)

    def _encoded(self, text: str) -> list[int]:
        if self.varied is None:
            return TOKENIZER.encode(text)
        tokens = list[int]()
        for token in TOKENIZER.encode(text):
            written = TOKENIZER.decode([token], skip_special_tokens=False)
            # Marks stay whole: some clients find calls by their ids.
            if written.startswith("<") or self.varied.random() < 0.5:
                tokens.append(token)
            else:
                tokens += (one for letter in written for one in TOKENIZER.encode(letter))
        return tokens

    def _logprobs(self, count: int) -> bytes:
        if self.varied is None:
            return np.full(count, -0.5, np.float32).tobytes()
        return (-self.varied.exponential(size=count)).astype(np.float32).tobytes()

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        wanted: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008
    ) -> SampleResult:
        tokens = self._tokens(prompt, params)
        said = Sequence(
            tokens=tokens.tobytes(),
            logprobs=self._logprobs(len(tokens)),
            stop_reason=_ended(tokens),
        )
        return SampleResult(sequences=(said,) * num_samples, version=0)

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        wanted: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008
    ) -> AsyncIterator[Piece]:
        tokens = self._tokens(prompt, params)
        for at, token in enumerate(tokens):
            last = at == len(tokens) - 1
            for sample in range(num_samples):
                reason = _ended(tokens) if last else None
                yield Piece(
                    sample=sample,
                    tokens=token.tobytes(),
                    logprobs=self._logprobs(1),
                    version=0,
                    stop_reason=reason,
                )


def _ended(tokens: np.ndarray) -> Literal["stop", "length"]:
    return "stop" if tokens[-1] == TOKENIZER.eos_token_id else "length"


@asynccontextmanager
async def speaking(
    folder: Path, says: str, template: str | None = TOOL_TEMPLATE, context: int = 2048
) -> AsyncIterator[tuple[LiveService, Speaker]]:
    """A service whose every answer is `says`, over a model whose chat template knows tools; with
    None the built-in model's own, which does not. The model reads so many tokens.
    """
    model = folder / "model"
    shutil.copytree(BASE.folder, model)
    config = json.loads((model / "config.json").read_bytes())
    config["max_position_embeddings"] = context
    (model / "config.json").write_text(json.dumps(config))
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    base = BaseModel("speaker", model, folder / "models_home")
    host = InProcess()
    speaker = host.scripted = Speaker(model, base.name, says)
    with locked(folder / "state"), open_listener(0) as bound:
        async with (
            opened(folder / "state", base, Fleet.of(host)) as service,
            gateway_over(service) as gateway,
            aiohttp.ClientSession() as http,
        ):
            await host.start()
            server = ServiceServer(service, gateway)
            running = asyncio.create_task(server.serve(sockets=[bound]))
            try:
                yield (
                    LiveService(
                        f"http://127.0.0.1:{bound.getsockname()[1]}",
                        service,
                        host,
                        http,
                        server,
                        gateway,
                    ),
                    speaker,
                )
            finally:
                await http.close()
                server.end()
                server.force_exit = True
                await running
