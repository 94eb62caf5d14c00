"""What the page is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import RUN, told

from halteres.agent.call import call
from halteres.agent.tool import Caller
from halteres.agent.transports.command_line import for_person
from halteres.dashboard.curves import MOST_NAMES, MOST_POINTS, POINTS, Curves, Spark, spark_of
from halteres.observe.metrics import append_row

from .conftest import HOST, Client

SECRET = "sk-planted-0123456789"


async def got(page: Client, path: str) -> Any:
    async with page() as http:
        answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_list_tells_every_run_newest_first(page: Client) -> None:
    run_results.trained("aaaa1111", steps=20, created_at=100.0, ended_at=160.0)
    failed = run_fixtures.make_run(
        "bbbb2222", status="failed", error="It broke. " * 40, created_at=200.0
    )
    run_fixtures.add_alert(failed)
    with run_fixtures.supervised(
        run_fixtures.make_run("cccc3333", steps=2, created_at=300.0), step=2
    ):
        rows = (await got(page, "/api/runs"))["runs"]
    assert [row["run_id"] for row in rows] == ["cccc3333", "bbbb2222", "aaaa1111"]
    live, broken, done = rows
    assert (live["status"], live["step"], live["total_steps"], live["ended_at"]) == (
        "running",
        2,
        50,
        None,
    )
    assert (broken["alerts"], len(broken["error"])) == (["truncation"], 200)
    assert (done["model"], done["ended_at"], len(done["curve"])) == ("Qwen/Qwen3-0.6B", 160.0, 20)
    assert done["reward"] == pytest.approx(0.7, abs=0.1)
    assert done["evaluation"] == pytest.approx(0.65, abs=0.1)


async def test_the_list_can_be_asked_for_some(page: Client) -> None:
    for run_id in ("aaaa1111", "bbbb2222"):
        run_fixtures.make_run(run_id)
    rows = (await got(page, "/api/runs?ids=bbbb2222,dddd4444"))["runs"]
    assert [row["run_id"] for row in rows] == ["bbbb2222"]


async def test_no_runs_is_an_empty_list(page: Client) -> None:
    assert (await got(page, "/api/runs"))["runs"] == []


def test_a_glimpse_of_a_long_run_looks_like_the_whole(tmp_path: Path) -> None:
    metrics, steps = tmp_path / "metrics.jsonl", 4000
    rows = [
        {"step": step, "src": "trainer", "reward/mean": step / steps}
        for step in range(1, steps + 1)
    ]
    rows.insert(3000, {"step": 2999, "src": "eval", "eval/percent_correct": 0.75})
    metrics.write_text("".join(json.dumps({**row, "padding": "x" * 200}) + "\n" for row in rows))
    spark = spark_of(metrics)
    assert (len(spark.rewards), spark.rewards[-1], spark.reward, spark.evaluation) == (
        POINTS,
        1.0,
        1.0,
        0.75,
    )
    assert list(spark.rewards) == sorted(spark.rewards)
    assert spark.rewards[0] < 0.02


@pytest.mark.parametrize("num_steps", [20, 4000])
def test_a_glimpse_of_a_reward_training_is_of_its_accuracy(num_steps: int, tmp_path: Path) -> None:
    """An RL run's environment may have metrics of that name of its own: they are not its reward."""
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"step": step, "accuracy": step / num_steps, "padding": "x" * 200}
        for step in range(1, num_steps + 1)
    ]
    metrics.write_text(
        "".join(
            json.dumps(row) + "\n" for row in [*rows, {"step": num_steps, "eval_accuracy": 0.75}]
        )
    )
    spark = spark_of(metrics, "reward")
    assert (spark.rewards[-1], spark.reward, spark.evaluation) == (1.0, 1.0, 0.75)
    assert list(spark.rewards) == sorted(spark.rewards) and len(spark.rewards) > 10
    assert spark_of(metrics) == Spark()


def test_a_glimpse_passes_over_what_is_torn_or_strange(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        b'{"reward/mean": 1}',
        b"\xff\xfe",
        b'{"reward/mean": "much"}',
        b"[]",
        b'{"reward/mean": 3}',
        b'{"rewa',
    ]
    metrics.write_bytes(b"\n".join(lines))
    assert spark_of(metrics).rewards == (1.0, 3.0)
    assert spark_of(tmp_path / "none").rewards == ()


async def test_curves_come_as_columns_of_equal_length(page: Client) -> None:
    run_results.trained(steps=50)
    answer = await got(page, f"/api/runs/{RUN}/metrics?names=reward/mean,time/step,none")
    columns, evaluations = answer["columns"], answer["evaluations"]
    assert list(columns) == ["step", "reward/mean", "time/step"]
    assert columns["step"] == list(range(1, 51))
    assert {len(column) for column in columns.values()} == {50}
    assert evaluations["step"] == [0, 20, 40, 50]
    assert (
        len(evaluations["eval/percent_correct"])
        == len(evaluations["margins"]["eval/percent_correct"])
        == 4
    )
    assert all(0.02 < margin < 0.2 for margin in evaluations["margins"]["eval/percent_correct"])
    assert {"train/loss", "reward/mean", "train/completion_lengths"} <= set(answer["names"])


def test_a_long_run_is_told_in_means_of_equal_stretches(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        "".join(f'{{"step": {step}, "a": {step}, "t": 1}}\n' for step in range(1, 2001))
    )
    answer = Curves(metrics).columns(["a"])
    assert (answer["each"], len(answer["columns"]["step"])) == (4, MOST_POINTS)
    assert answer["columns"]["step"][:2] == [4, 8]
    assert answer["columns"]["a"][:2] == [2.5, 6.5]
    assert answer["columns"]["step"][-1] == 2000


def test_curves_are_read_on_as_they_grow_and_the_last_word_on_a_step_holds(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    curves = Curves(metrics)
    assert curves.columns(["a"])["columns"] == {"step": []}
    for step, value in ((1, 1.0), (3, 3.0)):
        append_row(metrics, {"step": step, "a": value})
    assert curves.columns(["a"])["columns"] == {"step": [1, 3], "a": [1.0, 3.0]}
    for step, value in ((2, 2.0), (3, 4.0), (4, 5.0)):
        append_row(metrics, {"step": step, "a": value})
    append_row(metrics, {"step": 4, "b": 1})
    assert curves.columns(["a", "b"])["columns"] == {
        "step": [1, 2, 3, 4],
        "a": [1.0, 2.0, 4.0, 5.0],
        "b": [None, None, None, 1.0],
    }


def test_what_is_no_figure_is_no_point(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    strange = ["NaN", "Infinity", "1e999", "true", "null", '"5"', "[1]", "{}", "1" + "0" * 400]
    lines = [f'{{"step": {step}, "a": {value}}}' for step, value in enumerate(strange)]
    lines += [
        f'{{"step": {step}, "a": 1}}' for step in ("-1", "1.5", "true", "null", "1" + "0" * 400)
    ]
    lines += ['{"step": 100, "a": 7}']
    metrics.write_text("\n".join(lines) + "\n")
    assert Curves(metrics).columns(["a"])["columns"] == {"step": [100], "a": [7.0]}


def test_an_environment_that_invents_names_does_not_fill_the_memory(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_row(metrics, {"step": 1, **{f"name{number}": 1.0 for number in range(MOST_NAMES + 100)}})
    assert len(Curves(metrics).columns([])["names"]) == MOST_NAMES


async def told_to_a_person(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A tool's answer with commands in the place of calls."""
    return (await call(name, arguments, Caller(write=for_person))).body


async def test_a_run_is_told_as_the_tools_tell_it(page: Client) -> None:
    run = run_fixtures.make_run(steps=12)
    run_fixtures.add_evaluation(run, 10)
    run_fixtures.add_alert(run, step=7)
    run_fixtures.add_alert(run, step=11)
    with run_fixtures.supervised(run, step=12):
        view, answer = (
            await got(page, f"/api/runs/{RUN}"),
            await told_to_a_person("rl_check_status", run_id=RUN),
        )
        assert await got(page, f"/api/runs/{RUN}/status") == {
            **answer,
            "running_time_minutes": round(view["seconds"] / 60, 1),
        }
    for name in (
        "status",
        "environment",
        "step",
        "total_steps",
        "metrics",
        "health",
    ):
        assert view[name] == answer[name], name
    assert view["processes"].items() >= answer["processes"].items(), "an agent sees the seeds'"
    assert view["alerts"][0] | {"times": 2, "current": True} == view["alerts"][0]
    assert [line["command"] for line in view["next"]] == [answer["next"]]
    assert {one["name"]: one["value"] for one in view["figures"]}["reward_mean"] == 0.3
    assert [mark["step"] for mark in view["marks"]] == [7, 11]


async def test_a_look_at_the_page_uses_up_no_look_of_an_agent(page: Client, home: Path) -> None:
    (home / "policy.yaml").write_text("min_status_interval_s: 1800\n")
    with run_fixtures.supervised(run_fixtures.make_run(steps=3), step=3):
        for _ in range(2):
            assert (await got(page, f"/api/runs/{RUN}"))["metrics"]["step"] == 3
        assert "rate_limited" not in await told("rl_check_status", run_id=RUN)
        assert (await told("rl_check_status", run_id=RUN))["rate_limited"]


async def test_a_failed_run_is_told_with_its_sentence_its_log_and_what_to_do(page: Client) -> None:
    sentence = (
        "Trainer ran out of GPU memory at step 7. Lower batch_size, then: halteres train "
        "--resume 3fa9c1d2"
    )
    run = run_fixtures.make_run(
        status="failed",
        error=sentence,
        code="gpu_oom",
        exit={"process": "trainer", "code": 1},
        resumable=True,
    )
    (run.path / "logs" / "trainer.log").write_text("CUDA out of memory\n")
    view = await got(page, f"/api/runs/{RUN}")
    assert view["failure"]["error"] == sentence
    assert (view["failure"]["code"], view["failure"]["exit"]) == (
        "gpu_oom",
        {"process": "trainer", "code": 1},
    )
    assert view["failure"]["log_tail"] == ["CUDA out of memory"]
    assert [line["command"] for line in view["next"]] == [
        "halteres rl start-training --resume-from 3fa9c1d2 --changes '{\"batch_size\": 32}'"
    ]


async def test_settings_tell_who_set_them(page: Client) -> None:
    run = run_fixtures.make_run()
    (run.path / "config.resolved.json").write_text(
        json.dumps(
            {
                "trainer.total_steps": {"value": 25, "source": "edit"},
                "trainer.lora_rank": {"value": 16, "source": "default"},
                "env.difficulty": {"value": 1, "source": "config_init"},
                "env.seed": {"value": 0, "source": "wiring"},
            }
        )
    )
    settings = (await got(page, f"/api/runs/{RUN}/settings"))["settings"]
    assert [one["name"] for one in settings if one["set"]] == ["trainer.total_steps"]
    assert [one["name"] for one in settings if one["headline"]] == [
        "trainer.total_steps",
        "trainer.lora_rank",
    ]


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
async def test_settings_that_cannot_be_read_are_none(page: Client, content: str) -> None:
    (run_fixtures.make_run().path / "config.resolved.json").write_text(content)
    assert await got(page, f"/api/runs/{RUN}/settings") == {"settings": []}


async def test_evaluations_come_with_tasks_as_answered_before_and_after(page: Client) -> None:
    run = run_results.trained(steps=20, created_at=100.0, ended_at=160.0)
    evals = await got(page, f"/api/runs/{RUN}/evals")
    assert [one["step"] for one in evals["evaluations"]] == [0, 20]
    assert 1 <= len(evals["tasks"]) <= 6
    assert set(evals["tasks"][0]) == {"prompt", "before", "after"}
    results = await got(page, f"/api/runs/{RUN}/results")
    assert results == await told_to_a_person("rl_get_results", run_id=run.run_id)


async def test_logs_are_the_tool_s_answer(page: Client) -> None:
    run = run_fixtures.make_run(steps=3)
    (run.path / "logs" / "env.log").write_text("one\ntwo\nthree\n")
    lines = await got(page, f"/api/runs/{RUN}/logs?role=env&lines=2&grep=t")
    assert lines["lines"] == ["two", "three"]


@pytest.mark.parametrize(
    ("query", "field"),
    [("lines=x", "lines"), ("lines=0", "lines"), ("lines=-1", "lines"), ("lines=1.5", "lines")],
)
async def test_a_query_that_a_tool_refuses_is_refused_in_its_words(
    page: Client, query: str, field: str
) -> None:
    run_fixtures.make_run()
    async with page() as http:
        answer = await http.get(f"/api/runs/{RUN}/logs?{query}")
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (
        400,
        "invalid_arguments",
        field,
    )


@pytest.mark.parametrize(
    "what",
    [
        *("", "/metrics", "/settings", "/evals", "/usage", "/status", "/results"),
        *("/groups", "/groups/1/0", "/logs"),
    ],
)
async def test_a_run_that_is_not_there_is_told_with_the_one_that_was_meant(
    page: Client, what: str
) -> None:
    run_fixtures.make_run()
    async with page() as http:
        answer = await http.get(f"/api/runs/3fa9c1d3{what}")
        assert answer.status_code == 404
        assert (answer.json()["code"], answer.json()["did_you_mean"]) == ("run_not_found", RUN)
        for strange in ("%2e%2e", "..%2f..", "%00", "x" * 200):
            assert (await http.get(f"/api/runs/{strange}{what}")).status_code == 404


async def test_stop_is_the_tool(page: Client) -> None:
    run = run_fixtures.make_run(status="stopped", steps=3)
    async with page(origin=f"http://{HOST}") as http:
        answer = await http.post(f"/api/runs/{RUN}/stop", json={"mode": "after_step"})
        refused = await http.post(f"/api/runs/{RUN}/stop", json={"mode": "at once"})
    assert answer.json() == await told_to_a_person(
        "rl_stop_training", run_id=run.run_id, mode="after_step"
    )
    assert (refused.status_code, refused.json()["field"]) == (400, "mode")


async def test_a_comparison_is_the_tools_answer(page: Client) -> None:
    run_results.trained("aaaa1111", skill=0.05)
    run_results.trained("bbbb2222", skill=0.4)
    ids = ["aaaa1111", "bbbb2222"]
    answer = await got(page, f"/api/compare?ids={','.join(ids)}")
    assert answer == await told_to_a_person("rl_compare_runs", run_ids=ids, plot=False)
    assert answer["best"]["certain"]
    async with page() as http:
        missing = await http.get("/api/compare?ids=none")
        too_many = await http.get(f"/api/compare?ids={','.join(ids * 5)}")
    assert (missing.status_code, missing.json()["code"]) == (404, "run_not_found")
    assert (too_many.status_code, too_many.json()["field"]) == (400, "run_ids")


async def test_curves_say_what_a_run_had_spent_at_each_point(page: Client) -> None:
    run = run_fixtures.make_run()
    for step in (1, 2, 3):
        figures = {"reward/mean": 0.5, "time/step": 2.0, "tokens/action": 100 * step}
        append_row(run.path / "metrics.jsonl", {"step": step, **figures})
    run_fixtures.add_evaluation(run, 0)
    run_fixtures.add_evaluation(run, 2)
    answer = await got(page, f"/api/runs/{RUN}/metrics?names=reward/mean")
    assert answer["axes"] == {"time": [2.0, 4.0, 6.0], "tokens": [100.0, 300.0, 600.0]}
    assert answer["evaluations"]["axes"] == {"time": [0.0, 4.0], "tokens": [0.0, 300.0]}
    part = await got(page, f"/api/runs/{RUN}/metrics?names=rew*&first=2&last=2")
    assert part["columns"] == {"step": [2], "reward/mean": [0.5]}
    assert (part["axes"]["time"], part["evaluations"]["step"]) == ([4.0], [2])
    async with page() as http:
        assert (await http.get(f"/api/runs/{RUN}/metrics?first=-1")).status_code == 400


def test_a_stretch_of_a_long_run_has_all_its_steps(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [f'{{"step": {step}, "a": {step}, "time/step": 1}}\n' for step in range(1, 2001)]
    metrics.write_text("".join(rows))
    answer = Curves(metrics).columns(["a"], within=(101, 200))
    assert (answer["each"], answer["columns"]["a"]) == (1, list(map(float, range(101, 201))))
    assert (answer["axes"]["time"][0], answer["axes"]["time"][-1]) == (101.0, 200.0)


async def test_notes_are_written_and_told_in_list_and_run(page: Client) -> None:
    run_fixtures.make_run(status="completed", ended_at=1.0)
    assert (await got(page, "/api/runs"))["runs"][0]["tags"] == []
    wanted = {"tags": ["best"], "note": "Twice.", "revision": 0}
    async with page(origin=f"http://{HOST}") as http:
        written = await http.post(f"/api/runs/{RUN}/notes", json=wanted)
        again = await http.post(f"/api/runs/{RUN}/notes", json=wanted)
        wrong = await http.post(f"/api/runs/{RUN}/notes", json={**wanted, "tags": "best"})
        long = {**wanted, "revision": 1, "tags": ["x" * 50]}
        refused = await http.post(f"/api/runs/{RUN}/notes", json=long)
    assert written.json() == {"tags": ["best"], "note": "Twice.", "revision": 1}
    assert (again.status_code, again.json()["code"]) == (422, "conflict")
    assert wrong.status_code == refused.status_code == 400
    assert refused.json()["field"] == "tags"
    assert (await got(page, f"/api/runs/{RUN}"))["notes"] == written.json()
    assert (await got(page, "/api/runs"))["runs"][0]["tags"] == ["best"]


async def test_damaged_notes_hide_no_run(page: Client) -> None:
    (run_fixtures.make_run().path / "notes.json").write_text("{")
    assert (await got(page, "/api/runs"))["runs"][0]["status"] != "unreadable"
    assert "notes.json is damaged" in (await got(page, f"/api/runs/{RUN}"))["notes"]["error"]


async def test_no_answer_holds_a_secret(page: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", SECRET)
    run = run_fixtures.make_run(
        name=f"run {SECRET}",
        status="failed",
        error=f"It said {SECRET}.",
        code="process_exited",
        steps=2,
    )
    run_fixtures.add_alert(run, evidence=f"It is {SECRET}.")
    (run.path / "config.resolved.json").write_text(
        json.dumps({"env.key": {"value": SECRET, "source": "edit"}})
    )
    (run.path / "logs" / "supervisor.log").write_text(f"{SECRET}\n")
    tokens = {"ids": [4711], "lengths": [len(SECRET)], "logprobs": [-0.1]}
    said = {**run_results.completion(SECRET, 1.0), **tokens}
    run_results.add_group(run, 1, said, prompt=SECRET, item=SECRET)
    for step in (0, 2):
        run_results.evaluate(run, step, 0.1, tasks=[SECRET, f"{SECRET}?"])
    append_row(run.path / "metrics.jsonl", {"step": 2, SECRET: 1.0})
    async with page() as http:
        for path in ("/api/runs", *(f"/api/runs/{RUN}{what}" for what in PARTS)):
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert SECRET not in answer.text and "4711" not in answer.text, path
            assert "***" in answer.text or path.endswith("/results"), path


PARTS = (
    *("", "/metrics", "/settings", "/evals", "/results"),
    *("/groups", "/groups/1/0", "/logs?role=supervisor"),
)


async def test_events_that_nobody_of_us_wrote_do_no_harm(page: Client) -> None:
    run = run_fixtures.make_run()
    events: list[Mapping[str, Any]] = [
        {"type": ["status"]},
        {"type": "status", "status": {"a": [1]}, "t": "late"},
        {"type": "alert", "rule": "<b>" * 500, "step": 3},
        {"type": "process_exit", "role": "x" * 5000, "code": None},
        {"no": "type"},
    ]
    for event in events:
        append_row(run.path / "events.jsonl", event)
    view = await got(page, f"/api/runs/{RUN}")
    assert [entry["kind"] for entry in view["timeline"]] == ["status", "alert", "process_exit"]
    assert max(len(entry["text"]) for entry in view["timeline"]) <= 200
