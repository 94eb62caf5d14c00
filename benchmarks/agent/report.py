"""What the attempts at all tasks came to, on disk.

Owns: the record of one attempt, the file of results, what is aimed at.
Never: judges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.agent.attempt import Sitting
from benchmarks.agent.task import Verdict
from benchmarks.machine import machine
from halteres.agent.transports.openai import definitions

TARGET = {"calls": 15, "tokens": 20_000}
PACKAGES = ("halteres", "mcp", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One attempt."""

    task: str
    solved: bool
    why_not: str
    calls: int
    tokens: int  # of the tools' answers: bytes of their text / 4
    images: int  # pictures among them, whose tokens are not counted
    errors: int  # answers that were errors
    seconds: float  # of the agent
    waited_s: float  # of these within tools
    prepared_s: float
    judged_s: float
    within_target: bool
    answer: Mapping[str, Any] | None

    @classmethod
    def of(
        cls,
        task: str,
        verdict: Verdict,
        sitting: Sitting,
        answer: Mapping[str, Any] | None,
        ended: str,
        **times: float,
    ) -> Record:
        """What an attempt came to; `ended`: what ended it before its time."""
        calls, tokens = sitting.calls, sitting.tokens
        return cls(
            task=task,
            solved=verdict.solved,
            why_not=" ".join(part for part in (ended, verdict.why) if part),
            calls=calls,
            tokens=tokens,
            images=sitting.images,
            errors=sitting.errors,
            waited_s=round(sitting.waited_s, 1),
            within_target=calls <= TARGET["calls"] and tokens <= TARGET["tokens"],
            answer=answer,
            **{name: round(value, 1) for name, value in times.items()},
        )

    @property
    def line(self) -> str:
        """For people."""
        what = "solved" if self.solved else f"NOT solved: {self.why_not}"
        return (
            f"{self.task:<8} {self.calls:>3} calls {self.tokens:>6} tokens "
            f"{self.seconds:>6.0f} s  {what}"
        )


def write(
    file: Path, records: Sequence[Record], agent: str, began: Mapping[str, Any], command: str
) -> None:
    """Write the file of results."""
    tools = json.dumps(definitions(), ensure_ascii=False, separators=(",", ":"))
    solved = sum(record.solved for record in records)
    told = {
        "what": "an agent solves tasks with the rl_* tools alone",
        "agent": agent,
        "command": command,
        "machine": began,
        "load_average_after": machine()["load_average"],
        "versions": {name: version(name) for name in PACKAGES},
        "tokens_are": (
            "bytes of the text of the tools' answers / 4; no tokenizer is asked, "
            "pictures are not counted"
        ),
        "tool_definitions_tokens": len(tools.encode()) // 4,
        "target": TARGET,
        "solved": f"{solved} of {len(records)}",
        "all_within_target": all(record.within_target for record in records),
        "tasks": [asdict(record) for record in records],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
