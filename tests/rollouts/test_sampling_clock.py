"""How much of an item's time was sampling."""

from __future__ import annotations

from halteres.rollouts.sampling_clock import SamplingClock, sampling, sampling_measured


def test_requests_that_overlap_count_once_and_pauses_between_them_do_not() -> None:
    now = 0.0
    clock = SamplingClock(now=lambda: now)
    with clock.request():
        now = 1.0
        with clock.request():
            now = 3.0
        now = 4.0
    now = 9.0
    with clock.request():
        now = 9.5
    assert clock.seconds == 4.5


def test_a_request_outside_of_an_item_is_not_measured() -> None:
    with sampling(), sampling_measured() as clock:
        assert clock.seconds == 0.0
    with sampling_measured() as clock, sampling():
        pass
    assert clock.seconds >= 0.0
