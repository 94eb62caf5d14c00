"""The RL loop.

Owns: the order of things in one step.
Never: more than fits on a screen; each line is a small tested function elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from halteres.config.settings import Settings, TrainerSettings
from halteres.training.batch_source import Trajectories
from halteres.training.critic import Critic, learning
from halteres.training.datums import Example
from halteres.training.failures import LossNotFinite
from halteres.training.objective import Objective
from halteres.training.policy import Checkpoint, Pass, Policy, learning_rate, minibatches
from halteres.training.report import Report, Step, Timer
from halteres.training.stopping import StopReason

BASELINE = "step-000000"
FINAL = "final"


async def train(
    policy: Policy,
    trajectories: Trajectories,
    report: Report,
    settings: Settings,
    done: int = 0,
    critic: Critic | None = None,
) -> int:
    """Train from step `done` to `trainer.total_steps`, or until an end is asked for; answers the
    last step.
    """
    config, timer = settings.trainer, Timer()
    objective = Objective(config, policy, critic)
    async for step, batch in trajectories.batches(
        range(done + 1, config.total_steps + 1), lambda: policy.version
    ):
        timer.lap("batch")
        version, rate = policy.version, learning_rate(config, step)
        training_batch = await objective.training_batch(batch)
        warms_up = critic is not None and step <= config.critic_warmup_steps
        examples = () if warms_up else training_batch.examples.useful
        async with learning(critic, training_batch.values) as learnt:
            passes = [
                await learn(policy, one, rate, report, step)
                for one in minibatches(examples, config, settings.run.seed, step)
            ]
        timer.lap("train")
        await policy.publish()
        timer.lap("publish")
        report.step(
            Step(
                number=step,
                version=version,
                tempered=policy.tempered,
                learning_rate=rate,
                batch=batch,
                training_batch=training_batch,
                passes=passes,
                learnt=learnt.update,
                warms_up=warms_up,
                update_norm=policy.update_norm,
                seconds=timer.take(),
            )
        )
        if checkpoint_due(step, config):
            report.checkpoint(await save(policy, critic, checkpoint_name(step), step))
            timer.lap("checkpoint")  # part of the next step's row
        done = step
    return done


def checkpoint_due(step: int, config: TrainerSettings) -> bool:
    """True where a checkpoint or an evaluation (which samples one) falls on this step; the last
    step has "final".
    """
    periods = (config.checkpoint_every, config.eval_every)
    return step < config.total_steps and any(period and step % period == 0 for period in periods)


async def learn(
    policy: Policy, examples: Sequence[Example], rate: float, report: Report, step: int
) -> tuple[Sequence[Example], Pass]:
    """One optimiser step. Without examples none is taken: Adam's momentum alone must not move
    weights.
    """
    passed = policy.forward_backward(examples)
    stepped = policy.optim_step(rate)  # both promised before either is awaited
    try:
        outcome = await passed
        await stepped  # refuses a gradient that is not finite
    except LossNotFinite as error:
        report.diverged(step, error.what)
        raise
    return examples, outcome


async def open_to_environments(policy: Policy, report: Report, *, fresh: bool) -> None:
    """Publish the first version; a fresh run keeps it by name, for the evaluation before
    training.
    """
    await policy.publish()
    if fresh:
        report.checkpoint(await policy.save(BASELINE, 0, with_state=False))
    report.ready()


async def save(policy: Policy, critic: Critic | None, name: str, step: int) -> Checkpoint:
    """A checkpoint to resume from: the critic's state is there before the policy's is known."""
    if critic is not None:
        await critic.save()
    return await policy.save(name, step)


async def keep(policy: Policy, report: Report, critic: Critic | None = None) -> None:
    """A checkpoint of steps that are in none yet."""
    if (step := report.unsaved_step) is not None:
        report.checkpoint(await save(policy, critic, checkpoint_name(step), step))


def checkpoint_name(step: int) -> str:
    """What the checkpoint after this step is called."""
    return f"step-{step:06d}"


async def close(
    policy: Policy,
    report: Report,
    step: int,
    why: str,
    reason: StopReason | None = None,
    critic: Critic | None = None,
) -> None:
    """Write the final weights: a run has ended well only once they exist. `reason`: of an early
    end.
    """
    checkpoint = await save(policy, critic, FINAL, step)
    report.checkpoint(checkpoint, final=True, why=why, reason=reason)
