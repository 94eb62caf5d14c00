"""Errors speak to whoever must act, on every wire."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
from collections.abc import Iterator

import pytest

from halteres import errors
from halteres.errors import (
    Conflict,
    EnvironmentFailed,
    HalteresError,
    InvalidConfig,
    NotFound,
    NotReady,
    SamplerFailed,
    ServerError,
    UserError,
    as_answer,
    as_failed_future,
    as_http,
    boundary,
    failed_future,
    nearest,
    unknown,
)
from halteres.next_step import NextStep


def kinds(kind: type[HalteresError] = HalteresError) -> Iterator[type[HalteresError]]:
    """The common tree; a room may have kinds of its own below it."""
    if kind.__module__ == errors.__name__:
        yield kind
        for child in kind.__subclasses__():
            yield from kinds(child)


ERROR = NotFound(
    "Run r17 has no checkpoint 'step-40'.",
    "It stopped at step 33.",
    "Resume from 'step-30'.",
    field="name",
    line=None,
)


def test_a_next_step_is_a_call_to_agents_and_a_command_to_people_also_from_another_process() -> (
    None
):
    step = NextStep("rl_stop_training", {"run_id": "3fa9c1d2"}, "Stop it first")
    error = pickle.loads(pickle.dumps(Conflict("It runs.", next=step)))  # noqa: S301 - our own
    assert error.sentence == "It runs. Stop it first: halteres runs stop 3fa9c1d2"
    assert as_answer(error)["next"] == 'Stop it first: rl_stop_training("3fa9c1d2")'
    changed = NextStep(
        "rl_start_training", {"resume_from": "3fa9c1d2", "changes": {"batch_size": 8}}
    )
    assert str(changed) == changed.call, "no command drops an argument"


def test_the_sentence_says_what_why_and_next() -> None:
    assert (
        str(ERROR)
        == "Run r17 has no checkpoint 'step-40'. It stopped at step 33. Resume from 'step-30'."
    )
    assert str(NotReady("Not yet.")) == "Not yet."


def test_half_a_character_that_foreign_code_quotes_is_a_question_mark() -> None:
    with pytest.raises(NotFound) as caught, boundary(NotFound, "score"):
        raise KeyError("\ud83d")
    assert caught.value.what.encode() and "?" not in NotFound("a", "b").sentence
    assert NotFound("a", why="\ud83d").sentence == "a ?"


@pytest.mark.parametrize("kind", sorted(kinds(), key=lambda kind: kind.__name__))
def test_every_kind_has_a_code_a_status_and_survives_copies(kind: type[HalteresError]) -> None:
    error = kind("What.", "Why.", "Next.", field="x")
    assert re.fullmatch(r"[a-z_]+", error.code)
    assert error.status in (400, 404, 422, 500, 503)
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301  our own bytes
        assert type(twin) is kind
        assert (twin.what, twin.why, twin.next, twin.details) == (
            "What.",
            "Why.",
            "Next.",
            {"field": "x"},
        )


def test_no_error_answers_409_which_sdks_retry_for_ever() -> None:
    assert 409 not in {kind.status for kind in kinds()}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) | {"HalteresError"}
    assert drawn == {kind.__name__ for kind in kinds()}


def test_a_promise_carries_the_category() -> None:
    told = as_failed_future(ERROR)
    assert told == {"error": f"[{ERROR.code}] {ERROR}", "category": "user"}
    assert failed_future(told["error"]) == (ERROR.code, str(ERROR))
    assert failed_future("Somebody else's words.") == ("", "Somebody else's words.")
    assert as_failed_future(ServerError("Ours."))["category"] == "server"


def test_http_answers_have_detail_code_and_facts() -> None:
    assert as_http(ERROR) == {"detail": str(ERROR), "code": "not_found", "field": "name"}


def test_tool_answers_keep_next_apart() -> None:
    answer = as_answer(ERROR)
    assert answer["next"] == "Resume from 'step-30'."
    assert "Resume" not in answer["error"]
    assert "line" not in answer


def test_a_boundary_turns_foreign_errors_into_its_kind() -> None:
    says = r"gsm8k\.step raised ZeroDivisionError"
    with (
        pytest.raises(EnvironmentFailed, match=says) as raised,
        boundary(EnvironmentFailed, "gsm8k.step"),
    ):
        _ = 1 / 0
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "error", [SamplerFailed("No answer."), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_a_boundary_lets_our_errors_and_cancellation_pass(error: BaseException) -> None:
    with pytest.raises(type(error)), boundary(EnvironmentFailed, "step"):
        raise error


def test_an_unknown_name_offers_the_nearest() -> None:
    error = unknown(
        InvalidConfig, "setting", "lerning_rate", ["learning_rate", "lora_rank"], "See the list."
    )
    assert isinstance(error, UserError)
    assert (
        str(error)
        == "There is no setting 'lerning_rate'. Did you mean 'learning_rate'? See the list."
    )
    assert error.details == {
        "did_you_mean": "learning_rate",
        "allowed": ["learning_rate", "lora_rank"],
    }


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    assert "Known: a, b." in str(unknown(NotFound, "run", "zzzz", ["b", "a"]))
    assert "Known: none." in str(unknown(NotFound, "run", "zzzz", []))
    assert nearest("zzzz", ["arithmetic"]) is None


def test_of_many_names_a_few_are_told_and_a_long_one_is_shortened() -> None:
    error = unknown(NotFound, "run", "?" * 100_000, [f"r{number}" for number in range(5000)])
    assert "Known: r4995, r4996, r4997, r4998, r4999 and 4995 more." in str(error)
    assert error.details["allowed"] == ["r4995", "r4996", "r4997", "r4998", "r4999"]
    assert len(str(error)) < 500
