"""What `capacity.py` found: drawn, and as the tables of docs/several-machines.md.

    .venv/bin/python benchmarks/capacity_report.py

Owns: every figure of that page's last section; a test compares them with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halteres.config.sampler_list import MOST
from halteres.observe.canvas import Canvas, finish

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "capacity.json"
PAGE = ROOT / "docs" / "several-machines.md"

# a level that carries less of what its samplers would answer alone is past the knee
CARRIES = 0.9
# of a core: a service that takes less past the knee waits for the machine's other work
AT_LIMIT = 0.9
COLOURS = ("#b3261e", "#d98324", "#8a8f98", "#3b7dd8", "#1b4f9c")  # by staleness, 0 to 4

PANELS: tuple[tuple[str, str, str, str], ...] = (
    ("fixed", "steps_per_hour", "steps an hour", "One trainer, batches of 512: more samplers"),
    ("growing", "trainer_idle", "share of the time", "Trainer grows too: it waits for a batch"),
    ("growing", "samplers_busy", "share of samplers", "Trainer grows too: samplers at work"),
    ("growing", "too_old", "share of sequences", "Trainer grows too: sampled, then too old"),
)


def draw(simulation: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Four panels over the number of samplers, a line for each staleness."""
    canvas = Canvas("Samplers for one run, simulated", rows=2, columns=2)
    for axes, (kind, figure, up, title) in zip(canvas.panels, PANELS, strict=True):
        rows = simulation[kind]
        for staleness in sorted({row["staleness"] for row in rows}):
            line = [row for row in rows if row["staleness"] == staleness]
            axes.plot(
                [row["samplers"] for row in line],
                [row[figure] for row in line],
                marker="o",
                markersize=4,
                color=COLOURS[staleness],
                label=f"staleness {staleness}",
            )
        axes.set_xscale("log")
        axes.set_title(title, fontsize=12, loc="left")
        finish(axes, up)
        if figure == "too_old":
            axes.set_ylim(-0.015, 0.5)
        if figure == "steps_per_hour":
            axes.set_ylim(0, None)
        sizes = sorted({row["samplers"] for row in rows})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
    for axes in canvas.panels[2:]:
        axes.set_xlabel("samplers", fontsize=12)
    canvas.legend(*canvas.panels)
    canvas.save(file)


def number(value: float) -> str:
    """Two digits that count, with commas for thousands.

    >>> number(12345.6), number(0.0345), number(7.26)
    ('12,000', '0.035', '7.3')
    """
    rounded = float(f"{value:.2g}")
    if rounded >= 10:
        return f"{rounded:,.0f}"
    return f"{rounded:g}"


def samplers(num: float) -> str:
    """So many."""
    return f"{num:g} sampler{'s' * (num != 1)}"


def last_carried(levels: Sequence[dict[str, float]]) -> dict[str, float]:
    """The level with the most samplers whose answers the service still passes on in time; the
    first where none is.
    """
    return [levels[0], *(one for one in levels if one["carried"] >= CARRIES)][-1]


def whence(level: dict[str, float]) -> str:
    """How a level's figures are known; whether it was not the service that was at its limit."""
    if level["carried"] >= CARRIES or level["cores"] >= AT_LIMIT:
        return "measured"
    return "measured, but other work had the cores: no limit of the service"


def place(machine: dict[str, Any]) -> str:
    """Where and when a result was measured, and with how much other work."""
    loads = sorted((machine["load_average"][0], machine["load_average_after"][0]))
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}, load average "
        f"{loads[0]:.0f} to {loads[1]:.0f}"
    )


def _measured(found: dict[str, Any]) -> list[str]:
    generate, sample = found["costs"]["generate"], found["costs"]["sample"]
    levels = found["levels"]["generate"]
    carried, most = last_carried(levels), levels[-1]
    in_flight = most["in_flight"] - levels[0]["in_flight"]
    request_kb = 1e3 * (most["resident_mb"] - levels[0]["resident_mb"]) / in_flight
    usual = max(found["trajectories"], key=lambda one: one["groups_per_s"])
    long = max(found["trajectories"], key=lambda one: one["tokens_of_sequence"])
    rate = found["assumed"]["sampler_tokens_per_s"]

    def spent(one: dict[str, float]) -> str:
        return (
            f"{number(one['cpu_ms_per_request'])} ms, and for 1,000 tokens "
            f"{number(one['cpu_ms_per_1k_answer_tokens'])} ms of an answer, "
            f"{number(one['cpu_ms_per_1k_prompt_tokens'])} ms of a prompt"
        )

    def on_a_core(one: dict[str, float]) -> str:
        return (
            f"{number(one['requests_per_core_s'])} requests or "
            f"{number(one['tokens_per_core_s'])} tokens a second: "
            f"{number(one['samplers_per_core'])} samplers"
        )

    rows = [
        ("measured on", place(found["machine"]), "`benchmarks/results/capacity.json`"),
        ("CPU time for a request, `/runs/RUN/generate`", spent(generate), "measured"),
        ("CPU time for a request, the SDK's `sample`", spent(sample), "measured"),
        (
            "one service, `/runs/RUN/generate`",
            on_a_core(generate),
            "at best: from the CPU time, one core",
        ),
        (
            "one service, the SDK's `sample`",
            on_a_core(sample),
            "at best: from the CPU time, one core",
        ),
        (
            "one service, tried, `/runs/RUN/generate`",
            f"{samplers(carried['samplers'])}, {number(carried['in_flight'])} requests in flight, "
            f"{number(carried['tokens_per_s'])} tokens a second, "
            f"{number(carried['added_ms_p50'])} ms more for each (median)",
            whence(carried),
        ),
        (
            "... and beyond that",
            f"with {samplers(most['samplers'])} {number(100 * most['carried'])} % of what they "
            f"could answer, at {number(most['cores'])} of a core",
            whence(most),
        ),
        (
            "memory of the service",
            f"{number(levels[0]['resident_mb_idle'])} MB, and {number(request_kb)} kB for a "
            "request in flight",
            "measured",
        ),
        (
            "one trajectory server, groups of 16 x 512 tokens",
            f"{number(usual['groups_per_core_s'])} groups or "
            f"{number(usual['tokens_per_core_s'])} tokens a second: "
            f"{number(usual['tokens_per_core_s'] / rate)} samplers",
            "from the CPU time, one core",
        ),
        (
            "... groups of 16 x 4,096 tokens",
            f"{number(long['groups_per_core_s'])} groups or "
            f"{number(long['tokens_per_core_s'])} tokens a second",
            "from the CPU time, one core",
        ),
        ("samplers of one service, at most", f"{MOST}", "its code"),
        (
            "services of a cluster",
            "one for each run or team: they share nothing but folders",
            "how it is made",
        ),
    ]
    return [
        "| what | figure | from |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _simulated(simulation: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The trainer's waiting and what was sampled in vain, by staleness."""
    rows = simulation["growing"]
    sizes = sorted({row["samplers"] for row in rows})
    head = " | ".join(f"{size:,}" for size in sizes)
    lines = [f"| staleness, samplers: | {head} |", "|---" * (len(sizes) + 1) + "|"]
    for staleness in sorted({row["staleness"] for row in rows}):
        cells = [
            f"{100 * row['trainer_idle']:.0f} % / {100 * row['too_old']:.0f} %"
            for row in rows
            if row["staleness"] == staleness
        ]
        lines.append(f"| {staleness} | {' | '.join(cells)} |")
    return lines


MARKED = re.compile(r"(<!-- capacity: (\w+), [^>]*-->\n).*?(<!-- end of capacity -->)", re.DOTALL)


def filled(page: str, found: dict[str, Any]) -> str:
    """The page with these figures between its marks."""
    tables = {"measured": _measured(found), "simulated": _simulated(found["simulation"])}

    def table(marks: re.Match[str]) -> str:
        lines = "\n".join(tables[marks[2]])
        return f"{marks[1]}\n{lines}\n\n{marks[3]}"

    return MARKED.sub(table, page)


def main() -> None:
    """Draw, and fill the page in."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    draw(found["simulation"], RESULT.with_suffix(".png"))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, found), encoding="utf-8")


if __name__ == "__main__":
    main()
