"""A trainer as section 10 of the trajectory API's specification describes the known one:
group-relative, by `tinker`.

It has its YAML, its requests, its datums, its metrics' names and its weak points (no resume;
whatever goes wrong ends it with exit code 0), and nothing of ours. It samples for its environment
itself, on the port of `openai[0].base_url`. `python tinker_trainer.py CONFIG` prints one JSON line
per step, and one when it ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import tinker
import yaml
from aiohttp import web
from tokenizers import Tokenizer

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
CONTEXT = 1.0  # the log-probability that marks what was not sampled
BATCH_S, TRIES, POLL_S = 10, 3, 1.0

Json = dict[str, Any]


class Trainer:
    """Model, optimiser and the weights that sample."""

    def __init__(self, config: Json) -> None:
        self.env, self.tinker, self.openai = config["env"], config["tinker"], config["openai"][0]
        self.url = self.env["rollout_server_url"]
        self.group, self.project = "tinker-group", self.tinker["wandb_project"]

    async def setup(self) -> None:
        """LoRA on the base model, its first snapshot, the registration."""
        self.service = tinker.ServiceClient()
        self.training = await self.service.create_lora_training_client_async(
            base_model=self.openai["model_name"], rank=self.tinker["lora_rank"]
        )
        await self.publish(0)
        registration = {
            "wandb_group": self.group,
            "wandb_project": self.project,
            "batch_size": self.env["batch_size"],
            "max_token_len": self.tinker["max_token_trainer_length"],
            "checkpoint_dir": self.tinker["checkpoint_dir"],
            "save_checkpoint_interval": self.tinker["save_checkpoint_interval"],
            "starting_step": 0,
            "num_steps": self.env["total_steps"],
        }
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/register", json=registration) as answer,
        ):
            answer.raise_for_status()
            self.uuid = (await answer.json())["uuid"]

    async def publish(self, step: int) -> None:
        """Weights under a name, and a client that samples from them."""
        saved = await self.training.save_weights_for_sampler_async(name=f"step_{step}")
        path = (await saved.result_async()).path
        self.sampling = await self.service.create_sampling_client_async(model_path=path)

    async def batch(self) -> list[Json]:
        """The next batch: asked for every second; a question may take 10 s, and is tried three
        times.
        """
        while True:
            if batch := (await self._asked())["batch"]:
                return batch
            await asyncio.sleep(POLL_S)

    async def _asked(self) -> Json:
        for last in (False,) * (TRIES - 1) + (True,):
            try:
                timeout = aiohttp.ClientTimeout(total=BATCH_S)
                async with (
                    aiohttp.ClientSession(timeout=timeout) as http,
                    http.get(f"{self.url}/batch") as answer,
                ):
                    return await answer.json()
            except (aiohttp.ClientError, TimeoutError):
                if last:
                    raise
        raise AssertionError

    async def step(self, number: int) -> Json:
        """One optimiser step; its metrics."""
        groups = await self.batch()
        rows = [row for group in groups for row in _rows(group)]
        passing = await self.training.forward_backward_async(
            [_datum(*row) for row in rows], "importance_sampling"
        )
        stepping = await self.training.optim_step_async(
            tinker.AdamParams(learning_rate=self.tinker["learning_rate"], **ADAM)
        )
        passed = await passing.result_async()
        await stepping.result_async()
        await self.publish(number + 1)
        return {
            "step": number + 1,
            "sequences": sum(len(group["tokens"]) for group in groups),
            "train/loss": passed.metrics.get("loss:sum"),
            "train/learning_rate": self.tinker["learning_rate"],
            "reward/mean": statistics.fmean(score for group in groups for score in group["scores"]),
            **_agreement(rows, passed),
            **_spread("advantages", [advantage for _, _, row in rows for advantage in row]),
        }


Row = tuple[list[int], list[float], list[float]]


def _rows(group: Json) -> Iterator[Row]:
    """Tokens, log-probabilities and advantages of each sequence of a group; none of one whose
    scores are all equal.
    """
    scores = group["scores"]
    mean = statistics.fmean(scores)
    if all(score == scores[0] for score in scores):
        return
    overrides = group.get("overrides") or [{}] * len(scores)
    together = zip(group["tokens"], group["inference_logprobs"], scores, overrides, strict=True)
    for tokens, logprobs, score, override in together:
        advantage = 0.0 if override.get("set_advantage_to_zero") else score - mean
        yield (
            tokens,
            logprobs,
            [advantage if logprob != CONTEXT else 0.0 for logprob in logprobs[1:]],
        )


def _datum(tokens: list[int], logprobs: list[float], advantages: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            "logprobs": tinker.TensorData.from_numpy(np.array(logprobs[1:], np.float32)),
            "advantages": tinker.TensorData.from_numpy(np.array(advantages, np.float32)),
        },
    )


def _agreement(rows: list[Row], passed: Any) -> Json:
    """Sampled against trained log-probabilities, of what was sampled."""
    sampled: list[float] = []
    trained: list[float] = []
    for (_, logprobs, _), output in zip(rows, passed.loss_fn_outputs, strict=True):
        found = output["logprobs"].to_numpy()
        acted = [at for at, logprob in enumerate(logprobs[1:]) if logprob != CONTEXT]
        sampled += [logprobs[1:][at] for at in acted]
        trained += [float(found[at]) for at in acted]
    difference = [before - after for before, after in zip(sampled, trained, strict=True)]
    both = {**_spread("logprobs", sampled), **_spread("logprobs", trained, "_training")}
    return {**both, "logprobs/diff": statistics.fmean(map(abs, difference)) if difference else 0.0}


def _spread(name: str, values: list[float], suffix: str = "") -> Json:
    if not values:
        return {}
    figures = {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "sum": math.fsum(values),
    }
    return {f"{name}/{figure}{suffix}": value for figure, value in figures.items()}


class Inference:
    """What the environment samples from: the newest weights, in sglang's form and in OpenAI's."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.tokenizer = Tokenizer.from_file(
            str(Path(trainer.env["tokenizer_name"]) / "tokenizer.json")
        )
        self.ready = False

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/wandb_info", self.wandb_info),
                web.post("/generate", self.generate),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "trainer_initialized": self.ready})

    async def wandb_info(self, request: web.Request) -> web.Response:
        return web.json_response({"group": self.trainer.group, "project": self.trainer.project})

    async def generate(self, request: web.Request) -> web.Response:
        """Token ids in; an object for one sample, a list for several."""
        if not self.ready:
            return web.json_response({"detail": "Trainer not initialized"}, status=503)
        body = await request.json()
        wanted = body["sampling_params"]
        number = wanted.get("n", 1)
        sequences = await self._sample(
            body["input_ids"],
            number,
            wanted.get("max_new_tokens", 256),
            wanted.get("temperature", 1.0),
        )
        told = [
            {
                "text": self.tokenizer.decode(sequence.tokens),
                "meta_info": {
                    "output_token_logprobs": [
                        [logprob, token, None]
                        for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True)
                    ],
                    "finish_reason": "stop",
                },
            }
            for sequence in sequences
        ]
        return web.json_response(told if number > 1 else told[0])

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        return await self._told(body, body["prompt"], lambda text: {"text": text})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = "\n".join(message["content"] for message in body["messages"])
        return await self._told(
            body, prompt, lambda text: {"message": {"role": "assistant", "content": text}}
        )

    async def _told(self, body: Json, prompt: str, form: Any) -> web.Response:
        if not self.ready:
            return web.json_response({"detail": "Trainer not initialized"}, status=503)
        ids = self.tokenizer.encode(prompt).ids
        sequences = await self._sample(
            ids, body.get("n", 1), body.get("max_tokens", 100), body.get("temperature", 1.0)
        )
        texts = [self.tokenizer.decode(sequence.tokens) for sequence in sequences]
        choices = [
            {"index": at, "finish_reason": "stop", **form(text)} for at, text in enumerate(texts)
        ]
        told = {
            "id": "1",
            "object": "completion",
            "created": 0,
            "model": body["model"],
            "choices": choices,
        }
        return web.json_response(told)

    async def _sample(
        self, prompt: list[int], number: int, tokens: int, temperature: float
    ) -> list[Any]:
        answer = await self.trainer.sampling.sample_async(
            prompt=tinker.ModelInput.from_ints(prompt),
            num_samples=number,
            sampling_params=tinker.SamplingParams(max_tokens=tokens, temperature=temperature),
        )
        return list(answer.sequences)


def _print(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def main(config: Json) -> None:
    """Serve and train; an exception ends the training, and is no failure of the program."""
    trainer = Trainer(config)
    inference = Inference(trainer)
    runner = web.AppRunner(inference.app())
    await runner.setup()
    await web.TCPSite(
        runner, "127.0.0.1", urlsplit(trainer.openai["base_url"]).port or 8001
    ).start()
    try:
        await trainer.setup()
        inference.ready = True
        for number in range(trainer.env["total_steps"]):
            _print(**await trainer.step(number))
        _print(ended="training complete")
    except Exception as error:  # noqa: BLE001 - as the one it stands for does
        _print(ended=repr(error))
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(yaml.safe_load(Path(sys.argv[1]).read_text())))
