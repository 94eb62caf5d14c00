"""What all text games share: seeds, the rule of a step, save and restore.

A family of games gives its levels, the pattern of an action, its rules, and what a move does.
"""

from __future__ import annotations

import copy
import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from halteres.errors import InvalidConfig, InvalidData, unknown
from halteres.rollouts.rng import Split

Outcome = Literal["success", "failure", "turn_limit", "format_error"]
"""How an episode ended."""

FORMAT_ERROR_REWARD = -0.1

DAMAGED: Final = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
"""What restoring a damaged state raises, before it is told as InvalidData."""

FIX_STATE = "Restore an older one, or begin the episode anew with its seed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How hard an episode is; a family adds fields of its own."""

    max_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is played; together with a seed it is the whole initial state."""

    id: str  # e.g. "game:FifteenPuzzle-v0-easy"
    parameters: Mapping[str, Any]  # the family's options by name, JSON-able, defaults filled in


class Move(NamedTuple):
    """What came of a well-formed action."""

    observation: str
    reward: float = 0.0
    # None: play goes on, unless this was the last turn
    outcome: Literal["success", "failure"] | None = None


class Info(TypedDict, total=False):
    """What comes beside an observation."""

    suffix: str  # shown once, after all observations: the board, the request for a move
    seed: int  # of this episode
    outcome: Outcome | None  # None while play goes on; this and the next two only from `step`
    success: bool
    # by what paid: "move", "format_error", "turn_limit"; their sum is the reward
    reward_components: dict[str, float]


Step = tuple[str, float, bool, bool, Info]
"""Observation, reward, terminated, truncated, info."""

LevelT = TypeVar("LevelT", bound=Level)
ActionT = TypeVar("ActionT")


_SAVED: Mapping[str, Any] = {
    "task": {"id": str, "parameters": dict[str, Any]},
    "seeds": {"split": str, "base_seed": int, "num_taken": int},
    "seed": int,
    "turn": int,
    "generator": list[Any],
    "state": dict[str, Any],
}
"""The fields of what `Game.save` gives."""


def taken(value: Any, kind: Any, name: str) -> Any:
    """A copy of a value of JSON that is of a type, or a map that has fields of some types.
    ValueError: it is not.
    """
    if isinstance(kind, Mapping):
        fields = taken(value, dict[str, Any], name)
        missing = kind.keys() - fields.keys()
        if missing:
            raise ValueError(f"{name} has no {min(missing)}")
        return {
            field: taken(fields[field], part, f"{name}.{field}") for field, part in kind.items()
        }
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list and isinstance(value, list):
        return [taken(item, parts[0], name) for item in value]
    if origin is dict and isinstance(value, Mapping):
        return {taken(key, str, name): taken(item, parts[1], name) for key, item in value.items()}
    if kind is Any:
        return copy.deepcopy(value)
    allowed = (int, float) if kind is float else origin or kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is not of the type {kind}")
    return value


class Game(ABC, Generic[LevelT, ActionT]):
    """One environment that plays episodes of one task, one after another; `reset` comes first.

    Reset with seed s, all draws come from one `random.Random(s)`, in the order in which GEM draws:
    ours and GEM's environment after `reset(seed=s)` play the same episode. Another process that
    restores what `save` gave goes on identically.

    Args:
        id: e.g. "game:GuessTheNumber-v0-easy".
        split: of the seeds that `reset` takes when it is given none.
        base_seed: of the same.
        parameters: the family's `options`.

    Raises:
        InvalidConfig: an option is not the family's.
    """

    name: ClassVar[str]  # as in its ids
    levels: ClassVar[Mapping[str, Any]]  # LevelT by name; the level "random" exists beside them
    random_levels: ClassVar[Sequence[Any]] = ()  # the LevelT among which the level "random" draws
    corrected: ClassVar[Sequence[str]] = ()  # levels that exist as v1 too
    options: ClassVar[Mapping[str, Any]] = {}  # parameters beyond the id: their defaults, JSON-able
    pattern: ClassVar[re.Pattern[str]]  # of an action; the last match within the answer counts
    # the attributes that `_setup` and `_move` write; their values are JSON-able
    state: ClassVar[Sequence[str]]

    format_error: ClassVar[str] = "At turn {turn}, you did not provide a valid guess."
    turn_limit: ClassVar[str] = "You have reached the maximum number of turns."
    suffix_at_reset: ClassVar[bool] = True

    seed: int
    level: LevelT

    def __init__(
        self, id: str, *, split: Split = "train", base_seed: int = 0, **parameters: Any
    ) -> None:
        _, version, self.level_name = id.split("-", 2)
        self.version = int(version[1:])
        for option in parameters:
            if option not in self.options:
                raise unknown(InvalidConfig, f"option of {id}", option, self.options)
        self.task = Task(id=id, parameters={**self.options, **parameters})
        self.turn = 0
        self.rng = random.Random()  # noqa: S311 - games, not secrets
        self._split: Split = split
        self._base_seed, self._num_seeds_taken = base_seed, 0

    @property
    def exploitable(self) -> bool:
        """Whether the rules pay again for what was paid already."""
        return False

    @abstractmethod
    def _setup(self) -> None:
        """Draw the initial state of `level` from `rng`."""

    @abstractmethod
    def _rules(self) -> str:
        """The first observation, drawn after `_setup`; an example in it is drawn from `rng`."""

    @abstractmethod
    def _suffix(self) -> str:
        """The board as it is now, and the request for a move."""

    @abstractmethod
    def _parse(self, found: re.Match[str]) -> ActionT | None:
        """The action of a match; None or a ValueError makes it a format error."""

    @abstractmethod
    def _move(self, action: ActionT) -> Move:
        """Play an action; one that is against the rules changes nothing, pays nothing and is told
        why.
        """

    @abstractmethod
    def _is_possible(self) -> bool:
        """Whether the values of `state`, restored and of the right types, are of the level's sizes
        and fit each other: then no move raises.
        """

    @abstractmethod
    def random_action(self, rng: random.Random) -> str:
        """A well-formed action, not always a possible one."""

    def _random_level(self) -> LevelT:
        """The level of one episode of the level "random": the first draws of a reset."""
        return self.rng.choice(self.random_levels)

    def _turn_limit_reward(self, action: ActionT) -> float | None:
        """What the last turn pays instead of its move where no move ended the episode; None: its
        move is paid.
        """
        return None

    def reset(self, seed: int | None = None) -> tuple[str, Info]:
        """Begin an episode; without a seed, of the next one in the sequence of this task, split and
        base seed.
        """
        if seed is None:
            seed = episode_seed(self.task, self._split, self._base_seed, self._num_seeds_taken)
            self._num_seeds_taken += 1
        self._begin(seed)
        self.turn = 0
        self._setup()
        observation = self._rules()
        return observation, {"suffix": self._suffix(), "seed": seed} if self.suffix_at_reset else {
            "seed": seed
        }

    def step(self, action: str) -> Step:
        """Play the last action within an answer of the policy."""
        self.turn += 1
        found = list(self.pattern.finditer(action))
        try:
            parsed = self._parse(found[-1]) if found else None
        except ValueError:  # Python refuses to convert more than 4300 digits
            parsed = None
        component, truncated = "move", False
        outcome: Outcome | None
        if parsed is None:
            observation, reward = self.format_error.format(turn=self.turn), FORMAT_ERROR_REWARD
            component = outcome = "format_error"
            truncated = self.turn == self.level.max_turns
        else:
            observation, reward, outcome = self._move(parsed)
            if outcome is None and self.turn >= self.level.max_turns:
                observation, outcome = (
                    self.turn_limit.format(max_turns=self.level.max_turns),
                    "turn_limit",
                )
                truncated = True
                if (instead := self._turn_limit_reward(parsed)) is not None:
                    component, reward = "turn_limit", instead
        info: Info = {
            "suffix": self._suffix(),
            "seed": self.seed,
            "outcome": outcome,
            "success": outcome == "success",
            "reward_components": {component: reward},
        }
        return observation, reward, outcome is not None, truncated, info

    def save(self) -> dict[str, Any]:
        """The whole state, JSON-able."""
        version, numbers, gauss = self.rng.getstate()
        return {
            "task": {"id": self.task.id, "parameters": dict(self.task.parameters)},
            "seeds": {
                "split": self._split,
                "base_seed": self._base_seed,
                "num_taken": self._num_seeds_taken,
            },
            "seed": self.seed,
            "turn": self.turn,
            "generator": [version, list(numbers), gauss],
            "state": {name: copy.deepcopy(getattr(self, name)) for name in self.state},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where `save` was called, of a game of the same task.

        Raises:
            InvalidData: it was saved by a game of another task, or is damaged; this game is as it
                was then.
        """
        try:
            content = taken(saved, _SAVED, "the state")
            if content["task"] == {"id": self.task.id, "parameters": dict(self.task.parameters)}:
                twin = copy.copy(self)
                twin._take(content)
                vars(self).update(vars(twin))
                return
        except DAMAGED as error:
            what = f"A state of {self.task.id} is damaged: nothing was restored."
            raise InvalidData(what, f"{error}.", FIX_STATE) from error
        saved_id, parameters = content["task"]["id"], content["task"]["parameters"]
        raise InvalidData(
            f"A state of {saved_id} cannot be restored into {self.task.id}.",
            f"Its parameters are {parameters}, here they are {dict(self.task.parameters)}.",
            f"make({saved_id!r}, **parameters) gives the game that takes it.",
        )

    def _take(self, content: Mapping[str, Any]) -> None:
        """Take a saved state. One of DAMAGED: no episode of this game comes to it."""
        seeds, kinds = content["seeds"], get_type_hints(type(self))
        if seeds["split"] not in get_args(Split) or content["turn"] < 0:
            raise ValueError(f"the split is {seeds['split']!r}, the turn {content['turn']}")
        self._split, self._base_seed, self._num_seeds_taken = (
            seeds["split"],
            seeds["base_seed"],
            seeds["num_taken"],
        )
        self.rng = random.Random()  # noqa: S311 - games, not secrets
        self._begin(content["seed"])
        self.turn = content["turn"]
        for name, value in taken(
            content["state"], {name: kinds[name] for name in self.state}, "the state"
        ).items():
            setattr(self, name, value)
        if not self._is_possible():
            raise ValueError("no episode of this game comes to such a state")
        version, numbers, gauss = content["generator"]
        self.rng.setstate((version, tuple(numbers), gauss))

    def spawn(self, same_state: bool = False) -> Self:
        """Another game of the same task and sequence of seeds; with `same_state`, in the middle of
        this episode.
        """
        twin = type(self)(
            self.task.id, split=self._split, base_seed=self._base_seed, **self.task.parameters
        )
        if same_state:
            twin.restore(self.save())
        return twin

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, seed: int) -> None:
        self.seed = seed
        self.rng.seed(seed)
        self.level = (
            self._random_level() if self.level_name == "random" else self.levels[self.level_name]
        )


def episode_seed(task: Task, split: Split, base_seed: int, index: int) -> int:
    """The seed, 32 bits without sign, of the `index`-th episode that is played of a task without
    naming one.
    """
    name = (
        f"halteres/games/1:{task.id}/{sorted(task.parameters.items())}/{split}/{base_seed}/{index}"
    )
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


DIRECTIONS = ("up", "down", "left", "right")


class DirectionGame(Game[LevelT, str]):
    """A game whose actions are the four directions."""

    pattern = re.compile(r"\\boxed\{(up|down|left|right)\}", re.IGNORECASE)

    def _parse(self, found: re.Match[str]) -> str | None:
        """A direction, or a look-alike: ignoring case, the pattern takes a dotless i for an i."""
        return found[1].lower()

    def random_action(self, rng: random.Random) -> str:
        """Any direction."""
        return boxed(rng.choice(DIRECTIONS))


def boxed(*parts: object) -> str:
    r"""An action as a policy writes it.

    >>> boxed(1, 2)
    '\\boxed{1 2}'
    """
    return f"\\boxed{{{' '.join(map(str, parts))}}}"
