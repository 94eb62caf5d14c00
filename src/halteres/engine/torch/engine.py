"""`Engine` on torch: asynchronous outside, one thread inside.

Nothing is computed on the event loop, and no adapter is changed outside the order of calls. The
disk holds up nobody: what is saved is copied in its turn and written by another thread, what is
loaded is read by another and taken in its turn.
"""

# ruff: noqa: D102 - `Engine` says what each call does

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from halteres.engine import checks
from halteres.engine.grammar_trials import Grammars
from halteres.engine.protocol import (
    Adam,
    BaseType,
    Datum,
    ExtraLogprobs,
    Grammar,
    GrammarKind,
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
    Weights,
)
from halteres.engine.shapes import MAX_RANK, TARGETS_OF_ADAPTERS
from halteres.engine.stream_buffer import PieceQueue
from halteres.engine.torch.adapter import BASE, Adapter, Checkpoint, Layout, Snapshot
from halteres.engine.torch.limits import PLACE, Limits, PassBudget, attempt, free_for_cache
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.logit_shaping import Follower
from halteres.engine.torch.merge import merge_into
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.passes import run_pass
from halteres.engine.torch.peft_checkpoint import (
    Files,
    read_checkpoint,
    shared,
    write_checkpoint,
    write_snapshot,
)
from halteres.engine.torch.ranks import Ranks
from halteres.engine.torch.rows import SampleRequest
from halteres.engine.torch.same_bits import is_exact
from halteres.engine.torch.worker import Call, Scheduler, Slices, Worker
from halteres.errors import HalteresError, UserError
from halteres.tokenizer import load_tokenizer

T = TypeVar("T")


class TorchEngine:
    """One base model in memory."""

    def __init__(
        self,
        folder: Path,
        name: str,  # that it is known by
        threads: int = 1,
        limits: Limits | None = None,  # None: the usual ones
        device: str = "cpu",  # or "cuda": `device.usable_device` says which
        cache_gb: float | None = None,  # of keys and values, in 10^9 bytes; None: by what is free
        # of base weights, their matmuls, cached keys and values; all else is fp32
        dtype: BaseType = "float32",
        base: BaseModel | None = None,  # of that folder, device and type, where it is there already
        ranks: Ranks | None = None,  # that train as one; this process is one of them
    ) -> None:
        """Read a model folder, which takes seconds.

        With `ranks`, all of them make the same calls of `EVERYWHERE`, one after the other.

        Raises:
            NotFound: no model there.
            InvalidConfig: a model that is not understood.
        """
        torch.set_num_threads(threads)
        with suppress(RuntimeError):  # it can be set once per process only
            torch.set_num_interop_threads(1)
        shard = ranks is not None and ranks.shard
        self._base = base or load_base(
            folder, getattr(torch, dtype), torch.device(device), shard=shard
        )
        cache_bytes = int(cache_gb * 1e9) if cache_gb else free_for_cache(self._base.device)
        self._limits, self._ranks = limits or Limits.of(self._base, cache_bytes), ranks
        if ranks is not None:
            # the plan of a pass is the same on all, however much memory each of them has
            pass_tokens = ranks.least(self._limits.pass_tokens)
            self._limits = replace(self._limits, pass_tokens=pass_tokens)
        if shard:
            # what does not fit keeps no activations either
            self._limits = replace(self._limits, kept_tokens=0)
        self._info = ModelInfo(
            name=name,
            folder=str(folder.absolute()),
            architecture=self._base.architecture,
            vocab_size=self._base.vocabulary,
            max_context_length=self._base.context,
            num_parameters=self._base.num_parameters,
            dtype=dtype,
            device=self._base.device.type,
            threads=threads,
            # with sharded weights nothing is computed in company
            exact=self._base.device.type == "cpu" if shard else is_exact(self._base),
            samples=not shard,
            ranks=ranks.size if ranks else 1,
            max_rank=MAX_RANK,
            targets=TARGETS_OF_ADAPTERS,
            penalties=True,
            grammars=self._grammar_kinds(folder),
            incarnation=uuid.uuid4().hex,
            places=min(
                self._limits.decode_rows,
                self._limits.cache_bytes // (PLACE * self._base.cache_bytes_per_token),
            ),
        )
        self._adapters: dict[str, Adapter] = {}
        # one for each: what one finds out moves no bit of another
        self._budgets: dict[str, PassBudget] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._worker = Worker(Scheduler(self._base, self._limits), threads, self._limits)
        self._files = Files()
        self._grammars = Grammars(folder.absolute(), self._base.vocabulary, self._base.eos_tokens)

    def _grammar_kinds(self, folder: Path) -> tuple[GrammarKind, ...]:
        """None where the model has no tokenizer, no token ends its answers, or the library is not
        there: machines that get a few wheels beside their torch go without.
        """
        has_tokenizer = (folder / "tokenizer.json").is_file()
        if not (self._base.eos_tokens and has_tokenizer and find_spec("llguidance")):
            return ()
        return get_args(GrammarKind)

    async def info(self) -> ModelInfo:
        return self._info

    async def create_adapter(self, adapter: str, config: LoraConfig) -> None:
        def create() -> None:
            checks.check_new(self._adapters, adapter)
            layout = Layout.of(self._base, config)
            self._adapters[adapter] = Adapter(layout, layout.initial(self._base.device))

        await self._call("create_adapter", (adapter,), create)

    async def forward_backward(
        self, adapter: str, data: tuple[Datum, ...], loss: LossSpec, forward_only: bool = False
    ) -> PassResult:
        def begin() -> Slices:
            found = self._adapter(adapter)
            budget = self._budgets.setdefault(adapter, PassBudget.of(self._limits))
            return run_pass(
                self._base,
                self._info,
                found,
                data,
                loss,
                budget,
                forward_only=forward_only,
                ranks=self._ranks,
            )

        return await self._in_slices("forward_backward", (adapter,), begin, batches=True)

    async def optim_step(self, adapter: str, adam: Adam) -> StepResult:
        return await self._call("optim_step", (adapter,), lambda: self._adapter(adapter).step(adam))

    async def save(self, adapter: str, folder: str, optimizer: bool) -> Saved:
        return await self._save(
            "save", adapter, Path(folder), lambda: self._adapter(adapter).checkpoint(optimizer)
        )

    async def load(self, adapter: str, folder: str, optimizer: bool) -> StepResult:
        def take(found: Checkpoint) -> StepResult:
            self._adapters[adapter] = Adapter(found.layout, found.flat, found.version, found.adam)
            return StepResult(version=found.version, metrics={})

        place, ranks = Path(folder), self._ranks
        read = partial(read_checkpoint, place, self._base, optimizer=optimizer)
        return await self._load("load", adapter, place, read, take, ranks)

    async def snapshot(self, adapter: str, snapshot: str) -> Weights:
        def copy() -> Weights:
            self._snapshots[snapshot] = self._adapter(adapter).snapshot()
            return Weights(name=snapshot, version=self._snapshots[snapshot].version)

        return await self._call("snapshot", (adapter, snapshot), copy)

    async def save_snapshot(self, snapshot: str, folder: str, dtype: BaseType = "float32") -> Saved:
        return await self._save(
            "save_snapshot",
            snapshot,
            Path(folder),
            lambda: self._snapshot(snapshot).checkpoint(),
            partial(write_snapshot, dtype=dtype),
        )

    async def hold(self, name: str, source: Weights) -> int:
        def take(found: Snapshot) -> int:
            self._snapshots[name] = found
            return found.version

        if source.folder is None:
            return await self._call(
                "hold", (name, source.name), lambda: take(self._snapshot(source.name))
            )
        place = Path(source.folder)

        def read() -> Checkpoint:
            checks.check_weights(source, place)
            return read_checkpoint(place, self._base, optimizer=False)

        return await self._load(
            "hold",
            name,
            place,
            read,
            lambda found: take(Snapshot.of(found.layout, found.flat, found.version)),
        )

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> SampleResult:
        request = await self._request(snapshot, prompt, num_samples, params, extra)
        self._worker.submit(request)
        return await asyncio.wrap_future(request.future)

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        checks.check_streamed(extra)
        request = await self._request(snapshot, prompt, num_samples, params, extra)
        request.pieces = pieces = PieceQueue()
        self._worker.submit(request)
        try:
            async for piece in pieces.read():
                yield piece
        finally:
            request.future.cancel()

    async def merge(self, folder: str, into: str, dtype: MergedType = "base") -> Saved:
        model = Path(self._info.folder)

        def merge() -> Saved | HalteresError:
            return attempt(
                "merge", lambda: merge_into(Path(into), model, Path(folder), self._base, dtype)
            )

        return _raised(await asyncio.to_thread(merge))

    async def drop(self, name: str) -> None:
        def forget() -> None:
            self._adapters.pop(name, None)
            self._snapshots.pop(name, None)
            self._budgets.pop(name, None)

        await self._call("drop", (name,), forget)

    def gradient(self, adapter: str) -> dict[str, Tensor]:
        """What the adapter's next step would apply, by PEFT's names; while no call of it is under
        way.
        """
        return self._adapter(adapter).gradient

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self._files.close)
        await asyncio.to_thread(self._grammars.close)

    async def _request(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs,
    ) -> SampleRequest:
        if not self._info.samples:
            raise UserError(
                "An engine with a sharded base model does not sample.",
                next="Give the service a sampler: --samplers.",
            )
        limit = checks.check_sampling(prompt, num_samples, params, self._info, extra)
        ends, stops = self._base.eos_tokens, params.stop_tokens
        if stops is None:
            stops = ends
        new_follower = None
        if params.grammar is not None:
            stops = (*stops, *ends)
            new_follower = await self._new_follower(params.grammar)
        return SampleRequest(
            snapshot=self._snapshot(snapshot),
            prompt=prompt,
            tokens=checks.tokens_of(prompt).astype(np.int64),
            num_samples=num_samples,
            params=params,
            limit=limit,
            stop_tokens=frozenset(stops),
            decode=lambda tokens: load_tokenizer(self._info.folder).decode(
                tokens, skip_special_tokens=False
            ),
            future=Future(),
            extra=extra,
            new_follower=new_follower,
        )

    async def _new_follower(self, grammar: Grammar) -> Callable[[], Follower]:
        matcher = await self._grammars.find(grammar)
        vocabulary = self._grammars.vocabulary
        return lambda: Follower(matcher.deep_copy(), vocabulary, grammar.field)

    async def _save(
        self,
        name: str,
        subject: str,
        place: Path,
        copied: Callable[[], Checkpoint],
        write: Callable[[Path, str, Checkpoint], Saved] = write_checkpoint,
    ) -> Saved:
        """Copied in its turn, written while others have theirs; also if the caller goes away
        meanwhile.
        """

        def queue() -> Future[Saved | HalteresError]:
            checkpoint = copied()
            return self._files.write(
                place,
                lambda: attempt(name, lambda: write(place, self._info.name, checkpoint)),
            )

        writing = await self._call(name, (subject, _folder(place)), queue)
        return _raised(await asyncio.shield(asyncio.wrap_future(writing)))

    async def _load(
        self,
        name: str,
        subject: str,
        place: Path,
        read: Callable[[], Checkpoint],
        take: Callable[[Checkpoint], Any],
        ranks: Ranks | None = None,
    ) -> Any:
        """Read by another thread once earlier calls of the subject and of the folder are done; then
        taken, by all of these ranks what the first of them has read.
        """

        def begin() -> Slices:
            if (writing := self._files.pending(place)) is not None:
                yield writing
            found: Checkpoint | HalteresError | None = None
            if ranks is None or ranks.rank == 0:
                reading = self._files.read(lambda: attempt(name, read))
                yield reading
                found = reading.result()
            if ranks is not None:
                found = shared(ranks, _raised(ranks.agreed(found)), self._base)
            assert found is not None  # noqa: S101 - rank 0 has read it, the others have been given it
            return take(_raised(found))

        return await self._in_slices(name, (subject, _folder(place)), begin)

    async def _call(self, name: str, subjects: tuple[str, ...], work: Callable[[], Any]) -> Any:
        def begin() -> Slices:
            return work()
            yield

        return await self._in_slices(name, subjects, begin)

    async def _in_slices(
        self,
        name: str,
        subjects: tuple[str, ...],
        begin: Callable[[], Slices],
        *,
        batches: bool = False,
    ) -> Any:
        call = Call(name, subjects, begin, Future(), batches)
        self._worker.submit(call)
        return await asyncio.wrap_future(call.future)

    def _adapter(self, name: str) -> Adapter:
        return checks.find_adapter(self._adapters, name)

    def _snapshot(self, name: str | None) -> Snapshot:
        return BASE if name is None else checks.find_snapshot(self._snapshots, name)


def _folder(place: Path) -> str:
    """A folder as the subject of calls; no adapter or snapshot has such a name."""
    return f"folder {place.absolute()}"


def _raised(outcome: T | HalteresError) -> T:
    """What `attempt` gave, or the error that it caught."""
    if isinstance(outcome, HalteresError):
        raise outcome
    return outcome
