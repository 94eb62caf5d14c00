"""Spec 5.7, strict: each convention that a group may break, and the sentence that says where it
does.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from halteres.trajectories.posted_group import Problem, Scored, held_to_conventions, parse


def posted(**changes: object) -> Scored:
    """Two sequences of context, then samples, as read from a body."""
    body: dict[str, Any] = {
        "tokens": [[5, 6, 7], [5, 8]],
        "masks": [[-100, 6, 7], [-100, 8]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -2.0]],
    }
    found = parse(msgspec.json.encode({**body, **changes}))
    assert found.problem is None
    return found


def problem_of(group: Scored, longest: int) -> Problem | None:
    return held_to_conventions(group, longest).problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inference_logprobs": None},
        # certain and impossible are probabilities too
        {"inference_logprobs": [[1, 0, -0.0], [1, -1e9]]},
        {"masks": [[-100] * 3, [-100] * 2], "inference_logprobs": [[1.0] * 3, [1.0] * 2]},
        {"masks": [[5, 6, 7], [5, 8]], "inference_logprobs": [[-1.0] * 3, [-1.0] * 2]},
        {"tokens": [[0, 151643, 2**63 - 1], [0, 0]]},
        {"masks": [[1, 1, 1], [0, 0]], "inference_logprobs": None},
    ],
)
def test_a_group_that_holds_to_them_is_sound(changes: dict[str, object]) -> None:
    assert problem_of(posted(**changes), 3) is None


@pytest.mark.parametrize(
    ("changes", "code", "why"),
    [
        ({"tokens": [[5, -6, 7], [5, 8]]}, "token", "tokens[0][1] is negative; ids start at 0."),
        (
            {"tokens": [[5, 6, 7], [5, -(2**63)]]},
            "token",
            "tokens[1][1] is negative; ids start at 0.",
        ),
        (
            {"tokens": [[2**63 - 1, 6, -1], [5, 8]]},
            "token",
            "tokens[0][2] is negative; ids start at 0.",
        ),
        (
            {"inference_logprobs": [[1.0, -0.5, 1.0], [1.0, -2.0]]},
            "sentinel",
            "inference_logprobs[0][2] is 1, masks[0][2] is not -100: 1.0 marks context, and "
            "nothing else.",
        ),
        (
            {"inference_logprobs": [[1.0, -0.5, -0.25], [-0.125, -2.0]]},
            "sentinel",
            "inference_logprobs[1][0] is -0.125, masks[1][0] is -100: 1.0 marks context, and "
            "nothing else.",
        ),
        (
            {"inference_logprobs": [[0.0, -0.5, -0.25], [1.0, -2.0]]},
            "sentinel",
            "inference_logprobs[0][0] is 0,",
        ),
        (
            {"masks": [[-100, -100, 7], [-100, 8]]},
            "sentinel",
            "inference_logprobs[0][1] is -0.5, masks[0][1] is -100",
        ),
        (
            {"masks": [[5, 6, 7], [-100, 8]]},
            "sentinel",
            "inference_logprobs[0][0] is 1, masks[0][0] is not -100",
        ),
        (
            {"masks": [[-101, 6, 7], [-100, 8]]},
            "sentinel",
            "inference_logprobs[0][0] is 1, masks[0][0] is not -100",
        ),
        (
            {"inference_logprobs": [[1.0, 0.5, -0.25], [1.0, -2.0]]},
            "logprob",
            "inference_logprobs[0][1] is 0.5, above 0.",
        ),
        (
            {"inference_logprobs": [[1.0, -0.5, -0.25], [1.0, 1e-320]]},
            "logprob",
            "inference_logprobs[1][1] is 9.99989e-321, above 0.",
        ),
        (
            {"inference_logprobs": [[1.0, 2, -0.25], [1.0, -2.0]]},
            "logprob",
            "inference_logprobs[0][1] is 2, above 0.",
        ),
        (
            {"inference_logprobs": [[1.0, 1.0000000000000002, -0.25], [1.0, -2.0]]},
            "logprob",
            "inference_logprobs[0][1] is 1, above 0.",
        ),
    ],
)
def test_each_one_broken_is_told_with_its_place(
    changes: dict[str, object], code: str, why: str
) -> None:
    problem = problem_of(posted(**changes), 3)
    assert problem is not None
    assert (problem.code, problem.why[: len(why)]) == (code, why)


@pytest.mark.parametrize(
    ("longest", "code"), [(-1, None), (0, None), (1, "too_long"), (2, "too_long"), (3, None)]
)
def test_a_sequence_is_as_long_as_the_trainer_takes_at_most(longest: int, code: str | None) -> None:
    problem = problem_of(posted(), longest)
    assert (problem and problem.code) == code
    if problem:
        assert problem.why == f"tokens[0] is 3 long; the trainer takes {longest}."


def test_the_first_that_is_broken_is_told() -> None:
    found = posted(tokens=[[5, -6, 7], [5, 8]], inference_logprobs=[[2.0, 0.5, 1.0], [1.0, -2.0]])
    assert [
        (problem and problem.code) for problem in (problem_of(found, 2), problem_of(found, 0))
    ] == [
        "too_long",
        "token",
    ]


@pytest.mark.parametrize("mask", [2**63, 2**64, -(2**63) - 1, 10**30])
def test_a_mask_that_no_machine_counts_is_no_context_and_no_crash(mask: int) -> None:
    found = posted(masks=[[-100, mask, 7], [-100, 8]])
    assert problem_of(found, 3) is None
    marked = posted(
        masks=[[-100, mask, 7], [-100, 8]], inference_logprobs=[[1.0, 1.0, -0.25], [1.0, -2.0]]
    )
    problem = problem_of(marked, 3)
    assert problem is not None and problem.code == "sentinel"
