"""A group read at a glance is the group that the long way reads; and what clients send is read at a glance."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from halteres.trajectories.wire import glance, longhand
from halteres.trajectories.wire.contents import Outline
from halteres.trajectories.wire.scored import parse, parse_list

from .spelling import groups

quick = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


def load(element: bytes) -> Any:
    """As a strict reader reads it: what is no finite number fails."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    def number(text: str) -> float:
        assert math.isfinite(float(text)), text
        return float(text)

    return json.loads(element, parse_constant=refuse, parse_float=number)


def same(one: Any, other: Any) -> bool:
    """Equal, whether an integral number is written as one or as a float."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, float) != isinstance(other, float):
        return not isinstance(one, bool) and not isinstance(other, bool) and float(one) == float(other)
    return type(one) is type(other) and one == other


def comparable(outline: Outline) -> tuple[object, ...]:
    version = outline.version
    pairs = version if version is None or isinstance(version, int) else [tuple(pair) for pair in version]
    arrays = {name: list(lengths) for name, lengths in outline.arrays.items()}
    ours = list(outline.episodes), [tuple(span) for span in outline.spans], outline.key, outline.unsayable
    return list(outline.tokens), arrays, dict(outline.lists), outline.env_id, pairs, *ours


def check_element(element: bytes, extensions: set[str]) -> Any:
    found = load(element)
    assert set(found) == {*longhand.KEYS} | extensions
    return found


def check(body: bytes) -> bool:
    """Whether it was read at a glance; if so, nothing differs."""
    seen = glance.read(body)
    if seen is None:
        return False
    outline, element = seen
    expected, long = longhand.read(body)
    assert comparable(outline) == comparable(expected)
    extensions = {*longhand.EXTENSIONS} & {*json.loads(body)}
    assert same(check_element(element, extensions), check_element(long, extensions))
    return True


@quick
@given(groups(usual=False))
def test_a_glance_sees_what_the_long_way_sees_or_nothing(body: bytes) -> None:
    check(body)


@quick
@given(groups(usual=True))
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}')
def test_what_clients_send_is_read_at_a_glance(body: bytes) -> None:
    assert check(body)


def sampled(size: int, length: int, **extra: object) -> dict[str, object]:
    """A group with the numbers of a large vocabulary."""
    draw = random.Random(5)
    tokens = [[draw.randrange(151_644) for _ in range(length)] for _ in range(size)]
    context = length // 4
    return {
        "tokens": tokens,
        "masks": [[-100] * context + row[context:] for row in tokens],
        "scores": [draw.random() for _ in range(size)],
        "inference_logprobs": [
            [1.0] * context + [-draw.expovariate(1) * 10 ** -draw.randrange(9) for _ in row[context:]] for row in tokens
        ],
        **extra,
    }


MESSAGE = {"role": "user", "content": 'Sum [1, 2], then say "]],[[" — 💥'}


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize("size_and_length", [(16, 512), (1, 1), (4, 4096), (3, 7)])
def test_the_usual_body_makes_no_object_per_number(
    monkeypatch: pytest.MonkeyPatch, separators: tuple[str, str], size_and_length: tuple[int, int]
) -> None:
    size, length = size_and_length
    body = json.dumps(sampled(size, length), separators=separators).encode()
    expected = longhand.read(body)[0]
    monkeypatch.setattr(longhand, "read", pytest.fail)
    found = parse(body)
    assert (found.problem, found.size) == (None, size)
    assert comparable(glance.read(body)[0]) == comparable(expected)  # pyright: ignore[reportOptionalSubscript]
    (listed,) = parse_list(b"[" + body + b"]")
    assert listed == found


@pytest.mark.parametrize(
    "extra",
    [
        {"messages": [[MESSAGE, {**MESSAGE, "tool_calls": [{"x": 1e-7}]}]] * 16},
        {"messages": None, "advantages": None, "ref_logprobs": None, "images": None, "distill_token_ids": None},
        {"messages": []},
        {"overrides": [{"set_advantage_to_zero": True}] * 16, "group_overrides": {"temperature": 0.7}},
        {"generation_params": {"temperature": 1, "stop": ["[", "]]"], "seed": 2**63}},
        {"images": [{"any": [[["thing"]]]}] * 16},
        {"advantages": [[0.5] * 512] * 16, "ref_logprobs": [[-2.3841855790367e-07] * 512] * 16},
        {"env_id": 3, "policy_version": 7},
        {"distill_token_ids": [[[1, 2]] * 512] * 16, "distill_logprobs": [[[-0.5, -1e-7]] * 512] * 16},
        {"policy_version": [[3, 4]] * 16},
        {"scores": [1] * 16, "inference_logprobs": [[0] * 512] * 16},
        {"masks": [[-100] * 512] * 16},
    ],
    ids=lambda extra: "-".join(extra),
)
def test_neither_does_one_with_more_in_it(monkeypatch: pytest.MonkeyPatch, extra: dict[str, object]) -> None:
    body = json.dumps(sampled(16, 512, **extra)).encode()
    assert check(body)
    monkeypatch.setattr(longhand, "read", pytest.fail)
    found = parse(body)
    assert (found.problem, found.size, found.env_id) == (None, 16, extra.get("env_id"))
    element = load(found.element)
    assert {name: element[name] for name in extra} == extra


def test_the_last_of_two_keys_counts() -> None:
    body = b'{"tokens":[["x"]],"scores":[9],"tokens":[[1,2]],"masks":[[1,2]],"scores":[1],"env_id":3,"env_id":null}'
    found = parse(body)
    assert (found.problem, found.env_id) == (None, None)
    assert load(found.element)["tokens"] == [[1, 2]]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("inference_logprobs", "[[1e400]]", "not_finite"),
        ("inference_logprobs", "[[-Infinity]]", "not_finite"),
        ("advantages", '[["NaN"]]', "not_finite"),
        ("advantages", "[[1" + "0" * 309 + ".5]]", "not_finite"),
        ("scores", "[1e309]", "not_finite"),
        ("generation_params", '{"a":[NaN]}', "not_finite"),
        ("distill_logprobs", "[[[1e400]]]", "not_finite"),
        ("tokens", f"[[{2**63}]]", "token"),
        ("tokens", f"[[{-(2**63) - 1}]]", "token"),
        ("images", r'"\udfff"', "text"),
        ("messages", r'[[{"role":"\ud800","content":""}]]', "text"),
    ],
)
def test_what_json_cannot_say_is_a_problem_and_never_an_element(name: str, text: str, code: str) -> None:
    body = f'{{"tokens":[[1]],"masks":[[1]],"scores":[1],"{name}":{text}}}'.encode()
    found = parse(body)
    assert found.problem is not None
    assert (found.problem.code, found.element) == (code, b"null")
    (listed,) = parse_list(b"[" + body + b"]")
    assert listed.problem == found.problem


@pytest.mark.parametrize("text", [b" %s", b"%s\n\t ", b"\xef\xbb\xbf%s"])
def test_space_and_a_mark_around_a_body_are_no_part_of_it(text: bytes) -> None:
    assert parse(text % b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}').problem is None
