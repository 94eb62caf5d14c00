"""What every body of the Tinker API has in common: its content type, its size, its compression.

Owns: the names of content types, zstd with a cap on what it may grow to.
Never: knows a message.
"""

from __future__ import annotations

import zstandard

from halteres.errors import InvalidData

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_BODY_BYTES = 256 * 2**20
"""What a body may have after decompression; the SDK keeps a chunk of datums under 5 MB."""

HEAD_BYTES = 512
"""Of a broken body: enough for the fields that come first."""

PIECE_BYTES = 1024
"""Compressed bytes that are unpacked at a time: they become 32 MiB at most."""


def decompressed(body: bytes, content_encoding: str | None) -> bytes:
    """A request body as its client wrote it.

    Raises:
        InvalidData: not zstd, broken, or larger than MAX_BODY_BYTES.
    """
    if content_encoding in (None, "", "identity"):
        return body
    if content_encoding != "zstd":
        raise InvalidData(f"Content-Encoding '{content_encoding[:50]}' is not understood.", next="Use zstd or none.")
    try:
        data, whole = _unpacked(body, MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise InvalidData("The body is not valid zstd.", f"{error}.") from error
    if len(data) > MAX_BODY_BYTES:
        raise InvalidData(
            "The body is too large.",
            f"It grows beyond {MAX_BODY_BYTES // 2**20} MiB when decompressed.",
            "Send the datums in several requests.",
        )
    if not whole:
        raise InvalidData("The body is not valid zstd.", "Its end is missing, or something follows it.")
    return data


def head_of(body: bytes, content_encoding: str | None) -> bytes:
    """The start of a body, as much of it as can be read whatever is wrong with the rest."""
    if content_encoding != "zstd":
        return body
    try:
        return _unpacked(body, HEAD_BYTES)[0]
    except zstandard.ZstdError:
        return b""


def _unpacked(body: bytes, size: int) -> tuple[bytes, bool]:
    """Up to `size` bytes, and whether the body is one whole frame, as the SDK sends it."""
    reading = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    parts: list[bytes] = []
    at, got = 0, 0
    while at < len(body) and got < size and not reading.eof:
        parts.append(reading.decompress(body[at : at + PIECE_BYTES]))
        at, got = at + PIECE_BYTES, got + len(parts[-1])
    return b"".join(parts)[:size], reading.eof and at >= len(body) and not reading.unused_data
