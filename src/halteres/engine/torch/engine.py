"""`Engine` on torch: asynchronous outside, one thread inside.

Owns: the adapters and snapshots by name; each call as work for that thread.
Never: computes on the event loop; changes an adapter outside the order of calls; holds that thread up for the disk:
what is saved is copied in its turn and written by another thread, what is loaded is read by another and taken in its
turn.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import check_sampling, check_streamed, check_weights, tokens_of
from halteres.engine.folders import digest
from halteres.engine.protocol import (
    Adam,
    BaseType,
    Datum,
    LoraConfig,
    LossSpec,
    MergedType,
    ModelInfo,
    PassResult,
    Piece,
    SampleResult,
    SamplingParams,
    Saved,
    StepResult,
    Wanted,
    Weights,
)
from halteres.engine.shapes import MAX_RANK, TARGETS_OF_ADAPTERS
from halteres.engine.stream_buffer import PieceQueue
from halteres.engine.torch.adapter import BASE, Adapter, Checkpoint, Snapshot
from halteres.engine.torch.fused import FusedModel
from halteres.engine.torch.limits import PLACE, Limits, PassBudget
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.lora import Layout
from halteres.engine.torch.memory import attempt, free_for_cache
from halteres.engine.torch.merge import merge_into
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.passes import run_pass
from halteres.engine.torch.peft_checkpoint import Files, read_checkpoint, write_checkpoint
from halteres.engine.torch.requests import SampleRequest
from halteres.engine.torch.scheduler import Scheduler
from halteres.engine.torch.worker import Call, Slices, Worker
from halteres.errors import Conflict, HalteresError, NotFound
from halteres.text import load_tokenizer


class TorchEngine:
    """One base model in memory; see `Engine` for what each call promises."""

    def __init__(
        self,
        folder: Path,
        name: str,
        threads: int = 1,
        limits: Limits | None = None,
        device: str = "cpu",
        cache_gb: float | None = None,
        dtype: BaseType = "float32",
    ) -> None:
        """Read a model folder; takes seconds.

        Args:
            folder: of the model.
            name: that it is known by.
            threads: that compute.
            limits: other than the usual ones.
            device: `cpu` or `cuda` (`device.usable_device` says which).
            cache_gb: for keys and values, in 10^9 bytes; None: by what is free once the model is loaded.
            dtype: of the base weights, their matmuls, and the keys and values that are kept; adapters, gradients,
                softmax and logits are fp32 anyhow.

        Raises:
            NotFound: no model there.
            InvalidConfig: a model that is not understood.
        """
        torch.set_num_threads(threads)
        with suppress(RuntimeError):  # it can be set once per process only
            torch.set_num_interop_threads(1)
        self._base = load_base(folder, getattr(torch, dtype), torch.device(device))
        cache_bytes = int(cache_gb * 1e9) if cache_gb else free_for_cache(self._base.device)
        self._limits = limits or Limits.of(self._base, cache_bytes)
        self._info = _info(self._base, folder, name, threads, self._limits)
        self._adapters: dict[str, Adapter] = {}
        self._budgets: dict[str, PassBudget] = {}  # one for each: what one finds out moves no bit of another
        self._snapshots: dict[str, Snapshot] = {}
        self._worker = Worker(Scheduler(self._base, self._limits), threads, self._limits)
        self._files = Files()

    async def info(self) -> ModelInfo:
        """See `Engine`."""
        return self._info

    async def create_adapter(self, adapter: str, config: LoraConfig) -> None:
        """See `Engine`."""

        def create() -> None:
            if adapter in self._adapters:
                raise Conflict(f"The adapter '{adapter}' exists.", next="Drop it first or choose another name.")
            layout = Layout.of(self._base, config)
            self._adapters[adapter] = Adapter(layout, layout.initial(self._base.device))

        await self._call("create_adapter", (adapter,), create)

    async def forward_backward(
        self, adapter: str, data: tuple[Datum, ...], loss: LossSpec, forward_only: bool = False
    ) -> PassResult:
        """See `Engine`."""

        def begin() -> Slices:
            found = self._adapter(adapter)
            budget = self._budgets.setdefault(adapter, PassBudget.of(self._limits))
            return run_pass(self._base, self._info, found, data, loss, budget, forward_only=forward_only)

        return await self._in_slices("forward_backward", (adapter,), begin, batches=loss.custom is None)

    async def optim_step(self, adapter: str, adam: Adam) -> StepResult:
        """See `Engine`."""
        return await self._call("optim_step", (adapter,), lambda: self._adapter(adapter).step(adam))

    async def save(self, adapter: str, folder: str, optimizer: bool) -> Saved:
        """See `Engine`."""
        place = Path(folder)

        def write(checkpoint: Checkpoint) -> Saved:
            return write_checkpoint(place, self._info.name, checkpoint)

        return await self._saved("save", adapter, place, lambda: self._adapter(adapter).checkpoint(optimizer), write)

    async def load(self, adapter: str, folder: str, optimizer: bool) -> StepResult:
        """See `Engine`."""

        def take(found: Checkpoint) -> StepResult:
            self._adapters[adapter] = Adapter(found.layout, found.flat, found.version, found.adam)
            return StepResult(version=found.version, metrics={})

        place = Path(folder)

        def read() -> Checkpoint:
            return read_checkpoint(place, self._base, optimizer=optimizer)

        return await self._loaded("load", adapter, place, read, take)

    async def snapshot(self, adapter: str, snapshot: str) -> Weights:
        """See `Engine`."""

        def copy() -> Weights:
            self._snapshots[snapshot] = self._adapter(adapter).snapshot()
            return Weights(name=snapshot, version=self._snapshots[snapshot].version)

        return await self._call("snapshot", (adapter, snapshot), copy)

    async def save_snapshot(self, snapshot: str, folder: str) -> Saved:
        """See `Engine`."""
        place = Path(folder)

        def write(checkpoint: Checkpoint) -> Saved:
            saved = write_checkpoint(place, self._info.name, checkpoint)
            return msgspec.structs.replace(saved, sha256=digest(place))

        return await self._saved("save_snapshot", snapshot, place, lambda: self._snapshot(snapshot).checkpoint(), write)

    async def hold(self, name: str, source: Weights) -> int:
        """See `Engine`."""

        def take(found: Snapshot) -> int:
            self._snapshots[name] = found
            return found.version

        if source.folder is None:
            return await self._call("hold", (name, source.name), lambda: take(self._snapshot(source.name)))
        place = Path(source.folder)

        def read() -> Checkpoint:
            check_weights(source, place)
            return read_checkpoint(place, self._base, optimizer=False)

        return await self._loaded(
            "hold", name, place, read, lambda found: take(Snapshot.of(found.layout, found.flat, found.version))
        )

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    ) -> SampleResult:
        """See `Engine`."""
        request = self._request(snapshot, prompt, num_samples, params, wanted)
        self._worker.submit(request)
        return await asyncio.wrap_future(request.future)

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        """See `Engine`."""
        check_streamed(wanted)
        request, pieces = self._request(snapshot, prompt, num_samples, params, wanted), PieceQueue()
        request.pieces = pieces
        request.future.add_done_callback(lambda answer: pieces.end(_failure(answer)))
        self._worker.submit(request)
        try:
            async for piece in pieces.read():
                yield piece
        finally:
            request.future.cancel()

    async def merge(self, folder: str, into: str, dtype: MergedType = "base") -> Saved:
        """See `Engine`."""

        def merge() -> Saved | HalteresError:
            model = Path(self._info.folder)
            return attempt("merge", lambda: merge_into(Path(into), model, Path(folder), self._base, dtype))

        merged = await asyncio.to_thread(merge)
        if isinstance(merged, HalteresError):
            raise merged
        return merged

    async def drop(self, name: str) -> None:
        """See `Engine`."""

        def forget() -> None:
            self._adapters.pop(name, None)
            self._snapshots.pop(name, None)
            self._budgets.pop(name, None)

        await self._call("drop", (name,), forget)

    def gradient(self, adapter: str) -> dict[str, Tensor]:
        """What the adapter's next step would apply, by PEFT's names; while no call of it is under way."""
        return self._adapter(adapter).gradient

    async def close(self) -> None:
        """See `Engine`."""
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self._files.close)

    def _request(
        self, snapshot: str | None, prompt: bytes, num_samples: int, params: SamplingParams, wanted: Wanted
    ) -> SampleRequest:
        limit = check_sampling(prompt, num_samples, params, self._info, wanted)
        stops = self._base.eos_tokens if params.stop_tokens is None else params.stop_tokens
        return SampleRequest(
            snapshot=self._snapshot(snapshot),
            prompt=prompt,
            tokens=tokens_of(prompt).astype(np.int64),
            num_samples=num_samples,
            params=params,
            limit=limit,
            stop_tokens=frozenset(stops),
            decode=self._decode,
            future=Future(),
            wanted=wanted,
        )

    async def _saved(
        self,
        name: str,
        subject: str,
        place: Path,
        copied: Callable[[], Checkpoint],
        write: Callable[[Checkpoint], Saved],
    ) -> Saved:
        """Copied in its turn, written while others have theirs; also if the caller goes away meanwhile."""

        def queue() -> Future[Saved | HalteresError]:
            checkpoint = copied()
            return self._files.write(place, lambda: attempt(name, lambda: write(checkpoint)))

        writing = await self._call(name, (subject, _folder(place)), queue)
        saved = await asyncio.shield(asyncio.wrap_future(writing))
        if isinstance(saved, HalteresError):
            raise saved
        return saved

    async def _loaded(
        self, name: str, subject: str, place: Path, read: Callable[[], Checkpoint], take: Callable[[Checkpoint], Any]
    ) -> Any:
        """Read by another thread once earlier calls of the subject and of the folder are done; then taken."""

        def begin() -> Slices:
            if (writing := self._files.pending(place)) is not None:
                yield writing
            reading = self._files.read(lambda: attempt(name, read))
            yield reading
            found = reading.result()
            if isinstance(found, HalteresError):
                raise found
            return take(found)

        return await self._in_slices(name, (subject, _folder(place)), begin)

    async def _call(self, name: str, subjects: tuple[str, ...], work: Callable[[], Any]) -> Any:
        """A short call: one slice."""

        def begin() -> Slices:
            return work()
            yield

        return await self._in_slices(name, subjects, begin)

    async def _in_slices(
        self, name: str, subjects: tuple[str, ...], begin: Callable[[], Slices], *, batches: bool = False
    ) -> Any:
        call = Call(name, subjects, begin, Future(), batches)
        self._worker.submit(call)
        return await asyncio.wrap_future(call.future)

    def _adapter(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise NotFound(f"The engine holds no adapter '{name}'.", next="Create it, or load it from a checkpoint.")
        return self._adapters[name]

    def _snapshot(self, name: str | None) -> Snapshot:
        if name is None:
            return BASE
        if name not in self._snapshots:
            raise NotFound(f"The engine holds no snapshot '{name}'.", next="Take one, or load it from a checkpoint.")
        return self._snapshots[name]

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = load_tokenizer(self._info.folder)
        return tokenizer.decode(tokens, skip_special_tokens=False)


def _folder(place: Path) -> str:
    """A folder as the subject of calls; no adapter or snapshot has such a name."""
    return f"folder {place.absolute()}"


def _failure(answer: Future[SampleResult]) -> HalteresError | None:
    """Why a stream ended early; whoever cancelled it reads no more."""
    failure = None if answer.cancelled() else answer.exception()
    return failure if isinstance(failure, HalteresError) else None


def _info(base: BaseModel, folder: Path, name: str, threads: int, limits: Limits) -> ModelInfo:
    return ModelInfo(
        name=name,
        folder=str(folder.absolute()),
        architecture=base.architecture,
        vocab_size=base.vocabulary,
        max_context_length=base.context,
        num_parameters=base.num_parameters,
        dtype=str(base.dtype).removeprefix("torch."),
        device=base.device.type,
        threads=threads,
        exact=isinstance(base, FusedModel) and base.device.type == "cpu",
        max_rank=MAX_RANK,
        targets=TARGETS_OF_ADAPTERS,
        incarnation=uuid.uuid4().hex,
        places=min(limits.decode_rows, limits.cache_bytes // (PLACE * base.cache_bytes_per_token)),
    )
