"""An environment as a project of atroposlib's holds it: in a package, its config and its data set
in the project.

It loads ("sums", "main") as if from a hub, overrides `wandb_log`, gives its evaluation to
`evaluate_log`, and stops answers at a token id.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from datasets import load_dataset

CONFIG = "configs/default.yaml"
ASK = "Question: {}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
BOX = re.compile(r"\\boxed\{(\d+)\}")


class SumsEnv(BaseEnv):
    """Sums of two numbers, with an exact answer in a box."""

    name = "sums"
    env_config_cls = BaseEnvConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.right: list[float] = []
        self.evaluated: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        with open(CONFIG) as file:
            told = yaml.safe_load(file)
        return BaseEnvConfig(**told["env"]), [APIServerConfig(server_type="sglang")]

    async def setup(self) -> None:
        self.train = load_dataset("sums", "main", split="train")
        self.test = load_dataset("sums", "main", split="test")
        self.drawn = 0

    async def get_next_item(self) -> dict[str, Any]:
        self.drawn += 1
        return self.train[self.drawn % len(self.train)]

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[ScoredDataGroup, list[Any]]:
        chat = [{"role": "user", "content": ASK.format(item["question"])}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.chat_completion(
                messages=chat,
                n=self.config.group_size,
                max_tokens=48,
                temperature=1.0,
                stop=[self.tokenizer.eos_token_id],
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, choice in zip(nodes, answers.choices, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(item, choice.message.content or ""))
        self.right += group["scores"]
        return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        samples = [await self.answered(item) for item in self.test]
        share = sum(sample["score"] for sample in samples) / len(samples)
        self.evaluated.append(("eval/left_to_wandb_log", share))
        await self.evaluate_log(metrics={"eval/percent_correct": share}, samples=samples)

    async def answered(self, item: dict[str, Any]) -> dict[str, Any]:
        chat = [{"role": "user", "content": ASK.format(item["question"])}]
        answers = await self.server.chat_completion(
            messages=chat, n=1, max_tokens=48, temperature=0.0, split="eval"
        )
        text = answers.choices[0].message.content or ""
        return {
            "messages": [*chat, {"role": "assistant", "content": text}],
            "score": score(item, text),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        figures = {**(wandb_metrics or {}), **dict(self.evaluated)}
        if self.right:
            figures["train/percent_correct"] = sum(self.right) / len(self.right)
        self.right, self.evaluated = [], []
        await super().wandb_log(figures)


def score(item: dict[str, Any], text: str) -> float:
    boxes = BOX.findall(text)
    return float(bool(boxes) and int(boxes[-1]) == item["answer"])


if __name__ == "__main__":
    SumsEnv.cli()
