"""rl_evaluate as an agent calls it: a run that has ended is measured again, by every name that its
results give.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.trial.request import models_to_test
from halteres.models import TINY, builtin_path
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.reading.named_weights import weights_of
from halteres.runs.servers import served

from .real_runs import told, until
from .run_fixtures import tokens

pytestmark = pytest.mark.runs

BUDGET = 350  # tokens of an answer

SMALL = {
    "inference.engine": "scripted",
    "total_steps": 1,
    "eval_every": 0,
    "batch_size": 8,
    "group_size": 4,
    "eval_tasks": 3,
    "eval_samples": 2,
    "ensure_scores_are_not_same": False,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    """A real run that has ended, in a home of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HALTERES_HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("TINKER_BASE_URL", "HALTERES_SESSION", "OPENROUTER_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        yield asyncio.run(trained())


async def trained() -> RunDirectory:
    started = await told("rl_start_training", environment="arithmetic", changes=SMALL)
    assert "run_id" in started, started
    await until(started["run_id"], lambda answer: answer["status"] == "completed", within_s=60)
    return find_run(started["run_id"])


async def evaluated(**arguments: Any) -> dict[str, Any]:
    """The answer once the evaluation has ended; all answers are within their budget."""
    answer = await told("rl_evaluate", **arguments)
    while answer.get("status") == "running":
        assert answer["next"].startswith(f'rl_evaluate(evaluation_id="{answer["evaluation_id"]}"')
        answer = await told("rl_evaluate", evaluation_id=answer["evaluation_id"], wait_s=45)
    assert tokens(answer) <= BUDGET, answer
    return answer


async def test_a_run_that_has_ended_is_evaluated_again_on_more_tasks_the_same_call_waits_for_it_and_another_is_refused(
    run: RunDirectory,
) -> None:
    first = await told("rl_evaluate", run_id=run.run_id, num_tasks=5, wait_s=0)
    other = await told("rl_evaluate", run_id=run.run_id, num_tasks=6)
    assert other["code"] == "conflict", "one evaluation at a time, each may load a model"
    assert other["next"] == f'rl_evaluate(evaluation_id="{first["evaluation_id"]}", wait_s=45)'
    answer = await evaluated(run_id=run.run_id, num_tasks=5)
    assert answer["evaluation_id"] == first["evaluation_id"]
    assert (answer["status"], answer["environment"], answer["run_id"]) == (
        "done",
        "arithmetic",
        run.run_id,
    )
    assert (answer["step"], answer["figures"]["eval/num_tasks"]) == (1, 5)
    assert answer["weights"].startswith("tinker://")
    gain = answer["improvement"]["eval/percent_correct"]
    assert (answer["improvement"]["since_step"], gain["num_tasks"], gain["method"]) == (
        0,
        3,
        "paired",
    )
    assert len(Path(answer["files"], "samples.jsonl").read_text().splitlines()) == 5 * 3
    assert answer["next"] == f'rl_get_results("{run.run_id}")'


async def test_weights_are_named_in_every_form_that_the_results_offer(run: RunDirectory) -> None:
    offered = (await told("rl_get_results", run_id=run.run_id))["weights"]
    named = [
        weights_of(name)
        for name in (run.run_id, offered["sampler"], offered["state"], offered["peft_dir"])
    ]
    assert [(one.run.run_id, one.step) for one in named] == [(run.run_id, 1)] * 4
    assert {one.path for one in named} == {offered["sampler"], offered["state"]}
    answer = await evaluated(weights=offered["state"])
    assert (answer["status"], answer["weights"], answer["step"]) == ("done", offered["state"], 1), (
        answer
    )


async def test_an_environment_is_tested_with_weights_in_every_form_that_the_results_offer(
    run: RunDirectory,
) -> None:
    offered = (await told("rl_get_results", run_id=run.run_id))["weights"]
    names = [
        run.run_id,
        offered["sampler"],
        offered["state"],
        offered["peft_dir"],
        "tinker://nobody/weights/x",
        "a/b",
    ]
    *ours, nobody, remote = models_to_test("arithmetic", run.settings(), names)
    assert {(one.is_local, one.run, one.problem) for one in ours} == {(True, run.run_id, "")}
    assert nobody.is_local and not remote.is_local
    await told("rl_select_environment", name="arithmetic", changes=SMALL)
    answer = await told(
        "rl_test_inference", models=[run.run_id, nobody.model], num_steps=1, group_size=2
    )
    while answer["status"] == "running":
        answer = await told("rl_test_inference", test_id=answer["test_id"])
    trained, missing = answer["models_tested"]
    assert (trained["model"], trained["total_completions"]) == (run.run_id, 2), answer
    assert "error" not in trained
    assert "or its adapter/" in missing["error"]


async def test_the_base_model_is_measured_on_a_drafts_tasks(run: RunDirectory) -> None:
    await told("rl_select_environment", name="arithmetic", changes={**SMALL, "eval_tasks": 2})
    answer = await evaluated(base=True)
    assert (answer["status"], answer["weights"], answer["step"]) == ("done", "halteres/tiny", 0), (
        answer
    )
    assert answer["figures"]["eval/num_tasks"] == 2
    assert "run_id" not in answer


async def test_a_base_model_that_only_the_named_service_has_is_measured_there(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights were taken off this disk once the service had it."""
    tiny, folder = builtin_path(TINY), tmp_path / "model"
    assert tiny is not None
    shutil.copytree(tiny, folder)
    with served(str(folder), arguments=("--engine", "scripted")) as service:
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        monkeypatch.setenv("TINKER_BASE_URL", service.url)
        changes = {
            **SMALL,
            "inference.engine": "torch",
            "inference.model": str(folder),
            "eval_tasks": 2,
        }
        await told("rl_select_environment", name="arithmetic", changes=changes)
        answer = await evaluated(base=True)
    assert (answer["status"], answer["weights"]) == ("done", str(folder)), answer


async def test_what_cannot_be_evaluated_says_which_forms_can(
    run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for weights in (str(tmp_path), "tinker://nobody/sampler_weights/final"):
        answer = await told("rl_evaluate", weights=weights)
        assert answer["code"] == "not_found"
        assert "run's id, a tinker:// path of rl_get_results, or its adapter/" in answer["error"]
        assert answer["next"] == "rl_list_runs()"
    assert (await told("rl_evaluate", weights="x", base=True))["code"] == "invalid_arguments"
    assert (await told("rl_evaluate", evaluation_id="e-00000000"))["code"] == "not_found"
    assert (await told("rl_evaluate", run_id="nowhere"))["code"] == "run_not_found"
