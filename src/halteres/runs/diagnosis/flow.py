"""Rules of how it is learnt: truncation, sampler and trainer apart, starving and idling, numbers that are none.

Owns: their thresholds.
Never: judges what is learnt.
"""

from __future__ import annotations

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import Excursion, Finding, Rewards, number


class Truncation:
    """Many answers hit the token limit: their ends, and with them most rewards, are cut off. Arithmetic: none."""

    name = "truncation"
    MUCH, LITTLE, STEPS = 0.3, 0.2, 3

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """An environment's row."""
        share = number(row, "train/truncated")
        if share is None or not self._excursion.begins(share > self.MUCH, over=share < self.LITTLE):
            return None
        limits = {name: self._case.number(name) for name in ("max_new_tokens", "max_token_length")}
        told = ", ".join(f"{name} {value}" for name, value in limits.items() if value)
        return Finding(
            evidence=f"{share:.0%} of the answers were cut off by the token limit"
            f"{f' ({told})' if told else ''}, and more than {self.MUCH:.0%} in {self.STEPS} steps in a row.",
            remedy=self._case.spoilt(self._rewards.best) if self._rewards.collapsed else self._longer(),
        )

    def _longer(self) -> Remedy:
        return Remedy(self._case.go_on_with(self._case.longer_answers()), "or ask for short answers in the prompt.")


class LogprobDrift:
    """Sampler and trainer no longer compute the same function: on tokens of one policy version they must agree.

    The bound is for fp32, on the 99.9th percentile (`halteres.training.agreement`); the built-in model differs by 0.
    """

    name = "logprob_drift"
    MOST = 3e-5

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(1)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        apart = number(row, "logprobs/absdiff_p999")
        if apart is None or not self._excursion.begins(apart > self.MOST):
            return None
        return Finding(
            evidence=f"The 99.9th percentile of |sampler - trainer| log-probability is {apart:.1e} (alarm above "
            f"{self.MOST:.0e}), on tokens of the same policy version.",
            remedy=Remedy(
                (self._case.logs("engine"),),
                "run sampler and trainer in the same dtype: if they do, this is a defect of the engine.",
            ),
        )


class KlDrift:
    """What is trained on was sampled by a policy too far from the present one, all tokens counted.

    Nats per token. Trust regions of PPO's kind keep an update to about .01 to .02; at `max_staleness` 0 it is 0.
    """

    name = "kl_drift"
    MOST, LITTLE, STEPS = 0.05, 0.025, 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        apart = number(row, "logprobs/diff")
        if apart is None or not self._excursion.begins(abs(apart) > self.MOST, over=abs(apart) < self.LITTLE):
            return None
        staleness = self._case.trainer.max_staleness
        fresher = {"trainer.max_staleness": staleness // 2} if staleness else {}
        stale = number(row, "policy/staleness_max") or 0.0
        return Finding(
            evidence=f"Sampler and trainer are {apart:.2g} nats per token apart (alarm above {self.MOST:g}, "
            f"{self.STEPS} steps in a row); the oldest group was {stale:.0f} policy versions old.",
            remedy=Remedy(
                self._case.go_on_with({**fresher, **self._case.slower()}), "fresher batches, smaller updates."
            ),
        )


class Waiting:
    """One of trainer and environment waits nearly all the time for the other, and long enough to matter.

    Starved: the trainer waits for its batch. On-policy it always does; in arithmetic a fifth to a third of a step while
    there is much to train on, up to .98 where nearly no group has signal (such steps are not counted). Idle: the
    environment waits while the trainer trains.
    """

    STARVED, IDLE, LONG_S, STEPS = 0.9, 0.05, 2.0, 10
    SIGNAL = 0.5  # with fewer groups to train on, a short pass says nothing

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def _share(self, row: Row) -> tuple[float, float, float] | None:
        """Seconds waited for the batch and of the whole step, and their ratio; None where they say nothing."""
        waited, whole = number(row, "time/batch"), number(row, "time/step")
        silent = number(row, "groups/without_signal")
        if waited is None or not whole or (silent is not None and silent > self.SIGNAL):
            return None
        return waited, whole, waited / whole


class TrainerStarved(Waiting):
    """The trainer waits for batches."""

    name = "trainer_starved"

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        if (told := self._share(row)) is None:
            return None
        waited, whole, share = told
        if not self._excursion.begins(share >= self.STARVED and waited >= self.LONG_S):
            return None
        return Finding(
            evidence=f"In {self.STEPS} steps in a row the trainer waited {share:.0%} of the time for its batch "
            f"({waited:.1f} of {whole:.1f} s).",
            remedy=self._remedy(),
        )

    def _remedy(self) -> Remedy:
        workers, groups = self._case.number("max_num_workers"), self._case.groups_per_batch
        if workers and groups and workers < groups:
            more = self._case.go_on_with({"env.max_num_workers": groups})
            return Remedy(more, f"{workers} groups at a time do not fill a batch of {groups}.")
        words = "are answers needlessly long? If they are short, scoring is slow."
        return Remedy((self._case.rollouts("worst"),), words)


class EnvironmentIdle(Waiting):
    """The environment waits for the trainer."""

    name = "env_idle"

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        if (told := self._share(row)) is None:
            return None
        waited, whole, share = told
        if not self._excursion.begins(share <= self.IDLE and whole - waited >= self.LONG_S):
            return None
        staleness = self._case.trainer.max_staleness + 1
        return Finding(
            evidence=f"In {self.STEPS} steps in a row the environment waited {1 - share:.0%} of the time for the "
            f"trainer ({whole - waited:.1f} of {whole:.1f} s).",
            remedy=Remedy(
                self._case.go_on_with({"trainer.max_staleness": staleness}),
                "rollouts then go on while the trainer trains; or a smaller env.batch_size.",
            ),
        )


class EnvironmentAhead:
    """The environment makes far more than is taken: groups are set aside as too old."""

    name = "env_ahead"
    MUCH, LITTLE, STEPS = 0.3, 0.15, 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """An environment's row."""
        sent, lost = number(row, "groups/sent"), number(row, "groups/set_aside") or 0.0
        if not sent:
            return None
        share = lost / sent
        if not self._excursion.begins(share >= self.MUCH, over=share < self.LITTLE):
            return None
        return Finding(
            evidence=f"{lost:.0f} of {sent:.0f} groups were set aside by the trajectory server, most likely as too "
            f"old, and at least {self.MUCH:.0%} in {self.STEPS} steps in a row: they were sampled in vain.",
            remedy=self._remedy(),
        )

    def _remedy(self) -> Remedy:
        workers, groups = self._case.number("max_num_workers"), self._case.groups_per_batch
        if groups and (workers is None or workers > groups):
            return Remedy(self._case.go_on_with({"env.max_num_workers": groups}), "fewer groups under way at once.")
        older = {"trainer.max_staleness": self._case.trainer.max_staleness + 1}
        return Remedy(self._case.go_on_with(older), "groups may be older.")


class ScorerSlow:
    """One of the `rewards` takes most of the time that a group takes, and long enough to matter."""

    name = "scorer_slow"
    SHARE, LEAST_S, STEPS = 0.5, 1.0, 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """An environment's row."""
        group_s = number(row, "rollouts/group_s")
        if not group_s:
            return None
        seconds = {name: number(row, name) or 0.0 for name in row if name.startswith("reward/") and name.endswith("_s")}
        slowest = max(seconds, key=lambda name: seconds[name], default="")
        taken_s = seconds.get(slowest, 0.0)
        if not self._excursion.begins(taken_s >= self.LEAST_S and taken_s > self.SHARE * group_s):
            return None
        scorer = slowest.removeprefix("reward/").removesuffix("_s")
        return Finding(
            evidence=f"The reward '{scorer}' takes {taken_s:.1f} of the {group_s:.1f} s of a group, in {self.STEPS} "
            "steps in a row.",
            remedy=Remedy(
                (self._case.logs("env"),),
                f"give '{scorer}' more of the machine or a smaller model, or let more groups be under way "
                "(env.max_num_workers).",
            ),
        )


class HeldOutFailed:
    """Many held-out tasks failed: an evaluation's figures are of the others alone."""

    name = "eval_tasks_failed"
    SHARE = 0.1

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(1)

    def observe(self, row: Row) -> Finding | None:
        """An evaluation's row."""
        failed, rest = number(row, "eval/num_failed"), number(row, "eval/num_tasks")
        if failed is None or rest is None:
            return None
        if not self._excursion.begins(failed > self.SHARE * (failed + rest)):
            return None
        return Finding(
            evidence=f"{failed:.0f} of {failed + rest:.0f} held-out tasks failed; the figures are of the other "
            f"{rest:.0f}.",
            remedy=Remedy((self._case.logs("eval"),), "it says why each of them failed."),
        )


class LossIsNoNumber:
    """The loss of a step that was not skipped is NaN or infinite: metrics.jsonl has null for both."""

    name = "nan_loss"

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(1)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        if "train/loss" not in row:
            return None
        spoilt = row["train/loss"] is None and number(row, "train/skipped") == 0.0
        if not self._excursion.begins(spoilt):
            return None
        return Finding(
            evidence="The loss is no finite number: the adapter is spoilt from here on.",
            remedy=Remedy(self._case.go_on_with(self._case.slower()), "half the learning rate."),
        )
