"""Our batching functions beside those of an unmodified atroposlib 0.4.0, on the same seeded queues.

Where the original finds a batch in a queue of equal groups, ours is the same; where it finds any,
ours is exact; where it holds a batch back because an environment with a part has nothing queued, so
do we.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halteres.trajectories.compat import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)

from .atropos_fixtures import REQUIREMENT

pytestmark = pytest.mark.clients

PROGRAM = Path(__file__).parent / "atropos_batching.py"
NUM_CASES = 600
POWERS, ODD = (1, 2, 4, 8, 16), (2, 3, 4, 5, 6, 12, 24)
PARTS = (None, 0.0, 0.05, 0.25, 0.5, 0.9, 1.0, 1.7)

Json = dict[str, Any]


def cases() -> list[Json]:
    """A third of the queues hold groups of one size, a third powers of two, a third anything."""
    draw = random.Random(7)
    return [case(draw, [(draw.choice(ODD),), POWERS, ODD][at % 3]) for at in range(NUM_CASES)]


def case(draw: random.Random, sizes: tuple[int, ...]) -> Json:
    owners = draw.choice([[0], [0, 1], [0, 1, 2], [0, 1, None]])
    queue = [
        group(at, draw.choice(sizes), draw.choice(owners)) for at in range(draw.randint(0, 14))
    ]
    batch_size = draw.choice([sizes[0] * draw.randint(1, 6), draw.choice([8, 12, 16, 24])])
    return {"queue": queue, "batch_size": batch_size, "env_configs": environments(draw)}


def group(at: int, size: int, env_id: int | None) -> Json:
    return {"at": at, "tokens": [[at]] * size, **({} if env_id is None else {"env_id": env_id})}


def environments(draw: random.Random) -> list[Json]:
    ids = draw.sample(range(3), draw.randint(0, 3))
    return [
        {
            "registered_id": env_id,
            "connected": draw.random() < 0.8,
            "min_batch_allocation": draw.choice(PARTS),
        }
        for env_id in ids
    ]


@pytest.fixture(scope="module")
def both(client_python: Callable[..., str]) -> list[tuple[Json, Json]]:
    """Every case, and what the original made of it."""
    asked = cases()
    command = [client_python(*REQUIREMENT), PROGRAM]
    answer = subprocess.run(
        command, input=json.dumps(asked), check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    return list(zip(asked, json.loads(answer.stdout), strict=True))


def places(groups: list[Json]) -> list[int]:
    return [each["at"] for each in groups]


def size_of(case: Json, indices: list[int]) -> int:
    return sum(len(case["queue"][at]["tokens"]) for at in indices)


def is_even(case: Json) -> bool:
    return len({len(each["tokens"]) for each in case["queue"]}) == 1


def starves(case: Json) -> bool:
    """Whether an environment with a part has nothing queued."""
    queued = {each.get("env_id") for each in case["queue"]}
    live = [env for env in case["env_configs"] if env["connected"]]
    needy = [
        env for env in live if int(case["batch_size"] * (env["min_batch_allocation"] or 0)) > 0
    ]
    return any(env["registered_id"] not in queued for env in needy)


def check(case: Json, original: list[Any], batch: list[Json] | None, rest: list[Json]) -> str:
    """One queue; what it was an example of."""
    if batch is None:
        assert original == [None, places(rest)]
        assert rest is case["queue"]
        return "neither"
    assert size_of(case, places(batch)) == case["batch_size"]
    assert places(rest) == [at for at in range(len(case["queue"])) if at not in places(batch)]
    if original[0] is None:
        return "ours only"
    if is_even(case):
        assert [places(batch), places(rest)] == original
        return "same"
    return "both"


def test_indices_that_sum_up(both: list[tuple[Json, Json]]) -> None:
    num_found = 0
    for case, original in both:
        ours = find_groups_summing_to_target(case["queue"], case["batch_size"])
        assert bool(ours) == bool(original["summing"])  # it looks at every subset, too
        assert ours == sorted(set(ours))
        assert not ours or size_of(case, ours) == case["batch_size"]
        if is_even(case):
            assert ours == original["summing"]
        num_found += bool(ours)
    assert NUM_CASES / 4 < num_found < NUM_CASES


def test_exact_batches(both: list[tuple[Json, Json]]) -> None:
    seen = [
        check(
            case,
            original["exact"],
            *grab_exact_from_heterogeneous_queue(case["queue"], case["batch_size"]),
        )
        for case, original in both
    ]
    assert min(seen.count(kind) for kind in ("neither", "ours only", "same", "both")) > 20, seen


def test_batches_with_minimum_allocations(both: list[tuple[Json, Json]]) -> None:
    seen = [
        check(case, original["allotted"], *grab_batch_with_minimum_allocations(**case))
        for case, original in both
    ]
    assert min(seen.count(kind) for kind in ("neither", "ours only", "same", "both")) > 20, seen


def test_an_environment_with_nothing_queued_holds_the_batch_back(
    both: list[tuple[Json, Json]],
) -> None:
    held = [(case, original) for case, original in both if case["queue"] and starves(case)]
    for case, original in held:
        assert original["allotted"][0] is None
        assert grab_batch_with_minimum_allocations(**case) == (None, case["queue"])
    would_do = [
        case
        for case, _ in held
        if grab_exact_from_heterogeneous_queue(case["queue"], case["batch_size"])[0]
    ]
    assert len(would_do) > 20
