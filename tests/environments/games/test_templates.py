"""How observations become prompts."""

from __future__ import annotations

import pytest

from environments.fakes import TOKENIZER
from halteres.environments.game import TemplateName, user_message

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GAME = f"You are playing language games. Make valid actions to win.\nObservation: board{STEPS}"


@pytest.mark.parametrize(
    ("template", "content"),
    [("qwen3_game", GAME), ("qwen3_general", f"Question: board{STEPS}"), ("no", "board")],
)
def test_a_template_is_the_scripts_wording_and_in_qwens_markup_its_very_prompt(
    template: TemplateName, content: str
) -> None:
    said = user_message(template, "board")
    assert said == content
    rendered = TOKENIZER.render([{"role": "user", "content": said}])
    assert rendered == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
