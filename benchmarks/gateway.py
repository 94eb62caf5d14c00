"""What does a gateway session add to a call?

One service with the scripted engine; the same conversations of a chat, ten turns each, through
/v1/chat/completions and through /g/SESSION/v1/chat/completions, in turns: one conversation here,
one there. Every turn sends back what was answered, so that the session has a history to go on from.
Milliseconds are a client's, one call after the other; CPU seconds are the service's process, all
its threads (its engine is another process). Aim: 1 ms a call.

    .venv/bin/python benchmarks/gateway.py [--rounds 5] [--conversations 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import servers
from machine import machine

from halteres.models import TINY

TURNS, MAX_TOKENS = 10, 16
SYSTEM = "You are an agent. " + "Follow the rules of the house. " * 10
AIM_MS = 1.0
WARM_UP = 3  # conversations of each kind


@dataclass
class Calls:
    """What calls of one kind took, over all rounds."""

    milliseconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        ms = np.asarray(self.milliseconds)
        return {
            "calls": len(ms),
            "p50_ms": round(float(np.median(ms)), 3),
            "p99_ms": round(float(np.percentile(ms, 99)), 3),
            "cpu_ms_per_call": round(self.cpu_s / len(ms) * 1e3, 3),
        }


@dataclass
class Service:
    """One service, and a connection to it."""

    pid: int
    connection: http.client.HTTPConnection

    @classmethod
    def at(cls, url: str, scratch: Path) -> Service:
        address = urlsplit(url)
        card = json.loads((scratch / "state" / "service.json").read_bytes())
        connection = http.client.HTTPConnection(str(address.hostname), address.port)
        return cls(card["pid"], connection)

    def post(self, path: str, body: Any) -> Any:
        self.connection.request("POST", path, json.dumps(body).encode())
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(content.decode())
        return json.loads(content)

    def cpu_s(self) -> float:
        """Of all threads so far."""
        files = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in files) / 1e9

    def conversation(self, path: str, calls: Calls) -> None:
        """Ten turns, each of which sends back what was answered."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "What is 17 + 25?"},
        ]
        began_cpu_s = self.cpu_s()
        for turn in range(TURNS):
            body = {"messages": messages, "max_tokens": MAX_TOKENS, "model": TINY}
            began = time.perf_counter()
            answer = self.post(f"{path}/v1/chat/completions", body)
            calls.milliseconds.append((time.perf_counter() - began) * 1e3)
            messages += [
                answer["choices"][0]["message"],
                {"role": "user", "content": f"Go on, step {turn}."},
            ]
        calls.cpu_s += self.cpu_s() - began_cpu_s

    def in_session(self, calls: Calls) -> None:
        """The same within a session of its own, opened before and judged after it."""
        session = self.post("/gateway/sessions", {"task": "benchmark"})["session"]
        self.conversation(f"/g/{session}", calls)
        self.post(f"/gateway/sessions/{session}/reward", {"reward": 1.0})


def measured(rounds: int, conversations: int) -> dict[str, Any]:
    """All rounds, and each one's figures."""
    plain, captured = Calls(), Calls()
    by_round: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place) / "service"
        with servers.halteres(scratch, TINY, "scripted") as url:
            service = Service.at(url, scratch)
            for _ in range(WARM_UP):
                service.conversation("", Calls())
                service.in_session(Calls())
            for _ in range(rounds):
                one, other = Calls(), Calls()
                for _ in range(conversations):
                    service.conversation("", one)
                    service.in_session(other)
                by_round.append({"plain": one.figures, "session": other.figures})
                for total, part in ((plain, one), (captured, other)):
                    total.milliseconds += part.milliseconds
                    total.cpu_s += part.cpu_s
    return {
        "plain": plain.figures,
        "session": captured.figures,
        **compared(plain.figures, captured.figures),
        "by_round": [{**one, **compared(one["plain"], one["session"])} for one in by_round],
    }


def compared(plain: dict[str, float], session: dict[str, float]) -> dict[str, float]:
    """What a session adds."""
    return {
        "added_p50_ms": round(session["p50_ms"] - plain["p50_ms"], 3),
        "added_cpu_ms": round(session["cpu_ms_per_call"] - plain["cpu_ms_per_call"], 3),
        "p50_ratio": round(session["p50_ms"] / plain["p50_ms"], 3),
        "cpu_ratio": round(session["cpu_ms_per_call"] / plain["cpu_ms_per_call"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=20, help="of each kind in a round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    before = machine()
    found = measured(arguments.rounds, arguments.conversations)
    result = {
        "machine": before,
        "load_average_after": machine()["load_average"],
        "turns": TURNS,
        "aim_ms": AIM_MS,
        "met": found["added_p50_ms"] <= AIM_MS,
        **found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


main()
