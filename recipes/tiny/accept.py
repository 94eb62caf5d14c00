"""The acceptance tests: what the built-in model must be able to do, and what it must not be able to
do yet.

    python recipes/tiny/accept.py --model DIR/model --clean DIR/clean --json
    recipes/tiny/acceptance.json

Owns: the table of limits; the exit status is 1 where a row fails.
Never: trains, or measures learnability (`benchmarks/` does, with the trainer itself).
"""

import argparse
import json
import logging
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from corpus import new_game
from manifest import file_hash
from play import GameFigures, MathsFigures, Player, measure_games, measure_maths
from tokenizer import SPECIALS, VOCABULARY_SIZE, render_prompt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from halteres.environments.problems import draw_problem, user_message

MAX_FOLDER_BYTES = 8_000_000
LOAD = (
    "import time, torch, transformers; from transformers import AutoModelForCausalLM as M, "
    "AutoTokenizer as T; "
    "import transformers.models.qwen3.modeling_qwen3; f = {folder!r}; t = time.perf_counter(); "
    "T.from_pretrained(f); M.from_pretrained(f); print(time.perf_counter() - t)"
)

log = logging.getLogger("recipe")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `low` and `high` are the limits, both included."""

    test: str
    seen: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the figure lies within the limits."""
        return self.low <= self.seen <= self.high

    def text(self) -> str:
        """The line as printed."""
        return (
            f"{'ok  ' if self.passed else 'FAIL'} {self.test:58} {self.seen:10.3f}   "
            f"[{self.low:g}, {self.high:g}]"
        )


def accept(
    model: Path, clean: Path | None, num_tasks: int, seed: int
) -> tuple[list[Row], dict[str, object]]:
    """Measure everything; the table and the figures behind it."""
    player = Player(model)
    solved = measure_maths(player, num_tasks, seed, samples=8)
    played = measure_games(player, num_tasks, seed)
    rows = [*folder_rows(model), *tokenizer_rows(model, seed), *shipped_rows(solved, played)]
    details: dict[str, object] = {"maths": asdict(solved), "games": asdict(played)}
    if clean is not None:
        player = Player(clean)
        solved_clean = measure_maths(player, num_tasks, seed, samples=1)
        played_clean = measure_games(player, num_tasks, seed)
        rows += clean_rows(solved_clean, played_clean)
        details |= {"clean maths": asdict(solved_clean), "clean games": asdict(played_clean)}
    return rows, details


def folder_rows(folder: Path) -> list[Row]:
    """Size, and the time to load without network, imports apart."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD.format(folder=str(folder))]
    loaded = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    return [
        Row("folder, bytes", size, 1, MAX_FOLDER_BYTES),
        Row("load without network, seconds", float(loaded.stdout), 0, 1),
    ]


def tokenizer_rows(folder: Path, seed: int) -> list[Row]:
    """Counts of failures; all must be 0."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(f"unicode/{seed}")
    texts = ["".join(_code_point(rng) for _ in range(24)) for _ in range(2000)]
    messages = [user_message(draw_problem(rng, "eval")) for _ in range(50)]
    messages += [new_game(rng).message() for _ in range(50)]
    counts = {
        "texts of random Unicode changed by a round trip": sum(
            tokenizer.decode(tokenizer.encode(t)) != t for t in texts
        ),
        "special tokens split": sum(
            tokenizer.encode(text) != [number] for number, text in enumerate(SPECIALS)
        ),
        "tokens that decode to nothing": sum(
            not tokenizer.decode([i]) for i in range(VOCABULARY_SIZE)
        ),
        "prompts unlike the hand-written template": sum(
            _rendered(tokenizer, message) != render_prompt(message) for message in messages
        ),
    }
    return [Row(test, count, 0, 0) for test, count in counts.items()]


def shipped_rows(maths: MathsFigures, games: GameFigures) -> list[Row]:
    """What the shipped model can do at T=1."""
    return [
        Row("maths answers that end with eos and one parsable box", maths.well_formed, 0.98, 1),
        Row("game answers that end with eos and one parsable box", games.well_formed, 0.98, 1),
        Row("maths, success", maths.success, 0.25, 0.55),
        Row("maths, pass@8", maths.solved, 0.80, 1),
        Row("maths, pass@8 - success", maths.solved - maths.success, 0.20, 1),
        Row("game, stated intervals right after 1-3 hints", games.stated_right or 0.0, 0.60, 1),
        Row("game, win rate", games.win_rate, 0.40, 0.60),
    ]


def clean_rows(maths: MathsFigures, games: GameFigures) -> list[Row]:
    """What the model could do before the mixture hid it."""
    return [
        Row("after the clean stage: maths, success", maths.success, 0.95, 1),
        Row("after the clean stage: game, intervals right", games.interval_right, 0.95, 1),
    ]


def _code_point(rng: random.Random) -> str:
    draw: Callable[[], int] = rng.choice(
        (lambda: rng.randrange(128), lambda: rng.randrange(0x110000))
    )
    code = draw()
    return chr(code) if not 0xD800 <= code < 0xE000 else " "  # a surrogate is no character


def _rendered(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    turns = [{"role": "user", "content": message}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def _report(
    rows: list[Row], details: dict[str, object], model: Path, num_tasks: int, seed: int
) -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": (
            f"{platform.machine()}, {torch.get_num_threads()} thread, torch {torch.__version__}"
        ),
        "weights_sha256": file_hash(model / "model.safetensors"),
        "tasks": num_tasks,
        "seed": seed,
        "rows": [asdict(row) | {"passed": row.passed} for row in rows],
        "figures": details,
    }


def main() -> int:
    """Read the command line, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Test the built-in model.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--clean", type=Path, help="the model after the clean stage")
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    rows, details = accept(arguments.model, arguments.clean, arguments.tasks, arguments.seed)
    for row in rows:
        log.info(row.text())
    report = _report(rows, details, arguments.model, arguments.tasks, arguments.seed)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log.info(json.dumps(report["figures"]))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
