"""The agent benchmark: five tasks with the rl_* tools.

    run.py scripted                              the scripted agent, through the real MCP server
    run.py --model NAME --base-url URL           any model behind an OpenAI-compatible endpoint
    run.py prepare TASK FOLDER                   set a task up for an agent of your own; prints what
                                                 to tell it
    run.py judge TASK FOLDER --answer JSON       judge what it made of it; exit code 1 where it is
                                                 not solved

Results of the first two: benchmarks/results/agent-NAME-DATE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

# the benchmarks are no installed package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.agent import report
from benchmarks.agent.attempt import WITHIN_S, GaveUp, Sitting, Transcript
from benchmarks.agent.chat import Chat, Endpoint
from benchmarks.agent.scripted import Scripted
from benchmarks.agent.task import Place, Task, answer_in, judge, prepare, stop_everything
from benchmarks.agent.tasks import TASKS
from benchmarks.machine import machine
from halteres.config import environ
from halteres.errors import HalteresError
from halteres.process import block_torch
from halteres.redaction import Redactor

RESULTS = Path(__file__).resolve().parents[1] / "results"
KEY_VARIABLE = "OPENAI_API_KEY"


class Agent(Protocol):
    """Whoever solves tasks."""

    @property
    def name(self) -> str: ...

    def seated(
        self, place: Place, transcript: Transcript
    ) -> AbstractAsyncContextManager[Sitting]: ...

    async def play(self, task: Task, sitting: Sitting) -> Mapping[str, Any] | None: ...


def attempt(agent: Agent, task: Task, folder: Path, transcript: Transcript) -> report.Record:
    """Prepare a task, let the agent play, judge."""
    began = time.monotonic()
    place = prepare(task, folder)
    prepared = time.monotonic()
    try:
        sitting, answer, ended = asyncio.run(_play(agent, task, place, transcript))
        played = time.monotonic()
        verdict = judge(task, place, answer)
    finally:
        stop_everything(place)
    transcript.add(
        task=task.NAME, answer=answer, solved=verdict.solved, why_not=verdict.why, ended=ended
    )
    times = {
        "prepared_s": prepared - began,
        "seconds": played - prepared,
        "judged_s": time.monotonic() - played,
    }
    return report.Record.of(task.NAME, verdict, sitting, answer, ended, **times)


async def _play(
    agent: Agent, task: Task, place: Place, transcript: Transcript
) -> tuple[Sitting, Mapping[str, Any] | None, str]:
    """The sitting, the answer, and what ended it before there was one."""
    async with agent.seated(place, transcript) as sitting:
        try:
            async with asyncio.timeout(WITHIN_S):
                return sitting, await agent.play(task, sitting), ""
        except (GaveUp, HalteresError) as error:
            return sitting, None, str(error)
        except TimeoutError:
            return sitting, None, "the time is up"


def play_all(agent: Agent, label: str, options: argparse.Namespace, redactor: Redactor) -> int:
    """All tasks, one after the other; the results' file. 0 where all are solved."""
    before, records = machine(), list[report.Record]()
    with tempfile.TemporaryDirectory(prefix="halteres-agent-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.task or TASKS:
            transcript = Transcript(folder / f"{name}.jsonl", redactor)
            records.append(attempt(agent, TASKS[name], folder / name, transcript))
            print(records[-1].line, flush=True)
    out = options.out or RESULTS / f"agent-{label}-{datetime.now(UTC):%Y-%m-%d}.json"
    report.write(
        out,
        records,
        agent.name,
        before,
        " ".join(["python", "benchmarks/agent/run.py", *sys.argv[1:]]),
    )
    print(f"Written: {out}")
    return 0 if all(record.solved for record in records) else 1


def play_scripted(options: argparse.Namespace) -> int:
    """The scripted agent."""
    return play_all(Scripted(), "scripted", options, Redactor.of_this_process())


def play_model(options: argparse.Namespace) -> int:
    """A model."""
    key = os.environ.pop(options.key_variable, None)  # nobody whom we start has use for it
    agent = Chat(Endpoint(url=options.base_url, model=options.model, key=key))
    label = re.sub(r"[^A-Za-z0-9.]+", "-", options.model).strip("-")
    return play_all(
        agent, label, options, Redactor([*environ.secrets().values(), *([key] if key else [])])
    )


def prepare_for_host(options: argparse.Namespace) -> int:
    """A task for an agent of somebody else's host."""
    task, place = TASKS[options.name], prepare(TASKS[options.name], options.folder)
    program = Path(sys.executable).with_name("halteres")
    home, folder = shlex.quote(str(place.home)), shlex.quote(str(place.folder))
    print(
        f"cd {folder} && HALTERES_HOME={home} {program} install-agent --client claude --project  "
        "# or codex, cursor ..."
    )
    print(f"Start the agent's host in that folder and say:\n\n{task.TEXT}\n\nThen:")
    print(
        f"{sys.executable} {Path(__file__).resolve()} judge {task.NAME} {folder} --answer '<its "
        "last message>'"
    )
    return 0


def judge_host(options: argparse.Namespace) -> int:
    """What such an agent made of it."""
    task, place = TASKS[options.name], Place(options.folder.absolute())
    text = sys.stdin.read() if options.answer == "-" else options.answer
    verdict = judge(task, place, answer_in(text))
    stop_everything(place)
    for check in verdict.checks:
        print(
            f"{'ok ' if check.ok else 'NO '} {check.what}"
            + ("" if check.ok else f": {check.found}")
        )
    print("solved" if verdict.solved else "NOT solved")
    return 0 if verdict.solved else 1


def parser() -> argparse.ArgumentParser:
    """All arguments."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True)
    playing = argparse.ArgumentParser(add_help=False)
    playing.add_argument(
        "--task", action="append", choices=list(TASKS), help="only this one; may be repeated"
    )
    playing.add_argument(
        "--keep", type=Path, help="folder for homes and transcripts; default: a temporary one"
    )
    playing.add_argument("--out", type=Path, help="file of results")
    commands.add_parser("scripted", parents=[playing]).set_defaults(run=play_scripted)
    model = commands.add_parser("model", parents=[playing], help="the default command")
    model.add_argument("--model", required=True)
    model.add_argument("--base-url", required=True, help="up to /v1")
    model.add_argument(
        "--key-variable", default=KEY_VARIABLE, help=f"that holds the key; default: {KEY_VARIABLE}"
    )
    model.set_defaults(run=play_model)
    for verb, run in (("prepare", prepare_for_host), ("judge", judge_host)):
        command = commands.add_parser(verb)
        command.add_argument("name", choices=list(TASKS), metavar="TASK", help=", ".join(TASKS))
        command.add_argument("folder", type=Path)
        command.set_defaults(run=run)
        if verb == "judge":
            command.add_argument(
                "--answer",
                required=True,
                help="the agent's last message or its JSON; -: from stdin",
            )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("--") and given[0] != "--help":
        given = ["model", *given]
    options = parser().parse_args(given)
    block_torch()
    try:
        return options.run(options)
    except HalteresError as error:
        print(f"error: {error.sentence}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
