"""Evaluations of a run: the environment's `evaluate` on a pinned snapshot, one at a time.

Owns: which checkpoints are evaluated, running the command, its row in metrics.jsonl, its folder under evals/.
Never: fails a run: an evaluation that goes wrong is an event, and so is that there is nothing to evaluate.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from halteres.config.program import NOTHING_TO_EVALUATE, EnvironmentProgram
from halteres.errors import HalteresError, ProcessFailed
from halteres.files import replace_file
from halteres.observe.metrics import Row, append_row, read_rows
from halteres.process import Lifeline
from halteres.redaction import Redactor
from halteres.rewards.components import secret_variables
from halteres.rewards.panel import PROXY, shares
from halteres.runs.measurement import command, strike_keys_out
from halteres.runs.reading.evaluations import figures_of
from halteres.runs.reading.failures import how, reason
from halteres.runs.supervision.children import spawn
from halteres.runs.supervision.state_writer import StateWriter

WITHIN_S = 1800.0
"""How long one evaluation may take."""

LONGEST_ANSWER = 1024 * 1024
"""Bytes of its output, from the end, in which its figures are looked for."""


class NothingToEvaluate(ProcessFailed):
    """The environment says that it has no held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Sampler weights to evaluate."""

    step: int
    sampler_path: str


@dataclass(slots=True)
class Evaluator:
    """Evaluates snapshots in the order asked; where it falls behind, those between first and newest are left out."""

    writer: StateWriter
    environment: EnvironmentProgram
    lifeline: Lifeline
    every: int  # steps; 0: only first and last
    _asked: set[int] = field(default_factory=set)
    _pending: list[Snapshot] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _has_nothing: bool = False  # the environment has no held-out tasks

    def is_due(self, step: int, final: bool) -> bool:
        """Whether the checkpoint of this step is to be evaluated."""
        if step in self._asked or self._has_nothing:
            return False
        last = max(self._asked, default=0)
        crossed = self.every > 0 and step // self.every > last // self.every
        return step == 0 or final or crossed

    async def ask(self, snapshot: Snapshot) -> None:
        """Evaluate this one when its turn comes."""
        async with self._changed:
            self._asked.add(snapshot.step)
            self._pending = [*(waiting for waiting in self._pending if waiting.step == 0), snapshot]
            self._changed.notify_all()

    def skip_up_to(self, step: int) -> None:
        """A resumed run has evaluated these already."""
        self._asked.add(step)

    async def work(self) -> None:
        """Evaluate what is asked, until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._pending))
                snapshot = self._pending[0]
            try:
                await self._evaluate(snapshot)
            except NothingToEvaluate as error:
                self._has_nothing = True
                self.writer.event("no_evaluation", step=snapshot.step, error=error.sentence)
            except (HalteresError, OSError) as error:
                self.writer.event("eval_failed", step=snapshot.step, error=str(error))
            async with self._changed:
                kept = [] if self._has_nothing else self._pending
                self._pending = [waiting for waiting in kept if waiting != snapshot]
                self._changed.notify_all()

    async def finished(self) -> None:
        """Return once nothing is left to evaluate."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._pending)

    async def _evaluate(self, snapshot: Snapshot) -> None:
        run, began = self.writer.run, time.monotonic()
        folder = run.path / "evals" / f"step_{snapshot.step}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the command writes down its config, keys and all
        policy = ("--openai.model_name", snapshot.sampler_path)
        words = command(self.environment, run.path / "config.yaml", folder, self.writer.state.name, *policy)
        written = _size(run.log("eval"))
        with tempfile.TemporaryFile(dir=folder) as answer:
            try:
                code = await self._ran(words, answer, snapshot)
            finally:
                strike_keys_out(folder, Redactor.of_this_process())
            said = run.log_tail("eval", 1) if _size(run.log("eval")) > written else []
            self._check(code, said)
            figures = figures_of(self.environment, folder, _last_words(answer))
        if self.environment.is_foreign:
            name_prompts(folder / "samples.jsonl")
        base = next((row for row in run.metrics() if f"eval/{PROXY}" in row), {})
        figures |= shares(base, figures)
        row = {"step": snapshot.step, "t": time.time(), "src": "eval", **figures}
        append_row(run.path / "metrics.jsonl", row)
        self.writer.event("eval", step=snapshot.step, took_s=round(time.monotonic() - began, 2), **figures)

    def _check(self, code: int, said: Sequence[str]) -> None:
        """Raise where the evaluation did not end well; `said`: its last words. An environment may end the process with
        any code: ours are told with an error."""
        if code == 0:
            return
        last = reason(said, code)
        why = last.removeprefix("error: ")
        if code == NOTHING_TO_EVALUATE and not self.environment.is_foreign and why != last:
            raise NothingToEvaluate("There will be no held-out figure.", why)
        raise ProcessFailed(f"The evaluation {how(code)}.", why)

    async def _ran(self, words: Sequence[str], answer: IO[bytes], snapshot: Snapshot) -> int:
        """Run it to its end, which is that of its own process; the exit code."""
        log = self.writer.run.log("eval")
        folder = self.environment.working_directory
        keys = secret_variables(self.writer.run.environment_config())
        child = await spawn(words, log=log, folder=folder, lifeline=self.lifeline, keys=keys, answer=answer)
        try:
            async with asyncio.timeout(WITHIN_S):
                return await asyncio.shield(child.exited)
        except TimeoutError:
            raise ProcessFailed(f"The evaluation of step {snapshot.step} took more than {WITHIN_S:.0f} s.") from None
        finally:
            await child.end()


def name_prompts(samples: Path) -> None:
    """Give the samples of a foreign environment the prompt and the completion by which evaluations are compared: the
    last two of its `messages`; or its `question`."""
    rows = read_rows(samples)
    named = [row if "prompt" in row else {**row, **_prompt_of(row)} for row in rows]
    if named != rows:
        replace_file(samples, b"".join(msgspec.json.encode(row) + b"\n" for row in named))


def _prompt_of(row: Row) -> dict[str, Any]:
    match row:
        case {"messages": [*_, {"content": prompt}, {"content": answer}]}:
            return {"prompt": prompt, "completion": answer}
        case {"question": question}:
            return {"prompt": question}
        case _:
            return {}


def _last_words(answer: IO[bytes]) -> str:
    told = os.pread(answer.fileno(), LONGEST_ANSWER, max(0, os.fstat(answer.fileno()).st_size - LONGEST_ANSWER))
    return told.decode(errors="replace")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
