"""What does the prefix cache save, in a game of several turns and in many conversations at once?

    OMP_NUM_THREADS=1 python benchmarks/prefix_cache.py [--rounds 5] [--conversations 1024]

`games`: 16 episodes of GuessTheNumber-v0-hard at once, each turn's prompt being all observations so
far, answered by the built-in model at temperature 1. `groups`: 8 x 16 samples of 55 + 64 tokens,
where the cache has nothing to give: what keeping costs. Medians of the rounds.
`conversations`: 1,024 at once of 10 turns over one beginning of 200 tokens, 16 random tokens said
and 16 answered in each turn, once; in the last turns their slots leave no room for all that could
be kept, so that pages have to go. The cache's own code, copies of keys and values among it, is
timed around each of its calls.

All with the cache and without, in turns, with the same seeds. CPU seconds of one thread. Written:
benchmarks/results/prefix_cache.json. Exit code 1 unless both give the same answers, less than half
of the games' tokens are computed, and of the conversations' CPU seconds the cache's own code takes
at most 3 %, and all of them are fewer than without.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cache import asked
from machine import machine

from halteres.engine.protocol import SamplingParams
from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.cache import Block, PrefixCache
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.rows import SampleRequest
from halteres.engine.torch.worker import Scheduler
from halteres.environments.game import user_message
from halteres.environments.games import make
from halteres.environments.games.wrappers import wrap
from halteres.models import TINY, builtin_path
from halteres.tokenizer import Tokenizer, load_tokenizer

RESULTS = Path(__file__).parent / "results" / "prefix_cache.json"
GAME, EPISODES, ANSWER = "game:GuessTheNumber-v0-hard", 16, 40
TURNS, BEGINNING, SAID, ANSWERED = 10, 200, 16, 16  # of a conversation; the last three in tokens
MOST_OWN = 0.03  # of the conversations' CPU seconds, the cache's own code
PARTIES = {"with_cache": Limits(), "without": Limits(prefixes=0)}


def main() -> int:
    parser = argparse.ArgumentParser(description="The prefix cache.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = builtin_path(TINY)
    assert folder is not None
    base, tokenizer = (
        load_base(folder, torch.float32, torch.device("cpu")),
        load_tokenizer(str(folder)),
    )
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"games": [], "groups": []} for name in PARTIES
    }
    computed: dict[str, int] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for number in range(options.rounds + 1):
        for name, limits in PARTIES.items():
            games, answers[name], computed[name] = played(base, tokenizer, limits)
            groups = sampled(
                Scheduler(base, limits), [asked(55, 16, 64, seed) for seed in range(8)]
            )
            if number:  # the first one warms up
                seconds[name]["games"].append(games)
                seconds[name]["groups"].append(groups)
    share = computed["with_cache"] / computed["without"]
    record: dict[str, Any] = {
        "what": (
            f"prompt tokens computed and CPU seconds of one thread: {EPISODES} episodes of "
            f"{GAME} on {TINY}"
        ),
        "command": " ".join(["python", "benchmarks/prefix_cache.py", *sys.argv[1:]]),
        "machine": machine(),
        "computed_tokens": computed,
        "share": round(share, 3),
        "equal": answers["with_cache"] == answers["without"],
        "cpu_s": {
            name: {what: round(statistics.median(times), 4) for what, times in found.items()}
            for name, found in seconds.items()
        },
        "conversations": conversations(base, options.conversations),
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    good = record["equal"] and share < 0.5 and record["conversations"]["good"]
    print("Passed." if good else "FAILED.")
    return 0 if good else 1


class TimedCache(PrefixCache):
    """A prefix cache that counts the CPU seconds of its calls."""

    seconds = 0.0

    def restore(self, snapshot: Snapshot, tokens: np.ndarray, block: Block, slot: int) -> int:
        with self._timed():
            return super().restore(snapshot, tokens, block, slot)

    def keep(
        self, snapshot: Snapshot, tokens: np.ndarray, block: Block, slot: int, room: int
    ) -> None:
        before = self.seconds
        with self._timed():
            super().keep(snapshot, tokens, block, slot, room)
            # What `shrink` took inside is part of it.
            self.seconds = before

    def shrink(self, area: int) -> None:
        with self._timed():
            super().shrink(area)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.seconds += time.process_time() - begun


def conversations(base: BaseModel, count: int) -> dict[str, Any]:
    """Both parties once; the answers are compared by their digest."""
    found: dict[str, Any] = {"count": count, "turns": TURNS}
    for name, limits in PARTIES.items():
        cache = TimedCache(limits.prefixes * base.context)
        sampler = Scheduler(base, limits)
        sampler.memory.prefixes = cache
        seconds, digest = conversed(base, sampler, count)
        found[name] = {
            "cpu_s": round(seconds, 1),
            "own_cpu_s": round(cache.seconds, 2),
            "own_share": round(cache.seconds / seconds, 4),
            "hit_tokens": cache.hit_tokens,
            "computed_tokens": cache.computed_tokens,
            "answers": digest,
        }
        print(json.dumps({name: found[name]}), flush=True)
    cached, plain = (found[name] for name in PARTIES)
    found["good"] = (
        cached["answers"] == plain["answers"]
        and cached["own_share"] <= MOST_OWN
        and cached["cpu_s"] < plain["cpu_s"]
    )
    return found


def conversed(base: BaseModel, sampler: Scheduler, count: int) -> tuple[float, str]:
    """CPU seconds of sampling, and the digest of all answers."""
    seconds, digest = 0.0, hashlib.sha256()
    beginning = np.random.default_rng(count).integers(3, 600, BEGINNING).tolist()
    texts = [[*beginning] for _ in range(count)]
    speakers = [np.random.default_rng(number) for number in range(count)]
    for turn in range(TURNS):
        for text, speaker in zip(texts, speakers, strict=True):
            text += speaker.integers(3, 600, SAID).tolist()
        requests = [
            request_of(text, seed=number * TURNS + turn, base=base, answer=ANSWERED)
            for number, text in enumerate(texts)
        ]
        seconds += sampled(sampler, requests)
        for text, request in zip(texts, requests, strict=True):
            tokens = np.frombuffer(request.future.result(0).sequences[0].tokens, np.int32)
            digest.update(tokens.tobytes())
            text += tokens.tolist()
    return seconds, digest.hexdigest()


def played(
    base: BaseModel, tokenizer: Tokenizer, limits: Limits
) -> tuple[float, list[tuple[int, ...]], int]:
    """CPU seconds of sampling, all answers, and prompt tokens computed."""
    sampler, seconds, answers = Scheduler(base, limits), 0.0, list[tuple[int, ...]]()
    games = [wrap(make(GAME), "concat") for _ in range(EPISODES)]
    prompts = [str(game.reset(seed=seed)[0]) for seed, game in enumerate(games)]
    playing = list(range(EPISODES))
    while playing:
        texts = [user_message("qwen3_game", prompts[i]) for i in playing]
        chats = [tokenizer.render([{"role": "user", "content": text}]) for text in texts]
        requests = [
            request_of(tokenizer.encode(chat), seed=i, base=base)
            for i, chat in zip(playing, chats, strict=True)
        ]
        seconds += sampled(sampler, requests)
        going: list[int] = []
        for i, request in zip(playing, requests, strict=True):
            tokens = tuple(
                np.frombuffer(request.future.result(0).sequences[0].tokens, np.int32).tolist()
            )
            answers.append(tokens)
            prompts[i], _, terminated, truncated, _ = games[i].step(tokenizer.decode(tokens))
            if not (terminated or truncated):
                going.append(i)
        playing = going
    return seconds, answers, sampler.prefixes.computed_tokens


def request_of(
    tokens: list[int], seed: int, base: BaseModel, answer: int = ANSWER
) -> SampleRequest:
    request = asked(1, 1, answer, seed)
    request.tokens, request.prompt = np.array(tokens, np.int64), np.array(tokens, "<i4").tobytes()
    request.params, request.stop_tokens = (
        SamplingParams(max_tokens=answer, seed=seed),
        frozenset(base.eos_tokens),
    )
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
