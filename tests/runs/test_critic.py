"""A run whose advantages a critic makes: what it is refused for, what it needs, and that a killed or
resumed critic changes no bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import wait_until

from halteres.clients.critic import STATE, step_name
from halteres.config.resolution import resolve_settings
from halteres.config.settings import TrainerSettings
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotFound
from halteres.models import TINY, builtin_path
from halteres.runs.directory import CRITIC, RunDirectory
from halteres.runs.planning.checks import checkpoint_bytes
from halteres.runs.planning.models import RunModel, critic_model
from halteres.runs.planning.plan import plan_run
from halteres.runs.planning.resume_point import CheckpointMissing, check_settings
from halteres.runs.start import start_run

from .run_fixtures import end, survivors, wait, wait_for_end
from .test_deterministic import ENVIRONMENT, adapter, metrics

STEPS = 6
EDITS = {
    "inference.engine": "scripted",
    "trainer.advantage": "gae",
    "trainer.critic_epochs": 2,
    "trainer.critic_warmup_steps": 1,
    "trainer.deterministic": "true",
    "trainer.total_steps": STEPS,
    "trainer.checkpoint_every": 2,
    "trainer.eval_every": 0,
    "env.group_size": 4,
    "env.batch_size": 16,
    "env.max_new_tokens": 16,
    "env.eval_tasks": 1,
    "env.eval_samples": 1,
}


def edits(**changes: object) -> list[str]:
    named = {f"trainer.{name}": value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in {**EDITS, **named}.items()]


def tiny() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


def another(folder: Path, **changes: object) -> Path:
    """A copy of the built-in model with other fields in its config.json."""
    shutil.copytree(tiny(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


BASE = RunModel(name=TINY, tokenizer=str(tiny()))


def refused(critic: Path | None, model: RunModel = BASE) -> HalteresError:
    settings = TrainerSettings(advantage="gae", critic=None if critic is None else str(critic))
    with pytest.raises(HalteresError) as error:
        critic_model(settings, model)
    return error.value


def test_a_folder_that_can_be_no_critic_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    gone = refused(tmp_path / "gone")
    assert isinstance(gone, NotFound) and "no such folder" in gone.why
    empty = tmp_path / "empty"
    empty.mkdir()
    assert isinstance(refused(empty), InvalidData)
    classifier = another(
        tmp_path / "two",
        architectures=["Qwen3ForSequenceClassification"],
        id2label={"0": "a", "1": "b"},
    )
    assert "2 outputs" in refused(classifier).sentence
    for error in (gone, refused(empty)):
        assert error.details["field"] == "trainer.critic"


def test_a_critic_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = another(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content, indent=3))
    settings = TrainerSettings(advantage="gae", critic=str(other))
    found = critic_model(settings, BASE)
    assert found.folder == other, "only its layout is another"
    content["added_tokens"][0]["content"] += "x"
    (other / "tokenizer.json").write_text(json.dumps(content))
    error = refused(other)
    assert isinstance(error, InvalidConfig) and "tokenizer is another" in error.why


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": [1]}', '{"added_tokens": [{}]}'])
def test_a_critic_whose_tokenizer_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    other = another(tmp_path / "other")
    (other / "tokenizer.json").write_text(content)
    error = refused(other)
    assert isinstance(error, InvalidData) and error.details["field"] == "trainer.critic"


def test_the_critic_of_a_checkpoint_is_the_same_by_each_of_its_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's settings have its absolute folder; who goes on from it may name it as before."""
    another(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    given = resolve_settings("arithmetic", None, edits(critic="model")).settings
    held = plan_run(resolve_settings("arithmetic", None, edits(critic="model"))).settings
    check_settings(held, given, 2, has_completed=False)
    others = resolve_settings("arithmetic", None, edits(critic="elsewhere")).settings
    with pytest.raises(InvalidConfig, match="critic"):
        check_settings(held, others, 2, has_completed=False)


def test_without_the_models_folder_there_is_no_critic() -> None:
    """A service elsewhere has the model; it gives no values."""
    error = refused(None, RunModel(name="Qwen/Qwen3-8B", tokenizer="Qwen/Qwen3-8B"))
    assert error.details["field"] == "trainer.advantage"
    assert "halteres models add" in str(error.next)


@pytest.mark.parametrize(
    "wrong",
    [{"gae_lambda": 1.5}, {"gamma": -0.1}, {"critic_clip": 0}, {"critic_warmup_steps": STEPS}],
)
def test_what_is_out_of_its_range_is_refused_before_the_run(
    home: Path, wrong: dict[str, float]
) -> None:
    ((name, _),) = wrong.items()
    with pytest.raises(InvalidConfig, match=name):
        start_run(plan_run(resolve_settings("arithmetic", None, edits(**wrong))))
    assert not list((home / "runs").glob("*"))


def test_the_memory_and_the_disk_of_a_run_count_its_critic(home: Path) -> None:
    plans = [
        plan_run(resolve_settings("arithmetic", None, edits(advantage=advantage)))
        for advantage in ("rebn", "gae")
    ]
    figures = [{check.name: check.figures for check in plan.checks} for plan in plans]
    before, after = (one["memory"]["need_gb"] for one in figures)
    assert after - before == pytest.approx(0.6, abs=0.1), "a process, and a model of 0.9 M"
    assert plans[1].refusal is None
    assert [check.found for check in plans[1].checks if check.name == "critic"] == [str(tiny())]


def test_a_critics_states_are_kept_here_also_where_the_models_are_elsewhere(home: Path) -> None:
    settings = resolve_settings("arithmetic", None, edits()).settings
    critic = critic_model(TrainerSettings(advantage="gae"), BASE)
    alone = checkpoint_bytes(settings, None, critic)
    assert checkpoint_bytes(settings, None) == 0 < alone
    assert checkpoint_bytes(settings, critic.shape, critic) == 2 * alone


def test_the_folder_of_a_critic_is_called_as_it_is_from_anywhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    plan = plan_run(resolve_settings("arithmetic", None, edits(critic="model")))
    assert plan.settings.trainer.critic == str(tmp_path / "model")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "lengths.py").write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALTERES_HOME", str(folder / "home"))
        yield str(folder / "lengths.py")


def states(run: RunDirectory) -> dict[str, bytes]:
    """The critic's files, by state."""
    files = (run.path / CRITIC).glob("step-*/*.safetensors")
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def straight(environment: str) -> RunDirectory:
    """A run that nothing interrupted."""
    run = start_run(plan_run(resolve_settings(environment, None, edits())))
    state = wait_for_end(run, within_s=240)
    assert (state.status, state.error) == ("completed", None)
    assert not survivors(state)
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["train/updates"] for row in rows] == [0.0, *[1.0] * (STEPS - 1)]
    assert rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"]
    return run


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_killed_critic_is_started_again_and_changes_no_bit(
    straight: RunDirectory, environment: str
) -> None:
    run = start_run(plan_run(resolve_settings(environment, None, edits())))
    try:
        before = wait(run, lambda state: state.step >= 2, within_s=240)
        pid = before.processes["critic"]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: run.state().processes["critic"]["pid"] != pid, within_s=60)
        state = wait_for_end(run, within_s=240)
        assert (state.status, state.error) == ("completed", None)
    finally:
        end(run)
    assert [event["role"] for event in run.events() if event["type"] == "restart"] == ["critic"]
    assert metrics(run) == metrics(straight)
    assert states(run) == states(straight) and adapter(run) == adapter(straight)


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_resumed_run_goes_on_with_the_critic_of_its_checkpoint_to_the_bit(
    straight: RunDirectory, environment: str
) -> None:
    first = start_run(plan_run(resolve_settings(environment, None, edits(total_steps=4))))
    assert wait_for_end(first, within_s=240).status == "completed"
    longer = resolve_settings(None, None, [f"trainer.total_steps={STEPS}"], base=first.settings())
    again = start_run(plan_run(longer, resume=first))
    assert wait_for_end(again, within_s=240).status == "completed"
    assert metrics(again) == metrics(straight)
    assert states(again) == states(straight)
    assert (again.path / CRITIC / STATE).is_dir()

    other = resolve_settings(
        None,
        None,
        [f"trainer.total_steps={STEPS}", "trainer.critic=elsewhere"],
        base=first.settings(),
    )
    refusal = plan_run(other, resume=first).refusal
    assert refusal is not None and "trainer.critic" in refusal.sentence
    shutil.rmtree(first.path / CRITIC / step_name(4))
    refusal = plan_run(longer, resume=first).refusal
    assert isinstance(refusal, CheckpointMissing) and "critic" in refusal.what
