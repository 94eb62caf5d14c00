"""What an engine is: the values and the calls between the training service and whatever holds the
weights.

Messages are msgspec structs, msgpack on the connection, tensors as raw little-endian bytes. What
trains (`Trains`) and what samples (`Samples`) may be one, as ours are (`Engine`); between two that
are not, weights go as a folder (`Weights`). An engine keeps nothing durable of its own: all of it
can be rebuilt from the service's journal and checkpoints.

An adapter is mutable and trained; a snapshot is an immutable copy of an adapter's weights, for
sampling. Every call but `sample` is executed in the order in which the service sends it for one
adapter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Protocol, get_args

import msgspec

from halteres.errors import NotReady, ServerError


class EngineGone(NotReady):
    """The engine has ended; another holds nothing of what this one held."""


class WeightsDamaged(ServerError):
    """A folder of weights that is not what was written: it is not taken, and may be written
    again.
    """

    code = "weights_damaged"


DType = Literal["float32", "int64", "int32"]

BaseType = Literal["float32", "bfloat16"]  # of the base weights and their matmuls in an engine
# how an engine is told: auto is bfloat16 on a GPU and float32 on a CPU
AskedType = Literal["auto", "float32", "bfloat16"]

MergedType = Literal["base", "float32"]
"""Of merged weights on disk: the base model's own type, to which they are rounded, or all that was
computed.
"""


class Array(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A dense array: raw little-endian bytes, row-major."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One training example: N input tokens; every loss input has N rows, or N rows of K values
    each.
    """

    tokens: bytes  # N int32
    # int64: target_tokens; float32: weights, or logprobs and advantages; of shape [N] or [N, K]
    inputs: dict[str, Array]
    # N int32: the sampled sequence of each target, from 1 on; 0 is none
    sequences: bytes | None = None


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which loss, with its settings; those that are absent have the defaults of
    `halteres.losses`.
    """

    name: str
    config: dict[str, float] = {}


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an adapter. `alpha` is the service's to choose: no client can send it."""

    rank: int
    alpha: float = 32.0
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class Adam(msgspec.Struct, frozen=True, kw_only=True):
    """One optimiser step; defaults are the Tinker API's. Decay is decoupled; a clip of 0 is off
    (global norm).
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


Target = Literal["attn", "mlp", "unembed"]  # what an adapter is on

LogprobKind = Literal["raw", "tempered"]
"""At temperature 1, or at the sampling temperature."""

Extra = Literal["prompt", "topk_prompt", "topk_sampled", "targets", "alternatives"]
"""Log-probabilities beside those of sampled tokens, by the fields of `ExtraLogprobs`."""

_EXTRA_NAMES: Mapping[Extra, str] = {
    "prompt": "prompt_logprobs",
    "topk_prompt": "topk_prompt_logprobs",
    "topk_sampled": "topk_sample_logprobs",
    "targets": "target_prompt_logprobs",
    "alternatives": "prompt_alt_tokens_k",
}
"""As the Tinker API calls them."""


GrammarKind = Literal["json_schema", "regex", "choice", "lark", "calls"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer has to be, from its first token to its last.

    `text` is, by kind:
        json_schema  the schema as JSON
        regex        a regular expression of the whole answer, in Rust's syntax without look-around
        choice       a list of texts as JSON: one of them
        lark         a grammar in llguidance's form of Lark, from `start` on
        calls        `Calls` as JSON
    """

    kind: GrammarKind
    text: str
    field: str = "grammar"  # what the request calls it, for errors


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, and the JSON schema of its arguments, an object."""

    name: str
    arguments: dict[str, Any]


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that calls tools, as `tool_calls` reads them, and says nothing besides."""

    tools: tuple[Called, ...]  # one of them
    several: bool = False  # or several calls, line by line
    otherwise: Any = msgspec.UNSET  # a JSON schema: the answer may also be a value of it


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. `stop_tokens` None means the model's end token; empty means nothing stops but
    the limit.

    The penalties change the logits, then a grammar leaves those tokens that its answer can go on
    with, then comes the temperature, then `min_p`, `top_k` and `top_p`. Reported log-probabilities
    are the model's own: none of these enters them. Where a grammar allows no other token, the
    model's end token follows, which ends the sequence whatever `stop_tokens` says.

    Source: vLLM 0.32 `v1/sample/sampler.py`, `model_executor/layers/utils.py`; OpenAI's API
    reference for presence and frequency penalties. Departure: vLLM's "processed" log-probabilities
    are of what all of these leave, and its "raw" ones of what a grammar leaves: a trainer computes
    neither.
    """

    max_tokens: int | None = None  # None: up to the context limit
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0  # tokens below this share of the likeliest's probability are left out
    # of tokens in prompt or answer: positive logits are divided by it, others multiplied
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # ... for each time that they are there
    seed: int = 0  # drawn by the service where the client sent none, and journalled
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    logprobs: LogprobKind = "raw"  # of sampled tokens
    grammar: Grammar | None = None

    @property
    def penalises(self) -> bool:
        """Whether tokens are less or more likely for being there already."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution, but for the temperature and
        for unlikely ones left out: no penalty and no grammar. What is not plain was drawn from
        another distribution than its log-probabilities are of.
        """
        return not self.penalises and self.grammar is None


class ExtraLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities that a sampling request asks for beside those of its tokens. P is the
    prompt's length.
    """

    prompt_logprobs: bool = False
    topk_prompt: int = 0  # K most likely tokens at each prompt position
    topk_sampled: int = 0  # K most likely tokens at each sampled position
    targets: Array | None = None  # int64 [P - 1, K]: row i scores position i + 1; -1 is skipped
    # K tokens drawn with replacement at each prompt position from 1 on, at the temperature
    alternatives: int = 0

    @property
    def kinds(self) -> tuple[Extra, ...]:
        """Which of them are asked for."""
        asked: dict[Extra, object] = {
            "prompt": self.prompt_logprobs,
            "topk_prompt": self.topk_prompt,
            "topk_sampled": self.topk_sampled,
            "targets": self.targets is not None,
            "alternatives": self.alternatives,
        }
        return tuple(kind for kind, value in asked.items() if value)

    @property
    def of_prompt(self) -> bool:
        """Some of these are of the prompt."""
        return (
            bool(self.prompt_logprobs or self.topk_prompt or self.alternatives)
            or self.targets is not None
        )


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The base model an engine has loaded."""

    name: str
    folder: str  # absolute; also holds the tokenizer
    architecture: str
    vocab_size: int
    max_context_length: int
    num_parameters: int
    dtype: str
    device: str
    threads: int
    # the same request has the same bits in every engine of this base model, whatever its company
    exact: bool = False
    places: int = 0  # sequences of 1,024 positions that can be decoded at once; 0: it has no cache
    trains: bool = True  # it is a `Trains`
    samples: bool = True  # it is a `Samples`
    ranks: int = 1  # processes that train as one
    max_rank: int = 0  # of an adapter; 0: it takes none
    targets: tuple[Target, ...] = ()  # what an adapter may be on
    logprobs: tuple[LogprobKind, ...] = ("raw", "tempered")  # of sampled tokens, that it can give
    extras: tuple[Extra, ...] = get_args(Extra)  # log-probabilities beside those
    most_likely: int | None = None  # of the likeliest tokens at a position; None: as checks allow
    penalties: bool = False  # it has them, and `min_p`
    grammars: tuple[GrammarKind, ...] = ()  # that its answers can be held to
    incarnation: str = ""  # of this start: what an earlier one held is gone

    def takes(self, lora: LoraConfig) -> bool:
        """Whether it can sample from an adapter of this shape."""
        return lora.rank <= self.max_rank and not (
            lora.train_unembed and "unembed" not in self.targets
        )

    def lacks(self, params: SamplingParams, extra: ExtraLogprobs) -> str:
        """What a sampling request asks for that it cannot give; "" where it can answer it."""
        # at temperature 1, and greedy, both kinds are the same
        if params.logprobs not in self.logprobs and params.temperature not in (0, 1):
            return f"The kind of log-probabilities '{params.logprobs}'"
        if not self.penalties and (params.penalises or params.min_p > 0):
            return "A penalty, or min_p,"
        grammar = params.grammar
        if grammar is not None and grammar.kind not in self.grammars:
            return f"An answer held to a grammar (`{grammar.field}`)"
        # they are of what is left of the vocabulary there
        if "raw" not in self.logprobs and (params.truncates or not params.is_plain):
            return (
                "A log-probability of the model's own beside top_p, top_k, min_p, a penalty or a "
                "grammar"
            )
        for kind in extra.kinds:
            if kind not in self.extras:
                return _EXTRA_NAMES[kind]
        most, likely = self.most_likely, max(extra.topk_prompt, extra.topk_sampled)
        if most is not None and likely > most:
            return f"More than {most} of the likeliest tokens ({likely})"
        return ""


class PassResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of a forward or forward-backward pass."""

    # per datum, float32, shaped as its target_tokens: their log-softmax at temperature 1
    logprobs: tuple[Array, ...]
    metrics: dict[str, float]  # keys `name:reduction`, with `loss:sum` always


UPDATE_METRIC = "update_norm:max"
"""Of an optimiser step: the norm of what the adapter adds to the base weights, relative to that of
those weights.
"""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of an optimiser step."""

    version: int  # optimiser steps taken so far, this one included
    metrics: dict[str, float]


class TopK(msgspec.Struct, frozen=True, kw_only=True):
    """The K most likely tokens at each of L positions, row-major; where nothing was computed id 0
    and -99999.
    """

    k: int
    length: int
    ids: bytes  # L x K int32
    logprobs: bytes  # L x K float32, natural log, full vocabulary


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence of T tokens."""

    tokens: bytes  # T int32, the stop token included where one was sampled
    # T float32: natural log, full vocabulary, `SamplingParams.logprobs` says at which temperature
    logprobs: bytes
    stop_reason: Literal["stop", "length"]
    top: TopK | None = None


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of a sampling request: `num_samples` sequences in order."""

    sequences: tuple[Sequence, ...]
    version: int  # policy version of the snapshot
    prompt_cache_hit_tokens: int = 0  # of the prompt, whose keys and values were there already
    prompt_logprobs: bytes | None = None  # prompt length float32; position 0 is NaN
    topk_prompt: TopK | None = None  # prompt length rows; row 0 is filler
    # float32, shaped as `ExtraLogprobs.targets`; 0 where skipped
    target_logprobs: Array | None = None
    alternatives: TopK | None = None  # P - 1 rows of drawn tokens


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The next tokens of one sequence that is being sampled; the last piece of a sequence says why
    it stopped.
    """

    sample: int  # number of the sequence
    tokens: bytes  # int32, at least one
    logprobs: bytes  # float32
    version: int
    top: TopK | None = None
    stop_reason: Literal["stop", "length"] | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that was written."""

    folder: str
    size_bytes: int
    version: int
    # of a snapshot's folder:
    sha256: str | None = None  # `folders.digest`
    largest: float | None = None  # magnitude of a number in it, times alpha / rank where above 1


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter was when it was published, on its way to whatever samples from it."""

    name: str  # of the snapshot
    version: int  # policy version
    folder: str | None = None  # PEFT, written whole; None: they are in the engine that took them
    sha256: str | None = None  # of the folder, by `folders.digest`; None: not known
    # of a number in the folder, as in `Saved`; None: not known, whoever needs it reads them all
    largest: float | None = None


class HoldsModel(Protocol):
    """What training and sampling have in common. Errors are HalteresError: UserError fails the
    request alone.
    """

    async def info(self) -> ModelInfo:
        """The base model; also the readiness probe."""
        ...

    async def drop(self, name: str) -> None:
        """Forget an adapter or a snapshot; unknown names are fine."""
        ...

    async def close(self) -> None:
        """End; running calls fail with NotReady."""
        ...


class Trains(HoldsModel, Protocol):
    """One base model, many adapters.

    `adapter` and `snapshot` are opaque names chosen by the service. Folders are written beside
    themselves and renamed: half a checkpoint never exists.
    """

    async def create_adapter(self, adapter: str, config: LoraConfig) -> None:
        """A new adapter with zero output (version 0) and a fresh optimiser. Same seed, same
        weights.
        """
        ...

    async def forward_backward(
        self, adapter: str, data: tuple[Datum, ...], loss: LossSpec, forward_only: bool = False
    ) -> PassResult:
        """Add the gradient of the summed loss to the adapter's; `forward_only` computes the same
        without gradient.
        """
        ...

    async def optim_step(self, adapter: str, adam: Adam) -> StepResult:
        """Apply and clear the accumulated gradient. UserError if nothing was accumulated."""
        ...

    async def save(self, adapter: str, folder: str, optimizer: bool) -> Saved:
        """Write a PEFT folder (adapter_config.json, adapter_model.safetensors); `optimizer` adds
        state and step.
        """
        ...

    async def load(self, adapter: str, folder: str, optimizer: bool) -> StepResult:
        """Make or replace `adapter` from a folder. Without `optimizer` it starts fresh; the version
        stays.
        """
        ...

    async def snapshot(self, adapter: str, snapshot: str) -> Weights:
        """Copy the adapter's weights as an immutable snapshot, here and in no folder."""
        ...

    async def save_snapshot(self, snapshot: str, folder: str, dtype: BaseType = "float32") -> Saved:
        """Write a snapshot as a PEFT folder; its digest is in the answer. In bfloat16 its numbers
        are rounded: that is for other engines, never for what training comes back to.
        """
        ...

    async def merge(self, folder: str, into: str, dtype: MergedType = "base") -> Saved:
        """Write the whole base model with the adapter in `folder` merged in, in Hugging Face
        format.
        """
        ...


class Samples(HoldsModel, Protocol):
    """One base model, many snapshots, which come to it as folders unless it took them itself.

    `snapshot=None` samples from the base model.
    """

    async def hold(self, name: str, source: Weights) -> int:
        """Be ready to sample from these weights under this name; returns their policy version.

        Raises:
            WeightsDamaged: the folder is not what its digest says; nothing of it is held.
        """
        ...

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> SampleResult:
        """Sample `num_samples` sequences after the prompt (int32 tokens), which is prefilled once.

        A caller that goes away frees the rows.
        """
        ...

    def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        """As `sample`, piece by piece: each sequence's tokens in order. Of `extra`, `topk_sampled`
        alone.
        """
        ...


class Engine(Trains, Samples, Protocol):
    """Both in one: a snapshot that it took can be sampled from at once, without a copy or a
    folder.
    """
