"""rl_get_results: what a run has come to, at any time of it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from halteres.next_step import NextStep, Remedy
from halteres.observe import plots
from halteres.observe.metrics import append_row
from halteres.observe.sinks import Reports, SinkReport
from halteres.runs.directory import RunDirectory
from halteres.runs.state import Failure

from .run_fixtures import (
    READ_BEST,
    RUN,
    STOP,
    add_alert,
    change,
    make_run,
    replied,
    supervised,
    tokens,
    told,
)
from .run_results import add_checkpoint, add_step, configure, evaluate, trained

BUDGET = 600
SEED_KEYS = {"run_id", "status", "environment", "wandb_project", "wandb_run_name"}
CORRECT = "eval/percent_correct"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


async def test_a_completed_run_tells_figures_gain_history_weights_and_cost_within_its_budget() -> (
    None
):
    run = trained()
    add_alert(run, "truncation", 7)
    add_alert(run, "truncation", 9)
    answer = await told("rl_get_results", run_id=RUN)
    assert answer.keys() >= SEED_KEYS | {"final_metrics", "history"}
    assert (answer["status"], answer["environment"]) == ("completed", "gsm8k")
    assert (answer["wandb_project"], answer["wandb_run_name"]) == ("atropos-tinker", f"gsm8k-{RUN}")
    assert answer["baseline"]["step"] == 0
    gain = answer["improvement"][CORRECT]
    assert gain["delta"] == pytest.approx(
        answer["final_metrics"][CORRECT] - answer["baseline"][CORRECT], abs=2e-4
    )
    assert gain["ci95"][0] <= gain["delta"] <= gain["ci95"][1]
    assert (gain["num_tasks"], gain["certain"], gain["method"]) == (64, True, "paired")
    assert answer["cost"]["minutes"] == pytest.approx(4, abs=0.1)
    assert answer["cost"]["tokens"] == 50 * 4718
    (alert,) = answer["alerts"]
    assert alert == {
        "rule": "truncation",
        "step": 9,
        "times": 2,
        "remedy": "rl_edit_config('max_token_length', 1536)",
    }
    assert answer["weights"]["peft_dir"] == str(run.path / "adapter")
    assert answer["weights"]["sampler"].endswith("/sampler_weights/final")
    chat, served = answer["weights"]["use"]
    assert chat == f"halteres chat {RUN}"
    assert served.startswith(
        f"vllm serve {answer['weights']['base']} --enable-lora --lora-modules {RUN}="
    )
    assert answer["checkpoints"] == [
        {"name": "step-000000", "step": 0},
        {"name": "final", "step": 50},
    ]
    assert tokens(answer) <= BUDGET


async def test_an_ended_run_tells_at_once_whether_it_has_learnt() -> None:
    trained()
    gain = (await told("rl_check_status", run_id=RUN))["gain"]
    whole = await told("rl_get_results", run_id=RUN)
    assert (gain["before"], gain["after"]) == (
        whole["baseline"][CORRECT],
        whole["final_metrics"][CORRECT],
    )
    assert (gain["of"], gain["certain"], gain["ci95"]) == (
        CORRECT,
        True,
        whole["improvement"][CORRECT]["ci95"],
    )


async def test_results_tell_where_wandb_has_the_run_or_how_to_upload_it() -> None:
    run = trained()
    assert not {"wandb", "wandb_url"} & (await told("rl_get_results", run_id=RUN)).keys(), (
        "what is off is not told"
    )
    Reports(run.path).put("wandb", SinkReport(state="offline", note="Upload it: wandb sync /w"))
    offline = await told("rl_get_results", run_id=RUN)
    assert (offline["wandb"], offline["wandb_url"]) == ("offline", None)
    assert offline["sinks"] == {"wandb": "offline: Upload it: wandb sync /w"}
    Reports(run.path).put("wandb", SinkReport(state="online", url="https://wandb.ai/x"))
    assert (await told("rl_get_results", run_id=RUN))["wandb_url"] == "https://wandb.ai/x"


async def test_the_history_has_as_many_rows_as_asked_the_first_the_last_and_the_evaluations_between() -> (
    None
):
    trained()
    for points in (2, 5, 10, 50):
        steps = [
            row["step"]
            for row in (await told("rl_get_results", run_id=RUN, points=points))["history"]
        ]
        assert (len(steps), steps[0], steps[-1]) == (points, 0, 50)
        assert steps == sorted(set(steps))
        assert points < 5 or {20, 40} <= set(steps)


async def test_a_short_history_is_told_whole() -> None:
    trained(steps=3)
    history = (await told("rl_get_results", run_id=RUN))["history"]
    assert [row["step"] for row in history] == [0, 1, 2, 3]
    assert history[0].keys() == {"step", CORRECT}


@pytest.mark.parametrize("status", ["pending", "starting", "running"])
async def test_a_run_without_a_step_answers_what_there_is(status: str) -> None:
    with supervised(make_run(), status=status):
        answer = await told("rl_get_results")
    assert answer.keys() >= SEED_KEYS
    assert [answer[key] for key in ("final_metrics", "baseline", "improvement", "weights")] == [
        {},
        {},
        {},
        {},
    ]
    assert (answer["history"], answer["checkpoints"]) == ([], [])
    assert answer["next"].startswith(f'rl_check_status("{RUN}"')


async def test_a_running_run_tells_what_it_has_come_to_so_far() -> None:
    run = make_run()
    evaluate(run, 0, 0.0)
    add_checkpoint(run, 0, "step-000000")
    with supervised(run):
        add_step(run, 1, 0.4, Random(1))
        answer = await told("rl_get_results")
    assert answer["improvement"] == {}
    assert CORRECT in answer["final_metrics"] and "reward/mean" in answer["final_metrics"]
    assert (answer["weights"]["step"], answer["weights"]["peft_dir"]) == (0, None)
    assert answer["notes"] == ["one evaluation so far: nothing to compare it with"]


async def test_a_run_without_samples_says_that_its_interval_is_unpaired() -> None:
    run = make_run()
    for step, skill in ((0, 0.0), (50, 0.3)):
        evaluate(run, step, skill, with_samples=False)
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["improvement"][CORRECT]["method"] == "unpaired"
    assert answer["improvement"][CORRECT]["ci95"]
    assert answer["improvement"]["eval/percent_correct_greedy"]["ci95"] is None
    assert any(note.startswith("unpaired") for note in answer["notes"])


async def test_an_evaluation_after_the_start_is_not_taken_for_the_untrained_model() -> None:
    run = make_run()
    for step, skill in ((20, 0.1), (50, 0.3)):
        evaluate(run, step, skill)
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["baseline"]["step"] == 20
    assert answer["notes"] == ["the first evaluation is of step 20, not of the untrained model"]


async def test_metrics_are_chosen_by_name_pattern_and_the_names_of_other_answers() -> None:
    trained()
    answer = await told(
        "rl_get_results", run_id=RUN, metrics=["eval/*correct*", "reward_mean", "kl"], points=3
    )
    assert [*answer["final_metrics"]] == [
        CORRECT,
        "eval/percent_correct_greedy",
        "eval/percent_correct_stderr",
        "reward/mean",
        "kl_sample_train_v2",
    ]
    assert "reward/mean" in answer["history"][1]


async def test_an_unknown_metric_is_null_with_the_nearest_name() -> None:
    trained(steps=2)
    answer = await told("rl_get_results", run_id=RUN, metrics=["reward/maen"])
    assert answer["final_metrics"] == {"reward/maen": None}
    assert answer["notes"] == ["no metric 'reward/maen' here; there is 'reward/mean'"]


async def test_however_many_metrics_are_asked_for_the_answer_stays_readable() -> None:
    run = trained()
    append_row(
        run.path / "metrics.jsonl",
        {"step": 50, **{f"train/own_{number}": 0.123456 for number in range(60)}},
    )
    answer = await told("rl_get_results", run_id=RUN, metrics=["*"], points=50)
    assert len(answer["final_metrics"]) == 12
    assert any("more metrics fit" in note for note in answer["notes"])
    assert tokens(answer) <= 2000


async def test_what_is_not_finite_is_null() -> None:
    run = make_run()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 1, "reward/mean": null, "train/loss": null}\n{"step": 2, "reward/mean": '
            '1e999}\n{"st'
        )
    answer = await told("rl_get_results", run_id=RUN, metrics=["reward/mean", "train/loss"])
    assert answer["final_metrics"] == {"reward/mean": None, "train/loss": None}


async def test_many_checkpoints_are_counted_and_the_last_ones_told() -> None:
    run = make_run()
    for step in range(1, 30):
        add_checkpoint(run, step, f"step-{step:06}")
    answer = await told("rl_get_results", run_id=RUN)
    assert [row["step"] for row in answer["checkpoints"]] == [26, 27, 28, 29]
    assert answer["num_checkpoints"] == 29


async def test_a_failed_run_says_why_and_how_to_go_on() -> None:
    point = {"name": "final", "step": 5, "state_path": "tinker://x/weights/final"}
    facts: dict[str, Any] = {"total_steps": 50, "resumable": True, "last_checkpoint": point}
    error = "Out of memory. Go on from step 5: halteres train --resume 3fa9c1d2"
    failure = Failure(what="Out of memory.")
    run = trained(steps=5, status="failed", code="gpu_oom", error=error, failure=failure, **facts)
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["notes"][0] == "gpu_oom: Out of memory. `next` goes on from step 5."
    assert "error" not in answer
    assert answer["next"] == 'rl_start_training(resume_from="3fa9c1d2", changes={"batch_size":32})'
    change(run, resumable=False, last_checkpoint=None)
    assert (await told("rl_get_results", run_id=RUN))["next"] == 'rl_get_logs("3fa9c1d2")'


async def test_alerts_are_told_with_the_next_call_of_their_remedies() -> None:
    run = trained()
    anew = NextStep("rl_start_training", {"environment": "gsm8k", "changes": {"env.seed": 7}})
    hacked = Remedy((STOP, READ_BEST), "see what is wrong.")
    add_alert(run, "truncation", 7)
    add_alert(run, "entropy_collapse", 30, remedy=Remedy((STOP, anew), "it does not come back."))
    add_alert(run, "reward_hacking", 50, remedy=hacked)
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["alerts"] == [
        {"rule": "reward_hacking", "step": 50, "times": 1, "remedy": READ_BEST.call},
        {"rule": "entropy_collapse", "step": 30, "times": 1, "remedy": anew.call},
        {"rule": "truncation", "step": 7, "times": 1},
    ]
    assert answer["next"] == READ_BEST.call
    (run.path / "events.jsonl").write_text("")
    add_alert(run, "reward_hacking", 50, remedy=hacked)
    assert tokens(await told("rl_get_results", run_id=RUN)) <= BUDGET


async def test_a_completed_run_is_compared_with_the_newest_other_one_of_its_environment() -> None:
    trained(steps=3)
    make_run("aaaa1111", steps=2, created_at=1.0)
    make_run("bbbb2222", steps=2, created_at=2.0)
    make_run("cccc3333", steps=2, environment="other")
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["next"] == 'rl_compare_runs(["3fa9c1d2","bbbb2222"])'


@pytest.mark.parametrize("ended", ["completed", "stopped"])
async def test_weights_that_were_not_evaluated_are_evaluated_next(ended: str) -> None:
    run = make_run(status=ended, step=12, total_steps=50, resumable=True)
    evaluate(run, 10, 0.3)
    for step in range(1, 13):
        add_step(run, step, 0.3, Random(step))
    add_checkpoint(run, 12, "final")
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["next"].partition(" or ")[0] == f'rl_evaluate("{RUN}")'


async def test_each_step_of_a_history_is_of_the_run_that_made_it() -> None:
    """A chain of three: its metrics were carried over twice."""
    make_run("0000aaaa", steps=4)
    parent = {"resumed_from": "0000aaaa", "resume_point": {"step": 4}}
    make_run("0000bbbb", step=8, **parent)
    run = make_run("0000cccc", step=10, resumed_from="0000bbbb", resume_point={"step": 8})
    for step in range(1, 11):
        add_step(run, step, 0.3, Random(step))
    answer = await told("rl_get_results", run_id="0000cccc")
    assert [row.get("run_id") for row in answer["history"]] == [
        *["0000aaaa"] * 4,
        *["0000bbbb"] * 4,
        *[None] * 2,
    ]
    (note,) = [note for note in answer["notes"] if "goes on from" in note]
    assert note.startswith("steps up to 4 are of run 0000aaaa; steps up to 8 are of run 0000bbbb")


async def test_the_first_run_of_an_environment_is_looked_into() -> None:
    trained()
    assert (await told("rl_get_results", run_id=RUN))[
        "next"
    ] == 'rl_get_rollouts("3fa9c1d2", which="best")'


async def test_the_settings_project_is_told() -> None:
    configure(trained(steps=2), run={"wandb_project": "mine"})
    assert (await told("rl_get_results", run_id=RUN))["wandb_project"] == "mine"


async def test_a_run_whose_settings_are_gone_still_tells_its_figures() -> None:
    run = trained(steps=2)
    (run.path / "settings.json").unlink()
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["wandb_project"] == "atropos-tinker" and answer["improvement"]


def fingerprint(run: RunDirectory) -> str:
    digest = hashlib.sha256()
    for file in sorted(run.path.rglob("*")):
        digest.update(f"{file} {file.stat().st_mtime_ns}".encode())
    return digest.hexdigest()


async def test_a_running_run_is_drawn_now_and_elsewhere(home: Path) -> None:
    run = make_run()
    evaluate(run, 0, 0.0)
    add_step(run, 1, 0.4, Random(1))
    with supervised(run):
        before = fingerprint(run)
        reply = await replied("rl_get_results", plot=True)
        assert fingerprint(run) == before
    (picture,) = reply.images
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture == home / "cache" / f"plot-{RUN}.png"
    assert reply.body["plot"] == str(picture)


async def test_a_run_that_has_ended_shows_its_own_picture() -> None:
    run = trained(steps=2)
    (run.path / "plot.png").write_bytes(b"\x89PNG drawn at its end")
    reply = await replied("rl_get_results", run_id=RUN, plot=True)
    assert reply.images == (run.path / "plot.png",)


async def test_a_picture_that_cannot_be_drawn_costs_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(plots, "plot_run", refuse)
    trained(steps=2)
    reply = await replied("rl_get_results", run_id=RUN, plot=True)
    assert (reply.failed, reply.images, reply.body["plot"]) == (False, (), None)
    assert (
        reply.body["improvement"]
        and reply.body["notes"][-1] == "Plotting raised RuntimeError: no font."
    )


async def test_a_secret_is_in_no_answer_also_where_a_text_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = "sk-planted-" + "0123456789" * 60
    monkeypatch.setenv("PLANTED_API_KEY", secret)
    change(
        trained(steps=2), status="failed", error=f"The key {secret} was refused.", name=secret[:60]
    )
    answer = str(await told("rl_get_results", run_id=RUN))
    assert "planted-012345" not in answer.replace(secret[:60], "")
    assert "The key *** was refused." in answer


def test_judging_runs_imports_no_matplotlib_unless_something_is_drawn(home: Path) -> None:
    trained(steps=2)
    code = (
        "import asyncio, sys; from halteres.agent.call import call; from halteres.agent.call "
        "import Caller\n"
        "for name, more in (('rl_get_results', {'run_id': '3fa9c1d2'}),\n"
        "                   ('rl_compare_runs', {'run_ids': ['3fa9c1d2'], 'plot': False})):\n"
        "    assert not asyncio.run(call(name, more, Caller())).failed\n"
        "sys.exit(any(name in sys.modules for name in ('matplotlib', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
