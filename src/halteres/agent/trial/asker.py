"""The process that asks free prompts: `python -m halteres.agent.trial.asker CONFIG PROMPTS OUT [FILE CLASS]`.

Owns: finding the environment's class in its file and making it with its settings; one line for each prompt in OUT.
Never: runs in a process that holds a key: it executes the environment's file, as `python FILE process` would.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import json
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from halteres import process
from halteres.environments.base import BaseEnv, make_sampler, tokenizer_folder
from halteres.environments.commands import author_error, settings_of
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.configuring import read_file
from halteres.environments.scored import finite
from halteres.environments.single_turn import SingleTurnEnv
from halteres.environments.work import Items
from halteres.errors import EnvironmentFailed, HalteresError, RolloutFailed, boundary
from halteres.observe.metrics import append_row
from halteres.rollouts.sampler import Sampler
from halteres.text import Message, load_tokenizer
from halteres.types import Turn

KNOWN_STEPS, KNOWN_PER_STEP = 64, 32
"""Of training, beside the tasks of the evaluation: what is drawn depends on the step."""

NO_SCORER = "this environment cannot score a free prompt: it scores whole episodes"
NOT_KNOWN = "none of the environment's tasks asks this word for word, so nothing says what a right answer is"
"""Notes of a score that is null."""


class Asking:
    """Answers free prompts without an environment's help: there are no scores."""

    def __init__(self, sampler: Sampler, system: str | None = None, note: str = NO_SCORER) -> None:
        self._sampler, self._system, self._note = sampler, system, note

    async def prepare(self) -> None:
        """Do what must be done once, before the first prompt."""

    async def close(self) -> None:
        """Close the connections."""
        await self._sampler.close()

    async def settled(self, prompt: str) -> dict[str, Any]:
        """One prompt, answered; or why not."""
        try:
            return await self.answer(prompt)
        except RolloutFailed as error:
            return {"prompt": prompt, "completion": "", "finish": None, "score": None, "note": error.sentence}

    async def answer(self, prompt: str) -> dict[str, Any]:
        """One prompt, answered. RolloutFailed: the model gave no answer, or the environment no words for it."""
        turn = await self._sample([{"role": "user", "content": prompt}])
        return _row(prompt, turn, {"score": None, "note": self._note})

    async def _sample(self, messages: Sequence[Message]) -> Turn:
        system = [{"role": "system", "content": self._system}] if self._system else []
        (turn,) = await self._sampler.chat([*system, *messages])
        return turn


class Scoring(Asking):
    """Scores the answer where an environment of a single turn knows a task that asks the prompt."""

    def __init__(self, env: SingleTurnEnv) -> None:
        super().__init__(env.server, env.config.system_prompt, NOT_KNOWN)
        self._env = env
        self._tasks: dict[str, Any] = {}

    async def prepare(self) -> None:
        """Gather the tasks that the environment knows."""
        await self._env.setup()
        with contextlib.suppress(EnvironmentFailed), boundary(EnvironmentFailed, "eval_items"):
            self._know(self._env.eval_items())  # it may have none
        items = Items(self._env)
        for step, _ in itertools.product(range(KNOWN_STEPS), range(KNOWN_PER_STEP)):
            self._env.curr_step = step
            drawn = await items.next()
            if drawn is None:
                return
            self._know([drawn.item])

    async def answer(self, prompt: str) -> dict[str, Any]:
        """One prompt, answered in the words of its task and scored; as any other prompt where there is no task."""
        item = self.task(prompt)
        if item is None:
            return await super().answer(prompt)
        (turn,) = await self._sampler.chat(self._env.messages(item))
        return _row(prompt, turn, await self.judged(item, turn.text))

    def task(self, prompt: str) -> Any:
        """The task that asks this, of those gathered; None where none does."""
        return self._tasks.get(prompt.strip())

    async def judged(self, item: Any, text: str) -> dict[str, Any]:
        """The score of a text as an answer to this task; null and why, where the scorer fails."""
        where = f"{self._env.title}.score"
        try:
            with boundary(EnvironmentFailed, where):
                score = self._env.score(item, text)
                value = await score if inspect.isawaitable(score) else score
            return {"score": finite(value, where)}
        except EnvironmentFailed as error:
            return {"score": None, "note": error.sentence}

    def _know(self, items: Sequence[Any]) -> None:
        for item in items:
            asked = str(self._env.messages(item)[-1]["content"])
            for text in (asked, *(text for text in _texts(item) if text in asked)):
                self._tasks.setdefault(text.strip(), item)


def _texts(item: Any) -> Iterator[str]:
    """The texts of an item that may be its question."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        item = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    values = [item] if isinstance(item, str) else item.values() if isinstance(item, Mapping) else ()
    return (value for value in values if isinstance(value, str) and " " in value.strip())


def _row(prompt: str, turn: Turn, judged: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": prompt, "completion": turn.text, "finish": turn.stop_reason, **judged}


async def ask(config: Path, prompts: Sequence[str], out: Path, scorer: Sequence[str]) -> None:
    """Answer every prompt into `out`, in order."""
    asking = _asking(config, Path(scorer[0]), scorer[1]) if scorer else Asking(_sampler(config))
    try:
        await asking.prepare()
        for pending in [asyncio.create_task(asking.settled(prompt)) for prompt in prompts]:
            append_row(out, await pending)
    finally:
        await asking.close()


def _asking(config: Path, file: Path, class_name: str) -> Asking:
    made = environment_of(config, file, class_name)
    return Scoring(made) if isinstance(made, SingleTurnEnv) else Asking(made.server, made.config.system_prompt)


def environment_of(config: Path, file: Path, class_name: str) -> BaseEnv:
    """The environment of this class in this file, made with the settings of a config file."""
    kind = _kind(file, class_name)
    settings = settings_of(kind, read_file(config)).checked()
    return kind(settings.env, [settings.openai])


def _kind(file: Path, class_name: str) -> type[BaseEnv]:
    """The environment's class in its file."""
    name = "halteres_asked"
    sys.path.insert(0, str(file.parent))
    defined = runpy.run_path(str(file), run_name=name).values()
    kinds = [one for one in defined if isinstance(one, type) and issubclass(one, BaseEnv) and one.__module__ == name]
    named = [kind for kind in kinds if kind.__name__ == class_name] or kinds
    if not named:
        raise EnvironmentFailed(f"{file} defines no environment.")
    return named[-1]


def _sampler(config: Path) -> Sampler:
    """For an environment that is not ours: its config says where to sample, and nothing else of it counts."""
    told = read_file(config)
    env = BaseEnvConfig(tokenizer_name=told.env["tokenizer_name"], max_token_length=-1)
    tokenizer = load_tokenizer(str(tokenizer_folder(env.tokenizer_name)))
    return make_sampler(env, APIServerConfig(**told.openai), tokenizer)


def main() -> int:
    """Exit code 0, or 1 with one sentence on stderr."""
    process.begin("env", torch=True)
    config, prompts, out, *scorer = sys.argv[1:]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            asyncio.run(ask(Path(config), json.loads(Path(prompts).read_bytes()), Path(out), scorer))
    except HalteresError as error:
        return _complain(error)
    except Exception as error:  # noqa: BLE001 - the environment's file runs here; its failure is the answer
        return _complain(author_error(Path(scorer[0] if scorer else __file__), "be asked", error))
    return 0


def _complain(error: HalteresError) -> int:
    sys.stderr.write(f"error: {' '.join(error.sentence.split())}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
