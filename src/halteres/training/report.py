"""What training writes into the run directory: a metrics row per step, events, checkpoints,
notices.

What to do about them is said by a reader of the run directory (`runs.diagnosis`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halteres.clients.critic import Updated
from halteres.errors import boundary
from halteres.groups.rollout_rows import RolloutFiles, TokenLimits, group_id, sampled_fields
from halteres.observe.metrics import WriteFailed, append_row
from halteres.redaction import Redactor
from halteres.tokenizer import Tokenizer
from halteres.training import logprob_mismatch
from halteres.training.datums import Example
from halteres.training.folder import RunFolder
from halteres.training.objective import TrainingBatch
from halteres.training.policy import Checkpoint, Pass
from halteres.training.stopping import StopReason
from halteres.training.turns import FloatArray, Turns
from halteres.types import CONTEXT_LOGPROB, Batch, Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All there is to tell about one step."""

    number: int  # 1-based
    version: int  # policy version before the step
    # sampled log-probabilities are those of the sampling temperature, which is not 1
    tempered: bool = False
    learning_rate: float
    batch: Batch
    training_batch: TrainingBatch
    # of each optimiser step; none: nothing could move a weight
    passes: Sequence[tuple[Sequence[Example], Pass]]
    learnt: Updated | None = None  # by the critic, of a run that has one
    warms_up: bool = False  # the critic alone has learnt
    # of the adapter's update after the step, relative to the base weights
    update_norm: float | None = None
    seconds: dict[str, float]  # by phase


class Rollouts:
    """Writes the groups of each step for people to look at, rollouts/step_N.jsonl, in the form of
    our own environments: for environments that write none. A file that cannot be written, or a
    foreign group that cannot be decoded, ends no run.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, limits: TokenLimits | None = None
    ) -> None:
        """`folder`: rollouts/; `tokenizer`: of the base model."""
        self._files = RolloutFiles(folder, limits or TokenLimits())
        self._tokenizer = tokenizer

    def write(self, step: int, batch: Batch) -> None:
        """Append the groups of this step's batch."""
        try:
            with boundary(WriteFailed, "The rollouts of a batch could not be written down"):
                for number, group in enumerate(batch.groups):
                    if group.tokens:
                        self._files.append(step, {"group": number, **self._line(group)})
        except WriteFailed as error:
            # the metrics' next row meets the same disk, and speaks for the run
            logger.warning("%s", error.sentence)

    def _line(self, group: Group) -> dict[str, Any]:
        actions = [
            [place for place, one in enumerate(row) if one != CONTEXT_LOGPROB]
            for row in group.logprobs
        ]
        prompt = group.tokens[0][: actions[0][0]] if actions[0] else group.tokens[0]
        completions: list[dict[str, Any]] = []
        rows = zip(group.tokens, group.logprobs, actions, group.scores, strict=True)
        for row, logprobs, places, score in rows:
            tokens = [row[place] for place in places]
            finish = "stop" if tokens and tokens[-1] in self._tokenizer.eos_token_ids else "length"
            completions.append(
                {
                    "text": self._tokenizer.decode(tokens),
                    "score": score,
                    "tokens": len(tokens),
                    "finish": finish,
                    **sampled_fields(tokens, [logprobs[at] for at in places], self._tokenizer),
                }
            )
        return {
            "id": group_id(group.tokens, group.scores),
            "item": None,  # what the environment was given is not part of a group
            "prompt": self._tokenizer.decode(prompt, skip_special_tokens=False),
            "prompt_ids": list(prompt),
            "completions": completions,
            "failures": [],
        }


def write_advantages(folder: Path, step: Step) -> None:
    """Write rollouts/advantages_N.jsonl: of each group of the batch, by its id, the advantage of
    every turn of every rollout, four digits each. A file that cannot be written ends no run.
    """
    turns = step.training_batch.turns
    of_rollouts: list[list[float]] = [[] for _ in range(turns.num_episodes)]
    for episode, advantage in zip(turns.episode_K, step.training_batch.advantages_K, strict=True):
        of_rollouts[episode].append(float(f"{advantage:.4g}"))
    file = folder / f"advantages_{step.number}.jsonl"
    first = 0
    try:
        with boundary(WriteFailed, "The advantages of a batch could not be written down"):
            folder.mkdir(exist_ok=True)
            for group in step.batch.groups:
                last = first + group.num_rollouts
                known = group_id(group.tokens, group.scores)
                append_row(file, {"id": known, "advantages": of_rollouts[first:last]})
                first = last
    except WriteFailed as error:
        logger.warning("%s", error.sentence)


class Timer:
    """Seconds by phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The phase that ends now."""
        before, self._last = self._last, self._clock()
        self._laps[name] = self._last - before

    def take(self) -> dict[str, float]:
        """The laps since the last take, and their sum as "step"."""
        laps, self._laps = self._laps, {}
        return {**laps, "step": sum(laps.values())}


class Report:
    """Writes to the run directory."""

    def __init__(
        self,
        folder: RunFolder,
        clock: Callable[[], float] = time.time,
        *,
        success_threshold: float = 0.0,
        rollouts: Rollouts | None = None,
    ) -> None:
        """`rollouts`: None where the environment writes its own."""
        self._folder, self._clock = folder, clock
        self._success_threshold, self._rollouts = success_threshold, rollouts
        self._redactor = Redactor.of_this_process()
        self._had_batch = False
        self._noticed = set[str]()
        self.unsaved_step: int | None = None  # the last step, unless a checkpoint holds it

    def ready(self) -> None:
        """Environments can sample the policy now."""
        self._folder.ready.parent.mkdir(exist_ok=True)
        self._folder.ready.touch()

    def begins(self, env: Mapping[str, Any], done: int, *, tempered: bool = False) -> None:
        """Training begins with these settings of the environment, after step `done`.

        `tempered`: sampled log-probabilities are those of the environment's temperature.
        """
        temperature = env.get("temperature", 1.0)
        if temperature == 1.0:
            return
        if tempered:
            logger.info(
                "env.temperature is %g, and sampled log-probabilities are those of that "
                "temperature: the ratio to them "
                "corrects every token's probability. They differ rightly from the trainer's, and "
                "are not compared.",
                temperature,
            )
        else:
            evidence = (
                f"env.temperature is {temperature:g}: answers are sampled from another "
                "distribution than the one whose "
                "log-probabilities are recorded and trained, and no ratio corrects it; the "
                "gradient is biased."
            )
            self._notice("temperature", done, evidence)

    def inexact(self, correction: str) -> None:
        """The sampler does not compute what the trainer does; `correction`: what training does
        about it.
        """
        logger.info(
            "What samples is not exact: its log-probabilities differ from the trainer's in their "
            "last digits or more,"
            " also of the present version. trainer.correction is %s.",
            correction,
        )
        self._event("sampler_not_exact", correction=correction)

    def without_unembed(self) -> None:
        """No sampler takes an adapter of the unembedding: none is trained."""
        logger.info(
            "Every sampler is a vLLM, which takes no adapter of the unembedding: none is trained "
            "(trainer.train_unembed)."
        )
        self._event("unembedding_left_out")

    def step(self, step: Step) -> None:
        """One step is done."""
        if not self._had_batch:
            self._event("first_batch", step=step.number)
            self._had_batch = True
        self._notice_unused(step)
        metrics = metrics_of(step, self._success_threshold)
        if self._rollouts is not None:
            self._rollouts.write(step.number, step.batch)
        write_advantages(self._folder.rollouts, step)
        append_row(
            self._folder.metrics,
            {"step": step.number, "t": self._clock(), "src": "trainer", **metrics},
        )
        logger.info(
            "Step %d: reward %.3f, %.2f s.%s",
            step.number,
            metrics["reward/mean"],
            step.seconds["step"],
            _why_unmoved(step),
        )
        self.unsaved_step = step.number

    def figures(
        self, step: int, figures: Mapping[str, float | None], seconds: Mapping[str, float]
    ) -> None:
        """One step of a training on a file is done; `seconds`: by phase."""
        if not self._had_batch:
            self._event("first_batch", step=step)
            self._had_batch = True
        times = {f"time/{phase}": taken for phase, taken in seconds.items()}
        append_row(
            self._folder.metrics,
            {"step": step, "t": self._clock(), "src": "trainer", **figures, **times},
        )
        logger.info("Step %d: loss %.4f, %.2f s.", step, figures["train/loss"], seconds["step"])
        self.unsaved_step = step

    def evaluation(self, step: int, figures: Mapping[str, float | None], seconds: float) -> None:
        """Held-out rows were evaluated after this step, which took so long."""
        append_row(
            self._folder.metrics, {"step": step, "t": self._clock(), "src": "eval", **figures}
        )
        self._event("eval", step=step, took_s=round(seconds, 3))
        logger.info("Held-out rows after step %d are evaluated.", step)

    def checkpoint(
        self,
        checkpoint: Checkpoint,
        *,
        final: bool = False,
        why: str | None = None,
        reason: StopReason | None = None,
    ) -> None:
        """A checkpoint exists. `final`: the last one of this process, and why it is; `reason`: of
        an early end.
        """
        self.unsaved_step = None
        facts = {**asdict(checkpoint), "final": final}
        # The multi-turn seed's name for the step, beside ours: whoever read its rows can read
        # these.
        append_row(
            self._folder.checkpoints,
            {**facts, "policy_iteration_step": checkpoint.step, "t": self._clock()},
        )
        self._event(
            "checkpoint",
            **facts,
            **{name: said for name, said in (("why", why), ("reason", reason)) if said},
        )
        logger.info("Checkpoint '%s' of step %d is written.", checkpoint.name, checkpoint.step)

    def diverged(self, step: int, evidence: str) -> None:
        """The loss is not finite."""
        self._notice("nan_loss", step, evidence)

    def _notice_unused(self, step: Step) -> None:
        """What groups say of themselves that training passes over, once each."""
        groups = step.batch.groups
        if not step.training_batch.uses_own_advantages and (
            own := sum(bool(group.advantages) for group in groups)
        ):
            evidence = (
                f"{own} of {len(groups)} groups of the batch carry advantages of their own, which "
                "are not used: "
                "trainer.advantage makes them of scores and rewards. With 'environment' theirs "
                "are trained on."
            )
            self._notice("own_advantages", step.number, evidence, once=True)
        if cut := sum(group.is_truncated for group in groups):
            evidence = (
                f"{cut} of {len(groups)} groups of the batch were sampled with top_p, top_k or "
                "min_p, as their "
                "generation_params say: tokens outside were never tried, the log-probabilities "
                "are of all tokens, and "
                "no ratio corrects that; the gradient is biased."
            )
            fix = "Let the environment sample with top_p 1, top_k -1 and min_p 0."
            self._notice("truncated_sampling", step.number, evidence, once=True, remedy=fix)

    def _notice(
        self, rule: str, step: int, evidence: str, *, once: bool = False, **more: str
    ) -> None:
        if once and rule in self._noticed:
            return
        self._noticed.add(rule)
        logger.warning("%s: %s", rule, evidence)
        self._event("notice", rule=rule, step=step, evidence=evidence, **more)

    def _event(self, kind: str, **facts: Any) -> None:
        append_row(
            self._folder.events, {"t": self._clock(), "type": kind, **self._redactor.json(facts)}
        )


def _why_unmoved(step: Step) -> str:
    """Why a step has moved no weight of the policy; nothing where it has."""
    if step.warms_up:
        return " The critic alone has learnt (trainer.critic_warmup_steps)."
    if step.passes:
        return ""
    return " Skipped: no advantage differs from 0, nothing can be learnt from this batch."


def critic_metrics(step: Step) -> logprob_mismatch.Metrics:
    """Of the critic; none of a run without one. Values and advantages are those before its update,
    in reward units.
    """
    values, learnt = step.training_batch.values, step.learnt
    if values is None or learnt is None:
        return {}
    advantage = None
    if len(values.tokens):
        advantage = float(np.abs(values.advantages_M).mean())
    return {
        "critic/explained_variance": values.explained_variance,
        "critic/advantage_abs": advantage,
        "critic/loss": learnt.loss,
        "critic/clipped": learnt.clipped,
        "critic/gradient_norm": learnt.gradient_norm,
    }


def metrics_of(step: Step, success_threshold: float = 0.0) -> logprob_mismatch.Metrics:
    """The metrics row of a step. Names: the seeds' (W&B), `spec/agent-tools.md` 1.9, and ours.

    Args:
        step: the step.
        success_threshold: a score above it is a success.
    """
    batch, training_batch, passes = step.batch, step.training_batch, step.passes
    turns, examples = training_batch.turns, training_batch.examples
    advantages_K = training_batch.advantages_K
    of_loss = loss_metrics(step)
    scores, group_K = turns.scores_E, turns.group_E[turns.episode_K]
    silent = [not advantages_K[group_K == group].any() for group in np.unique(turns.group_E)]
    sampled = sampled_logprobs(batch)
    entropy = None
    if sampled.size:
        entropy = -float(sampled.mean())
    agreed = agreement_of(step)
    # Episodes of several turns have further figures, by the names of the multi-turn seed: four of
    # them are in every row under names of ours, too.
    of_episodes: logprob_mismatch.Metrics = {
        "sampler/episode_return": float(turns.rewards_K.sum()) / max(1, turns.num_episodes),
        "sampler/num_turns_per_episode": len(turns.rewards_K) / max(1, turns.num_episodes),
        "sampler/action_num_tokens": sampled.size / max(1, turns.num_episodes),
        "sampler/num_episodes": float(turns.num_episodes),
        "sampler/token_entropy": entropy,
        "episodes/masked": float(turns.masked_E.mean()),
        "time/sample": step.seconds["batch"],
        "train/loss:sum": of_loss["train/loss"],
        "train/kl_sample_train_v1": agreed["kl_sample_train_v1"],
        "train/kl_sample_train_v2": agreed["kl_sample_train_v2"],
    }
    if not any(group.spans for group in batch.groups):
        of_episodes = {}
    return {
        **of_loss,
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/success": float((scores > success_threshold).mean()),
        "groups/count": float(len(silent)),
        "groups/without_signal": float(np.mean(silent)),
        "groups/length_correlation": _length_correlation(turns),
        "advantages/mean": float(advantages_K.mean()),
        "advantages/std": float(advantages_K.std()),
        "advantages/sum": float(advantages_K.sum()),
        **critic_metrics(step),
        "policy/kl_reference": training_batch.kl_reference,
        "policy/implicit_reward_gap": training_batch.implicit_reward_gap,
        "tokens/ratio_bounded": training_batch.share_corrected,
        **of_episodes,
        **agreed,
        "policy/entropy": entropy,
        "tokens/action": float(sampled.size),
        "tokens/trained": float(sum(int(example.actions_N.sum()) for example in examples.useful)),
        "sequences/count": float(batch.num_sequences),
        "sequences/trained": float(len(examples.useful)),
        "sequences/too_long": float(examples.too_long),
        "groups/own_advantages": float(np.mean([bool(group.advantages) for group in batch.groups])),
        "policy/version": float(step.version + len(passes)),
        "policy/update_norm": step.update_norm,
        **staleness_metrics(step),
        **{f"time/{phase}": seconds for phase, seconds in step.seconds.items()},
    }


def loss_metrics(step: Step) -> logprob_mismatch.Metrics:
    """Loss and optimiser steps; None where nothing was trained on, or the loss does not clip."""
    passes = step.passes
    num_trained = 0
    for trained, _ in passes:
        num_trained += sum(int(example.actions_N.sum()) for example in trained)
    num_trained = max(1, num_trained)
    loss = loss_per_token = clipped = None
    if passes:
        loss = sum(passed.loss for _, passed in passes)
        loss_per_token = loss / num_trained
    num_clipped = [passed.clipped for _, passed in passes if passed.clipped is not None]
    if num_clipped:
        clipped = sum(num_clipped) / num_trained
    return {
        "train/loss": loss,
        "train/loss_per_token": loss_per_token,
        "train/learning_rate": step.learning_rate,
        "train/updates": float(len(passes)),
        "train/skipped": float(not passes and not step.warms_up),
        "tokens/clipped": clipped,
    }


def agreement_of(step: Step) -> logprob_mismatch.Metrics:
    """How far sampler and trainer agree. Later passes start from weights that sampled nothing, so
    that the first one shows it.
    """
    version: int | None = step.version
    if step.tempered:
        version = None
    if not step.passes:
        return logprob_mismatch.agreement((), (), version)
    examples, passed = step.passes[0]
    return logprob_mismatch.agreement(examples, passed.logprobs, version)


def staleness_metrics(step: Step) -> logprob_mismatch.Metrics:
    """How old the weights were that sampled the batch, in versions; None where it is not known."""
    largest = mean = num_stale = None
    lags = [step.version - oldest for group in step.batch.groups for oldest, _ in group.versions]
    if lags:
        largest, mean = float(max(lags)), float(np.mean(lags))
    if step.batch.num_stale is not None:
        num_stale = float(step.batch.num_stale)
    return {
        "policy/staleness_max": largest,
        "policy/staleness_mean": mean,
        "groups/stale": num_stale,
    }


def sampled_logprobs(batch: Batch) -> FloatArray:
    """The sampler's log-probability of every sampled token of the whole batch.

    Minus their mean is an unbiased (Monte Carlo) estimate of the policy's entropy per token, in
    nats: E[-ln p] over tokens drawn from p itself. That is the policy, at temperature 1, or the
    tempered one, where the log-probabilities are those of env.temperature. (`logprobs/mean` covers
    only what was trained on.)
    """
    rows = [np.asarray(row, dtype=np.float64) for group in batch.groups for row in group.logprobs]
    every = np.concatenate([np.empty(0), *rows])
    return every[every != CONTEXT_LOGPROB]


def _length_correlation(turns: Turns) -> float | None:
    """Spearman's correlation of score and sampled tokens within a group, mean over groups; None
    where none varies.
    """
    length_K = np.array([float(span.stop - span.start) for span in turns.spans_K])
    length_E = np.bincount(turns.episode_K, length_K, turns.num_episodes).astype(np.float64)
    found: list[float] = []
    for group in np.unique(turns.group_E):
        mine_E = (turns.group_E == group) & ~turns.masked_E
        scores, lengths = _ranks(turns.scores_E[mine_E]), _ranks(length_E[mine_E])
        if scores.size and scores.std() > 0 and lengths.std() > 0:
            found.append(float(np.corrcoef(scores, lengths)[0, 1]))
    if not found:
        return None
    return float(np.mean(found))


def _ranks(values: FloatArray) -> FloatArray:
    """Equal values share the mean of their ranks."""
    ordered = np.sort(values)
    return (
        np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    ) / 2
