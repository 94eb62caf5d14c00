"""How long a run takes: ranges that hold the true figure, as recorded on real runs of the built-in
model.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import Settings, TrainerSettings
from halteres.models import TINY
from halteres.observe.metrics import append_row
from halteres.process import Memory
from halteres.runs.directory import RunDirectory, runs_home
from halteres.runs.planning import estimate as estimate_module
from halteres.runs.planning import resources
from halteres.runs.planning.estimate import (
    PER_STEP_S,
    Engine,
    Estimate,
    Span,
    Speed,
    estimate,
    estimate_on_file,
    measured,
    remembered,
)
from halteres.runs.planning.models import RunModel, own_model
from halteres.runs.planning.resources import Gpu, need, workload_of
from halteres.runs.state import RunState, write_state

ENV: dict[str, Any] = {
    "group_size": 16,
    "batch_size": 256,
    "max_token_length": 256,
    "max_new_tokens": 64,
    "max_num_workers": 64,
    "eval_tasks": 128,
    "eval_samples": 4,
}
PROGRAM = EnvironmentProgram(
    name="arithmetic",
    path=Path("/arithmetic.py"),
    interpreter="/python",
    working_directory=Path("/"),
)

STEPS_S = (5.08, 1.48, 1.59, 1.48, 1.45)
TOTAL_S = 20.3
"""Recorded: five steps of `arithmetic` on two cores, and the whole run."""

SPEED = Speed(
    load_s=2.49,
    decode_tokens_per_s=20_800,
    train_tokens_per_s=14_500,
    update_s=0.0016,
    peak_gb=0.665,
    rows=256,
    pass_tokens=2048,
)
"""Recorded: the probe on the same machine."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def settings(steps: int = 5, **env: Any) -> Settings:
    return Settings.model_validate(
        {"env": {**ENV, **env}, "trainer": {"total_steps": steps, "eval_every": 20}}
    )


@dataclass(frozen=True)
class Planned:
    """What a run is estimated by."""

    settings: Settings
    environment: EnvironmentProgram
    model: RunModel
    first_step: int = 0

    @property
    def engine(self) -> Engine:
        return Engine.of(self.settings, self.model, resources.this_machine())

    def estimate(self) -> Estimate | None:
        """Without a measurement."""
        return estimate(
            self.settings,
            self.environment,
            self.model,
            resources.this_machine(),
            first_step=self.first_step,
            may_measure=False,
        )

    def expected(self) -> Estimate:
        found = self.estimate()
        assert found is not None
        return found


def planned(steps: int = 5, first_step: int = 0, **env: Any) -> Planned:
    wanted = settings(steps, **env)
    return Planned(wanted, PROGRAM, own_model(wanted.inference), first_step)


def record(run_id: str = "3fa9c1d2", model: str = TINY, **env: Any) -> RunDirectory:
    """A run as it was recorded."""
    run = RunDirectory(runs_home() / run_id)
    run.path.mkdir(parents=True)
    (run.path / "settings.json").write_text(settings(**env).model_dump_json())
    ended = time.time() - 600
    state = RunState(
        run_id=run_id,
        name=run_id,
        environment="arithmetic",
        environment_file=str(PROGRAM.path),
        interpreter="/python",
        base_model=model,
        tokenizer="/nowhere",
        total_steps=5,
        created_at=ended - TOTAL_S,
        ended_at=ended,
        status="completed",
    )
    write_state(run.path / "run.json", state)
    for step, seconds in enumerate(STEPS_S, 1):
        append_row(
            run.path / "metrics.jsonl", {"step": step, "src": "trainer", "time/step": seconds}
        )
        append_row(
            run.path / "metrics.jsonl", {"step": step, "src": "env", "train/percent_correct": 0.4}
        )
    return run


def remember(plan: Planned, speed: Speed = SPEED) -> None:
    """The cache as the probe has left it."""
    file = environ.home() / "cache" / "engine_speeds.json"
    file.parent.mkdir(exist_ok=True)
    key = plan.engine.key
    file.write_text(json.dumps({key: msgspec.to_builtins(speed)}))


def test_where_nothing_was_measured_there_is_no_estimate(home: Path) -> None:
    assert planned().estimate() is None


def test_earlier_runs_with_the_same_model_and_environment_tell_how_long_this_one_takes(
    home: Path,
) -> None:
    record()
    found = planned().expected()
    assert "3fa9c1d2" in found.basis
    assert found.step_s.low <= 1.48 <= found.step_s.high <= 2 * 1.59
    assert found.total_s.low <= TOTAL_S <= found.total_s.high <= 2 * TOTAL_S
    facts = found.facts
    assert facts["total_min"] == [
        pytest.approx(bound / 60, rel=0.01) for bound in (found.total_s.low, found.total_s.high)
    ]


def test_an_earlier_run_is_scaled_to_the_batch_and_to_the_steps(home: Path) -> None:
    record()
    same, twice, longer = (
        planned().expected(),
        planned(batch_size=512).expected(),
        planned(steps=50).expected(),
    )
    assert twice.step_s.low == pytest.approx(2 * same.step_s.low)
    assert twice.step_s.high == pytest.approx(2 * same.step_s.high)
    assert longer.total_s.low > same.total_s.low + 40 * 1.1
    assert longer.step_s == same.step_s


def test_a_higher_limit_on_answers_makes_the_range_wider_and_not_wrong(home: Path) -> None:
    record()
    same, longer = planned().expected(), planned(max_new_tokens=128).expected()
    assert longer.step_s.low == same.step_s.low
    assert longer.step_s.high >= 1.9 * same.step_s.high


def test_runs_of_another_model_environment_or_engine_do_not_count(home: Path) -> None:
    record(model="/models/other")
    plan = planned()
    assert plan.estimate() is None
    record("aaaa1111")
    other = replace(PROGRAM, name="x", path=Path("/x.py"))
    assert replace(plan, environment=other).estimate() is None
    variant = replace(PROGRAM, name="arithmetic:Hard-v0")
    assert replace(plan, environment=variant).estimate() is None, (
        "another environment of the same file"
    )
    inference = plan.settings.inference.model_copy(update={"threads": 7})
    threads = plan.settings.model_copy(update={"inference": inference})
    assert replace(plan, settings=threads).estimate() is None


@pytest.mark.parametrize(
    ("on_gpu", "counts"),
    [
        (False, {"auto": True, "float32": True, "bfloat16": False}),
        (True, {"auto": True, "float32": False, "bfloat16": True}),
    ],
    ids=["cpu", "gpu"],
)
def test_runs_with_the_type_that_auto_means_here_count(
    home: Path, on_gpu: bool, counts: dict[str, bool]
) -> None:
    run = record()
    gpu = Gpu(name="any", memory=Memory(total=8 << 30, free=8 << 30))
    here = replace(resources.this_machine("cpu"), gpu=gpu if on_gpu else None)
    plan = planned()
    for dtype, is_counted in counts.items():
        earlier = plan.settings.inference.model_copy(update={"dtype": dtype})
        as_it_was = plan.settings.model_copy(update={"inference": earlier})
        (run.path / "settings.json").write_text(as_it_was.model_dump_json())
        found = estimate(plan.settings, PROGRAM, plan.model, here, may_measure=False)
        assert (found is not None) == is_counted, dtype


def test_only_the_steps_that_are_left_count_for_a_run_that_goes_on(home: Path) -> None:
    record()
    whole, rest = (
        planned(steps=40).expected(),
        planned(steps=40, first_step=30).expected(),
    )
    assert rest.total_s.low < whole.total_s.low - 25 * 1.1
    assert rest.step_s == whole.step_s


def test_without_an_earlier_run_the_measured_engine_tells_and_assumptions_are_named(
    home: Path,
) -> None:
    plan = planned()
    remember(plan)
    found = plan.expected()
    assert found.step_s.low <= 1.48 <= found.step_s.high
    assert found.total_s.low <= TOTAL_S <= found.total_s.high
    assert "answers of 16 to 64 tokens assumed" in found.basis


def test_every_pass_through_a_batch_takes_its_time(home: Path) -> None:
    """Training alone: sampling and optimiser steps take no time."""
    speed = msgspec.structs.replace(SPEED, decode_tokens_per_s=1e12, update_s=0.0)

    def step_s(**trainer: Any) -> Span:
        plan = planned()
        given = {**plan.settings.trainer.model_dump(), **trainer}
        own = plan.settings.model_copy(update={"trainer": TrainerSettings.model_validate(given)})
        plan = replace(plan, settings=own)
        remember(plan, speed)
        found = plan.expected().step_s
        return Span(found.low - PER_STEP_S.low, found.high - PER_STEP_S.high)

    once = step_s()
    four = step_s(loss="ppo", epochs=4)
    assert four.low == pytest.approx(4 * once.low)
    assert four.high == pytest.approx(4 * once.high)

    ppo: dict[str, Any] = {"loss": "ppo", "advantage": "gae"}
    with_critic = step_s(**ppo)
    assert with_critic.low == pytest.approx((1 + 1 / 3) * once.low), "it learns meanwhile"
    assert with_critic.high == pytest.approx((1 + 1 / 3 + 1) * once.high)
    pulled = step_s(kl_coef=0.1)
    assert pulled.high == pytest.approx((1 + 1 / 3) * once.high), "the base model's, forward"
    assert step_s(kl_coef=0.1, reference="environment") == once
    longer = step_s(**ppo, critic_epochs=3)
    assert longer.low == pytest.approx((1 + 1 / 3 + 2) * once.low)
    assert longer.high == pytest.approx((1 + 1 / 3 + 3) * once.high)


def test_every_optimiser_step_of_a_batch_takes_its_time(home: Path) -> None:
    plan = planned()
    remember(plan, msgspec.structs.replace(SPEED, update_s=1.0))
    once = plan.expected().step_s
    wanted = {**plan.settings.trainer.model_dump(), "loss": "ppo", "minibatches": 4}
    trainer = TrainerSettings.model_validate(wanted)
    plan = replace(plan, settings=plan.settings.model_copy(update={"trainer": trainer}))
    assert plan.expected().step_s.high > once.high + 3


def test_runs_with_another_number_of_passes_do_not_count(home: Path) -> None:
    run = record()
    plan = planned()
    trainer = TrainerSettings.model_validate(
        {**plan.settings.trainer.model_dump(), "advantage": "gae"}
    )
    as_it_was = plan.settings.model_copy(update={"trainer": trainer})
    (run.path / "settings.json").write_text(as_it_was.model_dump_json())
    assert plan.estimate() is None
    assert replace(plan, settings=as_it_was).estimate() is not None


def test_few_measured_rows_make_the_range_wider_below(home: Path) -> None:
    """A decode step of many rows may take no longer than one of a few."""
    plan = planned()
    remember(plan)
    whole = plan.expected()
    remember(plan, msgspec.structs.replace(SPEED, rows=8))
    few = plan.expected()
    assert few.step_s.low < whole.step_s.low
    assert few.step_s.high == whole.step_s.high


def test_other_runs_that_go_on_make_the_upper_bound_higher(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = record()
    alone = planned().expected()
    monkeypatch.setattr(estimate_module, "active_runs", lambda: [other])
    beside = planned().expected()
    assert (beside.step_s.low, beside.step_s.high) == (alone.step_s.low, 2 * alone.step_s.high)
    assert "1 other run may slow it" in beside.basis


def test_memory_is_told_as_measured_and_with_what_caches_may_grow_to(home: Path) -> None:
    plan = planned()
    remember(plan)
    found = plan.expected()
    assert found.peak_gb == pytest.approx(1.7, abs=0.2), (
        "1.45 GB of the engine and 0.25 of the others were recorded"
    )
    remember(plan, msgspec.structs.replace(SPEED, pass_tokens=256))
    assert plan.model.shape is not None
    by_formula = need(plan.model.shape, workload_of(plan.settings)).total
    assert plan.expected().peak_gb == pytest.approx(by_formula / 1e9, abs=0.01), (
        "the probe saw no whole pass"
    )


@pytest.mark.runs
def test_the_engine_is_measured_once_and_remembered(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model itself; its figures must be such that the recorded truth would have been
    foretold.
    """
    plan = planned()
    engine = plan.engine
    found = measured(engine, workload_of(plan.settings), deadline_s=60)
    assert found is not None and found.decode_tokens_per_s and found.train_tokens_per_s
    assert 0.2 < found.peak_gb < 1.5
    monkeypatch.setattr(estimate_module, "EngineProcess", None)
    assert remembered(engine) == found
    assert plan.expected().step_s.low > 0


def test_a_probe_that_takes_too_long_is_given_up_and_leaves_no_figures(home: Path) -> None:
    plan = planned()
    assert measured(plan.engine, workload_of(plan.settings), deadline_s=0.05) is None
    assert not (home / "cache").exists()


def test_an_engine_that_does_not_start_has_no_speed(home: Path, tmp_path: Path) -> None:
    plan = planned()
    (tmp_path / "config.json").write_text("{}")
    broken = Engine(
        backend="scripted",
        model=RunModel(name="x", tokenizer=str(tmp_path)),
        threads=1,
        machine="m",
    )
    assert measured(broken, workload_of(plan.settings), deadline_s=60) is None
    assert not (home / "cache").exists()


def test_a_training_on_a_file_that_goes_on_has_been_evaluated_before(home: Path) -> None:
    """Its first evaluation is the earlier run's."""
    plan = planned()
    remember(plan)

    def total(first_step: int, steps: int) -> float:
        wanted = Settings.model_validate({"trainer": {"total_steps": steps, "eval_every": 0}})
        found = estimate_on_file(
            wanted,
            plan.model,
            resources.this_machine(),
            tokens_per_step=0.0,
            held_out_tokens=1_000_000,
            forwards=0,
            first_step=first_step,
            may_measure=False,
        )
        assert found is not None
        return found.total_s.low

    evaluation_s = 0.75 * 1_000_000 / 3 / SPEED.train_tokens_per_s
    assert total(0, 10) - total(5, 15) == pytest.approx(evaluation_s, rel=0.05)
