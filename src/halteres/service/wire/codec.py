"""What every body of the Tinker API has in common: its content type, its size, its compression."""

from __future__ import annotations

from io import BytesIO

import zstandard

from halteres.errors import InvalidData

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_BODY_BYTES = 256 * 2**20  # what a body may have after decompression; the SDK keeps a chunk of datums under 5 MB

MAX_JSON_BYTES = 32 * 2**20  # ... and datums as JSON, of SDKs before 0.25: whoever reads them holds Python's lock
SMALL_BYTES = 2**16  # of a body that carries neither datums nor prompts; a session's metadata are in one
PROMPT_BYTES = 2**24  # of a body with prompts, or with a custom loss
HEAD_BYTES = 512  # of a broken body: enough for the fields that come first
PIECE_BYTES = 1024  # compressed bytes that are unpacked at a time: they become 32 MiB at most


def decompressed(body: bytes, content_encoding: str | None, most: int = MAX_BODY_BYTES) -> bytes:
    """A request body as its client wrote it, of at most so many bytes."""
    data, whole = body, True
    if content_encoding == "zstd":
        try:
            data, whole = _unpacked(body, most + 1)
        except zstandard.ZstdError as error:
            raise InvalidData("The body is not valid zstd.", f"{error}.") from error
    elif content_encoding not in (None, "", "identity"):
        raise InvalidData(f"Content-Encoding '{content_encoding[:50]}' is not understood.", next="Use zstd or none.")
    if len(data) > most:
        why = f"{most // 2**10} KiB are the limit of what it holds."
        raise InvalidData("The body is too large.", why, "Send less, datums in several requests.")
    if not whole:
        raise InvalidData("The body is not valid zstd.", "Its end is missing, or something follows it.")
    return data


def head_of(body: bytes, content_encoding: str | None) -> bytes:
    """The start of a body, as much of it as can be read whatever is wrong with the rest."""
    if content_encoding != "zstd":
        return body[:HEAD_BYTES]
    try:
        return _unpacked(body, HEAD_BYTES)[0]
    except zstandard.ZstdError:
        return b""


def _unpacked(body: bytes, size: int) -> tuple[bytes, bool]:
    """Up to `size` bytes, and whether the body is one whole frame, as the SDK sends it."""
    reading = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    data, at = BytesIO(), 0  # it gives its bytes away without a copy
    while at < len(body) and data.tell() < size and not reading.eof:
        data.write(reading.decompress(body[at : at + PIECE_BYTES]))
        at += PIECE_BYTES
    data.truncate(size)
    return data.getvalue(), reading.eof and at >= len(body) and not reading.unused_data
