"""The objective: a batch of the trajectory server as examples that a loss can be summed over, by
penalty, estimator, weighting and correction.

    present log-probabilities, and the importance of what another distribution sampled
    rewards ─▶ less the KL penalty (kl_in: reward)
            ─▶ returns, baselines (`advantages`) ─▶ tokens (`datums.spread`),
               or by a critic's values, of tokens at once (`gae`)
            ─▶ less the KL penalty (kl_in: loss) ─▶ times the importance ─▶ examples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from halteres.config.settings import TrainerSettings
from halteres.errors import InvalidData
from halteres.losses import find_kind
from halteres.training.advantages import estimate, standardised
from halteres.training.critic import Critic
from halteres.training.datums import FIX, Example, Examples, spread, to_examples, to_sequences
from halteres.training.gae import (
    TokenValues,
    estimate_tokens,
    sampled_tokens,
    token_rewards,
    turn_means,
)
from halteres.training.policy import Policy
from halteres.training.turns import (
    FloatArray,
    Turns,
    state_differences,
    turns_of,
    with_scores_at_end,
)
from halteres.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """A batch as it is trained on, and figures of it."""

    turns: Turns
    advantages_K: FloatArray  # of every turn
    values: TokenValues | None = None  # the critic's, of a run that has one
    uses_own_advantages: bool = False  # they are the groups' own
    examples: Examples
    # mean of the policy's minus reference's log-probability, nats per sampled token
    kl_reference: float | None = None
    # of better over worse answers, nats per token: see `_implicit_reward_gap`
    implicit_reward_gap: float | None = None
    # of the tokens that another distribution sampled, share truncated or masked
    share_corrected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Credit:
    """Advantages of a batch."""

    advantages_K: FloatArray
    advantages_S: tuple[FloatArray, ...]  # of each sequence's tokens, T
    values: TokenValues | None = None


def corrected(config: TrainerSettings, *, exact: bool, given: bool) -> TrainerSettings:
    """The settings as they are trained with: importance is truncated where the sampler is not
    exact, unless the correction was given, or the loss reads no log-probabilities of the sampler.
    """
    if exact or given or "logprobs" not in find_kind(config.loss).inputs:
        return config
    return config.model_copy(update={"correction": "truncate"})


class Objective:
    """What a run maximises."""

    def __init__(
        self, config: TrainerSettings, policy: Policy, critic: Critic | None = None
    ) -> None:
        self._config, self._policy, self._critic = config, policy, critic
        self._loss = find_kind(config.loss)

    async def training_batch(self, batch: Batch) -> TrainingBatch:
        """The examples of a batch, with every token's advantage.

        Raises:
            InvalidData: the batch lacks what the loss or the estimator needs, or holds a number
                that is not finite.
        """
        config = self._config
        needs_logprobs = (
            "logprobs" in self._loss.inputs or bool(config.kl_coef) or config.correction != "none"
        )
        sequences = to_sequences(batch, needs_logprobs=needs_logprobs)
        sequences, importance_S, share_corrected = await self._importance(sequences)
        turns = turns_of(batch)
        turns = (
            state_differences(turns)
            if config.turn_rewards == "states"
            else with_scores_at_end(turns)
        )
        masked = {
            span.sequence
            for span, masked in zip(turns.spans_K, turns.masked_K, strict=True)
            if masked
        }
        sequences = [one.masked() if i in masked else one for i, one in enumerate(sequences)]
        penalties_S = await self._penalties(batch, sequences)
        credit = await self._credit(batch, turns, sequences, penalties_S)
        advantages_S = credit.advantages_S
        if penalties_S and config.kl_in == "loss":
            advantages_S = tuple(
                a_T - penalty_T for a_T, penalty_T in zip(advantages_S, penalties_S, strict=True)
            )
        advantages_S = tuple(a_T * w_T for a_T, w_T in zip(advantages_S, importance_S, strict=True))
        num_tokens = sum(int(sequence.actions_N.sum()) for sequence in sequences)
        kl_reference = None
        if penalties_S and num_tokens:
            kl_reference = (
                float(sum(penalty_T.sum() for penalty_T in penalties_S))
                / config.kl_coef
                / num_tokens
            )
        asks_policy = config.reference != "environment"
        # no reference was asked
        referred = [s.masked() if asks_policy and not self._fits(s) else s for s in sequences]
        return TrainingBatch(
            turns=turns,
            advantages_K=credit.advantages_K,
            values=credit.values,
            uses_own_advantages=config.advantage == "environment",
            examples=to_examples(
                sequences,
                advantages_S,
                config.max_token_trainer_length,
                self._loss,
                config.loss_config,
            ),
            kl_reference=kl_reference,
            implicit_reward_gap=_implicit_reward_gap(turns, penalties_S, referred, config.kl_coef),
            share_corrected=share_corrected,
        )

    async def _credit(
        self,
        batch: Batch,
        turns: Turns,
        sequences: Sequence[Example],
        penalties_S: Sequence[FloatArray],
    ) -> _Credit:
        """The advantages of a batch, before importance, and before a KL penalty in the loss."""
        config = self._config
        in_reward = penalties_S if config.kl_in == "reward" else ()
        if config.advantage == "gae":
            return await self._by_critic(turns, sequences, in_reward)
        if config.advantage == "environment":
            advantages_S = tuple(_own_rows(batch, "advantages", "trainer.advantage"))
            advantages_K = _of_turns(turns, advantages_S)
            return _Credit(advantages_K=advantages_K, advantages_S=advantages_S)
        paid = turns
        # rewards and scores less the penalty of each turn's tokens
        if in_reward:
            penalty_K = _of_turns(turns, in_reward)
            penalty_E = np.bincount(turns.episode_K, penalty_K, turns.num_episodes)
            paid = replace(
                turns,
                rewards_K=turns.rewards_K - penalty_K,
                scores_E=turns.scores_E - penalty_E,
            )
        advantages_K = estimate(paid, config.advantage, config.gamma)
        return _Credit(
            advantages_K=advantages_K,
            advantages_S=spread(turns, advantages_K, sequences, config.weighting),
        )

    async def _by_critic(
        self, turns: Turns, sequences: Sequence[Example], in_reward: Sequence[FloatArray]
    ) -> _Credit:
        """Advantages of tokens, by the critic's values: whitened over the batch."""
        config = self._config
        # the process makes both by the same setting
        assert self._critic is not None  # noqa: S101 - for the type checker
        tokens = sampled_tokens(turns, sequences, config.max_token_trainer_length)
        rewards_M = token_rewards(tokens, turns, config.gamma)
        if in_reward:
            rewards_M -= tokens.at_tokens(in_reward)
        values = estimate_tokens(
            tokens,
            rewards_M,
            await self._critic.values(tokens),
            discount=config.gamma,
            decay=config.gae_lambda,
        )
        whitened_M = standardised(values.advantages_M)
        weights_S = spread(turns, np.ones(len(turns.rewards_K)), sequences, config.weighting)
        return _Credit(
            advantages_K=turn_means(tokens, whitened_M, len(turns.rewards_K)),
            advantages_S=tuple(
                a_T * w_T for a_T, w_T in zip(tokens.spread(whitened_M), weights_S, strict=True)
            ),
            values=values,
        )

    async def _penalties(
        self, batch: Batch, sequences: Sequence[Example]
    ) -> tuple[FloatArray, ...]:
        """kl_coef times (log-probability minus the reference's) of every token, 0 on context; none
        without KL.

        The log-probability is the sampler's, and where it was corrected (`_importance`) the present
        policy's.
        """
        config = self._config
        if not config.kl_coef:
            return ()
        if config.reference == "environment":
            reference_S = [
                row_T[1:] for row_T in _own_rows(batch, "ref_logprobs", "trainer.reference")
            ]
        else:
            short = [i for i, sequence in enumerate(sequences) if self._fits(sequence)]
            found = await self._policy.reference([sequences[i] for i in short]) if short else ()
            rows = dict(zip(short, found, strict=True))
            reference_S = [rows.get(i, sequence.logprobs_N) for i, sequence in enumerate(sequences)]
        return tuple(
            np.concatenate(
                [[0.0], np.where(s.actions_N, config.kl_coef * (s.logprobs_N - reference_N), 0.0)]
            )
            for s, reference_N in zip(sequences, reference_S, strict=True)
        )

    async def _importance(
        self, sequences: Sequence[Example]
    ) -> tuple[Sequence[Example], list[FloatArray], float | None]:
        """How much each token counts, and the sequences, with present log-probabilities where
        another one sampled.

        Another one is an older version, the policy at another temperature, or, of any version, a
        sampler that does not compute what the trainer does. Truncated importance sampling (IMPALA,
        arXiv 1802.01561) or a mask, by the ratio of the present policy to the sampler. The loss's
        own ratio then starts from the present policy, as in decoupled PPO (arXiv 2110.00641).
        """
        config, version = self._config, self._policy.version
        importance = [np.ones(len(sequence.tokens_N) + 1) for sequence in sequences]
        every_one = self._policy.tempered or not self._policy.exact
        others = [
            i
            for i, sequence in enumerate(sequences)
            if (every_one or sequence.versions not in (None, (version, version)))
            and self._fits(sequence)
        ]
        if config.correction == "none" or not others:
            return sequences, importance, None
        corrected, present = (
            list(sequences),
            await self._policy.forward([sequences[i] for i in others]),
        )
        num_bounded = num_tokens = 0
        for i, present_N in zip(others, present, strict=True):
            actions_N = sequences[i].actions_N
            ratio_N = np.exp(
                np.where(actions_N, present_N - sequences[i].logprobs_N.astype(np.float64), 0.0)
            )
            outside_N = ratio_N > config.ratio_cap
            if config.correction == "mask":
                outside_N |= ratio_N < 1.0 / config.ratio_cap
            bound = config.ratio_cap if config.correction == "truncate" else 0.0
            importance[i][1:] = np.where(outside_N, bound, ratio_N)
            corrected[i] = replace(
                sequences[i], logprobs_N=np.where(actions_N, present_N, 0.0).astype(np.float32)
            )
            num_bounded, num_tokens = (
                num_bounded + int(outside_N.sum()),
                num_tokens + int(actions_N.sum()),
            )
        return corrected, importance, num_bounded / max(1, num_tokens)

    def _fits(self, sequence: Example) -> bool:
        """Longer sequences are left out of every pass."""
        return len(sequence.tokens_N) < self._config.max_token_trainer_length


def _own_rows(
    batch: Batch, name: Literal["advantages", "ref_logprobs"], setting: str
) -> list[FloatArray]:
    """The environments' own numbers per token, S x T; `setting`: what asks for them."""
    rows: list[FloatArray] = []
    for index, group in enumerate(batch.groups):
        own: tuple[tuple[float, ...], ...] = getattr(group, name)
        if not own or not all(np.isfinite(row).all() for row in own):
            raise InvalidData(
                f"Group {index} of the batch has no {name} of its own, or one is not finite.",
                f"{setting} is 'environment'.",
                f"Let the environment send one number per token, or set {setting} to another "
                f"value. {FIX}",
            )
        rows += (np.asarray(row, dtype=np.float64) for row in own)
    return rows


def _of_turns(turns: Turns, rows_S: Sequence[FloatArray]) -> FloatArray:
    """The sum over each turn's tokens of what each sequence has for its own, shape (K,)."""
    return np.array([float(rows_S[s.sequence][s.start : s.stop].sum()) for s in turns.spans_K])


def _implicit_reward_gap(
    turns: Turns, penalties_S: Sequence[FloatArray], sequences: Sequence[Example], kl_coef: float
) -> float | None:
    """How much further the policy has moved towards its better answers than towards its worse ones.

    Of each group: the log-ratio of policy to reference per token, mean over the episodes above the
    group's mean score, less the same of those below; mean over groups. That ratio is the policy's
    implicit reward (DPO, arXiv 2305.18290). None without a reference, or where no group's scores
    differ.
    """
    if not penalties_S:
        return None
    episode_S = np.zeros(len(sequences), dtype=np.int64)
    episode_S[[span.sequence for span in turns.spans_K]] = turns.episode_K
    ratio_E = np.bincount(
        episode_S, [penalty_T.sum() / kl_coef for penalty_T in penalties_S], turns.num_episodes
    )
    tokens_E = np.bincount(
        episode_S, [sequence.actions_N.sum() for sequence in sequences], turns.num_episodes
    )
    mean_E = ratio_E / np.maximum(tokens_E, 1)
    gaps: list[float] = []
    for group in np.unique(turns.group_E):
        mine_E = (turns.group_E == group) & (tokens_E > 0)
        scores, means = turns.scores_E[mine_E], mean_E[mine_E]
        if scores.size and scores.min() < scores.max():
            better, worse = scores > scores.mean(), scores < scores.mean()
            gaps.append(float(means[better].mean() - means[worse].mean()))
    return float(np.mean(gaps)) if gaps else None
