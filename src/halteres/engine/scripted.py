"""An engine without weights, for tests of everything around an engine: ours and our users'.

Owns: the whole `Engine` protocol, answered from a fixed bigram model; the hooks by which a test holds, fails or slows
a call.
Never: needs torch or reads weights; a model folder's config and tokenizer are all it looks at.
Promise: logprobs are a pure function of (tokens, policy version); samples of (policy version, prompt, seed, index).

    held = engine.hold("forward_backward")     # calls stop inside from now on
    await held.inside()                        # one is there
    held.release()                             # they go on; later ones do not stop
    engine.fail_next("optim_step", ServerError("The device is lost."))
    engine.latency_s["sample"] = 0.05
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from halteres.engine.bigram import Bigram, choose, draws
from halteres.engine.checks import array, check_pass, check_sampling, tokens_of
from halteres.engine.protocol import (
    Adam,
    Datum,
    LoraConfig,
    ModelInfo,
    PassResult,
    SampleResult,
    SamplingParams,
    Saved,
    Sequence,
    StepResult,
)
from halteres.engine.scripted_weights import Weights
from halteres.errors import Conflict, HalteresError, InvalidData, NotFound, NotReady, UserError
from halteres.text import load_tokenizer


class Hold:
    """Calls of one operation stop inside until `release`."""

    def __init__(self) -> None:
        self._arrived = asyncio.Semaphore(0)
        self._released = asyncio.Event()

    async def inside(self, count: int = 1) -> None:
        """Wait until `count` calls more are inside."""
        for _ in range(count):
            await self._arrived.acquire()

    def release(self) -> None:
        """Let those inside and all later ones pass."""
        self._released.set()

    async def stop(self) -> None:
        """The call's side: say that it is inside, then wait."""
        self._arrived.release()
        await self._released.wait()


@dataclass(slots=True, kw_only=True)
class Adapter:
    """A mutable adapter: weights, and datums whose gradient awaits a step."""

    weights: Weights
    accumulated: int = 0


class ScriptedEngine:
    """A deterministic `Engine` over one model folder (config.json and tokenizer)."""

    def __init__(self, folder: Path, name: str, threads: int = 1) -> None:
        config = _config(folder)
        self._info = ModelInfo(
            name=name,
            folder=str(folder.absolute()),
            architecture="scripted",
            vocab_size=config["vocab_size"],
            max_context_length=config["max_position_embeddings"],
            num_parameters=0,
            dtype="float32",
            device="cpu",
            threads=threads,
        )
        self._hidden_size: int = config["hidden_size"]
        self._tokenizer = load_tokenizer(str(folder))
        self._adapters: dict[str, Adapter] = {}
        self._snapshots: dict[str, Weights] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closed = asyncio.Event()
        self._holds: dict[str, Hold] = {}
        self._failures: defaultdict[str, deque[HalteresError]] = defaultdict(deque)
        self.latency_s: dict[str, float] = {}
        self.calls: Counter[str] = Counter()

    # Hooks

    def hold(self, operation: str) -> Hold:
        """From now on calls of this operation stop inside."""
        self._holds[operation] = Hold()
        return self._holds[operation]

    def fail_next(self, operation: str, error: HalteresError, times: int = 1) -> None:
        """The next `times` calls of this operation raise `error` and change nothing."""
        self._failures[operation].extend([error] * times)

    # Protocol

    async def info(self) -> ModelInfo:
        """See `Engine`."""
        async with self._inside("info"):
            return self._info

    async def create_adapter(self, adapter: str, config: LoraConfig) -> None:
        """See `Engine`."""
        async with self._inside("create_adapter", adapter):
            if adapter in self._adapters:
                raise Conflict(f"The adapter '{adapter}' exists.", next="Drop it first or choose another name.")
            if config.rank < 1:
                raise InvalidData(f"The rank {config.rank} is out of range.", "It must be at least 1.")
            self._adapters[adapter] = Adapter(weights=Weights(lora=config, version=0))

    async def forward_backward(
        self, adapter: str, data: tuple[Datum, ...], loss: str, forward_only: bool = False
    ) -> PassResult:
        """See `Engine`."""
        async with self._inside("forward_backward", adapter):
            found = self._adapter(adapter)
            check_pass(data, loss, self._info)
            bigram = self._bigram(found.weights.version)
            logprobs = [
                bigram.logprobs_of(tokens_of(datum.tokens), array(datum.inputs["target_tokens"])) for datum in data
            ]
            total = sum(LOSSES[loss](datum, row) for datum, row in zip(data, logprobs, strict=True))
            if not forward_only:
                found.accumulated += len(data)
            metrics = {"loss:sum": float(total)}
            return PassResult(logprobs=tuple(row.tobytes() for row in logprobs), metrics=metrics)

    async def optim_step(self, adapter: str, adam: Adam) -> StepResult:
        """See `Engine`."""
        async with self._inside("optim_step", adapter):
            found = self._adapter(adapter)
            if found.accumulated == 0:
                raise UserError(
                    "There is no gradient to step on.",
                    "No forward_backward succeeded since the last step.",
                    "Send forward_backward first.",
                )
            metrics = {"grad_norm:mean": float(found.accumulated)}
            found.weights = replace(found.weights, version=found.weights.version + 1)
            found.accumulated = 0
            return StepResult(version=found.weights.version, metrics=metrics)

    async def save(self, adapter: str, folder: str, optimizer: bool) -> Saved:
        """See `Engine`."""
        async with self._inside("save", adapter):
            return self._adapter(adapter).weights.write(Path(folder), optimizer, self._info.name, self._hidden_size)

    async def load(self, adapter: str, folder: str, optimizer: bool) -> StepResult:
        """See `Engine`."""
        async with self._inside("load", adapter):
            weights = Weights.read(Path(folder), optimizer)
            self._adapters[adapter] = Adapter(weights=weights)
            return StepResult(version=weights.version, metrics={})

    async def snapshot(self, adapter: str, snapshot: str) -> int:
        """See `Engine`."""
        async with self._inside("snapshot", adapter):
            self._snapshots[snapshot] = self._adapter(adapter).weights
            return self._snapshots[snapshot].version

    async def load_snapshot(self, snapshot: str, folder: str) -> int:
        """See `Engine`."""
        async with self._inside("load_snapshot"):
            self._snapshots[snapshot] = Weights.read(Path(folder), optimizer=False)
            return self._snapshots[snapshot].version

    async def save_snapshot(self, snapshot: str, folder: str) -> Saved:
        """See `Engine`."""
        async with self._inside("save_snapshot"):
            return self._snapshot(snapshot).write(Path(folder), False, self._info.name, self._hidden_size)

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        prompt_logprobs: bool = False,
    ) -> SampleResult:
        """See `Engine`."""
        async with self._inside("sample"):
            version = 0 if snapshot is None else self._snapshot(snapshot).version
            limit = check_sampling(prompt, num_samples, params, self._info)
            bigram = self._bigram(version)
            return SampleResult(
                sequences=self._sequences(bigram, prompt, num_samples, params, limit),
                version=version,
                prompt_logprobs=_prompt_logprobs(bigram, tokens_of(prompt)) if prompt_logprobs else None,
            )

    async def drop(self, name: str) -> None:
        """See `Engine`."""
        async with self._inside("drop", name):
            self._adapters.pop(name, None)
            self._snapshots.pop(name, None)

    async def close(self) -> None:
        """See `Engine`."""
        self._closed.set()
        for hold in self._holds.values():
            hold.release()

    # Inside

    @asynccontextmanager
    async def _inside(self, operation: str, adapter: str | None = None) -> AsyncIterator[None]:
        """One call: in its adapter's turn, through the hooks."""
        turn = asyncio.Lock() if adapter is None else self._turns.setdefault(adapter, asyncio.Lock())
        async with turn:  # first come, first served
            self._refuse_if_closed()
            self.calls[operation] += 1
            if hold := self._holds.get(operation):
                await hold.stop()
            if delay := self.latency_s.get(operation):
                await asyncio.sleep(delay)
            self._refuse_if_closed()
            if self._failures[operation]:
                raise self._failures[operation].popleft()
            yield

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise NotReady("The engine is closed.", next="Start another.")

    def _adapter(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise NotFound(f"The engine holds no adapter '{name}'.", next="Create it, or load it from a checkpoint.")
        return self._adapters[name]

    def _snapshot(self, name: str) -> Weights:
        if name not in self._snapshots:
            raise NotFound(f"The engine holds no snapshot '{name}'.", next="Take one, or load it from a checkpoint.")
        return self._snapshots[name]

    def _bigram(self, version: int) -> Bigram:
        return Bigram(vocab_size=self._info.vocab_size, end_token=self._tokenizer.eos_token_id, version=version)

    def _sequences(
        self, bigram: Bigram, prompt: bytes, num_samples: int, params: SamplingParams, limit: int
    ) -> tuple[Sequence, ...]:
        stop_tokens = self._tokenizer.eos_token_ids if params.stop_tokens is None else params.stop_tokens
        tokens: list[list[int]] = [[] for _ in range(num_samples)]
        logprobs: list[list[float]] = [[] for _ in range(num_samples)]
        stopped: set[int] = set()
        before_S = np.full(num_samples, tokens_of(prompt)[-1])
        for position in range(limit):
            rows_SV = bigram.logprobs(before_S)
            before_S = choose(rows_SV, params, draws(params.seed, prompt, num_samples, position))
            for index in set(range(num_samples)) - stopped:
                tokens[index].append(int(before_S[index]))
                logprobs[index].append(float(rows_SV[index, before_S[index]]))
                if self._stops(tokens[index], stop_tokens, params.stop_strings):
                    stopped.add(index)
            if len(stopped) == num_samples:
                break
        return tuple(
            Sequence(
                tokens=np.asarray(tokens[index], np.int32).tobytes(),
                logprobs=np.asarray(logprobs[index], np.float32).tobytes(),
                stop_reason="stop" if index in stopped else "length",
            )
            for index in range(num_samples)
        )

    def _stops(self, tokens: list[int], stop_tokens: tuple[int, ...], stop_strings: tuple[str, ...]) -> bool:
        if tokens[-1] in stop_tokens:
            return True
        text = self._tokenizer.decode(tokens, skip_special_tokens=False) if stop_strings else ""
        return any(stop in text for stop in stop_strings)


def _cross_entropy(datum: Datum, logprobs: np.ndarray) -> float:
    return float(-(array(datum.inputs["weights"]).astype(np.float64) * logprobs).sum())


def _importance_sampling(datum: Datum, logprobs: np.ndarray) -> float:
    ratios = np.exp(logprobs.astype(np.float64) - array(datum.inputs["logprobs"]))
    return float(-(ratios * array(datum.inputs["advantages"])).sum())


LOSSES = {"cross_entropy": _cross_entropy, "importance_sampling": _importance_sampling}


def _prompt_logprobs(bigram: Bigram, prompt: np.ndarray) -> bytes:
    known = bigram.logprobs_of(prompt[:-1], prompt[1:]) if len(prompt) > 1 else np.empty(0, np.float32)
    return np.concatenate([[np.float32(np.nan)], known]).astype(np.float32).tobytes()


def _config(folder: Path) -> dict[str, int]:
    file = folder / "config.json"
    if not file.is_file():
        raise NotFound(
            f"The folder {folder} holds no model.",
            "config.json is missing.",
            "Name a model folder in Hugging Face format, or 'halteres/tiny'.",
        )
    return json.loads(file.read_text())
