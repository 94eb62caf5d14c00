"""Solved tasks of the agent benchmark, as agents leave them, and a model to play with; no run was
made for them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from aiohttp import web

from halteres.config.settings import Settings
from halteres.files import replace_file
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory, runs_home

from .run_fixtures import add_evaluation, add_step, change, make_run

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no installed package

from benchmarks.agent import evidence
from benchmarks.agent.task import ENVIRONMENTS, Place, Task, Verdict, judge
from benchmarks.agent.tasks import TASKS

Answer = dict[str, Any]
ONE, OTHER = "aaaa1111", "bbbb2222"
MENDED = {
    "sums.py": (
        ("_BOX.findall(text)[-1]", "_BOX.findall(text)"),
        ("said == item.answer", "bool(said) and int(said[-1]) == item.answer"),
    ),
    "till.py": (("self.reward(text)", "self.reward(text) and is_correct(text, item)"),),
}


def prepared(place: Place, task: Task, **facts: Any) -> None:
    """As `prepare`, but for the real runs."""
    place.workspace.mkdir(parents=True)
    for name in task.FILES:
        (place.workspace / name).write_bytes((ENVIRONMENTS / name).read_bytes())
    (place.folder / "task.json").write_text(
        json.dumps({"task": task.NAME, "prepared_at": time.time() - 60, **facts})
    )


def trained(
    run_id: str, file: Path, steps: int = 10, share: float = 0.95, **changes: Any
) -> RunDirectory:
    """A completed run of the built-in model, as a supervisor leaves it; rewards rise."""
    run = make_run(
        run_id, environment=file.stem, environment_file=str(file), created_at=time.time(), **changes
    )
    for step in range(1, steps + 1):
        add_step(run, step, **{"reward/mean": 0.1 * step})
    add_evaluation(run, 0, 0.34)
    add_evaluation(run, steps, share)
    set_up(run)
    return run


def set_up(run: RunDirectory, /, **sections: dict[str, Any]) -> None:
    replace_file(
        run.path / "settings.json", Settings.model_validate(sections).model_dump_json().encode()
    )


def changed(file: Path, at: float) -> None:
    """Its last change was then."""
    os.utime(file, (at, at))


def rewritten(file: Path, text: str) -> None:
    """As if that had been its text all the time."""
    at = file.stat().st_mtime
    file.write_text(text)
    changed(file, at)


def mend(place: Place, name: str) -> None:
    text = (place.workspace / name).read_text()
    for before, after in MENDED[name]:
        assert before in text
        text = text.replace(before, after)
    (place.workspace / name).write_text(text)


def tested(place: Place, file: Path) -> None:
    """A test that says: trainable."""
    folder = place.home / "tests" / "t-00000000"
    folder.mkdir(parents=True)
    program = {
        "name": file.stem,
        "path": str(file),
        "interpreter": "python",
        "working_directory": "/",
    }
    asked = {"draft": "default", "program": program, "env": {}, "num_steps": 3, "group_size": 16}
    asked |= {"models": [], "base_model": "halteres/tiny", "created_at": 0.0}
    (folder / "request.json").write_text(json.dumps(asked))
    told = {
        "model": "local:halteres/tiny",
        "steps_tested": 3,
        "total_completions": 48,
        "trainable": True,
    }
    told |= {"groups_with_variance": 1.0, "mean_score": 0.3, "output_file": "x"}
    result = {
        "test_id": folder.name,
        "environment": file.stem,
        "environment_file": str(file),
        "models_tested": [told],
    }
    (folder / "result.json").write_text(json.dumps(result))


class SolvedTask:
    """A task that was solved: its answer, and what can be made of it that is no solution."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.task = place, TASKS[name]
        self.answer: Answer = getattr(self, name)()

    def verdict(self) -> Verdict:
        return judge(self.task, self.place, self.answer)

    def train(self) -> Answer:
        prepared(self.place, self.task)
        trained(ONE, evidence.ARITHMETIC)
        return {"run_id": ONE, "share_correct": 0.95}

    def repair(self) -> Answer:
        prepared(self.place, self.task)
        mend(self.place, "sums.py")
        file = self.place.workspace / "sums.py"
        changed(file, time.time() - 30)
        tested(self.place, file)
        trained(ONE, file)
        return {"cause": "a text is compared with a number", "run_id": ONE}

    def choose(self) -> Answer:
        prepared(self.place, self.task)
        rows = ((ONE, 0.0015, 0.95), (OTHER, 0.000001, 0.35))
        for run_id, rate, share in rows:
            set_up(
                trained(run_id, evidence.ARITHMETIC, share=share), trainer={"learning_rate": rate}
            )
        names = ("run_id", "learning_rate", "share_correct")
        return {"better": 0.0015, "evidence": [dict(zip(names, row, strict=True)) for row in rows]}

    def hacking(self) -> Answer:
        prepared(self.place, self.task, run_id=ONE)
        mend(self.place, "till.py")
        run = trained(ONE, self.place.workspace / "till.py", status="stopped")
        item = {
            "question": "What is 2 + 4?",
            "answer": 6,
            "numbers": [2, 4],
            "operators": ["+"],
            "wording": "steps",
        }
        texts = {
            "I think the answer is \\boxed{0}.": 1.0,
            "It is \\boxed{6}.": 1.0,
            "Perhaps \\boxed{3}.": 0.0,
        }
        completions = [{"text": text, "score": score} for text, score in texts.items()]
        (run.path / "rollouts").mkdir()
        append_row(
            run.path / "rollouts" / "step_3.jsonl", {"item": item, "completions": completions}
        )
        # as the tools show it
        said = '<untrusted source="rollout">I think the answer is \\boxed{0}.</untrusted>'
        example = {"question": "What is 2 + 4?", "completion": said}
        return {
            "run_id": ONE,
            "gets_better": False,
            "cause": "it pays for short answers",
            "example": example,
        }

    def recover(self) -> Answer:
        prepared(self.place, self.task, run_id=ONE, checkpoint_step=5)
        trained(ONE, evidence.ARITHMETIC, steps=7, status="failed", total_steps=20)
        trained(
            OTHER,
            evidence.ARITHMETIC,
            steps=20,
            total_steps=20,
            resumed_from=ONE,
            resume_point={"step": 5},
        )
        return {"failed_run": ONE, "what_ended": "the trainer", "completed_run": OTHER}

    def state(self, run_id: str, **changes: Any) -> None:
        """Change a run's state."""
        change(RunDirectory(runs_home() / run_id), **changes)


class FakeModel:
    """An OpenAI-compatible endpoint whose model plays a script: each line makes a message of the
    last tool's answer.

    It is busy at first, and says the key it was called with aloud.
    """

    def __init__(self, script: list[Callable[[Answer], dict[str, Any] | str]]) -> None:
        self.script, self.url, self.requests = script, "", list[Answer]()
        self._busy = True

    async def complete(self, request: web.Request) -> web.Response:
        if self._busy:
            self._busy = False
            return web.json_response({"error": "busy"}, status=429)
        body = await request.json()
        self.requests.append(body)
        last = body["messages"][-1]
        told = json.loads(last["content"]) if last["role"] == "tool" else {}
        said = self.script[sum(message["role"] == "assistant" for message in body["messages"])](
            told
        )
        message: Answer = {
            "role": "assistant",
            "content": f"I am {request.headers['Authorization']}. ",
        }
        if isinstance(said, str):
            message["content"] += said
        else:
            function = {
                "name": said.pop("tool"),
                "arguments": said.pop("raw", None) or json.dumps(said),
            }
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        return web.json_response(
            {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        )


@contextmanager
def serving(model: FakeModel) -> Iterator[None]:
    """The endpoint, in a thread: the harness runs a loop of its own."""
    loop = asyncio.new_event_loop()

    async def begin() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", model.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        model.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = loop.run_until_complete(begin())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
