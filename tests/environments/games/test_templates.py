"""How observations become prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from halteres.environments.games.templates import TemplateName, prompt, user_message
from halteres.errors import InvalidConfig

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GAME = f"You are playing language games. Make valid actions to win.\nObservation: board{STEPS}"


class Brackets:
    """Another model's template."""

    def render(self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True) -> str:
        return "".join(f"[{one['role']}] {one['content']}" for one in messages) + "[assistant]" * add_generation_prompt


@pytest.mark.parametrize(
    ("template", "content"), [("qwen3_game", GAME), ("qwen3_general", f"Question: board{STEPS}"), ("no", "board")]
)
def test_a_template_has_one_wording_for_every_model(template: TemplateName, content: str) -> None:
    assert user_message(template, "board") == content
    if template != "no":
        assert prompt(template, "board") == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert prompt(template, "board", Brackets()) == f"[user] {content}[assistant]"


def test_no_template_leaves_the_observation_as_it_is() -> None:
    assert prompt("no", "<user>board") == prompt("no", "<user>board", Brackets()) == "<user>board"


def test_an_unknown_template_names_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="'qwen3_game'"):
        prompt(cast(TemplateName, "qwen_game"), "board")
