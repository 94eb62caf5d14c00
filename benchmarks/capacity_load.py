"""The clients in `capacity.py`: many requests for samples in flight, from a process of their own.

    python capacity_load.py '{"port": 8001, "route": "generate", "in_flight": 256, ...}'

Each connection sends its next request when it has its answer. What is sent exists already and
answers are hardly looked at: what clients spend, the service lacks.

    generate   POST /runs/RUN/generate, as environments ask
    sample     POST /api/v1/asample, then /api/v1/retrieve_future, as the SDK's `sample` asks
    post       POST /scored_data at a trajectory server, groups of 16 sequences
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from scripted_vllm import LOWEST, VOCABULARY, Rates

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.trajectories.groups import Shape, posts

RUN = "capacity"
NUM_PROMPTS = 1024  # different ones, sent in turn
POLL_AGAIN = 408  # the answer is not there yet
MOST_ANSWERED, LONGEST_WARM_UP_S = 0.75, 40.0  # share of the connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, and for how long."""

    port: int
    route: str
    in_flight: int  # requests, one a connection
    window_s: float  # that is counted
    warm_up_s: float  # before it, once most connections have had an answer
    prompt: tuple[int, int] = (0, 0)  # shortest and longest, tokens
    answers: tuple[int, ...] = (0,)  # tokens, drawn alike often
    token_s: float = 0.0  # as the samplers' `Rates`
    prompt_token_s: float = 0.0
    session: str = ""  # sampling session of the route `sample`
    first_request: int = 0  # its number there
    env_id: int = 0  # of the route `post`
    shape: tuple[int, int] = (0, 0)  # sequences of a group, tokens of a sequence

    @property
    def rates(self) -> Rates:
        """Of the samplers."""
        return Rates(self.token_s, self.prompt_token_s)

    def start(self) -> str:
        """The argument of this program."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Request:
    """One, as bytes."""

    content: bytes
    scripted_s: float  # that the sampler takes
    tokens: int  # of its answer
    prompt: int


@dataclass(slots=True)
class Counts:
    """Of the window."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    added_s: list[float] = field(default_factory=list[float])  # beyond the sampler's time
    is_open: bool = False
    unanswered: int = 0  # connections that are to have had an answer before the window opens
    is_warm: asyncio.Event = field(default_factory=asyncio.Event)

    def first_answer(self) -> None:
        """A connection has had its first."""
        self.unanswered -= 1
        if self.unanswered <= 0:
            self.is_warm.set()

    def add(self, request: Request, took_s: float) -> None:
        """A request was answered."""
        if not self.is_open:
            return
        self.requests += 1
        self.tokens += request.tokens
        self.prompt_tokens += request.prompt
        self.added_s.append(took_s - request.scripted_s)

    def figures(self, seconds: float) -> dict[str, float]:
        """As they are reported."""
        found = {
            "requests": self.requests,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "seconds": seconds,
        }
        for share in (50, 99):
            added_s = float(np.percentile(self.added_s, share)) if self.added_s else 0.0
            found[f"added_ms_p{share}"] = 1e3 * added_s
        return found


def post(path: str, body: bytes) -> bytes:
    """A request."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def requests(load: Load) -> Iterator[Request]:
    """One after the other, for ever; the same for the same load."""
    if load.route == "post":
        sequences, tokens = load.shape
        groups = posts(Shape(sequences, tokens), "identity", load.env_id)
        yield from (Request(one, 0.0, sequences * tokens, 0) for one in itertools.cycle(groups))
    draw = random.Random(load.first_request)
    prompts = list[tuple[int, bytes]]()
    for _ in range(NUM_PROMPTS):
        length = draw.randint(*load.prompt)
        tokens = [draw.randrange(LOWEST, VOCABULARY) for _ in range(length)]
        prompts.append((length, msgspec.json.encode(tokens)))
    for number in itertools.count(load.first_request):
        length, tokens = prompts[number % NUM_PROMPTS]
        answer = draw.choice(load.answers)
        if load.route == "generate":
            sampling = b'{"max_new_tokens":%d,"temperature":1.0,"top_p":1.0,"n":1}' % answer
            body = b'{"input_ids":%b,"sampling_params":%b,"return_logprob":true}'
            content = post(f"/runs/{RUN}/generate", body % (tokens, sampling))
        else:
            body = (
                b'{"sampling_session_id":"%b","seq_id":%d,"num_samples":1,"prompt":{"chunks":'
                b'[{"type":"encoded_text","tokens":%b}]},"sampling_params":{"max_tokens":%d,'
                b'"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":%d}}'
            )
            values = (load.session.encode(), number, tokens, answer, number)
            content = post("/api/v1/asample", body % values)
        yield Request(content, load.rates.seconds(length, answer), answer, length)


class Caller(asyncio.Protocol):
    """One connection, with one request under way."""

    def __init__(self, coming: Iterator[Request], counts: Counts) -> None:
        self._coming, self._counts = coming, counts
        self._received = bytearray()
        self._is_first = True  # request of this connection
        self._needed = 0  # bytes of the answer that is coming; 0: its head has not come whole
        self._body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send_next()

    def _send_next(self) -> None:
        self._request = next(self._coming)
        self._began = time.monotonic()
        self._transport.write(self._request.content)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._needed:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._received[:end]).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            self._body_at, self._needed = end + 4, end + 4 + length
        if len(self._received) < self._needed:
            return
        status, body = int(self._received[9:12]), bytes(self._received[self._body_at :])
        self._received.clear()
        self._needed = 0
        self._answered(status, body)

    def _answered(self, status: int, body: bytes) -> None:
        if status == POLL_AGAIN:
            self._transport.write(self._poll)
        elif status != 200:
            raise SystemExit(f"error: a request was answered with {status}: {body[:500]!r}")
        elif body.startswith(b'{"request_id"'):
            name = msgspec.json.decode(body)["request_id"]
            self._poll = post("/api/v1/retrieve_future", b'{"request_id":"%b"}' % name.encode())
            self._transport.write(self._poll)
        else:
            self._counts.add(self._request, time.monotonic() - self._began)
            if self._is_first:
                self._counts.first_answer()
            self._is_first = False
            self._send_next()


async def main() -> None:
    """Say `begins` when the window opens, and then what was counted."""
    load = Load(**json.loads(sys.argv[1]))
    loop, coming = asyncio.get_running_loop(), requests(load)
    counts = Counts(unanswered=round(MOST_ANSWERED * load.in_flight))
    loop.set_exception_handler(_end)
    mean_s = load.rates.seconds(sum(load.prompt) // 2, sum(load.answers) // len(load.answers))
    began = time.monotonic()
    for number in range(load.in_flight):
        # as answers of many clients come: not all at once
        pause = began + mean_s * number / load.in_flight - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        await loop.create_connection(lambda: Caller(coming, counts), "127.0.0.1", load.port)
    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_WARM_UP_S):
            await counts.is_warm.wait()
    await asyncio.sleep(load.warm_up_s)
    opened, counts.is_open = time.monotonic(), True
    print("begins", flush=True)
    await asyncio.sleep(load.window_s)
    counts.is_open = False
    print(json.dumps(counts.figures(time.monotonic() - opened)), flush=True)


def _end(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """A request failed: nothing that is counted after it says anything."""
    loop.default_exception_handler(context)
    loop.stop()


if __name__ == "__main__":
    asyncio.run(main())
