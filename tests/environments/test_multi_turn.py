"""Episodes of several turns: how they go, how they end, and what of them is sent, recorded and
evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from halteres.environments.item_rollout import DrawnItem, SettledItem, settle_item
from halteres.environments.multi_turn import MultiTurnEnv, Reply, Step
from halteres.environments.scored import ScoredDataGroup, check, rollouts_of, to_wire, turns_of
from halteres.observe.metrics import read_rows
from halteres.rollouts.rng import Draw
from halteres.types import MASKED, Turn

from .fakes import TOKENIZER, Inference, server

Env = TypeVar("Env", bound=MultiTurnEnv)


class Countdown(MultiTurnEnv):
    """Says "again" until it has been answered as often as the task says; pays a tenth for each
    answer, 1 at the end.
    """

    name = "countdown"

    async def get_next_item(self) -> Any:
        return 2

    def eval_items(self) -> Sequence[int]:
        return [1, 2, 3][: self.config.eval_tasks]

    def reset(self, task: Any) -> Any:
        self.left = task
        return f"Question: {task}?"

    def step(self, reply: Reply) -> Any:
        self.left -= 1
        assert self.left >= 0, "an episode that goes on after its end, or shares its state"
        return (
            Step(f"again {self.left}", reward=0.1)
            if self.left
            else Step("done", reward=1.0, done=True)
        )

    def measure(self, turns: Sequence[Turn]) -> Mapping[str, float]:
        return {"letters": float(sum(len(turn.text) for turn in turns))}


def made(kind: type[Env], inference: Inference, folder: Path | None = None, **changes: Any) -> Env:
    values = {
        "group_size": 2,
        "max_new_tokens": 32,
        "max_token_length": 1024,
        "ensure_scores_are_not_same": False,
    }
    run_dir = str(folder) if folder else None
    config = kind.env_config_cls.model_validate({**values, "run_dir": run_dir, **changes})
    return kind(config, [server(inference)])


async def settled(env: MultiTurnEnv, item: Any) -> SettledItem:
    result = await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=item))
    await env.server.close()
    return result


async def rolled_out(env: MultiTurnEnv, item: Any) -> ScoredDataGroup:
    result = await settled(env, item)
    assert not result.failures, result.failures
    (group,) = result.groups
    return group


def outcomes(group: ScoredDataGroup) -> list[str]:
    return [str(one) for one in group.get("outcome", [])]


async def test_a_group_of_several_turns_says_what_each_was_paid(inference: Inference) -> None:
    group = await rolled_out(made(Countdown, inference), 3)
    assert group["scores"] == [pytest.approx(1.2)] * 2
    assert group.get("episodes") == [0, 1]
    spans = group.get("spans") or []
    assert [(sequence, reward) for sequence, _, _, reward in spans] == [
        (sequence, reward) for sequence in (0, 1) for reward in (0.1, 0.1, pytest.approx(1.0))
    ]
    for sequence, start, stop, _ in spans:
        masks = group["masks"][sequence]
        assert masks[start:stop] == group["tokens"][sequence][start:stop]
        assert masks[start - 1] == MASKED
    check(group, "env")
    assert {"episodes", "spans"} <= set(
        json.loads(json.dumps(to_wire(group, include_messages=False)))
    )


async def test_a_group_of_one_turn_looks_on_the_wire_as_it_always_did(inference: Inference) -> None:
    group = await rolled_out(made(Countdown, inference), 1)
    assert set(to_wire(group, include_messages=False)) == {
        "tokens",
        "masks",
        "scores",
        "inference_logprobs",
        "policy_version",
    }


async def test_the_chat_goes_on_token_by_token(inference: Inference) -> None:
    env = made(Countdown, inference, group_size=1)
    group = await rolled_out(env, 2)
    first, second = (request["input_ids"] for request in inference.requests)
    (tokens,) = group["tokens"]
    (_, start, stop, _), _ = group.get("spans") or []
    assert second[:stop] == tokens[:stop] == [*first, *tokens[start:stop]]
    assert TOKENIZER.decode(second[stop:], skip_special_tokens=False) == (
        "\n<|im_start|>user\nagain 1<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_episodes_that_run_at_once_share_no_state_and_a_repeated_group_is_the_same(
    inference: Inference,
) -> None:
    groups = [await rolled_out(made(Countdown, inference, group_size=4), 3) for _ in range(2)]
    assert groups[0] == groups[1]
    assert len({tuple(tokens) for tokens in groups[0]["tokens"]}) == 4


class Walk(Countdown):
    """Every observation repeats all that matters."""

    def step(self, reply: Reply) -> Any:
        return replace(super().step(reply), fresh=True)


async def test_a_fresh_observation_begins_a_new_sequence_of_the_same_rollout(
    inference: Inference,
) -> None:
    env = made(Walk, inference, system_prompt="Play.")
    group = await rolled_out(env, 2)
    assert group.get("episodes") == [0, 0, 1, 1]
    assert rollouts_of(group) == [[0, 1], [2, 3]]
    assert len(group["scores"]) == 4 and set(group["scores"]) == {1.1}
    assert [(sequence, reward) for sequence, _, _, reward in group.get("spans") or []] == [
        (0, 0.1),
        (1, 1.0),
        (2, 0.1),
        (3, 1.0),
    ]
    assert (
        TOKENIZER.decode(inference.requests[-1]["input_ids"])
        == "system\nPlay.\nuser\nagain 1\nassistant\n"
    )
    turns = turns_of(group, [0, 1])
    assert "again 1" in TOKENIZER.decode(turns[0].observation)
    assert "Play." not in TOKENIZER.decode(turns[0].observation)
    check(group, "env")


class Endless(Countdown):
    def step(self, reply: Reply) -> Any:
        return Step("again")


async def test_an_episode_that_never_ends_is_cut_off_at_its_turns(inference: Inference) -> None:
    group = await rolled_out(made(Endless, inference, max_turns=3), 0)
    assert outcomes(group) == ["turn_limit"] * 2
    assert len(group.get("spans") or []) == 6


async def test_an_episode_without_room_for_another_answer_ends_there_and_its_turns_count(
    inference: Inference,
) -> None:
    group = await rolled_out(made(Endless, inference, max_token_length=200, max_turns=99), 0)
    assert outcomes(group) == ["context_overflow"] * 2
    assert all(100 < len(tokens) < 200 for tokens in group["tokens"])
    nothing = await settled(made(Endless, inference, max_token_length=8, rollout_retries=0), 0)
    assert {failure.code for failure in nothing.failures} == {"context_overflow"}


async def test_an_answer_that_is_cut_off_is_played_on_or_ends_the_episode(
    inference: Inference,
) -> None:
    on = await rolled_out(made(Countdown, inference, max_new_tokens=3), 2)
    assert outcomes(on) == ["success"] * 2
    assert [tokens.count(TOKENIZER.eos_token_id) for tokens in on["tokens"]] == [3, 3], (
        "as context where it is missing"
    )
    ended = await rolled_out(made(Countdown, inference, max_new_tokens=3, end_on_length=True), 2)
    assert outcomes(ended) == ["length_stop"] * 2
    assert ended["scores"] == [0.0, 0.0]


class Picky(Countdown):
    """Refuses what every other rollout says."""

    def step(self, reply: Reply) -> Any:
        bad = int(reply.text[-3]) % 2 == 0
        return Step(done=True, reward=-0.1, outcome="format_error") if bad else super().step(reply)


async def test_an_environment_may_name_the_outcome_and_such_rollouts_may_be_left_out(
    inference: Inference,
) -> None:
    group = await rolled_out(
        made(Picky, inference, group_size=8, mask_outcomes=("format_error",)), 2
    )
    named = outcomes(group)
    assert {"format_error", "success"} <= set(named)
    assert group.get("overrides") == [
        {"set_advantage_to_zero": True} if one == "format_error" else {} for one in named
    ]
    check(group, "env")
    trained = await rolled_out(made(Picky, inference, group_size=8), 2)
    assert "overrides" not in trained


class Judged(Countdown):
    async def score_episode(self, turns: Sequence[Turn]) -> float:
        return 5.0

    async def step(self, reply: Reply) -> Any:
        return super().step(reply)


async def test_an_authors_score_is_told_beside_what_each_turn_was_paid(
    inference: Inference,
) -> None:
    """What the rewards lack of the score, the trainer pays to the last turn, unless rewards are
    values of states.
    """
    group = await rolled_out(made(Judged, inference, group_size=1), 2)
    assert group["scores"] == [5.0]
    assert [reward for *_, reward in group.get("spans") or []] == [0.1, 1.0]


class Broken(Countdown):
    def step(self, reply: Reply) -> Any:
        if self.left == 1:
            raise KeyError("board")
        return super().step(reply)


class Mute(Countdown):
    def step(self, reply: Reply) -> Any:
        return "again"


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Broken, "countdown.step raised KeyError: 'board'"), (Mute, "a Step is expected, not str")],
)
async def test_an_environment_that_breaks_has_no_outcome_and_is_tried_again(
    inference: Inference, kind: type[MultiTurnEnv], why: str
) -> None:
    result = await settled(made(kind, inference, rollout_retries=1), 2)
    assert [failure.code for failure in result.failures] == ["env_error"] * 4
    assert why in result.failures[0].why


class Winner(Countdown):
    def step(self, reply: Reply) -> Any:
        return Step(done=True, outcome="won")  # pyright: ignore[reportArgumentType]  an author's slip


async def test_an_outcome_that_does_not_exist_is_refused_with_those_that_do(
    inference: Inference,
) -> None:
    result = await settled(made(Winner, inference, rollout_retries=0), 2)
    assert "there is no outcome 'won'; they are success, failure" in result.failures[0].why


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Adder(Countdown):
    """Answers each call; the answer without one ends the episode."""

    tools = (ADD,)
    seen: list[Reply]

    def step(self, reply: Reply) -> Any:
        self.seen.append(reply)
        results = [
            call.result(call.error or sum((call.arguments or {}).values()))
            for call in reply.tool_calls
        ]
        return Step(results) if results else Step(reward=1.0, done=True)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BROKEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'


async def test_calls_of_tools_are_read_answered_and_trained_on_as_they_were_sampled(
    inference: Inference,
) -> None:
    """The built-in model's template has no place for tools: they are told in words, results by the
    user.
    """
    inference.answer = (
        lambda prompt, _: f"I add.\n{CALL}" if "tool_response" not in prompt else "It is 3."
    )
    env = made(Adder, inference, group_size=1, max_new_tokens=128)
    env.seen = []
    group = await rolled_out(env, 0)
    first, second = env.seen
    assert (first.text, first.turn) == ("I add.", 0)
    assert [(call.name, call.arguments, call.error, call.id) for call in first.tool_calls] == [
        ("add", {"a": 1, "b": 2}, None, "call_0_0")
    ]
    assert (second.text, second.tool_calls) == ("It is 3.", ())
    prompts = [
        TOKENIZER.decode(request["input_ids"], skip_special_tokens=False)
        for request in inference.requests
    ]
    assert (
        prompts[0].startswith("<|im_start|>system\nYou may call tools.")
        and json.dumps(ADD) in prompts[0]
    )
    assert prompts[1].endswith(
        "I "
        f"add.\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(group["tokens"]) == 1
    assert TOKENIZER.decode(turns_of(group, [0])[0].action) == f"I add.\n{CALL}"


async def test_a_call_that_cannot_be_read_comes_to_the_environment_with_the_reason(
    inference: Inference,
) -> None:
    inference.answer = lambda prompt, _: BROKEN_CALL if "tool_response" not in prompt else "Sorry."
    env = made(Adder, inference, group_size=1, max_new_tokens=128)
    env.seen = []
    group = await rolled_out(env, 0)
    (call,) = env.seen[0].tool_calls
    assert (call.name, call.arguments, env.seen[0].text) == ("", None, "")
    assert call.error is not None and call.error.startswith("The call cannot be read: ")
    assert outcomes(group) == ["success"]


class Lister(Adder):
    tools = ()


async def test_without_tools_a_call_is_text(inference: Inference) -> None:
    inference.answer = lambda prompt, _: CALL
    env = made(Lister, inference, group_size=1, max_new_tokens=128)
    env.seen = []
    await rolled_out(env, 0)
    assert (env.seen[0].text, env.seen[0].tool_calls) == (CALL, ())


class Method(Adder):
    def tools(self) -> Any:
        return [ADD]


class Property(Adder):
    @property
    def tools(self) -> Any:
        return [ADD]


@pytest.mark.parametrize("kind", [Adder, Method, Property])
async def test_tools_are_an_attribute_a_property_or_a_method(
    inference: Inference, kind: type[Adder]
) -> None:
    env = made(kind, inference, group_size=1)
    env.seen = []
    await rolled_out(env, 0)
    assert json.dumps(ADD) in TOKENIZER.decode(inference.requests[0]["input_ids"])


async def test_a_server_of_chats_is_asked_with_messages_and_its_answers_are_scored(
    inference: Inference,
) -> None:
    """Models elsewhere, as in `halteres env test`: their tokens are not known, and they are not
    trained.
    """
    config = Countdown.env_config_cls(
        group_size=2, max_new_tokens=32, ensure_scores_are_not_same=False
    )
    env = Countdown(config, [server(inference, server_type="openai")])
    group = await rolled_out(env, 2)
    assert group["scores"] == [1.1, 1.1]
    assert inference.requests[-1]["messages"] == [
        {"role": "user", "content": "Question: 2?"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "again 1"},
    ]


class Chronicle(Countdown):
    """Its observations grow."""

    def reset(self, task: Any) -> Any:
        self.history = super().reset(task)
        return self.history

    def step(self, reply: Reply) -> Any:
        step = super().step(reply)
        self.history += f"\n{step.messages}"
        return replace(step, messages=self.history, fresh=True)


async def test_a_conversation_shows_what_is_new_of_observations_that_repeat_all(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = lambda prompt, _: "Yes."
    env = made(
        Chronicle, inference, eval_tasks=3, eval_samples=1, data_dir_to_save_evals=str(tmp_path)
    )
    await env.evaluate()
    await env.server.close()
    last = read_rows(tmp_path / "samples.jsonl")[-1]
    assert last["completion"] == (
        "Yes.\n\n[user]\nagain 2\n\n[assistant]\nYes.\n\n[user]\nagain "
        "1\n\n[assistant]\nYes.\n\n[user]\ndone"
    )


class Alike(Adder):
    """Every task is asked in the same words."""

    def eval_items(self) -> Sequence[int]:
        return [3, 4, 3, 5]

    def reset(self, task: Any) -> Any:
        return "Find it."

    def step(self, reply: Reply) -> Any:
        return Step(reward=1.0, done=True)


async def test_held_out_tasks_that_are_asked_alike_stay_apart(
    inference: Inference, tmp_path: Path
) -> None:
    """Evaluations are compared task by task: by what was asked, and its number where that is not
    enough.
    """
    env = made(Alike, inference, eval_samples=1, data_dir_to_save_evals=str(tmp_path))
    await env.evaluate()
    await env.server.close()
    samples = read_rows(tmp_path / "samples.jsonl")
    assert [(one["prompt"], one.get("task")) for one in samples[::2]] == [
        ("Find it.", None),
        ("Find it.", 1),
        ("Find it.", None),
        ("Find it.", 2),
    ]


class Dice(Countdown):
    def reset(self, task: Any) -> Any:
        return f"Rolled {self.rng.randint(0, 10**6)}"

    def step(self, reply: Reply) -> Any:
        return Step(f"{self.rng.randint(0, 10**6)}", done=reply.turn == 1)


async def test_every_episode_of_a_group_begins_alike(inference: Inference) -> None:
    """(task, seed) is the whole beginning: a group compares answers, not luck."""
    env = made(Dice, inference)
    group = await rolled_out(env, 0)
    prompts = [
        tokens[: (group.get("spans") or [])[2 * place][1]]
        for place, tokens in enumerate(group["tokens"])
    ]
    assert prompts[0] == prompts[1]


async def test_rates_of_outcomes_turns_and_returns_are_figures_of_the_step(
    inference: Inference, tmp_path: Path
) -> None:
    env = made(Picky, inference, tmp_path, group_size=8)
    group = await rolled_out(env, 2)
    env.records.group(1, 0, 2, group)
    figures = env.records.close(before=2)[1]
    rates = {name: value for name, value in figures.items() if name.startswith("train/outcome/")}
    assert sum(rates.values()) == pytest.approx(1.0)
    assert rates["train/outcome/format_error"] == outcomes(group).count("format_error") / 8
    assert 1 < figures["train/turns"] < 2
    assert figures["train/mean_return"] == pytest.approx(sum(group["scores"]) / 8)
    assert figures["train/letters"] > 0


async def test_the_rollouts_of_a_step_show_every_turn_with_its_reward(
    inference: Inference, tmp_path: Path
) -> None:
    env = made(Walk, inference, tmp_path)
    group = await rolled_out(env, 2)
    env.records.group(1, 0, 2, group)
    (line,) = read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    first, second = line["completions"]
    assert [turn["reward"] for turn in first["turns"]] == [0.1, 1.0]
    assert "again 1" in first["turns"][0]["observation"]
    assert first["turns"][1]["observation"] == ""
    assert (first["outcome"], first["score"]) == ("success", 1.1)
    assert second["text"] == "".join(turn["text"] for turn in second["turns"])


async def test_an_evaluation_plays_whole_episodes_and_shows_them(
    inference: Inference, tmp_path: Path
) -> None:
    env = made(
        Countdown, inference, eval_tasks=3, eval_samples=2, data_dir_to_save_evals=str(tmp_path)
    )
    metrics = await env.evaluate()
    await env.server.close()
    assert metrics["eval/turns"] == 2.0
    assert (
        metrics["eval/mean_return"]
        == metrics["eval/mean_score"]
        == pytest.approx((1.0 + 1.1 + 1.2) / 3)
    )
    assert (metrics["eval/outcome/success"], metrics["eval/outcome/turn_limit"]) == (1.0, 0.0)
    assert metrics["eval/percent_correct"] == metrics["eval/percent_correct_greedy"] == 1.0
    samples = read_rows(tmp_path / "samples.jsonl")
    assert len(samples) == 3 * 3
    assert [one["temperature"] for one in samples[:3]] == [0.0, 1.0, 1.0]
    assert samples[1]["completion"] != samples[2]["completion"], "samples have seeds of their own"
    last = samples[-1]
    assert last["prompt"] == "Question: 3?"
    assert (last["outcome"], last["completion"].count("[user]")) == ("success", 3)
    assert last["completion"].endswith("[user]\ndone")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            None,
            "countdown.reset raised TypeError: reset: a str or a list of messages is expected, "
            "not NoneType",
        ),
        ([{"content": "Hi"}], "each a dict with \"role\" and \"content\", not {'content': 'Hi'}"),
    ],
)
async def test_what_reset_may_give_is_said_where_it_gave_something_else(
    inference: Inference, given: Any, why: str
) -> None:
    class Odd(Countdown):
        def reset(self, task: Any) -> Any:
            return given

    result = await settled(made(Odd, inference), 2)
    assert why in result.failures[-1].why


async def test_a_step_without_messages_says_what_was_expected(inference: Inference) -> None:
    class Odd(Countdown):
        def step(self, reply: Reply) -> Any:
            return Step(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    result = await settled(made(Odd, inference), 2)
    assert (
        "Step.messages: a str or a list of messages is expected, not NoneType"
        in result.failures[-1].why
    )
