"""The loop of a training on a file: answers that are imitated, or pairs of which one answer is
preferred.

Owns: the order of things in one step, when held-out rows are evaluated, both methods' metrics.
Never: samples; asks anybody but the training service.
Guarantees: a step's batch, and so its bits, depend on the seed, the rows and the step alone: going
on from a checkpoint gives what an unbroken run gives.

    sft   examples, weights 1 / tokens of the batch's answers ─▶ forward_backward ─▶ optim_step
    dpo   forward, of the policy and of the reference ─▶ weights by `dpo` ─▶ forward_backward ─▶ ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from halteres.config.file_training import FileTraining
from halteres.config.settings import Settings
from halteres.training.conversations import AnsweredTokens, TokenRow, packed
from halteres.training.datums import Example, to_sequence
from halteres.training.dpo import PairLosses, pair_losses
from halteres.training.failures import LossNotFinite
from halteres.training.file_data import FileData
from halteres.training.loop import FINAL, checkpoint_name
from halteres.training.policy import Pass, Policy, learning_rate
from halteres.training.report import Report, Timer
from halteres.training.stopping import Stopping
from halteres.training.turns import FloatArray

EVALUATED_AT_ONCE = 64
"""Sequences of one request of an evaluation: a wish to stop is noticed that late."""

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """What one step was taken on."""

    examples: Sequence[Example]  # with the weights of the loss
    figures: Figures  # of the batch, that are known before the step


class Objective(Protocol):
    """One method."""

    async def batch(self, rows: Sequence[TokenRow]) -> TrainedBatch:
        """The examples of a step."""
        ...

    def figures(self, trained: TrainedBatch, passed: Pass) -> Figures:
        """The metrics of a step, by name."""
        ...

    async def evaluate(self, rows: Sequence[TokenRow], stopping: Stopping) -> Figures | None:
        """The figures of held-out rows, by name without `eval/`; None where an end was asked for
        at once.
        """
        ...


def objective_of(training: FileTraining, policy: Policy, longest: int) -> Objective:
    """The method that a training asks for; `longest`: tokens at most of one sequence."""
    if training.method == "dpo":
        return Preferences(training, policy)
    return Imitation(policy, longest if training.packing else None)


async def train_on_file(
    policy: Policy,
    data: FileData,
    report: Report,
    settings: Settings,
    training: FileTraining,
    stopping: Stopping,
    done: int = 0,
) -> int:
    """Train from step `done` to `trainer.total_steps`, or until an end is asked for; answers the
    last step. Held-out rows are evaluated before the first step, during, and after the last.
    """
    config, timer = settings.trainer, Timer()
    objective = objective_of(training, policy, config.max_token_trainer_length)
    if done == 0:
        await evaluate(objective, data, report, stopping, 0)
        timer.lap("evaluation")
        timer.take()
    for step in range(done + 1, config.total_steps + 1):
        if stopping.request():
            break
        rows = data.batch(step, training.batch_size, settings.run.seed)
        rate = learning_rate(config, step)
        trained = await objective.batch(rows)
        timer.lap("forward")
        passed = await learn(policy, trained.examples, rate, report, step)
        timer.lap("train")
        figures = {
            **objective.figures(trained, passed),
            "train/learning_rate": rate,
            "rows/count": float(len(rows)),
            "sequences/trained": float(len(trained.examples)),
            "tokens/trained": float(sum(int(one.actions_N.sum()) for one in trained.examples)),
            "tokens/count": float(sum(len(one.tokens_N) + 1 for one in trained.examples)),
            "train/epoch": step * training.batch_size / len(data.train),
            "policy/version": float(policy.version),
            "policy/update_norm": policy.update_norm,
        }
        report.figures(step, figures, timer.take())
        done = step
        is_last = step == config.total_steps
        if is_last or (config.eval_every and step % config.eval_every == 0):
            await evaluate(objective, data, report, stopping, step)
            # an evaluation is no part of a step
            timer.lap("evaluation")
            timer.take()
        if config.checkpoint_every and step % config.checkpoint_every == 0 and not is_last:
            report.checkpoint(await policy.save(checkpoint_name(step), step))
            # part of the next step's row
            timer.lap("checkpoint")
    return done


async def learn(
    policy: Policy, examples: Sequence[Example], rate: float, report: Report, step: int
) -> Pass:
    """One optimiser step."""
    passed = policy.forward_backward(examples)
    # both promised before either is awaited
    stepped = policy.optim_step(rate)
    try:
        outcome = await passed
        # refuses a gradient that is not finite
        await stepped
    except LossNotFinite as error:
        report.diverged(step, error.what)
        raise
    return outcome


async def evaluate(
    objective: Objective,
    data: FileData,
    report: Report,
    stopping: Stopping,
    step: int,
) -> None:
    """The held-out rows under the present weights, into the metrics."""
    if not data.held_out:
        return
    began = time.perf_counter()
    figures = await objective.evaluate(data.held_out, stopping)
    if figures is not None:
        held_out = {f"eval/{name}": value for name, value in figures.items()}
        held_out["eval/num_rows"] = float(len(data.held_out))
        report.evaluation(step, held_out, time.perf_counter() - began)


async def close_file_run(policy: Policy, report: Report, stopping: Stopping, step: int) -> None:
    """Write the final weights: a run has ended well only once they exist."""
    request = stopping.request()
    why, reason = f"all {step} steps are done", None
    if request is not None:
        why, reason = request.why, request.reason
    report.checkpoint(await policy.save(FINAL, step), final=True, why=why, reason=reason)


class Imitation:
    """Cross entropy of the answers: the mean over the tokens of a batch's answers."""

    def __init__(self, policy: Policy, packed_to: int | None) -> None:
        """`packed_to`: tokens of a sequence that rows are joined in; None: each has its own."""
        self._policy, self._packed_to = policy, packed_to

    async def batch(self, rows: Sequence[TokenRow]) -> TrainedBatch:
        """Every answer's tokens with one weight, which add up to 1."""
        sequences = [one for row in rows for one in row.sequences]
        if self._packed_to is not None:
            sequences = packed(sequences, self._packed_to)
        weight = 1.0 / sum(one.num_answers for one in sequences)
        examples = [weighted(one, weight) for one in sequences]
        return TrainedBatch(examples=examples, figures={})

    def figures(self, trained: TrainedBatch, passed: Pass) -> Figures:
        """The loss, nats per token of an answer."""
        return {"train/loss": passed.loss, "train/loss_per_token": passed.loss}

    async def evaluate(self, rows: Sequence[TokenRow], stopping: Stopping) -> Figures | None:
        """Loss per token over all answers, with the standard error of such a ratio over rows."""
        losses: list[float] = []
        counts: list[int] = []
        for chunk in _chunks(rows):
            if stopping.at_once:
                return None
            sums = await _summed(self._policy, chunk)
            losses += [-float(row.sum()) for row in sums]
            counts += [row.num_answers for row in chunk]
        total, num_tokens = float(np.sum(losses)), int(np.sum(counts))
        mean = total / num_tokens
        # of a ratio of sums, linearised about its value
        off = np.array(losses) - mean * np.array(counts)
        return {
            "loss_per_token": mean,
            "loss_per_token_stderr": float(np.sqrt((off**2).sum())) / num_tokens,
            "num_tokens": float(num_tokens),
        }


class Preferences:
    """DPO: `dpo` has the formula."""

    def __init__(self, training: FileTraining, policy: Policy) -> None:
        self._training, self._policy = training, policy
        # the base model is always the same: a pair of a later epoch is not asked again
        self._references: dict[int, FloatArray] = {}

    async def batch(self, rows: Sequence[TokenRow]) -> TrainedBatch:
        """Both answers of each pair, with the loss's derivatives as weights."""
        policy_P2, reference_P2 = await self._logprobs(rows)
        losses = self._losses(policy_P2, reference_P2)
        weights_P = np.array([row.weight for row in rows])
        # a batch of rows without weight moves nothing
        whole = max(float(weights_P.sum()), 1e-12)
        examples: list[Example] = []
        for row, weight in zip(rows, losses.weights_P, strict=True):
            chosen, rejected = row.sequences
            examples.append(weighted(chosen, row.weight * weight / whole))
            examples.append(weighted(rejected, -row.weight * weight / whole))
        means = _pair_figures(losses, policy_P2, weights_P)
        return TrainedBatch(examples=examples, figures={"train/loss": means.pop("loss"), **means})

    def figures(self, trained: TrainedBatch, passed: Pass) -> Figures:
        """The loss and TRL's figures. What the service sums is linear in the log-probabilities, and
        no loss.
        """
        return trained.figures

    async def evaluate(self, rows: Sequence[TokenRow], stopping: Stopping) -> Figures | None:
        """Loss, order and margins over held-out pairs."""
        policy_P2: list[FloatArray] = []
        reference_P2: list[FloatArray] = []
        for chunk in _chunks(rows):
            if stopping.at_once:
                return None
            mine, theirs = await self._logprobs(chunk)
            policy_P2.append(mine)
            reference_P2.append(theirs)
        logprobs_P2 = np.concatenate(policy_P2)
        losses = self._losses(logprobs_P2, np.concatenate(reference_P2))
        count = len(losses.losses_P)
        figures = _pair_figures(losses, logprobs_P2, np.ones(count))
        spread = 0.0
        if count > 1:
            spread = float(losses.losses_P.std(ddof=1)) / float(np.sqrt(count))
        share = figures["rewards/accuracies"]
        return {
            **figures,
            "loss_stderr": spread,
            "rewards/accuracies_stderr": float(np.sqrt(share * (1 - share) / count)),
        }

    def _losses(self, policy_P2: FloatArray, reference_P2: FloatArray) -> PairLosses:
        return pair_losses(
            policy_P2,
            reference_P2,
            beta=self._training.beta,
            label_smoothing=self._training.label_smoothing,
        )

    async def _logprobs(self, rows: Sequence[TokenRow]) -> tuple[FloatArray, FloatArray]:
        """Log-probabilities of the answers of each pair, shape (P, 2), of policy and reference."""
        unknown = list({id(row): row for row in rows if id(row) not in self._references}.values())
        asked = self._policy.forward(_examples(rows))
        if unknown:
            found = await self._policy.reference(_examples(unknown))
            for row, sums in zip(unknown, _sums(unknown, found), strict=True):
                self._references[id(row)] = sums
        mine = np.array(_sums(rows, await asked))
        return mine, np.array([self._references[id(row)] for row in rows])


def weighted(sequence: AnsweredTokens, weight: float) -> Example:
    """A sequence as an example whose answers have this weight in the loss."""
    tokens_T = sequence.tokens_T
    example = to_sequence(tokens_T, np.zeros(len(tokens_T)), sequence.answers_T)
    weights_N = np.where(example.actions_N, weight, 0.0).astype(np.float32)
    return replace(example, advantages_N=weights_N)


def _examples(rows: Sequence[TokenRow]) -> list[Example]:
    return [weighted(one, 1.0) for row in rows for one in row.sequences]


def _sums(rows: Sequence[TokenRow], logprobs: Sequence[NDArray[np.float32]]) -> list[FloatArray]:
    """Of each row: the summed log-probability of each of its sequences' answers."""
    found: list[FloatArray] = []
    at = 0
    for row in rows:
        sums = [
            float(logprobs[at + place][sequence.answers_T[1:]].astype(np.float64).sum())
            for place, sequence in enumerate(row.sequences)
        ]
        at += len(row.sequences)
        found.append(np.array(sums))
    return found


async def _summed(policy: Policy, rows: Sequence[TokenRow]) -> list[FloatArray]:
    return _sums(rows, await policy.forward(_examples(rows)))


def _chunks(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """The rows in order, in lists of at most so many sequences."""
    chunk: list[TokenRow] = []
    count = 0
    for row in rows:
        if chunk and count + len(row.sequences) > EVALUATED_AT_ONCE:
            yield chunk
            chunk, count = [], 0
        chunk.append(row)
        count += len(row.sequences)
    if chunk:
        yield chunk


def _pair_figures(
    losses: PairLosses, policy_P2: FloatArray, weights_P: FloatArray
) -> dict[str, float]:
    """Weighted means over the pairs, by TRL's names."""
    whole = max(float(weights_P.sum()), 1e-12)

    def mean(values_P: FloatArray) -> float:
        return float(weights_P @ values_P) / whole

    return {
        "loss": mean(losses.losses_P),
        "rewards/accuracies": mean((losses.margins_P > 0).astype(np.float64)),
        "rewards/margins": mean(losses.margins_P),
        "rewards/chosen": mean(losses.chosen_P),
        "rewards/rejected": mean(losses.rejected_P),
        "logps/chosen": mean(policy_P2[:, 0]),
        "logps/rejected": mean(policy_P2[:, 1]),
    }
