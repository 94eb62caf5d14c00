"""What the original takes for a number is one here; names that are not ours lose nobody a group."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halteres.trajectories.posted_group import Scored, parse, parse_list
from halteres.trajectories.schema import Registration, Unprocessable, decode

TRAINER = b'"wandb_group":"","wandb_project":"","checkpoint_dir":"","num_steps":1,"save_checkpoint_interval":1'


def posted(**changes: Any) -> Scored:
    """A group of one sequence of one token, posted with these changes."""
    return parse(json.dumps({"tokens": [[1]], "masks": [[1]], "scores": [1.0], **changes}).encode())


def kept(name: str, value: Any) -> Any:
    found = posted(**{name: value})
    assert found.problem is None
    return json.loads(found.element)[name]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(
            (" 1 ", 1),
            ("\t1\n", 1),
            ("+1", 1),
            ("-1", -1),
            ("1_000", 1000),
            ("1.0", 1),
            (" 1.000", 1),
            ("1_0.0", 10),
        ),
        *(("01", 1), ("00", 0), ("-0", 0), (True, 1), (False, 0), (2.0, 2), ("\xa01", 1)),
    ],
)
@pytest.mark.parametrize("name", ["tokens", "masks"])
def test_integers_are_spelt_as_for_the_original(name: str, text: object, number: int) -> None:
    assert kept(name, [[text]]) == [[number]]
    assert posted(env_id=text).env_id == (number if number >= 0 else None)
    assert kept("distill_token_ids", [[[text, 7]]]) == [[[number, 7]]]


@pytest.mark.parametrize(
    "text",
    [
        "- 1",
        "_1",
        "1__0",
        "1_",
        "1.",
        "1.5",
        ".0",
        "0x1",
        "",
        "\u0661",
        "None",
        "+-1",
        1.5,
        None,
        {},
        [1],
    ],
)
def test_what_it_does_not_take_is_refused(text: object) -> None:
    for name in ("tokens", "masks"):
        with pytest.raises(Unprocessable) as refused:
            posted(**{name: [[7, text]]})
        assert refused.value.problems[0]["loc"] == ["body", name, 0, 1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 2 ", 2.0),
        ("1_000", 1000.0),
        ("1e5 ", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e1_0", 1e10),
        (True, 1.0),
        ("-1", -1.0),
    ],
)
@pytest.mark.parametrize(
    "name", ["scores", "advantages", "inference_logprobs", "ref_logprobs", "distill_logprobs"]
)
def test_so_are_numbers(name: str, text: object, number: float) -> None:
    nested: Any = {"scores": [text], "distill_logprobs": [[[text]]]}.get(name, [[text]])
    found = kept(name, nested)
    while isinstance(found, list):
        (found,) = found  # pyright: ignore[reportUnknownVariableType]
    assert found == number


@pytest.mark.parametrize("text", [" NaN ", "+nan", "-inf", "Infinity", "1" * 400])
def test_a_text_that_means_no_finite_number_sets_the_group_aside(text: str) -> None:
    problem = posted(advantages=[[text]]).problem
    assert problem is not None and problem.code == "not_finite"


@pytest.mark.parametrize("text", ["0x1p3", "\u0661", "x", "", "- 1", "_1"])
def test_a_text_that_means_no_number_is_refused(text: str) -> None:
    with pytest.raises(Unprocessable):
        posted(scores=[text])


def test_texts_that_are_meant_as_texts_stay() -> None:
    extra = {
        "messages": [[{"role": " 1 ", "content": True}]],
        "generation_params": {"a": [" 1 ", True]},
        "images": [True, " 2 "],
        "overrides": [{"set_advantage_to_zero": True}],
    }
    element = json.loads(posted(tokens=[[True]], **extra).element)
    assert {name: element[name] for name in extra} == extra
    assert element["messages"][0][0]["content"] is True and element["images"][0] is True


@pytest.mark.parametrize(
    "version",
    ["v1", "zzz", -7, {"a": 1}, [1, 2, 3], 1.5, True, 2**40, [["a", "b"]], float("nan"), "\ud800"],
)
def test_somebody_elses_policy_version_is_an_unknown_key(version: object) -> None:
    for found in (
        posted(policy_version=version),
        *parse_list(json.dumps([_group(policy_version=version)]).encode()),
    ):
        assert (found.problem, found.versions) == (None, None)
        assert "policy_version" not in json.loads(found.element)


def _group(**extra: object) -> dict[str, object]:
    return {"tokens": [[1]], "masks": [[1]], "scores": [1], **extra}


@pytest.mark.parametrize("version", [7, "7", 7.0, [[3, 7]]])
def test_ours_is_known_beside_odd_numbers(version: object) -> None:
    found = posted(policy_version=version, scores=[True])
    assert found.versions == ((3, 7) if isinstance(version, list) else (7, 7))


@pytest.mark.parametrize("key", [5, 1.5, True, {"a": 1}, ["k"]])
def test_a_key_that_is_no_text_is_an_unknown_key(key: object) -> None:
    found = posted(halteres_key=key, policy_version=3)
    assert (found.problem, found.key, found.versions) == (None, None, (3, 3))
    assert posted(halteres_key="k", tokens=[[" 1 "]]).key == "k"


@pytest.mark.parametrize("key", ["\u00e9", "k" * 257, "\ud800"])
def test_a_text_that_cannot_be_a_key_is_told(key: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        posted(halteres_key=key)
    assert refused.value.problems[0]["loc"][0] == "body"


def test_a_trainer_may_spell_its_numbers_so_too() -> None:
    body = b"{" + TRAINER + b',"batch_size":" 4 ","max_token_len":"1_000","starting_step":false}'
    found = decode(body, Registration)
    assert (found.batch_size, found.max_token_len, found.starting_step) == (4, 1000, 0)


@pytest.mark.parametrize("size", ["0", "-1", "NaN", '"x"'])
def test_but_not_a_batch_that_can_never_be(size: str) -> None:
    body = b"{" + TRAINER + f',"batch_size":{size},"max_token_len":1,"starting_step":0}}'.encode()
    with pytest.raises(Unprocessable) as refused:
        decode(body, Registration)
    assert refused.value.problems[0]["loc"] == ["body", "batch_size"]


def test_a_large_body_is_not_read_twice() -> None:
    padded = b'{"batch_size":NaN,"x":"' + b"x" * 2**20 + b'"}'
    with pytest.raises(Unprocessable, match="malformed"):
        decode(padded, Registration)
