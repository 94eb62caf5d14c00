"""Where batches come from: versions told, ends obeyed, waits bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halteres.clients.trajectories import TrainerRegistration
from halteres.errors import NotReady
from halteres.training.batch_source import GROUP_S, SEEN_S, BatchWait, Trajectories
from halteres.training.failures import BatchNotOurs, NoExperience
from halteres.training.stopping import StopRequest
from halteres.types import Batch

from .fakes import REGISTRATION, FakeServer, batch, stopping

WHOLE = [0.0, 1.0, 2.0, 3.0]
"""Scores of as many sequences as REGISTRATION asks for."""


async def test_each_step_gets_one_batch_asked_for_under_the_present_version(tmp_path: Path) -> None:
    server = FakeServer(lambda version: batch([float(version), 0.0], [0.0, 1.0]))
    source, versions = Trajectories(server, REGISTRATION, stopping(tmp_path)), [5]
    seen = []
    async for step, delivered in source.batches(range(6, 9), lambda: versions[-1]):
        seen.append((step, delivered.groups[0].scores[0]))
        versions.append(versions[-1] + 1)
    assert seen == [(6, 5.0), (7, 6.0), (8, 7.0)]


async def test_the_server_is_asked_again_until_a_batch_is_complete(tmp_path: Path) -> None:
    answers = iter([None, None, None, batch(WHOLE)])
    server = FakeServer(lambda _: next(answers))
    source = Trajectories(server, REGISTRATION, stopping(tmp_path))
    assert [step async for step, _ in source.batches([1], lambda: 0)] == [1]
    assert server.versions == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("delivered", "why"),
    [
        (batch([0.0, 1.0]), "It has 2 rollouts; the run's batches have 4."),
        (batch([0.0, 1.0], [0.0, 1.0], [1.0]), "It has 5 rollouts; the run's batches have 4."),
        (replace(batch(WHOLE), run_id="r2"), "It is of run r2."),
        (replace(batch(WHOLE), run_id=""), "It is of a trainer that named no run."),
    ],
)
async def test_a_batch_that_is_not_the_runs_is_refused_in_words(
    tmp_path: Path, delivered: Batch, why: str
) -> None:
    source = Trajectories(FakeServer(lambda _: delivered), REGISTRATION, stopping(tmp_path))
    with pytest.raises(BatchNotOurs) as refused:
        async for _ in source.batches([1], lambda: 0):
            raise AssertionError("it was trained on")
    assert refused.value.what == "The trajectory server delivered a batch that is not of run r1."
    assert refused.value.why.startswith(why)


async def test_a_batch_of_the_run_and_of_a_server_that_names_none_is_taken(tmp_path: Path) -> None:
    for run_id in ("r1", None):
        ours = replace(batch(WHOLE), run_id=run_id)
        source = Trajectories(
            FakeServer(lambda _, ours=ours: ours), REGISTRATION, stopping(tmp_path)
        )
        assert [delivered async for _, delivered in source.batches([1], lambda: 0)] == [ours]


async def test_a_wait_without_any_new_group_ends_with_the_servers_reason(tmp_path: Path) -> None:
    source = Trajectories(
        FakeServer(lambda _: None), REGISTRATION, stopping(tmp_path), patience_s=0.1
    )
    with pytest.raises(
        NoExperience,
        match=(
            r"No new group reached .* Nobody is here\. No environment was heard of .* in "
            r"score\(\)\. Look into"
        ),
    ):
        async for _ in source.batches([1], lambda: 0):
            pass


def test_progress_renews_the_patience() -> None:
    times = iter([0.0, 9.0, 18.0, 27.0, 36.9, 37.0])
    nothing = NotReady("No batch.", "Too few sequences.")
    patience = BatchWait(10.0, clock=lambda: next(times))
    for accepted in (1, 2, 3, 3):
        patience.check(accepted, False, nothing)
    with pytest.raises(NoExperience, match="Too few sequences"):
        patience.check(3, False, nothing)


def test_a_living_environment_renews_the_patience_for_half_an_hour_at_most() -> None:
    """One group of a large model may take longer than the patience with an environment that is
    gone.
    """
    times = iter([0.0, 130.0, 260.0, GROUP_S - 1, GROUP_S])
    patience = BatchWait(120.0, clock=lambda: next(times))
    for _ in range(3):
        patience.check(0, True, NotReady("No batch."))
    with pytest.raises(
        NoExperience, match=r"for 1800 s.* An environment is alive, but its rollouts do not end"
    ):
        patience.check(0, True, NotReady("No batch."))


@pytest.mark.parametrize(
    ("environments", "alive"),
    [
        ([], False),
        ([{"connected": True, "last_seen_s": 0.1}], True),
        ([{"connected": True, "last_seen_s": SEEN_S + 1}], False),
        ([{"connected": False, "last_seen_s": 0.1}], False),
    ],
)
async def test_an_environment_lives_while_the_server_hears_of_it(
    tmp_path: Path, environments: list[dict[str, Any]], alive: bool
) -> None:
    class Watching(FakeServer):
        def diagnostics(self) -> dict[str, Any]:
            return {**super().diagnostics(), "environments": environments}

    source = Trajectories(Watching(lambda _: None), REGISTRATION, stopping(tmp_path))
    assert await source._signs_of_life() == (0, alive)


async def test_a_server_that_is_away_for_a_while_costs_patience_and_no_more(tmp_path: Path) -> None:
    class Away(FakeServer):
        def diagnostics(self) -> dict[str, object]:
            raise NotReady("Nobody answers.")

    answers = iter([None, None, batch(WHOLE)])
    source = Trajectories(
        Away(lambda _: next(answers)), REGISTRATION, stopping(tmp_path), patience_s=5
    )
    assert [step async for step, _ in source.batches([1], lambda: 0)] == [1]


async def test_asked_to_stop_now_it_waits_for_no_batch(tmp_path: Path) -> None:
    stop = stopping(tmp_path)
    questions = iter([None, None])

    def none_and_then_a_stop(_: int) -> None:
        if next(questions, "over") == "over":
            stop.ask(StopRequest("now", "test"))

    source = Trajectories(FakeServer(none_and_then_a_stop), REGISTRATION, stop)
    assert [step async for step, _ in source.batches([1, 2], lambda: 0)] == []


async def test_asked_to_stop_after_the_step_it_still_serves_the_batch_under_way(
    tmp_path: Path,
) -> None:
    stop = stopping(tmp_path)
    answers = iter([None, None, batch(WHOLE), batch(WHOLE)])
    source = Trajectories(FakeServer(lambda _: next(answers)), REGISTRATION, stop)
    stop.ask(StopRequest("after_step", "test"))
    assert [step async for step, _ in source.batches([1, 2], lambda: 0)] == [1]


async def test_registration_waits_for_the_server_to_come_up(tmp_path: Path) -> None:
    class Late(FakeServer):
        attempts = 0

        def register(self, registration: TrainerRegistration) -> int:
            self.attempts += 1
            if self.attempts < 3:
                raise NotReady("The trajectory server is not up yet.")
            return super().register(registration)

    server = Late(lambda _: None)
    await Trajectories(server, REGISTRATION, stopping(tmp_path)).register()
    assert server.registered == [REGISTRATION]
