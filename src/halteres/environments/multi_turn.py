"""Episodes of several turns: the policy answers, the environment answers back, until one of them
ends it.

    reset(task) ─▶ messages ─▶ ( policy ─▶ Reply ─▶ step(reply) ─▶ Step: messages, reward )* ─▶
    outcome, score

Every episode ends in one outcome: success or failure, as the environment says or its score does;
turn_limit, length_stop, context_overflow, by its limits; format_error, where the environment says
so. All of them are trained on but those of `mask_outcomes`. An environment that raises has no
outcome: that rollout failed, and is repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any, ClassVar, cast, get_args

from halteres.environments.base import awaited
from halteres.environments.config import BaseEnvConfig, setting
from halteres.environments.episodes import Episode, EpisodeConfig, EpisodeEnv
from halteres.environments.scored import finite
from halteres.errors import EnvironmentFailed, boundary, contained
from halteres.rollouts.chat import Chat
from halteres.rollouts.rng import episode_rng
from halteres.rollouts.sampler import ContextOverflow
from halteres.tokenizer import Message, text_of
from halteres.tool_calls import ToolCall, read_calls
from halteres.types import Outcome, StopReason


class MultiTurnConfig(EpisodeConfig):
    """Settings of environments of several turns."""

    max_turns: int = setting(16, "turns of one episode at most", ge=1)
    end_on_length: bool = setting(
        False, "an answer that is cut off at max_new_tokens ends its episode (length_stop)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy said in one turn."""

    text: str  # without the end token and, in an environment with tools, without calls
    turn: int  # from 0
    stop_reason: StopReason
    # also those that cannot be read, which say why: empty without `tools`
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers."""

    messages: str | Sequence[Message] = ()  # appended to the chat; a str is one message of the user
    reward: float = 0.0  # of the reply, in the environment's own units
    done: bool = False  # the episode is over; `messages` are then for the records alone
    # the chat begins anew with `messages`: an observation that repeats all that matters
    fresh: bool = False
    # of an episode that is done; None: success or failure, by its score
    outcome: Outcome | None = None


Tools = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's form: {"type": "function", "function": {"name": ..., "parameters":
...}}.
"""


class MultiTurnEnv(EpisodeEnv):
    """Write `get_next_item`, `reset` and `step`; `tools` for functions that the policy may call,
    `load_dataset` for data, `eval_items` for evaluation, `score_episode` where a score is more than
    the sum of rewards, `measure` for further metrics.

    Each episode has a shallow copy of this object to itself: what `reset` and `step` set on `self`
    belongs to the episode; what they change in place (a list of the original's, say) belongs to
    all. `self.rng` is the episode's own there, and begins alike for all episodes of a group.
    """

    env_config_cls: ClassVar[type[BaseEnvConfig]] = MultiTurnConfig
    config: MultiTurnConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # narrowed, and only ever read
    tools: Tools | Callable[[], Tools] = ()
    """What the policy may call: an attribute, a property or a method. Its calls are in
    `Reply.tool_calls`.
    """

    def reset(self, task: Any) -> str | Sequence[Message] | Awaitable[str | Sequence[Message]]:
        """Begin an episode: the user's first message, or whole messages (then without the config's
        system prompt).
        """
        raise NotImplementedError(f"{type(self).__name__} needs reset.")

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Answer the policy; `async def` or not."""
        raise NotImplementedError(f"{type(self).__name__} needs step.")

    def close(self) -> Awaitable[None] | None:
        """Let go of what `reset` took: called once for every `reset`, however the episode ended;
        `async def` or not.
        """

    async def play(self, task: Any, temperature: float | None = None) -> Episode:
        """One episode, on a copy of this object; `temperature` None: that of training.

        Raises:
            EnvironmentFailed: `reset`, `step` or a score raised, or gave what it cannot give.
            ContextOverflow: not even the first prompt leaves room for an answer.
            SamplerFailed: the policy could not be asked.
        """
        env = copy.copy(self)
        env.rng = episode_rng()
        try:
            return await env._run(task, temperature)
        finally:
            with boundary(EnvironmentFailed, f"{self.title}.close"):
                await awaited(env.close())

    async def _run(self, task: Any, temperature: float | None) -> Episode:
        """One episode on this very object."""
        with boundary(EnvironmentFailed, f"{self.title}.reset"):
            messages = self.chat_of(_checked(await awaited(self.reset(task)), "reset"))
            tools = tuple(self.tools() if callable(self.tools) else self.tools)
        # A server that is asked with messages is told of the tools in words.
        new_chat = partial(
            Chat, self.tokenizer, tools=tools, in_words=self.server.server_type != "sglang"
        )
        chat = new_chat(messages)
        episode = Episode(opening=tuple(messages))
        while True:
            try:
                (turn,) = await self.server.chat(
                    chat.messages, temperature=temperature, prompt=chat.prompt
                )
            except ContextOverflow:
                if not episode.turns:
                    raise
                return await self._ended(episode, "context_overflow")
            if turn.stop_reason == "length" and self.config.end_on_length:
                episode.add(chat.messages, turn, [])
                return await self._ended(episode, "length_stop")
            text, calls = read_calls(turn.text) if tools else (turn.text, ())
            # of this turn; in ids of calls, which are the same in a repeated run
            number = len(episode.turns)
            calls = tuple(replace(call, id=f"call_{number}_{call.index}") for call in calls)
            reply = Reply(text=text, turn=number, stop_reason=turn.stop_reason, tool_calls=calls)
            step, messages = await self._step(reply)
            shown = _new_part(messages, chat.messages) if step.fresh else messages
            episode.add(chat.messages, replace(turn, reward=step.reward), shown)
            if step.done:
                return await self._ended(episode, step.outcome)
            if len(episode.turns) >= self.config.max_turns:
                return await self._ended(episode, "turn_limit")
            if step.fresh:
                chat = new_chat(messages)
            else:
                chat.go_on(turn.action, messages)

    async def _step(self, reply: Reply) -> tuple[Step, list[dict[str, Any]]]:
        """What the environment answers, and its messages as such."""
        where = f"{self.title}.step"
        with contained(EnvironmentFailed, where):
            step: Any = await awaited(self.step(reply))
            if not isinstance(step, Step):
                raise TypeError(f"a Step is expected, not {type(step).__name__}")
            if step.outcome not in (None, *get_args(Outcome)):
                raise ValueError(
                    f"there is no outcome '{step.outcome}'; they are {', '.join(get_args(Outcome))}"
                )
            shown = _checked(step.messages, "Step.messages")
            if isinstance(shown, str) and not step.fresh:
                shown = [{"role": "user", "content": shown}]
            # which puts the config's system prompt before a fresh chat
            messages = self.chat_of(shown)
        return replace(step, reward=finite(step.reward, where)), messages


def _checked(messages: Any, what: str) -> str | Sequence[Message]:
    """What an author's method gave as messages. TypeError: it is no text, and no list of
    messages.
    """
    if isinstance(messages, str):
        return messages
    rule = f"{what}: a str or a list of messages is expected"
    if not isinstance(messages, Sequence):
        raise TypeError(f"{rule}, not {type(messages).__name__}")
    for message in cast(Sequence[object], messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f'{rule}, each a dict with "role" and "content", not {message!r:.200}')
    return cast(Sequence[Message], messages)


def _new_part(fresh: Sequence[dict[str, Any]], before: Sequence[Message]) -> list[dict[str, Any]]:
    """A fresh chat's last message, without the lines with which the one before it began, too."""
    if not fresh or not before:
        return list(fresh)
    text = text_of(fresh[-1].get("content"))
    shared = len(commonprefix([text_of(before[-1].get("content")), text]))
    return [{**fresh[-1], "content": text[text.rfind("\n", 0, shared + 1) + 1 :]}]
