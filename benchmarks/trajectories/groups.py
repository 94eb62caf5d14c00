"""Scored groups as the clients of the trajectory API send them.

Owns: their contents (tokens, masks, inference_logprobs, scores), their JSON as Python's
`json.dumps` writes it, their gzip as the original's BaseEnv makes it (level 9, bodies of 1 kB and
more). Never: sends them.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

VOCABULARY = 151_936
MASKED, CONTEXT_LOGPROB = -100, 1.0
GZIP_FROM = 1024
"""Bytes; atroposlib 0.4.0 envs/base.py compresses from there."""

NUM_KINDS = 8
"""Different groups of one shape, sent in turn."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of a group, tokens of a sequence."""

    sequences: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.sequences}x{self.tokens}"


def group(shape: Shape, kind: int, env_id: int | None) -> dict[str, Any]:
    """One group: a context of a quarter of the tokens, which all sequences share; sampled tokens
    after it.
    """
    random = np.random.default_rng((shape.sequences, shape.tokens, kind))
    context = random.integers(0, VOCABULARY, shape.tokens // 4).tolist()
    num_sampled = shape.tokens - len(context)
    sampled = random.integers(0, VOCABULARY, (shape.sequences, num_sampled)).tolist()
    logprobs = (
        (-random.exponential(0.7, (shape.sequences, num_sampled)))
        .astype(np.float32)
        .astype(float)
        .tolist()
    )
    return {
        "tokens": [context + each for each in sampled],
        "masks": [[MASKED] * len(context) + each for each in sampled],
        "scores": random.integers(0, 2, shape.sequences).astype(float).tolist(),
        "inference_logprobs": [[CONTEXT_LOGPROB] * len(context) + each for each in logprobs],
        "env_id": env_id,
    }


@cache
def body(shape: Shape, kind: int, env_id: int | None) -> bytes:
    """A group as JSON."""
    return json.dumps(group(shape, kind, env_id)).encode()


@cache
def compressed(shape: Shape, kind: int, env_id: int | None) -> bytes:
    """The same through gzip."""
    return gzip.compress(body(shape, kind, env_id))


@cache
def posts(
    shape: Shape, encoding: str, env_id: int | None, num_kinds: int = NUM_KINDS
) -> tuple[bytes, ...]:
    """Whole requests, POST /scored_data, to be sent in turn."""
    made: list[bytes] = []
    for kind in range(num_kinds):
        plain = body(shape, kind, env_id)
        zipped = encoding == "gzip" and len(plain) >= GZIP_FROM
        content = compressed(shape, kind, env_id) if zipped else plain
        made.append(request("POST", "/scored_data", content, "gzip" if zipped else ""))
    return tuple(made)


def list_post(groups: list[bytes]) -> bytes:
    """POST /scored_data_list: many groups at once."""
    return request("POST", "/scored_data_list", b"[" + b",".join(groups) + b"]")


def request(
    method: str, path: str, content: bytes = b"", encoding: str = "", accept: str = "identity"
) -> bytes:
    """A request as bytes, with the headers of the clients' aiohttp."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Accept: */*",
        f"Accept-Encoding: {accept}",
        "User-Agent: Python/3.11 aiohttp/3.13",
    ]
    if content:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if encoding:
        lines.append(f"Content-Encoding: {encoding}")
    return "\r\n".join([*lines, "", ""]).encode() + content
