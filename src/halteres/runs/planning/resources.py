"""What this machine has (processors, memory, the GPU that the engine will use), and how much memory
a run needs of it: a formula, measured against the engine.

Bytes of the place where the model lies (P parameters, L layers, D width, F width of the MLP, E
outputs of the query, key and value projection, H*W of all heads, V vocabulary, r rank of the
adapter):

    weights       4 P                          in bfloat16 2 P; all else is counted as if it were
                                               fp32, as most of it is
    loading       + 4 L (D E + 2 D F)          while it reads: fused copies of projections beside
                                               their originals; or 2
    activations   4 L T (4 D + 2 E + H W + 4 F + 7 r) * 1.5    T = 2,048 tokens of one micro-batch;
                                                               in bfloat16 on a GPU at least one
                                               layer's and 4 L T D of the longest sequence, whose
                                               layers are computed once more, or what 2,048 tokens
                                               keep, and up to 2^28 logits; where more is free, the
                                               engine takes it for larger micro-batches
    logits        + 4 * 2.5 * min(T V, 2^24)   of a micro-batch; or, alone, 4 * 4 * min(rows V,
                                               2^24) of a decode step
    cache         8 L K W * rows * positions   keys and values (in bfloat16 half of it), positions
                                               rounded up to a power of 2; for the policy and an
                                               evaluation beside it; at most inference.cache_gb,
                                               without it 1 GiB (where more is free, the engine may
                                               take up to a quarter of that), unless one row alone
                                               needs more
    adapter       4 A * 7 + 4 B * 3            A numbers: weights, two gradients, two moments, two
                                               snapshots; B numbers: each weight's B once more, as a
                                               block-diagonal matrix
    processes     the engine without a model, and the six small processes of a run

Each engine of `inference.samplers` has weights and a process of its own, and the cache instead of
the one that trains. A vLLM among them has four processes (2.9 GB with the built-in model,
measured with the CPU build) and, on a CPU, inference.cache_gb, else 1 GB; on a GPU its share of all
memory is added to what is needed. One at an address is not counted.

The peak is the greater of loading and of everything after it. On a GPU `processes` leaves out the
small ones, which need none of its memory. Peak resident memory of the engine on a CPU against this
formula, in GB: a run of the built-in model 1.5 / 1.4, 42 M parameters 2.1 / 2.5, 0.6 B 11.4 / 13.3.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from halteres.config import environ
from halteres.config.sampler_list import samplers_of
from halteres.config.settings import Settings
from halteres.engine.limits import (
    CACHE_BYTES,
    DECODE_ROWS,
    GPU_HEAD_ELEMENTS,
    HEAD_ELEMENTS,
    PASS_TOKENS,
    kept_bytes,
)
from halteres.errors import InvalidConfig
from halteres.models.shape import FAMILIES, ModelShape, adapter_numbers, diagonal_numbers
from halteres.process import Memory, load_average, main_memory, usable_cores

NVIDIA_SMI = "nvidia-smi"
ANSWERS_WITHIN_S = 5.0
MIB = 1 << 20

CPU_INFO = Path("/proc/cpuinfo")

BFLOAT16, TILES = "avx512_bf16", "amx_bf16"
"""Flags of a processor. Where there are tiles the engine leaves them alone, for they have no
equal bits (`engine/torch/cpu_kernels`), and float32 is faster than what is left.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The accelerator that the engine will use."""

    name: str
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is."""

    cores: int
    memory: Memory
    gpu: Gpu | None
    unused_gpu: Gpu | None = None  # there, and left alone by the engine
    load: float = 0.0  # processes that want a core, on the average of the last minute

    @property
    def model_memory(self) -> Memory:
        """Where the base model lies: the GPU's memory, else the machine's."""
        if self.gpu:
            return self.gpu.memory
        return self.memory

    @property
    def busy(self) -> str:
        """A sentence where twice as many processes as cores want one; else nothing."""
        if self.load < 2 * self.cores:
            return ""
        return (
            f"the machine is busy: {self.load:.3g} processes want its {self.cores} cores (load "
            "average of the last minute), and a run's engine may get much less than one"
        )

    @property
    def mark(self) -> str:
        """Tells this machine from others, for figures that were measured on one."""
        return (
            f"{platform.node()}/{platform.machine()}/{self.cores} "
            f"cores/{self.gpu.name if self.gpu else 'no GPU'}"
        )

    def check_device(self, device: str | None = None) -> None:
        """InvalidConfig where the settings' device, or else HALTERES_DEVICE, is a GPU that is not
        here.
        """
        if (device or environ.device()) == "cuda" and self.gpu is None:
            raise InvalidConfig(
                "The engine is to compute on a GPU, and there is none that it can use.",
                "nvidia-smi names none, or the installed torch is a build for the CPU.",
                "Set inference.device (or HALTERES_DEVICE) to cpu or auto, or install a torch "
                "build for your GPU.",
                field="inference.device",
            )


def this_machine(device: str | None = None) -> Machine:
    """This machine, now; `device` is that of the settings, by default HALTERES_DEVICE."""
    there = _usable_gpu()
    used, unused = there, None
    if (device or environ.device()) == "cpu":
        used, unused = None, there
    return Machine(
        cores=usable_cores(),
        memory=main_memory(),
        gpu=used,
        unused_gpu=unused,
        load=load_average(),
    )


def multiplies_bfloat16() -> bool:
    """Whether the engine is faster with it on this processor; false where the system does not
    tell.
    """
    try:
        described = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = described.split()
    return BFLOAT16 in flags and TILES not in flags


def gb(count: int | None) -> float | None:
    """Bytes as GB (10^9), for people."""
    if count is None:
        return None
    return round(count / 1e9, 2)


def _usable_gpu() -> Gpu | None:
    """The first GPU, if the installed torch can use it."""
    program = shutil.which(NVIDIA_SMI)
    try:
        torch_is_for_cpu = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        torch_is_for_cpu = True
    if program is None or torch_is_for_cpu:
        return None
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query,
            capture_output=True,
            text=True,
            timeout=ANSWERS_WITHIN_S,
            check=True,
            encoding="utf-8",
        )
        name, total, free = answer.stdout.splitlines()[0].rsplit(",", 2)
        return Gpu(name=name.strip(), memory=Memory(total=int(total) * MIB, free=int(free) * MIB))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # a driver that does not answer is no GPU to count on


# groups under way at once where neither field says: atroposlib's default, and ours
WORKERS_PER_NODE = 8
ANSWER_TOKENS = 512  # tokens of an answer where the environment sets no limit of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run's demands."""

    rank: int
    group_size: int
    batch_size: int  # sequences of one optimiser step
    rows: int  # sequences that may be decoded at once
    positions: int  # tokens of the longest sequence, prompt and answer
    answer_tokens: int  # the most that one answer may have
    steps: int
    eval_every: int = 0  # 0: only first and last
    eval_sequences: int = 0  # answers of one evaluation
    cache_gb: float | None = None  # for keys and values; None: by what is free
    # of one number of the base model; None: 2 on a GPU, 4 on a CPU
    weight_bytes: int | None = 4
    ranks: int = 1  # processes that train as one
    samplers: int = 0  # engines in addition to the one that trains
    vllms: int = 0  # vLLMs of ours in addition to those
    vllm_memory: float = 0.0  # share of a GPU's memory that each takes

    def evaluations(self, done: int = 0) -> int:
        """Evaluations between the first and the last one, after step `done`."""
        every = self.eval_every
        if every:
            return max(0, (self.steps - 1) // every - done // every)
        return 0

    def type_bytes(self, *, on_gpu: bool) -> int:
        """Bytes of one number of the base model, where the engine computes there."""
        if self.weight_bytes is not None:
            return self.weight_bytes
        if on_gpu:
            return 2
        return 4


def workload_of(settings: Settings) -> Workload:
    """The demands of a run with these settings."""

    # 0, -1 and null mean "no limit": the default is counted with, as for what is no number
    def number(name: str, default: int) -> int:
        value = settings.env.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        return default

    samplers = samplers_of(settings.inference.samplers)
    longest = number("max_token_length", settings.trainer.max_token_trainer_length)
    group = number("group_size", 1)
    return Workload(
        rank=settings.trainer.lora_rank,
        group_size=group,
        batch_size=number("batch_size", group),
        rows=group
        * number("max_num_workers", number("max_num_workers_per_node", WORKERS_PER_NODE)),
        positions=longest,
        answer_tokens=min(number("max_new_tokens", ANSWER_TOKENS), longest),
        steps=settings.trainer.total_steps,
        eval_every=settings.trainer.eval_every,
        eval_sequences=number("eval_tasks", 0) * (number("eval_samples", 0) + 1),  # and one greedy
        cache_gb=settings.inference.cache_gb,
        weight_bytes=WEIGHT_BYTES[settings.inference.dtype],
        ranks=settings.inference.trainer_ranks,
        samplers=sum(one.kind == "own" for one in samplers),
        vllms=sum(one.kind == "vllm" for one in samplers),
        vllm_memory=settings.inference.vllm_memory,
    )


WEIGHT_BYTES = {"auto": None, "float32": 4, "bfloat16": 2}

NUMBER = 4  # bytes of what is computed with weights

CACHES = 2  # the policy's rows, and an evaluation's at the same time

# between what a pass must hold and what it takes: gradients on their way, holes of the allocator
UNFREED = 1.5

ENGINE_BYTES, OTHERS_BYTES = 450_000_000, 350_000_000
"""The engine's process without a model; service, trajectory server, trainer, environment,
evaluation, supervisor.
"""

VLLM_BYTES = 2_900_000_000
"""The processes of a vLLM, without its model and cache."""

# of one token of a batch, in the processes that hold it: trajectory server, trainer, environment
HELD_BYTES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes, part by part."""

    weights: int
    loading: int  # in addition to the weights, while they are read
    working: int  # in addition to the weights, at the peak of a step
    processes: int

    @property
    def total(self) -> int:
        """At the peak."""
        return self.weights + max(self.loading, self.working) + self.processes


def need(shape: ModelShape, work: Workload, *, on_gpu: bool = False) -> Need:
    """What a run of this model needs where the model lies."""
    weight_bytes = work.type_bytes(on_gpu=on_gpu)
    per_token = layer_numbers(shape, work.rank)
    on_large_passes = on_gpu and weight_bytes == 2 and shape.family in FAMILIES
    pass_tokens, most_logits = PASS_TOKENS, HEAD_ELEMENTS
    # numbers, until the backward
    activations = int(pass_tokens * shape.layers * per_token * UNFREED)
    if on_large_passes:
        pass_tokens, most_logits = max(PASS_TOKENS, work.positions), GPU_HEAD_ELEMENTS
        again = int(pass_tokens * (shape.layers * shape.width + per_token) * UNFREED)
        activations = max(again, PASS_TOKENS * gpu_token_bytes(shape) // NUMBER)

    def logits(rows: int) -> int:  # that exist at once
        return min(rows * shape.vocabulary, most_logits)

    training = activations + 5 * logits(pass_tokens) // 2
    # one or the other: the engine has one thread
    busiest = max(training, 4 * logits(min(work.rows, DECODE_ROWS)))
    adapter = 7 * adapter_numbers(shape, work.rank) + 3 * diagonal_numbers(shape, work.rank)
    engines, caches, copies = 1 + work.samplers, max(1, work.samplers), 1 + work.samplers
    others = OTHERS_BYTES + batch_bytes(work)
    if not on_gpu:
        # on GPUs each rank has one of its own
        engines += work.ranks - 1
        copies += work.vllms + work.ranks - 1
        busiest, adapter = busiest * work.ranks, adapter * work.ranks
        others += work.vllms * (VLLM_BYTES + int((work.cache_gb or 1.0) * 1e9))
    return Need(
        weights=copies * weight_bytes * shape.parameters,
        loading=weight_bytes * shape.layers * shape.width * (shape.qkv + 2 * shape.feed),
        working=NUMBER * (busiest + adapter) + caches * cache_bytes(shape, work, on_gpu=on_gpu),
        processes=engines * ENGINE_BYTES + (0 if on_gpu else others),
    )


def sampling_bytes(shape: ModelShape, work: Workload, *, on_gpu: bool = False) -> int:
    """What an engine that only samples this model needs at least: its cache takes what is free."""
    alone = need(shape, replace(work, ranks=1, samplers=0, vllms=0), on_gpu=on_gpu)
    return alone.weights + alone.loading + ENGINE_BYTES


def layer_numbers(shape: ModelShape, rank: int) -> int:
    """What a layer keeps of a token until the backward, with an adapter of this rank."""
    return (
        4 * shape.width + 2 * shape.qkv + shape.heads * shape.head_width + 4 * shape.feed + 7 * rank
    )


def gpu_token_bytes(shape: ModelShape) -> int:
    """What a token keeps on a GPU until the backward, as the engine reckons it."""
    return kept_bytes(
        layers=shape.layers,
        width=shape.width,
        qkv=shape.qkv,
        heads=shape.heads * shape.head_width,
        feed=shape.feed,
    )


def batch_bytes(work: Workload) -> int:
    """What a batch of the longest sequences takes outside the engine."""
    return HELD_BYTES * work.batch_size * work.positions


def cache_bytes(shape: ModelShape, work: Workload, *, on_gpu: bool = False) -> int:
    """What keys and values may grow to, which have the type of the weights."""
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_width
    per_position = numbers * work.type_bytes(on_gpu=on_gpu)
    positions = 1 << max(min(work.positions, shape.context) - 1, 0).bit_length()  # a power of 2
    most = CACHE_BYTES
    if work.cache_gb:
        most = int(work.cache_gb * 1e9)
    row = positions * per_position
    return max(row, min(CACHES * min(work.rows, DECODE_ROWS) * row, most))
