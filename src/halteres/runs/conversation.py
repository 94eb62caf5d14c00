"""A conversation with what a run has trained: a question in the words of the run's own prompts, and
what the run's service answers.

Owns: those words, learnt from the prompts that the run has recorded, whatever wrote them (a
template, code, an environment of atroposlib's); which weights of a run can be asked; what a policy
reads of the turns before.
Never: shows anything; keeps a conversation longer than its caller.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from halteres.clients.json_client import Refused
from halteres.config import environ
from halteres.documents import half_characters
from halteres.errors import Conflict, InvalidData, NotFound, NotReady, ProcessFailed
from halteres.models import model_folder
from halteres.next_step import NextStep
from halteres.rewards.model_folder import RESULT
from halteres.runs import servers
from halteres.runs.directory import RunDirectory
from halteres.runs.kept_service import ASK_EVERY_S, ServiceSearch
from halteres.runs.reading.named_weights import newest_weights
from halteres.runs.reading.rollouts import rollouts_of, steps_of
from halteres.tokenizer import load_tokenizer

GAP = "[...]"  # stands for the user's text where a prompt is shown

FEWEST_PROMPTS, MOST_PROMPTS = 4, 256
"""Different prompts: of fewer, what is alike may be alike by chance; more are not looked at."""

LONGEST_EXAMPLE = 80  # characters

TEMPERATURE, MAX_TOKENS = 0.0, 128
"""How a question is answered where its user says nothing else; 0 is greedy."""

WHOLE_ANSWER_S = 240.0
"""How long an answer may take. The service that is kept for it would end IDLE_S after the question.
"""

BASE, NEWEST = "base", "newest"

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Weights of a run that can be asked."""

    name: str  # BASE, NEWEST or RUN@STEP
    path: str  # as the service knows them: the base model's name, or tinker://
    step: int | None = None  # optimiser steps they have had; None: the base model


def policies_of(run: RunDirectory) -> list[Policy]:
    """What of a run can be asked: its base model, its newest weights, and those of its other
    checkpoints, newest first.

    Raises:
        Conflict: it trains a reward model.
    """
    state = run.state()
    if not state.trains_policy:
        evaluate = {"model": str(run.path / RESULT), "data": "HELD_OUT"}
        raise Conflict(
            f"Run {run.run_id} trains a reward model, no policy.",
            "It scores answers, and writes none.",
            NextStep("rl_evaluate_reward_model", evaluate, "See how well it scores"),
        )
    found = [Policy(name=BASE, path=run.settings().inference.model)]
    # a checkpoint of step 0 is the base model, with an adapter that changes nothing
    rows = [row for row in run.checkpoints() if row.get("sampler_path") and row["step"] > 0]
    paths = {row["step"]: row["sampler_path"] for row in rows}
    for step in sorted(paths, reverse=True):
        name = f"{run.run_id}@{step}"
        if len(found) == 1:
            name = NEWEST
        found.append(Policy(name=name, path=paths[step], step=step))
    return found


def policy_named(run: RunDirectory, name: str) -> Policy:
    """The policy that BASE, NEWEST or RUN@STEP means.

    Raises:
        NotFound: the run has no weights, or none of this step.
        Conflict: it trains a reward model.
    """
    there = policies_of(run)
    for policy in there:
        if name in (policy.name, f"{run.run_id}@{policy.step}"):
            return policy
    if name == NEWEST:
        newest = newest_weights(run)
        return Policy(name=name, path=newest.path, step=newest.step)
    steps = [str(policy.step) for policy in there if policy.step is not None]
    raise NotFound(
        f"Run {run.run_id} has no weights '{name[:80]}' to sample from.",
        f"It has those of steps {', '.join(steps)}." if steps else "It has no checkpoint yet.",
        f"Ask {BASE}, {NEWEST} or {run.run_id}@STEP.",
        allowed=[policy.name for policy in there],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question as the policy reads it: the text of a prompt, or messages, or both."""

    prompt: str | None  # as in training; None: the run has recorded too few to learn from
    messages: Messages | None  # None: the prompt is no chat

    @property
    def as_read(self) -> Messages | str:
        """As a reward model reads it."""
        if self.messages is not None:
            return self.messages
        return self.prompt or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a question is answered."""

    temperature: float = TEMPERATURE
    max_tokens: int = MAX_TOKENS
    n: int = 1  # answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """No service was there: one starts, and the answer waits for it. Comes every second."""

    seconds: int  # since it was asked for


@dataclass(frozen=True, slots=True)
class TurnForgotten:
    """The oldest turn was left out of the conversation, which was too long for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer."""

    index: int  # of the answer, among those that were asked for
    text: str
    finish: str | None = None  # of its last piece: why it ends


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was asked and answered so far."""

    run: RunDirectory
    base: str
    words: Wording | None
    turns: list[tuple[Asked, str]] = field(default_factory=list[tuple[Asked, str]])

    @classmethod
    def with_run(cls, run: RunDirectory) -> Conversation:
        """A new one, in the words of the run's prompts."""
        return cls(run=run, base=run.settings().inference.model, words=wording_of(run))

    @property
    def goes_on_by_itself(self) -> bool:
        """Whether a policy reads the turns before unless its user decides otherwise: as in
        training, or because it is not known how it was trained.
        """
        return self.words is None or "max_turns" in self.run.environment_config()

    @property
    def example(self) -> str:
        """A question of the run's own, where there is a short one."""
        if self.words is not None and self.words.example:
            return self.words.example
        return str(self.run.environment_config().get("example_question") or "")

    def asked(self, text: str) -> Asked:
        """This question, without those before.

        Raises:
            InvalidData: it is not UTF-8.
        """
        if half_characters(text) is not None:
            raise InvalidData("The question is not UTF-8 text.", next="Send it as UTF-8.")
        if self.words is None:
            return Asked(prompt=None, messages=_messages(self.run, text))
        prompt = self.words.around(text)
        messages = _messages_of(prompt, self.run, self.base)
        if isinstance(messages, str):
            return Asked(prompt=prompt, messages=None)
        return Asked(prompt=prompt, messages=messages)

    def request(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        """The route and the body that ask it after the turns before.

        The first question is the prompt that training had, to the token. Later ones are messages;
        of a prompt that is no chat, the texts one after another.
        """
        if asked.messages is not None and (self.turns or asked.prompt is None):
            messages: Messages = []
            for before, answer in self.turns:
                messages += _without_system(before.messages or [], messages)
                messages.append({"role": "assistant", "content": answer})
            messages += _without_system(asked.messages, messages)
            return "chat/completions", {"messages": messages}
        texts = [f"{before.prompt}{answer}\n" for before, answer in self.turns]
        prompt = "".join([*texts, asked.prompt or ""])
        return "completions", {"prompt": prompt, "add_special_tokens": False}

    async def answer(
        self, asked: Asked, policy: Policy, sampling: Sampling
    ) -> AsyncGenerator[Starting | TurnForgotten | Piece, None]:
        """What the policy answers after the turns before, piece by piece; closed early, it ends the
        sampling. The oldest turns are left out of a conversation that the service refuses, as it
        does what is longer than the model's context.

        Raises:
            NotReady: there is no service and none could be started, or it stopped answering.
            Refused, ProcessFailed: the service refused the question, or failed.
        """
        body = {
            "model": policy.path,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "n": sampling.n,
            "stream": True,
        }
        while True:
            search = ServiceSearch(self.run, self.base)
            service = await asyncio.to_thread(search.look)
            began, said = time.monotonic(), -1
            while service is None:
                seconds = int(time.monotonic() - began)
                if seconds > said:
                    said = seconds
                    yield Starting(seconds=seconds)
                await asyncio.sleep(ASK_EVERY_S)
                service = await asyncio.to_thread(search.look)
            path, prompt = self.request(asked)
            route = f"/runs/{self.run.run_id}/v1/{path}"
            stream = servers.stream(service, route, {**body, **prompt})
            try:
                async with aclosing(_within(stream, WHOLE_ANSWER_S)) as events:
                    async for event in events:
                        for piece in _pieces(event):
                            yield piece
                return
            except Refused as error:
                if not self.turns or error.answered != 400:
                    raise
                del self.turns[0]
                yield TurnForgotten()
            except NotReady:
                await asyncio.to_thread(servers.end_kept, self.run)
                raise


async def _within(
    events: AsyncGenerator[dict[str, Any], None], most_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of an answer. ProcessFailed where the last has not come after so many seconds."""
    ends = asyncio.get_running_loop().time() + most_s
    async with aclosing(events):
        while True:
            try:
                # no `wait_for`, whose task of its own (Python 3.11) a second cancellation leaves
                # running
                async with asyncio.timeout_at(ends):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise ProcessFailed(
                    f"The answer was not whole after {most_s:.0f} s.",
                    "The service samples too slowly for so many tokens.",
                    "Ask for fewer tokens.",
                ) from error
            yield event


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    """The parts of answers in an event of either route."""
    for choice in event.get("choices", ()):
        text = choice.get("text")
        if text is None:
            text = choice.get("delta", {}).get("content") or ""
        yield Piece(index=choice["index"], text=text, finish=choice.get("finish_reason"))


def _without_system(messages: Messages, before: Messages) -> Messages:
    """A turn's messages; the system prompt stands at the beginning alone."""
    if not before:
        return messages
    return [message for message in messages if message["role"] != "system"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What all prompts of a run have in common: the chat's marks, a system prompt, the words around
    a task.
    """

    head: str
    tail: str
    example: str = ""  # a task as it stood between them, where that is a short line

    @classmethod
    def of(cls, prompts: Collection[str]) -> Wording:
        """Learnt from prompts. Neither side ends within a word: tasks that begin with the same
        letters are tasks.

        >>> Wording.of(["Add 1 and 2, please.", "Add 17 and 4, please."])
        Wording(head='Add ', tail=', please.', example='17 and 4')
        """
        head = re.sub(r"\w+\Z", "", os.path.commonprefix(list(prompts)))
        rests = [prompt[len(head) :] for prompt in prompts]
        tail = re.sub(r"^\w+", "", os.path.commonprefix([rest[::-1] for rest in rests])[::-1])
        example = rests[-1].removesuffix(tail)
        if len(example) > LONGEST_EXAMPLE or "\n" in example:
            example = ""
        return cls(head=head, tail=tail, example=example)

    def around(self, text: str) -> str:
        """The prompt with this text as its task; words of the head and the tail that it has already
        are not doubled.
        """
        text = text.strip()
        begins = len(text)
        while not self.head.endswith(text[:begins]):
            begins -= 1
        task = text[begins:]
        ends = len(task)
        while not self.tail.startswith(task[len(task) - ends :]):
            ends -= 1
        return self.head + task[: len(task) - ends] + self.tail


def wording_of(run: RunDirectory) -> Wording | None:
    """The words of a run's prompts, its newest first; None where it has recorded too few different
    ones.
    """
    prompts: dict[str, None] = {}
    for step in reversed(steps_of(run)):
        found = rollouts_of(run, step)
        firsts = {mark.offset: mark for mark in found.marks}
        prompts |= dict.fromkeys(
            rollout.prompt for rollout in found.rollouts(list(firsts.values())) if rollout.prompt
        )
        if len(prompts) >= MOST_PROMPTS:
            break
    if len(prompts) >= FEWEST_PROMPTS:
        return Wording.of(prompts)
    return None


def _messages(run: RunDirectory, text: str) -> Messages:
    messages = [{"role": "user", "content": text}]
    system = run.environment_config().get("system_prompt")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _messages_of(prompt: str, run: RunDirectory, model: str) -> Messages | str:
    """The messages that a prompt was made of, as reward models read them; the prompt itself where
    it is no chat, or only a service elsewhere has the tokenizer.
    """
    try:
        tokenizer = load_tokenizer(str(model_folder(model, environ.home() / "models") or model))
    except NotFound:
        return prompt
    begin, _, end = tokenizer.render(_messages(run, GAP), add_generation_prompt=True).partition(GAP)
    if not (begin and prompt.startswith(begin) and prompt.endswith(end)):
        return prompt
    return _messages(run, prompt.removeprefix(begin).removesuffix(end))
