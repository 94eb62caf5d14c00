"""The trainer's process: `python -m halteres.training --run DIR`, of a run by reinforcement
learning or on a file.

Exit codes: 0: the final weights exist. 1: a failure, in one sentence on stderr and in
control/failure.json. 2: usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from pathlib import Path

from halteres import process
from halteres.clients.retries import Retries
from halteres.clients.trajectories import TrainerClient
from halteres.config import environ
from halteres.config.file_training import FILE, FileTraining
from halteres.errors import HalteresError, as_failure
from halteres.files import replace_file
from halteres.redaction import Redactor
from halteres.tokenizer import load_tokenizer
from halteres.training.batch_source import Trajectories, registration_of
from halteres.training.critic import critic_of
from halteres.training.failures import BatchNotOurs, NoExperience
from halteres.training.file_data import check_digest, read_data
from halteres.training.file_loop import close_file_run, train_on_file
from halteres.training.folder import RunFolder
from halteres.training.loop import close, keep, open_to_environments, train
from halteres.training.objective import corrected
from halteres.training.policy import Policy, samples_exactly
from halteres.training.report import Report, Rollouts
from halteres.training.stopping import Stopping, obey_signals


def main(arguments: list[str] | None = None) -> int:
    """Run the trainer; answers the exit code."""
    environ.stay_offline()
    process.begin("trainer")
    parser = argparse.ArgumentParser(
        prog="python -m halteres.training", description="Train one run."
    )
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    folder = RunFolder(parser.parse_args(arguments).run)
    try:
        if (folder.path / FILE).exists():
            asyncio.run(run_on_file(folder))
        else:
            asyncio.run(run(folder))
    except HalteresError as error:
        write_failure(folder, error)
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


async def run(folder: RunFolder) -> None:
    """Train one run from its directory, to the end or until asked to stop."""
    settings, wiring = folder.settings(), folder.wiring()
    stopping = Stopping(folder.stop, settings.run.max_minutes)
    obey_signals(stopping)
    # An environment of atroposlib's writes no rollouts: they are written here, where the base
    # model's tokenizer is.
    rollouts = None
    if wiring.is_foreign and wiring.tokenizer and Path(wiring.tokenizer).is_dir():
        rollouts = Rollouts(folder.rollouts, load_tokenizer(wiring.tokenizer))
    report = Report(folder, success_threshold=settings.run.success_threshold, rollouts=rollouts)
    done = wiring.resume_from.step if wiring.resume_from else 0
    registration = registration_of(settings, wiring, folder.path, done)
    if (point := wiring.resume_from) is None:
        policy = await Policy.create(wiring, settings.trainer, settings.run.seed)
    else:
        policy = await Policy.resume(
            wiring, settings.trainer, point.state_path, folder.version_at(point)
        )
    policy.exact = await samples_exactly(wiring)
    given = folder.is_given("trainer.correction", settings.trainer.correction != "none")
    trainer = corrected(settings.trainer, exact=policy.exact, given=given)
    settings = settings.model_copy(update={"trainer": trainer})
    await open_to_environments(policy, report, fresh=wiring.resume_from is None)
    report.begins(settings.env, done, tempered=policy.tempered)
    if not policy.exact:
        report.inexact(trainer.correction)
    if not policy.takes_unembed:
        report.without_unembed()
    trajectories = Trajectories(
        TrainerClient(wiring.api_url, Retries.for_seconds(4.0)), registration, stopping
    )
    await trajectories.register()
    stopping.start_clock()
    async with critic_of(wiring.critic_url, trainer, settings.run.seed, done) as critic:
        try:
            done = await train(policy, trajectories, report, settings, done, critic)
        except (NoExperience, BatchNotOurs):
            # the service is well: what was learnt need not be lost with the environment
            await keep(policy, report, critic)
            raise
        request = stopping.request()
        done_all = f"all {settings.trainer.total_steps} steps are done"
        await close(
            policy,
            report,
            done,
            request.why if request else done_all,
            request.reason if request else None,
            critic,
        )


async def run_on_file(folder: RunFolder) -> None:
    """Train one run on its file, to the end or until asked to stop."""
    settings, wiring = folder.settings(), folder.wiring()
    training = FileTraining.read(folder.path)
    stopping = Stopping(folder.stop, settings.run.max_minutes)
    obey_signals(stopping)
    tokenizer = load_tokenizer(training.tokenizer or wiring.tokenizer)
    data = await asyncio.to_thread(
        read_data, training, tokenizer, settings.trainer.max_token_trainer_length
    )
    check_digest(data, training)
    point, done = wiring.resume_from, 0
    if point is None:
        policy = await Policy.create(wiring, settings.trainer, settings.run.seed)
    else:
        done = point.step
        policy = await Policy.resume(
            wiring, settings.trainer, point.state_path, folder.version_at(point)
        )
    report = Report(folder)
    report.ready()
    stopping.start_clock()
    done = await train_on_file(policy, data, report, settings, training, stopping, done)
    await close_file_run(policy, report, stopping, done)


def write_failure(folder: RunFolder, error: HalteresError) -> None:
    """Write why the trainer ends, for whoever reports the run's end; on a full disk it is on stderr
    alone.
    """
    with contextlib.suppress(OSError):
        failure = Redactor.of_this_process().json({"role": "trainer", **as_failure(error)})
        replace_file(folder.failure, json.dumps(failure).encode())


if __name__ == "__main__":
    # tinker 0.38 leaves threads running; an interpreter that ended beside them was once killed by
    # SIGABRT, all said.
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
