"""What atroposlib 0.4.0's three batching functions find, asked in an environment of its own.

stdin: JSON, a list of {"queue", "batch_size", "env_configs"}; every group carries its place, "at".
stdout: for each, {"summing": indices, "exact": [batch, rest], "allotted": [batch, rest]}, both by
place, the batch null if there is none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)

Json = dict[str, Any]


def places(groups: list[Json] | None) -> list[int] | None:
    return None if groups is None else [group["at"] for group in groups]


def found(case: Json) -> Json:
    queue, size = case["queue"], case["batch_size"]
    exact = grab_exact_from_heterogeneous_queue(queue, size)
    allotted = grab_batch_with_minimum_allocations(queue, size, case["env_configs"])
    return {
        "summing": find_groups_summing_to_target(queue, size),
        "exact": [places(exact[0]), places(exact[1])],
        "allotted": [places(allotted[0]), places(allotted[1])],
    }


if __name__ == "__main__":
    json.dump([found(case) for case in json.load(sys.stdin)], sys.stdout)
