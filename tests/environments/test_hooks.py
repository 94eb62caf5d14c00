"""What an author may override around the rollouts: checkpoints, evaluation while serving, backlog,
a last look.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halteres.clients.trajectories import Registered
from halteres.environments.arithmetic import ArithmeticEnv
from halteres.environments.base import BaseEnv
from halteres.environments.scored import ScoredDataGroup
from halteres.environments.single_turn import SingleTurnEnv
from halteres.types import MASKED

from .fakes import TOKENIZER, Digits, Inference, Trainer, at_work, config, server


class Saving(Trainer):
    """Tells environments to save every second step into a folder."""

    folder = ""

    async def register_env(self, **values: Any) -> Registered:
        return Registered(
            env_id=0,
            name=values["name"],
            checkpoint_dir=self.folder,
            starting_step=self.step,
            checkpoint_interval=2,
            num_steps=self.num_steps,
        )


class Counting(Digits):
    """Keeps a number in its checkpoints."""

    seen = 0

    async def get_next_item(self) -> Any:
        self.seen += 1
        return await super().get_next_item()

    def save_checkpoint(self, step: int, data: Any = None) -> None:
        super().save_checkpoint(step, {"seen": self.seen})


async def test_checkpoints_are_written_at_the_trainers_interval_and_found_again(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Saving(batch_size=8, group_size=4, num_steps=2)
    trainer.folder = str(tmp_path)
    async with (
        asyncio.timeout(5),
        at_work(Counting(config(), [server(inference)]), trainer) as task,
    ):
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await task
    file = tmp_path / "env_checkpoints" / "digits" / "step-2.json"
    assert json.loads(file.read_text()) == {"seen": 4}
    assert [entry.name for entry in file.parent.iterdir()] == ["step-2.json"]

    again = Counting(config(), [server(inference)])
    trainer.num_steps, trainer.parked = 3, False
    async with asyncio.timeout(5), at_work(again, trainer) as task:
        await task
    assert again.seen == 6


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "..", "a/b"])
def test_checkpoints_stay_in_their_folder_whatever_the_run_is_called(
    inference: Inference, name: str
) -> None:
    folder = Counting(config(wandb_name=name), [server(inference)]).checkpoint_folder
    assert folder.parent.name == "env_checkpoints" and folder.name not in ("", ".", "..")


async def test_without_a_supervisor_serve_evaluates_every_so_many_steps_and_rolls_nothing_out_meanwhile(
    inference: Inference, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(batch_size=8, group_size=4, num_steps=3)
    env = Digits(config(steps_per_eval=2, eval_tasks=3, eval_samples=2), [server(inference)])
    under_way, may_end = asyncio.Event(), asyncio.Event()
    evaluate = env.evaluate

    async def watched() -> Any:
        under_way.set()
        await may_end.wait()
        return await evaluate()

    env.evaluate = watched
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(10), at_work(env, trainer) as task:
            await trainer.until(lambda: len(trainer.batches) == 1)
            assert not under_way.is_set()
            trainer.ask()
            await trainer.until(lambda: len(trainer.batches) == 2)
            trainer.ask()
            await under_way.wait()
            polls = trainer.polls
            await trainer.until(lambda: trainer.polls >= polls + 3)
            assert len(trainer.groups) == 4
            may_end.set()
            await task
    assert "evaluation at step 2" in caplog.text
    assert "eval/percent_correct" in caplog.text


async def test_with_a_supervisor_serve_never_evaluates(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Trainer(batch_size=8, group_size=4, num_steps=2)
    env = Digits(config(steps_per_eval=1, run_dir=str(tmp_path)), [server(inference)])

    async def refused() -> Any:
        raise AssertionError("the supervisor evaluates")

    env.evaluate = refused
    async with asyncio.timeout(5), at_work(env, trainer) as task:
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await task
    assert all(request["sampling_params"]["n"] == 4 for request in inference.requests)


class Handing(Digits):
    """Its first item hands two further ones over; its last look drops whatever was asked about
    1.
    """

    async def get_next_item(self) -> Any:
        return 0

    async def collect_trajectories(self, item: Any) -> Any:
        group, _ = await super().collect_trajectories(item)
        return group, [1, 2] if item == 0 else []

    async def postprocess_histories(
        self, trajectories: Any
    ) -> ScoredDataGroup | list[ScoredDataGroup] | None:
        text = self.tokenizer.decode(trajectories["tokens"][0])
        return None if "Question: 1?" in text else [trajectories]


async def test_the_backlog_comes_next_and_what_the_last_look_drops_is_not_sent(
    inference: Inference,
) -> None:
    trainer = Trainer(batch_size=12, group_size=4)
    env = Handing(config(max_num_workers=1), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    asked = [
        env.tokenizer.decode(request["input_ids"]).split("Question: ")[1][0]
        for request in inference.requests
    ]
    assert asked[:4] == ["0", "1", "2", "0"]
    sent = [
        env.tokenizer.decode(group["tokens"][0]).split("Question: ")[1][0]
        for group in trainer.groups
    ]
    assert sent == ["0", "2", "0"]


async def test_messages_are_sent_where_they_are_asked_for(inference: Inference) -> None:
    trainer = Trainer(batch_size=4, group_size=4)
    env = Digits(config(include_messages=True, system_prompt="Be brief."), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    roles = [message["role"] for message in trainer.groups[0]["messages"][0]]
    assert roles == ["system", "user", "assistant"]


def test_an_environment_registers_under_its_own_name_unless_the_run_names_it() -> None:
    settings, servers = ArithmeticEnv.config_init()
    assert ArithmeticEnv(settings, servers).wandb_name == "arithmetic"
    assert (
        ArithmeticEnv(settings.model_copy(update={"wandb_name": "a-1"}), servers).wandb_name
        == "a-1"
    )


class Guided(BaseEnv):
    """The four methods that the guide of Hermes asks for, all of them plain but those that Atropos
    awaits.
    """

    name = "guided"

    def load_dataset(self) -> None:
        self.rows = [{"question": "7?", "answer": "7"}]

    async def get_next_item(self) -> Any:
        return self.rng.choice(self.rows)

    def score_answer(self, item: Any, answer: str) -> float:
        return float(answer.endswith(f"\\boxed{{{item['answer']}}}."))

    async def collect_trajectories(self, item: Any) -> tuple[ScoredDataGroup, list[Any]]:
        turns = await self.server.chat(
            [{"role": "user", "content": item["question"]}], self.config.group_size
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for turn in turns:
            group["tokens"].append([*turn.prompt, *turn.action])
            group["masks"].append([*[MASKED] * len(turn.prompt), *turn.action])
            group["inference_logprobs"].append([*[1.0] * len(turn.prompt), *turn.logprobs])
            group["scores"].append(self.score_answer(item, turn.text))
        return group, []


async def test_the_methods_of_the_guide_are_called_by_their_names(inference: Inference) -> None:
    trainer = Trainer(batch_size=8, group_size=4, num_steps=1)
    async with asyncio.timeout(5), at_work(Guided(config(), [server(inference)]), trainer) as task:
        await task
    assert [len(group["tokens"]) for group in trainer.groups] == [4, 4]
    for group in trainer.groups:
        texts = [TOKENIZER.decode(tokens) for tokens in group["tokens"]]
        assert group["scores"] == [float(text.endswith("\\boxed{7}.")) for text in texts]


async def test_load_dataset_and_score_answer_of_one_prompt_and_one_answer_may_be_async(
    inference: Inference,
) -> None:
    class Waiting(SingleTurnEnv):
        name = "waiting"
        rows: Sequence[int] = ()

        async def load_dataset(self) -> None:
            await asyncio.sleep(0)
            self.rows = (7,)

        async def get_next_item(self) -> Any:
            return self.rng.choice(self.rows)

        def prompt(self, item: Any) -> str:
            return f"{item}?"

        async def score_answer(self, item: Any, answer: str) -> float:
            await asyncio.sleep(0)
            return float(f"boxed{{{item}}}" in answer)

    trainer = Trainer(batch_size=8, group_size=4, num_steps=1)
    async with asyncio.timeout(5), at_work(Waiting(config(), [server(inference)]), trainer) as task:
        await task
    for group in trainer.groups:
        assert group["scores"] == [
            float("boxed{7}" in TOKENIZER.decode(tokens)) for tokens in group["tokens"]
        ]
