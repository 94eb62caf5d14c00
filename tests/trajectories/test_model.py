"""Any sequence of posts, registrations, silences, deaths and questions for batches keeps the
promises of the server.

Conservation is looked at after every step, through the API: each group that was acknowledged is in
exactly one batch that is a trainer's for good, or waits; batches are exact; minimum shares are
kept; first in is first out; the step is the number of batches delivered (`players` plays,
`knowledge` says what must be true, `world` lets servers die).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from .random_clients import RandomClients

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
"""A history is long, and each of its steps asks a server."""

SIZES = st.integers(1, 4)
CHOICE = st.integers(0, 59)
SHARES = st.sampled_from([None, None, 0.25, 0.5, 1.0])


@dataclass(frozen=True)
class Step:
    """One thing that somebody does."""

    what: Callable[..., None]
    how: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.what.__name__}({', '.join(f'{name}={value!r}' for name, value in self.how.items())})"


def steps(
    weight: int, what: Callable[..., None], /, **how: st.SearchStrategy[Any]
) -> list[st.SearchStrategy[Step]]:
    """A kind of step, so many times as likely as another."""
    return [st.builds(Step, st.just(what), st.fixed_dictionaries(how)) for _ in range(weight)]


STEP = st.one_of(
    *steps(3, RandomClients.post, size=SIZES, whose=CHOICE, keyed=st.booleans()),
    *steps(
        4, RandomClients.post_list, parts=st.lists(st.tuples(SIZES, CHOICE), min_size=2, max_size=9)
    ),
    *steps(
        1,
        RandomClients.post_useless,
        useless=st.sampled_from(["oversized", "not finite", "uneven"]),
        whose=CHOICE,
    ),
    *steps(2, RandomClients.send_again, which=CHOICE),
    *steps(1, RandomClients.use_a_key_for_another_body, which=CHOICE),
    *steps(1, RandomClients.register_env, size=SIZES, share=SHARES),
    *steps(1, RandomClients.disconnect_env, which=CHOICE),
    *steps(1, RandomClients.poll, which=CHOICE),
    *steps(1, RandomClients.silence, seconds=st.sampled_from([20.0, 61.0])),
    *steps(
        1, RandomClients.register, size=CHOICE, another=st.sampled_from([False, False, False, True])
    ),
    *steps(
        4,
        RandomClients.ask_for_a_batch,
        leaves=st.sampled_from(["never", "never", "at once", "within"]),
    ),
    *steps(4, RandomClients.lease),
    *steps(2, RandomClients.ask_with_the_last_in_hand, which=CHOICE),
    *steps(
        4,
        RandomClients.settle,
        which=CHOICE,
        what=st.sampled_from(["ack", "ack", "nack", "extend"]),
    ),
    *steps(
        1, RandomClients.settle_what_is_settled, which=CHOICE, what=st.sampled_from(["ack", "nack"])
    ),
    *steps(2, RandomClients.die),
    *steps(1, RandomClients.reset),
    *steps(
        2,
        RandomClients.doom,
        num_commits=st.integers(0, 2),
        instant=st.sampled_from(["before", "torn", "after"]),
    ),
)


def played(shares: list[float | None] | None, history: list[Step]) -> None:
    """Play a history; `shares` are those of the environments at its beginning, None: no trainer is
    there yet.
    """
    with (
        tempfile.TemporaryDirectory(prefix="halteres-model-") as folder,
        closing(RandomClients(Path(folder))) as players,
    ):
        if shares is not None:
            note(f"players.begin({shares})")
            players.begin(shares)
        for step in history:
            note(repr(step))
            step.what(players, **step.how)
            players.everything_is_where_it_belongs()


BEGINNINGS = st.one_of(st.none(), *(st.lists(SHARES, max_size=2).map(list) for _ in range(5)))


@settings(
    max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=SLOW
)
@given(shares=BEGINNINGS, history=st.lists(STEP, min_size=25, max_size=50))
def test_every_acknowledged_group_is_in_one_delivered_batch_or_waits(
    shares: list[float | None] | None, history: list[Step]
) -> None:
    played(shares, history)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@settings(max_examples=120, deadline=None, database=None, suppress_health_check=SLOW)
@given(shares=BEGINNINGS, history=st.lists(STEP, min_size=40, max_size=120))
def test_every_acknowledged_group_is_in_one_delivered_batch_or_waits_in_long_histories(
    shares: list[float | None] | None, history: list[Step]
) -> None:
    """Other histories each time; a failure prints its own."""
    played(shares, history)
