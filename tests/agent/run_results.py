"""Runs that have something to show: metrics, evaluations with their samples, rollouts,
checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from random import Random
from statistics import fmean, stdev
from typing import Any

from halteres.config.settings import Settings
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory

from .run_fixtures import make_run

NUM_TASKS, NUM_SAMPLES = 64, 4


def trained(
    run_id: str = "3fa9c1d2", *, steps: int = 50, skill: float = 0.3, seed: int = 0, **state: Any
) -> RunDirectory:
    """A run that has ended and learnt: its held-out share has risen by about `skill`."""
    run = make_run(run_id, **{"step": steps, "total_steps": steps, **state})
    evaluate(run, 0, 0.0)
    for step in range(1, steps + 1):
        add_step(run, step, 0.3 + 0.4 * step / steps, Random(seed * 1000 + step))
        if step % 20 == 0 and step != steps:
            evaluate(run, step, skill * step / steps, seed)
    evaluate(run, steps, skill, seed)
    for step, name in ((0, "step-000000"), (steps, "final")):
        add_checkpoint(run, step, name)
    (run.path / "adapter").mkdir()
    return run


def configure(directory: RunDirectory, /, **sections: dict[str, Any]) -> None:
    """Give the run other settings."""
    settings = Settings.model_validate(sections)
    (directory.path / "settings.json").write_text(settings.model_dump_json())


def add_step(run: RunDirectory, step: int, reward: float, random: Random) -> None:
    """Rows as the trainer and the environment write them."""
    reward = reward + random.gauss(0, 0.03)
    figures = {
        "train/loss": -1512.8 * random.random(),
        "train/learning_rate": 0.0015,
        "train/skipped": 0.0,
        "reward/mean": reward,
        "reward/std": 0.46,
        "reward/success": reward + 0.01,
        "groups/count": 16.0,
        "groups/without_signal": 0.125,
        "kl_sample_train_v2": 1.2e-10,
        "tokens/action": 4718.0,
        "policy/version": float(step),
        "time/step": 1.28,
    }
    append_row(
        run.path / "metrics.jsonl", {"step": step, "t": 1.7e9 + step, "src": "trainer", **figures}
    )
    told = {"train/percent_correct": reward, "train/completion_lengths": 18.4, "rollouts/failed": 0}
    append_row(run.path / "metrics.jsonl", {"step": step, "t": 1.7e9 + step, "src": "env", **told})


def evaluate(
    run: RunDirectory,
    step: int,
    skill: float,
    seed: int = 0,
    *,
    tasks: Sequence[str] = (),
    with_samples: bool = True,
) -> None:
    """An evaluation: each task is solved with its own chance, raised by `skill`."""
    easiness = Random(7)
    asked = list(tasks) or [f"What is {number} + 1?" for number in range(NUM_TASKS)]
    chances = [min(1.0, max(0.0, easiness.uniform(0.0, 0.7) + skill)) for _ in asked]
    random = Random(f"{run.run_id} {step} {seed}")
    scores = [[float(random.random() < chance) for _ in range(NUM_SAMPLES)] for chance in chances]
    greedy = [float(chance > 0.5) for chance in chances]
    rows = [
        {
            "prompt": prompt,
            "completion": f"({score:g})",
            "score": score,
            "temperature": t,
            "tokens": 20,
            "finish": "stop",
        }
        for prompt, first, others in zip(asked, greedy, scores, strict=True)
        for score, t in [(first, 0.0), *((other, 1.0) for other in others)]
    ]
    if with_samples:
        folder = run.path / "evals" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    per_task = [fmean(of_task) for of_task in scores]
    append_row(
        run.path / "metrics.jsonl",
        {
            "step": step,
            "src": "eval",
            "eval/percent_correct": fmean(per_task),
            "eval/percent_correct_greedy": fmean(greedy),
            "eval/percent_correct_stderr": stdev(per_task) / math.sqrt(len(per_task)),
            "eval/mean_score": fmean(per_task),
            "eval/completion_lengths": 20.0,
            "eval/truncated": 0.0,
            "eval/num_tasks": len(asked),
            "eval/num_samples": NUM_SAMPLES,
            "eval/num_failed": 0,
            "eval/worked_share": 0.5 + skill,
            "eval/policy_version": step,
        },
    )


def add_checkpoint(run: RunDirectory, step: int, name: str) -> None:
    model = "tinker://a41b814a-839f-48f0-8535-d8c94f5bfcbf:train:0"
    row = {
        "name": name,
        "step": step,
        "sampler_path": f"{model}/sampler_weights/{name}",
        "final": name == "final",
    }
    append_row(
        run.path / "checkpoints.jsonl",
        {**row, "state_path": f"{model}/weights/{name}" if step else None},
    )


def completion(
    text: str, score: float | None = 0.0, *, tokens: int = 12, finish: str = "stop"
) -> dict[str, Any]:
    return {"text": text, "score": score, "tokens": tokens, "finish": finish}


def add_group(run: RunDirectory, step: int, *completions: dict[str, Any], **line: Any) -> None:
    """One line of rollouts/step_N.jsonl."""
    (run.path / "rollouts").mkdir(exist_ok=True)
    facts = {
        "group": 0,
        "item": {"question": "6 * 7", "answer": 42},
        "prompt": "What is 6 * 7?",
        "failures": [],
    }
    append_row(
        run.path / "rollouts" / f"step_{step}.jsonl",
        {**facts, "completions": list(completions), **line},
    )
