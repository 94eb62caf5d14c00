"""Bodies that are read at a glance in part of their shape only: each must be left to the long way, none misread."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading

import pytest

from halteres.trajectories.wire import glance, longhand
from halteres.trajectories.wire.schema import Unprocessable
from halteres.trajectories.wire.scored import parse

from .test_readers import check, load


def body(**texts: str) -> bytes:
    """Two sequences of one token, with these texts in it."""
    whole = {"tokens": "[[1],[2]]", "masks": "[[1],[2]]", "scores": "[1,2]", **texts}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}").encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in json.loads(body()).items() if key != name}).encode()


SHAPES = ["1", "1,2", "[]", "[1]", "[1,2]", "[1,2,3]", "[[1]]", "[1,[2]]", "[[1],2]", "[[],1]", '"]"', "null", "{}"]


def test_every_small_array_is_measured_or_left_and_never_mismeasured() -> None:
    """All arrays of up to three of these: brackets, commas and other values in every odd place."""
    num_read = 0
    for num in range(4):
        for parts in itertools.product(SHAPES, repeat=num):
            text = f"[{','.join(parts)}]"
            array = json.loads(text)
            usual = all(isinstance(row, list) and all(type(number) is int for number in row) for row in array)
            for name in ("tokens", "masks", "inference_logprobs"):
                found = glance.read(body(**{name: text}))
                assert (found is not None) == usual, text
                if found:
                    lengths = found[0].tokens if name == "tokens" else found[0].arrays.get(name, [])
                    assert lengths == [len(row) for row in array]
                    num_read += 1
    assert num_read == 3 * (1 + 4 + 4**2 + 4**3)


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
def test_a_nested_row_is_not_hidden_by_brackets_missing_elsewhere(texts: dict[str, str]) -> None:
    assert glance.read(body(**texts)) is None
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
        assert load(longhand.read(body(**{name: value}))[1]) == load(found.element)


@pytest.mark.parametrize("name", ["tokens", "masks", "scores"])
def test_what_is_required_must_be_there(name: str) -> None:
    for lacking in (without(name), body(**{name: "null"})):
        assert glance.read(lacking) is None
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
        {"masks": f"[[{2**63}],[2]]"},
        {"inference_logprobs": "[[1e400],[2]]"},
        {"inference_logprobs": "[[NaN],[2]]"},
        {"inference_logprobs": '[["-0.5"],[2]]'},
        {"scores": "[true,2]"},
        {"scores": f"[{10**30},2]"},
        {"env_id": "1.0"},
        {"policy_version": '"3"'},
        {"images": str(10**30)},
        {"images": '["\\ud800"]'},
    ],
)
def test_coercions_are_left_to_the_long_way(texts: dict[str, str]) -> None:
    assert glance.read(body(**texts)) is None
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
def test_what_is_no_json_is_refused_by_both(damage: object) -> None:
    assert callable(damage)
    assert glance.read(damage(body())) is None
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
    """From which depth it is refused is the interpreter's affair: 1,000 up to Python 3.11, about 10,000 after it."""
    load(parse(body(unknown="[" * 900 + "]" * 900)).element)
    for depth in (1024, 5000, 20_000):
        with contextlib.suppress(RecursionError):
            load(parse(body(unknown="[" * depth + "]" * depth)).element)
    with pytest.raises(RecursionError):
        parse(body(unknown="[" * 1_000_000 + "]" * 1_000_000))


def test_a_body_that_was_unusual_does_not_keep_the_next_from_being_read() -> None:
    """The parser's memory is used again, which it allows only when nothing holds the last document."""
    for unusual in (
        body(masks="[[1],[[2]]]"),
        body(scores='"x"'),
        body(messages='[[{"role":1}],[]]'),
        b"{",
        body(x="1"),
    ):
        held = None
        try:
            parse(unusual)
        except Unprocessable as refused:
            held = refused
        assert glance.read(body()) is not None, held


def test_threads_get_each_their_own_answer() -> None:
    """They share a parser; who finds it busy reads the long way."""
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


@pytest.mark.parametrize("text", ["[[-0],[0]]", "[[-100],[999999999999999999]]", f"[[{2**63 - 1}],[{-(2**63)}]]"])
def test_any_id_of_64_bits_is_read_at_a_glance(text: str) -> None:
    assert check(body(tokens=text, masks=text))


def test_a_key_may_be_written_with_escapes() -> None:
    assert check(body().replace(b'"tokens"', rb'"\u0074okens"'))
    twice = body().replace(b'"masks"', rb'"\u0074okens":[[9],[9]],"masks"')
    assert load(parse(twice).element)["tokens"] == [[9], [9]]


@pytest.mark.parametrize("more", [{"unknown": '{"a":[[1]]}'}, {"halteres_key": '"k"'}, {"halteres_key": "null"}])
def test_keys_beyond_an_elements_are_cut_out_at_a_glance(more: dict[str, str]) -> None:
    """Our own clients send `halteres_key` with every group of a list."""
    found, usual = glance.read(body(**more)), glance.read(body())
    assert found is not None and usual is not None
    assert load(found[1]) == load(usual[1])
    assert (found[0].tokens, found[0].key) == (usual[0].tokens, "k" if '"k"' in more.values() else None)


def test_of_a_key_that_comes_twice_the_last_counts_at_a_glance() -> None:
    twice = body()[:-1] + b',"scores":[0.5,7]}'
    found = glance.read(twice)
    assert found is not None
    assert load(found[1])["scores"] == [0.5, 7]


def test_what_would_become_too_many_objects_is_refused() -> None:
    """Not finite, so only the long way could say what is wrong; 40 bytes of memory and more for each of its bytes."""
    rows = b"[" + b"[1]," * (longhand.MOST_VALUES // 2) + b"[1]]"
    with pytest.raises(Unprocessable, match="value by value"):
        parse(b'{"tokens":' + rows + b',"masks":' + rows + b',"scores":[NaN]}')
