"""A program of the user's, run once for an episode: its folder, its variables, how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.environments.scratch_folders import remove_folder
from halteres.environments.tasks import Task
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.process import Hung, TimedOut, run_caught
from halteres.rollouts.sampling_clock import sampling

TASK_FILE = "HALTERES_TASK_FILE"
"""The variable that names the task's file, JSON."""

MOST_AT_ONCE = 512
"""Programs that run side by side; each has a thread that waits for it."""

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How one program ended."""

    folder: Path  # which it worked in
    exit_code: int | None  # None: it was ended at its time limit
    output: str  # the end of what it printed
    errors: str  # ... and wrote to stderr
    took_s: float

    @property
    def columns(self) -> dict[str, Any]:
        """What a reward function is told of it, by name."""
        return {"folder": str(self.folder), "output": self.output, "exit_code": self.exit_code}


EPISODE_COLUMNS = ("folder", "output", "exit_code")
"""The names in `Played.columns`."""


def check_program(
    command: Sequence[str],
    workspace: Path | None,
    tasks: Sequence[Task],
    hidden: Sequence[str] = (),
    *,
    folder: Path | None = None,
) -> None:
    """InvalidConfig where no episode could be played: there is no program, no workspace, or an
    argument is nothing but a field that no task has.

    Args:
        command, workspace, hidden: as `Programs` has them.
        tasks: all that are played.
        folder: where the program is looked for that is named by a relative path; None: here.
    """
    if not command:
        raise InvalidConfig(
            "There is no program.",
            "env.command is empty.",
            "Give the program that plays.",
            field="env.command",
        )
    program = command[0]
    if folder is not None and "/" in program:
        program = str(folder / program)
    if shutil.which(program) is None:
        raise InvalidConfig(
            f"The program '{command[0]}' is not found.",
            f"It is looked for on PATH; one with a slash from {(folder or Path()).absolute()}.",
            "Install it, or give its whole path in env.command.",
            field="env.command",
        )
    if workspace is not None and not os.path.isdir(workspace):
        raise InvalidConfig(
            f"There is no folder {workspace}.",
            "env.workspace is copied for episodes.",
            "Give the whole path of a folder, or none: episodes then begin in an empty one.",
            field="env.workspace",
        )
    known = {name for task in tasks for name in task}.difference(hidden)
    for argument in command[1:]:
        named = _FIELD.fullmatch(argument)
        if named is None or named[1] in known:
            continue
        why = f"The tasks' fields are {', '.join(sorted(known))}."
        if named[1] in hidden:
            why = "env.hidden keeps it from the program."
        raise InvalidConfig(
            f"The argument {argument} names no field that the program is given.",
            why,
            "Name one of those in env.command.",
            field="env.command",
        )


class Programs:
    """One command, run in a copy of one folder for every episode.

    Args:
        command: the program and its arguments; `{name}` stands for that field of the task.
        workspace: folder that is copied; None: episodes begin in an empty one.
        within_s: how long one may run.
        scratch: an empty folder of this user's alone, which goes with the last episode.
        hidden: fields of a task that the program is not given.
    """

    def __init__(
        self,
        command: Sequence[str],
        workspace: Path | None,
        within_s: float,
        scratch: Path,
        hidden: Sequence[str] = (),
    ) -> None:
        self._command, self._workspace, self._within_s = command, workspace, within_s
        self._hidden, self._count = frozenset(hidden), 0
        # A cage's worker may be another user: it is shown this folder, which the one above hides
        # from all others of the machine.
        self._private, self.scratch = scratch, scratch / "episodes"
        self.scratch.mkdir(parents=True)
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="program")
        open_to_cages(self.scratch)

    @asynccontextmanager
    async def play(self, task: Task, variables: Mapping[str, str]) -> AsyncIterator[Played]:
        """One episode; its folder is there while the block runs. Whatever ends the waiting ends the
        program, and what it started.

        Raises:
            EnvironmentFailed: it could not be started.
        """
        self._count += 1
        task = {name: value for name, value in task.items() if name not in self._hidden}
        place = self.scratch / f"episode-{self._count}"
        left = threading.Event()
        run = self._threads.submit(self._run, task, variables, place, left)
        try:
            # it waits for the model most of the time, which is no fault of the task
            with sampling():
                played = await asyncio.wrap_future(run)
            yield played
        finally:
            left.set()
            # in a thread: a large folder would hold up all others
            removed = self._threads.submit(_remove_after, run, place)
            await asyncio.shield(asyncio.wrap_future(removed))

    def close(self) -> None:
        """Remove every folder."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        remove_folder(self._private)

    def _run(
        self, task: Task, variables: Mapping[str, str], place: Path, left: threading.Event
    ) -> Played:
        folder, task_file = place / "work", place / "task.json"
        try:
            place.mkdir(parents=True)
            if self._workspace is None:
                folder.mkdir()
            else:
                shutil.copytree(self._workspace, folder, symlinks=True)
            task_file.write_text(json.dumps(task), encoding="utf-8")
        except OSError as error:
            raise EnvironmentFailed(
                f"The folder of an episode cannot be made in {self.scratch}.", f"{error}."
            ) from error
        program = shutil.which(self._command[0]) or self._command[0]
        command = [str(Path(program).absolute()), *self._arguments(task)]
        began, code = time.monotonic(), None
        out, err = "", ""
        try:
            ended = run_caught(
                command,
                folder,
                self._within_s,
                variables={**variables, TASK_FILE: str(task_file)},
                is_hung=lambda _: left.is_set(),
            )
            code, out, err = ended.code, ended.out, ended.err
        except TimedOut as late:
            out, err = late.out, late.err
        except Hung as given_up:
            err = str(given_up)
        except (OSError, ValueError) as error:  # also of an argument that no program can have
            raise EnvironmentFailed(f"{program} cannot be run.", f"{error}.") from error
        open_to_cages(folder)
        return Played(
            folder=folder,
            exit_code=code,
            output=out,
            errors=err,
            took_s=time.monotonic() - began,
        )

    def _arguments(self, task: Task) -> list[str]:
        """With the task's fields in their places; braces around other names stay."""

        def field(found: re.Match[str]) -> str:
            value = task.get(found[1], found[0])
            if isinstance(value, str):
                return value
            return json.dumps(value)

        return [_FIELD.sub(field, argument) for argument in self._command[1:]]


def open_to_cages(folder: Path) -> None:
    """Let a cage show the folder, with what comes into it later: the workers of root's cages are
    another user, to whom only what every user may read is shown so. Other files are copied as a
    cage starts.
    """
    if os.getuid() != 0:
        return
    left = [str(folder)]
    # A program may have left folders that are deeper than a path can be long.
    with suppress(OSError):
        while left:
            path = left.pop()
            os.chmod(path, os.stat(path).st_mode | 0o055)
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        os.chmod(entry.path, entry.stat().st_mode | 0o044)


def _remove_after(run: Future[Played], place: Path) -> None:
    """Remove an episode's folder once nothing writes there any more."""
    wait((run,))
    remove_folder(place)
