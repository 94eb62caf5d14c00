"""RLHF in small: preferences, a reward model, RL on its scores. Does what nobody was paid for rise,
too?

    python benchmarks/rlhf.py [--seeds 0 1 2] [--steps 30] [--panel-model FOLDER] [--algorithms grpo
    ppo ...]

The policy's base is the built-in model after a supervised warm-up in which a guess has as many
tokens as the worked answer of the same problem: in the built-in model the long answers are the
worked ones, and a gain could not be told from a gain in length. For each seed it answers two sets
of problems that have none in common. A rater who errs once in ten prefers the right answer of a
pair. The pairs of the first set train a reward model on the built-in model; those of the second
another on `--panel-model`, which scores held-out answers and nothing else (best one of another
family):

    grpo    importance_sampling, group_std
    ppo     the clipped loss, two epochs of two minibatches, a KL penalty to the base model; no
            critic
    unclipped  as ppo with `importance_sampling`: what the clip is worth
    hacked  as grpo, but the rater prefers the shorter answer: the gain should not show in the panel

With one epoch the clip hardly binds: a batch's second minibatch is one step away from the weights
that sampled it. After 15 steps all but hacked are at the ceiling of the reward model, where most
groups have one score and teach nothing, so that the last figures are hardly apart. How they got
there is in `curve` (every evaluation) and, step by step, in `batch_reward`, `clipped` (share of the
tokens) and `kl` (to the base model).

The exact-answer verifier enters neither reward. Length: what the verifier's gain would be if it
were that of the change of length alone, by the slope of the base model's own answers within their
problems. Written: benchmarks/results/rlhf.json. Exit code 1 where grpo or ppo raises the verifier
or the panel's model by less than the 95 % interval of the difference, where length explains more
than half of it, where ppo clips less than 1 % of the tokens in every step, or where no alert names
the hacked run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import machine
from run_cost import follow
from warm_up import Example, warm_up

RESULT = Path(__file__).parent / "results" / "rlhf.json"
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": (
        "trainer.loss=ppo",
        "trainer.epochs=2",
        "trainer.minibatches=2",
        "trainer.kl_coef=0.02",
    ),
    "unclipped": (
        "trainer.loss=importance_sampling",
        "trainer.allow_unclipped_staleness=true",
        "trainer.epochs=2",
        "trainer.minibatches=2",
        "trainer.kl_coef=0.02",
    ),
    "hacked": (),
}
BINDS = 0.01  # share of a step's tokens that ppo clips at least once in a run
ERRS = 0.1  # share of the pairs that the rater gets wrong
# how a reward model on another base than ours is trained
PRETRAINED = ("--lora", "--set", "learning_rate=3e-4")
HELD_OUT = 0.2  # share of the problems that a reward model is measured and calibrated on
WORKED = 0.3  # share of worked answers in the warm-up; the others are guesses
GUESSES = (-7, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 8)  # how far a guess is from the right answer
TALK = (
    "I look at it and I look again and it is not hard to see what it must be so I say it at "
    "once and do not count."
)


def main() -> int:
    options = parse()
    os.environ["HALTERES_HOME"] = str(options.home)
    if not base_of(options).exists():
        prepare(base_of(options), options.warm_up)
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        models = reward_models(seed, options)
        for algorithm in options.algorithms:
            model = models["hacked" if algorithm == "hacked" else "right"]
            runs.append({"algorithm": algorithm, "seed": seed, "reward_model": model["accuracy"]})
            runs[-1] |= {"panel_model": models["panel"]["accuracy"]}
            runs[-1] |= train(algorithm, seed, model["folder"], models["panel"]["folder"], options)
            print(json.dumps(runs[-1]), flush=True)
            write(runs, options)
    faults = [fault for run in runs for fault in faults_of(run)]
    print(
        "\n".join(faults)
        or "Passed: the gain is real where it should be, and not where it should not."
    )
    return 1 if faults else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="From preferences to a policy, and is the gain real?"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--groups", type=int, default=150, help="problems of each set, answered eight times"
    )
    parser.add_argument(
        "--tasks", type=int, default=256, help="held-out problems, answered four times"
    )
    parser.add_argument("--warm-up", type=int, default=300, help="supervised steps before")
    parser.add_argument(
        "--panel-model", default="halteres/tiny", help="base of the reward model on the panel"
    )
    parser.add_argument(
        "--home", type=Path, help="where everything goes and stays; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    options.home = (options.home or Path(tempfile.mkdtemp(prefix="halteres-bench-"))).absolute()
    return options


def base_of(options: argparse.Namespace) -> Path:
    return options.home / "base"


def prepare(folder: Path, steps: int) -> None:
    """The policy's base: mostly guesses, each as long as the worked answer of its problem."""
    from halteres.environments.problems import draw_problem, user_message, worked_answer
    from halteres.models import TINY, builtin_path
    from halteres.tokenizer import load_tokenizer

    tokenizer, rng = load_tokenizer(str(builtin_path(TINY))), random.Random(0)

    def draw(_: float) -> Example:
        problem = draw_problem(rng, "train")
        answer = tokenizer.encode(worked_answer(problem))
        if rng.random() > WORKED:
            guess = f" So the answer is \\boxed{{{max(0, problem.answer + rng.choice(GUESSES))}}}."
            words = TALK.split()
            texts = (f"{' '.join(words[:count])}.{guess}" for count in range(1, len(words) + 1))
            answer = min(
                map(tokenizer.encode, texts), key=lambda tokens: abs(len(tokens) - len(answer))
            )
        asked = tokenizer.encode(
            tokenizer.render([{"role": "user", "content": user_message(problem)}])
        )
        return asked, [*answer, tokenizer.eos_token_id]

    warm_up(draw, folder, steps=steps)


def reward_models(seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The reward models of a seed, trained and calibrated: the right one, one that likes short
    answers, the panel's.
    """
    first, second = answered(2 * seed, options), answered(2 * seed + 1, options)
    second = {prompt: answers for prompt, answers in second.items() if prompt not in first}
    chance = random.Random(seed)
    return {
        "right": reward_model(
            "right",
            seed,
            pairs(first, lambda answer: answer["score"], chance),
            "halteres/tiny",
            options,
        ),
        "hacked": reward_model(
            "hacked",
            seed,
            pairs(first, lambda answer: -answer["tokens"], chance),
            "halteres/tiny",
            options,
        ),
        "panel": reward_model(
            "panel",
            seed,
            pairs(second, lambda answer: answer["score"], chance),
            options.panel_model,
            options,
        ),
    }


def answered(seed: int, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Problem -> eight answers of the base model at temperature 1, each with its score and number
    of tokens.
    """
    from halteres.config.discovery import find_environment
    from halteres.runs.servers import served

    file = options.home / f"answers-{seed}.jsonl"
    model = str(base_of(options))
    with served(model) as server:
        command = [sys.executable, find_environment("arithmetic").file_path, "process"]
        command += ["--openai.base_url", f"{server.url}/v1", "--openai.model_name", model]
        command += [
            "--env.total_steps",
            str(options.groups),
            "--env.group_size",
            "8",
            "--env.batch_size",
            "8",
        ]
        command += ["--env.seed", str(1000 + seed), "--env.include_messages", "true"]
        command += ["--env.data_path_to_save_groups", str(file)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1800, encoding="utf-8"
        )
    if done.returncode:
        raise SystemExit(f"Sampling answers failed:\n{done.stderr[-2000:]}")
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        group = json.loads(line)
        for tokens, score, messages in zip(
            group["masks"], group["scores"], group["messages"], strict=True
        ):
            answer = {
                "messages": messages,
                "score": score,
                "tokens": sum(token != -100 for token in tokens),
            }
            found[messages[-2]["content"]].append(answer)
    return found


def pairs(
    answers: dict[str, list[dict[str, Any]]], worth: Any, chance: random.Random
) -> list[dict[str, Any]]:
    """Up to four pairs of each problem whose answers differ in worth, rated by somebody who
    errs.
    """
    rows: list[dict[str, Any]] = []
    for group in answers.values():
        unequal = [(a, b) for a in group for b in group if worth(a) > worth(b)]
        for better, worse in chance.sample(unequal, min(4, len(unequal))):
            chosen, rejected = (worse, better) if chance.random() < ERRS else (better, worse)
            prompt = better["messages"][:-1]
            rows.append(
                {
                    "prompt": prompt,
                    "chosen": chosen["messages"][-1:],
                    "rejected": rejected["messages"][-1:],
                }
            )
    return rows


def reward_model(
    name: str, seed: int, rows: Sequence[dict[str, Any]], base: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Train on these pairs, calibrate on held-out ones; the folder, and the accuracy there."""
    folder = options.home / f"{name}-{seed}"
    data = folder.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trained_so = () if base == "halteres/tiny" else PRETRAINED
    command = ["reward", "train", "--model", base, "--data", str(data), "--hold-out", str(HELD_OUT)]
    halteres(*command, "--out", str(folder), *trained_so)
    from halteres.rewards.preferences import hold_out, read_preferences

    _, held_out = hold_out(read_preferences(data), HELD_OUT)
    kept = data.with_name(f"{name}-{seed}-held-out.jsonl")
    kept.write_text(
        "".join(json.dumps(rows[one.row - 1]) + "\n" for one in held_out.comparisons),
        encoding="utf-8",
    )
    halteres("reward", "calibrate", str(folder), str(kept))
    found = json.loads(halteres("reward", "eval", str(folder), str(kept), "--no-probes", "--json"))
    return {"folder": folder, "accuracy": found["overall"]["accuracy"]["value"]}


def halteres(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "halteres", *arguments],
        capture_output=True,
        text=True,
        timeout=3600,
        encoding="utf-8",
    )
    if done.returncode:
        raise SystemExit(f"halteres {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def train(
    algorithm: str, seed: int, model: Path, panel: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """A run on the reward model's scores alone; before and after, each with its 95 % interval."""
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [
        f"run.seed={seed}",
        f"inference.model={base_of(options)}",
        f"trainer.total_steps={options.steps}",
        f"trainer.eval_every={options.steps // 3}",
        f"env.eval_tasks={options.tasks}",
        f"env.rewards=[{{name: helpful, model: {model}}}]",
        f"env.panel=[{{name: verifier, environment: true}}, {{name: other, model: {panel}}}]",
        *ALGORITHMS[algorithm],
    ]
    asked = resolve_settings("arithmetic", None, edits)
    run = start_run(plan_run(asked))
    cpu_s = follow(run)
    rows = [row for row in run.metrics() if "eval/percent_correct" in row]
    steps = [row for row in run.metrics() if row["src"] == "trainer"]
    first, last = rows[0], rows[-1]
    answers = samples_of(run.path, 0)
    length = last["eval/completion_lengths"] - first["eval/completion_lengths"]
    return {
        "run_id": run.run_id,
        "cpu_s": round(cpu_s, 1),
        "reward": change(first, last, "eval/reward/total", options),
        "verifier": change(first, last, "eval/percent_correct", options),
        "panel": change(first, last, "eval/panel/other", options),
        "tokens": [first["eval/completion_lengths"], last["eval/completion_lengths"]],
        "curve": [
            {
                "step": row["step"],
                "reward": round(row["eval/reward/total"], 4),
                "verifier": round(row["eval/percent_correct"], 4),
                "panel": round(row["eval/panel/other"], 4),
            }
            for row in rows
        ],
        "batch_reward": [round(row["reward/mean"], 4) for row in steps],
        "clipped": [rounded(row["tokens/clipped"]) for row in steps],
        "kl": [rounded(row["policy/kl_reference"]) for row in steps],
        "updates": sum(row["train/updates"] for row in steps),
        "by_length_alone": slope(answers) * length,
        "alerts": [event["rule"] for event in run.events() if event.get("type") == "alert"],
    }


def rounded(figure: float | None) -> float | None:
    """None where there is none: of a loss that does not clip, of a run without a KL penalty."""
    return None if figure is None else round(figure, 5)


def change(
    first: dict[str, Any], last: dict[str, Any], name: str, options: argparse.Namespace
) -> dict[str, float]:
    """Both figures, their difference and half of its 95 % interval, tasks taken as independent."""
    count = options.tasks
    spread = [
        row.get(f"{name}_std") or math.sqrt(row[name] * (1 - row[name])) for row in (first, last)
    ]
    return {
        "before": first[name],
        "after": last[name],
        "gain": last[name] - first[name],
        "interval": 1.96 * math.hypot(*(one / math.sqrt(count) for one in spread)),
    }


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The held-out answers at temperature 1 of one evaluation."""
    file = run / "evals" / f"step_{step}" / "samples.jsonl"
    return [
        row
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if row["temperature"] > 0
    ]


def slope(answers: Sequence[dict[str, Any]]) -> float:
    """Score per token, least squares within each problem."""
    products = squares = 0.0
    for group in by_prompt(answers):
        tokens, scores = ([float(answer[name]) for answer in group] for name in ("tokens", "score"))
        mean_tokens, mean_score = statistics.fmean(tokens), statistics.fmean(scores)
        products += sum(
            (t - mean_tokens) * (s - mean_score) for t, s in zip(tokens, scores, strict=True)
        )
        squares += sum((t - mean_tokens) ** 2 for t in tokens)
    return products / squares if squares else 0.0


def by_prompt(answers: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        groups[answer["prompt"]].append(answer)
    yield from groups.values()


def faults_of(run: dict[str, Any]) -> list[str]:
    who = f"{run['algorithm']} seed {run['seed']}"
    if run["algorithm"] == "hacked":
        return (
            []
            if "panel_disagrees" in run["alerts"]
            else [f"FAILED: {who}: no alert panel_disagrees."]
        )
    if run["algorithm"] == "unclipped":
        return []
    faults = [
        f"FAILED: {who}: {name} gained {run[name]['gain']:.3f}, within ± "
        f"{run[name]['interval']:.3f}."
        for name in ("verifier", "panel")
        if run[name]["gain"] <= run[name]["interval"]
    ]
    if run["algorithm"] == "ppo" and max(run["clipped"]) < BINDS:
        faults.append(f"FAILED: {who}: no step clips {BINDS:.0%} of its tokens.")
    if abs(run["by_length_alone"]) > abs(run["verifier"]["gain"]) / 2:
        faults.append(f"FAILED: {who}: by length alone {run['by_length_alone']:+.3f}.")
    return faults


def write(runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    record = {
        "what": (
            "RL on a reward model's scores: its own gain on held-out problems, and that of "
            "what it never saw"
        ),
        "command": " ".join(["python", "benchmarks/rlhf.py", *sys.argv[1:]]),
        "machine": machine(),
        "runs": runs,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
