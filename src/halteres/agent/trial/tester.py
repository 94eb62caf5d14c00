"""The process that tests an environment: `python -m halteres.agent.trial.tester FOLDER --lock-fd
N`.

Each model is tested by the environment's own `process` in a child process: models of this machine
one after another, those of the endpoint side by side; what goes wrong with one never reaches
another. A child cannot outlive the tester, has bounded memory, files and output, and is ended at
its deadline. Each model's end is written to its ended.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from itertools import groupby
from typing import IO, Any

import msgspec
import yaml

from halteres import process
from halteres.agent.trial.folder import TestFolder, own_folder
from halteres.agent.trial.outcome import Ended, Fault, read_outcome
from halteres.agent.trial.relay import Destination, Relay, Traffic, Upstream, relaying
from halteres.agent.trial.report import ODD_ANSWERS, report
from halteres.agent.trial.request import REMOTE_AT_ONCE, Request, TestedModel
from halteres.agent.trial.testing import character_tokenizer, odd_scores
from halteres.config import environ
from halteres.config.discovery import read_environment
from halteres.errors import HalteresError, NotFound, ServerError, boundary
from halteres.files import replace_file
from halteres.process import Lifeline, die_with_parent
from halteres.redaction import Redactor, keep_secret
from halteres.rewards.components import secret_variables
from halteres.runs.directory import find_run
from halteres.runs.reading.failures import frame_in, how, reason
from halteres.runs.servers import Server, relayed, served
from halteres.runs.supervision.hang_watch import LOOK_S, HangWatch

COMPLETIONS_PER_ROLLOUT = 32
"""A model answers so many times for each rollout asked for, at most: the turns of a long game, or a
scorer that never gives a score, which would go on asking for ever.
"""

RETRIES = {"rollout_retries": 1, "max_failed_groups": 3, "max_dropped_groups": 6}
"""At most: a failing scorer is told before it has asked for thousands of answers."""

FOREIGN_TOKENS = 8
"""An answer of another model may be so many times longer in the draft's tokens: no group is dropped
for that.
"""

LOCAL_REQUESTS, REMOTE_REQUESTS = 256, 16  # of one model, under way at once
BEYOND_S = 60
"""So long after the test's deadline the kernel ends this process, should nothing else have;
children end with it.
"""

GRACE_S = 2.0
HEAD, TAIL = 32 * 1024, 64 * 1024  # bytes of a child's output that its log holds
LARGEST_FILE = 4 * 1024**3  # bytes that a child may write into one
LONGEST_OUTPUT, LONGEST_CAUSE = 1000, 400  # characters that an answer holds (seed 002)
RULE = "=" * 60

_TIME = re.compile(r"^\d{4}-\d\d-\d\d[T ][\d:.,]+ ?")  # before a line of a log
_ERROR = re.compile(r"(?:error: |.* (?:ERROR|CRITICAL) \S+: )(.+)")


class Interrupted(HalteresError):
    """The test was ended from outside, or by its deadline."""

    code = "process_exited"


def main() -> int:
    """Test, and write the result. Exit code 0, or 1 where the test itself failed."""
    folder = own_folder()
    process.begin("tester")
    request = folder.request(Request)
    signal.alarm(int(request.within_s) + BEYOND_S)

    def write(error: HalteresError | None = None) -> None:
        body = report(folder, request, "failed" if error else "done")
        if error:
            body |= {"error": error.sentence, "code": error.code}
        folder.write("result.json", Redactor.of_this_process().json(body))

    try:
        with boundary(ServerError, "The test"):
            asyncio.run(_test(folder, request, write))
    except HalteresError as error:
        sys.stderr.write(f"error: {Redactor.of_this_process().text(error.sentence)}\n")
        # else all was measured, and only what comes after it went wrong
        if folder.result() is None:
            write(error)
        return 1
    return 0


async def _test(folder: TestFolder, request: Request, write: Callable[[], None]) -> None:
    """Test until it is done. SIGTERM and the deadline end it in order.

    The result is there as soon as all is measured, before services are closed: who waits for it
    waits no longer.
    """
    loop, testing = (
        asyncio.get_running_loop(),
        asyncio.ensure_future(Tester(folder, request, done=write).run()),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, testing.cancel)
    try:
        await asyncio.wait_for(testing, request.within_s)
    except TimeoutError as error:
        raise Interrupted(
            "The test was ended at its deadline.", f"It had {request.within_s:.0f} s."
        ) from error
    except asyncio.CancelledError as error:
        raise Interrupted("The test was ended by a signal.") from error


class Tester:
    """One test, from its relay's first request to the last model's end."""

    def __init__(
        self, folder: TestFolder, request: Request, done: Callable[[], None] = lambda: None
    ) -> None:
        """`done` is called once all is measured; services may still be closing then."""
        keep_secret(request.env)
        environ.hold_back(request.sampler_keys)
        self._folder, self._request, self._done = folder, request, done
        self._left, self._measured = {one.stem for one in request.models}, asyncio.Event()
        self._lifeline = Lifeline.open()
        self._places = asyncio.Semaphore(REMOTE_AT_ONCE)

    async def run(self) -> None:
        """Test every model, then try odd answers on a scorer that has scored anything."""
        models = self._request.models
        try:
            async with relaying() as relay, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._test_locals(relay), name="models of this machine")
                for one in models:
                    if not one.is_local:
                        tasks.create_task(self._test_remote(relay, one), name=one.model)
                await self._measured.wait()  # what follows would disturb the measured time
                if any(
                    read_outcome(self._folder, self._request, one).completions for one in models
                ):
                    self._folder.write(
                        ODD_ANSWERS, await asyncio.to_thread(odd_scores, self._request)
                    )
                self._done()
        finally:
            self._lifeline.close()

    async def _test_remote(self, relay: Relay, one: TestedModel) -> None:
        async with self._places:
            to = self._destination(
                one, environ.openrouter_url(), REMOTE_REQUESTS, environ.openrouter_key()
            )
            await self._test_model(one, *relay.open(to))

    async def _test_locals(self, relay: Relay) -> None:
        for one in self._request.models:
            if not one.is_local:
                continue
            try:
                async with self._service(one) as service:
                    url = f"{service.url}/runs/{self._folder.test_id}/v1"
                    to = self._destination(one, url, LOCAL_REQUESTS, service.key)
                    await self._test_model(one, *relay.open(to))
            except HalteresError as error:
                self._end(one, Ended(error=error.what, why=error.why, fault="model"))

    @asynccontextmanager
    async def _service(self, one: TestedModel) -> AsyncIterator[Server]:
        """A service for one model: a new one, unless one was given; for weights of a run its own,
        or one on its state.
        """
        if one.problem:
            raise NotFound(one.problem)
        log, given_up = self._folder.path / "service.log", threading.Event()
        service: AbstractContextManager[Server]
        if one.service_url:
            given = Server(url=one.service_url, key=environ.api_key())
            if not one.is_relayed:
                yield given
                return
            service = relayed(given, one.base, one.tokenizer, log=log, given_up=given_up)
        else:
            run, base = None, one.base
            if one.run:
                run = find_run(one.run)
                base = run.settings().inference.model
            arguments = self._request.service_of(one)
            service = served(base, run, arguments=arguments, log=log, given_up=given_up)
        stack = ExitStack()
        starting = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, service))
        try:
            yield await asyncio.shield(starting)
        finally:
            given_up.set()
            # its thread goes on where the task is cancelled
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.to_thread(stack.close)
            shutil.rmtree(log.with_suffix(""), ignore_errors=True)  # its state

    def _destination(
        self, one: TestedModel, base_url: str, parallel: int, key: str | None = None
    ) -> Destination:
        """An environment of ours is given the limits of answers; for another they are set on its
        requests.
        """
        request = self._request
        return Destination(
            base_url=base_url,
            model=one.base,
            ends_at=time.monotonic() + request.model_within_s + GRACE_S,
            budget=COMPLETIONS_PER_ROLLOUT * request.rollouts,
            max_tokens=request.max_tokens if request.program.is_foreign else None,
            temperature=request.temperature if request.program.is_foreign else None,
            key=key,
            parallel=parallel,
        )

    async def _test_model(self, one: TestedModel, address: str, upstream: Upstream) -> None:
        """Run the environment against one model; whatever happens is in its ended.json."""
        folder, request = self._folder, self._request
        try:
            with boundary(ServerError, "The test"):
                ended = await self._run(one, command_of(folder, request, one, address), upstream)
                outcome = read_outcome(folder, request, one)
                made, expected = (
                    len(outcome.groups or outcome.responses),
                    len(request.prompts) or request.num_steps,
                )
                if not ended.error and made < expected:
                    what = f"Process exited with code 0 after {made} of {expected} steps"
                    if not outcome.output_file.exists():
                        what = f"Output file not created: {outcome.output_file}"
                    why = "Does its code end the process?"
                    ended = msgspec.structs.replace(ended, error=what, why=why, fault="environment")
        except HalteresError as error:
            ended = Ended(error=error.what, why=error.why, fault="test", traffic=upstream.traffic)
        self._end(one, ended)

    def _end(self, one: TestedModel, ended: Ended) -> None:
        self._folder.work(one).mkdir(exist_ok=True)
        self._folder.write(f"{one.stem}/ended.json", ended)
        self._left.discard(one.stem)
        if not self._left:
            self._measured.set()

    async def _run(self, one: TestedModel, command: Sequence[str], upstream: Upstream) -> Ended:
        """Run the environment's command to its end, or to the deadline. OSError: it cannot be
        started.
        """
        request, folder, began = self._request, self._folder, time.monotonic()
        log = folder.log(one)
        variables = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        variables["HALTERES_LIFELINE_FD"] = str(self._lifeline.read_end)
        watch = HangWatch.of(folder.work(one) / "heartbeat", request.env)
        variables |= watch.asked.variable
        # an environment of atroposlib's wants it where the model gives no tokens
        if not one.is_local:
            variables["ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"] = "1"
        with (
            tempfile.TemporaryFile(dir=log.parent) as out,
            tempfile.TemporaryFile(dir=log.parent) as err,
        ):
            child = await asyncio.create_subprocess_exec(
                *command,
                cwd=request.program.working_directory,
                env=environ.with_keys(*secret_variables(request.env), **variables),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(self._lifeline.read_end,),
                process_group=0,
                preexec_fn=_bounded,
            )
            try:
                within_s = request.model_within_s
                unanswered = await _until_over(child, upstream, within_s, watch)
            finally:
                code = await _end(child)
            stdout, stderr = _printed(out), _printed(err)
        workplace = request.program.working_directory
        # the seeds' form
        text = f"Command: {' '.join(command)}\nWorking dir: {workplace}\nReturn code: {code}\n"
        for name, printed in (("STDOUT", stdout), ("STDERR", stderr)):
            text += f"\n{RULE}\n{name}:\n{RULE}\n{printed or '(empty)'}\n"
        log.write_text(Redactor.of_this_process().text(text), encoding="utf-8")
        ended = Ended(seconds=time.monotonic() - began, traffic=upstream.traffic)
        if code == 0 and unanswered is None:
            return ended
        if unanswered is None:
            error, why, fault = exited(code, upstream.traffic, stderr)
        else:
            hung = frame_in(str(request.program.path), stderr)
            if watch.has_hung:
                within_s = round(watch.silent_s)
            error, why, fault = timed_out(within_s, unanswered, hung)
        ends = {
            "stdout": folded(stdout)[-LONGEST_OUTPUT:],
            "stderr": folded(stderr)[-LONGEST_OUTPUT:],
        }
        return msgspec.structs.replace(ended, error=error, why=why, fault=fault, **ends)


def command_of(
    folder: TestFolder, request: Request, one: TestedModel, address: str
) -> tuple[str, ...]:
    """Write what the environment reads into its folder, which is made here; the command that runs
    it.
    """
    work, is_foreign = folder.work(one), request.program.is_foreign
    work.mkdir()
    tokenizer = one.tokenizer or str(character_tokenizer(work / "characters"))
    server = {
        "model_name": one.base,
        "tokenizer_name": tokenizer,  # atroposlib would look for the model's on the hub
        "base_url": address,
        "api_key": "x",
        "server_type": "sglang" if one.is_local else "openai",
        "timeout": request.model_within_s,
        "health_check": False,
    }
    env: dict[str, Any] = {
        **request.env,
        "total_steps": request.num_steps,
        "group_size": request.group_size,
        "batch_size": -1,
        "ensure_scores_are_not_same": False,  # whether they vary is the question
        "include_messages": True,
        "use_wandb": False,
        "wandb_name": one.wandb_run,
        "tokenizer_name": tokenizer,
        "data_path_to_save_groups": str(folder.groups(one)),
    }
    if not is_foreign:  # what our own BaseEnv has besides
        env |= {name: min(env.get(name, most), most) for name, most in RETRIES.items()}
        env["max_dropped_groups"] = RETRIES["max_dropped_groups"]  # 0 would be: never
        limits = {"max_new_tokens": request.max_tokens, "temperature": request.temperature}
        env |= {name: value for name, value in limits.items() if value is not None}
        if not one.is_local and env.get("max_token_length", 0) > 0:
            env["max_token_length"] *= FOREIGN_TOKENS
        env["run_dir"] = str(work)
    env = json.loads(json.dumps(env))  # values of types that YAML has no word for
    config = work / "config.yaml"
    settings = {"env": env, "openai": [server], "slurm": False, "testing": False}
    replace_file(config, yaml.safe_dump(settings, sort_keys=False).encode(), private=True)
    if not request.prompts:
        return request.program.command("process", "--config", str(config))
    # Free prompts go through our own program, in the environment's interpreter where it is one of
    # ours.
    job = work / "job.json"
    job.write_text(
        json.dumps({"prompts": request.prompts, "out": str(folder.groups(one))}), encoding="utf-8"
    )
    answering = ("-m", "halteres.agent.trial.answering", str(config), str(job))
    if is_foreign:
        return (sys.executable, *answering)
    declared = read_environment(request.program.path)
    class_name = ""
    if declared:
        class_name = declared.class_name
    return (request.program.interpreter, *answering, str(request.program.path), class_name)


def _bounded() -> None:
    """In the child: it ends with us, writes no core, and fills no disk."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


async def _until_over(
    child: asyncio.subprocess.Process, upstream: Upstream, within_s: float, watch: HangWatch
) -> int | None:
    """Until it has ended, or its model has for good: None. At the deadline, or where its event loop
    hangs, how many requests have no answer.
    """
    ends_at = time.monotonic() + within_s
    waits = [asyncio.create_task(wait) for wait in (upstream.over.wait(), child.wait())]
    try:
        while (left_s := ends_at - time.monotonic()) > 0:
            done, _ = await asyncio.wait(
                waits, timeout=min(LOOK_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if done or watch.is_hung({"pid": child.pid}):
                break
    finally:
        for wait in waits:
            wait.cancel()
    if upstream.over.is_set():
        await _wait(child, GRACE_S)  # some clients repeat for minutes what nobody will answer
        return None
    if child.returncode is not None:
        return None
    unanswered = upstream.traffic.in_flight
    # a loop that hangs takes no answer
    if watch.has_hung:
        unanswered = 0
    if not unanswered:
        child.send_signal(signal.SIGABRT)  # its last words are where it hangs
        await _wait(child, GRACE_S)
    return unanswered


async def _wait(child: asyncio.subprocess.Process, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), within_s)


async def _end(child: asyncio.subprocess.Process) -> int:
    """SIGTERM where it still runs, then SIGKILL for its group; the exit code."""
    if child.returncode is None:
        child.terminate()
        await _wait(child, GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started outlives it otherwise
    return await child.wait()


def _printed(file: IO[bytes]) -> str:
    """What a child printed, without its middle where it was much, and without secrets."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    text = file.read(HEAD)
    if size > HEAD + TAIL:
        text += f"\n... {size - HEAD - TAIL} bytes ...\n".encode()
        file.seek(-TAIL, os.SEEK_END)
    return Redactor.of_this_process().text((text + file.read()).decode(errors="replace"))


def folded(text: str) -> str:
    """The text with lines that only repeat the one before, but for the time, counted.

    >>> folded("2026-01-01 10:00:00,001 It failed.\\n2026-01-01 10:00:00,002 It failed.\\nSo.")
    '2026-01-01 10:00:00,001 It failed. (2 times)\\nSo.'
    """
    short: list[str] = []
    for _, lines in groupby(text.split("\n"), key=lambda line: _TIME.sub("", line)):
        first, *others = lines
        short.append(f"{first} ({len(others) + 1} times)" if first and others else first)
    return "\n".join(short)


def timed_out(within_s: float, unanswered: int, hung_at: str) -> tuple[str, str, Fault]:
    """What, why and whose fault it was, of a process that was ended at its deadline."""
    if within_s >= 60:
        limit = f"{within_s / 60:g} minutes"
    else:
        limit = f"{within_s:g} s"
    what = f"Process timed out after {limit}"
    if unanswered:
        return what, f"The model was too slow: {unanswered} requests had no answer yet.", "model"
    why = "It neither asked the model for anything nor ended."
    if hung_at:
        why = f"It hung in {hung_at}."
    return what, why, "environment"


def exited(code: int, traffic: Traffic, stderr: str) -> tuple[str, str, Fault]:
    """The same of one that ended by itself before it was through; code is negative for a signal."""
    what = f"Process {how(code)}"
    if traffic.over == "budget":
        return what, f"{traffic.last_error} Does its scorer ever give a score?", "environment"
    if traffic.over == "model" or (traffic.last_error and not traffic.completions):
        return what, traffic.last_error, "model"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return what, (errors[-1] if errors else reason(lines, code))[:LONGEST_CAUSE], "environment"


if __name__ == "__main__":
    sys.exit(main())
