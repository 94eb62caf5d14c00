"""How much better does SmolLM2-135M-Instruct answer after RL on two cores? Every task of
recipes/smollm2, three seeds each.

A seed is one run as `recipes/smollm2/train TASK` makes it. Afterwards its last weights answer
held-out tasks, and once for all seeds the first ones, which are the base model's: also with answers
of up to 256 tokens, so that no limit flatters the gain. The script goes on where it was stopped:
what is complete is not done again, and a run that was cut off is resumed. Written:
benchmarks/results/smollm2.json, smollm2.png. Exit code 1 where a seed gains less than 30 points or
takes more than 45 CPU minutes.

    .venv/bin/python benchmarks/smollm2.py [--tasks sums middle chain_sum] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from held_out import FIRST, LAST, evaluate_ends
from machine import machine
from run_cost import follow, recorded
from smollm2_picture import draw

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "smollm2"
LEAST_GAIN = 0.30
MOST_CPU_S = 45 * 60
REASONING_GYM = "reasoning-gym>=0.1.23"
FREE_ANSWER = 256
"""Tokens of an answer where the limit is not to matter."""
LONGEST_PROMPT = 384
"""Tokens; more than any task's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=["sums", "middle", "chain_sum"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=256, help="held-out tasks")
    parser.add_argument("--set", dest="edits", action="append", default=[])
    parser.add_argument("--home", type=Path, default=ROOT / "data" / "smollm2")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "smollm2")
    options = parser.parse_args()
    options.home.mkdir(parents=True, exist_ok=True)
    os.environ["HALTERES_HOME"] = str(options.home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    subprocess.run([RECIPE / "get-model"], check=True)
    results: list[dict[str, Any]] = []
    for task in options.tasks:
        for seed in options.seeds:
            result, curve = measured(task, seed, options)
            results.append(result)
            print(json.dumps(result), flush=True)
            result["scores"] = [row["rollouts/score"] for row in curve]
    write(results, options)
    return verdict(results)


def measured(
    task: str, seed: int, options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One seed of a task: from its file, or run and evaluated now."""

    found = once(
        options.home / f"{task}-{seed}.json", partial(run_and_evaluate, task, seed, options)
    )
    return found["result"], found["curve"]


def run_and_evaluate(task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    from halteres.observe.metrics import merge_by_step

    record = options.home / f"{task}-{seed}.lives.jsonl"
    run, costs = completed_run(record, partial(started, task, seed, options))
    curve = [row for row in merge_by_step(run.metrics()) if row.get("reward/mean") is not None]
    result = evaluated(run, task, options)
    result |= {"task": task, "seed": seed, "steps": len(curve), **costs}
    return {"result": result, "curve": curve}


def completed_run(record: Path, start: Callable[[Any], Any]) -> tuple[Any, dict[str, float]]:
    """The run of a record: begun, followed where it goes on without this script, or resumed. With
    it what its lives cost together.

    Args:
        record: a file with a line for each life; need not exist.
        start: makes a run, or one that goes on from the run that it is given.
    """
    from halteres.runs.directory import find_run

    run = last_run(record)
    status = ""
    if run is not None:
        status = run.state().status
    if run is None or status in ("failed", "stopped"):
        if run is not None and run.newest_checkpoint() is None:
            # it ended before there was anything to go on from
            run = None
        run = start(run)
        add_life(record, {"run": run.run_id, "load_average": os.getloadavg()[0]})
    if status != "completed":
        follow(run)
    spent = lives(record)
    costs = [recorded(find_run(life["run"])) for life in spent]
    return run, {
        "cpu_s": round(sum(cpu_s for cpu_s, _ in costs), 1),
        "wall_s": round(sum(wall_s for _, wall_s in costs), 1),
        "load_average": round(spent[0]["load_average"], 2),
    }


def started(task: str, seed: int, options: argparse.Namespace, resume: Any) -> Any:
    """A new run, or one that goes on from `resume`."""
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [f"run.seed={seed}", *options.edits, *own_edits(task)]
    asked = resolve_settings(str(RECIPE / f"{task}.py"), RECIPE / f"{task}.yaml", edits)
    return start_run(plan_run(asked, resume=resume))


def own_edits(task: str) -> list[str]:
    """What a task needs of this machine: `chain_sum` a Python that has reasoning-gym."""
    if task != "chain_sum":
        return []
    python = subprocess.run(
        [ROOT / "scripts" / "client", "reasoning-gym", REASONING_GYM],
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout.strip()
    return [f"env.python={python}"]


def last_run(record: Path) -> Any:
    """The run of the record's last life; None: there is none."""
    from halteres.runs.directory import find_run

    earlier = lives(record)
    if not earlier:
        return None
    return find_run(earlier[-1]["run"])


def lives(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def add_life(record: Path, life: dict[str, Any]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(life) + "\n")


def evaluated(run: Any, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """Shares of right answers at temperature 1 and greedy, before and after; the first weights
    also with long answers.
    """
    asked = ["--env.eval_tasks", str(options.held_out), "--env.eval_samples", "1"]
    base = once(options.home / f"{task}-base.json", partial(base_figures, run, asked))
    (after,) = evaluate_ends(run, asked, ends=[LAST])
    share = after["eval/percent_correct"]
    return {
        **base,
        "after": share,
        "after_greedy": after["eval/percent_correct_greedy"],
        "gain": share - max(base["before"], base["before_free"]),
    }


def base_figures(run: Any, asked: list[str]) -> dict[str, float]:
    (before,) = evaluate_ends(run, asked, ends=[FIRST])
    free = [*asked, "--env.max_new_tokens", str(FREE_ANSWER)]
    free += ["--env.max_token_length", str(FREE_ANSWER + LONGEST_PROMPT)]
    (free_before,) = evaluate_ends(run, free, ends=[FIRST])
    return {
        "before": before["eval/percent_correct"],
        "before_free": free_before["eval/percent_correct"],
        "before_greedy": before["eval/percent_correct_greedy"],
    }


def once(file: Path, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds; made now where there is none."""
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(made()), encoding="utf-8")
        part.replace(file)
    return json.loads(file.read_text(encoding="utf-8"))


def write(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    by_task: dict[str, dict[str, Any]] = {}
    for task in options.tasks:
        own = [one for one in results if one["task"] == task]
        by_task[task] = {
            "before": statistics.fmean(one["before"] for one in own),
            "after": statistics.fmean(one["after"] for one in own),
            "least_gain": min(one["gain"] for one in own),
            "cpu_s_most": max(one["cpu_s"] for one in own),
            "answers": answers_of(options.home / f"{task}-{own[0]['seed']}.lives.jsonl"),
        }
    found = {
        "what": "share of all answers that are right, of each step; held out: temperature 1",
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct (Q4_1)",
        "held_out": options.held_out,
        "tasks": by_task,
        "seeds": results,
    }
    text = json.dumps(found, indent=1) + "\n"
    options.out.with_suffix(".json").write_text(text, encoding="utf-8")
    draw(found, options.out.with_suffix(".png"))


def answers_of(record: Path) -> list[dict[str, str]]:
    """The run's greedy answers to its first two held-out questions, before and after."""
    run = last_run(record)
    folders = sorted((run.path / "evals").iterdir(), key=lambda one: int(one.name.split("_")[1]))
    before, after = (greedy(folder / "samples.jsonl") for folder in (folders[0], folders[-1]))
    assert [one["prompt"] for one in before] == [one["prompt"] for one in after]
    return [
        {"question": was["prompt"], "before": was["completion"], "after": now["completion"]}
        for was, now in zip(before[:2], after[:2], strict=True)
    ]


def greedy(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["temperature"] == 0]


def verdict(results: list[dict[str, Any]]) -> int:
    bad = [one for one in results if one["gain"] < LEAST_GAIN or one["cpu_s"] > MOST_CPU_S]
    for one in bad:
        print(
            f"missed: {one['task']}, seed {one['seed']}: {one['gain']:+.3f}, {one['cpu_s']:.0f} s"
        )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
