"""Bodies of groups: what is kept of them is what they say, whichever way they are read."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from halteres.trajectories import posted_group
from halteres.trajectories.posted_group import (
    EXTENSIONS,
    KEYS,
    MOST_VALUES,
    parse,
    parse_list,
    read_leniently,
    read_strictly,
)
from halteres.trajectories.schema import Unprocessable

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
        return (
            not isinstance(one, bool) and not isinstance(other, bool) and float(one) == float(other)
        )
    return type(one) is type(other) and one == other


def check(body: bytes) -> bool:
    """Whether it was read strictly; if so, nothing differs from what the lenient reader makes of
    it.
    """
    if (strictly := read_strictly(body)) is None:
        return False
    (group, element), (expected, written) = strictly, read_leniently(body)
    assert written is not None
    assert all(
        same(getattr(group, name), getattr(expected, name)) for name in group.__struct_fields__
    )
    found = load(element)
    assert set(found) == {*KEYS} | ({*EXTENSIONS} & {*json.loads(body)})
    assert same(found, load(written))
    return True


@quick
@given(groups(usual=False))
def test_what_is_read_strictly_is_what_the_lenient_reader_reads(body: bytes) -> None:
    check(body)


@quick
@given(groups(usual=True))
@example(b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}')
def test_what_clients_send_is_kept_as_it_was_written(body: bytes) -> None:
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
            [1.0] * context
            + [-draw.expovariate(1) * 10 ** -draw.randrange(9) for _ in row[context:]]
            for row in tokens
        ],
        **extra,
    }


MESSAGE = {"role": "user", "content": 'Sum [1, 2], then say "]],[[" — 💥'}


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize("size_and_length", [(16, 512), (1, 1), (4, 4096), (3, 7)])
def test_the_usual_body_needs_no_coercion(
    monkeypatch: pytest.MonkeyPatch, separators: tuple[str, str], size_and_length: tuple[int, int]
) -> None:
    size, length = size_and_length
    body = json.dumps(sampled(size, length), separators=separators).encode()
    monkeypatch.setattr(posted_group, "read_leniently", pytest.fail)
    found = parse(body)
    assert (found.problem, found.size) == (None, size)
    (listed,) = parse_list(b"[" + body + b"]")
    assert listed == found


@pytest.mark.parametrize(
    "extra",
    [
        {"messages": [[MESSAGE, {**MESSAGE, "tool_calls": [{"x": 1e-7}]}]] * 16},
        {
            "messages": None,
            "advantages": None,
            "ref_logprobs": None,
            "images": None,
            "distill_token_ids": None,
        },
        {"messages": []},
        {
            "overrides": [{"set_advantage_to_zero": True}] * 16,
            "group_overrides": {"temperature": 0.7},
        },
        {"generation_params": {"temperature": 1, "stop": ["[", "]]"], "seed": 2**63}},
        {"images": [{"any": [[["thing"]]]}] * 16},
        {"advantages": [[0.5] * 512] * 16, "ref_logprobs": [[-2.3841855790367e-07] * 512] * 16},
        {"env_id": 3, "policy_version": 7},
        {
            "distill_token_ids": [[[1, 2]] * 512] * 16,
            "distill_logprobs": [[[-0.5, -1e-7]] * 512] * 16,
        },
        {"policy_version": [[3, 4]] * 16},
        {"scores": [1] * 16, "inference_logprobs": [[0] * 512] * 16},
        {"masks": [[-100] * 512] * 16},
    ],
    ids=lambda extra: "-".join(extra),
)
def test_neither_does_one_with_more_in_it(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, object]
) -> None:
    body = json.dumps(sampled(16, 512, **extra)).encode()
    assert check(body)
    monkeypatch.setattr(posted_group, "read_leniently", pytest.fail)
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
def test_what_json_cannot_say_is_a_problem_and_never_an_element(
    name: str, text: str, code: str
) -> None:
    body = f'{{"tokens":[[1]],"masks":[[1]],"scores":[1],"{name}":{text}}}'.encode()
    found = parse(body)
    assert found.problem is not None
    assert (found.problem.code, found.element) == (code, b"null")
    (listed,) = parse_list(b"[" + body + b"]")
    assert listed.problem == found.problem


@pytest.mark.parametrize("text", [b" %s", b"%s\n\t ", b"\xef\xbb\xbf%s"])
def test_space_and_a_mark_around_a_body_are_no_part_of_it(text: bytes) -> None:
    assert parse(text % b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}').problem is None


def body(**texts: str) -> bytes:
    """Two sequences of one token, with these texts in it."""
    whole = {"tokens": "[[1],[2]]", "masks": "[[1],[2]]", "scores": "[1,2]", **texts}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}").encode()


def without(name: str) -> bytes:
    return json.dumps(
        {key: value for key, value in json.loads(body()).items() if key != name}
    ).encode()


SHAPES = [
    "1",
    "1,2",
    "[]",
    "[1]",
    "[1,2]",
    "[1,2,3]",
    "[[1]]",
    "[1,[2]]",
    "[[1],2]",
    "[[],1]",
    '"]"',
    "null",
    "{}",
]


def test_every_small_array_is_taken_or_refused_as_its_shape_says() -> None:
    """All arrays of up to three of these: brackets, commas and other values in every odd place."""
    for parts in (parts for num in range(4) for parts in itertools.product(SHAPES, repeat=num)):
        text = f"[{','.join(parts)}]"
        array = json.loads(text)
        usual = all(
            isinstance(row, list) and all(type(number) is int for number in row) for row in array
        )
        for name in ("tokens", "masks", "inference_logprobs"):
            found = read_strictly(body(**{name: text}))
            assert (found is not None) == usual, text
            assert found is None or getattr(found[0], name) == array


@pytest.mark.parametrize(
    "texts",
    [
        {"masks": "[[1],[[2]]]", "images": r'"\u005b"'},
        {"masks": "[[1],[[2]]]", "images": r'{"a":["\u005B"]}'},
        {"tokens": "[[[1]],[2]]", "messages": r'[[{"role":"\u005b","content":""}],[]]'},
        {"inference_logprobs": "[[-1.5],[[-1]]]", "generation_params": r'{"\u005b":1}'},
        {"scores": "[[1],2]", "distill_token_ids": "[[5],[[6]]]"},
        {"masks": "[[1],[[2]]]", "distill_token_ids": "[[5],[[6]]]"},
        {"distill_token_ids": "[[5],[[[6]]]]"},
        {"distill_logprobs": "[[[-1], -1],[[[-2]]]]"},
    ],
)
def test_a_nested_row_is_refused_whatever_stands_beside_it(texts: dict[str, str]) -> None:
    assert read_strictly(body(**texts)) is None
    with pytest.raises(Unprocessable):
        parse(body(**texts))


@pytest.mark.parametrize(
    "text", [r'"\\u005b"', r'"\\\u005b"', r'"\u015b[[]\n"', '"[[["', '{"[[": "]"}', r'["\"[", []]']
)
def test_brackets_in_texts_are_text(text: str) -> None:
    for name, value in (("images", text), ("generation_params", f'{{"x":{text}}}')):
        found = parse(body(**{name: value}))
        assert found.problem is None
        assert load(found.element)[name] == json.loads(value)
        assert check(body(**{name: value}))


@pytest.mark.parametrize("name", ["tokens", "masks", "scores"])
def test_what_is_required_must_be_there(name: str) -> None:
    for lacking in (without(name), body(**{name: "null"})):
        assert read_strictly(lacking) is None
        with pytest.raises(Unprocessable) as refused:
            parse(lacking)
        assert refused.value.problems[0]["loc"] == ["body", name]


@pytest.mark.parametrize("text", ['"x"', "1", "1.5", "true", '{"a":[1]}', "{}"])
@pytest.mark.parametrize(
    "name", ["tokens", "masks", "scores", "advantages", "messages", "overrides", "distill_logprobs"]
)
def test_what_is_no_array_is_refused(name: str, text: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        parse(body(**{name: text}))
    assert refused.value.problems[0]["loc"] == ["body", name]


@pytest.mark.parametrize(
    "texts",
    [
        {"tokens": "[[1.0],[2]]"},
        {"masks": '[["1"],[2]]'},
        {"inference_logprobs": "[[1e400],[2]]"},
        {"inference_logprobs": "[[NaN],[2]]"},
        {"inference_logprobs": '[["-0.5"],[2]]'},
        {"scores": "[true,2]"},
        {"env_id": "1.0"},
        {"policy_version": '"3"'},
        {"images": '["\\ud800"]'},
    ],
)
def test_coercions_are_left_to_the_lenient_reader(texts: dict[str, str]) -> None:
    assert read_strictly(body(**texts)) is None
    assert parse(body(**texts)).size == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text + b"x",
        lambda text: text + b"{}",
        lambda text: text[:-1],
        lambda text: text[1:],
        lambda text: text.replace(b"[2]", b"[02]"),
        lambda text: text.replace(b"[2]", b"[2,]"),
        lambda text: text.replace(b"[2]", b"[+2]"),
        lambda text: text.replace(b"[2]", b"[-]"),
        lambda text: text.replace(b"[2]", b"[2.]"),
        lambda text: text.replace(b"[2]", b"[2e-]"),
        lambda text: text.replace(b"],[", b"][", 1),
        lambda text: text.replace(b"],[", b"],,[", 1),
        lambda text: text.replace(b'"masks"', b'"ma\nsks"'),
        lambda text: text.replace(b'"masks"', b'"images":"\xff","masks"'),
        lambda text: text.replace(b'"masks"', rb'"images":"\x","masks"'),
    ],
)
def test_what_is_no_json_is_refused(damage: object) -> None:
    assert callable(damage)
    assert read_strictly(damage(body())) is None
    with pytest.raises(Unprocessable):
        parse(damage(body()))


@pytest.mark.parametrize("name", ["images", "generation_params", "overrides", "messages"])
def test_what_nests_deeper_than_a_client_can_read_is_refused_and_never_kept(name: str) -> None:
    for depth in (150, 250, 800, 1000, 1018, 1021, 1022, 1023, 1024, 5000):
        deep = "[" * depth + "]" * depth
        text = {
            "generation_params": f'{{"x":{deep}}}',
            "overrides": f'[{{"x":{deep}}},{{}}]',
            "messages": f'[[{{"role":"","content":{deep}}}],[]]',
        }.get(name, deep)
        if depth == 150:
            load(parse(body(**{name: text})).element)
            continue
        with pytest.raises(RecursionError):
            parse(body(**{name: text}))


def test_an_unknown_field_is_dropped_or_refused_however_deep_it_nests() -> None:
    """From which depth it is refused is the interpreter's affair: 1,000 up to Python 3.11, about
    10,000 after it.
    """
    load(parse(body(unknown="[" * 900 + "]" * 900)).element)
    for depth in (1024, 5000, 20_000):
        with contextlib.suppress(RecursionError):
            load(parse(body(unknown="[" * depth + "]" * depth)).element)
    with pytest.raises(RecursionError):
        parse(body(unknown="[" * 1_000_000 + "]" * 1_000_000))


def test_threads_get_each_their_own_answer() -> None:
    bodies = [body(env_id=str(number), images=f'"{"x" * 5000 * number}"') for number in range(8)]
    wrong: list[int] = []

    def read(number: int) -> None:
        for _ in range(40):
            if parse(bodies[number]).env_id != number:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "text", ["[[-0],[0]]", "[[-100],[999999999999999999]]", f"[[{2**63 - 1}],[{-(2**63)}]]"]
)
def test_any_id_of_64_bits_is_kept_as_it_was_written(text: str) -> None:
    assert check(body(tokens=text, masks=text))


def test_a_key_may_be_written_with_escapes() -> None:
    assert check(body().replace(b'"tokens"', rb'"\u0074okens"'))
    twice = body().replace(b'"masks"', rb'"\u0074okens":[[9],[9]],"masks"')
    assert load(parse(twice).element)["tokens"] == [[9], [9]]


@pytest.mark.parametrize(
    "more", [{"unknown": '{"a":[[1]]}'}, {"halteres_key": '"k"'}, {"halteres_key": "null"}]
)
def test_keys_beyond_an_elements_are_cut_out(more: dict[str, str]) -> None:
    """Our own clients send `halteres_key` with every group of a list."""
    found, usual = read_strictly(body(**more)), read_strictly(body())
    assert found is not None and usual is not None
    assert found[1] == usual[1]
    assert parse(body(**more)).key == ("k" if '"k"' in more.values() else None)


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    found = read_strictly(body()[:-1] + b',"scores":[0.5,7]}')
    assert found is not None
    assert load(found[1])["scores"] == [0.5, 7]
    assert found[1].count(b'"scores"') == 1


def test_what_would_become_too_many_objects_is_refused() -> None:
    """Not finite, so only the lenient reader could say what is wrong, at 150 bytes of memory for
    each value.
    """
    rows = b"[" + b"[1]," * (MOST_VALUES // 2) + b"[1]]"
    with pytest.raises(Unprocessable, match="value by value"):
        parse(b'{"tokens":' + rows + b',"masks":' + rows + b',"scores":[NaN]}')
