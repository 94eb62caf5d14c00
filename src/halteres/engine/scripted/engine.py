"""An engine without weights, for tests of everything around an engine: ours and our users'.

It answers the whole `Engine` protocol from a fixed bigram model; its weights are a version and a
shape, in real PEFT folders. It needs no torch: a model folder's config and tokenizer are all it
looks at. Log-probabilities are a pure function of (tokens, policy version); samples of (policy
version, prompt, seed, index).

A test holds, fails, slows and counts its calls:

    hold = engine.block("forward_backward")    # calls stop inside from now on; of "piece", streams
                                               before each piece
    await hold.inside()                        # one is there
    hold.release()                             # they go on; later ones do not stop
    engine.fail_next("optim_step", ServerError("The device is lost."))
    engine.latency_s["sample"] = 0.05
    engine.calls["sample"], engine.under_way["sample"]

With `exact=False` it is like an engine whose kernels depend on their company: the same request
draws other tokens each time, and log-probabilities of a pass differ in their last digits.
"""

# ruff: noqa: D102 - `Engine` says what each call does

from __future__ import annotations

import asyncio
import json
import math
import shutil
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from halteres.engine import checks, protocol
from halteres.engine.checks import TARGETS, array, check_pass, inputs_of, tokens_of
from halteres.engine.folders import digest, size_of, written
from halteres.engine.protocol import (
    BaseType,
    ExtraLogprobs,
    LoraConfig,
    ModelInfo,
    Piece,
    SamplingParams,
    Saved,
    StepResult,
)
from halteres.engine.scripted.sampling import Bigram, SamplingRequest
from halteres.engine.shapes import (
    CONFIG,
    MAX_RANK,
    OPTIMIZER,
    STATE,
    TARGETS_OF_ADAPTERS,
    WEIGHTS,
    check_files,
    check_shape,
    foreign_shape,
    read_state,
)
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotFound, UserError, boundary
from halteres.files import read_json
from halteres.losses import find_kind
from halteres.tokenizer import load_tokenizer

NOISE = 1e-4
"""Nats by which log-probabilities of an engine that is not exact differ from one pass to the
next.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the scripted engine knows of an adapter's or a snapshot's weights."""

    lora: LoraConfig
    version: int

    def write(self, folder: Path, optimizer: bool, base_model: str, hidden_size: int) -> Saved:
        """Write a PEFT folder with its state, whole or not at all: one adapted projection, A from
        the seed, B filled with the version.
        """
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "target_modules": ["q_proj"],
            "bias": "none",
            "inference_mode": True,
        }
        prefix, shape = (
            "base_model.model.model.layers.0.self_attn.q_proj",
            (self.lora.rank, hidden_size),
        )
        generator = np.random.default_rng((self.lora.seed or 0) % 2**64)
        tensors = {
            f"{prefix}.lora_A.weight": generator.standard_normal(shape, np.float32),
            f"{prefix}.lora_B.weight": np.full(shape[::-1], float(self.version), np.float32),
        }
        with written(folder) as place:
            (place / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            (place / STATE).write_bytes(msgspec.json.encode(self))
            save_file(tensors, place / WEIGHTS)
            if optimizer:
                save_file({"step": np.asarray([self.version])}, place / OPTIMIZER)
        return Saved(folder=str(folder), size_bytes=size_of(folder), version=self.version)

    @classmethod
    def read(cls, folder: Path, optimizer: bool) -> Weights:
        """Read a folder that `write` wrote or, without the optimiser, any plain PEFT adapter: that
        has version 0.

        Raises:
            NotFound: a file is missing; the message names it.
            InvalidData: a file cannot be read, or the adapter is none that an engine computes.
        """
        check_files(folder, optimizer)
        try:
            names = load_file(folder / WEIGHTS).keys()
        except SafetensorError as error:
            raise InvalidData(
                f"The checkpoint {folder} cannot be read.", f"{error}.", "Use another one."
            ) from error
        if (own := read_state(folder)) is not None:
            return cls(lora=own.lora, version=own.version)
        return cls(lora=foreign_shape(folder, names), version=0)


@dataclass(slots=True, kw_only=True)
class Adapter:
    """A mutable adapter: weights, and the number of datums whose gradient awaits a step."""

    weights: Weights
    accumulated: int = 0


class Hold:
    """Calls of one operation stop inside until `release`."""

    def __init__(self) -> None:
        self._inside = asyncio.Semaphore(0)
        self._released = asyncio.Event()

    async def inside(self, count: int = 1) -> None:
        """Wait until `count` calls more are inside."""
        for _ in range(count):
            await self._inside.acquire()

    def release(self) -> None:
        """Let those inside and all later ones pass."""
        self._released.set()

    async def stop(self) -> None:
        """The call's side: say that it is inside, then wait."""
        self._inside.release()
        await self._released.wait()


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a model's config.json."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int


class ScriptedEngine:
    """A deterministic `Engine` over one model folder (config.json and tokenizer)."""

    def __init__(self, folder: Path, name: str, threads: int = 1, *, exact: bool = True) -> None:
        if not (folder / "config.json").is_file():
            raise NotFound(
                f"The folder {folder} holds no model.",
                "config.json is missing.",
                "Name a model folder in Hugging Face format, or 'halteres/tiny'.",
            )
        with boundary(InvalidConfig, f"Reading the model in {folder}"):
            config = read_json(folder / "config.json", _Config)
        self._info = ModelInfo(
            name=name,
            folder=str(folder.absolute()),
            architecture="scripted",
            vocab_size=config.vocab_size,
            max_context_length=config.max_position_embeddings,
            num_parameters=0,
            dtype="float32",
            device="cpu",
            threads=threads,
            exact=exact,
            max_rank=MAX_RANK,
            targets=TARGETS_OF_ADAPTERS,
            penalties=True,
            incarnation=uuid.uuid4().hex,
        )
        self._hidden_size = config.hidden_size
        # Of an engine that is not exact.
        self._noise = np.random.default_rng()
        self._tokenizer = load_tokenizer(str(folder))
        self._adapters: dict[str, Adapter] = {}
        self._snapshots: dict[str, Weights] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closed = asyncio.Event()
        self._holds: dict[str, Hold] = {}
        self._failures: defaultdict[str, deque[HalteresError]] = defaultdict(deque)
        self.latency_s: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()  # calls that are inside now

    # What a test may do

    def block(self, operation: str) -> Hold:
        """From now on calls of this operation stop inside."""
        self._holds[operation] = Hold()
        return self._holds[operation]

    def fail_next(self, operation: str, error: HalteresError, times: int = 1) -> None:
        """The next `times` calls of this operation raise `error` and change nothing."""
        self._failures[operation].extend([error] * times)

    def release_all(self) -> None:
        """Let all calls that are held go on."""
        for hold in self._holds.values():
            hold.release()

    # The protocol

    async def info(self) -> ModelInfo:
        async with self._inside("info"):
            return self._info

    async def create_adapter(self, adapter: str, config: LoraConfig) -> None:
        async with self._inside("create_adapter", adapter):
            checks.check_new(self._adapters, adapter)
            check_shape(config)
            self._adapters[adapter] = Adapter(weights=Weights(lora=config, version=0))

    async def forward_backward(
        self,
        adapter: str,
        data: tuple[protocol.Datum, ...],
        loss: protocol.LossSpec,
        forward_only: bool = False,
    ) -> protocol.PassResult:
        async with self._inside("forward_backward", adapter):
            found = checks.find_adapter(self._adapters, adapter)
            settings = check_pass(data, loss, self._info)
            rows, total = list[np.ndarray](), 0.0
            for datum in data:
                targets = array(datum.inputs[TARGETS])
                before = np.repeat(tokens_of(datum.tokens), targets[0].size)
                bigram = self._bigram(found.weights.version)
                rows.append(
                    self._rounded(
                        bigram.logprobs_of(before, targets.reshape(-1)).reshape(targets.shape)
                    )
                )
                total += _loss(rows[-1], datum, loss, settings)
            if not math.isfinite(total):
                raise checks.loss_not_finite("", ratios="logprobs" in find_kind(loss.name).inputs)
            if not forward_only:
                found.accumulated += len(data)
            arrays = tuple(
                protocol.Array(dtype="float32", shape=row.shape, data=row.tobytes()) for row in rows
            )
            return protocol.PassResult(logprobs=arrays, metrics={"loss:sum": total})

    async def optim_step(self, adapter: str, adam: protocol.Adam) -> StepResult:
        async with self._inside("optim_step", adapter):
            found = checks.find_adapter(self._adapters, adapter)
            checks.check_adam(adam)
            if found.accumulated == 0:
                raise UserError(
                    "There is no gradient to step on.",
                    "No forward_backward succeeded since the last step.",
                    "Send forward_backward first.",
                )
            metrics = {"grad_norm:mean": float(found.accumulated)}
            found.weights, found.accumulated = (
                replace(found.weights, version=found.weights.version + 1),
                0,
            )
            return StepResult(version=found.weights.version, metrics=metrics)

    async def save(self, adapter: str, folder: str, optimizer: bool) -> Saved:
        async with self._inside("save", adapter):
            return checks.find_adapter(self._adapters, adapter).weights.write(
                Path(folder), optimizer, self._info.name, self._hidden_size
            )

    async def load(self, adapter: str, folder: str, optimizer: bool) -> StepResult:
        async with self._inside("load", adapter):
            self._adapters[adapter] = Adapter(weights=Weights.read(Path(folder), optimizer))
            return StepResult(version=self._adapters[adapter].weights.version, metrics={})

    async def snapshot(self, adapter: str, snapshot: str) -> protocol.Weights:
        async with self._inside("snapshot", adapter):
            self._snapshots[snapshot] = checks.find_adapter(self._adapters, adapter).weights
            return protocol.Weights(name=snapshot, version=self._snapshots[snapshot].version)

    async def save_snapshot(self, snapshot: str, folder: str, dtype: BaseType = "float32") -> Saved:
        async with self._inside("save_snapshot"):
            saved = checks.find_snapshot(self._snapshots, snapshot).write(
                Path(folder), False, self._info.name, self._hidden_size
            )
            return msgspec.structs.replace(saved, sha256=digest(Path(folder)))

    async def hold(self, name: str, source: protocol.Weights) -> int:
        async with self._inside("hold"):
            if source.folder is None:
                self._snapshots[name] = checks.find_snapshot(self._snapshots, source.name)
            else:
                checks.check_weights(source, Path(source.folder))
                self._snapshots[name] = Weights.read(Path(source.folder), optimizer=False)
            return self._snapshots[name].version

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> protocol.SampleResult:
        async with self._inside("sample"):
            return self._request(snapshot, prompt, num_samples, params, extra).result()

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        async with self._inside("stream"):
            checks.check_streamed(extra)
            for piece in self._request(snapshot, prompt, num_samples, params, extra).pieces():
                await self._pause("piece")
                await asyncio.sleep(0)  # others have their turn between two pieces
                self._refuse_if_closed()
                yield piece

    async def merge(self, folder: str, into: str, dtype: protocol.MergedType = "base") -> Saved:
        async with self._inside("merge"):
            version = Weights.read(Path(folder), optimizer=False).version
            with written(Path(into)) as place:  # the base model as it is: there is nothing to merge
                shutil.copytree(self._info.folder, place, dirs_exist_ok=True)
            return Saved(folder=into, size_bytes=size_of(Path(into)), version=version)

    async def drop(self, name: str) -> None:
        async with self._inside("drop", name):
            self._adapters.pop(name, None)
            self._snapshots.pop(name, None)

    async def close(self) -> None:
        self._closed.set()
        self.release_all()

    # Inside

    @asynccontextmanager
    async def _inside(self, operation: str, adapter: str | None = None) -> AsyncIterator[None]:
        """One call: in its adapter's turn, counted, held, slowed and failed as planned."""
        turn = (
            asyncio.Lock() if adapter is None else self._turns.setdefault(adapter, asyncio.Lock())
        )
        async with turn:  # first come, first served
            self._refuse_if_closed()
            self.calls[operation] += 1
            self.under_way[operation] += 1
            try:
                await self._pause(operation)
                self._refuse_if_closed()
                if self._failures[operation]:
                    raise self._failures[operation].popleft()
                yield
            finally:
                self.under_way[operation] -= 1

    async def _pause(self, operation: str) -> None:
        if hold := self._holds.get(operation):
            await hold.stop()
        if delay := self.latency_s.get(operation):
            await asyncio.sleep(delay)

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise protocol.EngineGone("The engine is closed.", next="Start another.")

    def _bigram(self, version: int) -> Bigram:
        return Bigram(
            vocab_size=self._info.vocab_size,
            end_token=self._tokenizer.eos_token_id,
            version=version,
        )

    def _rounded(self, logprobs: np.ndarray) -> np.ndarray:
        if self._info.exact:
            return logprobs
        return logprobs + self._noise.normal(scale=NOISE, size=logprobs.shape).astype(np.float32)

    def _request(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs,
    ) -> SamplingRequest:
        version = 0 if snapshot is None else checks.find_snapshot(self._snapshots, snapshot).version
        limit = checks.check_sampling(prompt, num_samples, params, self._info, extra)
        if not self._info.exact:
            params = msgspec.structs.replace(params, seed=int(self._noise.integers(2**62)))
        stop_tokens = (
            self._tokenizer.eos_token_ids if params.stop_tokens is None else params.stop_tokens
        )

        def stops(tokens: list[int]) -> bool:
            if tokens[-1] in stop_tokens:
                return True
            text = (
                self._tokenizer.decode(tokens, skip_special_tokens=False)
                if params.stop_strings
                else ""
            )
            return any(stop in text for stop in params.stop_strings)

        return SamplingRequest(
            bigram=self._bigram(version),
            prompt=prompt,
            num_samples=num_samples,
            params=params,
            extra=extra,
            limit=limit,
            stops=stops,
        )


def _loss(
    logprobs: np.ndarray,
    datum: protocol.Datum,
    loss: protocol.LossSpec,
    settings: Mapping[str, float],
) -> float:
    """A number for a loss, not its formula: `cross_entropy` and `importance_sampling` are exact,
    others like one of them.
    """
    inputs, lp = inputs_of(datum, loss, settings), logprobs.astype(np.float64)
    if find_kind(loss.name).importance_weighted:
        with np.errstate(over="ignore", invalid="ignore"):
            lp = np.where(inputs["advantages"] != 0, np.exp(lp - inputs["logprobs"]), 0.0)
    return -float((inputs["weights" if "weights" in inputs else "advantages"] * lp).sum())
