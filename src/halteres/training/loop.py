"""The RL loop.

Owns: the order of things in one step.
Never: more than fits on a screen; each line is a small tested function elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from halteres.config.settings import TrainerSettings
from halteres.training.advantages import group_relative
from halteres.training.datums import Example, to_examples
from halteres.training.experience import Trajectories
from halteres.training.failures import LossNotFinite
from halteres.training.learner import Learner, Pass
from halteres.training.report import Report, Step, Timer

BASELINE = "step-000000"
FINAL = "final"


async def train(
    policy: Learner, trajectories: Trajectories, report: Report, config: TrainerSettings, done: int = 0
) -> int:
    """Train from step `done` to `config.total_steps`, or until an end is asked for; answers the last step."""
    timer = Timer()
    async for step, batch in trajectories.batches(range(done + 1, config.total_steps + 1), lambda: policy.version):
        timer.lap("batch")
        version = policy.version
        advantages = group_relative([group.scores for group in batch.groups], config.advantage)
        examples = to_examples(batch, advantages, config.max_token_trainer_length)
        passed = await learn(policy, examples.kept, report, step)
        timer.lap("train")
        await policy.publish()
        timer.lap("publish")
        report.step(
            Step(
                number=step,
                version=version,
                learning_rate=config.learning_rate,
                batch=batch,
                advantages=advantages,
                examples=examples,
                passed=passed,
                update_norm=policy.update_norm,
                seconds=timer.take(),
            )
        )
        if checkpoint_due(step, config):
            report.checkpoint(await policy.save(checkpoint_name(step), step))
            timer.lap("checkpoint")  # told in the next step's row
        done = step
    return done


def checkpoint_due(step: int, config: TrainerSettings) -> bool:
    """True where a checkpoint or an evaluation (which samples one) falls on this step; the last step has "final"."""
    periods = (config.checkpoint_every, config.eval_every)
    return step < config.total_steps and any(period and step % period == 0 for period in periods)


async def learn(policy: Learner, examples: Sequence[Example], report: Report, step: int) -> Pass | None:
    """One optimiser step; None where there is nothing to learn from (Adam's momentum alone must not move weights)."""
    if not examples:
        return None
    passed = policy.forward_backward(examples)
    stepped = policy.optim_step()  # both promised before either is awaited
    try:
        outcome = await passed
        await stepped  # refuses a gradient that is not finite
    except LossNotFinite as error:
        report.diverged(step, error.what)
        raise
    return outcome


async def open_to_environments(policy: Learner, report: Report, *, fresh: bool) -> None:
    """Publish the first version; a fresh run keeps it by name, for the evaluation before training."""
    await policy.publish()
    if fresh:
        report.checkpoint(await policy.save_baseline(BASELINE))
    report.ready()


async def keep(policy: Learner, report: Report) -> None:
    """A checkpoint of steps that are in none yet."""
    if (step := report.unsaved_step) is not None:
        report.checkpoint(await policy.save(checkpoint_name(step), step))


def checkpoint_name(step: int) -> str:
    """What the checkpoint after this step is called."""
    return f"step-{step:06d}"


async def close(policy: Learner, report: Report, step: int, why: str) -> None:
    """Write the final weights: a run has ended well only once they exist."""
    report.checkpoint(await policy.save(FINAL, step), final=True, why=why)
