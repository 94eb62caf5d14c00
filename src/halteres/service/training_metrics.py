"""Metrics of training runs: STATE/metrics/<training run, ':' as '_'>.jsonl, a row for each
optimiser step.

Owns: those files and their size. Never: holds up a request, or fails one because a row cannot be
written; writes down a token, a text or a key.
Guarantees: a row has all passes since the step before it, also where an engine or the service died
between them. `kill -9` may cost the rows of the last 0.2 s.

Rows are those of `observe.metrics`, `src` "service", under the names of a run's own metrics; `step`
is the policy version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from halteres.engine.protocol import Array, Datum, PassResult, StepResult
from halteres.files import replace_file
from halteres.observe.metrics import Row, WriteFailed, append_line, encoded_row, read_lines
from halteres.service.wire.training import PassRequest

log = logging.getLogger(__name__)

CROSS_ENTROPY = "cross_entropy"
FOLDER = "metrics"
GATHERED_S = 0.2  # rows that come within this time are written together
MOST_BYTES = 4 * 2**20  # of a file, some 12,000 steps; then every second row goes
MOST_FILES = 2000  # of a service; those that were written last stay


def metrics_file(state: Path, training_run: str) -> Path:
    """Where the rows of a training run lie, in a service's state directory; it need not exist."""
    return state / FOLDER / f"{training_run.replace(':', '_')}.jsonl"


@dataclass(slots=True)
class Passes:
    """The forward-backward passes of one training run since its last step, added up."""

    num_datums: int = 0
    seconds: float = 0.0
    # what the losses are a sum over: tokens, or their weights; None where weights have both signs
    weight: float | None = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])  # of the engine's metrics

    def add(self, request: PassRequest, result: PassResult, seconds: float) -> None:
        """One more pass."""
        self.num_datums += len(request.data)
        self.seconds += seconds
        for name, value in result.metrics.items():
            if name.endswith(":sum"):
                self.sums[name] = self.sums.get(name, 0.0) + value
        added = result.metrics.get("num_loss_tokens:sum", math.nan)
        if request.loss == CROSS_ENTROPY:
            added = _weight_of(request.data)
        if self.weight is not None:
            self.weight += added
        if not math.isfinite(added):
            self.weight = None

    def metrics(self) -> dict[str, float]:
        """Those that these passes have; none of no pass."""
        if not self.num_datums:
            return {}
        loss = self.sums["loss:sum"]
        row = {"train/loss": loss, "sequences/trained": float(self.num_datums)}
        if self.weight:
            row["train/loss_per_token"] = loss / self.weight
        trained = self.sums.get("num_loss_tokens:sum")
        if not trained:
            return row
        row["tokens/trained"] = trained
        if "num_clipped_tokens:sum" in self.sums:
            row["tokens/clipped"] = self.sums["num_clipped_tokens:sum"] / trained
        if "log_ratio:sum" in self.sums:
            # estimators k1 and k2, over all tokens of these passes: the service does not know which
            # of them older weights have sampled
            row["kl_sample_train_v1"] = -self.sums["log_ratio:sum"] / trained
            row["kl_sample_train_v2"] = self.sums["log_ratio_squared:sum"] / trained / 2
        return row


def _weight_of(data: Collection[Datum]) -> float:
    """The sum of the weights of a cross entropy; NaN where one is negative: by such weights a
    client hands over a gradient of its own, and the sum is no loss.
    """
    weights = [_values(datum.inputs["weights"]) for datum in data if "weights" in datum.inputs]
    if len(weights) < len(data) or any(values.min(initial=0.0) < 0 for values in weights):
        return math.nan
    return sum(float(values.sum()) for values in weights)


def _values(weights: Array) -> np.ndarray:
    return np.frombuffer(weights.data, np.float32)


class TrainingMetrics:
    """The metrics of all training runs of one service."""

    def __init__(self, state: Path, tasks: asyncio.TaskGroup) -> None:
        self._state, self._tasks = state, tasks
        self._passes: dict[str, Passes] = {}
        self._stepped_at: dict[str, float] = {}  # monotonic s
        self._rows: dict[Path, list[bytes]] = {}  # that are not written yet
        self._writer: asyncio.Task[None] | None = None
        self._in_trouble = False

    async def open(self, training_runs: Collection[str]) -> None:
        """Remove the files of all other training runs, and of too many the oldest."""
        known = {metrics_file(self._state, name) for name in training_runs}

        def clear() -> None:
            with suppress(OSError):
                files = sorted((self._state / FOLDER).glob("*.jsonl"), key=_written_at)
                surplus = set(files[:-MOST_FILES])
                for file in files:
                    if file in surplus or file not in known:
                        file.unlink(missing_ok=True)

        await asyncio.to_thread(clear)

    def passed(
        self, training_run: str, request: PassRequest, result: PassResult, seconds: float
    ) -> None:
        """A pass has succeeded, or was taken again; one that is forward-only is no part of it."""
        if not request.forward_only:
            self._passes.setdefault(training_run, Passes()).add(request, result, seconds)

    def forget_passes(self, training_run: str) -> None:
        """The gradient of the passes so far is gone, or was stepped on before a restart."""
        self._passes.pop(training_run, None)

    def stepped(
        self, training_run: str, result: StepResult, learning_rate: float, seconds: float
    ) -> None:
        """A step was taken: write its row, soon."""
        passes, now = self._passes.pop(training_run, Passes()), time.monotonic()
        figures = {
            **passes.metrics(),
            "train/learning_rate": learning_rate,
            "time/train": passes.seconds + seconds,
        }
        if "grad_norm:mean" in result.metrics:
            figures["train/grad_norm"] = result.metrics["grad_norm:mean"]
        if training_run in self._stepped_at:
            figures["time/step"] = now - self._stepped_at[training_run]
        self._stepped_at[training_run] = now
        row: Row = {"step": result.version, "t": round(time.time(), 3), "src": "service"}
        # JSON has no others
        row |= {name: value for name, value in figures.items() if math.isfinite(value)}
        file = metrics_file(self._state, training_run)
        self._rows.setdefault(file, []).append(encoded_row(row))
        if not self.is_writing:
            self._writer = self._tasks.create_task(self._write(), name="training metrics")

    @property
    def is_writing(self) -> bool:
        """There are rows that may not be in their files yet."""
        return self._writer is not None and not self._writer.done()

    async def _write(self) -> None:
        while self._rows:
            await asyncio.sleep(GATHERED_S)
            rows, self._rows = self._rows, {}
            try:
                await asyncio.to_thread(_append_all, rows)
                self._in_trouble = False
            except (OSError, WriteFailed) as error:
                if not self._in_trouble:
                    log.warning("Metrics of training runs are not written: %s", error)
                self._in_trouble = True


def _append_all(rows: dict[Path, list[bytes]]) -> None:
    """Append to every file that can be written. Raises what kept the last of the others."""
    failure = None
    for file, lines in rows.items():
        try:
            _append(file, lines)
        except (OSError, WriteFailed) as error:
            failure = error
    if failure is not None:
        raise failure


def _append(file: Path, lines: list[bytes]) -> None:
    # its name has the id of a session
    file.parent.mkdir(mode=0o700, exist_ok=True)
    append_line(file, b"\n".join(lines))
    if file.stat().st_size > MOST_BYTES:
        # backwards, so that the newest row stays
        kept = read_lines(file)[::-2][::-1]
        replace_file(file, b"".join(kept))


def _written_at(file: Path) -> float:
    return file.stat().st_mtime
