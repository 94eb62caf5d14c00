"""Training a reward model on preferences: the loop, the optimiser and its schedule, evaluation,
checkpoints, what ends a training early.

Guarantees: killed and resumed, a training in fp32 on a CPU ends with the same bits as one that was
never killed; a checkpoint and a result are written whole or not at all.

The arguments are those of TRL's `RewardTrainer`, which its guide calls by name.
"""

from __future__ import annotations

import errno
import fcntl
import io
import math
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halteres.engine.folders import recover
from halteres.errors import (
    Conflict,
    HalteresError,
    InvalidConfig,
    InvalidData,
    NotFound,
    ServerError,
)
from halteres.rewards.model_folder import RewardFile, template_for, texts_of
from halteres.rewards.preferences import Preferences, read_preferences
from halteres.rewards.torch.batches import Rows, epoch_batches
from halteres.rewards.torch.losses import Example, Interval, comparison_loss
from halteres.rewards.torch.model import (
    MAX_PROBES,
    TRAINER_STATE,
    UNSHARED,
    RewardModel,
    base_network,
    checkpoints,
    open_tokenizer,
    own_objective_weights,
)
from halteres.rewards.training_plan import (
    LoraSettings,
    RewardConfig,
    TruncationReport,
    check_inputs,
    objective_weights,
    render_rows,
)
from halteres.scores import REWARD_FILE

# `should_stop` said so; SIGTERM or Ctrl-C did
StopReason = Literal["finished", "stopped", "terminated"]
ShowStep = Callable[[int, Mapping[str, float] | None], None]
# Settings on which it depends which rows the next step sees: a checkpoint goes on only under the
# same.
ORDER = (
    *("seed", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("train_sampling_strategy", "max_steps", "num_train_epochs"),
)
# What rows are sorted by where batches are by length; version 0.1.0 named nothing, and sorted by
# the length of all texts of a row with what they share.
SORTED_BY = "longest text"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a training came to."""

    folder: Path  # the model, or where training was stopped: the checkpoint to go on from
    num_steps: int
    total_steps: int
    stop_reason: StopReason
    metrics: Mapping[str, float]  # of the last report and the last evaluation
    history: tuple[Mapping[str, float], ...]  # every report
    truncation: TruncationReport


class LossNotFinite(HalteresError):
    """The loss or its gradient is NaN or infinite: training has diverged."""

    code = "nan_loss"


class RewardTrainer:
    """Trains a reward model; `train()` leaves it in `args.output_dir`.

    Args:
        model: the name or folder of a base model, of a reward model to go on from, or a
            transformers model with one output, or one for each objective that the data name.
        processing_class: a tokenizer's folder, a `halteres.tokenizer.Tokenizer`, one of
            transformers; None: the model's own.
        train_dataset, eval_dataset: whatever `read_preferences` reads.
        peft_config: a `peft.LoraConfig` or its settings; like `args.lora`.
        on_step: called after every report with step and metrics.
        should_stop: asked after every step; a checkpoint is written, and training ends.
    """

    def __init__(
        self,
        model: Any,
        args: RewardConfig | None = None,
        processing_class: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        peft_config: Any = None,
        on_step: Callable[[Mapping[str, float]], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        given = args or RewardConfig()
        if peft_config is not None:
            given = given.model_copy(update={"lora": _lora_settings(peft_config)})
        if train_dataset is None:
            raise InvalidConfig(
                "The argument train_dataset is missing.", next="Give rows with chosen and rejected."
            )
        self.on_step, self.should_stop = on_step, should_stop
        self._preferences = _preferences(train_dataset)
        held_out = None
        if eval_dataset is not None:
            held_out = _preferences(eval_dataset)
        tokenizer = open_tokenizer(model, processing_class, given.chat_template_path)
        form = "standard"
        if self._preferences.form == "conversational":
            form = "conversational"
        how = {"form": form, "max_length": given.max_length, "truncation": given.truncation}
        template = template_for(tokenizer, eos_token=given.eos_token, **how)
        weights = objective_weights(
            given, own_objective_weights(model), self._preferences, held_out
        )
        check_inputs(given, self._preferences, held_out)
        network = base_network(model, tokenizer, template, given, weights)
        # AdamW's steps are lost in bf16 weights; `bf16` is of what is computed with them
        network.model.float()
        self.args = given.settled(network.num_parameters)
        network.bf16 = self.args.bf16
        self.model = RewardModel(
            network, tokenizer, template, max_tokens_per_forward=self.args.max_tokens_per_forward
        )
        self._train, self._truncation = self._examples(self._preferences)
        if held_out is not None:
            self._held_out = self._examples(held_out)[0]
        else:
            self._held_out = None
        # The learned lead of `rao_kupper`, before its softplus.
        self._threshold: nn.Parameter | None = None
        if self.args.tie_policy == "rao_kupper":
            self._threshold = nn.Parameter(torch.zeros((), device=network.device))
        self._parameters = [
            *network.trained().values(),
            *([] if self._threshold is None else [self._threshold]),
        ]
        self._optimiser = _adamw(self._parameters, self.args)
        batches = math.ceil(len(self._train) / (self.args.per_device_train_batch_size or 1))
        self._steps_per_epoch = math.ceil(batches / self.args.gradient_accumulation_steps)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])  # its number and its batches
        self.num_tokens = 0  # useful ones so far, as TRL counts: each text with its prompt
        self._history: list[Mapping[str, float]] = []
        self._last_evaluation: dict[str, float] = {}

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole training."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self._steps_per_epoch)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainingResult:
        """Train, from the start or from a checkpoint (True: the newest in `output_dir`, or the
        start).

        Conflict where the folder holds other checkpoints or a finished model, or is in use.
        InvalidData where the checkpoint is of other data or settings. LossNotFinite: the step was
        not taken, and nothing is saved.
        """
        torch.manual_seed(self.args.seed)
        model, config = self.model.network.model, self.args
        if config.disable_dropout:
            self.model.network.disable_dropout()
        if config.gradient_checkpointing:
            cast("Any", model).gradient_checkpointing_enable()
        model.train()
        place = Path(config.output_dir)
        # until all is saved: whoever asked before may ask again
        with alone_in(place), termination() as terminated:
            recover(place)  # what a killed training was just writing
            if not resume_from_checkpoint and checkpoints(place):
                fix = "Go on with it (--resume), name another folder (--out), or remove them."
                raise Conflict(
                    f"The folder {place} holds the checkpoints of another training.", next=fix
                )
            step = self._resumed(resume_from_checkpoint)
            with progress(self.total_steps, self._notes(), shown=not config.disable_tqdm) as show:
                step, reason = self._steps(step, terminated, show)
            model.eval()
            folder = place
            if step < self.total_steps:
                folder = self._save_checkpoint(step)
            else:
                self.save_model(place)
        return TrainingResult(
            folder=folder,
            num_steps=step,
            total_steps=self.total_steps,
            stop_reason=reason if step < self.total_steps else "finished",
            metrics=self._latest(),
            history=tuple(self._history),
            truncation=self._truncation,
        )

    def _steps(
        self, step: int, terminated: threading.Event, show: ShowStep
    ) -> tuple[int, StopReason]:
        """Train from this step on; where it ended, and why."""
        from transformers import get_scheduler

        config, interval = self.args, Interval()
        warmup = config.warmup_steps * (self.total_steps if config.warmup_steps < 1 else 1)
        scheduler: Any = get_scheduler(
            config.lr_scheduler_type, self._optimiser, math.ceil(warmup), self.total_steps
        )
        (share_of_rate, *_) = scheduler.lr_lambdas
        while step < self.total_steps:
            rate = (config.learning_rate or 0.0) * share_of_rate(step)
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            gradient_norm = self._step(step, interval)
            step += 1
            metrics: dict[str, float] | None = None
            if (
                step % config.logging_steps == 0
                or step == self.total_steps
                or self._is_due("eval", step)
            ):
                metrics = {
                    "step": step,
                    "epoch": step / self._steps_per_epoch,
                    "num_tokens": self.num_tokens,
                    **interval.metrics(),
                    "grad_norm": gradient_norm,
                    "learning_rate": rate,
                    "truncated_rows": self._truncation.rows_cut,
                }
                if self._held_out is not None and (
                    self._is_due("eval", step) or step == self.total_steps
                ):
                    metrics |= self.evaluate()
                self._history.append(metrics)
                if self.on_step is not None:
                    self.on_step(metrics)
                interval = Interval()
            show(step, metrics)
            if terminated.is_set():
                return step, "terminated"
            if self.should_stop is not None and self.should_stop():
                return step, "stopped"
            if self._is_due("save", step) and step < self.total_steps:
                self._save_checkpoint(step)
        return step, "finished"

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the held-out rows, overall and by kind, as `eval_*`; InvalidConfig
        without any.
        """
        if self._held_out is None:
            raise InvalidConfig("There is nothing to evaluate on.", next="Give an eval_dataset.")
        model, batch = self.model.network.model, self.args.per_device_eval_batch_size
        training = model.training
        model.eval()
        interval, total = Interval(), 0.0
        ordered = sorted(self._held_out, key=lambda one: -one.length)
        with torch.inference_mode():
            for start in range(0, len(ordered), batch):
                for part in self._parts(ordered[start : start + batch]):
                    total += float(self._loss_of(part, interval))
        model.train(training)
        if not math.isfinite(total):
            raise _not_finite("loss", "on the held-out rows")
        interval.losses.append(total / sum(one.comparison.weight for one in self._held_out))
        self._last_evaluation = {
            f"eval_{name}": value for name, value in interval.metrics().items()
        }
        return self._last_evaluation

    def _examples(self, preferences: Preferences) -> tuple[list[Example], TruncationReport]:
        model, config = self.model, self.args
        rendered = render_rows(preferences, model.template, model.tokenizer, config.tie_policy)
        examples: list[Example] = []
        for comparison, texts in rendered.rows:
            tokens = tuple(np.array(text.tokens, np.int64) for text in texts)
            # the last state holds the others
            if comparison.labels:
                count = len(tokens[-1])
            else:
                count = sum(map(len, tokens))
            if config.share_prefixes:
                rows = Rows.joined(tokens)
            else:
                rows = Rows.apart(tokens)
            shared = config.share_prefixes and model.network.shares_prefixes
            computed = rows.num_tokens - (rows.num_shared if shared else 0)
            examples.append(Example(comparison, tokens, count, computed))
        return examples, rendered.report

    def _step(self, step: int, interval: Interval) -> float:
        """One optimiser step, of rows that its number decides; the norm of its gradient before it
        is clipped.
        """
        config = self.args
        epoch, place = divmod(step, self._steps_per_epoch)
        if self._epoch[0] != epoch:
            batches = epoch_batches(
                [one.length for one in self._train],
                config.per_device_train_batch_size or 1,
                seed=config.seed,
                epoch=epoch,
                by_length=config.train_sampling_strategy == "group_by_length",
            )
            self._epoch = (epoch, batches)
        first = place * config.gradient_accumulation_steps
        rows = self._epoch[1][first : first + config.gradient_accumulation_steps]
        batch = [self._train[row] for one in rows for row in one]
        self.num_tokens += sum(one.num_tokens for one in batch)
        weight = sum(one.comparison.weight for one in batch)
        summed = 0.0
        for part in self._parts(batch):
            loss = self._loss_of(part, interval) / weight
            loss.backward()
            summed += loss.item()
        interval.losses.append(summed)
        norm = nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm or math.inf).item()
        if not math.isfinite(summed) or not math.isfinite(norm):
            raise _not_finite(
                "gradient" if math.isfinite(summed) else "loss", f"at step {step + 1}"
            )
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return norm

    def _parts(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """Micro-batches, the longest first; a comparison is always whole."""
        part: list[Example] = []
        tokens = 0
        for one in sorted(examples, key=lambda one: -one.length):
            if part and tokens + one.num_computed > self.args.max_tokens_per_forward:
                yield part
                part, tokens = [], 0
            part.append(one)
            tokens += one.num_computed
        yield part

    def _loss_of(self, examples: Sequence[Example], interval: Interval) -> Tensor:
        """Sum of weight times loss of a micro-batch."""
        comparisons, network = [one.comparison for one in examples], self.model.network
        computed, padding = network.num_computed_tokens, network.num_padding_tokens
        outputs_TO = network.outputs(
            [text for one in examples for text in one.texts],
            share=self.args.share_prefixes,
            multiple_of=self.args.pad_to_multiple_of or 1,
        )
        scores_T = network.mixed(
            outputs_TO, [one.objective for one in comparisons for _ in one.ranks]
        )
        interval.add(
            examples,
            scores_T.detach().tolist(),
            network.num_computed_tokens - computed,
            network.num_padding_tokens - padding,
        )
        threshold = None
        if self._threshold is not None:
            threshold = F.softplus(self._threshold)
        return comparison_loss(scores_T, comparisons, self.args, threshold)

    def _latest(self) -> dict[str, float]:
        return {**(self._history[-1] if self._history else {}), **self._last_evaluation}

    def _is_due(self, what: Literal["eval", "save"], step: int) -> bool:
        config = self.args
        if what == "eval":
            strategy = config.eval_strategy
        else:
            strategy = config.save_strategy
        if what == "eval":
            every = config.eval_steps or config.logging_steps
        else:
            every = config.save_steps
        if strategy == "epoch":
            every = self._steps_per_epoch
        return (
            strategy != "no"
            and step % every == 0
            and (what == "save" or self._held_out is not None)
        )

    def _notes(self) -> list[str]:
        config, tokenizer, network = self.args, self.model.tokenizer, self.model.network
        notes = [
            f"{len(self._train)} rows, {self.total_steps} steps of "
            f"{config.per_device_train_batch_size} x "
            f"{config.gradient_accumulation_steps}, learning rate {config.learning_rate:g}.",
            *self._preferences.warnings,
            *self._truncation.sentences(config.max_length),
        ]
        padding = {number: name for name, number in tokenizer.special_tokens.items()}[
            network.padding
        ]
        if padding != tokenizer.specials.get("pad_token"):
            notes.append(
                f"Texts are padded with {padding!r}: the padding token must not be the end token."
            )
        if not network.shares_prefixes and config.share_prefixes:
            notes.append(UNSHARED)
        return notes

    def save_model(self, folder: str | Path, beside: Mapping[str, bytes] | None = None) -> None:
        """Write the model as it is now, with what its folder says of the training, and files beside
        it.
        """
        rows = self._preferences
        self.model.file = RewardFile(
            template=self.model.template,
            settings=self.args.model_dump(mode="json"),
            data={
                "source": rows.source,
                "digest": rows.digest,
                "rows": len(self._train),
                "in_steps": any(one.comparison.labels for one in self._train),
                "truncation": asdict(self._truncation),
            },
            metrics=self._latest(),
            tie_threshold=F.softplus(self._threshold).item()
            if self._threshold is not None
            else None,
        )
        probes = [text for one in rows.comparisons[:MAX_PROBES] for text in texts_of(one)]
        self.model.save(Path(folder), probes=probes, beside=beside)

    def _save_checkpoint(self, step: int) -> Path:
        place = Path(self.args.output_dir)
        folder = place / f"checkpoint-{step}"
        state = {
            "step": step,
            "num_tokens": self.num_tokens,
            "optimiser": self._optimiser.state_dict(),
            "rng": torch.get_rng_state(),
            "threshold": None if self._threshold is None else self._threshold.detach(),
            "history": [dict(one) for one in self._history],
            "order": self._order(),
        }
        content = io.BytesIO()
        torch.save(state, content)
        self.save_model(folder, {TRAINER_STATE: content.getvalue()})
        if self.args.save_total_limit is not None:
            for old in checkpoints(place)[: -self.args.save_total_limit]:
                shutil.rmtree(old)
        return folder

    def _order(self) -> dict[str, Any]:
        order = {
            "data": self._preferences.digest,
            **{name: getattr(self.args, name) for name in ORDER},
        }
        if self.args.train_sampling_strategy == "group_by_length":
            order["sorted_by"] = SORTED_BY
        return order

    def _resumed(self, checkpoint: str | Path | bool | None) -> int:
        """The step to go on from, everything put back as it was there."""
        if not checkpoint:
            return 0
        place = Path(self.args.output_dir)
        found = checkpoints(place)
        if checkpoint is True and not found:
            if (place / REWARD_FILE).is_file():
                fix = (
                    "Leave --resume out to train anew and replace it, or name another folder "
                    "(--out)."
                )
                what = f"The training in {place} has finished; it left no checkpoint to go on from."
                raise Conflict(what, next=fix)
            return 0
        if checkpoint is True:
            folder = found[-1]
        else:
            folder = Path(str(checkpoint))
        try:
            state: dict[str, Any] = torch.load(
                folder / TRAINER_STATE, weights_only=True, map_location="cpu"
            )
        except FileNotFoundError as error:
            raise NotFound(
                f"There is no checkpoint in {folder}.", f"{TRAINER_STATE} is missing."
            ) from error
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            fix = "Remove its folder: --resume then goes on from the one before, if there is one."
            why = f"{TRAINER_STATE} cannot be read ({type(error).__name__})."
            raise InvalidData(f"The checkpoint {folder} is damaged.", why, fix) from error
        differing = [
            name for name, value in self._order().items() if state["order"].get(name) != value
        ]
        if differing == ["sorted_by"]:
            raise InvalidData(
                f"The checkpoint {folder} was written by an earlier version of Halteres.",
                "That version put rows into batches in another order, so that some would be "
                "seen twice and others never.",
                f"Train on from its weights: --model {folder}, with another folder (--out).",
            )
        if differing:
            fix = "Resume with the data and the settings that it was made with."
            why = f"It differs in {', '.join(differing)}."
            raise InvalidData(f"The checkpoint {folder} belongs to another training.", why, fix)
        self.model.network.load_weights(folder)
        self._optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"])
        if self._threshold is not None:
            with torch.no_grad():
                self._threshold.copy_(state["threshold"])
        self._history, self.num_tokens = list(state["history"]), state["num_tokens"]
        return state["step"]


@contextmanager
def alone_in(place: Path) -> Iterator[None]:
    """The folder is this training's alone until the block ends, or its process. Conflict: another
    trains into it.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "It is read-only")
        lock = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        what = f"The folder {place} cannot be written."
        raise ServerError(what, f"{error.strerror}.", "Name another folder (--out).") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        fix = "Wait for it, or name another folder (--out)."
        raise Conflict(f"Another process trains into {place}.", next=fix) from error
    try:
        yield
    finally:
        with suppress(OSError):
            place.rmdir()  # nothing was written
        os.close(lock)


@contextmanager
def progress(total: int, notes: Sequence[str], *, shown: bool) -> Iterator[ShowStep]:
    """Show notes, and give what shows a step and its metrics: a bar in a terminal, for 80 columns,
    else plain lines.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, quiet=not shown)
    # what the other columns leave of 80, at their widest
    width = max(5, min(40, console.width - 75))
    columns = (
        BarColumn(width),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=bar.disable)
    with bar:
        task = bar.add_task("", total=total)

        def show(step: int, metrics: Mapping[str, float] | None) -> None:
            if metrics is not None and bar.disable:
                names = ("loss", "accuracy", "margin", "eval_accuracy", "tokens_per_cpu_s")
                figures = ", ".join(
                    f"{name} {metrics[name]:.4g}" for name in names if name in metrics
                )
                console.print(
                    f"step {step}/{total}: {figures}", highlight=False, markup=False, soft_wrap=True
                )
                return
            line = None  # leaves the last one
            if metrics is not None:
                shares = {"accuracy": "accuracy", "eval_accuracy": "held out"}
                figures = [
                    f"{name} {metrics[key]:.0%}" for key, name in shares.items() if key in metrics
                ]
                speed = metrics["tokens_per_cpu_s"]
                if speed < 10_000:
                    in_words = f"{speed:,.0f}"
                else:
                    in_words = f"{speed / 1000:.0f}k"
                line = ", ".join([f"loss {metrics['loss']:.3f}", *figures, f"{in_words} tokens/s"])
            bar.update(task, completed=step, description=line)

        yield show


@contextmanager
def termination() -> Iterator[threading.Event]:
    """Set when the process is asked to end (only a main thread can listen); a second Ctrl-C ends it
    at once.
    """
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield ended
        return

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and ended.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            sys.stderr.write(
                "Ending after this step, with a checkpoint; Ctrl-C again ends at once.\n"
            )
        ended.set()

    signals = [
        one
        for one in (signal.SIGTERM, signal.SIGINT)
        if signal.getsignal(one) is not signal.SIG_IGN
    ]
    before = [(one, signal.signal(one, end)) for one in signals]
    try:
        yield ended
    finally:
        for one, handler in before:
            signal.signal(one, handler)


def _lora_settings(peft_config: Any) -> LoraSettings:
    """The settings of an adapter in `peft`'s words; those that are None are left out."""
    values = peft_config
    if not isinstance(peft_config, Mapping):
        values = vars(peft_config)
    names = LoraSettings.model_fields
    return LoraSettings(**{name: values[name] for name in names if values.get(name) is not None})


def _adamw(parameters: Sequence[nn.Parameter], args: RewardConfig) -> torch.optim.AdamW:
    """AdamW with transformers' defaults; biases and norms do not decay."""
    groups = [
        {
            "params": [one for one in parameters if one.ndim > 1],
            "weight_decay": args.weight_decay,
        },
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate or 0.0,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


def _preferences(source: Any) -> Preferences:
    if isinstance(source, Preferences):
        return source
    return read_preferences(source)


def _not_finite(what: str, where: str) -> LossNotFinite:
    return LossNotFinite(
        f"The {what} is not finite {where}.",
        "The weights have diverged, or a margin or weight of the rows is huge.",
        "Lower learning_rate, and go on from the last checkpoint.",
    )
