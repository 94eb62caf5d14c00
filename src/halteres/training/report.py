"""What training writes into the run directory: a metrics row per step, events, checkpoints, notices.

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

from halteres.errors import boundary
from halteres.observe.metrics import WriteFailed, append_row
from halteres.redaction import Redactor
from halteres.text import Tokenizer
from halteres.training import logprob_mismatch
from halteres.training.datums import Example
from halteres.training.folder import RunFolder
from halteres.training.learner import Checkpoint, Pass
from halteres.training.objective import TrainingBatch
from halteres.training.stopping import StopReason
from halteres.training.turns import FloatArray, Turns
from halteres.types import CONTEXT_LOGPROB, Batch, Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All there is to tell about one step."""

    number: int  # 1-based
    version: int  # policy version before the step
    tempered: bool = False  # sampled log-probabilities are those of the sampling temperature, which is not 1
    learning_rate: float
    batch: Batch
    training_batch: TrainingBatch
    passes: Sequence[tuple[Sequence[Example], Pass]]  # of each optimiser step; none: nothing could move a weight
    update_norm: float | None = None  # of the adapter's update after the step, relative to the base weights
    seconds: dict[str, float]  # by phase


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Writes the groups of each step for people to look at, rollouts/step_N.jsonl, in the form of our own environments:
    for environments that write none. A file that cannot be written, or a foreign group that cannot be decoded, ends no
    run."""

    folder: Path  # rollouts/
    tokenizer: Tokenizer  # of the base model

    def write(self, step: int, batch: Batch) -> None:
        """Append the groups of this step's batch."""
        try:
            with boundary(WriteFailed, "The rollouts of a batch could not be written down"):
                for number, group in enumerate(batch.groups):
                    if group.tokens:
                        append_row(self.folder / f"step_{step}.jsonl", {"group": number, **self._line(group)})
        except WriteFailed as error:  # the metrics' next row meets the same disk, and speaks for the run
            logger.warning("%s", error.sentence)

    def _line(self, group: Group) -> dict[str, Any]:
        actions = [[place for place, one in enumerate(row) if one != CONTEXT_LOGPROB] for row in group.logprobs]
        prompt = group.tokens[0][: actions[0][0]] if actions[0] else group.tokens[0]
        return {
            "item": None,  # what the environment was asked is not part of a group
            "prompt": self.tokenizer.decode(prompt, skip_special_tokens=False),
            "completions": [
                self._completion([tokens[place] for place in places], score)
                for tokens, places, score in zip(group.tokens, actions, group.scores, strict=True)
            ],
            "failures": [],
        }

    def _completion(self, tokens: Sequence[int], score: float) -> dict[str, Any]:
        ended = bool(tokens) and tokens[-1] in self.tokenizer.eos_token_ids
        finish = "stop" if ended else "length"
        return {"text": self.tokenizer.decode(tokens), "score": score, "tokens": len(tokens), "finish": finish}


class Timer:
    """Seconds by phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The phase that ends now."""
        now = self._clock()
        self._laps[name] = now - self._last
        self._last = now

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
                "env.temperature is %g, and sampled log-probabilities are those of that temperature: the ratio to them "
                "corrects every token's probability. They differ rightly from the trainer's, and are not compared.",
                temperature,
            )
            return
        evidence = (
            f"env.temperature is {temperature:g}: answers are sampled from another distribution than the one whose "
            "log-probabilities are recorded and trained, and no ratio corrects it; the gradient is biased."
        )
        self._notice("temperature", done, evidence)

    def step(self, step: Step) -> None:
        """One step is done."""
        if not self._had_batch:
            self._event("first_batch", step=step.number)
            self._had_batch = True
        self._notice_unused(step)
        metrics = metrics_of(step, self._success_threshold)
        if self._rollouts is not None:
            self._rollouts.write(step.number, step.batch)
        append_row(self._folder.metrics, {"step": step.number, "t": self._clock(), "src": "trainer", **metrics})
        logger.info(
            "Step %d: reward %.3f, %.2f s.%s",
            step.number,
            metrics["reward/mean"],
            step.seconds["step"],
            "" if step.passes else " Skipped: no advantage differs from 0, nothing can be learnt from this batch.",
        )
        self.unsaved_step = step.number

    def checkpoint(
        self, checkpoint: Checkpoint, *, final: bool = False, why: str | None = None, reason: StopReason | None = None
    ) -> None:
        """A checkpoint exists. `final`: the last one of this process, and why it is; `reason`: of an early end."""
        self.unsaved_step = None
        facts = {**asdict(checkpoint), "final": final}
        # The multi-turn seed's name for the step, beside ours: whoever read its rows can read these.
        append_row(self._folder.checkpoints, {**facts, "policy_iteration_step": checkpoint.step, "t": self._clock()})
        self._event("checkpoint", **facts, **({"why": why} if why else {}), **({"reason": reason} if reason else {}))
        logger.info("Checkpoint '%s' of step %d is written.", checkpoint.name, checkpoint.step)

    def diverged(self, step: int, evidence: str) -> None:
        """The loss is not finite."""
        self._notice("nan_loss", step, evidence)

    def _notice_unused(self, step: Step) -> None:
        """What groups say of themselves that training passes over."""
        groups = step.batch.groups
        if not step.training_batch.uses_own_advantages and (own := sum(bool(group.advantages) for group in groups)):
            evidence = (
                f"{own} of {len(groups)} groups of the batch carry advantages of their own, which are not used: "
                "trainer.advantage makes them of scores and rewards. With 'environment' theirs are trained on."
            )
            self._notice_once("own_advantages", step.number, evidence)
        if cut := sum(group.is_truncated for group in groups):
            evidence = (
                f"{cut} of {len(groups)} groups of the batch were sampled with top_p, top_k or min_p, as their "
                "generation_params say: tokens outside were never tried, the log-probabilities are of all tokens, and "
                "no ratio corrects that; the gradient is biased."
            )
            remedy = "Let the environment sample with top_p 1, top_k -1 and min_p 0."
            self._notice_once("truncated_sampling", step.number, evidence, remedy=remedy)

    def _notice_once(self, rule: str, step: int, evidence: str, **more: str) -> None:
        if rule not in self._noticed:
            self._noticed.add(rule)
            self._notice(rule, step, evidence, **more)

    def _notice(self, rule: str, step: int, evidence: str, **more: str) -> None:
        logger.warning("%s: %s", rule, evidence)
        self._event("notice", rule=rule, step=step, evidence=evidence, **more)

    def _event(self, kind: str, **facts: Any) -> None:
        append_row(self._folder.events, {"t": self._clock(), "type": kind, **self._redactor.json(facts)})


def metrics_of(step: Step, success_threshold: float = 0.0) -> logprob_mismatch.Metrics:
    """The metrics row of a step. Names: the seeds' (W&B), `spec/agent-tools.md` 1.9, and ours.

    Args:
        step: the step.
        success_threshold: a score above it is a success.
    """
    # Later passes start from weights that sampled nothing: the first one shows whether sampler and trainer agree.
    examples, first = step.passes[0] if step.passes else ((), None)
    counts = _counts(step)
    loss = sum(passed.loss for _, passed in step.passes) if step.passes else None
    agreed = logprob_mismatch.agreement(
        examples, first.logprobs if first else (), None if step.tempered else step.version
    )
    return {
        "train/loss": loss,
        "train/loss_per_token": None if loss is None else loss / max(1, _num_trained(step)),
        "train/learning_rate": step.learning_rate,
        "train/updates": float(len(step.passes)),
        "train/skipped": 0.0 if step.passes else 1.0,
        "tokens/clipped": _clipped(step),
        **_rewards(step.training_batch, success_threshold),
        **_advantages(step.training_batch),
        **_turns(step, loss, agreed),
        **agreed,
        **counts,
        **{f"time/{phase}": seconds for phase, seconds in step.seconds.items()},
    }


def _clipped(step: Step) -> float | None:
    """Share of the tokens of all passes whose ratio the loss clipped; None where it does not clip."""
    counts = [passed.clipped for _, passed in step.passes if passed.clipped is not None]
    return sum(counts) / max(1, _num_trained(step)) if counts else None


def _num_trained(step: Step) -> int:
    """Sampled tokens of all passes."""
    return sum(int(example.actions_N.sum()) for examples, _ in step.passes for example in examples)


def _rewards(training_batch: TrainingBatch, success_threshold: float) -> logprob_mismatch.Metrics:
    turns = training_batch.turns
    scores, group_K = turns.scores_E, turns.group_E[turns.episode_K]
    silent = [not training_batch.advantages_K[group_K == group].any() for group in np.unique(turns.group_E)]
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/success": float((scores > success_threshold).mean()),
        "groups/count": float(len(silent)),
        "groups/without_signal": float(np.mean(silent)),
        "groups/length_correlation": _length_correlation(turns),
    }


def _length_correlation(turns: Turns) -> float | None:
    """Spearman's correlation of score and sampled tokens within a group, mean over groups; None where none varies."""
    length_K = np.array([float(span.stop - span.start) for span in turns.spans_K])
    length_E = np.bincount(turns.episode_K, length_K, turns.num_episodes).astype(np.float64)
    found: list[float] = []
    for group in np.unique(turns.group_E):
        mine_E = (turns.group_E == group) & ~turns.masked_E
        scores, lengths = _ranks(turns.scores_E[mine_E]), _ranks(length_E[mine_E])
        if scores.size and scores.std() > 0 and lengths.std() > 0:
            found.append(float(np.corrcoef(scores, lengths)[0, 1]))
    return float(np.mean(found)) if found else None


def _ranks(values: FloatArray) -> FloatArray:
    """Equal values share the mean of their ranks."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2


def _advantages(training_batch: TrainingBatch) -> logprob_mismatch.Metrics:
    every = training_batch.advantages_K
    return {
        "advantages/mean": float(every.mean()),
        "advantages/std": float(every.std()),
        "advantages/sum": float(every.sum()),
        "policy/kl_reference": training_batch.kl_reference,
        "policy/implicit_reward_gap": training_batch.implicit_reward_gap,
        "tokens/ratio_bounded": training_batch.corrected,
    }


def _turns(step: Step, loss: float | None, agreed: logprob_mismatch.Metrics) -> logprob_mismatch.Metrics:
    """Figures of episodes of several turns, by the names of the multi-turn seed; none where no group has turns.

    Four of them stand in every row under names of ours, too.
    """
    turns = step.training_batch.turns
    if not any(group.spans for group in step.batch.groups):
        return {}
    sampled = _sampled(step.batch)
    return {
        "sampler/episode_return": float(turns.rewards_K.sum()) / turns.num_episodes,
        "sampler/num_turns_per_episode": len(turns.rewards_K) / turns.num_episodes,
        "sampler/action_num_tokens": sampled.size / turns.num_episodes,
        "sampler/num_episodes": float(turns.num_episodes),
        "sampler/token_entropy": -float(sampled.mean()) if sampled.size else None,
        "episodes/masked": float(turns.masked_E.mean()),
        "time/sample": step.seconds["batch"],
        "train/loss:sum": loss,
        "train/kl_sample_train_v1": agreed["kl_sample_train_v1"],
        "train/kl_sample_train_v2": agreed["kl_sample_train_v2"],
    }


def _counts(step: Step) -> logprob_mismatch.Metrics:
    examples = step.training_batch.examples
    lags = [step.version - oldest for group in step.batch.groups for oldest, _ in group.versions]
    sampled = _sampled(step.batch)
    return {
        "policy/entropy": -float(sampled.mean()) if sampled.size else None,
        "tokens/action": float(sampled.size),
        "tokens/trained": float(sum(int(example.actions_N.sum()) for example in examples.kept)),
        "sequences/count": float(step.batch.num_sequences),
        "sequences/trained": float(len(examples.kept)),
        "sequences/too_long": float(examples.too_long),
        "groups/own_advantages": float(np.mean([bool(group.advantages) for group in step.batch.groups])),
        "policy/version": float(step.version + len(step.passes)),
        "policy/update_norm": step.update_norm,
        "policy/staleness_max": float(max(lags)) if lags else None,
        "policy/staleness_mean": float(np.mean(lags)) if lags else None,
        "groups/stale": None if step.batch.num_stale is None else float(step.batch.num_stale),
    }


def _sampled(batch: Batch) -> FloatArray:
    """The sampler's log-probability of every sampled token of the whole batch.

    Minus their mean is an unbiased (Monte Carlo) estimate of the policy's entropy per token, in nats: E[-ln p] over
    tokens drawn from p itself. That is the policy, at temperature 1, or the tempered one, where the log-probabilities
    are those of env.temperature. (`logprobs/mean` covers only what was trained on.)
    """
    rows = [np.asarray(row, dtype=np.float64) for group in batch.groups for row in group.logprobs]
    every = np.concatenate(rows) if rows else np.empty(0)
    return every[every != CONTEXT_LOGPROB]
