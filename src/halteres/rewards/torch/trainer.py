"""Training a reward model on preferences.

Owns: the loop, the optimiser and its schedule, evaluation, checkpoints, what ends a training early.
Never: reads a format (`preferences`), knows a loss's formula (`losses`).
Guarantees: killed and resumed, a training in fp32 on a CPU ends with the same bits as one that was never killed;
a checkpoint and a result are written whole or not at all.

The arguments are those of TRL's `RewardTrainer`, which its guide calls by name.
"""

from __future__ import annotations

import io
import math
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halteres.engine.folders import recover
from halteres.errors import Conflict, HalteresError, InvalidConfig, InvalidData, NotFound
from halteres.rewards.batches import epoch_batches, forward_parts
from halteres.rewards.preferences import Preferences, read_preferences
from halteres.rewards.reward_file import read_reward_file
from halteres.rewards.template import ScoringTemplate, padding_token, template_for, texts_of
from halteres.rewards.torch import lora
from halteres.rewards.torch.examples import Example, Examples, TruncationReport, prepare
from halteres.rewards.torch.losses import LossSettings, comparison_loss
from halteres.rewards.torch.model import MAX_PROBES, Origin, RewardModel, model_place
from halteres.rewards.torch.network import ScoringNetwork, device_of, open_network
from halteres.rewards.torch.progress import Interval, Progress
from halteres.rewards.torch.training_folder import TRAINER_STATE, alone_in, checkpoints, read_trainer_state
from halteres.rewards.training_config import LoraSettings, RewardConfig
from halteres.rewards.training_plan import check_inputs, objective_weights
from halteres.scores import REWARD_FILE
from halteres.text import Tokenizer

StopReason = Literal["finished", "stopped", "terminated"]
"""All steps were taken; `should_stop` said so; the process was asked to end (SIGTERM, Ctrl-C)."""

ORDER = ("seed", "per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy", "max_steps",
         "num_train_epochs")  # fmt: skip
"""Settings on which it depends which rows the next step sees: a checkpoint goes on only under the same."""


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
        model: the name or folder of a base model, of a reward model to go on from, or a transformers model with one
            output, or one for each objective that the data name.
        args: the settings.
        processing_class: a tokenizer's folder, a `halteres.text.Tokenizer` or one of transformers; the model's own
            where none is given.
        train_dataset: whatever `read_preferences` reads.
        eval_dataset: the same, held out.
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
        asked = args or RewardConfig()
        if peft_config is not None:
            asked = asked.model_copy(update={"lora": _lora_settings(peft_config)})
        self.on_step, self.should_stop = on_step, should_stop
        preferences = _preferences(train_dataset, "train_dataset")
        held_out = _preferences(eval_dataset, "eval_dataset") if eval_dataset is not None else None
        tokenizer = _tokenizer(model, processing_class, asked)
        template = template_for(
            tokenizer,
            eos_token=asked.eos_token,
            form="conversational" if preferences.form == "conversational" else "standard",
            max_length=asked.max_length,
            truncation=asked.truncation,
        )
        weights = objective_weights(asked, _own_weights(model), preferences, held_out)
        check_inputs(asked, preferences, held_out)
        network = _network(model, tokenizer, template, asked, weights)
        network.model.float()  # AdamW's steps are lost in bf16 weights; `bf16` is of what is computed with them
        self.args = asked.settled(network.num_parameters)
        self._loss = LossSettings(
            label_smoothing=self.args.label_smoothing,
            center_rewards_coefficient=self.args.center_rewards_coefficient,
            tie_policy=self.args.tie_policy,
            listwise_loss=self.args.listwise_loss,
        )
        network.bf16 = self.args.bf16
        self.model = RewardModel(network, tokenizer, template, max_tokens_per_forward=self.args.max_tokens_per_forward)
        self._preferences = preferences
        self._train = self._prepared(preferences)
        self._held_out = self._prepared(held_out) if held_out is not None else None
        self._threshold = _Threshold(network.device) if self.args.tie_policy == "rao_kupper" else None
        self.num_tokens = 0  # useful ones so far, as TRL counts: each text with its prompt
        self._history: list[Mapping[str, float]] = []
        self._last_evaluation: dict[str, float] = {}

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole training."""
        return (
            self.args.max_steps
            if self.args.max_steps > 0
            else math.ceil(self.args.num_train_epochs * self._steps_per_epoch)
        )

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainingResult:
        """Train, from the start or from a checkpoint (True: the newest in `output_dir`, or the start).

        Raises:
            Conflict: True, where a training without checkpoints has finished; none, where there are checkpoints; or
                another process trains into the same folder.
            ServerError: the folder cannot be written.
            NotFound: there is no such checkpoint.
            InvalidData: it was made on other data, or under other settings that decide the order of rows.
            LossNotFinite: training has diverged; the step was not taken, and nothing is saved.
        """
        torch.manual_seed(self.args.seed)
        network, config = self.model.network, self.args
        if config.disable_dropout:
            _disable_dropout(network.model)
        if config.gradient_checkpointing:
            cast("Any", network.model).gradient_checkpointing_enable()
        network.model.train()
        optimiser = _optimiser(self._parameters(), config)
        place = Path(config.output_dir)
        with alone_in(place), _termination() as terminated:  # until all is saved: whoever asked before may ask again
            recover(place)  # what a killed training was just writing
            if not resume_from_checkpoint and checkpoints(place):
                raise Conflict(
                    f"The folder {place} holds the checkpoints of another training.",
                    next="Go on with it (--resume), name another folder (--out), or remove them.",
                )
            step = self._resumed(resume_from_checkpoint, optimiser)
            return self._trained(step, optimiser, terminated)

    def _trained(self, step: int, optimiser: torch.optim.Optimizer, terminated: threading.Event) -> TrainingResult:
        """Train from this step on, and save."""
        network, config = self.model.network, self.args
        progress = Progress(self.total_steps, shown=not config.disable_tqdm)
        interval, reason = Interval(), cast("StopReason", "finished")
        with progress():
            for note in self._notes():
                progress.note(note)
            while step < self.total_steps:
                rate = config.learning_rate or 0.0
                for group in optimiser.param_groups:
                    group["lr"] = rate * schedule(config, step, self.total_steps)
                gradient_norm = self._step(step, optimiser, interval)
                step += 1
                metrics = None
                if step % config.logging_steps == 0 or step == self.total_steps or self._is_due("eval", step):
                    metrics = self._report(step, interval, gradient_norm, optimiser.param_groups[0]["lr"])
                    interval = Interval()
                progress.step(step, metrics)
                if terminated.is_set() or (self.should_stop is not None and self.should_stop()):
                    reason = "terminated" if terminated.is_set() else "stopped"
                    break
                if self._is_due("save", step) and step < self.total_steps:
                    self._save_checkpoint(step, optimiser)
        network.model.eval()
        if step < self.total_steps:
            folder = self._save_checkpoint(step, optimiser)
        else:
            reason, folder = "finished", Path(config.output_dir)
            self.save_model(folder)
        return TrainingResult(
            folder=folder,
            num_steps=step,
            total_steps=self.total_steps,
            stop_reason=reason,
            metrics={**(self._history[-1] if self._history else {}), **self._last_evaluation},
            history=tuple(self._history),
            truncation=self._train.report,
        )

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the held-out rows, overall and by kind, as `eval_*`.

        Raises:
            InvalidConfig: there are none.
        """
        if self._held_out is None:
            raise InvalidConfig("There is nothing to evaluate on.", next="Give an eval_dataset.")
        examples, network = self._held_out.examples, self.model.network
        training = network.model.training
        network.model.eval()
        interval, total = Interval(), 0.0
        batch = self.args.per_device_eval_batch_size
        order = sorted(range(len(examples)), key=lambda place: -examples[place].length)
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                chosen = [examples[place] for place in order[start : start + batch]]
                for part in self._parts(chosen):
                    total += float(self._loss_of(part, interval))
        network.model.train(training)
        if not math.isfinite(total):
            raise _not_finite("loss", "on the held-out rows")
        interval.losses.append(total / sum(one.ranked.weight for one in examples))
        self._last_evaluation = {f"eval_{name}": value for name, value in interval.metrics().items()}
        return self._last_evaluation

    def save_model(self, folder: str | Path) -> None:
        """Write the model as it is now."""
        self.model.save(Path(folder), self._origin())

    @property
    def _steps_per_epoch(self) -> int:
        config = self.args
        batches = math.ceil(len(self._train.examples) / (config.per_device_train_batch_size or 1))
        return math.ceil(batches / config.gradient_accumulation_steps)

    def _step(self, step: int, optimiser: torch.optim.Optimizer, interval: Interval) -> float:
        """One optimiser step; the norm of its gradient before it is clipped."""
        batch = self._batch(step)
        self.num_tokens += sum(one.num_tokens for one in batch)
        weight = sum(one.ranked.weight for one in batch)
        summed = 0.0
        for part in self._parts(batch):
            loss = self._loss_of(part, interval) / weight
            loss.backward()
            summed += loss.item()
        interval.losses.append(summed)
        clip = self.args.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self._parameters(), clip).item()
        if not math.isfinite(summed) or not math.isfinite(norm):
            raise _not_finite("gradient" if math.isfinite(summed) else "loss", f"at step {step + 1}")
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return norm

    def _batch(self, step: int) -> list[Example]:
        """The rows of a step: a function of its number, so that nothing about the order has to be saved."""
        config = self.args
        epoch, place = divmod(step, self._steps_per_epoch)
        if self._epoch_number != epoch:
            self._epoch_number, self._epoch = (
                epoch,
                epoch_batches(
                    [one.length for one in self._train.examples],
                    config.per_device_train_batch_size or 1,
                    seed=config.seed,
                    epoch=epoch,
                    by_length=config.train_sampling_strategy == "group_by_length",
                ),
            )
        first = place * config.gradient_accumulation_steps
        batches = self._epoch[first : first + config.gradient_accumulation_steps]
        return [self._train.examples[row] for batch in batches for row in batch]

    _epoch_number: int = -1
    _epoch: Sequence[Sequence[int]] = ()

    def _parts(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """Micro-batches; a comparison is always whole."""
        sizes = [(len(one.rows), one.length) for one in examples]
        for part in forward_parts(sizes, self.args.max_tokens_per_forward):
            yield [examples[place] for place in part]

    def _loss_of(self, examples: Sequence[Example], interval: Interval) -> Tensor:
        """Sum of weight times loss of a micro-batch."""
        rows = [row for one in examples for row in one.rows]
        network = self.model.network
        computed = network.num_computed_tokens
        outputs_TO = network.outputs(rows, self.args.pad_to_multiple_of or 1)
        scores_T = network.mixed(outputs_TO, [one.objective for one in examples for _ in one.ranked.ranks])
        threshold = self._threshold() if self._threshold is not None else None
        interval.add(examples, scores_T.detach().tolist(), network.num_computed_tokens - computed)
        return comparison_loss(scores_T, [one.ranked for one in examples], self._loss, threshold)

    def _report(self, step: int, interval: Interval, gradient_norm: float, rate: float) -> Mapping[str, float]:
        metrics: dict[str, float] = {
            "step": step,
            "epoch": step / self._steps_per_epoch,
            "num_tokens": self.num_tokens,
            **interval.metrics(),
            "grad_norm": gradient_norm,
            "learning_rate": rate,
            "truncated_rows": self._train.report.rows_cut,
        }
        if self._held_out is not None and (self._is_due("eval", step) or step == self.total_steps):
            metrics |= self.evaluate()
        self._history.append(metrics)
        if self.on_step is not None:
            self.on_step(metrics)
        return metrics

    def _is_due(self, what: Literal["eval", "save"], step: int) -> bool:
        config = self.args
        strategy = config.eval_strategy if what == "eval" else config.save_strategy
        every = (config.eval_steps or config.logging_steps) if what == "eval" else config.save_steps
        if strategy == "epoch":
            every = self._steps_per_epoch
        return strategy != "no" and step % every == 0 and (what == "save" or self._held_out is not None)

    def _parameters(self) -> list[nn.Parameter]:
        own = [self._threshold.raw] if self._threshold is not None else []
        return [*self.model.network.trained().values(), *own]

    def _prepared(self, preferences: Preferences) -> Examples:
        return prepare(
            preferences,
            self.model.template,
            self.model.tokenizer,
            self.model.network,
            tie_policy=self.args.tie_policy,
            most=self.args.max_tokens_per_forward,
            share=self.args.share_prefixes,
        )

    def _notes(self) -> list[str]:
        config = self.args
        notes = [
            f"{len(self._train.examples)} rows, {self.total_steps} steps of {config.per_device_train_batch_size} x "
            f"{config.gradient_accumulation_steps}, learning rate {config.learning_rate:g}.",
            *self._preferences.warnings,
            *self._train.report.sentences(config.max_length),
        ]
        names = {number: name for name, number in self.model.tokenizer.special_tokens.items()}
        padding = names[self.model.network.padding]
        if padding != self.model.tokenizer.specials.get("pad_token"):
            notes.append(f"Texts are padded with {padding!r}: the padding token must not be the end token.")
        if not self.model.network.shares_prefixes and config.share_prefixes:
            notes.append("Each text is a row of its own: this model takes no mask of shared prefixes.")
        return notes

    def _origin(self) -> Origin:
        latest = {**(self._history[-1] if self._history else {}), **self._last_evaluation}
        texts = [text for one in self._preferences.comparisons[:MAX_PROBES] for text in texts_of(one)]
        return Origin(
            settings=self.args.model_dump(mode="json"),
            data=self._train.facts(self._preferences),
            metrics=latest,
            probes=tuple(texts[:MAX_PROBES]),
            tie_threshold=self._threshold().item() if self._threshold is not None else None,
        )

    def _save_checkpoint(self, step: int, optimiser: torch.optim.Optimizer) -> Path:
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        state = {
            "step": step,
            "num_tokens": self.num_tokens,
            "optimiser": optimiser.state_dict(),
            "rng": torch.get_rng_state(),
            "threshold": None if self._threshold is None else self._threshold.raw.detach(),
            "history": [dict(one) for one in self._history],
            "order": self._order(),
        }
        content = io.BytesIO()
        torch.save(state, content)
        self.model.save(folder, self._origin(), beside={TRAINER_STATE: content.getvalue()})
        if self.args.save_total_limit is not None:
            for old in checkpoints(Path(self.args.output_dir))[: -self.args.save_total_limit]:
                shutil.rmtree(old)
        return folder

    def _order(self) -> dict[str, Any]:
        return {"data": self._preferences.digest, **{name: getattr(self.args, name) for name in ORDER}}

    def _resumed(self, asked: str | Path | bool | None, optimiser: torch.optim.Optimizer) -> int:
        """The step to go on from, everything put back as it was there."""
        if not asked:
            return 0
        found = checkpoints(Path(self.args.output_dir))
        if asked is True and not found:
            if (Path(self.args.output_dir) / REWARD_FILE).is_file():
                raise Conflict(
                    f"The training in {self.args.output_dir} has finished; it left no checkpoint to go on from.",
                    next="Leave --resume out to train anew and replace it, or name another folder (--out).",
                )
            return 0
        folder = found[-1] if asked is True else Path(str(asked))
        state = read_trainer_state(folder)
        differing = [name for name, value in self._order().items() if state["order"].get(name) != value]
        if differing:
            raise InvalidData(
                f"The checkpoint {folder} belongs to another training.",
                f"It differs in {', '.join(differing)}.",
                "Resume with the data and the settings that it was made with.",
            )
        self.model.network.load_weights(folder)
        optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"])
        if self._threshold is not None:
            with torch.no_grad():
                self._threshold.raw.copy_(state["threshold"])
        self._history, self.num_tokens = list(state["history"]), state["num_tokens"]
        return state["step"]


def _not_finite(what: str, where: str) -> LossNotFinite:
    return LossNotFinite(
        f"The {what} is not finite {where}.",
        "The weights have diverged, or a margin or weight of the rows is huge.",
        "Lower learning_rate, and go on from the last checkpoint.",
    )


class _Threshold:
    """The learned lead of `rao_kupper`, kept >= 0."""

    def __init__(self, device: torch.device) -> None:
        self.raw = nn.Parameter(torch.zeros((), device=device))

    def __call__(self) -> Tensor:
        return F.softplus(self.raw)


def schedule(config: RewardConfig, step: int, total: int) -> float:
    """The share of the learning rate at a step, as transformers 5.23 schedules it."""
    warmup = math.ceil(config.warmup_steps * total) if 0 < config.warmup_steps < 1 else int(config.warmup_steps)
    if config.lr_scheduler_type == "constant":
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    if config.lr_scheduler_type == "constant_with_warmup":
        return 1.0
    done = (step - warmup) / max(1, total - warmup)
    if config.lr_scheduler_type == "cosine":
        return max(0.0, 0.5 * (1 + math.cos(math.pi * done)))
    return max(0.0, 1 - done)


def _optimiser(parameters: Sequence[nn.Parameter], config: RewardConfig) -> torch.optim.Optimizer:
    """AdamW, with transformers' defaults; biases and norms do not decay."""
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate or 0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def _tokenizer(model: Any, processing_class: Any, config: RewardConfig) -> Tokenizer:
    """As a folder: what is not one yet is saved into one that lives as long as the tokenizer."""
    if processing_class is None or isinstance(processing_class, str | Path):
        name = processing_class or (model if isinstance(model, str | Path) else model.config._name_or_path)
        source: Path | None = model_place(name)
    else:
        source = processing_class.folder if isinstance(processing_class, Tokenizer) else None
    if source is not None and config.chat_template_path is None:
        return Tokenizer(source)
    scratch = Path(tempfile.mkdtemp(prefix="halteres-tokenizer-"))
    if source is None:
        cast("Any", processing_class).save_pretrained(scratch)
    else:
        shutil.copytree(source, scratch, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    if config.chat_template_path is not None:
        template = Path(config.chat_template_path)
        template = template / "chat_template.jinja" if template.is_dir() else template
        if not template.is_file():
            raise NotFound(f"There is no chat template at {config.chat_template_path}.", next="Name a .jinja file.")
        (scratch / "chat_template.jinja").write_text(template.read_text())
    tokenizer = Tokenizer(scratch)
    weakref.finalize(tokenizer, shutil.rmtree, scratch, True)
    return tokenizer


def _network(
    model: Any, tokenizer: Tokenizer, template: ScoringTemplate, config: RewardConfig, weights: Mapping[str, float]
) -> ScoringNetwork:
    padding = tokenizer.special_tokens[padding_token(tokenizer, template.eos_token)]
    if isinstance(model, RewardModel):
        model.network.objective_weights = dict(weights)
        return model.network
    if isinstance(model, str | Path):
        return open_network(
            model_place(model),
            padding=padding,
            trained=False,
            lora_settings=config.lora,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
            arguments=config.model_init_kwargs,
            objective_weights=weights,
        )
    if not isinstance(getattr(model, lora.HEAD, None), nn.Linear):
        raise InvalidConfig(
            f"{type(model).__name__} has no head named '{lora.HEAD}': it is no model that scores.",
            next="Give its folder's name instead, or load it with AutoModelForSequenceClassification and num_labels=1.",
        )
    if model.config.num_labels != max(1, len(weights)):
        wanted = f"The data name {len(weights)} objectives." if weights else "A reward model has one."
        raise InvalidConfig(
            f"The model has {model.config.num_labels} outputs.", wanted, f"Load it with num_labels={len(weights) or 1}."
        )
    if config.lora is not None:
        torch.manual_seed(config.seed)
        lora.attach(model, config.lora)
    return ScoringNetwork(
        model.to(device_of()),
        padding=padding,
        settings=config.lora,
        base=model.config._name_or_path,
        objective_weights=weights,
    )


def _own_weights(model: Any) -> Mapping[str, float] | None:
    """Of the objectives of a reward model that training goes on from; None: a base model."""
    if isinstance(model, RewardModel):
        return model.network.objective_weights
    stored = read_reward_file(model_place(model)) if isinstance(model, str | Path) else None
    return stored.objective_weights if stored is not None else None


def _preferences(source: Any, name: str) -> Preferences:
    if source is None:
        raise InvalidConfig(f"The argument {name} is missing.", next="Give rows with chosen and rejected.")
    return source if isinstance(source, Preferences) else read_preferences(source)


def _lora_settings(given: Any) -> LoraSettings:
    if isinstance(given, LoraSettings):
        return given
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else vars(given)
    return LoraSettings(**{name: values[name] for name in LoraSettings.model_fields if values.get(name) is not None})


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


@contextmanager
def _termination() -> Iterator[threading.Event]:
    """Set when the process is asked to end; a second Ctrl-C ends it at once. Only a main thread can listen; another's
    process has its own ways."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and asked.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            sys.stderr.write("Ending after this step, with a checkpoint; Ctrl-C again ends at once.\n")
        asked.set()

    heard = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = [(one, signal.signal(one, ask)) for one in heard]
    try:
        yield asked
    finally:
        for one, handler in before:
            signal.signal(one, handler)
