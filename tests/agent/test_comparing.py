"""rl_compare_runs: which run is better, and whether that is certain."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from halteres.observe import plots
from halteres.observe.metrics import append_row

from .run_fixtures import make_run, replied, supervised, tokens, told
from .run_results import add_step, configure, evaluate, trained

BUDGET = 600
ONE, TWO, THREE = "aaaa1111", "bbbb2222", "cccc3333"
CORRECT = "eval/percent_correct"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


async def test_figures_stand_side_by_side_and_the_better_run_is_certain() -> None:
    trained(ONE, skill=0.05)
    trained(TWO, skill=0.4)
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False)
    one, two = answer["runs"]
    assert (one["run_id"], one["status"], one["step"], answer["environment"]) == (
        ONE,
        "completed",
        50,
        "gsm8k",
    )
    assert one["minutes"] == pytest.approx(4, abs=0.1)
    assert one["reward/mean"] == pytest.approx(0.66, abs=0.05)
    assert two[CORRECT]["ci95"][0] < two[CORRECT]["gain"] < two[CORRECT]["ci95"][1]
    best = answer["best"]
    assert (best["metric"], best["run_id"], best["certain"]) == (CORRECT, TWO, True)
    assert (
        f"against {ONE}, 95 % interval +0." in best["why"] and "paired over 64 tasks" in best["why"]
    )
    assert answer["next"] == f'rl_get_results("{TWO}")'


async def test_runs_that_hardly_differ_are_not_told_apart() -> None:
    trained(ONE, skill=0.3)
    trained(TWO, skill=0.31)
    best = (await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False))["best"]
    assert best["certain"] is False
    assert "would tell" in best["why"]


async def test_among_more_runs_the_best_must_beat_each_by_a_stricter_interval() -> None:
    for run_id, skill in ((ONE, 0.0), (TWO, 0.2), (THREE, 0.4)):
        trained(run_id, skill=skill)
    best = (await told("rl_compare_runs", run_ids=[ONE, TWO, THREE], plot=False))["best"]
    assert (best["run_id"], best["certain"]) == (THREE, True)
    assert f"against {TWO}, 97.5 % interval" in best["why"]


async def test_only_settings_that_differ_are_told_those_of_the_environment_too() -> None:
    common = {"inference": {"model": "halteres/tiny"}}
    configure(
        trained(ONE, steps=2),
        **common, trainer={"learning_rate": 0.001}, env={"group_size": 8}, run={"seed": 1, "name": "a"},
    )  # fmt: skip
    configure(
        trained(TWO, steps=2),
        **common, trainer={"learning_rate": 0.002}, env={"group_size": 8, "hint": "x"}, run={"seed": 1, "name": "b"},
    )  # fmt: skip
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False)
    assert answer["settings_that_differ"] == {
        "trainer.learning_rate": {ONE: 0.001, TWO: 0.002},
        "env.hint": {ONE: None, TWO: "x"},
    }


async def test_eight_runs_with_many_differences_keep_the_budget() -> None:
    ids = [f"{number}aaa1111" for number in range(8)]
    for number, run_id in enumerate(ids):
        run = trained(run_id, steps=40, skill=0.05 * number, name=f"learning rate {number}")
        env = {f"setting_{field}": f"value {number}" for field in range(30)}
        configure(
            run, trainer={"learning_rate": 0.001 * (number + 1)}, env=env, run={"seed": number}
        )
    answer = await told("rl_compare_runs", run_ids=ids)
    assert len(answer["runs"]) == 8
    assert tokens(answer) <= BUDGET
    told_of, more = answer["settings_that_differ"], answer["more_settings_that_differ"]
    assert [*told_of][:1] == ["trainer.learning_rate"]
    assert not set(more) & set(told_of) and more[-1] == f"and {32 - len(told_of) - 8} more"


async def test_an_unknown_run_is_named_and_nothing_else_is_lost() -> None:
    trained(ONE, steps=2)
    trained(TWO, steps=2)
    reply = await replied("rl_compare_runs", run_ids=[ONE, "aaaa1112", TWO], plot=False)
    assert not reply.failed
    found = {row["run_id"]: row.get("error") for row in reply.body["runs"]}
    assert found.keys() == {ONE, TWO, "aaaa1112"}
    assert found[ONE] is None and str(found["aaaa1112"]).startswith("Run 'aaaa1112' not found.")
    assert reply.body["runs"][-1]["did_you_mean"] == ONE
    assert reply.body["best"]


async def test_where_no_run_is_found_that_is_the_answer() -> None:
    reply = await replied("rl_compare_runs", run_ids=["zzzz"])
    assert reply.failed and reply.body["code"] == "run_not_found"


async def test_a_run_named_twice_is_one_run() -> None:
    trained(ONE, steps=2, name="mine")
    answer = await told("rl_compare_runs", run_ids=[ONE, "mine", "aaaa"], plot=False)
    assert [row["run_id"] for row in answer["runs"]] == [ONE]
    assert answer["runs"][0]["name"] == "mine"
    assert answer["best"] is None


async def test_what_a_run_does_not_have_is_null_with_a_note() -> None:
    trained(ONE, steps=2)
    (make_run(TWO).path / "settings.json").unlink()
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False)
    assert (answer["runs"][1][CORRECT], answer["runs"][1]["reward/mean"]) == (None, None)
    assert answer["notes"] == [f"{TWO} has no evaluation", f"{TWO} has no readable settings"]
    assert answer["best"] is None


async def test_a_run_that_goes_on_decides_nothing() -> None:
    trained(ONE, skill=0.4)
    with supervised(make_run(TWO)) as run:
        evaluate(run, 0, 0.0)
        answer = await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False)
    assert (answer["best"]["run_id"], answer["best"]["certain"]) == (ONE, False)
    assert answer["notes"] == [f"{TWO} goes on; its last evaluation is of step 0"]
    assert answer["next"].startswith(f'rl_check_status("{TWO}"')


async def test_the_score_of_all_rollouts_decides_where_groups_were_dropped() -> None:
    """The rewards of the batches alone would say the contrary."""
    for run_id, reward, score in ((ONE, 0.9, 0.3), (TWO, 0.5, 0.5)):
        run = make_run(run_id)
        for step in range(1, 11):
            add_step(run, step, reward, Random(step))
            row = {"step": step, "src": "env", "rollouts/score": score}
            append_row(run.path / "metrics.jsonl", row)
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False)
    assert (answer["best"]["metric"], answer["best"]["run_id"]) == ("rollouts/score", TWO)
    assert answer["runs"][0]["rollouts/score"] == pytest.approx(0.3)


async def test_without_evaluations_the_reward_decides_and_is_never_certain() -> None:
    for run_id, reward in ((ONE, 0.2), (TWO, 0.9)):
        run = make_run(run_id)
        for step in range(1, 11):
            add_step(run, step, reward, Random(step))
    best = (await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False))["best"]
    assert (best["metric"], best["run_id"], best["certain"]) == ("reward/mean", TWO, False)
    assert "no test" in best["why"]


async def test_of_what_should_be_low_the_lowest_is_the_best() -> None:
    for run_id, share in ((ONE, 0.3), (TWO, 0.1)):
        run = make_run(run_id)
        for step in (1, 2):
            add_step(run, step, 0.5, Random(step))
            (run.path / "metrics.jsonl").open("a").write(
                f'{{"step": {step}, "groups/without_signal": {share}}}\n'
            )
    best = (
        await told(
            "rl_compare_runs", run_ids=[ONE, TWO], metrics=["groups/without_signal"], plot=False
        )
    )["best"]
    assert best["run_id"] == TWO


async def test_runs_of_different_environments_have_no_best() -> None:
    trained(ONE, steps=2)
    trained(TWO, steps=2, environment="arithmetic")
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], plot=False)
    assert answer["best"] is None
    assert answer["notes"][-1].startswith("environments differ (arithmetic, gsm8k)")
    assert [row["environment"] for row in answer["runs"]] == ["gsm8k", "arithmetic"]


async def test_the_best_evaluation_is_told_where_it_was_not_the_last() -> None:
    run = make_run(ONE)
    for step, skill in ((0, 0.0), (10, 0.5), (20, 0.1)):
        evaluate(run, step, skill)
    figure = (await told("rl_compare_runs", run_ids=[ONE], plot=False))["runs"][0][CORRECT]
    assert figure["best"] > figure["last"] and figure["best_step"] == 10


async def test_the_curves_are_drawn_and_the_same_question_has_the_same_picture(home: Path) -> None:
    for run_id, skill in ((ONE, 0.1), (TWO, 0.4)):
        trained(run_id, steps=25, skill=skill, name="x $9 sk-planted-000" if run_id == TWO else "")
    reply = await replied("rl_compare_runs", run_ids=[ONE, TWO])
    (picture,) = reply.images
    assert picture.parent == home / "cache" and picture.read_bytes().startswith(b"\x89PNG")
    assert reply.body["plot"] == str(picture)
    assert (await replied("rl_compare_runs", run_ids=[TWO, ONE])).images == (picture,)
    assert tokens(reply.body) <= BUDGET


async def test_secrets_in_names_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "sk-planted-000")
    labels: list[str] = []
    monkeypatch.setattr(
        plots, "plot_runs", lambda curves, file, title, *names: labels.extend(curves)
    )  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    trained(ONE, steps=2, name="try sk-planted-000")
    await told("rl_compare_runs", run_ids=[ONE])
    assert labels == [f"{ONE} try ***"]


async def test_a_picture_that_cannot_be_drawn_costs_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(plots, "plot_runs", refuse)
    trained(ONE, steps=2)
    reply = await replied("rl_compare_runs", run_ids=[ONE])
    assert (reply.failed, reply.images, reply.body["plot"]) == (False, (), None)
    assert reply.body["notes"] == ["Plotting raised RuntimeError: no font."]


async def test_of_all_metrics_only_one_that_is_trained_for_can_decide() -> None:
    trained(ONE, steps=2)
    trained(TWO, steps=2)
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], metrics=["*"], plot=False)
    assert answer["best"] is None or answer["best"]["metric"].startswith(("reward/", "eval/"))
    answer = await told(
        "rl_compare_runs",
        run_ids=[ONE, TWO],
        metrics=["advantages/mean", "reward/mean"],
        plot=False,
    )
    assert answer["best"]["metric"] == "reward/mean"
    answer = await told("rl_compare_runs", run_ids=[ONE, TWO], metrics=["advantages/*"], plot=False)
    assert answer["best"] is None
    assert any("which run is better" in note for note in answer["notes"])
