"""The process that answers free prompts, or scores given texts:
`python -m halteres.agent.trial.answering CONFIG JOB [FILE CLASS]`.

JOB is JSON: `prompts` and the file `out`, which gets a line for each; or `completions` (none: the
odd answers), with the `prompt` that they answer, whose scores are printed as one object. It
executes the environment's file, as `python FILE process` would, and so runs in no process that
holds a key beside those of the environment's own judges and reward servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from halteres import process
from halteres.agent.trial.outcome import fields_of, reference_of
from halteres.environments.base import BaseEnv, make_sampler, set_up, tokenizer_folder
from halteres.environments.commands import author_error, settings_of
from halteres.environments.config import APIServerConfig, BaseEnvConfig, read_file
from halteres.environments.item_rollout import Items
from halteres.environments.single_turn import SingleTurnEnv
from halteres.errors import EnvironmentFailed, HalteresError, NotFound, RolloutFailed, boundary
from halteres.observe.metrics import append_row
from halteres.rewards.checking import odd_answers
from halteres.rollouts.sampler import Sampler
from halteres.tokenizer import Message, load_tokenizer, text_of

KNOWN_STEPS, KNOWN_PER_STEP = 64, 32
"""Of training, beside the tasks of the evaluation: what is drawn depends on the step."""

NO_SCORER = "this environment cannot score a free prompt: it scores whole episodes"
NOT_KNOWN = (
    "none of the environment's tasks asks this word for word, so nothing says what a "
    "right answer is"
)
"""Notes of a score that is null."""


class Tasks:
    """The tasks that an environment of a single turn knows, by the texts that ask them."""

    def __init__(self, env: SingleTurnEnv) -> None:
        self.env, self._items = env, dict[str, Any]()

    async def gather(self) -> None:
        """Those of the evaluation, and some of training."""
        await set_up(self.env)
        with contextlib.suppress(EnvironmentFailed), boundary(EnvironmentFailed, "eval_items"):
            for item in self.env.eval_items():  # it may have none
                self._add(item)
        items = Items(self.env)
        for step, _ in itertools.product(range(KNOWN_STEPS), range(KNOWN_PER_STEP)):
            self.env.curr_step = step
            drawn = await items.next()
            if drawn is None:
                return
            self._add(drawn.item)

    def _add(self, item: Any) -> None:
        """Under its whole question, and under those of its texts that the question holds."""
        question = text_of(self.env.messages(item)[-1].get("content"))
        if isinstance(item, str):
            texts = [item]
        else:
            texts = fields_of(item).values()
        phrases = (
            text
            for text in texts
            if isinstance(text, str) and " " in text.strip() and text in question
        )
        for text in (question, *phrases):
            self._items.setdefault(text.strip(), item)

    def find(self, prompt: str) -> Any:
        """The task that asks this; None where none does."""
        return self._items.get(prompt.strip())

    async def first(self) -> Any:
        """The first task of training. EnvironmentFailed: there is none."""
        await set_up(self.env)
        drawn = await Items(self.env).next()
        if drawn is None:
            raise EnvironmentFailed(f"{self.env.title} has no task.", "get_next_item gave none.")
        return drawn.item

    async def score(self, item: Any, text: str) -> dict[str, Any]:
        """The score of a text as an answer to this task; null and why, where the scorer fails."""
        try:
            return {"score": await self.env.call_scorer("score", item, text)}
        except EnvironmentFailed as error:
            return {"score": None, "note": error.sentence}


async def answer_prompts(
    config: Path, prompts: Sequence[str], out: Path, env: BaseEnv | None
) -> None:
    """Answer every prompt into `out`, in order; scored where an environment of a single turn knows
    a task that asks it, and then in the words of that task.
    """
    if env:
        sampler = env.server
    else:
        sampler = _sampler(config)
    tasks = None
    if isinstance(env, SingleTurnEnv):
        tasks = Tasks(env)

    async def answered(prompt: str) -> dict[str, Any]:
        item = None
        if tasks:
            item = tasks.find(prompt)
        system = None
        if env:
            system = env.config.system_prompt
        messages: list[Message] = []
        if system:
            messages = [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        try:
            if tasks is None or item is None:
                (turn,) = await sampler.chat(messages)
                score = {"score": None, "note": NOT_KNOWN if tasks else NO_SCORER}
            else:
                (turn,) = await sampler.chat(tasks.env.messages(item))
                score = await tasks.score(item, turn.text)
            return {"prompt": prompt, "completion": turn.text, "finish": turn.stop_reason, **score}
        except RolloutFailed as error:
            # the model gave no answer, or the environment no words for it
            return {
                "prompt": prompt,
                "completion": "",
                "finish": None,
                "score": None,
                "note": error.sentence,
            }

    try:
        if tasks:
            await tasks.gather()
        for pending in [asyncio.create_task(answered(prompt)) for prompt in prompts]:
            append_row(out, await pending)
    finally:
        await sampler.close()
        if env:
            env.scorer_workers.close()


async def score_texts(env: BaseEnv, job: Mapping[str, Any]) -> dict[str, Any]:
    """Score the `completions`, or the odd answers where there are none, as answers to `prompt`, or
    to the first task.

    Raises:
        NotFound: none of the environment's tasks asks this prompt. EnvironmentFailed: it cannot
            score, or has no task.
    """
    try:
        if not isinstance(env, SingleTurnEnv):
            raise EnvironmentFailed(
                f"{env.title} cannot score a text by itself.", "It scores whole episodes."
            )
        tasks = Tasks(env)
        if job.get("prompt") is None:
            item = await tasks.first()
        else:
            await tasks.gather()
            item = tasks.find(job["prompt"])
            if item is None:
                raise NotFound(
                    f"{env.title} cannot score answers to this prompt.",
                    f"It is unknown: {NOT_KNOWN}.",
                )
        prompt, reference = text_of(env.messages(item)[-1].get("content")), reference_of(item)
        texts = job.get("completions")
        if texts is not None:
            named = enumerate(texts)
        else:
            named = odd_answers(prompt, reference).items()
        scores = [{"of": name, **await tasks.score(item, text)} for name, text in named]
        return {"prompt": prompt, "reference": reference, "scores": scores}
    finally:
        await env.disconnect()
        env.scorer_workers.close()


def environment_of(config: Path, file: Path, class_name: str) -> BaseEnv:
    """The environment of this class in this file, made with the settings of a config file."""
    name = "halteres_answering"
    sys.path.insert(0, str(file.parent))
    spec = spec_from_file_location(name, file)
    assert spec and spec.loader, "a file of Python"  # noqa: S101 - for the type checker
    module = module_from_spec(spec)
    sys.modules[name] = module  # where pickle looks for the classes of tasks
    spec.loader.exec_module(module)
    defined = vars(module).values()
    kinds = [
        one
        for one in defined
        if isinstance(one, type) and issubclass(one, BaseEnv) and one.__module__ == name
    ]
    named = [kind for kind in kinds if kind.__name__ == class_name] or kinds
    if not named:
        raise EnvironmentFailed(f"{file} defines no environment.")
    settings = settings_of(named[-1], read_file(config)).checked()
    return named[-1](settings.env, [settings.openai])


def _sampler(config: Path) -> Sampler:
    """For an environment that is not ours: its config says where to sample, and nothing else of it
    counts.
    """
    settings = read_file(config)
    env = BaseEnvConfig(tokenizer_name=settings.env["tokenizer_name"], max_token_length=-1)
    tokenizer = load_tokenizer(str(tokenizer_folder(env.tokenizer_name)))
    return make_sampler(env, APIServerConfig(**settings.openai), tokenizer)


async def _run(
    config: Path, job: Mapping[str, Any], environment: Sequence[str]
) -> dict[str, Any] | None:
    env = None
    if environment:
        env = environment_of(config, Path(environment[0]), environment[1])
    if "prompts" in job:
        await answer_prompts(config, job["prompts"], Path(job["out"]), env)
        return None
    if env is None:
        raise EnvironmentFailed("There is no environment to score with.")
    return await score_texts(env, job)


def main() -> int:
    """Exit code 0, or 1 with one sentence on stderr."""
    process.begin("env", torch=True)
    config, job_file, *environment = sys.argv[1:]
    job = json.loads(Path(job_file).read_bytes())
    stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            scores = asyncio.run(_run(Path(config), job, environment))
    except HalteresError as error:
        sentence = error.sentence
    except Exception as error:  # noqa: BLE001 - the environment's file runs here; its failure is the answer
        verb = "score"
        if "prompts" in job:
            verb = "be asked"
        sentence = author_error(
            Path(environment[0] if environment else __file__), verb, error
        ).sentence
    else:
        if scores is not None:
            stdout.write(json.dumps(scores) + "\n")
        return 0
    sys.stderr.write(f"error: {' '.join(sentence.split())}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
