"""GEM's wrappers by their names: tools, what of an episode the policy sees, counters of an episode.

A wrapper is an environment around another. Names are given from the inside out, separated by commas: at most one tool,
then at most one observation wrapper, then `episode_tracking`.

Source: gem-llm 0.1.0 (wrappers/, tools/tool_env_wrapper.py). Unlike there, attributes of the inner environment are
asked each time, never copied, and every wrapper saves and restores its state.
"""

from __future__ import annotations

import copy
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol, Self

import msgspec

from halteres.clients.json_client import post_bytes
from halteres.errors import HalteresError, InvalidConfig, unknown
from halteres.text import Tokenizer

WrappedStep = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class Environment(Protocol):
    """What is wrapped: a game, or a wrapper."""

    def reset(self, seed: int | None = None) -> tuple[str, Any]:
        """Observation and info of a new episode."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        """Observation, reward, terminated, truncated, info."""
        ...

    def save(self) -> dict[str, Any]:
        """The whole state, JSON-able."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where `save` was called."""
        ...

    def spawn(self, same_state: bool = False) -> Environment:
        """Another one of the same kind."""
        ...

    def random_action(self, rng: random.Random) -> str:
        """A well-formed action."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...


class Wrapper(ABC):
    """An environment around another; what it does not define is the inner one's."""

    state: ClassVar[Sequence[str]]
    """The attributes that change during an episode; their values are JSON-able."""

    def __init__(self, env: Environment) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also asked for while a copy has no `env` yet
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Environment:
        """The environment within all wrappers."""
        return self.env.unwrapped if isinstance(self.env, Wrapper) else self.env

    @abstractmethod
    def begin(self) -> None:
        """Set `state` as it is before the first episode."""

    @abstractmethod
    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""

    @abstractmethod
    def step(self, action: str) -> WrappedStep:
        """Play an answer of the policy."""

    def random_action(self, rng: random.Random) -> str:
        """The inner environment's."""
        return self.env.random_action(rng)

    def close(self) -> None:
        """Close the inner environment."""
        self.env.close()

    def save(self) -> dict[str, Any]:
        """The state of this wrapper and of what it wraps, JSON-able."""
        return {"env": self.env.save(), "state": {name: copy.deepcopy(getattr(self, name)) for name in self.state}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where `save` was called, of the same wrappers around a game of the same task."""
        self.env.restore(saved["env"])
        for name in self.state:
            setattr(self, name, copy.deepcopy(saved["state"][name]))

    def spawn(self, same_state: bool = False) -> Self:
        """Another one like it, around another environment like the inner one."""
        twin = copy.copy(self)
        twin.env = self.env.spawn(same_state=same_state)
        twin.begin()
        if same_state:
            for name in self.state:
                setattr(twin, name, copy.deepcopy(getattr(self, name)))
        return twin


_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a tool made of an answer."""

    action: str  # the answer up to the end of the call
    observation: str
    error: str | None  # why the tool failed


class _Document(msgspec.Struct):
    contents: str


class _Passage(msgspec.Struct):
    document: _Document


class _Reply(msgspec.Struct):
    result: list[_Passage]


class SearchTool:
    """Sends the first `<search>…</search>` of an answer to a search server; no proxy is asked.

    A server of GEM's, or one that answers in its form: POST of a msgpack map {query, topk, return_scores};
    {result: [{document: {contents: "title\\ntext"}}]} comes back.

    Args:
        url: of the server, to which queries are posted.
        top_k: passages asked for.
        timeout_s: to wait for the connection, and for each part of the answer.

    Raises:
        InvalidConfig: this is no address of a web server.
    """

    kind = "search"

    instructions = (
        "You have access to a search engine to help answer questions.\n\n"
        "Additional instructions:\n"
        "- If your initial reasoning in <think> shows you lack some knowledge, explain what you need to find next"
        " inside a new <think> block.\n"
        "- Then issue a search query using:\n"
        "  <search> your query here </search>\n"
        "- The search engine will provide results inside:\n"
        "  <information> ... </information>\n"
        "- You may repeat the <think> and <search> steps as many times as needed.\n"
        "- When you are ready, give your final answer in:\n"
        "  <answer> your answer here </answer>"
    )

    def __init__(self, url: str, *, top_k: int = 3, timeout_s: float = 5.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"The search_url '{url}' is no address of a web server.", next="It begins with http://."
            )
        self.url, self.top_k, self.timeout_s = url, top_k, timeout_s

    def use(self, answer: str) -> ToolUse | None:
        """Search for what an answer asks for; None where it asks for nothing. A search that fails is a use too."""
        found = _QUERY.search(answer)
        if found is None:
            return None
        shown, error = "", None
        query: dict[str, Any] = {"query": found[1].strip(), "topk": self.top_k, "return_scores": True}
        try:
            body = msgspec.msgpack.encode(query)
            reply = post_bytes(self.url, body, self.timeout_s, content_type="application/msgpack")
            for number, passage in enumerate(msgspec.msgpack.decode(reply, type=_Reply).result, start=1):
                title, _, text = passage.document.contents.partition("\n")
                shown += f"Doc {number}(Title: {title}) {text}\n"
        except HalteresError as failure:
            error = failure.what  # what a server says beside its status is not for the policy
        except (msgspec.MsgspecError, UnicodeError) as failure:
            error = str(failure)
        shown = shown if error is None else f"[SearchTool Error: {error}]"
        observation = f"\n\n<information>{shown}</information>\n\n"
        return ToolUse(action=answer[: found.end()], observation=observation, error=error)


class ToolWrapper(Wrapper):
    """An answer that calls the tool is answered by the tool; any other is an action. At most `max_uses` calls.

    A call costs no turn of the game. From the first step on `use_tool` is true in every info, as in GEM, where it marks
    a game's observations as the tool's too; `tool_error` says why a call failed, which is paid for as a use.

    Args:
        env: what is wrapped.
        tool: what answers.
        reward: of each use, whether it succeeds or not.
    """

    state = ("num_uses", "num_successes")
    max_uses = 5

    def __init__(self, env: Environment, tool: SearchTool, reward: float) -> None:
        super().__init__(env)
        self.tool, self.reward = tool, reward
        self.begin()

    def begin(self) -> None:
        """No use yet."""
        self.num_uses = self.num_successes = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The inner observation, and how the tool is called."""
        before = {"prev_ep_tool_use_counter": self.num_uses, "prev_ep_tool_success_counter": self.num_successes}
        self.begin()
        observation, info = self.env.reset(seed=seed)
        return f"{observation}\n{self.tool.instructions}", {**info, **before, **self._counters(), "use_tool": False}

    def step(self, action: str) -> WrappedStep:
        """A use of the tool, or a step of the inner environment."""
        use = self.tool.use(action) if self.num_uses < self.max_uses else None
        if use is None:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return observation, reward, terminated, truncated, {**info, **self._counters(), "use_tool": True}
        self.num_uses += 1
        self.num_successes += use.error is None
        last = "\n\nReached the maximum number of tool use. Please output final answer directly."
        info: dict[str, Any] = {
            "parsed_action": use.action,
            "tool_type": self.tool.kind,
            "tool_error": use.error,
            "seed": self.seed,
            "outcome": None,
            "success": False,
            "reward_components": {"tool_use": self.reward},
            **self._counters(),
            "use_tool": True,
        }
        observation = use.observation + (last if self.num_uses == self.max_uses else "")
        return observation, self.reward, False, False, info

    def _counters(self) -> dict[str, int]:
        return {"tool_use_counter": self.num_uses, "tool_success_counter": self.num_successes}


class View(StrEnum):
    """What of an episode the policy sees."""

    CONCAT = "concat"  # all observations
    CONCAT_WITH_ACTION = "concat_with_action"  # observations and actions in turn
    CONCAT_CHAT = "concat_chat"  # the same as the messages of a chat
    CONCAT_CHAT_ON_RESET = "concat_chat_on_reset"  # in turn, the first observation in a chat's markup


class ObservationWrapper(Wrapper):
    """Shows the policy the episode so far; each text ends in a newline, an empty one adds nothing.

    In front of all that stands the latest info's `prefix`, behind it its `suffix`. As in GEM, that is outside of a
    chat's markup: with `concat_chat` and `concat_chat_on_reset` a game's board follows the opening of the assistant's
    turn.

    Args:
        env: what is wrapped.
        view: what is shown.
        chat: the model's chat template, for the views that need one.

    Raises:
        InvalidConfig: a view of a chat without a template.
    """

    state = ("observations", "actions")

    _chat: Tokenizer  # of the views that render a chat

    def __init__(self, env: Environment, view: View, chat: Tokenizer | None = None) -> None:
        super().__init__(env)
        self.view = view
        if chat is not None:
            self._chat = chat
        elif view in (View.CONCAT_CHAT, View.CONCAT_CHAT_ON_RESET):
            raise InvalidConfig(
                f"The wrapper '{view}' needs a chat template.",
                "It renders observations as a chat.",
                "Give the model's tokenizer, or take 'concat_with_action'.",
            )
        self.begin()

    def begin(self) -> None:
        """Nothing seen yet."""
        self.observations: list[dict[str, Any]] = []  # messages: role user or tool, content
        self.actions: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Forget the episode before."""
        self.begin()
        observation, info = self.env.reset(seed=seed)
        if self.view == View.CONCAT_CHAT_ON_RESET:
            observation = self._chat.render([{"role": "user", "content": observation}], add_generation_prompt=True)
        self._remember(observation, info)
        return self._shown(info), info

    def step(self, action: str) -> WrappedStep:
        """Of an answer that called a tool, what follows the call is left out."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.actions.append(info.get("parsed_action", action))
        self._remember(observation, info)
        return self._shown(info), reward, terminated, truncated, info

    def _remember(self, observation: str, info: Mapping[str, Any]) -> None:
        role = "tool" if info.get("use_tool", False) else "user"
        self.observations.append({"role": role, "content": observation})

    def _shown(self, info: Mapping[str, Any]) -> str:
        messages = self.observations
        if self.view != View.CONCAT:  # observations and actions in turn
            messages = [messages[0]]
            for action, observation in zip(self.actions, self.observations[1:], strict=True):
                messages += [{"role": "assistant", "content": action}, observation]
        if self.view == View.CONCAT_CHAT:
            shown = self._chat.render(messages, add_generation_prompt=True)
        else:
            texts = [message["content"] for message in messages]
            shown = "".join(text if not text or text.endswith("\n") else f"{text}\n" for text in texts)
        return f"{info.get('prefix', '')}{shown}{info.get('suffix', '')}"


class EpisodeTracking(Wrapper):
    """Adds steps and rewards of the episode so far to info, after a reset also those of the episode before."""

    state = ("num_steps", "cumulative_rewards")

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self.begin()

    def begin(self) -> None:
        """No step yet."""
        self.num_steps, self.cumulative_rewards = 0, 0.0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Count from 0."""
        before = {"prev_ep_step_counter": self.num_steps, "prev_ep_cumulative_rewards": self.cumulative_rewards}
        observation, info = self.env.reset(seed=seed)
        self.begin()
        return observation, {**info, **before, **self._counters()}

    def step(self, action: str) -> WrappedStep:
        """Count a step, tool uses too."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.num_steps += 1
        self.cumulative_rewards += reward
        return observation, reward, terminated, truncated, {**info, **self._counters()}

    def _counters(self) -> dict[str, float]:
        return {"step_counter": self.num_steps, "cumulative_rewards": self.cumulative_rewards}


SEARCH_REWARDS = {"search_tool": 0.3, "search_tool_no_int_reward": 0.0}
"""Of each use."""

PYTHON_TOOLS = ("python_tool", "python_tool_no_int_reward", "python_tool_no_int_reward_last_line_error")

STAGES = {
    **dict.fromkeys((*PYTHON_TOOLS, *SEARCH_REWARDS), 0),
    **dict.fromkeys([view.value for view in View], 1),
    "episode_tracking": 2,
}
"""All wrappers, and where each of them stands."""


def wrappers(
    names: str, *, chat: Tokenizer | None = None, search_url: str | None = None
) -> tuple[Callable[[Environment], Wrapper], ...]:
    """The wrappers of these names, checked, innermost first.

    Args:
        names: e.g. "concat,episode_tracking"; "" is none.
        chat: the model's chat template, which `concat_chat` and `concat_chat_on_reset` need.
        search_url: a search server, which the search tools need.

    Raises:
        InvalidConfig: a name is unknown, the order another than tool, observation, tracking, or a tool cannot be had. A
            chat template that is missing is told when an environment is wrapped.
    """
    listed = [name.strip() for name in names.split(",")] if names.strip() else []
    for name in listed:
        if name not in STAGES:
            raise unknown(InvalidConfig, "wrapper", name, STAGES)
        if name in PYTHON_TOOLS:
            raise InvalidConfig(
                f"The wrapper '{name}' cannot be used.",
                "It runs what a model wrote, and there is no sandbox for that yet.",
                "Leave it out.",
            )
    stages = [STAGES[name] for name in listed]
    if stages != sorted(set(stages)):
        raise InvalidConfig(
            f"The wrappers '{names}' cannot stand in this order.",
            "At most one tool comes first, then at most one observation wrapper, then episode_tracking.",
            f"'{','.join(sorted(dict.fromkeys(listed), key=lambda name: STAGES[name]))}' is the order.",
        )
    return tuple(_wrapper(name, chat, search_url) for name in listed)


def wrap(env: Environment, names: str, *, chat: Tokenizer | None = None, search_url: str | None = None) -> Environment:
    """An environment within wrappers; arguments and errors as of `wrappers`."""
    for wrapper in wrappers(names, chat=chat, search_url=search_url):
        env = wrapper(env)
    return env


def _wrapper(name: str, chat: Tokenizer | None, search_url: str | None) -> Callable[[Environment], Wrapper]:
    if name in SEARCH_REWARDS:
        if search_url is None:
            raise InvalidConfig(
                f"The wrapper '{name}' needs a search server.",
                "search_url is not set.",
                "Start one that speaks GEM's protocol, and set search_url to its address.",
            )
        tool = SearchTool(search_url)
        return lambda env: ToolWrapper(env, tool, SEARCH_REWARDS[name])
    if name == "episode_tracking":
        return EpisodeTracking
    return lambda env: ObservationWrapper(env, View(name), chat)
