"""What do grammars and penalties cost? Compiling, masks, and a decode step with and without.

    OMP_NUM_THREADS=1 python benchmarks/grammar.py [--rounds 5]

`compile`, `mask`: ms for the grammars below, on the built-in model's 672 tokens and on 151,936 made
of them, as many as Qwen3 has (longer ones are two or three of them; no merges, so nothing is forced
to one spelling). A mask is what may follow one token of an answer that is drawn at random from what
may. `trial`: ms that the first request of a grammar waits for its trial, the process's start not
among them, and that start. `step`: CPU ms of one thread for one decode step of the built-in model,
1, 16 and 64 rows of 64 tokens after 55, plain, all rows held to a schema that never ends, all rows
with penalties, and one of them held: parties alternate, medians of the rounds. `masks` are those of
a step with all rows held, timed around their calls; the rest of `held` is following the tokens and
drawing from other logits than those that are reported. Written: benchmarks/results/grammar.json.
Exit code 1 where masks take more than 5 % of a plain step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from torch import Tensor

from halteres.engine.grammar import Vocabulary, compiled
from halteres.engine.grammar_trials import Grammars
from halteres.engine.protocol import Grammar, SamplingParams
from halteres.engine.torch import logit_shaping
from halteres.engine.torch.adapter import BASE
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.logit_shaping import Follower
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.rows import SampleRequest
from halteres.engine.torch.worker import Scheduler
from halteres.models import TINY, builtin_path

RESULTS = Path(__file__).parent / "results" / "grammar.json"
MOST_SHARE = 0.05
LARGE = 151_936
PROMPT, ANSWER, MASKS = 55, 64, 200

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,20}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cde"]}},
        "born": {"type": "string", "format": "date-time"},
    },
    "required": ["name", "age", "tags", "born"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}


def grammars() -> dict[str, Grammar]:
    def schema(value: Any) -> Grammar:
        return Grammar(kind="json_schema", text=json.dumps(value))

    calls = {"tools": [{"name": f"tool_{i}", "arguments": PERSON} for i in range(8)]}
    return {
        "any object": schema({"type": "object"}),
        "a schema of four properties": schema(PERSON),
        "numbers without end": schema(ENDLESS),
        "a choice of 1,000": Grammar(
            kind="choice", text=json.dumps([f"{7919 * i:x}" for i in range(1000)])
        ),
        "a regular expression": Grammar(kind="regex", text=r"(\d{1,3}\.){3}\d{1,3}"),
        "a call of one of eight tools": Grammar(kind="calls", text=json.dumps(calls)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Grammars and penalties.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = builtin_path(TINY)
    assert folder is not None
    base = load_base(folder, torch.float32, torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="halteres-grammar-") as large:
        write_large(folder, Path(large))
        vocabularies = {
            str(size): of_vocabulary(place, size, base.eos_tokens)
            for place, size in ((folder, base.vocabulary), (Path(large), LARGE))
        }
    steps = {str(rows): step(base, folder, rows, options.rounds) for rows in (1, 16, 64)}
    good = all(one["masks_share"] <= MOST_SHARE for one in steps.values())
    record: dict[str, Any] = {
        "what": "ms of one thread: grammars compiled, masks found, decode steps with and without",
        "command": " ".join(["python", "benchmarks/grammar.py", *sys.argv[1:]]),
        "machine": machine(),
        "vocabularies": vocabularies,
        "trial": asyncio.run(trial(folder, base)),
        "step_cpu_ms": steps,
        "good": good,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    print("Passed." if good else "FAILED.")
    return 0 if good else 1


def write_large(source: Path, folder: Path) -> None:
    """A tokenizer of LARGE tokens: those of the built-in model, and two or three of them joined."""
    found = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = found["model"]["vocab"]
    added = {one["content"] for one in found["added_tokens"]}
    pieces = [token for token in vocabulary if token not in added]
    random = np.random.default_rng(0)
    while len(vocabulary) < LARGE:
        joined = "".join(random.choice(pieces, random.integers(2, 4)))
        vocabulary.setdefault(joined, len(vocabulary))
    found["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(found), encoding="utf-8")


def of_vocabulary(folder: Path, size: int, ends: tuple[int, ...]) -> dict[str, Any]:
    begun = time.perf_counter()
    vocabulary = Vocabulary(folder, size, ends)
    found: dict[str, Any] = {"read_ms": round(1000 * (time.perf_counter() - begun), 1)}
    for name, grammar in grammars().items():
        begun = time.thread_time()
        matcher = compiled(vocabulary, grammar)
        compile_ms = 1000 * (time.thread_time() - begun)
        masks_ms, random, follower = list[float](), np.random.default_rng(0), matcher.deep_copy()
        while len(masks_ms) < MASKS:
            begun = time.thread_time()
            mask = follower.compute_bitmask()
            [allowed] = vocabulary.allowed([mask])
            masks_ms.append(1000 * (time.thread_time() - begun))
            token = int(random.choice(np.flatnonzero(allowed)))
            if not follower.consume_token(token) or follower.is_stopped():
                follower = matcher.deep_copy()
        found[name] = {
            "compile_ms": round(compile_ms, 2),
            "mask_ms": round(statistics.mean(masks_ms), 4),
            "largest_mask_ms": round(max(masks_ms), 2),
        }
    return found


async def trial(folder: Path, base: BaseModel) -> dict[str, float]:
    """Waits of first requests; the first starts the process."""
    found = Grammars(folder, base.vocabulary, base.eos_tokens)
    waits: dict[str, float] = {}
    for name, grammar in {"start": Grammar(kind="regex", text="a"), **grammars()}.items():
        begun = time.perf_counter()
        await found.find(grammar)
        waits[name] = round(1000 * (time.perf_counter() - begun), 1)
    found.close()
    return waits


def step(base: BaseModel, folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    endless = Grammar(kind="json_schema", text=json.dumps(ENDLESS))
    vocabulary = Vocabulary(folder, base.vocabulary, base.eos_tokens)
    matcher = compiled(vocabulary, endless)

    def asked(count: int, seed: int, **params: Any) -> SampleRequest:
        tokens = np.random.default_rng(seed).integers(3, 600, PROMPT)
        new_follower = None
        if "grammar" in params:

            def new_follower() -> Follower:
                return Follower(matcher.deep_copy(), vocabulary, "grammar")

        return SampleRequest(
            snapshot=BASE,
            prompt=tokens.astype(np.int32).tobytes(),
            tokens=tokens,
            num_samples=count,
            params=SamplingParams(seed=seed, **params),
            limit=ANSWER,
            stop_tokens=frozenset(),
            decode=str,
            future=Future(),
            new_follower=new_follower,
        )

    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    parties = {
        "plain": lambda: [asked(rows, 1)],
        "held": lambda: [asked(rows, 1, grammar=endless)],
        "penalised": lambda: [asked(rows, 1, **penalties)],
        "one held": lambda: [asked(rows - 1, 1), asked(1, 2, grammar=endless)],
    }
    if rows == 1:
        del parties["one held"]
    times: dict[str, list[float]] = {name: [] for name in (*parties, "masks")}
    for number in range(rounds + 1):
        for name, requests in parties.items():
            with timed_masks() as masks_ms:
                took = stepped(Scheduler(base, Limits()), requests())
            if number:
                times[name].append(took)
            if number and name == "held":
                times["masks"].append(statistics.mean(masks_ms))
    found = {name: round(statistics.median(one), 3) for name, one in times.items()}
    return {**found, "masks_share": round(found["masks"] / found["plain"], 4)}


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """CPU ms of the masks of each step."""
    took, left = list[float](), logit_shaping._left

    def timed(shapers: Sequence[logit_shaping.LogitShaper]) -> Tensor:
        begun = time.thread_time()
        found = left(shapers)
        took.append(1000 * (time.thread_time() - begun))
        return found

    logit_shaping._left = timed
    yield took
    logit_shaping._left = left


def stepped(sampler: Scheduler, requests: list[SampleRequest]) -> float:
    """CPU ms of a step; the first, which reads the prompts, is not among them."""
    with torch.inference_mode():
        for request in requests:
            sampler.add(request)
        sampler.step()
        begun, steps = time.process_time(), 0
        while sampler.busy:
            sampler.step()
            steps += 1
    for request in requests:
        request.future.result(0)
    return 1000 * (time.process_time() - begun) / steps


if __name__ == "__main__":
    raise SystemExit(main())
