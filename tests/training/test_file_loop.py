"""The loop of a training on a file: what is asked of the service in which order, what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from halteres.config.environ import write_stop_request
from halteres.config.file_training import FileTraining
from halteres.config.settings import Settings
from halteres.observe.metrics import read_rows
from halteres.training.conversations import AnsweredTokens, TokenRow
from halteres.training.datums import Example, Row
from halteres.training.file_data import FileData
from halteres.training.file_loop import train_on_file, weighted
from halteres.training.folder import RunFolder
from halteres.training.policy import SentCall
from halteres.training.report import Report

from .fakes import FakePolicy, soon, stopping


class Falling(FakePolicy):
    """A policy whose every token has a log-probability of -1, nearer to 0 with each step; the
    reference stays at -1.
    """

    def forward(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        self.calls.append(f"forward {len(examples)}")
        value = -1.0 / (1 + self.version)
        rows = tuple(np.full(len(one.tokens_N), value, np.float32) for one in examples)
        return SentCall(soon(None), "forward", lambda _: rows)

    def reference(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        self.calls.append(f"reference {len(examples)}")
        rows = tuple(np.full(len(one.tokens_N), -1.0, np.float32) for one in examples)
        return SentCall(soon(None), "reference", lambda _: rows)


def sequence(length: int, answers: int) -> AnsweredTokens:
    return AnsweredTokens(np.arange(length), np.arange(length) >= length - answers)


def imitated(number: int) -> TokenRow:
    return TokenRow(number=number, key=str(number), sequences=(sequence(6, 2 + number % 2),))


def preferred(number: int) -> TokenRow:
    return TokenRow(number=number, key=str(number), sequences=(sequence(6, 3), sequence(5, 1)))


def run_folder(path: Path) -> RunFolder:
    (path / "control").mkdir()
    return RunFolder(path)


def settings(**trainer: object) -> Settings:
    given = {"total_steps": 4, "eval_every": 2, "checkpoint_every": 3, "loss": "cross_entropy"}
    return Settings.model_validate({"trainer": {**given, **trainer}})


async def test_answers_are_imitated_and_held_out_rows_evaluated_before_during_and_after(
    tmp_path: Path,
) -> None:
    folder, policy = run_folder(tmp_path), Falling()
    train = tuple(imitated(number) for number in range(6))
    data = FileData(train=train, held_out=(imitated(7), imitated(8)), digest="")
    training = FileTraining(method="sft", data="rows.jsonl", batch_size=3)
    done = await train_on_file(
        policy, data, Report(folder), settings(), training, stopping(tmp_path)
    )
    step = ["forward_backward", "optim_step"]
    assert done == 4 and policy.version == 4
    assert policy.calls == [
        "forward 2",
        *step,
        *step,
        "forward 2",
        *step,
        "save step-000003",
        *step,
        "forward 2",
    ]
    # the weights of a batch add up to 1, and stand on answers alone
    total = sum(float(one.advantages_N.sum()) for one in policy.examples)
    assert total == pytest.approx(1.0, abs=1e-6)
    for one in policy.examples:
        assert np.array_equal(one.advantages_N > 0, one.actions_N)
    rows = read_rows(folder.metrics)
    held_out = {row["step"]: row["eval/loss_per_token"] for row in rows if row["src"] == "eval"}
    assert held_out == pytest.approx({0: 1.0, 2: 1 / 3, 4: 1 / 5})
    trained = [row for row in rows if row["src"] == "trainer"]
    assert [row["rows/count"] for row in trained] == [3.0] * 4
    assert [row["train/epoch"] for row in trained] == [0.5, 1.0, 1.5, 2.0]
    assert all("time/batch" not in row for row in trained)


async def test_a_pair_is_weighed_by_the_losss_derivative_and_its_reference_asked_once(
    tmp_path: Path,
) -> None:
    folder, policy = run_folder(tmp_path), Falling()
    train = tuple(preferred(number) for number in range(4))
    data = FileData(train=train, held_out=(preferred(9),), digest="")
    training = FileTraining(method="dpo", data="pairs.jsonl", batch_size=2, beta=0.5)
    await train_on_file(policy, data, Report(folder), settings(), training, stopping(tmp_path))
    # six pairs: the two epochs of four, and the held-out one, each once
    assert [call for call in policy.calls if call.startswith("reference")] == [
        "reference 2",
        "reference 4",
        "reference 4",
    ]
    first = read_rows(folder.metrics)[1]
    assert first["train/loss"] == pytest.approx(np.log(2))
    assert (first["rewards/margins"], first["rewards/accuracies"]) == (0.0, 0.0)
    assert (first["logps/chosen"], first["logps/rejected"]) == (-3.0, -1.0)
    before = read_rows(folder.metrics)[0]
    assert (before["eval/logps/chosen"], before["eval/logps/rejected"]) == (-3.0, -1.0)
    # at the last step every token is worth -1/4: h = 0.5 (3 - 1) 3/4
    last = [row for row in read_rows(folder.metrics) if row["src"] == "trainer"][-1]
    h = 0.5 * 2 * 0.75
    assert last["rewards/margins"] == pytest.approx(h)
    assert last["train/loss"] == pytest.approx(np.log1p(np.exp(-h)))
    weight = 0.5 / (1 + np.exp(h)) / 2
    chosen, rejected = policy.examples[:2]
    assert chosen.advantages_N.tolist() == pytest.approx([0, 0, weight, weight, weight], rel=1e-6)
    assert rejected.advantages_N.tolist() == pytest.approx([0, 0, 0, -weight], rel=1e-6)


class EndedAtStep2(Falling):
    """An end is asked for while the second step is under way."""

    def __init__(self, stop: Path) -> None:
        super().__init__()
        self._stop = stop

    def optim_step(self, learning_rate: float) -> SentCall[int]:
        if self.version == 1:
            write_stop_request(self._stop, "after_step")
        return super().optim_step(learning_rate)


async def test_an_end_that_is_asked_for_comes_after_the_step_under_way(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    policy = EndedAtStep2(folder.stop)
    data = FileData(train=(imitated(0), imitated(1)), held_out=(), digest="")
    training = FileTraining(method="sft", data="rows.jsonl", batch_size=2)
    stop = stopping(tmp_path)
    done = await train_on_file(policy, data, Report(folder), settings(), training, stop)
    assert done == policy.version == 2
    assert [row["step"] for row in read_rows(folder.metrics)] == [1, 2]


def test_a_weight_stands_on_answers_alone() -> None:
    example = weighted(sequence(5, 2), 0.25)
    assert example.advantages_N.tolist() == [0, 0, 0.25, 0.25]
    assert example.targets_N.tolist() == [1, 2, 3, 4]
