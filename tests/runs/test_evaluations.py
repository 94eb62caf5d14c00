"""How two evaluations differ, from what they left on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halteres.config.program import EnvironmentProgram
from halteres.errors import EnvironmentFailed
from halteres.observe.metrics import append_row, read_rows
from halteres.runs.reading.evaluations import LOGGED, Evaluation, differences, figures_of
from halteres.runs.supervision.evaluation import name_prompts


def evaluation(
    folder: Path, step: int, answers: dict[str, list[float]], **figures: float
) -> Evaluation:
    """Answers at temperature 1, by prompt; the figures that follow from them unless others are
    given.
    """
    file = folder / f"step_{step}.jsonl"
    rows = [
        {"prompt": prompt, "score": score, "temperature": 1.0}
        for prompt in answers
        for score in answers[prompt]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = [score for given in answers.values() for score in given]
    told = {"eval/percent_correct": sum(score > 0 for score in scores) / len(scores)}
    return Evaluation(step=step, figures={**told, **figures}, samples=file)


def tasks(num: int, right: int) -> dict[str, list[float]]:
    """So many tasks with two answers each, of which the first so many were answered right."""
    return {f"task {number}": [float(number < right)] * 2 for number in range(num)}


def test_the_difference_is_that_of_the_reported_figures(tmp_path: Path) -> None:
    before, after = evaluation(tmp_path, 0, tasks(40, 10)), evaluation(tmp_path, 9, tasks(40, 30))
    found = differences(before, after)["eval/percent_correct"]
    assert (found.delta, found.method, found.num_tasks, found.certain) == (0.5, "paired", 40, True)


def test_a_gain_speaks_of_as_many_tasks_as_the_evaluation_and_its_difference_is_that_of_the_figures(
    tmp_path: Path,
) -> None:
    twice = {"again": [1.0] * 4, **tasks(10, 2)}
    before, after = (
        evaluation(tmp_path, 0, {**twice, "again": [0.0] * 4}),
        evaluation(tmp_path, 9, twice),
    )
    found = differences(before, after)["eval/percent_correct"]
    assert found.delta == pytest.approx(
        after.figures["eval/percent_correct"] - before.figures["eval/percent_correct"]
    )
    assert found.num_tasks == 12, "one of them was asked twice"


def test_tasks_that_are_asked_in_the_same_words_are_compared_one_by_one(tmp_path: Path) -> None:
    """As games are: `task` tells them apart."""
    before, after = evaluation(tmp_path, 0, tasks(20, 5)), evaluation(tmp_path, 9, tasks(20, 15))
    for one in (before, after):
        assert one.samples is not None
        rows = [
            {**row, "prompt": "Guess.", "task": int(row["prompt"].split()[1])}
            for row in read_rows(one.samples)
        ]
        one.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = differences(before, after)["eval/percent_correct"]
    assert (found.delta, found.method, found.num_tasks) == (0.5, "paired", 20)


def test_a_success_is_what_scores_above_the_runs_threshold(tmp_path: Path) -> None:
    half = {"eval/percent_correct": 0.0}
    before = evaluation(tmp_path, 0, {f"task {number}": [0.5] for number in range(20)}, **half)
    after = evaluation(
        tmp_path, 9, {f"task {number}": [0.5 + number % 2 / 2] for number in range(20)}
    )
    named = [
        Evaluation(
            step=one.step,
            figures={"eval/percent_correct": share},
            samples=one.samples,
            success_threshold=0.5,
        )
        for one, share in ((before, 0.0), (after, 0.5))
    ]
    found = differences(*named)["eval/percent_correct"]
    assert (found.delta, found.method, found.num_tasks) == (0.5, "paired", 20)


def foreign(folder: Path, **told: Any) -> EnvironmentProgram:
    """An environment of atroposlib's that has evaluated: what its `evaluate_log` wrote, what it
    logged to W&B.
    """
    folder.mkdir()
    if "reported" in told:
        report = {"config_general": {"model_name": "m"}, "results": {"all": told["reported"]}}
        (folder / "metrics.json").write_text(json.dumps(report))
    for row in told.get("logged", ()):
        append_row(folder / LOGGED, row)
    here = Path(__file__)
    return EnvironmentProgram(
        name="x", path=here, interpreter="/python", working_directory=folder, is_foreign=True
    )


def test_the_figures_of_a_foreign_evaluation_are_those_it_reported_and_logged(
    tmp_path: Path,
) -> None:
    logged = {
        "step": 0,
        "src": "env",
        "eval/percent_correct": 0.1,
        "eval/speed": 3,
        "train/percent_correct": 0.9,
    }
    made = foreign(
        tmp_path / "e",
        reported={"eval/percent_correct": 0.5, "accuracy": 0.25, "by": "us"},
        logged=[logged],
    )
    found = figures_of(made, tmp_path / "e", '{"eval/percent_correct": 0.0}\n')
    assert found == {"eval/percent_correct": 0.5, "eval/accuracy": 0.25, "eval/speed": 3}


def test_a_foreign_evaluation_without_figures_is_told_how_to_give_them(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed) as refused:
        figures_of(foreign(tmp_path / "e"), tmp_path / "e", "much\n")
    assert "gave no figures" in refused.value.what and "evaluate_log" in refused.value.why


def test_answers_of_a_foreign_evaluation_are_compared_task_by_task(tmp_path: Path) -> None:
    """Its samples name no prompt, but the chat, or the question."""
    evaluations: list[Evaluation] = []
    for step, right in ((0, 5), (9, 15)):
        file = tmp_path / f"step_{step}.jsonl"
        for number in range(20):
            chat = [
                {"role": "user", "content": f"{number} + 1?"},
                {"role": "assistant", "content": "2"},
            ]
            asked = {"messages": chat} if number % 2 else {"question": f"{number} + 1?"}
            append_row(file, {**asked, "score": int(number < right), "correct": True})
        name_prompts(file)
        evaluations.append(
            Evaluation(step=step, figures={"eval/percent_correct": right / 20}, samples=file)
        )
    found = differences(*evaluations)["eval/percent_correct"]
    assert (found.delta, found.method, found.num_tasks) == (0.5, "paired", 20)
    first = read_rows(tmp_path / "step_0.jsonl")[1]
    assert (first["prompt"], first["completion"]) == ("1 + 1?", "2")


def test_greedy_answers_are_apart_from_sampled_ones(tmp_path: Path) -> None:
    def both(step: int, greedy: float) -> Evaluation:
        found = evaluation(tmp_path, step, tasks(20, 5), **{"eval/percent_correct_greedy": greedy})
        with found.samples.open("a") as file:
            for number in range(20):
                row = {"prompt": f"task {number}", "score": greedy, "temperature": 0.0}
                file.write(json.dumps(row) + "\n")
        return found

    found = differences(both(0, 0.0), both(9, 1.0))
    assert found["eval/percent_correct"].delta == 0.0
    assert found["eval/percent_correct_greedy"].delta == 1.0


@pytest.mark.parametrize("spoil", ["missing", "other tasks", "other figure"])
def test_what_cannot_be_paired_is_compared_by_its_standard_errors(
    tmp_path: Path, spoil: str
) -> None:
    error: dict[str, float] = {"eval/percent_correct_stderr": 0.04}
    other: dict[str, Any] = {"eval/percent_correct": 0.9} if spoil == "other figure" else {}
    asked = {f"other {name}": scores for name, scores in tasks(40, 30).items()}
    before = evaluation(tmp_path, 0, tasks(40, 10), **error)
    after = evaluation(
        tmp_path, 9, asked if spoil == "other tasks" else tasks(40, 30), **error, **other
    )
    if spoil == "missing":
        after.samples.unlink()
    found = differences(before, after)["eval/percent_correct"]
    assert found.method == "unpaired"
    assert (
        found.delta
        == after.figures["eval/percent_correct"] - before.figures["eval/percent_correct"]
    )


def test_a_figure_of_its_own_has_a_difference_and_no_interval(tmp_path: Path) -> None:
    before, after = (
        evaluation(tmp_path, step, tasks(8, 4), **{"eval/worked_share": share, "eval/num_tasks": 8})
        for step, share in ((0, 0.25), (9, 0.75))
    )
    found = differences(before, after)
    assert (
        found["eval/worked_share"].facts["ci95"] is None and found["eval/worked_share"].delta == 0.5
    )
    assert "eval/num_tasks" not in found


def test_torn_and_strange_samples_are_passed_over(tmp_path: Path) -> None:
    before, after = evaluation(tmp_path, 0, tasks(40, 10)), evaluation(tmp_path, 9, tasks(40, 30))
    with after.samples.open("a") as file:
        file.write(
            '{"prompt": "unscored", "temperature": 1.0}\n{"prompt": "not a number", "score": '
            'null}\n{"prom'
        )
    assert differences(before, after)["eval/percent_correct"].num_tasks == 40


def test_prompts_may_be_messages(tmp_path: Path) -> None:
    def asked(step: int, score: float) -> Evaluation:
        found = evaluation(tmp_path, step, {"x": [score]})
        row = {"prompt": [{"role": "user", "content": "x"}], "score": score}
        found.samples.write_text((json.dumps(row) + "\n") * 2)
        return found

    assert differences(asked(0, 0.0), asked(9, 1.0))["eval/percent_correct"].method == "paired"
