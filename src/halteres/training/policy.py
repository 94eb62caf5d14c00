"""The policy: the model being trained, behind the Tinker SDK, and the count of its optimiser steps.

A call is sent at once and awaited later, so that the next one can be sent meanwhile. The SDK is
imported inside functions: it is heavy, and torch stays out.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from halteres.clients.json_client import Refused, get_json
from halteres.clients.retries import until_ready
from halteres.config.settings import TrainerSettings
from halteres.errors import HalteresError, NotReady, boundary, failed_future
from halteres.files import replace_file
from halteres.losses import LossKind, find_kind
from halteres.training.datums import Example, Row
from halteres.training.failures import LossNotFinite, RequestRefused, ServiceFailed, VersionsDiffer
from halteres.training.folder import Published, Wiring

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

# deadline of any one call: a pass over a large model takes long; for ever it must not
CALL_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a forward-backward pass answered."""

    loss: float  # summed over tokens
    logprobs: tuple[Row, ...]  # per example, N: of its targets, before the step
    # tokens whose ratio the loss clipped; None of a loss or a service that does not say
    clipped: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A named checkpoint."""

    name: str
    step: int
    version: int
    state_path: str | None  # weights and optimiser; None where only sampler weights were written
    sampler_path: str


class SentCall(Generic[T]):
    """A call already sent to the service, to be awaited later."""

    def __init__(
        self,
        call: Awaitable[Any],
        name: str,
        read: Callable[[Any], T] = lambda answer: answer,
        within_s: float | None = None,
    ) -> None:
        self._call, self._name, self._read = call, name, read
        self._within_s = CALL_S if within_s is None else within_s

    def __await__(self) -> Generator[Any, None, T]:
        async def redeemed() -> T:
            try:
                async with asyncio.timeout(self._within_s):
                    answer = await self._call
            except HalteresError:
                raise
            except TimeoutError as error:
                why = (
                    f"The training service did not answer {self._name} within "
                    f"{self._within_s:.0f} s."
                )
                raise ServiceFailed(why) from error
            except Exception as error:
                raise _as_ours(error, self._name) from error
            return self._read(answer)

        return redeemed().__await__()


_SERVICE_SENTENCE = re.compile(r"Request failed: (.*) for self\.request_id=", re.DOTALL)
"""tinker 0.38 puts the service's sentence between its own words."""


def _as_ours(error: Exception, call: str) -> HalteresError:
    """What the SDK raised, as an error of ours, with the service's own sentence where there is
    one.
    """
    category = getattr(error, "category", None)  # of a RequestFailedError
    if category is None:
        return ServiceFailed(
            f"The training service's {call} raised {type(error).__name__}: {error}."
        )
    inside = _SERVICE_SENTENCE.search(str(error))
    code, sentence = failed_future(inside[1] if inside else str(error))
    if category != "user":
        return ServiceFailed(f"The training service failed at {call}: {sentence}")
    if code == LossNotFinite.code:
        return LossNotFinite(
            sentence, next="Resume from the last checkpoint with a lower trainer.learning_rate."
        )
    return RequestRefused(f"The training service refused {call}: {sentence}")


VERSION_METRIC = "policy_version:max"  # of an optimiser step: the service's own count
# of a pass: tokens with an advantage whose ratio was clipped
CLIPPED_METRIC = "num_clipped_tokens:sum"
UPDATE_METRIC = "update_norm:max"
"""Of an optimiser step: what the adapter adds to the base weights, relative to them (Frobenius
norms).
"""

UP_S, SESSION_S, FIRST_S = 120.0, 60.0, 300.0
"""How long the service may take to load its model, then to open a session, then to make the adapter
or read it from a checkpoint. Together they are less than the supervisor gives a trainer, so that it
is the trainer who says why.
"""
INFO_S = 30.0
"""How long a service that is up may take to say what it is."""


class Policy:
    """One LoRA adapter in training. Make it with `create` or `resume`. What answers a SentCall has
    sent its request.
    """

    version: int  # optimiser steps taken so far
    # sampled log-probabilities are those of the sampling temperature, which is not 1
    tempered: bool
    exact: bool = True  # what samples computes the same bits as what trains
    takes_unembed: bool = True  # a sampler can be given an adapter of the unembedding
    # of what the adapter adds, relative to the base weights; None: nobody has said
    update_norm: float | None = None

    def __init__(
        self,
        service: tinker.ServiceClient,
        client: tinker.TrainingClient,
        wiring: Wiring,
        settings: TrainerSettings,
        version: int,
    ) -> None:
        self._service, self._client, self._wiring = service, client, wiring
        self._settings, self.version, self.tempered = settings, version, wiring.tempered
        self._reference: tinker.TrainingClient | None = None

    @classmethod
    async def create(cls, wiring: Wiring, settings: TrainerSettings, seed: int) -> Policy:
        """A fresh adapter.

        Raises:
            NotReady: the service is not there. ServiceFailed: it refuses.
        """
        service = await connect(wiring)
        takes_unembed = await _takes_unembed(wiring)
        trains_unembed = settings.train_unembed
        if trains_unembed is None:
            trains_unembed = takes_unembed
        call = service.create_lora_training_client(
            wiring.base_model,
            rank=settings.lora_rank,
            seed=seed,
            train_unembed=trains_unembed,
            user_metadata=wiring.metadata,
        )
        client = await SentCall[Any](call, "create_model", within_s=FIRST_S)
        policy = cls(service, client, wiring, settings, version=0)
        policy.takes_unembed = takes_unembed
        return policy

    @classmethod
    async def resume(
        cls, wiring: Wiring, settings: TrainerSettings, state_path: str, version: int
    ) -> Policy:
        """The adapter of a checkpoint with its optimiser, which had taken `version` steps. Raises
        as `create`.
        """
        service = await connect(wiring)
        call = service.create_training_client_from_state_with_optimizer(
            state_path, user_metadata=wiring.metadata
        )
        client = await SentCall[Any](call, "load_weights", within_s=FIRST_S)
        policy = cls(service, client, wiring, settings, version)
        policy.takes_unembed = await _takes_unembed(wiring)
        return policy

    def forward_backward(self, examples: Sequence[Example]) -> SentCall[Pass]:
        """Accumulate the gradient of the loss summed over tokens.

        Awaiting it raises LossNotFinite where the loss or a log-probability is NaN or infinite.
        """
        loss = find_kind(self._settings.loss)
        data = [_datum(example, loss) for example in examples]
        # Any loss that the service knows, not the SDK's alone.
        name: Any = self._settings.loss
        call = self._client.forward_backward(data, name, self._settings.loss_config or None)
        return SentCall(call, "forward_backward", _finite_pass)

    def forward(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        """The log-probabilities of the examples' targets under the present weights, N of each."""
        return SentCall(_forward(self._client, examples), "forward", _rows)

    def reference(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        """The same under the base model: a fresh adapter of rank 1 adds nothing to it, for its B is
        0.
        """

        async def forward() -> Any:
            reference = self._reference
            if reference is None:
                call = self._service.create_lora_training_client(
                    self._wiring.base_model, rank=1, train_unembed=self.takes_unembed
                )
                reference = self._reference = await SentCall[Any](call, "create_model")
            return await _forward(reference, examples)

        return SentCall(forward(), "forward", _rows)

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

        def count(stepped: tinker.OptimStepResponse) -> int:
            metrics = stepped.metrics or {}
            self.version += 1
            self.update_norm = metrics.get(UPDATE_METRIC)
            counted = metrics.get(VERSION_METRIC)  # a service that is not ours says none
            if counted not in (None, self.version):
                raise VersionsDiffer(
                    f"The service has taken {counted:.0f} optimiser steps, the trainer counts "
                    f"{self.version}.",
                    "Staleness, and which tokens are compared, would be judged by a wrong policy "
                    "version.",
                    "Resume from the last checkpoint, with the checkpoints.jsonl that was written "
                    "beside it.",
                )
            return self.version

        return SentCall(self._client.optim_step(adam), "optim_step", count)

    async def publish(self) -> None:
        """Make the present weights the ones that environments sample. No weights are written to
        disk; a sampling relay reads which they are.
        """
        sampler = await SentCall[Any](
            self._client.save_weights_and_get_sampling_client(), "publish"
        )
        if self._wiring.published:
            newest = Published(version=self.version, handle=sampler.get_sampler_handle())
            replace_file(Path(self._wiring.published), msgspec.json.encode(newest), private=True)

    async def save(self, name: str, step: int, *, with_state: bool = True) -> Checkpoint:
        """A named checkpoint: weights to sample from and, with the optimiser's, state to resume
        from.
        """
        state = SentCall[Any](self._client.save_state(name), "save_state") if with_state else None
        sampler = SentCall[Any](
            self._client.save_weights_for_sampler(name), "save_weights_for_sampler"
        )
        return Checkpoint(
            name=name,
            step=step,
            version=self.version,
            state_path=(await state).path if state else None,
            sampler_path=(await sampler).path,
        )


async def samples_exactly(wiring: Wiring) -> bool:
    """Whether the service says that what samples there is exact; a sampler that still starts is
    waited for. A service that is not ours does not say; nothing is assumed of it, but that one of
    the Tinker API alone, which a relay samples, computes what trains and what samples apart.
    """
    if wiring.published:
        return False
    url = f"{wiring.service_url.rstrip('/')}/halteres/v1/info"

    async def ask() -> bool:
        try:
            info = await asyncio.to_thread(get_json, url, INFO_S, wiring.api_key)
        except (NotReady, Refused):
            return True
        said = info.get("samples_exactly", True)
        if said is None:
            raise NotReady(
                "The service does not know yet whether what samples is exact.",
                "Its sampler is starting.",
            )
        return said is not False

    return await until_ready(ask, CALL_S)


async def _takes_unembed(wiring: Wiring) -> bool:
    """Whether a sampler of the service can be given an adapter of the unembedding; a service that
    is not ours does not say, and takes it.
    """
    url = f"{wiring.service_url.rstrip('/')}/halteres/v1/info"
    try:
        info = await asyncio.to_thread(get_json, url, INFO_S, wiring.api_key)
    except (NotReady, Refused):
        return True
    targets = info.get("adapter_targets")
    return not isinstance(targets, list) or "unembed" in targets


async def connect(wiring: Wiring) -> tinker.ServiceClient:
    """Open a session. It is never finished explicitly: the final evaluation still samples its
    checkpoints.
    """
    up_s = wiring.service_up_s or UP_S
    deadline = time.monotonic() + up_s
    while True:  # the SDK would wait for the service too, but with pauses of seconds
        try:
            await asyncio.to_thread(get_json, f"{wiring.service_url.rstrip('/')}/api/v1/healthz", 5)
            break
        except (NotReady, Refused) as error:
            if time.monotonic() > deadline:
                raise NotReady(
                    f"The training service at {wiring.service_url} is not ready after {up_s:.0f} "
                    "s.",
                    next="Look into logs/service.log and logs/engine.log.",
                ) from error
        await asyncio.sleep(0.05)

    def opened() -> tinker.ServiceClient:
        import tinker

        service = tinker.ServiceClient(
            user_metadata=wiring.metadata,
            base_url=wiring.service_url,
            api_key=wiring.key_of_sdk,
        )
        service.holder.get_session_id()
        return service

    with boundary(ServiceFailed, "Opening a session at the training service"):
        try:
            return await _within(SESSION_S, opened)
        except TimeoutError:
            raise NotReady(
                f"The training service at {wiring.service_url} opened no session within "
                f"{SESSION_S:.0f} s.",
                "It answers other requests. The SDK's may be lost on their way: to a proxy, or to "
                "a server that"
                " speaks another protocol.",
                "See that HTTP_PROXY, HTTPS_PROXY and ALL_PROXY are not set, or that NO_PROXY "
                "names the service.",
            ) from None


async def _within(deadline_s: float, call: Callable[[], T]) -> T:
    """What a call returns that blocks its thread; TimeoutError after the deadline. The thread is
    then left behind: the process can end beside it, which one of the event loop's own threads would
    prevent.
    """
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name="session", daemon=True).start()
    async with asyncio.timeout(deadline_s):
        return await asyncio.shield(asyncio.wrap_future(result))


def _datum(example: Example, loss: LossKind) -> tinker.Datum:
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(example.tokens_N.tolist()),
        loss_fn_inputs={"target_tokens": example.targets_N, **example.inputs(loss)},  # type: ignore[arg-type]  # the SDK turns arrays into TensorData itself
    )


def _forward(client: tinker.TrainingClient, examples: Sequence[Example]) -> Awaitable[Any]:
    """cross_entropy reads no log-probabilities, and answers those of the targets, whatever their
    weights.
    """
    kind = find_kind("cross_entropy")
    return client.forward([_datum(example, kind) for example in examples], "cross_entropy")


def _finite_pass(answer: tinker.ForwardBackwardOutput) -> Pass:
    loss = float(answer.metrics.get("loss:sum", np.nan))
    logprobs = _rows(answer)
    if not np.isfinite(loss) or not all(np.isfinite(row).all() for row in logprobs):
        raise LossNotFinite(
            f"The loss is {loss}"
            + ("." if not np.isfinite(loss) else ", but a log-probability is not finite."),
            "The weights have diverged, most likely because the learning rate is too high.",
            "Resume from the last checkpoint with a lower trainer.learning_rate.",
        )
    return Pass(loss=loss, logprobs=logprobs, clipped=answer.metrics.get(CLIPPED_METRIC))


def _rows(answer: tinker.ForwardBackwardOutput) -> tuple[Row, ...]:
    return tuple(
        output["logprobs"].to_numpy().astype(np.float32).reshape(-1)
        for output in answer.loss_fn_outputs
    )


def learning_rate(config: TrainerSettings, step: int) -> float:
    """The learning rate of a step, counted from 1: warm-up in a straight line, then constant or
    down to 0.

    >>> settings = TrainerSettings(learning_rate=1, total_steps=4, schedule="linear")
    >>> [round(learning_rate(settings, step), 2) for step in (1, 4)]
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
    examples: Sequence[T], config: TrainerSettings, seed: int, step: int
) -> Iterator[Sequence[T]]:
    """What each optimiser step of a batch is taken on; shuffled by (seed, step, epoch) where there
    are several.
    """
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
