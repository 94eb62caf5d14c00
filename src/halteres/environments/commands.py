"""What an environment file does when it is run: serve, process, evaluate, describe.

Exit codes: 0; 1 for an error of ours, 2 for usage, 3 where there is nothing to evaluate. Only
answers go to stdout. Where the author's file is at fault, its file and line are named instead of a
traceback.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from halteres import process as own_process
from halteres.clients.trajectories import EnvironmentClient
from halteres.config.discovery import EnvironmentNotFound
from halteres.config.problem import Problem
from halteres.config.program import NOTHING_TO_EVALUATE
from halteres.config.settings import TrainerSettings
from halteres.environments.base import BaseEnv, NoEvaluation, set_up
from halteres.environments.config import (
    APIServerConfig,
    BaseEnvConfig,
    Effective,
    Overrides,
    effective,
    read_file,
)
from halteres.environments.heartbeat import beating
from halteres.environments.processing import process
from halteres.environments.scorers import inseparable
from halteres.environments.serving import Serving
from halteres.environments.trajectory_link import PATIENCE, TrajectoryLink
from halteres.errors import EnvironmentFailed, HalteresError, UserError, unknown
from halteres.redaction import keep_secret

Kind = type[BaseEnv]

VERBS = ("serve", "process", "evaluate", "describe")
USAGE = (
    f"usage: {{file}} {'|'.join(VERBS)} [--config FILE] [--env.FIELD VALUE] [--openai.FIELD VALUE]"
)

PROCESS_PRESETS = Overrides(env={"ensure_scores_are_not_same": False, "include_messages": True})
"""What `process` changes in `config_init`'s values; the file and the arguments win."""

_IGNORED = ("--slurm", "--testing")  # Atropos's; they choose nothing here

log = logging.getLogger(__name__)


class BadUsage(UserError):
    """Arguments that are no command; the process ends with code 2."""

    code = "usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command and what it overrides, values as text."""

    verb: str  # of VERBS
    config: Path | None
    overrides: Overrides


def parse(arguments: Sequence[str]) -> Arguments:
    """Read the arguments after the file's name.

    Raises:
        BadUsage: no verb, an unknown one, an unknown option, or one without its value.
    """
    verb, *rest = arguments or [""]
    if verb not in VERBS:
        given = f"'{verb}' is none of the commands" if verb else "There is no command"
        raise BadUsage(f"{given}; they are {', '.join(VERBS)}.")
    config: Path | None = None
    sections: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        section, _, field = option.removeprefix("--").partition(".")
        is_setting = option.startswith("--") and section in sections and bool(field)
        if not is_setting and option not in ("--config", *_IGNORED):
            raise BadUsage(
                f"There is no option '{option}'.", "Settings are --env.FIELD and --openai.FIELD."
            )
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals and option not in _IGNORED:
            raise BadUsage(f"The option '{option}' needs a value.")
        if option == "--config":
            config = Path(value)
        elif is_setting:
            sections[section][field] = None if value in ("null", "none", "None") else value
    return Arguments(verb=verb, config=config, overrides=Overrides(**sections))


def main(kind: Kind, arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (default: the process's own) and end the process."""
    own_process.begin("env", torch=True)
    sys.exit(run(kind, sys.argv[1:] if arguments is None else arguments))


def run(kind: Kind, arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    usage = USAGE.format(file=Path(inspect.getfile(kind)).name)
    answers = sys.stdout
    if {"-h", "--help"} & set(arguments):
        answers.write(f"{usage}\n")
        return 0
    try:
        parsed = parse(arguments)
        with contextlib.redirect_stdout(sys.stderr):  # what an author prints is no answer
            if parsed.verb == "describe":
                answer = json.dumps(describe(kind, parsed))
            else:
                answer = asyncio.run(_until_signal(_run(kind, parsed)))
    except HalteresError as error:
        is_usage = isinstance(error, BadUsage)
        sys.stderr.write(
            f"error: {' '.join([*error.sentence.split(), *([usage] if is_usage else [])])}\n"
        )
        return 2 if is_usage else NOTHING_TO_EVALUATE if isinstance(error, NoEvaluation) else 1
    if isinstance(answer, signal.Signals):
        return 0 if parsed.verb == "serve" else 128 + answer  # a signal is how serving ends
    if answer:
        answers.write(answer + "\n")
        answers.flush()
    return 0


def describe(kind: Kind, arguments: Arguments) -> dict[str, Any]:
    """What the environment is and which settings it would run with, problems included."""
    settings = _settings(kind, arguments)
    config, file = type(settings.env), Path(inspect.getfile(kind))
    # What a run would refuse of what a class declares is the file's mistake, not its user's.
    if kind.variants and "variant" not in config.model_fields:
        missing = TypeError(f"{config.__name__} has no field `variant: str`")
        raise author_error(file, "be a family (variants)", missing)
    _check_attributes(kind, config)
    with _author_at_fault(kind, "set the trainer's defaults (trainer_defaults)"):
        TrainerSettings.model_validate(dict(kind.trainer_defaults))
    return {
        "name": kind.name or file.stem,
        "class_name": kind.__name__,
        "description": (inspect.getdoc(kind) or "").partition("\n")[0],
        "schema": config.model_json_schema(),
        "config": settings.env.model_dump(mode="json"),
        "defaults": settings.defaults.model_dump(mode="json"),
        "problems": [asdict(problem) for problem in settings.problems],
        "missing": [asdict(one) for one in kind.missing_packages(settings.env)],
        "trainer": dict(kind.trainer_defaults),
    }


def _check_attributes(kind: Kind, config: type[BaseEnvConfig]) -> None:
    """Refuse a class attribute with the name of a setting, which an author takes for the setting.

    One that the code of its file reads, other than of a config, is the author's own affair.

    Raises:
        EnvironmentFailed: nothing reads it, so that it has no effect.
    """
    ours = [one for one in kind.__mro__ if one.__module__.partition(".")[0] == "halteres"]
    theirs = [one for one in kind.__mro__ if one not in ours and one is not object]
    for owner in theirs:
        names = [
            name
            for name, value in vars(owner).items()
            if name in config.model_fields
            and not any(hasattr(base, name) for base in ours)
            and not (callable(value) or hasattr(value, "__get__"))
        ]
        if not names:
            continue
        file = Path(inspect.getfile(owner))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        read = _names_read(tree)
        for name in names:
            if name not in read:
                value = vars(owner)[name]
                raise EnvironmentFailed(
                    f"The environment file {file}:{_line_of(tree, owner.__name__, name)} sets "
                    f"{name} on its class, where it has no effect: it is a setting, which "
                    f"config_init gives: `return cls.env_config_cls({name}={value!r}), "
                    "[APIServerConfig()]`.",
                    file=str(file),
                )


def _names_read(tree: ast.Module) -> set[str]:
    """Names that the code reads: as attributes of anything but a config, as variables, as texts."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="config") | ast.Attribute(attr="config")):
                continue
            case ast.Attribute(attr=name, ctx=ast.Load()) | ast.Name(id=name, ctx=ast.Load()):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
            case _:
                continue
    return found


def _line_of(tree: ast.Module, owner: str, name: str) -> int:
    """The line on which a class sets this name; else that of the class itself."""
    line = 1
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name != owner:
            continue
        line = node.lineno
        for statement in node.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=target)])
                    | ast.AnnAssign(target=ast.Name(id=target))
                ) if target == name:
                    return statement.lineno
                case _:
                    continue
    return line


async def _run(kind: Kind, arguments: Arguments) -> str:
    """Run any verb but `describe`; its answer for stdout, if it has one."""
    settings = _settings(kind, arguments).checked()
    if settings.env.set_without_effect:
        log.warning(
            "These settings have no effect: %s.", ", ".join(settings.env.set_without_effect)
        )
    server = settings.openai
    if arguments.verb == "serve" and server.server_type == "sglang":
        # It follows the run's newest policy, whatever model the file names.
        server = server.model_copy(update={"model_name": "default"})
    with _author_at_fault(kind, "be made"):
        env = kind(settings.env, [server])
    try:
        if arguments.verb == "serve":
            async with EnvironmentClient(env.config.rollout_server_url, PATIENCE) as client:
                link = TrajectoryLink(client, env.config, env.wandb_name)
                try:
                    with _author_at_fault(kind, "serve"):
                        await Serving(env, link).run()
                finally:
                    await link.leave()
            return ""
        if arguments.verb == "process":
            with _author_at_fault(kind, "process"):
                return str(await process(env, env.config.stuck_s))
        with _author_at_fault(kind, "setup"):
            await set_up(env)
        async with beating(env.config.stuck_s):
            with _author_at_fault(kind, "evaluate"):
                return json.dumps(dict(await env.evaluate() or env.last_evaluation))
    except HalteresError as error:
        if arguments.verb == "serve":
            env.records.end(error)
        raise
    finally:
        await env.disconnect()
        if env.rewards is not None:
            await env.rewards.close()
        env.scorer_workers.close()


async def _until_signal(command: Coroutine[Any, Any, str]) -> str | signal.Signals:
    """A command's answer, or the SIGTERM or SIGINT that cancelled it, so that it ends in order.

    Where the author's code keeps the loop from turning, the process ends at once with a second
    SIGINT, or `GRACE_S` after the first signal.
    """
    loop = asyncio.get_running_loop()
    task, received = asyncio.create_task(command), [signal.SIGTERM]

    # the loop's own handlers are called when it turns
    def interrupt(number: int, _: object) -> None:
        if number == signal.SIGINT and received[-1] == signal.SIGINT:
            os._exit(128 + number)
        received.append(signal.Signals(number))
        timer = threading.Timer(own_process.GRACE_S, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()

        def end() -> None:
            timer.cancel()
            task.cancel()

        loop.call_soon_threadsafe(end)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        return await task
    except asyncio.CancelledError:
        return received[-1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _author_at_fault(kind: Kind, doing: str) -> Iterator[None]:
    """What the author's code raises leaves as a sentence with its file and line."""
    try:
        yield
    except HalteresError:
        raise
    except Exception as error:
        raise author_error(Path(inspect.getfile(kind)), doing, error) from error


def author_error(file: Path, doing: str, error: BaseException) -> EnvironmentFailed:
    """The sentence for an exception out of an environment file: file, line, exception."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file
    ]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        found = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors(include_url=False)
        ]
        why = f"{error.title} refuses {'; '.join(found)}"
    return EnvironmentFailed(
        f"The environment file {f'{file}:{line}' if line else file} cannot {doing}.",
        f"{why.rstrip('.')}.",
        f"Mend it, then run: python {file} describe",
        file=str(file),
        line=line,
    )


def settings_of(
    kind: Kind, overrides: Overrides, presets: Overrides | None = None
) -> Effective[BaseEnvConfig]:
    """What `config_init` gives, then the presets, then the overrides.

    Raises:
        EnvironmentFailed: `config_init` raised. EnvironmentNotFound: the family has no such
            variant.
    """
    variant: dict[str, str] = {}
    if kind.variants:
        name = variant["variant"] = str(overrides.env.get("variant") or kind.variants[0])
        if name not in kind.variants:
            raise unknown(
                EnvironmentNotFound, f"variant of {kind.name or kind.__name__}", name, kind.variants
            )
    initial: Callable[..., tuple[BaseEnvConfig, Sequence[APIServerConfig]]] = kind.config_init
    with _author_at_fault(kind, "make its settings (config_init)"):
        env, servers = (
            initial(*variant.values()) if inspect.signature(initial).parameters else initial()
        )
    if presets is not None:
        env = effective(env, APIServerConfig(), presets).env
    openai = servers[0] if servers else APIServerConfig()
    settings = effective(env, openai, overrides.over(Overrides(env=variant)))
    why = inseparable(kind, settings.env)
    if why is None:
        return settings
    problem = Problem(field="cage", got=settings.env.cage, rule=why)
    return replace(settings, problems=(*settings.problems, problem))


def _settings(kind: Kind, arguments: Arguments) -> Effective[BaseEnvConfig]:
    overrides = arguments.overrides
    if arguments.config is not None:
        overrides = overrides.over(read_file(arguments.config))
    keep_secret([overrides.env, overrides.openai])
    return settings_of(kind, overrides, PROCESS_PRESETS if arguments.verb == "process" else None)
