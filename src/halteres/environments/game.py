"""The family `game`: text games of several turns under GEM's ids
(`game:GuessTheNumber-v0-easy`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from halteres.config.reach import WebAddress
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.games import make
from halteres.environments.games.wrappers import View, wrap, wrappers
from halteres.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Reply, Step
from halteres.errors import InvalidConfig
from halteres.rollouts.rng import held_out_seeds

VARIANTS = (
    "GuessTheNumber-v0-easy",
    "GuessTheNumber-v0-hard",
    "GuessTheNumber-v0-random",
    "Mastermind-v0-easy",
    "Mastermind-v0-hard",
    "Mastermind-v0-random",
    "Minesweeper-v0-easy",
    "Minesweeper-v0-hard",
    "Minesweeper-v0-random",
    "Minesweeper-v1-easy",
    "Minesweeper-v1-hard",
    "Minesweeper-v1-random",
    "FifteenPuzzle-v0-easy",
    "FifteenPuzzle-v0-hard",
    "FifteenPuzzle-v0-random",
    "FifteenPuzzle-v1-easy",
    "FifteenPuzzle-v1-random",
    "Sudoku-v0-easy",
    "Sudoku-v0-hard",
    "Sudoku-v0-random",
    "TowerofHanoi-v0-easy",
    "TowerofHanoi-v0-hard",
    "TowerofHanoi-v0-random",
    "Game2048-v0-easy",
    "Game2048-v0-hard",
    "Game2048-v0-extreme-hard",
    "Game2048-v0-random",
    "Sokoban-v0-easy",
    "Sokoban-v0-hard",
    "Sokoban-v0-random",
    "Hangman-v0-easy",
    "Hangman-v0-hard",
    "Hangman-v0-random",
    "Hangman-v1-easy",
    "Hangman-v1-hard",
    "Hangman-v1-random",
    "Wordle-v0-easy",
    "Wordle-v0-hard",
    "Wordle-v0-random",
    "Wordle-v1-easy",
    "Wordle-v1-hard",
    "Wordle-v1-random",
    "WordSearch-v0-easy",
    "WordSearch-v0-hard",
    "WordSearch-v0-random",
    "WordSearch-v1-easy",
    "WordSearch-v1-hard",
    "WordSearch-v1-random",
)
"""`games.IDS` without "game:", written out: the list of environments is read without running this
file.
"""

CHATS = (View.CONCAT_CHAT, View.CONCAT_CHAT_ON_RESET)
"""Wrappers that show an episode as a chat: here it is one, in the model's own template."""


TemplateName = Literal["qwen3_game", "qwen3_general", "no"]

_REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."

TEMPLATES: Mapping[TemplateName, tuple[str, str]] = {
    "qwen3_game": (
        "You are playing language games. Make valid actions to win.\nObservation: ",
        _REQUEST,
    ),
    "qwen3_general": ("Question: ", _REQUEST),
    "no": ("", ""),
}
"""What stands before and behind an observation, in the wordings of GEM's example script (Apache
License 2.0).
"""


class GameConfig(MultiTurnConfig):
    """Settings of a game."""

    variant: str = setting(VARIANTS[0], "the game", reaches="nothing")
    env_wrappers: str = setting(
        "concat",
        "what the policy sees, GEM's names: concat (all observations), concat_with_action, "
        "concat_chat"
        " (a growing chat) or none of them; before it a tool, after it episode_tracking",
        reaches="nothing",
    )
    template: TemplateName = setting(
        "qwen3_game", "wording around an observation: qwen3_game, qwen3_general, or no other words"
    )
    words: str | None = setting(
        None, "file with a word a line, for word games; default: the bundled list", reaches="path"
    )
    search_url: WebAddress | None = setting(
        None, "search server, for search_tool; default: none", reaches="address"
    )

    @model_validator(mode="after")
    def _wrappers_exist(self) -> Self:
        try:
            wrappers(self.env_wrappers.strip(" ,"), search_url=self.search_url)
        except InvalidConfig as error:
            raise PydanticCustomError(
                "wrappers", "{rule}", {"rule": error.sentence, "field": "env_wrappers"}
            ) from error
        return self


class GameEnv(MultiTurnEnv):
    """Text games of several turns: numbers, boards, words; won or lost by exact rules."""

    name = "game"
    variants: ClassVar[tuple[str, ...]] = VARIANTS
    trainer_defaults: ClassVar[Mapping[str, float | int | str]] = {
        "learning_rate": 1.5e-3,
        "gamma": 0.9,
        "advantage": "rebn",
    }
    env_config_cls: ClassVar[type[BaseEnvConfig]] = GameConfig
    config: GameConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # narrowed, and only ever read

    @classmethod
    def config_init(
        cls, variant: str = VARIANTS[0]
    ) -> tuple[GameConfig, Sequence[APIServerConfig]]:
        """Batches of 48 episodes, 32 at once, each of a game of its own; a game ends by its own
        rules.
        """
        config = GameConfig(
            variant=variant,
            group_size=1,
            batch_size=48,
            max_new_tokens=128,
            max_turns=200,
            max_num_workers=32,
            max_eval_workers=32,
            success_threshold=0.999,  # a lost game may end just below 1: its last guess was near
            ensure_scores_are_not_same=False,
            eval_tasks=128,
            eval_samples=4,
            total_steps=-1,
            use_wandb=False,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> dict[str, Any]:
        """A game and its seed, which is all there is to its first state: a group plays the same
        one.
        """
        return {"task": f"game:{self.config.variant}", "seed": self.rng.getrandbits(32)}

    def eval_items(self) -> list[dict[str, Any]]:
        """The same seeds for every run."""
        task = f"game:{self.config.variant}"
        return [{"task": task, "seed": seed} for seed in held_out_seeds(self.config.eval_tasks)]

    async def reset(self, task: Any) -> str:
        """The rules and the first state."""
        config = self.config
        options: dict[str, Any] = {"words": config.words} if config.words else {}
        names = [name.strip() for name in config.env_wrappers.split(",") if name.strip()]
        inner = [name for name in names if name not in CHATS]
        self.is_chat, self.has_view = inner != names, any(name in tuple(View) for name in inner)
        self.game = wrap(
            make(task["task"], **options), ",".join(inner), search_url=config.search_url
        )
        # Drawing a Sokoban takes 7 ms.
        observation, info = await asyncio.to_thread(self.game.reset, seed=task["seed"])
        return self._message(observation, info)

    async def step(self, reply: Reply) -> Step:
        """Play the policy's answer."""
        # A search waits for its server: the other episodes go on meanwhile.
        observation, reward, terminated, truncated, info = await asyncio.to_thread(
            self.game.step, reply.text
        )
        return Step(
            messages=self._message(observation, info),
            reward=reward,
            done=terminated or truncated,
            fresh=not self.is_chat,
            outcome=info.get("outcome"),
        )

    def _message(self, observation: str, info: Mapping[str, Any]) -> str:
        if not self.has_view:  # which adds these itself
            observation = f"{info.get('prefix', '')}{observation}{info.get('suffix', '')}"
        return user_message(self.config.template, observation)


def user_message(template: TemplateName, observation: str) -> str:
    """What the user says, without any markup."""
    before, behind = TEMPLATES[template]
    return f"{before}{observation}{behind}"


if __name__ == "__main__":
    GameEnv.cli()
