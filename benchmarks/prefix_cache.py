"""How many prompt tokens of a game of several turns does the prefix cache spare, and what does it save?

    OMP_NUM_THREADS=1 python benchmarks/prefix_cache.py [--rounds 5]

16 episodes of GuessTheNumber-v0-hard at once, each turn's prompt being all observations so far, answered by
the built-in model at temperature 1; with the cache and without, in turns. The same seeds: both must give the same
answers. Beside it 8 x 16 samples of 55 + 64 tokens, where the cache has nothing to give: what keeping costs.
CPU seconds of one thread; medians. Written: benchmarks/results/prefix_cache.json. Exit code 1 unless less than half of
the tokens are computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cache import asked
from machine import machine

from halteres.engine.protocol import SamplingParams
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.rows import SampleRequest
from halteres.engine.torch.worker import Scheduler
from halteres.environments.game import user_message
from halteres.environments.games import make
from halteres.environments.games.wrappers import wrap
from halteres.models import TINY, builtin_path
from halteres.text import Tokenizer, load_tokenizer

RESULTS = Path(__file__).parent / "results" / "prefix_cache.json"
GAME, EPISODES, ANSWER = "game:GuessTheNumber-v0-hard", 16, 40
PARTIES = {"with_cache": Limits(), "without": Limits(prefixes=0)}


def main() -> int:
    parser = argparse.ArgumentParser(description="The prefix cache.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = builtin_path(TINY)
    assert folder is not None
    base, tokenizer = load_base(folder, torch.float32, torch.device("cpu")), load_tokenizer(str(folder))
    seconds: dict[str, dict[str, list[float]]] = {name: {"games": [], "groups": []} for name in PARTIES}
    computed: dict[str, int] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for number in range(options.rounds + 1):
        for name, limits in PARTIES.items():
            games, answers[name], computed[name] = played(base, tokenizer, limits)
            groups = sampled(Scheduler(base, limits), [asked(55, 16, 64, seed) for seed in range(8)])
            if number:  # the first one warms up
                seconds[name]["games"].append(games)
                seconds[name]["groups"].append(groups)
    share = computed["with_cache"] / computed["without"]
    record: dict[str, Any] = {
        "what": f"prompt tokens computed and CPU seconds of one thread: {EPISODES} episodes of {GAME} on {TINY}",
        "command": " ".join(["python", "benchmarks/prefix_cache.py", *sys.argv[1:]]),
        "machine": machine(),
        "computed_tokens": computed,
        "share": round(share, 3),
        "equal": answers["with_cache"] == answers["without"],
        "cpu_s": {
            name: {what: round(statistics.median(times), 4) for what, times in found.items()}
            for name, found in seconds.items()
        },
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    return 0 if record["equal"] and share < 0.5 else 1


def played(base: BaseModel, tokenizer: Tokenizer, limits: Limits) -> tuple[float, list[tuple[int, ...]], int]:
    """CPU seconds of sampling, all answers, and prompt tokens computed."""
    sampler, seconds, answers = Scheduler(base, limits), 0.0, list[tuple[int, ...]]()
    games = [wrap(make(GAME), "concat") for _ in range(EPISODES)]
    prompts = [str(game.reset(seed=seed)[0]) for seed, game in enumerate(games)]
    playing = list(range(EPISODES))
    while playing:
        texts = [user_message("qwen3_game", prompts[i]) for i in playing]
        chats = [tokenizer.render([{"role": "user", "content": text}]) for text in texts]
        requests = [
            request_of(tokenizer.encode(chat), seed=i, base=base) for i, chat in zip(playing, chats, strict=True)
        ]
        seconds += sampled(sampler, requests)
        going: list[int] = []
        for i, request in zip(playing, requests, strict=True):
            tokens = tuple(np.frombuffer(request.future.result(0).sequences[0].tokens, np.int32).tolist())
            answers.append(tokens)
            prompts[i], _, terminated, truncated, _ = games[i].step(tokenizer.decode(tokens))
            if not (terminated or truncated):
                going.append(i)
        playing = going
    return seconds, answers, sampler.prefixes.computed_tokens


def request_of(tokens: list[int], seed: int, base: BaseModel) -> SampleRequest:
    request = asked(1, 1, ANSWER, seed)
    request.tokens, request.prompt = np.array(tokens, np.int64), np.array(tokens, "<i4").tobytes()
    request.params, request.stop_tokens = SamplingParams(max_tokens=ANSWER, seed=seed), frozenset(base.eos_tokens)
    return request


def sampled(sampler: Scheduler, requests: list[SampleRequest]) -> float:
    """CPU seconds until all are answered."""
    begun = time.process_time()
    with torch.inference_mode():
        for request in requests:
            sampler.add(request)
        while sampler.busy:
            sampler.step()
    return time.process_time() - begun


if __name__ == "__main__":
    sys.exit(main())
