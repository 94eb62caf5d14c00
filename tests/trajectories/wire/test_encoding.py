"""Gzip both ways: what the standard's library writes and reads, ours reads and writes; what is
broken is told.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib

import pytest

from halteres.trajectories.http import MOST_MEMBERS, BadBody, TooLarge, deflate, inflate

TEXTS = [
    b"",
    b"x",
    b"0" * 100_000,
    json.dumps([[(7919 * at) % 151_644 for at in range(512)]] * 4).encode(),
    random.Random(1).randbytes(70_000),
    "é💥".encode() * 50,
]


def outcome(packed: bytes, limit: int = 10**6) -> bytes | str:
    """What `inflate` makes of it."""
    try:
        return inflate(packed, limit)
    except TooLarge:
        return "too large"
    except BadBody as error:
        return "many members" if "members" in str(error) else "broken"


def reference(packed: bytes, limit: int = 10**6) -> bytes | str:
    """The same with zlib, for one member."""
    stream = zlib.decompressobj(wbits=31)
    try:
        text = stream.decompress(packed, limit + 1)
    except zlib.error:
        return "broken"
    if len(text) > limit:
        return "too large"
    return text if stream.eof and not stream.unused_data.strip(b"\0") else "broken"


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_what_one_packs_the_other_unpacks(text: bytes) -> None:
    assert gzip.decompress(deflate(text)) == zlib.decompress(deflate(text), wbits=31) == text
    for level in (0, 1, 6, 9):
        assert inflate(gzip.compress(text, level)) == text
    for strategy in (zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        stream = zlib.compressobj(6, wbits=31, strategy=strategy)
        assert inflate(stream.compress(text) + stream.flush()) == text


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_the_limit_is_met_exactly(text: bytes) -> None:
    for packed in (gzip.compress(text), deflate(text)):
        assert outcome(packed, len(text)) == text
        assert outcome(packed * 2, 2 * len(text)) == text * 2
        if text:
            assert (
                outcome(packed, len(text) - 1)
                == outcome(packed * 2, 2 * len(text) - 1)
                == "too large"
            )


def test_a_body_cut_anywhere_is_broken() -> None:
    for packed in (gzip.compress(TEXTS[3]), deflate(TEXTS[5])):
        assert {outcome(packed[:at]) for at in range(len(packed))} == {"broken"}
        assert {outcome(packed + packed[:at]) for at in range(1, min(60, len(packed)))} == {
            "broken"
        }


def test_a_byte_that_fell_over_is_found_wherever_it_is() -> None:
    """As zlib finds it: but for what the header says of its sender, the checksum covers
    everything.
    """
    text = TEXTS[5]
    for packed in (gzip.compress(text, mtime=0), deflate(text)):
        for at in range(len(packed)):
            for bit in range(8):
                damaged = packed[:at] + bytes([packed[at] ^ 1 << bit]) + packed[at + 1 :]
                found = outcome(damaged)
                # reserved flags, which the faster library passes over
                if (at, bit) not in ((3, 5), (3, 6), (3, 7)):
                    assert found == reference(damaged), (at, bit)
                assert found in (text, "broken")


@pytest.mark.parametrize("field", ["extra", "name", "comment", "checksum", "all"])
def test_every_field_a_header_may_have_is_read(field: str) -> None:
    flags = {"extra": 4, "name": 8, "comment": 16, "checksum": 2, "all": 31}[field]
    packed = gzip.compress(b"abc", mtime=0)
    header = bytearray(packed[:10])
    header[3] = flags
    header += b"\x05\x00hello" if flags & 4 else b""
    header += b"name\0" if flags & 8 else b""
    header += b"comment\0" if flags & 16 else b""
    header += (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little") if flags & 2 else b""
    assert outcome(bytes(header) + packed[10:]) == reference(bytes(header) + packed[10:]) == b"abc"
    assert outcome(bytes(header[:-1])) == "broken"


@pytest.mark.parametrize(
    "garbage",
    [b"x", b"garbage" * 9, b"\x1f", b"\x1f\x8b", b"\0\0x", b"{}", bytes(9) + b"\x1f\x8b\x08"],
)
def test_what_follows_the_last_member_must_be_nothing(garbage: bytes) -> None:
    for text in TEXTS:
        assert (
            outcome(gzip.compress(text) + garbage) == outcome(deflate(text) + garbage) == "broken"
        )


@pytest.mark.parametrize("padding", [b"", b"\0", bytes(7), bytes(5000)])
def test_members_stand_side_by_side_with_zeros_between(padding: bytes) -> None:
    packed = (
        padding.join(
            [gzip.compress(b"ab"), deflate(b""), gzip.compress(b"c", 0), deflate(TEXTS[4])]
        )
        + padding
    )
    assert outcome(packed) == b"abc" + TEXTS[4]
    members = [gzip.compress(b"%x" % at) for at in range(MOST_MEMBERS)]
    assert outcome(padding.join(members) + padding) == b"0123456789abcdef"
    assert outcome(padding.join([*members, deflate(b"")])) == "many members"


@pytest.mark.parametrize(
    "packed", [b"", b"\0", b"{}", b"\x1f\x8b", zlib.compress(b"{}"), zlib.compress(b"{}")[2:-4]]
)
def test_what_is_no_gzip_is_told(packed: bytes) -> None:
    with pytest.raises(BadBody, match="Invalid gzip payload"):
        inflate(packed)


def test_a_bomb_costs_what_the_limit_allows() -> None:
    """Ten megabytes of ten kilobytes, and a bomb in a bomb's second member."""
    bomb = gzip.compress(bytes(10_000_000))
    assert len(bomb) < 12_000
    assert outcome(bomb, 10_000) == outcome(gzip.compress(b"1") + bomb, 10_000) == "too large"
    assert outcome(gzip.compress(bomb), 2 * len(bomb)) == bomb
