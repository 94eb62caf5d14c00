"""Chats and pairs for the task `largest`, from people who make mistakes.

    python data.py chats chats.jsonl
    python data.py pairs pairs.jsonl held_out.jsonl --model FOLDER

Chats: worked examples of the form. Their writer names the largest number every other time; else
another one of the four, or one that was not asked about. Pairs: answers of the model at temperature
1, of which one is right and one is not. A rater prefers the right one, but for one pair in ten. The
prompts of the two files of pairs have none in common, and no question is one of an evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import largest

KNOWS = 0.5
"""Share of the chats whose writer names the largest number."""

MISREADS = 0.4
"""Share of the others that name a number which was not asked about. A reward model that has never
seen one does not know that it is wrong, and RL finds it.
"""

ERRS = 0.1
"""Share of the pairs in which the rater prefers the wrong answer."""

FORMS = ("The largest is {}.", "Of these four numbers, the largest one is {}.")
PAIRS_OF_A_PROMPT = 4
SAMPLED_WITHIN_S = 3600.0

Row = dict[str, Any]


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for_chats = verbs.add_parser("chats")
    for_chats.add_argument("file", type=Path)
    for_chats.add_argument("--rows", type=int, default=192)
    for_pairs = verbs.add_parser("pairs")
    for_pairs.add_argument("file", type=Path)
    for_pairs.add_argument("held_out", type=Path)
    for_pairs.add_argument("--model", type=Path, required=True, help="its folder")
    for_pairs.add_argument("--prompts", type=int, default=150, help="answered eight times each")
    for verb in (for_chats, for_pairs):
        verb.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.verb == "chats":
        write(options.file, chats(options.rows, options.seed))
        return
    groups = sampled(str(options.model.absolute()), options.prompts, options.seed)
    rows = pairs(groups, options.seed)
    if not rows:
        raise SystemExit("No prompt has a right and a wrong answer: there is nothing to compare.")
    training, held_out = split(rows)
    write(options.file, training)
    write(options.held_out, held_out)


def chats(count: int, seed: int) -> Iterator[Row]:
    """Rows of `halteres sft`."""
    rng = random.Random(seed)
    for _ in range(count):
        item = largest.draw(rng, held_out=False)
        named = max(item)
        if rng.random() > KNOWS:
            others = set(item) - {named}
            if rng.random() < MISREADS:
                others = set(largest.NUMBERS) - set(item)
            named = rng.choice(sorted(others))
        answer = {"role": "assistant", "content": rng.choice(FORMS).format(named)}
        yield {"messages": [largest.question(item), answer]}


def sampled(model: str, prompts: int, seed: int) -> list[Row]:
    """Groups of eight answers of `model`, with whether each is right; those alone in which some
    are and some are not.
    """
    from halteres.runs.servers import served

    with tempfile.TemporaryDirectory() as folder, served(model) as server:
        file = Path(folder) / "groups.jsonl"
        command = [sys.executable, str(Path(largest.__file__)), "process"]
        command += ["--openai.base_url", f"{server.url}/v1", "--openai.model_name", model]
        # An environment on its own has the built-in model's tokenizer.
        command += ["--env.tokenizer_name", model]
        command += ["--env.total_steps", str(prompts), "--env.group_size", "8"]
        command += ["--env.batch_size", "8", "--env.seed", str(1000 + seed)]
        command += ["--env.include_messages", "true", "--env.data_path_to_save_groups", str(file)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SAMPLED_WITHIN_S, encoding="utf-8"
        )
        if done.returncode:
            raise SystemExit(f"Sampling answers failed:\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def pairs(groups: Iterable[Row], seed: int) -> list[Row]:
    """Rows of `halteres reward train`: up to four pairs of a prompt, no two alike."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for group in groups:
        # eight answers are not eight texts
        answers = {
            chat[-1]["content"]: (score, chat)
            for score, chat in zip(group["scores"], group["messages"], strict=True)
        }
        right = [chat for score, chat in answers.values() if score > 0]
        wrong = [chat for score, chat in answers.values() if score <= 0]
        both = [(one, other) for one in right for other in wrong]
        for chosen, rejected in rng.sample(both, min(PAIRS_OF_A_PROMPT, len(both))):
            if rng.random() < ERRS:
                chosen, rejected = rejected, chosen
            row = {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
            rows.append(row)
    return rows


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Four fifths of the prompts, and the others."""
    prompts = list(dict.fromkeys(json.dumps(row["prompt"]) for row in rows))
    kept = set(prompts[: len(prompts) * 4 // 5])
    training = [row for row in rows if json.dumps(row["prompt"]) in kept]
    return training, [row for row in rows if json.dumps(row["prompt"]) not in kept]


def write(file: Path, rows: Iterable[Row]) -> None:
    """The rows as JSON lines, all or none."""
    part = file.with_name(f"{file.name}.part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(file)


if __name__ == "__main__":
    main()
