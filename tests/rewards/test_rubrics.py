"""Rubrics: one shape out of several files, and what grades make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.errors import InvalidConfig
from halteres.rewards.components import Criterion, read_rubric

OURS = {
    "criteria": [
        {"name": "right", "text": "Is it right?", "weight": 2, "choices": ["no", "nearly", "yes"]}
    ]
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "r.json",
            '{"criteria": [{"name": "right", "text": "Is it right?", "weight": 2.0,'
            ' "choices": ["no", "nearly", "yes"]}]}',
        ),
        (
            "r.json",
            '[{"name": "right", "text": "Is it right?", "weight": 2, "choices": ["no", "nearly", '
            '"yes"]}]',
        ),
        (
            "r.toml",
            '[[criteria]]\nname = "right"\ntext = "Is it right?"\nweight = 2\nchoices = ["no", '
            '"nearly", "yes"]\n',
        ),
        (
            "r.yaml",
            "criteria:\n- {name: right, text: 'Is it right?', weight: 2, choices: [no, nearly, "
            "yes]}\n",
        ),
    ],
)
def test_a_rubric_is_the_same_in_every_format(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_rubric(str(tmp_path / name)) == read_rubric(OURS)
    if not name.endswith(".toml"):
        assert read_rubric(text) == read_rubric(OURS), (
            "a task's own rubric may be text in its column"
        )


def test_harbors_criteria_are_read(tmp_path: Path) -> None:
    file = tmp_path / "quality.toml"
    file.write_text(
        '[judge]\njudge = "some/model"\n'
        '[[criterion]]\ndescription = "Is it correct?"\ntype = "binary"\n'
        '[[criterion]]\nname = "clear"\ndescription = "How clear?"\ntype = "likert"\npoints = '
        "3\nweight = 2.0\n"
        '[[criterion]]\ndescription = "How much?"\ntype = "numeric"\nmin = 0\nmax = 100\n'
    )
    first, second, third = read_rubric(file).criteria
    assert first == Criterion(name="criterion_1", text="Is it correct?", choices=("no", "yes"))
    assert (second.name, second.weight, second.values) == ("clear", 2.0, (0.0, 0.5, 1.0))
    assert (third.choices[0], third.choices[5], third.choices[-1]) == ("0", "50", "100")


def test_grades_are_averaged_by_weight_and_by_aspect() -> None:
    rubric = read_rubric(
        [
            {"name": "cites", "text": "Does it cite?", "aspect": "presence"},
            {"name": "true", "text": "Is it true?", "weight": 3, "aspect": "correctness"},
            {"name": "polite", "text": "Is it polite?", "weight": 0},
        ]
    )
    grades = {"cites": 1.0, "true": 0.5, "polite": 0.0}
    assert rubric.score(grades) == 0.625
    assert rubric.aspects(grades) == {"presence": 1.0, "correctness": 0.5}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "at least 1 item"),
        ([{"name": "a"}], "text: Field required"),
        ([{"name": "a", "text": "?", "choices": ["yes", "yes"]}], "two choices are the same"),
        ([{"name": "a", "text": "?"}, {"name": "a", "text": "?"}], "the same name"),
        ([{"name": "disagreement", "text": "?"}], "the name of another metric"),
        ([{"name": "a", "text": "?", "weight": 0}], "every criterion has the weight 0"),
        ([{"name": "a", "text": "?", "weight": -1}], "greater than or equal to 0"),
        ({"rules": []}, "no rubric"),
        ({"criterion": [{"description": "?", "type": "stars"}]}, "type 'stars'"),
        ("/nowhere/rubric.toml", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_no_rubric_is_refused_by_field(content: object, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        read_rubric(content)  # type: ignore[arg-type]
