"""The rules that read rows of metrics.jsonl: what is learnt, how it is learnt, and where rewards
lead.

Thresholds were set on runs of the built-in model (arithmetic, three seeds of 40 steps; figures
beside each rule) and are silent on a healthy run, the stretch included where every answer is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.rewards.components import (
    DISAGREEMENT,
    OUT_OF_RANGE,
    QUANTILE,
    is_learned,
    reward_specs,
)
from halteres.rewards.panel import PROXY, divergences, transfers
from halteres.runs.diagnosis.pace import env_idle, environment_ahead, scorer_slow, trainer_starved
from halteres.runs.diagnosis.run_facts import (
    CEILING,
    Finding,
    History,
    RunFacts,
    components,
    number,
    rule,
    trend,
)
from halteres.runs.reading.evaluations import CORRECT, SCORE, Evaluation, differences, evaluation

# What is learnt. Silent where rewards are at their ceiling, save to say that nothing is left to
# learn.

SILENT = 0.95  # share of groups without signal from which on there is no gradient to speak of


@rule("no_reward_variance", steps=5)
def no_variance(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Nearly all groups have equal scores, step after step: there is no gradient.

    Nearly all, so that one lucky group of many does not hide it; at the ceiling of arithmetic .69
    to 1.00 of the groups are silent, never more than .94 for five steps in a row before all answers
    are right.
    """
    silent, mean = number(row, "groups/without_signal"), number(row, "reward/mean")
    if silent is None or mean is None:
        return None
    evidence = (
        f"In {no_variance.steps} steps in a row at least {SILENT:.0%} of the groups had equal "
        f"scores (now {silent:.0%}"
        f", mean reward {mean:.3g}): nothing is learnt from them."
    )
    if history.at_ceiling(mean):
        evidence = (
            f"Rewards are at their ceiling ({mean:.3g} of {history.highest:.3g}): all answers of "
            "nearly every group "
            f"were equally good in {no_variance.steps} steps in a row. Nothing is left to learn."
        )
        remedy = Remedy(
            (run.stop("after_step"), run.results()), "only harder tasks would teach more."
        )
    elif history.collapsed:
        remedy = run.spoilt(history.best)
    elif silent >= 1.0 and mean <= history.lowest:
        remedy = run.unscored()
    else:
        remedy = run.silent()
    return Finding(evidence=evidence, remedy=remedy, holds=silent >= SILENT, is_over=silent < 0.8)


@rule("reward_flat", steps=5, calm=20)
def reward_flat(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Rewards surely do not rise, or fall, below their ceiling.

    Flat: the line through the last 30 to 40 steps rises by less than a tenth of what the scale has
    left, even with two standard errors more, and not for certain. Where rewards scatter too much
    for that, nothing is reported. Falling: the line through 20 steps falls by .05 of the scale, and
    by three standard errors.

    Of runs that rise by .004 a step at most 1 % are reported, of flat ones with 256 rollouts a step
    all, after 34 steps (median; tasks of equal difficulty): benchmarks/alerts.py.
    """
    if number(row, "reward/mean") is None or len(history.means) < 20:
        return None
    means, newest = history.last_means(40), history.last_means(20)
    rise, errors = trend(newest)
    falls = rise < -0.05 * history.span and errors < -3
    if not falls:
        rise, errors = trend(means)
    over = means
    if falls:
        over = newest
    middle = fmean(over)
    highest_rise = rise + 2 * (rise / errors if errors else 0.0)
    is_flat = len(means) >= 30 and highest_rise < 0.1 * (history.highest - middle) and errors < 2
    # else that rule reports it
    has_variance = (number(row, "groups/without_signal") or 0.0) < SILENT
    went = (
        f"Over {len(over)} steps the mean reward went from {middle - rise / 2:.3g} to "
        f"{middle + rise / 2:.3g}"
    )
    evidence, remedy = (
        f"{went}: it falls.",
        Remedy(run.go_on_with(run.rate_times()), "a smaller learning rate."),
    )
    if falls and history.collapsed:
        remedy = run.spoilt(history.best)
    elif not falls:
        evidence = f"{went}, and is not at its ceiling ({history.highest:.3g})."
        words, faster = "if those are honest tries at the task:", run.go_on_with(run.rate_times(2))
        remedy = Remedy((run.rollouts("worst"),), words, faster)
    holds = (falls or is_flat) and has_variance and not history.at_ceiling(fmean(newest))
    return Finding(evidence=evidence, remedy=remedy, holds=holds)


@rule("entropy_collapse", steps=5)
def entropy_collapse(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The policy answers the same again and again, though its rewards are not at their ceiling.

    Below a tenth of the median of the first three steps. Arithmetic goes from .15 nats per token to
    .001 to .009, which is 1 to 6 % of it, as it ought to: rewards are at their ceiling by then. At
    .87 of the scale it has 29 %.
    """
    entropy, mean = number(row, "policy/entropy"), number(row, "reward/mean")
    if entropy is None or mean is None or (before := history.at_first("entropy", entropy)) is None:
        return None
    share = 1.0
    if before:
        share = entropy / before
    return Finding(
        evidence=f"The policy's entropy is {entropy:.2g} nats per token, {share:.0%} of what it "
        "began with "
        f"({before:.2g}), at a mean reward of {mean:.3g}: it explores no more.",
        remedy=Remedy(
            (run.stop(), run.begin_anew({**run.rate_times(), **run.larger_groups()})),
            "lost entropy does not come back.",
        ),
        holds=entropy < 0.1 * before and not history.at_ceiling(mean),
        # at the ceiling of rewards a policy that has decided is what was wanted
        is_over=entropy > 0.2 * before or history.at_ceiling(mean),
    )


# What is learnt wrongly: rewards rise, and held-out answers, or the panel, do not.


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What held-out answers and rewards did between two evaluations."""

    before: Evaluation
    after: Evaluation
    reward_before: float  # mean around the first
    reward_after: float  # ... and around the second
    span: float  # of the rewards' scale

    @property
    def rise(self) -> float:
        """Of the mean reward."""
        return self.reward_after - self.reward_before

    def highest_gain(self, name: str, confidence: float) -> float:
        """The most that this held-out figure can have risen; unbounded where nothing is known of
        its error.
        """
        difference = differences(self.before, self.after, confidence).get(name)
        if difference and difference.interval:
            return difference.interval[1]
        return math.inf

    def is_worse(self, confidence: float) -> bool:
        """Held-out answers fell by .05, for certain, while rewards rose by .05 of the scale."""
        fell = self.before.figures[CORRECT] - self.after.figures[CORRECT] >= 0.05
        rose = self.rise >= 0.05 * self.span > 0
        return fell and rose and self.highest_gain(CORRECT, confidence) < 0

    def is_left_behind(self, confidence: float) -> bool:
        """Rewards rose by half of the scale, and held-out answers, for certain, by less than a
        quarter of that.
        """
        due = 0.25 * self.rise
        if (
            not self.rise >= 0.5 * self.span > 0
            or self.after.figures[CORRECT] + due / self.span >= CEILING
        ):
            return False
        if self.highest_gain(CORRECT, confidence) >= due / self.span:
            return False
        return SCORE not in self.after.figures or self.highest_gain(SCORE, confidence) < due

    def __str__(self) -> str:
        first, last = self.before.figures[CORRECT], self.after.figures[CORRECT]
        went = "went"
        if last < first:
            went = "fell"
        return (
            f"From step {self.before.step} to {self.after.step} the held-out share correct {went} "
            f"from {first:.3g} to "
            f"{last:.3g}, while the mean reward rose from {self.reward_before:.3g} to "
            f"{self.reward_after:.3g}."
        )


@rule("reward_hacking", steps=2)
def reward_hacking(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Held-out answers do not follow the rewards: the scorer is being pleased, or training tasks
    learnt by heart.

    They are worse than at the best evaluation so far, or left behind since the first one, at two
    evaluations in a row; a fall that leaves only .002 for chance is reported at once. Evaluations
    are compared task by task where their samples are there, by their standard errors otherwise;
    where neither is known, nothing is reported.

    Certain: each of the pairs that could have been compared so far has its part of a chance of .01,
    since the best was chosen by looking. Of runs whose held-out share never falls at most 1 % are
    reported within 20 evaluations, of those that fall from .6 to .4 over five (128 tasks, 4
    samples) over 99 %: benchmarks/alerts.py.
    """
    rows = [row for row in history.evaluations if number(row, CORRECT) is not None]
    if number(row, CORRECT) is None or not history.means:
        return None
    *_, now = evaluations = [evaluation(run.folder, row, run.success_threshold) for row in rows]
    earlier = [one for one in evaluations if one.step < now.step]
    if not earlier:
        return None
    steps = sorted(history.means)

    # of the last steps up to this one; before training, of the first ones
    def mean_around(step: int) -> float:
        return fmean(
            history.means[one] for one in ([it for it in steps if it <= step][-5:] or steps[:5])
        )

    def since(before: Evaluation) -> _Stretch:
        return _Stretch(before, now, mean_around(before.step), mean_around(now.step), history.span)

    # of two-sided intervals of which one bound is looked at
    def confidence(chance: float) -> float:
        return 1 - 2 * chance / math.comb(len(evaluations), 2)

    from_best = since(max(earlier, key=lambda one: (one.figures[CORRECT], one.step)))
    from_first = since(earlier[0])
    is_worse = from_best.is_worse(confidence(0.01))
    words = "see what scores high and is wrong, fix the scorer, then"
    return Finding(
        evidence=str(from_best if is_worse else from_first),
        remedy=Remedy((run.stop(), run.rollouts("best")), words, (run.begin_anew({}),)),
        holds=is_worse or from_first.is_left_behind(confidence(0.01)),
        at_once=from_best.is_worse(confidence(0.002)),
    )


@rule("panel_disagrees")
def panel_disagrees(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Most of what the trained reward has gained on held-out answers does not show in the panel; or
    a rubric's criteria of presence rise while those of correctness fall. Compared with the first
    evaluation, by the worst member.
    """
    base = next(
        (row for row in history.evaluations if number(row, f"eval/{PROXY}") is not None), row
    )
    if number(row, f"eval/{PROXY}") is None or base is row:
        return None
    low = [transfer for transfer in transfers(base, row) if transfer.is_low]
    diverging = list(divergences(base, row))
    evidence = ""
    if low:
        worst = min(low, key=lambda transfer: transfer.panel)
        evidence = (
            f"Held out, the reward gained {worst.proxy:.2g} standard deviations and "
            f"'{worst.member}' of the panel "
            f"{worst.panel:.2g}: {worst.share or 0:.0%} of the gain transfers."
        )
    elif diverging:
        found = diverging[0]
        evidence = (
            f"By '{found.component}', criteria of presence rose by {found.presence:.2g} and those "
            "of correctness fell "
            f"by {-found.correctness:.2g}."
        )
    words = (
        "see what the reward pays for and the panel does not; then fix `rewards` and start "
        "again from an earlier"
    )
    remedy = Remedy((run.stop(), run.rollouts("best")), f"{words} checkpoint.")
    return Finding(evidence=evidence, remedy=remedy, holds=bool(low or diverging))


# Drift: the policy leads the rewards to where they were not made for, or is paid for something
# else. Each must hold for several steps in a row: one batch is small, and an alarm may end a run.


def _see_what_pays(run: RunFacts, fix: str) -> Remedy:
    words = f"is it the answers that became better? If not, {fix}, and"
    return Remedy((run.rollouts("best"),), words, (run.stop(),))


@rule("ensemble_disagrees", steps=3)
def ensemble_disagrees(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The members of an ensemble are further apart, on the mean of a batch, than on 95 % of the
    base model's answers.

    The limit is that of the first evaluation. A mean of many answers stays far below their 95 %
    quantile by chance.
    """
    limits: dict[str, float] = {}
    for evaluated in reversed(history.evaluations):
        limits.update(components(evaluated, "eval/reward/", f"/{DISAGREEMENT}{QUANTILE}"))
    apart = {
        name: value
        for name, value in components(row, "reward/", f"/{DISAGREEMENT}")
        if name in limits
    }
    if not apart:
        return None
    worst = max(apart, key=lambda name: apart[name] - limits[name])
    fix = "let the ensemble count its worst member (combination: min)"
    if any(spec.name == worst and spec.combination == "min" for spec in reward_specs(run.env)):
        fix = "train its members on answers like these"
    return Finding(
        evidence=f"The members of '{worst}' are {apart[worst]:.2g} apart, "
        f"{ensemble_disagrees.steps} steps in a row "
        f"above {limits[worst]:.2g}, the 95 % quantile of the base model's answers.",
        remedy=_see_what_pays(run, fix),
        holds=apart[worst] > limits[worst],
    )


@rule("scores_out_of_range", steps=3)
def scores_out_of_range(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Many scores of a reward model are beyond every one that it was calibrated on.

    Of n pairs like the answers, about 1 in n scores is; a fifth is of another kind, whatever the
    pairs were.
    """
    model, share = max(
        components(row, "reward/", f"/{OUT_OF_RANGE}"), key=lambda it: it[1], default=("", None)
    )
    if share is None:
        return None
    return Finding(
        evidence=f"{share:.0%} of the scores of '{model}' are lower or higher than any that it "
        "was calibrated on, more "
        f"than 20% in {scores_out_of_range.steps} steps in a row.",
        remedy=_see_what_pays(run, f"train or calibrate '{model}' on answers like these"),
        holds=share > 0.2,
        is_over=share < 0.1,
    )


@rule("reward_follows_length", steps=8)
def reward_follows_length(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Within a group, longer answers score higher, and answers are more than twice as long as they
    were at first.

    Only where a reward model or a judge scores: a verifier may rightly pay for worked-out answers.
    So may a model, so length must have grown, too: on arithmetic the correlation is .7 to .9 from
    the first step on, and answers that are learnt honestly become up to 1.7 times as long.
    Spearman's, mean over the groups of a batch. Where length counts for nothing, a batch of one
    group of four is above .5 with a chance of .21, and 8 of them in a row with 4e-6; of one group
    of two with .5 and .004.
    """
    tokens, count = number(row, "tokens/action"), number(row, "sequences/count")
    if not tokens or not count or not is_learned(run.env):
        return None
    if (before := history.at_first("length", tokens / count)) is None:
        return None
    longer, follows = tokens / count / before, number(row, "groups/length_correlation") or 0.0
    return Finding(
        evidence=f"Longer answers score higher (rank correlation {follows:.2f} within a group), "
        "and they are "
        f"{longer:.2g} times as long as at first, {reward_follows_length.steps} steps in a row.",
        remedy=_see_what_pays(
            run, "where length is not what is wanted, take it off with a reward function"
        ),
        holds=follows > 0.5 and longer > 2.0,
    )


@rule("kl_over_budget", steps=3)
def kl_over_budget(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The policy is further from its reference than `trainer.kl_budget` allows."""
    apart, budget = number(row, "policy/kl_reference"), run.trainer.kl_budget
    if apart is None or budget is None:
        return None
    stronger = run.go_on_with({"trainer.kl_coef": float(f"{2 * run.trainer.kl_coef:.3g}")})
    return Finding(
        evidence=f"The policy is {apart:.2g} nats per token from its reference, "
        f"{kl_over_budget.steps} steps in a row "
        f"above trainer.kl_budget ({budget:g}).",
        remedy=Remedy(stronger, "twice the penalty. Earlier checkpoints:", (run.results(),)),
        holds=apart > budget,
    )


@rule("judge_fails", steps=3)
def judge_fails(run: RunFacts, history: History, row: Row) -> Finding | None:
    """A judge gives no grade to many of the answers that it is asked about: they go unscored, by no
    choice of ours.

    What it was not asked for want of budget does not count.
    """
    shares: dict[str, float] = {}
    for judge in sorted({name.split("/")[1] for name in row if name.startswith("judge/")}):
        kinds = ("read", "failed", "unreadable")
        read, failed, unreadable = (number(row, f"judge/{judge}/{kind}") or 0.0 for kind in kinds)
        if num_questions := read + failed + unreadable:
            shares[judge] = (failed + unreadable) / num_questions
    if not shares:
        return None
    worst = max(shares, key=lambda judge: shares[judge])
    words = "then a judge that answers, or fewer requests at once (its concurrency)."
    return Finding(
        evidence=f"The judge of '{worst}' failed, or could not be read, for {shares[worst]:.0%} "
        "of the questions, more "
        f"than 20% in {judge_fails.steps} steps in a row.",
        remedy=Remedy((run.logs("env"),), words),
        holds=shares[worst] > 0.2,
        is_over=shares[worst] < 0.1,
    )


# How it is learnt: truncation, sampler and trainer apart, starving and idling, numbers that are not
# finite.


@rule("truncation", steps=3)
def truncation(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Many answers hit the token limit: their ends, and with them most rewards, are cut off.
    Arithmetic: none.
    """
    share = number(row, "train/truncated")
    if share is None:
        return None
    limits = {name: run.number(name) for name in ("max_new_tokens", "max_token_length")}
    given = ", ".join(f"{name} {value}" for name, value in limits.items() if value)
    paid = number(row, "train/truncated_paid")
    of_paid = ""
    if paid is not None:
        of_paid = f" ({paid:.0%} of the paid ones)"
    longer = Remedy(run.go_on_with(run.longer_answers()), "or ask for short answers in the prompt.")
    return Finding(
        evidence=f"{share:.0%} of the answers{of_paid} were cut off by the token "
        f"limit{f' ({given})' if given else ''}, "
        f"above 30% in {truncation.steps} steps in a row.",
        remedy=run.spoilt(history.best) if history.collapsed else longer,
        holds=share > 0.3,
        is_over=share < 0.2,
    )


@rule("logprob_drift")
def logprob_drift(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Sampler and trainer no longer compute the same function: on tokens of one policy version they
    must agree.

    The bound is for fp32, on the 99.9th percentile (`halteres.training.logprob_mismatch`); the
    built-in model differs by 0, vLLM in fp32 by 7e-6. vLLM and the engine in bfloat16 are judged by
    half the mean square: two right implementations differed by 9e-4.
    """
    name, what, most = "logprobs/absdiff_p999", "The 99.9th percentile of", 3e-5
    if run.samples_roughly:
        name, what, most = "kl_sample_train_v2", "Half the mean square of", 2e-3
    apart = number(row, name)
    if apart is None:
        return None
    words = "run sampler and trainer in the same dtype: if they do, this is a defect of the engine."
    return Finding(
        evidence=f"{what} |sampler - trainer| log-probability is {apart:.1e} "
        "(alarm above "
        f"{most:.0e}), on tokens of the same policy version.",
        remedy=Remedy((run.logs("engine"),), words),
        holds=apart > most,
    )


@rule("kl_drift", steps=3)
def kl_drift(run: RunFacts, history: History, row: Row) -> Finding | None:
    """What is trained on was sampled by a policy too far from the present one, all tokens counted.

    Nats per token. Trust regions of PPO's kind keep an update to about .01 to .02; at
    `max_staleness` 0 it is 0. Silent at a temperature other than 1, at which the two differ
    rightly: a temperature of 1.6 alone makes .63.
    """
    apart, most = number(row, "logprobs/diff"), 0.05
    if apart is None or run.env.get("temperature", 1.0) != 1.0:
        return None
    staleness, oldest = run.trainer.max_staleness, number(row, "policy/staleness_max") or 0.0
    fresher = {}
    if staleness:
        fresher = {"trainer.max_staleness": staleness // 2}
    return Finding(
        evidence=f"Sampler and trainer are {apart:.2g} nats per token apart (alarm above "
        f"{most:g}, {kl_drift.steps} "
        f"steps in a row); the oldest group was {oldest:.0f} policy versions old.",
        remedy=Remedy(
            run.go_on_with({**fresher, **run.rate_times()}), "fresher batches, smaller updates."
        ),
        holds=abs(apart) > most,
        is_over=abs(apart) < most / 2,
    )


@rule("eval_tasks_failed")
def eval_tasks_failed(run: RunFacts, history: History, row: Row) -> Finding | None:
    """Many held-out tasks failed: an evaluation's figures are of the others alone."""
    failed, rest = number(row, "eval/num_failed"), number(row, "eval/num_tasks")
    if failed is None or rest is None:
        return None
    return Finding(
        evidence=(
            f"{failed:.0f} of {failed + rest:.0f} held-out tasks failed; the figures are of "
            f"the other {rest:.0f}."
        ),
        remedy=Remedy((run.logs("eval"),), "it says why each of them failed."),
        holds=failed > 0.1 * (failed + rest),
    )


@rule("nan_loss")
def nan_loss(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The loss of a step that was not skipped is NaN or infinite: metrics.jsonl has null for
    both.
    """
    if "train/loss" not in row:
        return None
    return Finding(
        evidence="The loss is no finite number: the adapter is spoilt from here on.",
        remedy=Remedy(run.go_on_with(run.rate_times()), "half the learning rate."),
        holds=row["train/loss"] is None and number(row, "train/skipped") == 0.0,
    )


DRIFT = (
    *(
        reward_hacking,
        panel_disagrees,
        ensemble_disagrees,
        scores_out_of_range,
        reward_follows_length,
        kl_over_budget,
    ),
    judge_fails,
)
"""Rules at whose alerts a run with `on_drift: stop` ends."""

RULES = (
    *(no_variance, reward_flat, entropy_collapse, *DRIFT),
    *(
        truncation,
        logprob_drift,
        kl_drift,
        trainer_starved,
        env_idle,
        environment_ahead,
        scorer_slow,
    ),
    *(eval_tasks_failed, nan_loss),
)
"""Every rule that reads rows."""
