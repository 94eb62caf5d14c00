"""Bodies made to cost: each is answered, in time that its bytes explain."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from halteres.errors import HalteresError
from halteres.trajectories.wire.scored import parse, parse_list

MILLION = 1_000_000
LONGEST_S = 10
"""A stall of a quadratic reader takes minutes; the slowest of these takes half a second."""


def group(**texts: str) -> bytes:
    """The body of a group with these texts in it."""
    whole = {"tokens": "[[1]]", "masks": "[[1]]", "scores": "[1]", **texts}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}").encode()


COSTLY = {
    "brackets": "[" * MILLION,
    "empty rows": "[" + ",".join(["[]"] * (MILLION // 6)) + "]",
    "empty rows in a row": "[[" + ",".join(["[]"] * (MILLION // 6)) + "]]",
    "digits": "9" * MILLION,
    "a row of digits": "[[" + "9" * MILLION + "]]",
    "a fraction": "[[0." + "9" * MILLION + "]]",
    "an exponent": "[[1e-" + "9" * MILLION + "]]",
    "a large exponent": "[[1e" + "9" * MILLION + "]]",
    "rows": "[" + ",".join(["[1]"] * (MILLION // 4)) + "]",
    "one row": "[[" + ",".join(["1"] * (MILLION // 2)) + "]]",
    "space": "[[" + " " * MILLION + "1]]",
    "spaced rows": "[" + ("[1]" + " " * 200 + ",") * 5000 + "[1]]",
    "a string of brackets": '["' + "[]," * MILLION + '"]',
    "escapes": '"' + r"\u005b" * (MILLION // 6) + '"',
    "broken escapes": '"' + r"\ud800" * (MILLION // 6) + '"',
    "nested": "[" * 900 + "]" * 900,
    "nested too deeply": "[" * MILLION + "]" * MILLION,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "keys": "{" + ",".join(f'"{at}":{at}' for at in range(60_000)) + "}",
    "the same key": "{" + ",".join(['"a":1'] * 100_000) + "}",
    "a number that is none, last": "[[" + "1," * (MILLION // 4) + "NaN]]",
}


def answered(read: Callable[[bytes], object], body: bytes) -> bool:
    """Whether it was taken; a reader may refuse, or say that it nests too deeply, which routes answer with 422."""
    began = time.perf_counter()
    try:
        read(body)
    except (HalteresError, RecursionError):
        return False
    finally:
        assert time.perf_counter() - began < LONGEST_S
    return True


@pytest.mark.parametrize("name", ["tokens", "inference_logprobs", "images", "unknown"])
@pytest.mark.parametrize("costly", COSTLY)
def test_no_value_costs_more_than_its_bytes(costly: str, name: str) -> None:
    body = group(**{name: COSTLY[costly]})
    assert answered(parse, body) == answered(parse_list, b"[" + body + b"]")


@pytest.mark.parametrize("costly", COSTLY)
def test_neither_does_a_whole_body(costly: str) -> None:
    body = COSTLY[costly].encode()
    assert not answered(parse, body)
    assert not answered(parse_list, body)


def test_a_million_rows_are_read_to_the_end() -> None:
    rows = "[" + ",".join(["[1]"] * MILLION) + "]"
    found = parse(group(tokens=rows, masks=rows, scores="[" + ",".join(["1"] * MILLION) + "]"))
    assert (found.problem, found.size) == (None, MILLION)


def test_many_keys_that_come_again_and_again_cost_no_more() -> None:
    again = ",".join(['"tokens":[[1]],"messages":[],"scores":[1]'] * 10_000)
    assert parse(group()[:-1] + b"," + again.encode() + b"}").problem is None
    assert len(parse_list(b"[" + b",".join([group()] * 5000) + b"]")) == 5000
