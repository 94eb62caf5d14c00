"""A training on a file is a run: planned, watched, stopped and gone on with as any other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halteres.config.file_training import FileTraining, Method, resolve_file_training
from halteres.config.operator_policy import FILE, PolicyCap
from halteres.config.problem import LockedField
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotFound
from halteres.models import TINY, builtin_path
from halteres.next_step import NextStep
from halteres.observe.metrics import Row, merge_by_step
from halteres.runs.diagnosis.run_facts import RunFacts
from halteres.runs.directory import RunDirectory, list_runs, stop_run
from halteres.runs.planning.file_plan import plan_file_run, resolve_resumed
from halteres.runs.reading.report import report_of
from halteres.runs.start import start_run

from .run_fixtures import survivors, wait, wait_for_end

NUM_ROWS = 48


def rows(folder: Path, method: Method = "sft", count: int = NUM_ROWS) -> Path:
    generator = random.Random(3)
    file = folder / f"{method}.jsonl"
    lines: list[str] = []
    for _ in range(count):
        a, b = generator.randrange(10, 100), generator.randrange(10, 100)
        asked = {"role": "user", "content": f"What is {a} + {b}?"}
        answer = [{"role": "assistant", "content": f"{a} + {b} = {a + b}"}]
        row: dict[str, Any] = {"messages": [asked, *answer]}
        if method == "dpo":
            other = [{"role": "assistant", "content": "I would rather not say."}]
            row = {"prompt": [asked], "chosen": answer, "rejected": other}
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))
    return file


def started(method: Method, data: Path, *edits: str) -> RunDirectory:
    return start_run(plan_file_run(resolve_file_training(method, str(data), edits)))


def written(method: Method, data: Path, *edits: str) -> RunDirectory:
    """The files of a run that nothing supervises."""
    plan = plan_file_run(resolve_file_training(method, str(data), edits))
    return start_run(plan, supervisor=("true",))


def series(run: RunDirectory, name: str) -> dict[int, float]:
    merged: list[Row] = merge_by_step(run.metrics())
    return {row["step"]: row[name] for row in merged if row.get(name) is not None}


def adapter(run: RunDirectory) -> bytes:
    return (run.path / "adapter" / "adapter_model.safetensors").read_bytes()


def test_what_cannot_be_trained_is_refused_and_no_run_begins(home: Path, tmp_path: Path) -> None:
    data = rows(tmp_path)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n')
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "café", "completion": "x"}\n'.encode("latin-1"))
    cases: list[tuple[tuple[Any, ...], type[HalteresError], str]] = [
        ((data, "model=nobody/knows"), NotFound, "nobody/knows"),
        ((tmp_path / "nowhere.jsonl",), NotFound, "nowhere.jsonl"),
        ((broken,), InvalidData, "row 1: 'completion' is missing"),
        ((latin,), InvalidData, "is not UTF-8 text. Line 1"),
        ((data, "max_token_trainer_length=16"), InvalidData, "longer than 16 tokens"),
        ((data, "warmup_steps=9"), InvalidConfig, "warmup_steps is 9"),
    ]
    for (file, *edits), kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            started("sft", file, *edits)
    for edit, sentence in (
        ("batch_sizes=4", "did you mean 'data.batch_size'"),
        ("beta=0.2", "a setting of dpo alone"),
        ("trainer.loss=ppo", "Unknown field 'trainer.loss'"),
        ("epochs=0", "must be greater than 0"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            started("sft", data, edit)
    assert list_runs() == []


def test_the_plan_knows_steps_and_proposes_a_rate(home: Path, tmp_path: Path) -> None:
    data = rows(tmp_path)
    plan = plan_file_run(resolve_file_training("sft", str(data), ["batch_size=4", "epochs=2"]))
    assert plan.refusal is None and plan.environment is None
    trainer = plan.settings.trainer
    num_held_out = next(check.figures["held_out"] for check in plan.checks if check.name == "data")
    assert trainer.total_steps == -(-2 * (NUM_ROWS - num_held_out) // 4)
    assert trainer.learning_rate == 2e-3
    assert plan.sources["trainer.learning_rate"] == "model"
    given = plan_file_run(resolve_file_training("sft", str(data), ["learning_rate=1e-5"]))
    assert given.settings.trainer.learning_rate == 1e-5
    assert given.sources["trainer.learning_rate"] == "edit"


@pytest.mark.parametrize(("steps", "every"), [(5, 1), (9, 2), (15, 2), (16, 2), (17, 3)])
def test_held_out_rows_are_evaluated_eight_times_at_most(
    home: Path, tmp_path: Path, steps: int, every: int
) -> None:
    resolved = resolve_file_training("sft", str(rows(tmp_path)), [f"total_steps={steps}"])
    assert plan_file_run(resolved).settings.trainer.eval_every == every


def test_a_tokenizer_that_is_named_is_the_trainers_too(home: Path, tmp_path: Path) -> None:
    resolved = resolve_file_training("sft", str(rows(tmp_path)), [f"data.tokenizer={TINY}"])
    training = plan_file_run(resolved).training
    assert training is not None and training.tokenizer == str(builtin_path(TINY))


@pytest.mark.parametrize(
    "edit",
    [
        "run.seed=9",
        "hold_out=0.2",
        "most_held_out=1",
        "eval_data=others.jsonl",
        "batch_size=2",
        "packing=true",
        "max_token_trainer_length=100",
    ],
)
def test_a_run_that_goes_on_keeps_what_its_batches_depend_on(
    home: Path, tmp_path: Path, edit: str
) -> None:
    run = written("sft", rows(tmp_path), "too_long=drop")
    with pytest.raises(InvalidConfig, match="cannot be changed in a run that goes on"):
        resolve_resumed(run, [edit])


def test_settings_that_were_given_hold_in_every_run_that_goes_on(
    home: Path, tmp_path: Path
) -> None:
    data = rows(tmp_path)
    run = written("sft", data, "batch_size=4", "total_steps=5")
    for _ in range(2):
        run = start_run(plan_file_run(resolve_resumed(run)), supervisor=("true",))
    assert run.settings().trainer.total_steps == 5
    changes = {"trainer.learning_rate": 1e-4}
    for anew in (RunFacts.of(run).begin_anew(changes), _after_a_loss_that_is_not_finite(run)):
        assert anew.args["data"] == str(data) and anew.args["method"] == "sft"
        kept = anew.args["changes"]
        assert (kept["data.batch_size"], kept["trainer.total_steps"]) == (4, 5)
    assert RunFacts.of(run).begin_anew(changes).args["changes"]["trainer.learning_rate"] == 1e-4
    assert _after_a_loss_that_is_not_finite(run).args["changes"]["learning_rate"] == 1e-3


def _after_a_loss_that_is_not_finite(run: RunDirectory) -> NextStep:
    failed = msgspec.structs.replace(run.state(), status="failed", code="nan_loss")
    return report_of(run, failed).resume_call


def test_after_memory_ran_out_a_new_run_has_smaller_batches(home: Path, tmp_path: Path) -> None:
    """Also where there is a checkpoint: with the same batches it would run out again."""
    data = rows(tmp_path)
    run = written("sft", data, "batch_size=4")
    failed = msgspec.structs.replace(run.state(), status="failed", code="gpu_oom", resumable=True)
    anew = report_of(run, failed).resume_call
    assert "resume_from" not in anew.args and anew.args["data"] == str(data)
    assert anew.args["changes"]["data.batch_size"] == 2
    smaller = anew.args["changes"]
    edits = [f"{name}={value}" for name, value in smaller.items()]
    again = resolve_file_training(anew.args["method"], anew.args["data"], edits)
    assert again.training.batch_size == 2


def test_an_operators_policy_holds_for_a_training_on_a_file(home: Path, tmp_path: Path) -> None:
    data = rows(tmp_path)
    (home / FILE).write_text("caps: {max_steps: 3}\nlock: {trainer.lora_rank: 4}\n")
    with pytest.raises(PolicyCap, match="max_steps is 3"):
        started("sft", data, "batch_size=4")
    with pytest.raises(LockedField, match="lora_rank"):
        started("sft", data, "lora_rank=8")
    plan = plan_file_run(resolve_file_training("sft", str(data)))
    assert plan.refusal is None and plan.settings.trainer.lora_rank == 4
    assert list_runs() == []


@pytest.mark.runs
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_going_on_from_a_checkpoint_gives_the_bits_of_an_unbroken_run(
    home: Path, tmp_path: Path, method: Method
) -> None:
    """More than one epoch, so that the order of the second is drawn again, too."""
    data = rows(tmp_path, method)
    edits = ("batch_size=8", "epochs=1.5", "checkpoint_every=4", "eval_every=3")
    whole = started(method, data, *edits)
    state = wait_for_end(whole, within_s=120)
    assert (state.status, state.kind, state.error) == ("completed", method, None)
    assert state.environment == f"{method}:{method}" and not survivors(state)
    resumed = plan_file_run(resolve_resumed(whole), resume=whole, resume_step=4)
    run = start_run(resumed)
    state = wait_for_end(run, within_s=120)
    assert (state.status, state.error) == ("completed", None)
    assert state.step == state.total_steps == 9
    assert adapter(run) == adapter(whole)
    loss = "train/loss"
    assert series(run, loss) == series(whole, loss)
    held_out = {"sft": "eval/loss_per_token", "dpo": "eval/loss"}[method]
    course = series(whole, held_out)
    assert list(course) == [0, 3, 6, 9] and course[9] < course[0]
    assert series(run, held_out) == course


@pytest.mark.runs
def test_a_training_on_a_file_is_stopped_with_a_checkpoint_and_told_as_any_run(
    home: Path, tmp_path: Path
) -> None:
    run = started("sft", rows(tmp_path), "batch_size=4", "epochs=200", "run.name=sums")
    wait(run, lambda state: state.status == "running" and state.step >= 2, within_s=90)
    stopped = stop_run(run)
    assert (stopped.status, stopped.resumable, stopped.error) == ("stopped", True, None)
    assert stopped.last_checkpoint is not None and not survivors(stopped)
    report = report_of(run)
    assert report.step == stopped.last_checkpoint["step"] >= 2
    figures = {figure.kind.name: figure.value for figure in report.figures}
    assert figures["loss_per_token"] is not None and figures["eval_loss_per_token"] is not None
    assert "reward_mean" not in figures and "loss" in report.trend
    anew = RunFacts.of(run).begin_anew({"trainer.learning_rate": 1e-4})
    assert anew.args == {
        "data": str(tmp_path / "sft.jsonl"),
        "method": "sft",
        "changes": {"data.batch_size": 4, "data.epochs": 200, "trainer.learning_rate": 1e-4},
    }
    assert (run.path / "plot.png").stat().st_size > 0
    assert (run.path / "adapter" / "adapter_config.json").is_file()
    training = FileTraining.read(run.path)
    assert training.method == "sft" and len(training.digest) == 64
    rows(tmp_path, count=NUM_ROWS + 1)
    plan = plan_file_run(resolve_resumed(run), resume=run)
    assert plan.refusal is not None and "have changed" in plan.refusal.sentence


@pytest.mark.runs
def test_packed_rows_are_fewer_sequences(home: Path, tmp_path: Path) -> None:
    run = started("sft", rows(tmp_path), "batch_size=16", "packing=true", "total_steps=2")
    assert wait_for_end(run, within_s=90).status == "completed"
    assert series(run, "sequences/trained") == {1: 1.0, 2: 1.0}
    assert series(run, "rows/count") == {1: 16.0, 2: 16.0}


@pytest.mark.runs
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_loads_the_adapter(home: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = started("sft", rows(tmp_path), "total_steps=1", "hold_out=0")
    assert wait_for_end(run, within_s=90).status == "completed"
    base = AutoModelForCausalLM.from_pretrained(str(builtin_path(TINY)))
    model: Any = PeftModel.from_pretrained(base, str(run.path / "adapter"))
    assert any("lora_B" in name and bool(value.any()) for name, value in model.named_parameters())
