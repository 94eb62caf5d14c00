"""GEM's wrappers by their names: tools, what of an episode the policy sees, counters of an episode.

A wrapper is an environment around another. Names are given from the inside out, separated by
commas: at most one tool, then at most one observation wrapper, then `episode_tracking`.

Source: gem-llm 0.1.0 (wrappers/, tools/tool_env_wrapper.py). Unlike there, attributes of the inner
environment are asked each time, never copied, and every wrapper saves and restores its state.
"""

from __future__ import annotations

import copy
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias, get_type_hints

import msgspec

from halteres.clients.json_client import post_bytes
from halteres.environments.cage import cage_missing
from halteres.environments.games.game import DAMAGED, FIX_STATE, Game, taken
from halteres.environments.python_tool import PythonResult, PythonTool
from halteres.errors import HalteresError, InvalidConfig, InvalidData, unknown
from halteres.tokenizer import Tokenizer

Environment: TypeAlias = "Game[Any, Any] | Wrapper"

Step = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class Wrapper(ABC):
    """An environment around another; what it does not define is the inner one's."""

    state: ClassVar[Sequence[str]]
    """The attributes that change during an episode; their values are JSON-able."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self._begin()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also asked for while a copy has no `env` yet
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Environment:
        """The environment within all wrappers."""
        return self.env.unwrapped if isinstance(self.env, Wrapper) else self.env

    @abstractmethod
    def _begin(self) -> None:
        """Set `state` as it is before the first episode."""

    @abstractmethod
    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Play an answer of the policy."""

    def random_action(self, rng: random.Random) -> str:
        """The inner environment's."""
        return self.env.random_action(rng)

    def close(self) -> None:
        """Close the inner environment."""
        self.env.close()

    def save(self) -> dict[str, Any]:
        """The state of this wrapper and of what it wraps, JSON-able."""
        return {
            "env": self.env.save(),
            "state": {name: copy.deepcopy(getattr(self, name)) for name in self.state},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where `save` was called, of the same wrappers around a game of the same task.

        Raises:
            InvalidData: it is another's, or damaged; all is as it was then.
        """
        twin, kinds = copy.copy(self), get_type_hints(type(self))
        fields = {"env": dict[str, Any], "state": {name: kinds[name] for name in self.state}}
        try:
            content = taken(saved, fields, "the state")
            for name, value in content["state"].items():
                setattr(twin, name, value)
            if not twin._is_possible():
                raise ValueError("no episode comes to such a state")
        except DAMAGED as error:
            what = f"A state of {type(self).__name__} is damaged: nothing was restored."
            raise InvalidData(what, f"{error}.", FIX_STATE) from error
        self.env.restore(content["env"])
        vars(self).update(vars(twin))

    def _is_possible(self) -> bool:
        """Whether the values of `state`, restored and of the right types, fit each other."""
        return True

    def spawn(self, same_state: bool = False) -> Self:
        """Another one like it, around another environment like the inner one."""
        twin = copy.copy(self)
        twin.env = self.env.spawn(same_state=same_state)
        twin._begin()
        if same_state:
            for name in self.state:
                setattr(twin, name, copy.deepcopy(getattr(self, name)))
        return twin


class _Document(msgspec.Struct):
    contents: str


class _Passage(msgspec.Struct):
    document: _Document


class _Reply(msgspec.Struct):
    result: list[_Passage]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What came of one use of a tool."""

    end: int  # of the call, in characters of the answer
    shown: str  # to the policy
    error: str | None  # why it did not succeed


class ToolWrapper(Wrapper):
    """An answer that calls the tool is answered by it; any other is an action. At most 5 uses.

    A use costs no turn of the game. From the first step on `use_tool` is true in every info, as in
    GEM, where it marks a game's observations as the tool's too; `tool_error` says why a use failed,
    which is paid for as a use.

    Args:
        env: what is wrapped.
        reward: of each use.
        success_reward: of one that succeeds, besides.
    """

    state = ("num_uses", "num_successes")
    num_uses: int
    num_successes: int
    max_uses = 5
    tool_type: ClassVar[str]
    instructions: ClassVar[str]

    def __init__(self, env: Environment, *, reward: float, success_reward: float = 0.0) -> None:
        super().__init__(env)
        self.reward, self.success_reward = reward, success_reward

    @abstractmethod
    def use(self, action: str) -> ToolUse | None:
        """The tool's answer to the first call in this action; None: it has no call."""

    def _begin(self) -> None:
        self.num_uses = self.num_successes = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The inner observation, and how to use the tool."""
        before = {
            "prev_ep_tool_use_counter": self.num_uses,
            "prev_ep_tool_success_counter": self.num_successes,
        }
        self._begin()
        observation, info = self.env.reset(seed=seed)
        return f"{observation}\n{self.instructions}", {
            **info,
            **before,
            **self._counters(),
            "use_tool": False,
        }

    def step(self, action: str) -> Step:
        """The first call of an answer, or a step of the inner environment."""
        used = self.use(action) if self.num_uses < self.max_uses else None
        if used is None:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return (
                observation,
                reward,
                terminated,
                truncated,
                {**info, **self._counters(), "use_tool": True},
            )
        self.num_uses += 1
        components = {"tool_use": self.reward}
        if used.error is None:
            self.num_successes += 1
            if self.success_reward:
                components["tool_success"] = self.success_reward
        observation = used.shown
        if self.num_uses == self.max_uses:
            observation += (
                "\n\nReached the maximum number of tool use. Please output final answer directly."
            )
        info = {
            "parsed_action": action[: used.end],
            "tool_type": self.tool_type,
            "tool_error": used.error,
            "seed": self.seed,
            "outcome": None,
            "success": False,
            "reward_components": components,
            **self._counters(),
            "use_tool": True,
        }
        return observation, sum(components.values()), False, False, info

    def _counters(self) -> dict[str, int]:
        return {"tool_use_counter": self.num_uses, "tool_success_counter": self.num_successes}


class SearchTool(ToolWrapper):
    """`<search>…</search>` is answered by a search server.

    The server is GEM's, or one that answers in its form; no proxy is asked. POST of a msgpack map
    {query, topk, return_scores}; {result: [{document: {contents: "title\\ntext"}}]} comes back.

    Args:
        env: what is wrapped.
        url: of the server, to which queries are posted.
        reward: of each search, whether it succeeds or not.
    """

    num_passages = 3
    timeout_s = 5.0  # to wait for the connection, and for each part of the answer
    query = re.compile(r"<search>(.*?)</search>", re.DOTALL)
    tool_type = "search"
    instructions = (
        "You have access to a search engine to help answer questions.\n\n"
        "Additional instructions:\n"
        "- If your initial reasoning in <think> shows you lack some knowledge, explain what you "
        "need to find next"
        " inside a new <think> block.\n"
        "- Then issue a search query using:\n"
        "  <search> your query here </search>\n"
        "- The search engine will provide results inside:\n"
        "  <information> ... </information>\n"
        "- You may repeat the <think> and <search> steps as many times as needed.\n"
        "- When you are ready, give your final answer in:\n"
        "  <answer> your answer here </answer>"
    )

    def __init__(self, env: Environment, url: str, reward: float) -> None:
        super().__init__(env, reward=reward)
        self.url = url

    def use(self, action: str) -> ToolUse | None:
        """The passages that the server finds."""
        found = self.query.search(action)
        if found is None:
            return None
        shown, error = "", None
        query = {"query": found[1].strip(), "topk": self.num_passages, "return_scores": True}
        try:
            body = msgspec.msgpack.encode(query)
            reply = post_bytes(self.url, body, self.timeout_s, content_type="application/msgpack")
            for number, passage in enumerate(
                msgspec.msgpack.decode(reply, type=_Reply).result, start=1
            ):
                title, _, text = passage.document.contents.partition("\n")
                shown += f"Doc {number}(Title: {title}) {text}\n"
        except (HalteresError, msgspec.MsgspecError, UnicodeError) as failure:
            # What a server says beside its status is not for the policy.
            error = failure.what if isinstance(failure, HalteresError) else str(failure)
            shown = f"[SearchTool Error: {error}]"
        return ToolUse(
            end=found.end(), shown=f"\n\n<information>{shown}</information>\n\n", error=error
        )


_NO_CODE = "SyntaxError: invalid syntax"
_PLACEHOLDER = PythonResult(output="", errors=_NO_CODE, failure=_NO_CODE)


class PythonToolWrapper(ToolWrapper):
    """The first block of Python in an answer, `<python>…</python>` or fenced as `python`, is run in
    a cage, and its output shown; each use begins with nothing.

    Code that fails for an undefined name is run once more with GEM's usual imports. Unlike in GEM,
    no word of it is forbidden, the time-out of 5 s holds, and what is shown is cut.

    Args:
        env: what is wrapped.
        reward: of each use.
        success_reward: of one that ends without an error, besides.
        last_line_only: show no more of the errors than their last line.
    """

    blocks = (
        re.compile(r"<python>(.*?)</python>", re.DOTALL),
        re.compile(r"```\n?python(.*?)```", re.DOTALL),
    )
    tool_type = "python_code"
    instructions = (
        "Solve the above problem step by step. You now have the ability to selectively write "
        "executable Python code to enhance your reasoning process. The Python code will be "
        "executed by an external sandbox, "
        'and the output (after "Code execution result: ") is returned to aid your reasoning and '
        "help you arrive at the final answer. "
        "The Python code should be complete scripts, including necessary imports, wrapped within "
        "<python>...</python> tags or using ```python...``` code block. "
        "Return your final answer within \\boxed{}."
    )

    def __init__(
        self,
        env: Environment,
        *,
        reward: float,
        success_reward: float = 0.0,
        last_line_only: bool = False,
    ) -> None:
        super().__init__(env, reward=reward, success_reward=success_reward)
        self.last_line_only = last_line_only
        self.python = PythonTool(usual_imports=True)

    def use(self, action: str) -> ToolUse | None:
        """What the code printed, then its errors.

        Raises:
            ToolFailed: the code was not run, through no fault of its own.
        """
        found = [block.search(action) for block in self.blocks]
        block = min((one for one in found if one), key=lambda one: one.end(), default=None)
        if block is None:
            return None
        code = block[1].strip()
        if code == "...":
            # paid for as an error, as in GEM, though Python would run it
            result = _PLACEHOLDER
        else:
            result = self.python.run_and_wait(code)
        errors = result.errors
        if self.last_line_only:
            errors = errors.split("\n")[-1]
        shown = "\n".join([result.output, errors] if errors else [result.output])
        return ToolUse(
            end=block.end(),
            shown=f"Code execution result: {shown.lstrip(' ' + chr(10))}\n",
            error=result.failure,
        )


class View(StrEnum):
    """What of an episode the policy sees."""

    CONCAT = "concat"  # all observations
    CONCAT_WITH_ACTION = "concat_with_action"  # observations and actions in turn
    CONCAT_CHAT = "concat_chat"  # the same as the messages of a chat
    # in turn, the first observation in a chat's markup
    CONCAT_CHAT_ON_RESET = "concat_chat_on_reset"


class ObservationWrapper(Wrapper):
    """Shows the policy the episode so far; each text ends in a newline, an empty one adds nothing.

    In front of all that stands the latest info's `prefix`, behind it its `suffix`. As in GEM, that
    is outside of a chat's markup: with `concat_chat` and `concat_chat_on_reset` a game's board
    follows the opening of the assistant's turn.

    Args:
        env: what is wrapped.
        view: what is shown.
        chat: the model's chat template, for the views that need one.

    Raises:
        InvalidConfig: a view of a chat without a template.
    """

    state = ("observations", "actions")
    observations: list[dict[str, str]]  # messages: role user or tool, content
    actions: list[str]

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

    def _begin(self) -> None:
        self.observations = []
        self.actions = []

    def _is_possible(self) -> bool:
        are_messages = all(message.keys() == {"role", "content"} for message in self.observations)
        return are_messages and len(self.observations) == len(self.actions) + bool(
            self.observations
        )

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Forget the episode before."""
        self._begin()
        observation, info = self.env.reset(seed=seed)
        if self.view == View.CONCAT_CHAT_ON_RESET:
            observation = self._chat.render(
                [{"role": "user", "content": observation}], add_generation_prompt=True
            )
        return self._shown(observation, dict(info)), dict(info)

    def step(self, action: str) -> Step:
        """Of an answer that called a tool, what follows the call is left out."""
        observation, reward, terminated, truncated, more = self.env.step(action)
        info: dict[str, Any] = {**more}
        self.actions.append(info.get("parsed_action", action))
        return self._shown(observation, info), reward, terminated, truncated, info

    def _shown(self, observation: str, info: Mapping[str, Any]) -> str:
        """The episode with its latest observation."""
        self.observations.append(
            {"role": "tool" if info.get("use_tool", False) else "user", "content": observation}
        )
        messages = self.observations
        if self.view != View.CONCAT:  # observations and actions in turn
            messages = [messages[0]]
            for action, following in zip(self.actions, self.observations[1:], strict=True):
                messages += [{"role": "assistant", "content": action}, following]
        if self.view == View.CONCAT_CHAT:
            shown = self._chat.render(messages, add_generation_prompt=True)
        else:
            texts = [message["content"] for message in messages]
            shown = "".join(
                text if not text or text.endswith("\n") else f"{text}\n" for text in texts
            )
        return f"{info.get('prefix', '')}{shown}{info.get('suffix', '')}"


class EpisodeTracking(Wrapper):
    """Adds steps and rewards of the episode so far to info, after a reset also those of the episode
    before.
    """

    state = ("num_steps", "cumulative_rewards")
    num_steps: int
    cumulative_rewards: float

    def _begin(self) -> None:
        self.num_steps, self.cumulative_rewards = 0, 0.0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Count from 0."""
        before = {
            "prev_ep_step_counter": self.num_steps,
            "prev_ep_cumulative_rewards": self.cumulative_rewards,
        }
        observation, info = self.env.reset(seed=seed)
        self._begin()
        return observation, {**info, **before, **self._counters()}

    def step(self, action: str) -> Step:
        """Count a step, tool uses too."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.num_steps += 1
        self.cumulative_rewards += reward
        return observation, reward, terminated, truncated, {**info, **self._counters()}

    def _counters(self) -> dict[str, float]:
        return {"step_counter": self.num_steps, "cumulative_rewards": self.cumulative_rewards}


SEARCH_REWARDS = {"search_tool": 0.3, "search_tool_no_int_reward": 0.0}
"""Of each use."""

PYTHON_TOOLS: Mapping[str, Callable[[Environment], Wrapper]] = {
    "python_tool": partial(PythonToolWrapper, reward=0.05, success_reward=0.25),
    "python_tool_no_int_reward": partial(PythonToolWrapper, reward=0.0),
    "python_tool_no_int_reward_last_line_error": partial(
        PythonToolWrapper, reward=0.0, last_line_only=True
    ),
}

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
        InvalidConfig: a name is unknown, the order another than tool, observation, tracking, or a
            tool cannot be had. A chat template that is missing is told when an environment is
            wrapped.
    """
    listed = [name.strip() for name in names.split(",")] if names.strip() else []
    made: list[Callable[[Environment], Wrapper]] = []
    for name in listed:
        if name not in STAGES:
            raise unknown(InvalidConfig, "wrapper", name, STAGES)
        if name in PYTHON_TOOLS:
            missing = cage_missing()
            if missing is not None:
                raise InvalidConfig(
                    f"The wrapper '{name}' runs what a model wrote, and cannot be used here.",
                    missing,
                    "Leave it out.",
                )
            made.append(PYTHON_TOOLS[name])
        elif name == "episode_tracking":
            made.append(EpisodeTracking)
        elif name not in SEARCH_REWARDS:
            made.append(partial(ObservationWrapper, view=View(name), chat=chat))
        elif search_url is None:
            raise InvalidConfig(
                f"The wrapper '{name}' needs a search server.",
                "search_url is not set.",
                "Start one that speaks GEM's protocol, and set search_url to its address.",
            )
        elif not search_url.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"The search_url '{search_url}' is no address of a web server.",
                next="It begins with http://.",
            )
        else:
            made.append(partial(SearchTool, url=search_url, reward=SEARCH_REWARDS[name]))
    stages = [STAGES[name] for name in listed]
    if stages != sorted(set(stages)):
        raise InvalidConfig(
            f"The wrappers '{names}' cannot stand in this order.",
            "At most one tool comes first, then at most one observation wrapper, then "
            "episode_tracking.",
            f"'{','.join(sorted(dict.fromkeys(listed), key=lambda name: STAGES[name]))}' is the "
            "order.",
        )
    return tuple(made)


def wrap(
    env: Environment, names: str, *, chat: Tokenizer | None = None, search_url: str | None = None
) -> Environment:
    """An environment within wrappers; arguments and errors as of `wrappers`."""
    for wrapper in wrappers(names, chat=chat, search_url=search_url):
        env = wrapper(env)
    return env
