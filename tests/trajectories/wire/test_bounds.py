"""Bodies made to cost: each is answered, in time that its bytes explain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from halteres.errors import HalteresError
from halteres.trajectories import posted_group
from halteres.trajectories.posted_group import (
    LARGE,
    MANY,
    MOST_GROUPS,
    MOST_PARTS,
    parse,
    parse_list,
)
from halteres.trajectories.schema import Unprocessable

LOTS = 300_000
LONGEST_S = 10
"""A stall of a quadratic reader takes minutes; the slowest of these takes half a second."""


def group(**texts: str) -> bytes:
    """The body of a group with these texts in it."""
    whole = {"tokens": "[[1]]", "masks": "[[1]]", "scores": "[1]", **texts}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}").encode()


COSTLY = {
    "brackets": "[" * LOTS,
    "empty rows": "[" + ",".join(["[]"] * (LOTS // 6)) + "]",
    "empty rows in a row": "[[" + ",".join(["[]"] * (LOTS // 6)) + "]]",
    "digits": "9" * LOTS,
    "a row of digits": "[[" + "9" * LOTS + "]]",
    "a fraction": "[[0." + "9" * LOTS + "]]",
    "an exponent": "[[1e-" + "9" * LOTS + "]]",
    "a large exponent": "[[1e" + "9" * LOTS + "]]",
    "rows": "[" + ",".join(["[1]"] * (LOTS // 4)) + "]",
    "one row": "[[" + ",".join(["1"] * (LOTS // 2)) + "]]",
    "space": "[[" + " " * LOTS + "1]]",
    "spaced rows": "[" + ("[1]" + " " * 200 + ",") * 5000 + "[1]]",
    "a string of brackets": '["' + "[]," * LOTS + '"]',
    "escapes": '"' + r"\u005b" * (LOTS // 6) + '"',
    "broken escapes": '"' + r"\ud800" * (LOTS // 6) + '"',
    "nested": "[" * 900 + "]" * 900,
    "nested too deeply": "[" * LOTS + "]" * LOTS,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "keys": "{" + ",".join(f'"{at}":{at}' for at in range(60_000)) + "}",
    "the same key": "{" + ",".join(['"a":1'] * 100_000) + "}",
    "a number that is none, last": "[[" + "1," * (LOTS // 4) + "NaN]]",
}


def answered(read: Callable[[bytes], object], body: bytes) -> bool:
    """Whether it was taken; a reader may refuse, or say that it nests too deeply, which routes
    answer with 422.
    """
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


def test_many_rows_are_read_to_the_end() -> None:
    rows = "[" + ",".join(["[1]"] * LOTS) + "]"
    found = parse(group(tokens=rows, masks=rows, scores="[" + ",".join(["1"] * LOTS) + "]"))
    assert (found.problem, found.size) == (None, LOTS)


def test_many_keys_that_come_again_and_again_cost_no_more() -> None:
    again = ",".join(['"tokens":[[1]],"messages":[],"scores":[1]'] * 10_000)
    assert parse(group()[:-1] + b"," + again.encode() + b"}").problem is None
    assert len(parse_list(b"[" + b",".join([group()] * 5000) + b"]")) == 5000


@pytest.mark.parametrize("last", [b"{}", b"NaN"])  # read by msgspec, and by Python
def test_a_list_holds_so_many_groups_and_no_more(last: bytes) -> None:
    few = b"[" + b",".join([b"{}"] * (MOST_GROUPS - 1) + [last]) + b"]"
    with pytest.raises(Unprocessable, match="Field required"):
        parse_list(few)
    with pytest.raises(
        Unprocessable, match=f"at most {MOST_GROUPS} groups, not {MOST_GROUPS + 1}: send several"
    ):
        parse_list(few[:-1] + b",{}]")


NUMBERS = ",".join(["1"] * 20_000)
ONE_ROW = {"tokens": f"[[{NUMBERS}]]", "masks": f"[[{NUMBERS}]]"}


@pytest.mark.parametrize(
    ("body", "in_thread"),
    [
        (group(), False),
        (group(scores="[true]"), False),
        (group(**ONE_ROW), False),
        (group(**ONE_ROW, scores="[true]"), True),
        (group(images='"' + "x" * LARGE + '"'), True),
    ],
    ids=["small", "unusual", "longer", "long and unusual", "large"],
)
async def test_what_takes_long_is_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, body: bytes, in_thread: bool
) -> None:
    threads = seen_reading(monkeypatch)
    assert await posted_group.read(body, "k") == parse(body, "k")
    assert (threads[-2] != "MainThread", threads[-1]) == (in_thread, "MainThread")


@pytest.mark.parametrize(("num_groups", "in_thread"), [(1, False), (MANY, False), (MANY + 1, True)])
async def test_many_groups_are_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, num_groups: int, in_thread: bool
) -> None:
    threads, body = seen_reading(monkeypatch), b"[" + b",".join([group()] * num_groups) + b"]"
    assert await posted_group.read_list(body) == [parse(group())] * num_groups
    assert {name != "MainThread" for name in threads[:num_groups]} == {in_thread}


def seen_reading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which a group was read to its end, strictly or leniently."""
    threads = list[str]()

    def watched(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def reader(body: bytes) -> Any:
            if (found := read(body)) is not None:
                threads.append(threading.current_thread().name)
            return found

        return reader

    for name in ("read_strictly", "read_leniently"):
        monkeypatch.setattr(posted_group, name, watched(getattr(posted_group, name)))
    return threads


MANY_PARTS = 2 * MOST_PARTS

BOMBS = {
    "empty rows": group(tokens="[" + "[]," * MANY_PARTS + "[]]"),
    "empty objects": group(overrides="[" + "{}," * MANY_PARTS + "{}]"),
    "anything": group(images="[" + "[]," * MANY_PARTS + "[]]"),
    "fields": group(group_overrides="{" + '"":1,' * MANY_PARTS + '"":1}'),
    "unknown": group(unknown="[" + "{}," * MANY_PARTS + "{}]"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_body_of_millions_of_lists_or_objects_is_refused_before_one_is_made(bomb: str) -> None:
    """Sixteen megabytes of them held everybody's answers for twelve seconds."""
    for read, body in ((parse, BOMBS[bomb]), (parse_list, b"[" + BOMBS[bomb] + b"]")):
        with pytest.raises(Unprocessable) as refused:
            read(body)
        assert refused.value.problems[0]["loc"] == ["body"]


@pytest.mark.parametrize("item", ["{}", "1", '""', "[]", "null", '{"tokens":1}'])
def test_a_long_list_of_what_is_no_group_ends_at_its_first_item(item: str) -> None:
    body = f"[{','.join([item] * 1_000_000)}]".encode()
    with pytest.raises(Unprocessable) as refused:
        parse_list(body)
    assert refused.value.problems[0]["loc"][:1] == ["body"]
    assert len(refused.value.problems) == 1


def test_a_text_may_hold_as_many_brackets_as_it_likes() -> None:
    text = r"\"[{:" * MOST_PARTS
    body = group(messages=f'[[{{"role":"user","content":"{text}"}}]]')
    assert len(body) > 2 * MOST_PARTS
    assert parse(body).problem is None
    assert [one.problem for one in parse_list(b"[" + body + b"]")] == [None]
