"""The operator's caps end a run, whatever the agent that started it would like."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from halteres.config.operator_policy import Caps, Policy
from halteres.errors import InvalidConfig
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState
from halteres.runs.supervision.controller import POLICY, Budget

from .run_fixtures import StartRun, survivors, wait_for_end

HOUR = 3600.0


STATE = RunState(
    run_id="3fa9c1d2",
    name="n",
    environment="e",
    environment_file="/e.py",
    interpreter="/python",
    base_model="m",
    tokenizer="/t",
    total_steps=100,
    created_at=0.0,
)


def budget(total_steps: int = 100, after: float = 0.0, **caps: Any) -> Budget:
    """Of a supervisor that began `after` seconds ago."""
    clock = chain([1e6], repeat(1e6 + after))
    state = structs.replace(STATE, total_steps=total_steps)
    return Budget(Policy(name="careful", caps=Caps(**caps)), state, clock=lambda: next(clock))


def step(number: int, tokens: float | None = 100.0) -> dict[str, Any]:
    return {"step": number, "src": "trainer", "tokens/action": tokens}


def test_without_caps_nothing_is_used_up() -> None:
    free = budget(after=1e9)
    free.remember(step(number) for number in range(1, 1000))
    assert free.used_up() is None


def test_the_step_before_the_last_one_allowed_uses_steps_up() -> None:
    """Whoever asks the trainer to end lets the step under way end first."""
    capped = budget(max_steps=3)
    used = []
    for number in range(1, 4):
        capped.see(step(number))
        used.append(capped.used_up())
    assert used == [None, "max_steps", "max_steps"]
    assert capped.note("max_steps", 2).startswith(
        "Ended by the operator's policy 'careful': max_steps is 3; 3 steps are used."
    )
    assert "What was learnt up to step 2 is kept." in capped.note("max_steps", 2)


def test_where_nothing_is_kept_the_note_does_not_say_so() -> None:
    told = budget(max_hours=1).note("max_hours", None)
    assert "No checkpoint was written: nothing that it learnt is kept." in told
    assert "rl_get_results" not in told


def test_a_run_of_as_many_steps_as_are_allowed_completes() -> None:
    capped = budget(total_steps=3, max_steps=3)
    capped.remember(step(number) for number in range(1, 4))
    assert capped.used_up() is None


def test_tokens_are_used_up_when_another_step_would_exceed_them() -> None:
    capped = budget(max_tokens=350)
    used = []
    for number in range(1, 4):
        capped.see(step(number))
        used.append(capped.used_up())
    assert used == [None, None, "max_tokens"]
    assert "max_tokens is 350; 300 tokens are used" in capped.why("max_tokens")


def test_rows_of_others_and_odd_ones_do_not_count() -> None:
    capped = budget(max_tokens=350, max_steps=90)
    capped.remember(
        [{"step": 99, "src": "env", "tokens/action": 1e9}, {"src": "trainer"}, step(1, None)]
    )
    assert capped.used_up() is None


def test_hours_count_from_the_start_of_the_supervisor() -> None:
    assert budget(after=1.9 * HOUR, max_hours=2).used_up() is None
    late = budget(after=2.1 * HOUR, max_hours=2)
    assert late.used_up() == "max_hours"
    assert "max_hours is 2; 2.1 hours are used" in late.why("max_hours")


def test_a_clock_that_is_set_neither_ends_nor_prolongs_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capped = Budget(Policy(caps=Caps(max_hours=2)), STATE)
    monkeypatch.setattr("time.time", lambda: 1e12)
    assert capped.used_up() is None


@pytest.mark.parametrize(
    ("seconds", "grace_s"),
    [((), 300.0), ((10.0,), 300.0), ((9000.0, 400.0, 390.0), 1200.0), ((1e5,), 3600.0)],
)
def test_the_grace_at_a_cap_is_as_long_as_steps_are(
    seconds: tuple[float, ...], grace_s: float
) -> None:
    watched = budget()
    watched.remember({**step(number), "time/step": took} for number, took in enumerate(seconds, 1))
    assert watched.grace_s == grace_s


def test_caps_that_cannot_be_read_are_no_licence(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert Budget.of(run, STATE).used_up() is None, "there was no policy"
    (tmp_path / POLICY).write_text('{"caps": {"max_steps": "many"}}')
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Budget.of(run, STATE)


def capped_run(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, caps: Caps, num_steps: int = 3
) -> RunDirectory:
    """A run whose trainer does so many steps, then waits."""
    monkeypatch.setenv("STANDIN_POLICY", Policy(name="careful", caps=caps).model_dump_json())
    monkeypatch.setenv("STANDIN_STEPS", str(num_steps))
    return start()


@pytest.mark.parametrize(("cap", "limit"), [("max_steps", 3), ("max_tokens", 350)])
def test_at_a_cap_the_trainer_is_asked_to_end_with_a_checkpoint(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, cap: str, limit: int
) -> None:
    monkeypatch.setenv("STANDIN_TRAINER", "obeys")
    run = capped_run(start, monkeypatch, Caps(**{cap: limit}))
    state = wait_for_end(run)
    assert (state.status, state.code, state.error, state.resumable) == (
        "stopped",
        "policy_cap",
        None,
        True,
    )
    assert state.note is not None and f"'careful': {cap} is {limit}; " in state.note
    assert state.last_checkpoint is not None and state.last_checkpoint["step"] == 3
    (told,) = [event for event in run.events() if event["type"] == "policy_cap"]
    assert told["cap"] == cap
    assert len([event for event in run.events() if event["type"] == "stop_requested"]) == 1
    assert state.processes["trainer"]["exit"] == 0
    assert not survivors(state)


def test_a_trainer_that_does_not_end_at_a_cap_is_ended_after_a_grace(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CAP_GRACE_S", "0.3")
    state = wait_for_end(capped_run(start, monkeypatch, Caps(max_tokens=350)))
    assert (state.status, state.code) == ("stopped", "policy_cap")
    assert not survivors(state)


def test_hours_end_also_a_run_that_never_got_going(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = wait_for_end(capped_run(start, monkeypatch, Caps(max_hours=1e-9), num_steps=0))
    assert (state.status, state.code) == ("stopped", "policy_cap")
    assert (
        state.note is not None
        and "max_hours" in state.note
        and "No checkpoint was written" in state.note
    )
    assert not survivors(state)


def test_a_run_whose_caps_cannot_be_read_does_not_begin(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_POLICY", "{")
    state = wait_for_end(start())
    assert (state.status, state.code) == ("failed", "invalid_config")
    assert state.error is not None and "policy.json cannot be read" in state.error
    assert not survivors(state)
