"""Evaluations of a run: the environment's `evaluate` on a pinned snapshot, one at a time.

Which checkpoints are evaluated, the command, its row in metrics.jsonl, its folder under evals/. An evaluation that goes
wrong is an event, and so is that there is nothing to evaluate: neither fails a run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
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
from halteres.runs.supervision.run_processes import spawn
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
    """Evaluates snapshots in the order given; where it falls behind, those between first and newest are left out."""

    writer: StateWriter
    environment: EnvironmentProgram
    lifeline: Lifeline
    every: int  # steps; 0: only first and last
    _steps: set[int] = field(default_factory=set)  # that were, or will be, evaluated
    _pending: list[Snapshot] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _has_nothing: bool = False  # the environment has no held-out tasks

    def is_due(self, step: int, final: bool) -> bool:
        """Whether the checkpoint of this step is to be evaluated."""
        if step in self._steps or self._has_nothing:
            return False
        last = max(self._steps, default=0)
        crossed = self.every > 0 and step // self.every > last // self.every
        return step == 0 or final or crossed

    async def add(self, snapshot: Snapshot) -> None:
        """Evaluate this one when its turn comes."""
        async with self._changed:
            self._steps.add(snapshot.step)
            self._pending = [*(waiting for waiting in self._pending if waiting.step == 0), snapshot]
            self._changed.notify_all()

    def skip_up_to(self, step: int) -> None:
        """A resumed run has evaluated these already."""
        self._steps.add(step)

    async def work(self) -> None:
        """Evaluate what is pending, until cancelled."""
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
        with tempfile.TemporaryFile(dir=folder) as answer:
            try:
                await self._run(snapshot, folder, answer)
            finally:
                strike_keys_out(folder, Redactor.of_this_process())
            size = os.fstat(answer.fileno()).st_size
            output = os.pread(answer.fileno(), LONGEST_ANSWER, max(0, size - LONGEST_ANSWER))
        figures = figures_of(self.environment, folder, output.decode(errors="replace"))
        if self.environment.is_foreign:
            name_prompts(folder / "samples.jsonl")
        base = next((row for row in run.metrics() if f"eval/{PROXY}" in row), {})
        figures |= shares(base, figures)
        row = {"step": snapshot.step, "t": time.time(), "src": "eval", **figures}
        append_row(run.path / "metrics.jsonl", row)
        self.writer.event("eval", step=snapshot.step, took_s=round(time.monotonic() - began, 2), **figures)

    async def _run(self, snapshot: Snapshot, folder: Path, answer: IO[bytes]) -> None:
        """Run the command to its end, which is that of its own process. Raises where that is no good one."""
        run, policy = self.writer.run, ("--openai.model_name", snapshot.sampler_path)
        words = command(self.environment, run.path / "config.yaml", folder, self.writer.state.name, *policy)
        log, keys = run.log("eval"), secret_variables(run.environment_config())
        size_before = log.stat().st_size if log.exists() else 0
        workplace = self.environment.working_directory
        child = spawn(words, log=log, folder=workplace, lifeline=self.lifeline, keys=keys, answer=answer)
        try:
            async with asyncio.timeout(WITHIN_S):
                code = await asyncio.wrap_future(child.exit)
        except TimeoutError:
            raise ProcessFailed(f"The evaluation of step {snapshot.step} took more than {WITHIN_S:.0f} s.") from None
        finally:
            await asyncio.to_thread(child.end)
        if code == 0:
            return
        last = reason(run.log_tail("eval", 1) if log.stat().st_size > size_before else [], code)
        why = last.removeprefix("error: ")
        # An environment may end the process with any code: ours are told with an error.
        if code == NOTHING_TO_EVALUATE and not self.environment.is_foreign and why != last:
            raise NothingToEvaluate("There will be no held-out figure.", why)
        raise ProcessFailed(f"The evaluation {how(code)}.", why)


def name_prompts(samples: Path) -> None:
    """Give the samples of a foreign environment the prompt and the completion by which evaluations are compared: the
    last two of its `messages`; or its `question`."""

    def prompt_of(row: Row) -> dict[str, Any]:
        match row:
            case {"messages": [*_, {"content": prompt}, {"content": answer}]}:
                return {"prompt": prompt, "completion": answer}
            case {"question": question}:
                return {"prompt": question}
            case _:
                return {}

    rows = read_rows(samples)
    named = [row if "prompt" in row else {**row, **prompt_of(row)} for row in rows]
    if named != rows:
        replace_file(samples, b"".join(msgspec.json.encode(row) + b"\n" for row in named))
