"""The end of a run on disk: adapter, results.json, STATUS.md, plot.png.

Owns: what the final answer says, and copying the final weights to where it says they are.
Never: decides how the run ended; fails it because of a picture.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halteres.errors import HalteresError, NotFound, ServerError, boundary
from halteres.observe.metrics import Row, merge_by_step, read_rows
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState, replace_file

NUM_SAMPLES = 2
"""Answers shown before and after."""

_TRAINING_ONLY = ("optimizer.safetensors", "state.json")


def final_checkpoint(run: RunDirectory) -> Row | None:
    """The checkpoint that its trainer called final."""
    return next((row for row in reversed(run.checkpoints()) if row.get("final")), None)


def export_adapter(run: RunDirectory) -> Path:
    """Copy the final weights, as a PEFT folder, to RUN/adapter. NotFound where they do not exist."""
    from halteres.service.checkpoints import folder_of

    checkpoint = final_checkpoint(run)
    if checkpoint is None or not checkpoint.get("sampler_path"):
        raise NotFound("There are no final weights.", "The trainer has written no final checkpoint.")
    source = folder_of(run.path / "service", checkpoint["sampler_path"])
    if not (source / "adapter_config.json").is_file():
        raise NotFound(f"The final weights {checkpoint['sampler_path']} are not on disk.", f"{source} is no adapter.")
    beside, target = run.path / ".adapter", run.path / "adapter"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source, beside, ignore=shutil.ignore_patterns(*_TRAINING_ONLY))
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    return target


def conclude(run: RunDirectory, state: RunState) -> list[str]:
    """Write plot, results and summary for a run that ends in `state`. Returns what could not be made, in sentences."""
    failures = _plot(run, state)
    results = _results(run, state)
    try:
        replace_file(run.path / "results.json", json.dumps(results, indent=1).encode() + b"\n")
        replace_file(run.path / "STATUS.md", _summary(run, state, results).encode())
    except OSError as error:
        failures.append(f"Results could not be written: {error}.")
    return failures


def _plot(run: RunDirectory, state: RunState) -> list[str]:
    rows = run.metrics()
    if not rows:
        return []
    try:
        with boundary(ServerError, "Plotting"):  # matplotlib reads fonts and caches of the machine: much can be wrong
            from halteres.observe.plots import plot_run

            plot_run(rows, run.path / "plot.png", state.name)
    except HalteresError as error:
        return [error.sentence]
    return []


def _results(run: RunDirectory, state: RunState) -> dict[str, Any]:
    rows = merge_by_step(run.metrics())
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    baseline, last = ({} if not evaluations else _figures(evaluations[at]) for at in (0, -1))
    final = final_checkpoint(run) or state.last_checkpoint or {}
    adapter = run.path / "adapter"
    return {
        "run_id": state.run_id,
        "name": state.name,
        "status": state.status,
        "environment": state.environment,
        "base_model": state.base_model,
        "step": state.step,
        "total_steps": state.total_steps,
        "error": state.error,
        "note": state.note,
        "minutes": round(((state.ended_at or state.created_at) - state.created_at) / 60, 2),
        "final_metrics": {**_last_training(rows), **last},
        "baseline": baseline,
        "improvement": {
            name: round(last[name] - baseline[name], 6)
            for name in last
            if len(evaluations) > 1 and name in baseline and not name.startswith("eval/num_")
        },
        "weights": {
            "sampler": final.get("sampler_path"),
            "state": final.get("state_path"),
            "peft_dir": str(adapter) if adapter.is_dir() else None,
        },
        "checkpoints": run.checkpoints(),
        "samples": before_and_after(run),
        "plot": str(run.path / "plot.png") if (run.path / "plot.png").exists() else None,
    }


def before_and_after(run: RunDirectory, count: int = NUM_SAMPLES) -> list[dict[str, Any]]:
    """Held-out tasks with their answers of the first and the last evaluation; those first that were learnt."""
    folders = sorted((run.path / "evals").glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
    folders = [folder for folder in folders if (folder / "samples.jsonl").is_file()]
    if len(folders) < 2:
        return []
    before, after = (_by_prompt(folders[at] / "samples.jsonl") for at in (0, -1))
    pairs = [(before[prompt], sample) for prompt, sample in after.items() if prompt in before]
    pairs.sort(key=lambda pair: _score(pair[0]) - _score(pair[1]))
    return [
        {
            "prompt": last.get("prompt"),
            "before": {"completion": first.get("completion"), "score": first.get("score")},
            "after": {"completion": last.get("completion"), "score": last.get("score")},
        }
        for first, last in pairs[:count]
    ]


def _by_prompt(file: Path) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in read_rows(file):
        found.setdefault(json.dumps(row.get("prompt")), row)
    return found


def _score(sample: Mapping[str, Any]) -> float:
    score = sample.get("score")
    return float(score) if isinstance(score, (int, float)) else 0.0


def _figures(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/") and isinstance(value, (int, float))}


def _last_training(rows: list[Row]) -> dict[str, Any]:
    trained = [row for row in rows if "reward/mean" in row]
    return {k: v for k, v in trained[-1].items() if k not in ("step", "t")} if trained else {}


def _summary(run: RunDirectory, state: RunState, results: Mapping[str, Any]) -> str:
    lines = [f"# Run {state.run_id}: {state.name}", "", f"**{state.status}** at step {state.step}/{state.total_steps}"]
    lines += [f"\n{text}" for text in (state.error, state.note) if text]
    lines += ["", "| metric | before | after |", "|---|---|---|"]
    lines += [
        f"| {name} | {results['baseline'].get(name, '')} | {value} |"
        for name, value in results["final_metrics"].items()
        if name.startswith("eval/") or name in ("reward/mean", "reward/success")
    ]
    lines += ["", f"- directory: `{run.path}`"]
    lines += [f"- {name}: `{value}`" for name, value in results["weights"].items() if value]
    return "\n".join(lines) + "\n"
