"""Measuring a policy on held-out tasks: an environment's `evaluate`, on demand against any service,
or on snapshots of a run as it goes on, one at a time.

On demand a run's own settings and interpreter hold where its environment is measured, else the
environment's defaults. In a run, an evaluation that goes wrong is an event, and so is that there is
nothing to evaluate: neither fails it. No key of a service stays in what an evaluation leaves.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import yaml

from halteres.config.program import NOTHING_TO_EVALUATE, EnvironmentProgram, describe, find_program
from halteres.config.settings import ENV_WIRING
from halteres.errors import EnvironmentFailed, HalteresError, ProcessFailed
from halteres.files import replace_file
from halteres.models import model_folder
from halteres.observe.metrics import Row, append_row, read_rows
from halteres.process import Hung, Lifeline, run_caught
from halteres.redaction import Redactor
from halteres.rewards.components import secret_variables
from halteres.rewards.panel import PROXY, shares
from halteres.runs.directory import RunDirectory, StateWriter
from halteres.runs.planning.models import FIELDS as REWARD_FIELDS
from halteres.runs.planning.models import models_home
from halteres.runs.reading.evaluations import LOGGED, figures_of
from halteres.runs.reading.failures import frame_in, how, hung_at, reason
from halteres.runs.reading.named_weights import newest_policy
from halteres.runs.servers import Server
from halteres.runs.supervision.hang_watch import LOOK_S, HangWatch
from halteres.runs.supervision.run_processes import spawn

WITHIN_S = 3600.0  # how long a measurement may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Who is measured, on what."""

    program: EnvironmentProgram
    env: Mapping[str, Any]  # the environment's settings
    base: str  # base model
    tokenizer: str  # folder of the base model, or its name
    policy: str  # tinker:// path, or the base model
    run: RunDirectory | None = None

    @property
    def own_limits(self) -> dict[str, Any]:
        """How long its event loop may hang, where its file says so and its settings do not."""
        with suppress(HalteresError):
            config = describe(self.program, self.env).config
            return {name: config[name] for name in ("stuck_s",) if name in config}
        return {}


def examination(
    environment: str, run: RunDirectory | None, model: str, policy: str | None = None
) -> Examination:
    """What to measure: a run's weights (`policy`: which; None: its newest), or the base model where
    there is no run.

    A run's settings hold in its own environment; in another one, that one's defaults do.
    """
    if run is None:
        tokenizer = str(model_folder(model, models_home()) or model)
        return Examination(
            program=find_program(environment), env={}, base=model, tokenizer=tokenizer, policy=model
        )
    state, settings = run.state(), run.settings()
    program, env = state.program, dict[str, Any]()
    found = program
    if environment != state.environment:
        found = find_program(environment)
    if (found.path, found.variant_setting) == (program.path, program.variant_setting):
        # Reward models are named by their folders: the server that the run had for them is gone.
        own = {name: settings.env[name] for name in REWARD_FIELDS if name in settings.env}
        config = {**run.environment_config(), **own}
        # Of what a run fills in: its held-out tasks are drawn and judged with these; addresses are
        # not ours.
        shared = ("seed", "success_threshold")
        env = {
            name: value
            for name, value in config.items()
            if name not in ENV_WIRING or name in shared
        }
    else:
        program = found
    return Examination(
        program=program,
        env=env,
        base=settings.inference.model,
        tokenizer=state.tokenizer,
        policy=policy or newest_policy(run),
        run=run,
    )


def measure(
    exam: Examination, service: Server, settings: Mapping[str, Any], keep_in: Path | None = None
) -> dict[str, Any]:
    """Run the environment's `evaluate` verb against a service that has the weights; its figures.

    Args:
        exam: who, on what.
        settings: of the environment, which beat all others.
        keep_in: an existing folder for the evaluation's files, the samples among them; None: they
            are removed.

    Raises:
        EnvironmentFailed: it ended with an error, not in time, or without figures.
    """
    program, redactor = exam.program, Redactor([service.key] if service.key else [])
    url, key = f"{service.url}/runs/eval/v1", service.key or "x"
    server = {"model_name": exam.policy, "base_url": url, "api_key": key, "server_type": "sglang"}
    env = {
        **exam.env,
        **program.variant_setting,
        **settings,
        "tokenizer_name": exam.tokenizer,
        "use_wandb": False,
    }
    # which its user alone may look into
    with tempfile.TemporaryDirectory(prefix="halteres-") as ours:
        folder, config = keep_in or Path(ours), Path(ours, "config.yaml")
        config.write_text(yaml.safe_dump({"env": env, "openai": [server]}), encoding="utf-8")
        words = command(program, config, folder, program.name)
        if not exam.env:
            env = {**exam.own_limits, **env}
        watch = HangWatch.of(Path(ours, "heartbeat"), env)
        try:
            ended = run_caught(
                words,
                program.working_directory,
                WITHIN_S,
                secret_variables(env),
                variables=watch.asked.variable,
                is_hung=lambda pid: watch.is_hung({"pid": pid}),
            )
        except Hung as hung:
            where = frame_in(str(program.path), str(hung))
            raise _hung(f"{program.path.name} evaluate", watch, program, where) from None
        except TimeoutError as error:
            what = f"{program.path.name} evaluate took more than {WITHIN_S:g} s."
            raise EnvironmentFailed(
                what, "It was ended.", "Ask for fewer tasks or samples: --tasks, --samples."
            ) from error
        except OSError as error:
            what = f"{program.interpreter} cannot be started."
            raise EnvironmentFailed(what, f"{error.strerror or error}.") from error
        finally:
            strike_keys_out(folder, redactor)
        if ended.code != 0:
            last = reason(ended.err.strip().splitlines(), ended.code)
            what = f"{program.path.name} evaluate ended with exit code {ended.code}."
            raise EnvironmentFailed(what, redactor.text(last.removeprefix("error: ")))
        return {
            redactor.text(name): value
            for name, value in figures_of(program, folder, ended.out).items()
        }


def _hung(
    what: str, watch: HangWatch, program: EnvironmentProgram, where: str
) -> EnvironmentFailed:
    why = "Its stack shows nothing of its file."
    if where:
        why = f"It hung in {where}."
    next = "Mend it; env.stuck_s sets how long its event loop may hang."
    # which has no such setting
    if program.is_foreign:
        next = "A time limit there, or work off the event loop (a thread, a process), prevents it."
    return EnvironmentFailed(
        f"{what} gave no sign of life for {watch.silent_s:.0f} s and was ended.", why, next
    )


def command(
    program: EnvironmentProgram, settings: Path, folder: Path, name: str, *more: str
) -> tuple[str, ...]:
    """The command line of an evaluation that registers as `name`, takes its config from `settings`
    and leaves its files in `folder`; `more`: further arguments.
    """
    files = ("--config", str(settings), "--env.data_dir_to_save_evals", str(folder))
    return program.command_in_run("evaluate", *files, *more, metrics=folder / LOGGED, name=name)


def strike_keys_out(folder: Path, redactor: Redactor) -> None:
    """Take the keys out of what an evaluation in this folder says of its config."""
    file = folder / "evaluate_config.yaml"
    if file.is_file():
        replace_file(
            file, redactor.text(file.read_text(errors="replace", encoding="utf-8")).encode()
        )


EVALUATED_WITHIN_S = 1800.0  # how long one evaluation may take
# bytes of its output, from the end, in which its figures are looked for
LONGEST_ANSWER = 1024 * 1024


class NothingToEvaluate(ProcessFailed):
    """The environment says that it has no held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Sampler weights to evaluate."""

    step: int
    sampler_path: str


@dataclass(slots=True)
class Evaluator:
    """Evaluates snapshots in the order given; where it falls behind, those between first and newest
    are left out.
    """

    writer: StateWriter
    environment: EnvironmentProgram
    lifeline: Lifeline
    every: int  # steps; 0: only first and last
    _steps: set[int] = field(default_factory=set)  # that were, or will be, evaluated
    _pending: list[Snapshot] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _has_nothing: bool = False  # the environment has no held-out tasks

    def is_due(self, step: int, final: bool) -> bool:
        """Whether the checkpoint of this step is to be evaluated."""
        if step in self._steps or self._has_nothing:
            return False
        last = max(self._steps, default=0)
        crossed = self.every > 0 and step // self.every > last // self.every
        return step == 0 or final or crossed

    async def add(self, snapshot: Snapshot) -> None:
        """Evaluate this one when its turn comes."""
        async with self._changed:
            self._steps.add(snapshot.step)
            self._pending = [*(waiting for waiting in self._pending if waiting.step == 0), snapshot]
            self._changed.notify_all()

    def skip_up_to(self, step: int) -> None:
        """A resumed run has evaluated these already."""
        self._steps.add(step)

    async def work(self) -> None:
        """Evaluate what is pending, until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._pending))
                snapshot = self._pending[0]
            try:
                await self._evaluate(snapshot)
            except NothingToEvaluate as error:
                self._has_nothing = True
                self.writer.event("no_evaluation", step=snapshot.step, error=error.sentence)
            except (HalteresError, OSError) as error:
                self.writer.event("eval_failed", step=snapshot.step, error=str(error))
            async with self._changed:
                rest = []
                if not self._has_nothing:
                    rest = self._pending
                self._pending = [waiting for waiting in rest if waiting != snapshot]
                self._changed.notify_all()

    async def finished(self) -> None:
        """Return once nothing is left to evaluate."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._pending)

    async def _evaluate(self, snapshot: Snapshot) -> None:
        run, began = self.writer.run, time.monotonic()
        folder = run.path / "evals" / f"step_{snapshot.step}"
        # the command writes down its config, keys and all
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as answer:
            try:
                await self._run(snapshot, folder, answer)
            finally:
                strike_keys_out(folder, Redactor.of_this_process())
            size = os.fstat(answer.fileno()).st_size
            output = os.pread(answer.fileno(), LONGEST_ANSWER, max(0, size - LONGEST_ANSWER))
        figures = figures_of(self.environment, folder, output.decode(errors="replace"))
        if self.environment.is_foreign:
            name_prompts(folder / "samples.jsonl")
        base = next((row for row in run.metrics() if f"eval/{PROXY}" in row), {})
        figures |= shares(base, figures)
        row = {"step": snapshot.step, "t": time.time(), "src": "eval", **figures}
        append_row(run.path / "metrics.jsonl", row)
        self.writer.event(
            "eval", step=snapshot.step, took_s=round(time.monotonic() - began, 2), **figures
        )

    async def _run(self, snapshot: Snapshot, folder: Path, answer: IO[bytes]) -> None:
        """Run the command to its end, which is that of its own process. Raises where that is no
        good one.
        """
        run, policy = self.writer.run, ("--openai.model_name", snapshot.sampler_path)
        words = command(
            self.environment, run.path / "config.yaml", folder, self.writer.state.name, *policy
        )
        log, keys = run.log("eval"), secret_variables(run.environment_config())
        size_before = 0
        if log.exists():
            size_before = log.stat().st_size
        workplace = self.environment.working_directory
        watch = HangWatch.of(run.path / "control" / "eval.heartbeat", run.environment_config())
        watch.begin()
        child = spawn(
            words,
            log=log,
            folder=workplace,
            lifeline=self.lifeline,
            keys=keys,
            variables=watch.asked.variable,
            answer=answer,
        )
        try:
            async with asyncio.timeout(EVALUATED_WITHIN_S):
                exited = asyncio.wrap_future(child.exit)
                while not exited.done():
                    if watch.is_hung({"pid": child.pid}):
                        await asyncio.to_thread(child.kill)
                        where = hung_at(run, "eval", str(self.environment.path))
                        what = f"The evaluation of step {snapshot.step}"
                        raise _hung(what, watch, self.environment, where)
                    await asyncio.wait((exited,), timeout=LOOK_S)
                code = exited.result()
        except TimeoutError:
            raise ProcessFailed(
                f"The evaluation of step {snapshot.step} took more than {EVALUATED_WITHIN_S:.0f} s."
            ) from None
        finally:
            await asyncio.to_thread(child.end)
        if code == 0:
            return
        last = reason(run.log_tail("eval", 1) if log.stat().st_size > size_before else [], code)
        why = last.removeprefix("error: ")
        # An environment may end the process with any code: ours are told with an error.
        if code == NOTHING_TO_EVALUATE and not self.environment.is_foreign and why != last:
            raise NothingToEvaluate("There will be no held-out figure.", why)
        raise ProcessFailed(f"The evaluation {how(code)}.", why)


def name_prompts(samples: Path) -> None:
    """Give the samples of a foreign environment the prompt and the completion by which evaluations
    are compared: the last two of its `messages`; or its `question`.
    """

    def prompt_of(row: Row) -> dict[str, Any]:
        match row:
            case {"messages": [*_, {"content": prompt}, {"content": answer}]}:
                return {"prompt": prompt, "completion": answer}
            case {"question": question}:
                return {"prompt": question}
            case _:
                return {}

    rows = read_rows(samples)
    with_prompts = [row if "prompt" in row else {**row, **prompt_of(row)} for row in rows]
    if with_prompts != rows:
        replace_file(samples, b"".join(msgspec.json.encode(row) + b"\n" for row in with_prompts))
