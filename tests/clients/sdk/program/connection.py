"""What the steps share: the connection, the model's name, data, and how this SDK's calls are
awaited.

Owns: the differences between SDK generations in how a client is made and awaited.
Never: checks anything.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tinker
from tinker import types

Client = Any
"""A client of whichever generation: their classes differ from one SDK to the next."""

WAIT_S = 60.0
SEQUENCES = ([5, 6, 7, 8, 9], [11, 12, 13, 14], [21, 22, 23, 24, 25, 26])
"""Token ids: in range for every vocabulary, and nothing special in the built-in one."""

WEIGHTS = ([1.0, 0.5, 1.0, 0.0], [1.0, 1.0, -0.25], [0.0, 2.0, 1.0, 1.0, 0.125])
"""One weight per target of SEQUENCES; fractional and negative ones are legal."""

REFUSALS = (tinker.APIStatusError, tinker.RequestFailedError, ValueError, RuntimeError)
"""How an SDK tells that a request was refused; the generations differ."""

Datums = list[types.Datum]


@dataclass
class Connection:
    """One service seen by one SDK."""

    sdk: tuple[int, ...]
    model: str
    folder: str
    """The model's folder, by which a sampling client finds its tokenizer without a hub; '' where it
    is unknown.
    """

    @cached_property
    def service(self) -> Client:
        """The connection; address and key come from the environment."""
        return tinker.ServiceClient(user_metadata={"program": "contract"})

    @cached_property
    def rest(self) -> Client:
        """The client that reads and changes records."""
        return tinker.RestClient() if self.sdk >= (0, 38) else self.service.create_rest_client()

    @cached_property
    def training(self) -> Client:
        """The training client that most records are about."""
        return self.trainer(seed=7, rank=8)

    def trainer(self, seed: int = 7, rank: int = 4, **options: Any) -> Client:
        """A fresh training client: the same seed is the same start."""
        return self.made(
            self.service.create_lora_training_client(self.model, rank=rank, seed=seed, **options)
        )

    def sampler(self, **which: Any) -> Client:
        """A sampling client of a path or a base model."""
        return self.made(self.service.create_sampling_client(**which))

    def published(self, trainer: Client, **options: Any) -> Client:
        """A sampling client of the trainer's present weights."""
        return self.made(trainer.save_weights_and_get_sampling_client(**options))

    def made(self, client: Client) -> Client:
        """The client itself; since 0.38 the calls that make one give a future of it."""
        return client.result(timeout=WAIT_S) if self.sdk >= (0, 38) else client


def wait(future: Any) -> Any:
    """The result of a call, within a minute."""
    return future.result(timeout=WAIT_S)


def refused(call: Any) -> str:
    """The sentence with which a call is refused."""
    try:
        answer = wait(call())
    except REFUSALS as error:
        return str(error)
    raise AssertionError(f"it was not refused, but answered {answer}")


def unique(name: str) -> str:
    """A name that no other run of this program took."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def prompt(tokens: list[int]) -> types.ModelInput:
    """Tokens as a model input."""
    return types.ModelInput.from_ints(list(tokens))


def integers(values: list[int], shape: list[int] | None = None) -> types.TensorData:
    """An int64 tensor."""
    return types.TensorData(data=values, dtype="int64", shape=shape or [len(values)])


def floats(values: list[float], shape: list[int] | None = None) -> types.TensorData:
    """A float32 tensor."""
    return types.TensorData(data=values, dtype="float32", shape=shape or [len(values)])


def datum(tokens: list[int], **inputs: types.TensorData) -> types.Datum:
    """A datum whose targets are the tokens that follow."""
    return types.Datum(
        model_input=prompt(tokens[:-1]),
        loss_fn_inputs={"target_tokens": integers(tokens[1:]), **inputs},
    )


def weighted() -> Datums:
    """SEQUENCES with their WEIGHTS, for cross_entropy."""
    return [datum(tokens, weights=floats(weights)) for tokens, weights in zip(SEQUENCES, WEIGHTS)]  # noqa: B905


def plain() -> Datums:
    """SEQUENCES with weights of 1."""
    return [datum(tokens, weights=floats([1.0] * (len(tokens) - 1))) for tokens in SEQUENCES]


def logprobs_of(output: Any) -> list[list[float]]:
    """One list per datum."""
    return [[float(value) for value in one["logprobs"].data] for one in output.loss_fn_outputs]


def flat(lists: list[list[float]]) -> list[float]:
    """All numbers, datums end to end."""
    return [value for one in lists for value in one]


def scores(trainer: Client, data: Datums | None = None) -> list[float]:
    """The log-probabilities of the targets under the trainer's present weights."""
    return flat(logprobs_of(wait(trainer.forward(data or plain(), "cross_entropy"))))


def step(trainer: Client, data: Datums | None = None, **adam: Any) -> float:
    """One training step; returns the loss before it."""
    passed = trainer.forward_backward(data or plain(), "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(**{"learning_rate": 1e-2, **adam}))
    loss = float(wait(passed).metrics["loss:sum"])
    wait(stepped)
    return loss
