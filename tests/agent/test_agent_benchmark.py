"""The agent benchmark: nobody passes who has not solved the task, whatever he says; any model can
be set to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from halteres.runs.directory import RunDirectory, runs_home

from .real_runs import ENVIRONMENT as PACED
from .run_fixtures import add_step
from .solved_tasks import (
    ONE,
    OTHER,
    Answer,
    FakeModel,
    SolvedTask,
    changed,
    prepared,
    rewritten,
    serving,
    set_up,
    trained,
)

# The scenes have made them importable.
from benchmarks.agent import evidence, files, run as program  # isort: skip
from benchmarks.agent.reading import Asked, calls_in  # isort: skip
from benchmarks.agent.task import ENVIRONMENTS, Place, answer_in, judge, prepare  # isort: skip
from benchmarks.agent.tasks import TASKS, recover  # isort: skip

pytestmark = pytest.mark.runs

KEY = "sk-planted-0123456789"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place's home is this process's too: scenes are made in it."""
    place = Place(tmp_path / "place")
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HALTERES_SESSION", raising=False)
    # this process is that of other tests, too
    monkeypatch.setattr(program, "block_torch", lambda: None)
    return place.home


@pytest.fixture
def place(home: Path) -> Place:
    return Place(home.parent)


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the weights of each run really get right."""
    shares = {ONE: 0.95, OTHER: 0.35}
    monkeypatch.setattr(evidence, "truth", lambda run: shares[run.run_id])
    return shares


@pytest.mark.parametrize("name", TASKS)
def test_a_solved_task_is_solved(name: str, place: Place, truth: dict[str, float]) -> None:
    verdict = SolvedTask(place, name).verdict()
    assert verdict.solved, verdict.why


@pytest.mark.parametrize("name", TASKS)
def test_who_does_nothing_fails_whatever_he_claims(
    name: str, place: Place, truth: dict[str, float]
) -> None:
    """Nothing was done; the answer is none, empty, of other types, or that of somebody who solved
    the task.
    """
    claimed = SolvedTask(Place(place.folder / "elsewhere"), name).answer
    for run in runs_home().iterdir():  # what the other had done
        run.rename(place.folder / run.name)
    task = TASKS[name]
    prepared(place, task, run_id=ONE, checkpoint_step=5)
    if name in ("hacking", "recover"):
        status = {"hacking": "completed", "recover": "failed"}[name]
        trained(ONE, place.workspace / "till.py", steps=7, status=status, total_steps=20)
    wrong_types: Answer = dict.fromkeys(claimed, 7)
    for answer in (None, {}, wrong_types, dict.fromkeys(claimed, ONE), claimed):
        verdict = judge(task, place, answer)
        assert not verdict.solved, answer
        assert verdict.why


Spoil = Callable[[SolvedTask], object]


def running(scene: SolvedTask) -> None:
    scene.state(ONE, status="stopped")


def of_another_file(scene: SolvedTask) -> None:
    shadow = scene.place.workspace / "arithmetic.py"
    shadow.write_text("")
    scene.state(ONE, environment_file=str(shadow))


def settings_of(run_id: str, **sections: dict[str, Any]) -> Spoil:
    return lambda scene: set_up(RunDirectory(runs_home() / run_id), **sections)


def answering(**changes: Any) -> Spoil:
    return lambda scene: scene.answer.update(changes)


def example(question: str, completion: str) -> Spoil:
    return answering(example={"question": question, "completion": completion})


def file_as_it_was(name: str) -> Spoil:
    return lambda scene: rewritten(scene.place.workspace / name, (ENVIRONMENTS / name).read_text())


def file_with(name: str, before: str, after: str) -> Spoil:
    def spoil(scene: SolvedTask) -> None:
        file = scene.place.workspace / name
        assert before in file.read_text()
        rewritten(file, file.read_text().replace(before, after))

    return spoil


def touched(scene: SolvedTask) -> None:
    changed(scene.place.workspace / "sums.py", time.time() + 30)


def flat(scene: SolvedTask) -> None:
    run = RunDirectory(runs_home() / ONE)
    (run.path / "metrics.jsonl").unlink()
    for step in range(1, 11):
        add_step(run, step, **{"reward/mean": 0.4})


def fewer_steps(scene: SolvedTask) -> None:
    file = runs_home() / OTHER / "metrics.jsonl"
    file.write_text(
        "".join(
            line for line in file.open() if '"step": 10' not in line and '"step":10' not in line
        )
    )


def rates(first: float, second: float) -> Spoil:
    def spoil(scene: SolvedTask) -> None:
        for row, rate in zip(scene.answer["evidence"], (first, second), strict=True):
            row["learning_rate"] = rate

    return spoil


def shares(first: float) -> Spoil:
    return lambda scene: scene.answer["evidence"][0].update(share_correct=first)


SPOILED: dict[str, dict[str, tuple[Spoil, str]]] = {
    "train": {
        "not completed": (running, "the run is completed"),
        "older than the task": (lambda scene: scene.state(ONE, created_at=1.0), "of this attempt"),
        "another environment of that name": (of_another_file, "the run is of the environment"),
        "another model": (
            settings_of(ONE, inference={"model": "/models/large"}),
            "the built-in model",
        ),
        "no weights": (settings_of(ONE, inference={"engine": "scripted"}), "its engine is real"),
        "too high a figure": (answering(share_correct=0.99), "share_correct"),
        "no figure": (answering(share_correct=True), "share_correct"),
        "half an id": (answering(run_id=ONE[:6]), "the run exists"),
    },
    "repair": {
        "not mended": (file_as_it_was("sums.py"), "every right answer is paid"),
        "pays for anything": (
            file_with("sums.py", "float(bool(", "float(bool(said) or bool("),
            "nothing else is paid",
        ),
        "easier problems": (
            file_with("sums.py", 'rng, "train"', 'rng, "eval"'),
            ("its problems are as they were"),
        ),
        "no Python": (file_with("sums.py", "import random", "import"), "sums.py can be used"),
        "changed after the run": (touched, "began after the last change"),
        "not tested": (
            lambda scene: (scene.place.home / "tests/t-00000000/result.json").unlink(),
            "a test of the file",
        ),
        "no rise": (flat, "its reward rose"),
    },
    "choose": {
        "one rate twice": (rates(0.0015, 0.0015), "both rates"),
        "the rates the other way round": (rates(0.000001, 0.0015), "the runs had these rates"),
        "another difference": (
            settings_of(OTHER, trainer={"learning_rate": 1e-6}, run={"seed": 3}),
            "nothing else differs",
        ),
        "fewer steps": (fewer_steps, "the same 8 steps"),
        "made-up figures": (shares(0.99), "share_correct"),
        "the worse one": (answering(better=0.000001), "that was named"),
    },
    "hacking": {
        "goes on": (lambda scene: scene.state(ONE, status="completed"), "the run was stopped"),
        ("an answer that was not given"): (
            example("What is 2 + 4?", "It is \\boxed{9}."),
            "the example",
        ),
        "a right answer": (example("What is 2 + 4?", "It is \\boxed{6}."), "the example"),
        "an answer that was not paid": (
            example("What is 2 + 4?", "Perhaps \\boxed{3}."),
            "the example",
        ),
        "to another question": (
            example("What is 1 + 1?", ("I think the answer is \\boxed{0}.")),
            "the example",
        ),
        "not mended": (file_as_it_was("till.py"), "nothing else is paid"),
        "pays nothing": (file_with("till.py", "<= DISPLAY", "< 0"), "every right answer is paid"),
    },
    "recover": {
        "not resumed": (
            lambda scene: scene.state(OTHER, resumed_from=None),
            "from the last checkpoint",
        ),
        "from an older checkpoint": (
            lambda scene: scene.state(OTHER, resume_point={"step": 0}),
            "the last checkpoint",
        ),
        "not completed": (lambda scene: scene.state(OTHER, status="failed"), "it is completed"),
        "another failed run": (answering(failed_run=OTHER), "the failed run is the one"),
        "the failed run itself": (answering(completed_run=ONE), "it is completed"),
        "steps left out": (lambda scene: scene.state(ONE, total_steps=30), "it has all the steps"),
        "other settings": (
            settings_of(OTHER, trainer={"learning_rate": 1e-6}),
            "its settings are the same",
        ),
        "another failed_process": (answering(what_ended="the engine"), "what ended is told"),
    },
}


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for name, spoiled in SPOILED.items() for how in spoiled]
)
def test_what_only_looks_like_a_solution_is_none(
    name: str, how: str, place: Place, truth: dict[str, float]
) -> None:
    scene, (spoil, words) = SolvedTask(place, name), SPOILED[name][how]
    spoil(scene)
    assert words in scene.verdict().why


@pytest.mark.parametrize(
    ("name", "words"), [("train", "get 90% right"), ("repair", "get 45% right")]
)
def test_the_weights_have_the_last_word(
    name: str, words: str, place: Place, truth: dict[str, float]
) -> None:
    """Whatever metrics and evaluations of the run say."""
    truth[ONE] = 0.4
    assert words in SolvedTask(place, name).verdict().why


def test_which_is_better_is_measured_again(place: Place, truth: dict[str, float]) -> None:
    truth[ONE], truth[OTHER] = truth[OTHER], truth[ONE]
    assert "that was named" in SolvedTask(place, "choose").verdict().why


def test_a_run_that_was_resumed_twice_descends_from_the_first(
    place: Place, truth: dict[str, float]
) -> None:
    scene = SolvedTask(place, "recover")
    third = "cccc3333"
    trained(
        third,
        evidence.ARITHMETIC,
        steps=20,
        resumed_from=OTHER,
        resume_point={"step": 15},
        total_steps=20,
    )
    scene.answer["completed_run"] = third
    assert scene.verdict().solved


def test_file_tools_stay_in_the_workspace(place: Place) -> None:
    prepared(place, TASKS["repair"])
    (place.folder / "secret.py").write_text("x = 1")
    (place.workspace / "link.py").symlink_to(place.folder / "secret.py")
    workspace = files.Workspace(place.workspace)
    inside = place.workspace / "sums.py"
    for path in ("sums.py", "environments/sums.py", str(inside)):
        assert (
            json.loads(workspace.call("read_file", {"path": path}))["content"] == inside.read_text()
        )
    outside = (
        "../secret.py",
        str(place.folder / "secret.py"),
        "link.py",
        "new.py",
        ".",
        "/etc/passwd",
        "",
    )
    for path in outside:
        assert "error" in json.loads(workspace.call("read_file", {"path": path})), path
        assert "error" in json.loads(
            workspace.call("write_file", {"path": path, "content": "x = 2"})
        ), path
    assert (place.folder / "secret.py").read_text() == "x = 1"
    assert not (place.workspace / "new.py").exists()
    for arguments in ({}, {"path": 7}, {"path": "sums.py", "mode": "w"}, "sums.py"):
        assert "takes path" in workspace.call("read_file", arguments)
    workspace.call("write_file", {"path": "sums.py", "content": "x = 3"})
    assert inside.read_text() == "x = 3"


def test_calls_are_read_from_an_answer() -> None:
    assert calls_in('rl_check_status("3fa9c1d2", wait_s=45, until="step>=3")') == [
        Asked("rl_check_status", ("3fa9c1d2",), {"wait_s": 45, "until": "step>=3"})
    ]
    text = (
        'rl_get_logs("a", grep="f(x)"): look, then rl_start_training(changes={"n":[1,null]}, '
        "dry_run=true) or stop"
    )
    assert calls_in(text) == [
        Asked("rl_get_logs", ("a",), {"grep": "f(x)"}),
        Asked("rl_start_training", (), {"changes": {"n": [1, None]}, "dry_run": True}),
    ]
    for words in (
        ("rl_start_training(...) again"),
        "rl_select_environment(name)",
        "rl_get_logs(",
        "mend the file",
        "",
    ):
        assert calls_in(words) == [], words


def test_the_answer_is_the_last_object_of_a_message() -> None:
    assert answer_in('{"a": 1} and then\n```json\n{"b": {"c": "}"}}\n```') == {"b": {"c": "}"}}
    assert answer_in("set {x} and [1]") is None
    assert answer_in("") is None


async def test_a_host_is_set_to_a_task_with_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As README.md says: prepare, install-agent, the host's own MCP client, judge."""
    folder = tmp_path / "by hand"
    assert program.main(["prepare", "repair", str(folder)]) == 0
    told = capsys.readouterr().out
    assert TASKS["repair"].TEXT in told
    installing, judging = (
        line for line in told.splitlines() if line.startswith(("cd ", sys.executable))
    )
    process = await asyncio.create_subprocess_shell(installing, stdout=DEVNULL)
    assert await process.wait() == 0
    entry = json.loads((folder / ".mcp.json").read_text())["mcpServers"]["halteres"]
    server = StdioServerParameters(command=entry["command"], args=entry["args"], env=entry["env"])
    async with Client(server) as client:
        found = (
            await client.call_tool("rl_list_environments", {"query": "sums"})
        ).structured_content
    assert found is not None
    assert found["environments"][0]["file_path"] == str(folder / "environments/sums.py")

    claimed = 'Done!\n{"cause": "the scorer was wrong", "run_id": "deadbeef"}'
    command = [
        claimed if word == "<its last message>" else word for word in shlex.split(judging)[2:]
    ]
    assert program.main(command) == 1
    assert "NO  the run exists" in capsys.readouterr().out
    assert program.main(["prepare", "repair", str(folder)]) == 1, "a folder is used once"


def test_a_model_behind_an_endpoint_is_set_to_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task `recover` with real processes, without weights: killed trainer, resumed by the
    model's calls.
    """
    monkeypatch.setattr(recover, "ENVIRONMENT", PACED)
    monkeypatch.setattr(recover, "AT_STEP", 2)
    edits = (
        "inference.engine=scripted",
        "trainer.total_steps=4",
        "trainer.checkpoint_every=1",
        "trainer.eval_every=0",
    )
    edits += ("env.group_size=2", "env.batch_size=4")
    monkeypatch.setattr(recover, "EDITS", edits)
    monkeypatch.setattr("benchmarks.agent.chat.FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("MODEL_SECRET_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    runs: list[str] = []

    def resume(told: Answer) -> Answer:
        runs.append(told["runs"][0]["run_id"])
        return {"tool": "rl_start_training", "resume_from": runs[0]}

    def wait(told: Answer) -> Answer:
        return {
            "tool": "rl_check_status",
            "run_id": told["run_id"],
            "wait_s": 45,
            "until": "terminal",
        }

    def answer(told: Answer) -> str:
        return json.dumps(
            {"failed_run": runs[0], "what_ended": "trainer", "completed_run": told["run_id"]}
        )

    script: list[Callable[[Answer], Answer | str]] = [
        lambda _: {"tool": "rl_list_runs", "raw": "{not JSON"},
        lambda told: {"tool": "rl_list_runs"}
        if "arguments that are no JSON" in told["error"]
        else "",
        resume,
        wait,
        answer,
    ]
    model, out = FakeModel(script), tmp_path / "results.json"
    with serving(model):
        options = [
            "--model",
            "fake/one",
            "--base-url",
            model.url,
            "--key-variable",
            "MODEL_SECRET_KEY",
        ]
        ended = program.main(
            [*options, "--task", "recover", "--keep", str(tmp_path / "kept"), "--out", str(out)]
        )
    results = json.loads(out.read_text())
    record = results["tasks"][0]
    assert ended == 0, record["why_not"]
    assert (results["agent"], results["solved"], results["all_within_target"]) == (
        "fake/one",
        "1 of 1",
        True,
    )
    assert (record["calls"], record["errors"], record["within_target"]) == (4, 1, True)
    assert 0 < record["tokens"] < 1500
    assert model.requests[0]["messages"][1]["content"] == recover.TEXT
    names = {tool["function"]["name"] for tool in model.requests[0]["tools"]}
    assert "rl_start_training" in names
    assert "write_file" not in names, "this task has no file to mend"
    transcript = (tmp_path / "kept/recover.jsonl").read_text()
    assert "I am Bearer ***" in transcript
    assert KEY not in transcript + out.read_text()


def test_a_model_that_never_ends_is_ended(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.agent.attempt.MOST_CALLS", 3)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("benchmarks.agent.chat.FIRST_PAUSE_S", 0.01)
    model, out = FakeModel([lambda _: {"tool": "rl_list_runs"}] * 9), tmp_path / "results.json"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(model):
        assert (
            program.main(
                ["--model", "m", "--base-url", model.url, "--task", "train", "--out", str(out)]
            )
            == 1
        )
    record = json.loads(out.read_text())["tasks"][0]
    assert (record["calls"], record["solved"]) == (3, False)
    assert "limit of calls" in record["why_not"]


def test_a_place_is_prepared_in_a_new_folder_and_leaves_the_variables_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    made = prepare(TASKS["repair"], tmp_path / "new")
    assert os.environ == before
    assert made.facts["task"] == "repair"
    with made.entered():
        assert os.environ["HALTERES_HOME"] == str(made.home)
    assert os.environ == before
