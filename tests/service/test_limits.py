"""Limits of a tenant: what is beyond them is refused with a sentence, and leaves the others alone
(we chose them).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.requirements import proves

from halteres.errors import InvalidConfig, size_text
from halteres.loopback import TooLarge
from halteres.service.http import Meter
from halteres.service.limits import (
    Allowances,
    LimitReached,
    Limits,
    Overloaded,
    overloaded,
    read_allowances,
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def metered(**limits: float) -> tuple[Meter, Clock]:
    clock = Clock()
    return Meter(Allowances(default=Limits(**limits)), clock), clock  # pyright: ignore[reportArgumentType]


# Requests per second


def test_five_seconds_worth_may_come_at_once_and_then_as_many_as_the_rate_allows() -> None:
    meter, clock = metered(requests_per_s=4)
    for _ in range(20):
        meter.count("a")
    with pytest.raises(Overloaded, match="4 a second"):
        meter.count("a")
    clock.now += 0.25
    meter.count("a")
    with pytest.raises(Overloaded):
        meter.count("a")


@proves("keys:limits")
def test_one_tenants_requests_do_not_count_for_another() -> None:
    meter, _ = metered(requests_per_s=0.2)
    meter.count("a")
    with pytest.raises(Overloaded):
        meter.count("a")
    meter.count("b")


@pytest.mark.parametrize(("per_s", "told_s"), [(1000, 1), (0.5, 1), (0.25, 3), (0.001, 60)])
def test_when_to_come_again_is_told_in_whole_seconds_that_the_sdk_obeys(
    per_s: float, told_s: int
) -> None:
    meter, _ = metered(requests_per_s=per_s)
    with pytest.raises(Overloaded) as caught:
        for _ in range(5001):
            meter.count("a")
    assert caught.value.details["retry_after_s"] == told_s


def test_what_is_not_used_is_not_saved_up() -> None:
    meter, clock = metered(requests_per_s=1)
    clock.now += 1e6
    for _ in range(5):
        meter.count("a")
    with pytest.raises(Overloaded):
        meter.count("a")


# Bodies


def test_a_body_is_refused_by_what_it_says_and_by_what_comes() -> None:
    meter, _ = metered(body_bytes=100)
    with pytest.raises(TooLarge, match="100 B"), meter.body("a", 101):
        pass
    with meter.body("a", 0) as add:
        add(100)
        with pytest.raises(TooLarge):
            add(1)


def test_bodies_under_way_are_bounded_together_and_forgotten_when_they_end() -> None:
    meter, _ = metered(body_bytes=100, incoming_bytes=150)
    with meter.body("b", 0) as other:
        other(100)
        with meter.body("a", 0) as first:
            first(100)
            with meter.body("a", 0) as second, pytest.raises(Overloaded, match="160 B"):
                second(60)
        with meter.body("a", 0), meter.body("b", 50):
            pass
    with meter.body("a", 0) as third:
        third(100)


# What a tenant holds


def test_counts_at_their_limit_are_refused_and_below_it_are_not() -> None:
    limits = Limits(samples=3, sessions=3, models=3, rank=8)
    limits.check_samples(2)
    limits.check_alive("sessions", 2)
    limits.check_alive("models", 2)
    limits.check_rank(8)
    with pytest.raises(Overloaded, match="3 is the limit"):
        limits.check_samples(3)
    for kind in ("sessions", "models"):
        with pytest.raises(LimitReached, match="3 is the limit"):
            limits.check_alive(kind, 3)
    with pytest.raises(LimitReached, match="rank 9"):
        limits.check_rank(9)


def test_a_full_storage_names_what_may_be_deleted_the_largest_first() -> None:
    limits = Limits(checkpoint_bytes=10 * 2**20)
    limits.check_storage(9 * 2**20, 2**20)
    sizes = {f"tinker://r/weights/{number}": number * 2**20 for number in range(7)}
    with pytest.raises(LimitReached) as caught:
        limits.check_storage(9 * 2**20, 2**20 + 1, sizes)
    said = caught.value.sentence
    assert "9.0 MiB of 10.0 MiB" in said
    assert said.index("weights/6 (6.0 MiB)") < said.index("weights/2 (2.0 MiB)")
    assert "weights/1" not in said


# Where they come from


def test_the_file_gives_every_tenants_limits_and_the_command_line_goes_before_its_default(
    tmp_path: Path,
) -> None:
    (tmp_path / "limits.yaml").write_text(
        "default: {requests_per_s: 50, models: 4}\ntenants:\n  alice: {models: 8, "
        "checkpoint_bytes: 20G}\n"
    )
    allowances = read_allowances(tmp_path, ["requests_per_s=2.5", "body_bytes=16MiB"])
    assert allowances.of("bob") == Limits(requests_per_s=2.5, models=4, body_bytes=16 * 2**20)
    assert allowances.of("alice") == Limits(
        requests_per_s=2.5, models=8, body_bytes=16 * 2**20, checkpoint_bytes=20 * 2**30
    )


def test_without_a_file_and_options_the_defaults_hold(tmp_path: Path) -> None:
    assert read_allowances(tmp_path).of("anybody") == Limits()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("requests=5", "Did you mean 'requests_per_s'?"),
        ("models", "NAME=VALUE"),
        ("models=", "above 0"),
        ("models=0", "above 0"),
        ("models=-1", "above 0"),
        ("models=many", "above 0"),
        ("models=nan", "above 0"),
        ("checkpoint_bytes=5X", "above 0"),
    ],
)
def test_a_wrong_option_is_a_sentence(tmp_path: Path, option: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_allowances(tmp_path, [option])
    assert says in caught.value.sentence


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "default: 5",
        "tenants: [a]",
        "tenants: {a: 5}",
        "tenants: {a: {b: 1}}",
        "default: {models: true}",
        "other: {}",
        "a: b: c",
        "\x00",
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "limits.yaml").write_text(text)
    with pytest.raises(InvalidConfig):
        read_allowances(tmp_path)


def test_waiting_is_never_told_as_nothing_or_as_more_than_clients_obey() -> None:
    assert [
        overloaded("a", "b", wait).details["retry_after_s"] for wait in (0.0, 0.01, 1.5, 1e9)
    ] == [1, 1, 2, 60]


def test_sizes_are_told_as_people_read_them() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
