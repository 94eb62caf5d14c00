"""The policy: the model being trained, behind the Tinker SDK, and the count of its optimiser steps.

The SDK is imported inside functions: it is heavy, and torch stays out.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from halteres.clients.json_client import Refused, get_json
from halteres.config.settings import TrainerSettings
from halteres.errors import NotReady, boundary
from halteres.losses import LossKind, find_kind
from halteres.training.datums import Example, Row
from halteres.training.failures import LossNotFinite, ServiceFailed, VersionsDiffer
from halteres.training.folder import Wiring
from halteres.training.learner import Checkpoint, Pass, SentCall

if TYPE_CHECKING:
    import tinker

ANY_KEY = "tml-local"  # the SDK refuses to start without a key of this shape; a service on this machine asks for none
VERSION_METRIC = "policy_version:max"  # of an optimiser step: the service's own count
CLIPPED_METRIC = "num_clipped_tokens:sum"  # of a pass: tokens with an advantage whose ratio was clipped
UPDATE_METRIC = "update_norm:max"
"""Of an optimiser step: what the adapter adds to the base weights, relative to them (Frobenius norms)."""

UP_S = 120.0  # for the service to load its model


class Policy:
    """One LoRA adapter in training: the `Learner` of a run. Make it with `create` or `resume`."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        client: tinker.TrainingClient,
        wiring: Wiring,
        settings: TrainerSettings,
        version: int,
    ) -> None:
        self._service, self._client, self._wiring = service, client, wiring
        self._settings, self._version = settings, version
        self._reference: tinker.TrainingClient | None = None
        self._update_norm: float | None = None

    @classmethod
    async def create(cls, wiring: Wiring, settings: TrainerSettings, seed: int) -> Policy:
        """A fresh adapter.

        Raises:
            NotReady: the service is not there. ServiceFailed: it refuses.
        """
        service = await _connect(wiring)
        call = service.create_lora_training_client(
            wiring.base_model, rank=settings.lora_rank, seed=seed, user_metadata=_metadata(wiring)
        )
        client = await SentCall(call, "create_model", _same)
        return cls(service, client, wiring, settings, version=0)

    @classmethod
    async def resume(cls, wiring: Wiring, settings: TrainerSettings, state_path: str, version: int) -> Policy:
        """The adapter of a checkpoint with its optimiser, which had taken `version` steps. Raises as `create`."""
        service = await _connect(wiring)
        call = service.create_training_client_from_state_with_optimizer(state_path, user_metadata=_metadata(wiring))
        client = await SentCall(call, "load_weights", _same)
        return cls(service, client, wiring, settings, version)

    @property
    def version(self) -> int:
        """Optimiser steps taken so far."""
        return self._version

    @property
    def tempered(self) -> bool:
        """Sampled log-probabilities are those of the sampling temperature, which is not 1."""
        return self._wiring.tempered

    @property
    def update_norm(self) -> float | None:
        """How far the weights are from the base model's, as the service said of the last step."""
        return self._update_norm

    def forward_backward(self, examples: Sequence[Example]) -> SentCall[Pass]:
        """Accumulate the gradient of the loss summed over tokens.

        Awaiting it raises LossNotFinite where the loss or a log-probability is NaN or infinite.
        """
        loss = find_kind(self._settings.loss)
        data = [_datum(example, loss) for example in examples]
        call = self._client.forward_backward(data, self._settings.loss, self._settings.loss_config or None)  # type: ignore[arg-type]  # any loss that the service knows
        return SentCall(call, "forward_backward", _finite_pass)

    def forward(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        """The log-probabilities of the examples' targets under the present weights, N of each."""
        return SentCall(_forward(self._client, examples), "forward", _rows)

    def reference(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        """The same under the base model: a fresh adapter of rank 1 adds nothing to it, for its B is 0."""
        return SentCall(self._of_reference(examples), "forward", _rows)

    async def _of_reference(self, examples: Sequence[Example]) -> Any:
        reference = self._reference
        if reference is None:
            call = self._service.create_lora_training_client(self._wiring.base_model, rank=1)
            reference = self._reference = await SentCall[Any](call, "create_model", _same)
        return await _forward(reference, examples)

    def optim_step(self, learning_rate: float) -> SentCall[int]:
        """One Adam step with what was accumulated; answers the new policy version."""
        import tinker

        adam = tinker.AdamParams(
            learning_rate=learning_rate,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            eps=self._settings.adam_eps,
            grad_clip_norm=self._settings.grad_clip_norm,
        )
        return SentCall(self._client.optim_step(adam), "optim_step", self._count)

    async def publish(self) -> None:
        """Make the present weights the ones that environments sample. Nothing is written to disk."""
        await SentCall(self._client.save_weights_and_get_sampling_client(), "publish", lambda _: None)

    async def save(self, name: str, step: int) -> Checkpoint:
        """A named checkpoint: state to resume from, weights to sample from."""
        state = SentCall(self._client.save_state(name), "save_state", _path)
        sampler = SentCall(self._client.save_weights_for_sampler(name), "save_weights_for_sampler", _path)
        return Checkpoint(
            name=name, step=step, version=self._version, state_path=await state, sampler_path=await sampler
        )

    async def save_baseline(self, name: str) -> Checkpoint:
        """Named sampler weights alone: what the evaluation before training samples."""
        sampler = SentCall(self._client.save_weights_for_sampler(name), "save_weights_for_sampler", _path)
        return Checkpoint(name=name, step=0, version=self._version, state_path=None, sampler_path=await sampler)

    def _count(self, stepped: tinker.OptimStepResponse) -> int:
        self._version += 1
        self._update_norm = (stepped.metrics or {}).get(UPDATE_METRIC)
        told = (stepped.metrics or {}).get(VERSION_METRIC)  # a service that is not ours tells none
        if told is not None and told != self._version:
            raise VersionsDiffer(
                f"The service has taken {told:.0f} optimiser steps, the trainer counts {self._version}.",
                "Staleness, and which tokens are compared, would be judged by a wrong policy version.",
                "Resume from the last checkpoint, with the checkpoints.jsonl that was written beside it.",
            )
        return self._version


async def _connect(wiring: Wiring) -> tinker.ServiceClient:
    """Open a session. It is never finished explicitly: the final evaluation still samples its checkpoints."""

    def opened() -> tinker.ServiceClient:
        import tinker

        with boundary(ServiceFailed, "Opening a session at the training service"):
            service = tinker.ServiceClient(
                user_metadata=_metadata(wiring), base_url=wiring.service_url, api_key=wiring.api_key or ANY_KEY
            )
            service.holder.get_session_id()
            return service

    await _until_up(wiring.service_url)
    return await asyncio.to_thread(opened)


def _metadata(wiring: Wiring) -> dict[str, str]:
    """How the service finds the policy of a run."""
    return {"halteres_run": wiring.run_id}


def _same(answer: Any) -> Any:
    return answer


def _datum(example: Example, loss: LossKind) -> tinker.Datum:
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(example.tokens_N.tolist()),
        loss_fn_inputs={"target_tokens": example.targets_N, **example.inputs(loss)},  # type: ignore[arg-type]  # the SDK turns arrays into TensorData itself
    )


def _forward(client: tinker.TrainingClient, examples: Sequence[Example]) -> Awaitable[Any]:
    """cross_entropy reads no log-probabilities, and answers those of the targets, whatever their weights."""
    kind = find_kind("cross_entropy")
    return client.forward([_datum(example, kind) for example in examples], "cross_entropy")


def _finite_pass(answer: tinker.ForwardBackwardOutput) -> Pass:
    loss = float(answer.metrics.get("loss:sum", np.nan))
    logprobs = _rows(answer)
    if not np.isfinite(loss) or not all(np.isfinite(row).all() for row in logprobs):
        raise LossNotFinite(
            f"The loss is {loss}" + ("." if not np.isfinite(loss) else ", but a log-probability is not finite."),
            "The weights have diverged, most likely because the learning rate is too high.",
            "Resume from the last checkpoint with a lower trainer.learning_rate.",
        )
    return Pass(loss=loss, logprobs=logprobs, clipped=answer.metrics.get(CLIPPED_METRIC))


def _rows(answer: tinker.ForwardBackwardOutput) -> tuple[Row, ...]:
    return tuple(output["logprobs"].to_numpy().astype(np.float32).reshape(-1) for output in answer.loss_fn_outputs)


def _path(answer: Any) -> str:
    return str(answer.path)


async def _until_up(url: str) -> None:
    """Wait for the service. The SDK would too, but with pauses of seconds."""
    deadline = time.monotonic() + UP_S
    while True:
        try:
            await asyncio.to_thread(get_json, f"{url.rstrip('/')}/api/v1/healthz", 5)
            return
        except (NotReady, Refused) as error:
            if time.monotonic() > deadline:
                raise NotReady(
                    f"The training service at {url} is not ready after {UP_S:.0f} s.",
                    next="Look into logs/service.log and logs/engine.log.",
                ) from error
        await asyncio.sleep(0.05)


def learning_rate(config: TrainerSettings, step: int) -> float:
    """The learning rate of a step, counted from 1: warm-up in a straight line, then constant or down to 0.

    >>> [round(learning_rate(TrainerSettings(learning_rate=1, total_steps=4, schedule="linear"), s), 2) for s in (1, 4)]
    [1.0, 0.25]
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    steps = max(1, config.total_steps - config.warmup_steps)
    past = (step - config.warmup_steps - 1) / steps  # 0 at the first step after the warm-up
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1.0 - past)
        case "cosine":
            return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * past))


def minibatches(
    examples: Sequence[Example], config: TrainerSettings, seed: int, step: int
) -> Iterator[Sequence[Example]]:
    """What each optimiser step of a batch is taken on; shuffled by (seed, step, epoch) where there are several."""
    if not examples:
        return
    if config.updates_per_batch == 1:
        yield examples
        return
    for epoch in range(config.epochs):
        order = list(range(len(examples)))
        random.Random(f"{seed}/{step}/{epoch}").shuffle(order)  # noqa: S311 - an order, no secret
        num = min(config.minibatches, len(order))
        bounds = [len(order) * part // num for part in range(num + 1)]
        for start, stop in pairwise(bounds):
            yield [examples[i] for i in order[start:stop]]
