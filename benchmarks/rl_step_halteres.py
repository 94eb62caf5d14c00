"""The party Halteres in `rl_step.py`: the real service and engine through the real SDK, one step
per `go`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from party import Channel, work

from halteres.process import begin
from halteres.tokenizer import load_tokenizer

WORK = work()
READY_S = 60.0


@contextmanager
def service() -> Iterator[str]:
    """The training service with its engine, on a free port; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        argv = ["--state", WORK["scratch"], "--engine", "torch", "--model", WORK["folder"]]
        argv += [
            "--dtype",
            WORK["dtype"],
            "--threads",
            str(WORK["threads"]),
            "--listen-fd",
            str(listening.fileno()),
        ]
        child = subprocess.Popen(
            [sys.executable, "-m", "halteres.service", *argv],
            stdout=2,
            pass_fds=(listening.fileno(),),
        )
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            wait_until_ready(url)
            yield url
        finally:
            child.terminate()
            child.wait(timeout=15)


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/api/v1/healthz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"the service was not ready within {READY_S:.0f} s")


class Loop:
    """The on-policy loop: sample, score, pass, step, publish."""

    def __init__(self, url: str) -> None:
        import tinker

        self.tinker = tinker
        client = tinker.ServiceClient(base_url=url, api_key="tml-bench")
        self.trainer = client.create_lora_training_client(
            WORK["folder"],
            rank=WORK["rank"],
            seed=0,
            train_mlp=True,
            train_attn=True,
            train_unembed=False,
        ).result()
        self.sampler = self.trainer.save_weights_and_get_sampling_client().result()
        self.tokenizer = load_tokenizer(WORK["folder"])
        self.prompts = [
            self.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            for text in WORK["prompts"]
        ]

    def step(self, number: int) -> dict[str, Any]:
        started = time.perf_counter()
        groups = self.sample(number)
        sampled = time.perf_counter()
        data = [
            datum
            for prompt, group in zip(self.prompts, groups, strict=True)
            for datum in self.datums(prompt, group)
        ]
        passed = self.trainer.forward_backward(data, "importance_sampling")
        stepped = self.trainer.optim_step(
            self.tinker.AdamParams(learning_rate=WORK["learning_rate"], eps=1e-8)
        )
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        trained = time.perf_counter()
        self.sampler = self.trainer.save_weights_and_get_sampling_client().result()
        published = time.perf_counter()
        return {
            "step": number,
            "tokens": sum(len(sequence.tokens) for group in groups for sequence in group),
            "loss": loss,
            "prompt_tokens": sum(map(len, self.prompts)),
            "kl_sample_train_v2": float(
                0.5 * np.mean(np.square(self.differences(data, passed.result())))
            ),
            "sample_s": sampled - started,
            "train_s": trained - sampled,
            "publish_s": published - trained,
        }

    def sample(self, number: int) -> list[list[Any]]:
        """All groups at once; no stop, not even the end token: equal work for both parties."""
        params = self.tinker.SamplingParams(
            max_tokens=WORK["max_tokens"], temperature=1.0, stop=[], seed=number
        )
        promises = [
            self.sampler.sample(
                self.tinker.ModelInput.from_ints(prompt), WORK["group_size"], params
            )
            for prompt in self.prompts
        ]
        return [list(promise.result().sequences) for promise in promises]

    def datums(self, prompt: list[int], group: list[Any]) -> list[Any]:
        """One datum per answer; its advantage is the reward centred and scaled within the group."""
        texts = [self.tokenizer.decode(sequence.tokens) for sequence in group]
        assert all(text is not None for text in texts)
        rewards = np.array([len(set(sequence.tokens)) / len(sequence.tokens) for sequence in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        return [
            self.datum(prompt, sequence, float(at))
            for sequence, at in zip(group, advantages, strict=True)
        ]

    @staticmethod
    def differences(data: list[Any], passed: Any) -> np.ndarray:
        """Trained less sampled log-probabilities of all answers' tokens."""
        found = []
        for datum, outputs in zip(data, passed.loss_fn_outputs, strict=True):
            inputs = {
                name: np.asarray(datum.loss_fn_inputs[name].data)
                for name in ("logprobs", "advantages")
            }
            trained = np.asarray(outputs["logprobs"].data)
            found.append((trained - inputs["logprobs"])[inputs["logprobs"] != 0])
        return np.concatenate(found)

    def datum(self, prompt: list[int], sequence: Any, advantage: float) -> Any:
        tokens = [*prompt, *sequence.tokens]
        context = np.zeros(len(prompt) - 1, np.float32)
        logprobs = np.concatenate([context, np.asarray(sequence.logprobs, np.float32)])
        advantages = np.concatenate([context, np.full(len(sequence.tokens), advantage, np.float32)])
        return self.tinker.Datum(
            model_input=self.tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": np.asarray(tokens[1:], np.int64),
                "logprobs": logprobs,
                "advantages": advantages,
            },
        )


def main() -> None:
    channel = Channel()
    begin("bench")
    Path(WORK["scratch"]).mkdir(parents=True, exist_ok=True)
    with service() as url:
        loop = Loop(url)
        channel.say(ready=True, torch=version("torch"), version=version("halteres"))
        number = 0
        while channel.wait():
            number += 1
            channel.say(**loop.step(number))


main()
