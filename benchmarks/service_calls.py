"""The client in `service_overhead.py`: a round of calls of the SDK per `go`. Runs in any
environment that has an SDK.

Owns: what a round is, the same for every server and every SDK from 0.22 on; the clock around each
call. Never: starts a server; judges a figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from party import Channel, work

WORK = work()
CHANNEL = Channel()

import tinker  # noqa: E402  after the channel: nothing may print on it
from tinker import types  # noqa: E402

PROMPT = types.ModelInput.from_ints([5, 6, 7])
SEEDS = range(1, 33)


def one_token(seed: int | None = None) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=1, seed=seed)


def datum() -> types.Datum:
    inputs = {
        "target_tokens": types.TensorData(data=[6, 7, 8], dtype="int64"),
        "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32"),
    }
    return types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)


class Client:
    """One session against one server."""

    def __init__(self, url: str, model: str) -> None:
        service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
        self._training = _settled(service.create_lora_training_client(model, rank=WORK["rank"]))
        self._sampling = self._published()
        self._expected = {seed: self._tokens(seed) for seed in SEEDS}

    def round(self) -> dict[str, Any]:
        """Every kind of call, as often as the work says."""
        return {
            "sample_ms": _each(
                WORK["samples"], lambda: self._sampling.sample(PROMPT, 1, one_token()).result()
            ),
            "forward_backward_and_optim_step_ms": _each(WORK["steps"], self._step),
            "publish_and_first_sample_ms": _each(WORK["publishes"], self._publish),
            **self._together(WORK["together"]),
        }

    def _step(self) -> None:
        passed = self._training.forward_backward([datum()], "cross_entropy")
        stepped = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()

    def _published(self) -> Any:
        return _settled(self._training.save_weights_and_get_sampling_client())

    def _publish(self) -> None:
        self._published().sample(PROMPT, 1, one_token()).result()

    def _tokens(self, seed: int) -> list[int]:
        return list(self._sampling.sample(PROMPT, 1, one_token(seed)).result().sequences[0].tokens)

    def _together(self, count: int) -> dict[str, Any]:
        """All in flight at once; each answer is the one that its seed gives alone."""
        seeds = [SEEDS[number % len(SEEDS)] for number in range(count)]
        began = time.perf_counter()
        waiting = [self._sampling.sample(PROMPT, 1, one_token(seed)) for seed in seeds]
        answers = [future.result().sequences for future in waiting]
        took = time.perf_counter() - began
        wrong = sum(
            len(sequences) != 1 or list(sequences[0].tokens) != self._expected[seed]
            for seed, sequences in zip(seeds, answers, strict=True)
        )
        return {"together": len(answers), "together_s": took, "together_wrong": wrong}


def _settled(made: Any) -> Any:
    """A client: SDK 0.38 answers a future of it, older ones itself."""
    return made.result() if hasattr(made, "result") else made


def _each(count: int, call: Callable[[], Any]) -> list[float]:
    """Milliseconds of each call, one after the other."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def main() -> None:
    client = Client(WORK["url"], WORK["model"])
    CHANNEL.say(ready=True, sdk=version("tinker"))
    while CHANNEL.wait():
        CHANNEL.say(**client.round())


main()
