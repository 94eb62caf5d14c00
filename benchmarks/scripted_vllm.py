"""A scripted vLLM, for measurements of what is around one: it answers as `vllm serve` does over
HTTP, after the time that a real one would take, and costs next to nothing.

    python scripted_vllm.py '{"sockets": [5, 6], "token_s": 0.02, "prompt_token_s": 2e-5}'

Each of the inherited listening sockets is a vLLM of its own. Answers were encoded before: the
tokens are random, their number is the `max_tokens` of the request. Shapes and sentences are those
of vLLM 0.32 (tests/engine/recorded_vllm.json).
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import msgspec

VOCABULARY = 672  # of the built-in model
CONTEXT = 2048
LOWEST = 3  # the ids below are special tokens
KINDS = 8  # different sequences of each length

Body = str | bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """How long a real one takes."""

    token_s: float  # for each token that it samples, whatever else it samples
    prompt_token_s: float = 0.0  # for each token of a prompt

    def seconds(self, prompt: int, tokens: int) -> float:
        """For an answer of so many tokens."""
        return prompt * self.prompt_token_s + tokens * self.token_s


class Sampling(msgspec.Struct):
    """The sampling parameters that are obeyed."""

    max_tokens: int
    n: int = 1
    logprobs: int | None = None


class Asked(msgspec.Struct):
    """POST /inference/v1/generate; of the tokens only their number is of interest."""

    token_ids: msgspec.Raw
    sampling_params: Sampling


class Named(msgspec.Struct):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    lora_name: str


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, server: ScriptedVllm) -> None:
        self._server, self._received = server, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return
        self._received = rest[length:]
        method, path, _ = head.split(b" ", 2)
        answer, after_s = self._server.answer(f"{method.decode()} {path.decode()}", rest[:length])
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self._write, answer)
        else:
            self._write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


@dataclass(slots=True)
class ScriptedVllm:
    """One of them."""

    rates: Rates
    model: str = "halteres/tiny"
    adapters: set[str] = field(default_factory=set[str])
    num_answers: int = 0

    def answer(self, asked: str, body: bytes) -> tuple[bytes, float]:
        """The answer to a request, and after how many seconds it is sent."""
        if asked == "POST /inference/v1/generate":
            return self._generate(msgspec.json.decode(body, type=Asked))
        if asked == "GET /health":
            return response(b""), 0.0
        if asked == "GET /version":
            return response({"version": "0.32.0"}), 0.0
        if asked == "GET /v1/models":
            base = {"id": self.model, "parent": None, "max_model_len": CONTEXT}
            adapters = [{"id": name, "parent": self.model} for name in sorted(self.adapters)]
            return response({"data": [base, *adapters]}), 0.0
        if asked == "POST /v1/load_lora_adapter":
            name = msgspec.json.decode(body, type=Named).lora_name
            self.adapters.add(name)
            return response(f"Success: LoRA adapter '{name}' added successfully."), 0.0
        if asked == "POST /v1/unload_lora_adapter":
            name = msgspec.json.decode(body, type=Named).lora_name
            self.adapters.discard(name)
            return response(f"Success: LoRA adapter '{name}' removed successfully."), 0.0
        return response({"detail": "Not Found"}, 404), 0.0

    def _generate(self, asked: Asked) -> tuple[bytes, float]:
        tokens, sampling = bytes(asked.token_ids), asked.sampling_params
        # a client asks for one token beyond the vocabulary, to see how large that is
        if len(tokens) < 16 and max(json.loads(tokens), default=0) >= VOCABULARY:
            return response({"error": {"message": "Token id is out of vocabulary"}}, 400), 0.0
        self.num_answers += 1
        likely, kind = sampling.logprobs or 0, self.num_answers % KINDS
        if likely:
            # a client compares them at two temperatures: they are the same, as the real one's are
            kind = 0
        answer = generated(sampling.n, sampling.max_tokens, kind, likely)
        return answer, self.rates.seconds(tokens.count(b",") + 1, sampling.max_tokens)


def response(body: object, status: int = 200) -> bytes:
    """An answer as bytes; bytes and texts as they are, all else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    if isinstance(body, str):
        content = body.encode()
    head = f"HTTP/1.1 {status} Scripted\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@cache
def generated(num_samples: int, length: int, kind: int, likely: int) -> bytes:
    """An answer of so many sequences of so many tokens each."""
    choices = [_choice(index, length, kind, likely) for index in range(num_samples)]
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    return response({"choices": choices, "prompt_logprobs": None, "usage": usage})


def _choice(index: int, length: int, kind: int, likely: int) -> dict[str, object]:
    draw = random.Random(f"{index} {length} {kind}")
    ids = [draw.randrange(LOWEST, VOCABULARY) for _ in range(length)]
    content: list[dict[str, object]] = []
    for token in ids:
        own = {"token_id": token, "logprob": -draw.expovariate(1.4), "rank": 1}
        others = [
            {"token_id": other, "logprob": -3.0 - other, "rank": 1 + other}
            for other in range(1, likely)
        ]
        content.append({**own, "top_logprobs": [own, *others]})
    return {
        "index": index,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "weight_versions": [{"version": "default", "start": 0, "end": length}],
        "logprobs": {"content": content},
    }


async def serve(
    sockets: Sequence[socket.socket], rates: Rates
) -> tuple[list[asyncio.Server], list[ScriptedVllm]]:
    """Serve one vLLM on each listening socket, from now on."""
    loop, servers, samplers = asyncio.get_running_loop(), list[asyncio.Server](), []
    for bound in sockets:
        sampler = ScriptedVllm(rates)
        samplers.append(sampler)

        def connection(sampler: ScriptedVllm = sampler) -> Connection:
            return Connection(sampler)

        servers.append(await loop.create_server(connection, sock=bound, backlog=4096))
    return servers, samplers


async def main() -> None:
    """Serve until standard input ends, which it does with whoever started this."""
    given = json.loads(sys.argv[1])
    sockets = [socket.socket(fileno=number) for number in given["sockets"]]
    await serve(sockets, Rates(given["token_s"], given["prompt_token_s"]))
    print("serves", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
