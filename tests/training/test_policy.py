"""The policy's edge to the SDK: what is sent, what is read, and how failures are told."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halteres.training import learner
from halteres.training.datums import to_example
from halteres.training.failures import LossNotFinite, ServiceFailed
from halteres.training.learner import Promise
from halteres.training.policy import _datum, _finite_pass


async def fails(error: Exception) -> None:
    raise error


def answer(loss: float, *rows: list[float]) -> Any:
    outputs = [{"logprobs": SimpleNamespace(to_numpy=lambda row=row: np.array(row))} for row in rows]
    return SimpleNamespace(metrics={"loss:sum": loss}, loss_fn_outputs=outputs)


def test_an_example_becomes_a_datum_of_equally_long_arrays() -> None:
    datum = _datum(to_example([5, 6, 7], [1.0, -0.5, -0.25], 2.0))
    assert datum.model_input.to_ints() == [5, 6]
    assert {name: data.dtype for name, data in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    assert datum.loss_fn_inputs["target_tokens"].data == [6, 7]
    assert datum.loss_fn_inputs["advantages"].data == [2.0, 2.0]


def test_a_pass_is_read_as_its_summed_loss_and_one_row_per_example() -> None:
    passed = _finite_pass(answer(-3.5, [-1.0, -2.0], [-0.5]))
    assert passed.loss == -3.5
    assert [row.tolist() for row in passed.logprobs] == [[-1.0, -2.0], [-0.5]]


@pytest.mark.parametrize(
    "spoilt", [answer(math.nan, [-1.0]), answer(math.inf, [-1.0]), answer(-1.0, [-1.0], [math.nan])]
)
def test_a_loss_that_is_not_finite_is_told_with_cause_and_remedy(spoilt: Any) -> None:
    with pytest.raises(LossNotFinite, match=r"The loss is .* learning rate is too high\. Resume from the last"):
        _finite_pass(spoilt)


async def test_a_refusal_of_the_service_becomes_one_sentence() -> None:
    promise = Promise(fails(ValueError("no such model")), "create_model", lambda value: value)
    with pytest.raises(ServiceFailed, match=r"create_model raised ValueError: no such model\. Look into logs"):
        await promise


async def test_a_service_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "CALL_S", 0.05)
    with pytest.raises(ServiceFailed, match="did not answer forward_backward within"):
        await Promise(asyncio.Event().wait(), "forward_backward", lambda value: value)


async def test_cancelling_the_trainer_is_not_a_failure_of_the_service() -> None:
    redeeming = asyncio.ensure_future(Promise(asyncio.Event().wait(), "publish", lambda value: value)._redeem())
    await asyncio.sleep(0)
    redeeming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await redeeming
