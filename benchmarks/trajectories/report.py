"""What the rounds come to: medians, how many times better one party's are, aims that are met or
not.

Owns: the form of the result, the aims.
Never: measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

Figures = Mapping[str, float]
Rounds = Mapping[str, list[Figures]]
"""By party; each round has the same figures."""

RATIO_OF_AIM = 2.0
BATCH_MS = 20.0
FLAT_WITHIN = 1.25
"""A poll at the longest queue over one at the shortest."""

READY_S = 1.0

_RATES = ("s_per_s", "mb_per_s")
_COMPARED = ("_ms", "_s", "_per_group", "_per_poll", "_per_batch")


def told(rounds: Rounds) -> dict[str, Any]:
    """Every figure's median and rounds by party, and how many times better ours are."""
    answer: dict[str, Any] = {party: _party(measured) for party, measured in rounds.items()}
    if len(answer) == 2:
        answer["times_better"] = dict(
            _times_better(answer["original"]["median"], answer["halteres"]["median"])
        )
    return answer


def _times_better(original: Figures, ours: Figures) -> Iterator[tuple[str, float]]:
    """The original's cost over ours, our rate over the original's; of medians, where neither is
    nothing.
    """
    for name in original.keys() & ours.keys():
        if original[name] <= 0 or ours[name] <= 0 or not name.endswith(_COMPARED):
            continue
        ratio = original[name] / ours[name]
        yield name, _short(1 / ratio if name.endswith(_RATES) else ratio)


def _party(measured: list[Figures]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for figures in measured for name in figures))
    values = {
        name: [_short(figures[name]) for figures in measured if name in figures] for name in names
    }
    return {
        "median": {name: _short(statistics.median(each)) for name, each in values.items()},
        "rounds": values,
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}") if abs(value) < 1000 else round(value)


def aims(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each promise with the figure it stands on; scenarios that were not run make none."""
    made = [
        *_ingest(results),
        *_batches(results),
        *_polls(results),
        *_mixed(results),
        *_restarts(results),
    ]
    return {words: {"figure": _short(figure), "met": met} for words, figure, met in made}


def _ingest(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, bool]]:
    ratios = [
        (key, _ratio(case, "cpu_ms_per_group")) for key, case in results.get("ingest", {}).items()
    ]
    return [
        (f"ingest {key}: CPU at least {RATIO_OF_AIM:g}x less", it, it >= RATIO_OF_AIM)
        for key, it in ratios
        if it
    ]


def _batches(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, bool]]:
    made: list[tuple[str, float, bool]] = []
    for key, case in {
        **results.get("batches", {}),
        **results.get("batches_throughout", {}),
    }.items():
        medians = case["halteres"]["median"]
        slowest = max(medians[name] for name in ("first_ms", "next_ms") if name in medians)
        made.append((f"batch, {key}: at most {BATCH_MS:g} ms", slowest, slowest <= BATCH_MS))
    return made


def _polls(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, bool]]:
    cases = list(results.get("polls", {}).values())
    if not cases:
        return []
    made: list[tuple[str, float, bool]] = []
    for name in ("p50_ms", "cpu_ms_per_poll"):
        shortest, *_, longest = (case["halteres"]["median"][name] for case in cases)
        growth = longest / shortest
        made.append(
            (
                f"/status-env, longest queue over shortest, {name}: flat",
                growth,
                growth <= FLAT_WITHIN,
            )
        )
    return made


def _mixed(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, bool]]:
    by_way: dict[str, list[float]] = {}
    for key, case in results.get("mixed", {}).items():
        by_way.setdefault(key.partition(", ")[2], []).append(
            case["halteres"]["median"]["groups_per_s"]
        )
    growths = {way: rates[-1] / rates[0] for way, rates in by_way.items()}
    return [
        (f"most environments over one, {way}: no slower", it, it >= 1.0)
        for way, it in growths.items()
    ]


def _restarts(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, bool]]:
    made: list[tuple[str, float, bool]] = []
    for key, case in results.get("restart", {}).items():
        medians, queued = case["halteres"]["median"], int(key.split()[0])
        made += [
            (
                f"kill -9, {key}: ready within {READY_S:g} s",
                medians["ready_s"],
                medians["ready_s"] <= READY_S,
            ),
            (
                f"kill -9, {key}: groups kept",
                medians["groups_kept"],
                medians["groups_kept"] == queued,
            ),
        ]
    return made


def _ratio(case: Mapping[str, Any], name: str) -> float | None:
    return case.get("times_better", {}).get(name)
