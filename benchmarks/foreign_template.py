"""Does an environment written for atroposlib train as it is? The template of tinker-atropos, before
and after.

    python benchmarks/foreign_template.py TEMPLATE_FOLDER INTERPRETER [--steps 40] [--warm-up 200]
    [--home FOLDER]

TEMPLATE_FOLDER is a checkout of tinker-atropos; its `tinker_atropos/environments/gsm8k_tinker.py`
is run unmodified by INTERPRETER, a Python that has atroposlib and what else the file imports. Both
are somebody else's, and not part of this repository. The data set that the file asks the hub for
("gsm8k", "main") is a folder of sums in the working directory.

The template asks with two examples and a sentence after every question, which the built-in model
has never seen: it solves 1 % so asked, whatever the sums. So the base model is the built-in one
after a supervised warm-up on that very prompt, in the two stages of its own recipe: worked answers
alone, then three of them to seven hasty guesses. What reinforcement learning has to find is which
of the two pays. Written: benchmarks/results/foreign_template.json. Exit code 1 where the held-out
share of right greedy answers, as the template's own `evaluate` counts them, gains less than 0.20.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine
from warm_up import Example, warm_up

RESULT = Path(__file__).parent / "results" / "foreign_template.json"
TEMPLATE = Path("tinker_atropos") / "environments" / "gsm8k_tinker.py"
LEAST_GAIN = 0.20
NUM_TEST = 24  # of 81 sums
# share of worked answers in the last steps of the warm-up, and the share of those steps
WORKED, MIXED = 0.3, 0.3
# how far a hasty answer is from the right one
GUESSES = (-7, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 8)
CARD = """\
---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
SETTINGS = (
    "env.group_size=16",
    "env.batch_size=128",
    "env.max_token_length=320",
    "env.max_num_workers=16",
    "trainer.max_token_trainer_length=512",
    "trainer.learning_rate=1.5e-3",
    "trainer.lora_rank=16",
    "trainer.eval_every=20",
)


def main() -> int:
    options = parse()
    os.environ["HALTERES_HOME"] = str(options.home / "halteres")
    # it knows a local folder by its name alone
    os.environ["HF_DATASETS_CACHE"] = str(options.home / "datasets")
    prompt, base, work = prompt_of(options), options.home / "base", options.home / "work"
    if not base.is_dir():
        prepare(prompt, base, options.warm_up)
    share = solved(prompt, base)
    print(
        f"At temperature 1 the warmed-up model solves {share:.1%} of the training sums; so asked, "
        f"the built-in one {solved(prompt, None):.1%}.",
        flush=True,
    )
    lay_out(options.template, work)
    began = time.monotonic()
    run = train(options, base, work)
    record = report(run, share, round(time.monotonic() - began), options)
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["held_out"], indent=1))
    if not options.keep:
        shutil.rmtree(options.home)
    return 0 if record["held_out"]["gain"] >= LEAST_GAIN else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="tinker-atropos's own template, trained unmodified."
    )
    parser.add_argument("template", type=Path, help="a checkout of tinker-atropos")
    parser.add_argument("interpreter", help="a Python that has atroposlib")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=200, help="supervised steps before")
    parser.add_argument(
        "--home", type=Path, help="where everything goes and stays; default: a temporary folder"
    )
    options = parser.parse_args()
    options.keep = options.home is not None
    options.home = (options.home or Path(tempfile.mkdtemp(prefix="halteres-bench-"))).absolute()
    options.home.mkdir(parents=True, exist_ok=True)
    options.template = options.template.absolute()
    return options


def prompt_of(options: argparse.Namespace) -> dict[str, Any]:
    """The examples before each question and the sentence after it, as the template has them."""
    script = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('template', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps({'before': module.convo_prefix, 'after': module.question_suffix}))"
    )
    command = [options.interpreter, "-c", script, str(options.template / TEMPLATE)]
    told = subprocess.run(
        command,
        cwd=options.template,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        encoding="utf-8",
    )
    return json.loads(told.stdout.splitlines()[-1])


@dataclass(frozen=True, kw_only=True)
class Sum:
    """One question of the data set, in one of the built-in model's own wordings."""

    one: int
    other: int

    @property
    def question(self) -> str:
        return f"What is the value of {self.one} + {self.other}? Give the result as a whole number."

    @property
    def answer(self) -> int:
        return self.one + self.other

    @property
    def worked(self) -> str:
        return (
            f"{self.one} + {self.other} = {self.answer}. So the answer is \\boxed{{{self.answer}}}."
        )


def sums() -> dict[str, list[Sum]]:
    """All sums of two digits, in two splits."""
    every = [Sum(one=one, other=other) for one in range(1, 10) for other in range(1, 10)]
    random.Random(0).shuffle(every)
    return {"test": every[:NUM_TEST], "train": every[NUM_TEST:]}


def lay_out(template: Path, work: Path) -> None:
    """The working directory: the template's configs and, where it looks for a data set, sums."""
    shutil.copytree(template / "configs", work / "configs", dirs_exist_ok=True)
    data = work / "gsm8k"
    (data / "main").mkdir(parents=True, exist_ok=True)
    (data / "README.md").write_text(CARD, encoding="utf-8")
    for split, every in sums().items():
        rows = [
            {"question": one.question, "answer": f"{one.worked}\n#### {one.answer}"}
            for one in every
        ]
        (data / "main" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )


def prepare(prompt: dict[str, Any], folder: Path, steps: int) -> None:
    """The base model: warmed up on the template's prompt, worked answers first, then hasty ones
    among them.
    """
    from halteres.models import TINY, builtin_path
    from halteres.tokenizer import load_tokenizer

    tokenizer, rng, known = (
        load_tokenizer(str(builtin_path(TINY))),
        random.Random(0),
        sums()["train"],
    )
    shared = tokenizer.encode(tokenizer.render(prompt["before"], add_generation_prompt=False))

    def draw(done: float) -> Example:
        one = rng.choice(known)
        hasty = f"I think the answer is \\boxed{{{max(0, one.answer + rng.choice(GUESSES))}}}."
        asked = rendered(tokenizer, prompt, one.question)
        assert asked[: len(shared)] == shared, (
            "a chat's rendering begins with that of its beginning"
        )
        answer = one.worked if done <= 1 - MIXED or rng.random() < WORKED else hasty
        return asked[len(shared) :], [*tokenizer.encode(answer), tokenizer.eos_token_id]

    warm_up(draw, folder, steps=steps, shared=shared)


def rendered(tokenizer: Any, prompt: dict[str, Any], question: str) -> list[int]:
    """The prompt of one question, in tokens."""
    messages = [*prompt["before"], {"role": "user", "content": question + prompt["after"]}]
    return tokenizer.encode(tokenizer.render(messages))


def solved(prompt: dict[str, Any], folder: Path | None, tasks: int = 24, samples: int = 8) -> float:
    """Share of the training sums that a model solves at temperature 1; None: the built-in one."""
    import torch
    from transformers import Qwen3ForCausalLM

    from halteres.environments.problems import extract_boxed
    from halteres.models import TINY, builtin_path
    from halteres.tokenizer import load_tokenizer

    source = str(folder or builtin_path(TINY))
    tokenizer = load_tokenizer(source)
    torch.manual_seed(1)
    model: Any = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    right = 0
    for one in sums()["train"][:tasks]:
        tokens = torch.tensor([rendered(tokenizer, prompt, one.question)] * samples)
        answers = model.generate(
            tokens, do_sample=True, top_k=0, max_new_tokens=32, eos_token_id=2, pad_token_id=0
        )
        texts = (tokenizer.decode(row[tokens.shape[1] :].tolist()) for row in answers)
        right += sum(extract_boxed(text) == str(one.answer) for text in texts)
    return right / (tasks * samples)


def train(options: argparse.Namespace, base: Path, work: Path) -> Any:
    from halteres.runs.directory import list_runs

    edits = (
        *SETTINGS,
        f"run.interpreter={options.interpreter}",
        f"run.working_directory={work}",
        f"inference.model={base}",
        f"trainer.total_steps={options.steps}",
    )
    command = [Path(sys.executable).parent / "halteres", "train", options.template / TEMPLATE]
    subprocess.run(
        [*command, *(word for edit in edits for word in ("--set", edit))], check=True, timeout=7200
    )
    return max(list_runs(), key=lambda run: run.state().created_at)


def report(
    run: Any, base_share: float, seconds: float, options: argparse.Namespace
) -> dict[str, Any]:
    from halteres.observe.metrics import merge_by_step

    rows = merge_by_step(run.metrics())
    evaluated = [
        (row["step"], row["eval/percent_correct"]) for row in rows if "eval/percent_correct" in row
    ]
    steps = [row for row in rows if row.get("reward/mean") is not None]
    return {
        "what": "tinker-atropos's gsm8k_tinker.py, unmodified, on local sums",
        "command": "python benchmarks/foreign_template.py TEMPLATE_FOLDER INTERPRETER "
        f"--steps {options.steps} --warm-up {options.warm_up}",
        "machine": machine(),
        "base": {
            "model": "halteres/tiny",
            "warm_up_steps": options.warm_up,
            "solves_at_temperature_1": base_share,
        },
        "settings": list(SETTINGS),
        "steps": len(steps),
        "seconds": seconds,
        "held_out": {
            "tasks": NUM_TEST,
            "percent_correct": evaluated,
            "gain": evaluated[-1][1] - evaluated[0][1],
        },
        "training": {
            "success": [round(row["reward/success"], 4) for row in steps],
            "environments_own_percent_correct": [row.get("train/percent_correct") for row in steps],
        },
    }


if __name__ == "__main__":
    sys.exit(main())
