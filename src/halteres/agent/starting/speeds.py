"""How fast this machine's engine is with a model: measured once, then remembered.

Owns: running the probe within a deadline, H/cache/estimates.json.
Never: measures in this process; takes another machine's figures for this one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from halteres.agent.starting.probe import Shape, Speed
from halteres.config import environ
from halteres.files import replace_file
from halteres.process import usable_cores
from halteres.runs.starting import machine
from halteres.runs.starting.base_model import RunModel
from halteres.runs.starting.footprint import DECODE_ROWS, PASS_TOKENS
from halteres.runs.starting.preflight import Plan
from halteres.runs.starting.workload import Workload

DEADLINE_S = 20.0
UNDISTURBED = 0.8
"""With less of the processor than this a figure holds for a busy machine, and is not remembered for later."""

PROMPT_TOKENS, ANSWER_TOKENS, SEQUENCE_TOKENS = 64, 64, 256
"""Of what is measured, where a run allows more."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the cache."""

    speed: Speed
    at: float  # unix seconds


_Cache = dict[str, _Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine that a run would start."""

    backend: str
    model: RunModel
    threads: int

    @classmethod
    def of(cls, plan: Plan, model: RunModel) -> Engine:
        """The plan's own; it has none where somebody else's service is used."""
        asked = plan.settings.inference
        return cls(backend=asked.engine, model=model, threads=asked.threads or max(1, usable_cores() - 1))

    @property
    def key(self) -> str:
        """Under which its speed is remembered: model, engine, threads, machine."""
        folder = Path(self.model.tokenizer)
        written = (folder / "config.json").stat().st_mtime_ns
        return f"{folder}@{written}/{self.backend}/{self.threads} threads/{machine.look().mark}"


def remembered(engine: Engine) -> Speed | None:
    """What was measured on this machine, or None."""
    found = _read().get(engine.key)
    return found.speed if found else None


def measured(engine: Engine, work: Workload, deadline_s: float = DEADLINE_S) -> Speed | None:
    """Measure now; None where no figure was worth anything within the deadline."""
    shape = Shape(
        backend=engine.backend,
        folder=engine.model.tokenizer,
        name=engine.model.name,
        threads=engine.threads,
        rank=work.rank,
        rows=min(work.rows, work.batch_size, DECODE_ROWS),
        prompt_tokens=min(PROMPT_TOKENS, max(1, work.positions // 2)),
        answer_tokens=min(ANSWER_TOKENS, work.answer_tokens),
        pass_tokens=PASS_TOKENS,
        sequence_tokens=min(SEQUENCE_TOKENS, work.positions),
    )
    speed = _probe(shape, deadline_s)
    if speed is None or not speed.complete:
        return None
    if speed.share >= UNDISTURBED:
        _keep(engine.key, _Measured(speed=speed, at=time.time()))
    return speed


def _probe(shape: Shape, deadline_s: float) -> Speed | None:
    """The last figures that the probe told in time. It ends with its lifeline, and its engine with it."""
    lifeline, ours = os.pipe()
    with tempfile.TemporaryDirectory(prefix="halteres-", ignore_cleanup_errors=True) as folder:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "halteres.agent.starting.probe", msgspec.json.encode(shape).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(lifeline,),
                env=environ.for_stranger(HALTERES_LIFELINE_FD=str(lifeline), TMPDIR=folder),
                start_new_session=True,
            )
            return _last(_told(child, deadline_s))
        except OSError:  # no process can be started now
            return None
        finally:
            os.close(ours)
            os.close(lifeline)


def _told(child: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    try:
        return child.communicate(timeout=deadline_s)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its engine, in a group of its own, ends with its lifeline
        return child.communicate()[0]


def _last(told: bytes) -> Speed | None:
    for line in reversed(told.splitlines()):
        try:
            return msgspec.json.decode(line, type=Speed)
        except msgspec.DecodeError:
            continue  # cut off
    return None


def _file() -> Path:
    return environ.home() / "cache" / "estimates.json"


def _read() -> _Cache:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=_Cache)
    except (OSError, msgspec.DecodeError):
        return {}


def _keep(key: str, measured: _Measured) -> None:
    """Remember it; a disk that will not have it costs the next one who asks some seconds."""
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        cache = msgspec.to_builtins({**_read(), key: measured})
        replace_file(_file(), json.dumps(cache, indent=1).encode() + b"\n")
