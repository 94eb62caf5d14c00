"""Who failed, whether for want of memory, and which settings would mend it. Read off directories
without a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halteres.config.file_training import FILE
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory, runs_home
from halteres.runs.reading import failures
from halteres.runs.reading.failures import (
    FailedProcess,
    failed_process,
    kernel_kills,
    mending,
    ran_out,
    smaller,
)
from halteres.runs.reading.progress import Given, GivenTrainer, condition, read_given
from halteres.runs.state import RunState, write_state

RUN = "3fa9c1d2"
ENV = {"group_size": 8, "batch_size": 64, "max_token_length": 1024}
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))


@pytest.fixture
def run() -> RunDirectory:
    """A run with a checkpoint of step 5."""
    run = RunDirectory(runs_home() / RUN)
    for folder in ("logs", "control"):
        (run.path / folder).mkdir(parents=True)
    (run.path / "settings.json").write_text(
        json.dumps({"env": ENV, "trainer": {"learning_rate": 4e-5}, "new": 1})
    )
    append_row(
        run.path / "checkpoints.jsonl",
        {"name": "s", "step": 5, "state_path": "tinker://x/weights/s"},
    )
    state(run)
    return run


def died(
    run: RunDirectory,
    role: str = "trainer",
    title: str = "Trainer",
    code: int | None = 1,
    **facts: Any,
) -> Any:
    return failures.died(run, role, title, code, **{"step": 7, "ready": True, **facts})


def test_a_trainer_without_gpu_memory_says_so_and_what_to_lower(run: RunDirectory) -> None:
    run.log("trainer").write_text(f"Traceback (most recent call last):\n{CUDA}\n")
    failed = died(run)
    assert failed.code == "gpu_oom"
    assert failed.details["exit"] == {"process": "trainer", "code": 1}
    assert failed.sentence == (
        "Trainer ran out of GPU memory at step 7. Lower max_token_length to 768 or batch_size to "
        "32, "
        f"then go on from step 5: halteres train --resume {RUN}"
    )


def test_its_last_words_tell_as_well_as_its_log(run: RunDirectory) -> None:
    words = {
        "role": "trainer",
        "code": "service_failed",
        "what": f"The service failed: {CUDA}",
        "next": "Look.",
    }
    (run.path / "control" / "failure.json").write_text(json.dumps(words))
    assert died(run).code == "gpu_oom"
    # the words are those of a process that ended by itself
    assert died(run, code=-9).code == "process_exited"


def test_an_engine_says_it_in_its_own_log(run: RunDirectory) -> None:
    run.log("engine").write_text(f"{CUDA}\n")
    failed = died(run, "service", "The engine", None, ready=False)
    assert (failed.code, failed.what) == (
        "gpu_oom",
        "The engine ran out of GPU memory before it was ready.",
    )


def test_the_memory_of_the_machine_is_told_from_that_of_the_gpu(run: RunDirectory) -> None:
    run.log("trainer").write_text("MemoryError\n")
    assert died(run).what == "Trainer ran out of memory at step 7."


def test_what_an_environment_needs_our_settings_do_not_mend(run: RunDirectory) -> None:
    run.log("env").write_text("MemoryError\n")
    failed = died(run, "env", "Environment")
    assert (failed.code, failed.why) == ("process_exited", "MemoryError.")


def test_a_run_without_a_checkpoint_starts_again(run: RunDirectory) -> None:
    (run.path / "checkpoints.jsonl").unlink()
    (run.path / "settings.json").unlink()
    run.log("trainer").write_text(CUDA)
    assert died(run).next == "Take a smaller inference.model, then start again."


def test_a_killed_process_is_only_possibly_one_without_memory(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    monkeypatch.setattr(failures, "COUNTERS", (str(counter),))
    assert died(run, code=-9).why == ""
    counter.write_text("low 0\noom 2\noom_kill 2\n")
    failed = died(run, code=-9)
    assert failed.code == "process_exited"
    assert failed.why.startswith(
        "Possibly for want of memory: the kernel has killed 2 processes here"
    )
    assert died(run, code=-15).why == ""
    assert kernel_kills() == 2


@pytest.mark.parametrize(
    ("line", "short"),
    [
        (CUDA, "GPU memory"),
        ("RuntimeError: HIP error: out of memory", "GPU memory"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "GPU memory"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "memory"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "memory"),
        ("Step 7: reward 0.5, 2.1 s.", None),
        ("The answer mentions MemoryErrors", None),
    ],
)
def test_libraries_say_that_memory_is_short_in_many_words(line: str, short: str | None) -> None:
    assert ran_out(["begins", line]) == short


@pytest.mark.parametrize(
    ("env", "lower"),
    [
        (ENV, {"max_token_length": 768, "batch_size": 32}),
        (
            {"group_size": 12, "batch_size": 60, "max_token_length": 100},
            {"max_token_length": 64, "batch_size": 24},
        ),
        ({"group_size": 16, "batch_size": 16, "max_token_length": 64}, {}),
        ({"batch_size": -1, "max_token_length": None}, {}),
    ],
)
def test_what_is_lowered_stays_whole_groups_and_above_nothing(
    env: dict[str, Any], lower: dict[str, int]
) -> None:
    assert smaller(env) == lower


def test_a_training_on_a_file_has_smaller_batches_and_starts_again(run: RunDirectory) -> None:
    """One that goes on keeps its batches."""
    (run.path / FILE).write_text(json.dumps({"method": "sft", "batch_size": 32}))
    run.log("trainer").write_text(CUDA)
    failed = died(run)
    assert failed.next == "Lower data.batch_size to 16, then start again."
    assert mending("gpu_oom", read_given(run)) == {"data.batch_size": 16}
    assert mending("gpu_oom", Given(data={"batch_size": 1})) == {}


def test_each_failure_is_mended_by_its_own_setting() -> None:
    given = Given(env=ENV, trainer=GivenTrainer(learning_rate=4e-5))
    assert mending("gpu_oom", given) == {"batch_size": 32}
    assert mending("gpu_oom", Given(env={"max_token_length": 512})) == {"max_token_length": 384}
    assert mending("nan_loss", given) == {"learning_rate": 2e-5}
    assert (
        mending("process_exited", given)
        == mending(None, given)
        == mending("gpu_oom", Given())
        == {}
    )


def test_settings_of_any_version_are_read_as_far_as_they_matter(run: RunDirectory) -> None:
    assert read_given(run).trainer.learning_rate == 4e-5
    (run.path / "settings.json").write_text("{")
    assert read_given(run) == Given()


def state(run: RunDirectory, **changes: Any) -> RunState:
    told: dict[str, Any] = {
        "run_id": RUN,
        "name": "x",
        "environment": "x",
        "environment_file": "/x.py",
        "interpreter": "/python",
        "base_model": "x",
        "tokenizer": "/x",
        "total_steps": 9,
        "created_at": 1.0,
        "status": "failed",
        **changes,
    }
    write_state(run.path / "run.json", RunState(**told))
    return RunState(**told)


def test_run_json_names_who_failed(run: RunDirectory) -> None:
    assert failed_process(state(run, exit={"process": "trainer", "code": 1})) == FailedProcess(
        "trainer", 1
    )
    assert (
        failed_process(state(run, exit={"process": "trainer", "code": 1}, status="completed"))
        is None
    )


def test_an_engine_that_ended_alone_is_to_blame_for_all_exits_after_it(run: RunDirectory) -> None:
    engine = {"pid": 7, "exit": "unknown", "state": "ended"}
    assert failed_process(state(run, processes={"engine": engine})) == FailedProcess("engine", None)


def test_a_checkpoint_of_step_0_is_nothing_to_go_on_from(run: RunDirectory) -> None:
    """An interrupted trainer writes one, whole, before its first step: it is no better than a
    start.
    """
    (run.path / "checkpoints.jsonl").unlink()
    append_row(
        run.path / "checkpoints.jsonl",
        {"name": "final", "step": 0, "state_path": "tinker://x/weights/final"},
    )
    assert run.newest_checkpoint() is None
    assert died(run).next.endswith("There is no checkpoint to go on from: start the run again.")


def test_what_was_chosen_for_a_run_is_what_another_may_be_started_with(run: RunDirectory) -> None:
    given = {
        "trainer.lora_rank": (8, "edit"),
        "run.environment": ("till", "file"),
        "run.name": ("x", "edit"),
    }
    given |= {"env.seed": (7, "config_init"), "run.max_minutes": (5, "file")}
    rows = {name: {"value": value, "source": source} for name, (value, source) in given.items()}
    (run.path / "config.resolved.json").write_text(json.dumps(rows))
    assert run.own_settings() == {"trainer.lora_rank": 8, "run.max_minutes": 5}
    (run.path / "config.resolved.json").write_text("[")
    assert run.own_settings() == {}


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({}, "not started"),
        ({"pid": None, "exit": None, "state": "not started"}, "not started"),
        ({"pid": 7, "exit": None, "state": "running"}, "running"),
        ({"pid": 7, "exit": 0, "state": "exited (0)"}, "exited (0)"),
        ({"pid": 7, "exit": 3}, "exited (3)"),
        ({"pid": 7, "exit": -9, "state": "exited (-9)"}, "ended by SIGKILL"),
        ({"pid": 7, "exit": -63}, "ended by signal 63"),
        ({"pid": 7, "exit": -15, "state": "ended with the run"}, "ended with the run"),
        (
            {"pid": 7, "exit": "unknown", "state": "ended with the supervisor"},
            "ended with the supervisor",
        ),
    ],
)
def test_how_a_process_is_has_a_word(facts: dict[str, Any], word: str) -> None:
    assert condition(facts) == word
