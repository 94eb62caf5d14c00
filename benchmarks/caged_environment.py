"""Do 64 workers of an environment whose scorer runs in a cage keep up with the sampler?

Groups of a trivial environment on the service with the scripted engine, 64 under way at once, with
the cage and without it, and beside them 64 callers that only sample the same prompts. Told are the
answers a second and the CPU seconds of the environment's process (with its workers) and of the
service for 1,000 answers. The environment is no limit where the service is the one that is busy.

    .venv/bin/python benchmarks/caged_environment.py [--groups 250] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine
from run_cost import TICKS
from servers import halteres

from halteres.environments.base import set_up
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.processing import process
from halteres.environments.single_turn import SingleTurnEnv

WORKERS = 64
GROUP_SIZE = 4
MAX_TOKENS = 16
MODEL = "halteres/tiny"
RESULTS = Path(__file__).parent / "results"


class LengthEnv(SingleTurnEnv):
    """Pays for an answer's length modulo 7, so that hardly a group has equal scores."""

    name = "lengths"
    unsafe_scorer = True

    def load_dataset(self) -> None:
        self.numbers = itertools.count()

    async def get_next_item(self) -> int:
        return next(self.numbers)

    def prompt(self, item: int) -> str:
        return f"Say something about {item}."

    def score(self, item: int, text: str) -> float:
        return float((len(text) + item) % 7)


def environment(url: str, folder: Path, cage: str, groups: int) -> LengthEnv:
    config = BaseEnvConfig(
        tokenizer_name=MODEL,
        group_size=GROUP_SIZE,
        max_num_workers=WORKERS,
        total_steps=groups,
        max_new_tokens=MAX_TOKENS,
        ensure_scores_are_not_same=False,
        cage=cage,
        data_path_to_save_groups=str(folder / f"{cage}.jsonl"),
    )
    return LengthEnv(config, [APIServerConfig(base_url=f"{url}/v1", model_name=MODEL)])


def own_cpu_s() -> float:
    """Of this process and of its children that have ended."""
    spent = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        spent += used.ru_utime + used.ru_stime
    return spent


def service_cpu_s(pid: int) -> float:
    """Of the service and its engine, both running."""
    spent = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(entry.name) == pid or int(fields[1]) == pid:
            spent += int(fields[11]) + int(fields[12])
    return spent / TICKS


async def measured(
    work: Callable[[], Awaitable[Any]], answers: int, service: int
) -> dict[str, float]:
    began, own, other = time.monotonic(), own_cpu_s(), service_cpu_s(service)
    await work()
    wall_s = time.monotonic() - began
    service_s = service_cpu_s(service) - other
    return {
        "answers_per_s": answers / wall_s,
        "environment_cpu_s_per_1000": 1000 * (own_cpu_s() - own) / answers,
        "service_cpu_s_per_1000": 1000 * service_s / answers,
        "service_cores": service_s / wall_s,
    }


async def sampled_alone(env: LengthEnv, groups: int) -> None:
    """The same requests, and nothing made of the answers."""
    numbers = iter(range(groups))

    async def caller() -> None:
        for number in numbers:
            await env.server.chat(env.messages(number), GROUP_SIZE)

    await asyncio.gather(*(caller() for _ in range(WORKERS)))


async def ended(env: LengthEnv) -> None:
    """All groups; the workers end, so that their processor time is counted."""
    await process(env)
    await env.disconnect()
    env.scorer_workers.close()


async def rounds(url: str, service: int, groups: int, count: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"sampling alone": [], "cage off": [], "cage on": []}
    answers = groups * GROUP_SIZE
    for _ in range(count):
        with tempfile.TemporaryDirectory() as scratch:
            env = environment(url, Path(scratch), "off", groups)
            await set_up(env)
            alone = await measured(lambda env=env: sampled_alone(env, groups), answers, service)
            found["sampling alone"].append(alone)
            await env.server.close()
            for cage in ("off", "on"):
                env = environment(url, Path(scratch), cage, groups)
                row = await measured(lambda env=env: ended(env), answers, service)
                found[f"cage {cage}"].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "caged_environment.json")
    arguments = parser.parse_args()
    logging.getLogger("halteres").setLevel(logging.WARNING)
    result: dict[str, Any] = {"machine": machine()}
    with (
        tempfile.TemporaryDirectory() as scratch,
        halteres(Path(scratch) / "service", MODEL, "scripted") as url,
    ):
        service = started_by(os.getpid())
        found = asyncio.run(rounds(url, service, arguments.groups, arguments.rounds))
    for name, rows in found.items():
        result[name] = {key: round(median(row[key] for row in rows), 3) for key in rows[0]}
    alone = result["sampling alone"]["answers_per_s"]
    result["share_of_sampling_alone"] = {
        name: round(result[name]["answers_per_s"] / alone, 3) for name in ("cage off", "cage on")
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def started_by(pid: int) -> int:
    """The process of the service, the one child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return int(children[0])


if __name__ == "__main__":
    main()
