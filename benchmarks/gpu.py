"""What one GPU does: does it agree with the CPU, and how fast are training, decoding, publishing.

No GPU has run this yet. The command for a machine with a GPU, Python 3.12, torch 2.11 or newer and
transformers 5.17, without network. `make wheelhouse ONLY=msgspec FOR_PYTHON=3.12` fetches first,
where there is one, what it lacks; the folder `wheelhouse` travels with the repository. One line:

    python3 -m pip install -q --no-index --find-links wheelhouse --target wheelhouse/site
    -r wheelhouse/requirements.txt ; PYTHONPATH=src:wheelhouse/site python3 benchmarks/gpu.py

It ends within 7 minutes, and writes benchmarks/results/gpu.json, or what `--output` names. On a CPU
every part runs in one to three minutes:

    .venv/bin/python benchmarks/gpu.py --device cpu --shapes tiny --output /tmp/gpu.json

Each part has 40 s on a GPU, and is written to the file as soon as it is there: figures, or why
there are none. Parts run in processes of their own, one for each group and shape; one that dies or
hangs is replaced by another, which goes on with the next part. Models have random weights in
bfloat16, made on the device.

(a) `machine`: packages, the GPU, its free memory, what its attention's parameters are called.
(b) `kernels`: what a GPU's kernels compute of random numbers, against fp32 on the CPU. `check`:
    what an engine compares at its start, in both types.
(c) of each shape, LoRA r32 on attention and MLP: `train N`: forward_backward and optim_step,
    sequences of N tokens; the share of the GPU's peak by 6 operations per parameter and token, as
    such figures are published (LoRA needs 4, and 2 more where layers are computed again). `decode
    R`: tokens/s of R rows, prompts not among them: the time of all tokens less that of the first;
    `prefill_tokens_per_s` is of the latter. `publish`: from the call of `snapshot` until the first
    token of the new version; and until its folder is written. `agreement`: half the mean squared
    difference of sampled and trained log-probabilities. `adapters`: 1 and 16 of rank 16 decode
    together.

Wall clock, one warm-up, medians of `--rounds`; sizes are in `SIZES`. A part's memory is what
torch's allocator had at its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

STARTS_WITHIN_S = 60.0  # imports of a process on a cold disk
ALL_S = 410.0

PROMPT = 256  # tokens, all different

SIZES = {
    "cuda": {"tokens": 16_384, "new": 128, "rounds": 2, "part_s": 40},
    "cpu": {"tokens": 2048, "new": 16, "rounds": 1, "part_s": 120},
}
"""Of a training step; tokens that a row decodes; measured rounds; seconds that a part
has. On a CPU the subject is whether
every part runs.
"""

GROUPS = {
    "machine": ("machine",),
    "kernels": ("kernels",),
    "check": ("check float32", "check bfloat16"),
}
OF_A_SHAPE = (
    "load",
    "train 2048",
    "decode 64",
    "decode 64 with an adapter",
    "train 8192",
    "decode 256",
    "decode 256 with an adapter",
    "publish",
    "agreement",
    "adapters 1",
    "adapters 16",
)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "heads": (4, 2),
        "head_dim": 32,
        "vocab_size": 4096,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "heads": (16, 8),
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "heads": (32, 8),
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "heads": (32, 8),
        "tied": False,
    },
}
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bfloat16, by the part of the GPU's name; of another GPU no share is told."""

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6B", "8B"])
    parser.add_argument("--tokens", type=int, help="of one training step, one sequence at least")
    parser.add_argument("--new", type=int, help="tokens that a row decodes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--part-s", type=float, help="seconds of one part")
    parser.add_argument("--all-s", type=float, default=ALL_S, help="seconds of everything")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "gpu.json"
    )
    parser.add_argument("--group", help=argparse.SUPPRESS)  # of a process with parts
    parser.add_argument("--parts", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, size in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.group:
        sys.exit(asyncio.run(run_parts(options)))
    watch(options)


# The process that watches: it imports neither torch nor the engine, and outlives both.


def watch(options: argparse.Namespace) -> None:
    """Run every part, and write the file after each."""
    started = time.monotonic()
    found: Figures = {"command": sys.argv[1:], "date": time.strftime("%Y-%m-%d %H:%M:%S")}
    rest = {**GROUPS, **dict.fromkeys(options.shapes, OF_A_SHAPE)}

    def record(group: str, part: str, figures: Figures) -> None:
        before = found.setdefault(group, {}).get(part, {})
        # A model that is loaded once more keeps its first figures.
        if not before or "failed" in before:
            found[group][part] = figures
        found["seconds"] = round(time.monotonic() - started, 1)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"{found['seconds']:6.1f} s  {group}: {part}: {json.dumps(figures)}", flush=True)

    for group, parts in rest.items():
        waiting = list(parts)
        while waiting:
            left_s = options.all_s - (time.monotonic() - started)
            if left_s < options.part_s / 4:
                for part in waiting:
                    record(group, part, {"left_out": f"{options.all_s:.0f} s were over."})
                break
            waiting = watch_process(options, group, waiting, left_s, record)
    print("->", options.output)


def watch_process(
    options: argparse.Namespace,
    group: str,
    parts: Sequence[str],
    left_s: float,
    record: Callable[[str, str, Figures], None],
) -> list[str]:
    """Run parts in a process until all are there or it fails; the parts that are left."""
    argv = [sys.executable, __file__, "--group", group, "--parts", *parts]
    for name in ("device", *SIZES["cpu"]):
        argv += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    ends = time.monotonic() + left_s
    waiting = list(parts)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=read_lines, args=(process, lines), daemon=True).start()
        why, within_s = "", STARTS_WITHIN_S
        try:
            while waiting:
                line = lines.get(timeout=max(0.1, min(within_s, ends - time.monotonic())))
                if line is None:
                    why = f"exit code {process.wait(timeout=10)}"
                    break
                said = json.loads(line)
                within_s = options.part_s
                if "figures" in said:
                    record(group, waiting.pop(0), said["figures"])
        except queue.Empty:
            why = f"not there within {within_s:.0f} s"
        finally:
            process.kill()
            process.wait(timeout=30)
        if not why:
            return []
        errors.seek(0)
        last = errors.read().strip().splitlines()[-3:]
    record(group, waiting.pop(0), {"failed": why, "log": last})
    # Without its model, or without a GPU, nothing after it would do better.
    if waiting and parts[0] == "load" and len(waiting) == len(parts) - 1:
        for part in waiting:
            record(group, part, {"left_out": "There is no model."})
        return []
    if waiting and parts[0] == "load":
        waiting.insert(0, "load")
    return waiting


def read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Pass the lines of a process on, then None."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)


# The processes with parts.


async def run_parts(options: argparse.Namespace) -> int:
    """Compute parts, and print each as a line of JSON."""
    from halteres.config import environ

    environ.stay_offline()
    if options.device == "cuda":
        environ.set_gpu_allocator()
    say({"ready": options.group})
    scene = Scene(options)
    for part in options.parts:
        started = time.perf_counter()
        try:
            figures = await scene.figures(part)
        except Exception as error:  # noqa: BLE001 - the next part may do better
            figures = {"failed": f"{type(error).__name__}: {error}"}
            if part == "load":
                sys.stderr.write(figures["failed"] + "\n")
                return 1
        figures["took_s"] = round(time.perf_counter() - started, 1)
        say({"figures": figures | memory(options.device)})
    # Threads of a broken part, and what CUDA has to tidy up, hold nobody up.
    os._exit(0)


def say(line: Figures) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def memory(device: str) -> Figures:
    """Since the last call."""
    import torch

    if device != "cuda" or not torch.cuda.is_initialized():
        return {}
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return {"peak_gb": round(peak[0] / 1e9, 2), "reserved_gb": round(peak[1] / 1e9, 2)}


@dataclass
class Scene:
    """What the parts of a process have in common."""

    options: argparse.Namespace
    engine: Any = None
    parameters: int = 0
    round: int = 0  # numbers prompts, none of which comes twice

    async def figures(self, part: str) -> Figures:
        name, _, rest = part.partition(" ")
        if name == "machine":
            return machine_figures(self.options.device)
        if name == "kernels":
            return kernel_figures(self.options.device)
        if name == "check":
            return await check_figures(self.options.device, rest)
        if name == "load":
            return await self.load()
        if name == "train":
            return await self.train(int(rest))
        if name == "decode":
            return await self.decode(int(rest.split()[0]), ["published"] if " " in rest else [None])
        if name == "publish":
            return await self.publish()
        if name == "agreement":
            return {"half_mean_square": await self.agreement()}
        return await self.adapters(int(rest))

    async def load(self) -> Figures:
        """A model of random weights on the device, an engine around it, and an adapter."""
        import torch

        from halteres.engine.protocol import LoraConfig
        from halteres.engine.torch import TorchEngine

        base = await asyncio.to_thread(
            random_model, self.options.device, **SHAPES[self.options.group]
        )
        folder = Path(tempfile.gettempdir())  # no tokenizer is asked for
        self.engine = TorchEngine(
            folder, "model", 1, device=self.options.device, dtype="bfloat16", base=base
        )
        if self.options.device == "cpu":
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        info = await self.engine.info()
        self.parameters = info.num_parameters
        await self.engine.create_adapter("a", LoraConfig(rank=32, seed=1, train_unembed=False))
        await self.engine.snapshot("a", "published")
        limits = self.engine._limits
        return {
            "parameters": info.num_parameters,
            "places": info.places,
            "pass_tokens": limits.pass_tokens,
            "kept_tokens": limits.kept_tokens,
            "cache_gb": round(limits.cache_bytes / 1e9, 2),
            "mixture_gb": round(limits.mixture_bytes / 1e9, 2),
        }

    async def train(self, length: int) -> Figures:
        import numpy as np
        from synthetic import datum

        from halteres.engine.protocol import Adam, LossSpec

        random = np.random.default_rng(length)
        count = max(1, self.options.tokens // length)
        data = tuple(
            datum(random.integers(3, 4000, length + 1).astype(np.int32)) for _ in range(count)
        )

        async def step() -> None:
            await self.engine.forward_backward("a", data, LossSpec(name="cross_entropy"))
            await self.engine.optim_step("a", Adam(learning_rate=1e-5))

        rate = count * length / await self.timed(step)
        figures: Figures = {"sequences": count, "tokens_per_s": round(rate)}
        peak = peak_tflops(self.options.device)
        if peak is not None:
            figures["share_of_peak"] = round(6 * self.parameters * rate / peak / 1e12, 3)
        return figures

    async def decode(self, rows: int, snapshots: Sequence[str | None]) -> Figures:
        """Rows take the snapshots in turn."""
        seconds: dict[int, list[float]] = {1: [], 1 + self.options.new: []}
        for _ in range(self.options.rounds + 1):
            for tokens, found in seconds.items():
                started = time.perf_counter()
                await self.sample(rows, tokens, snapshots)
                found.append(time.perf_counter() - started)
        prefill_s, all_s = (median(found[1:]) for found in seconds.values())
        step_s = (all_s - prefill_s) / self.options.new
        return {
            "tokens_per_s": round(rows / step_s),
            "step_ms": round(1000 * step_s, 2),
            "prefill_tokens_per_s": round(rows * PROMPT / prefill_s),
        }

    async def sample(self, rows: int, tokens: int, snapshots: Sequence[str | None]) -> None:
        import numpy as np

        from halteres.engine.protocol import SamplingParams

        self.round += 1
        random = np.random.default_rng(self.round)
        params = SamplingParams(max_tokens=tokens, stop_tokens=())
        prompts = random.integers(3, 4000, (rows, PROMPT)).astype(np.int32)
        await asyncio.gather(
            *(
                self.engine.sample(snapshots[i % len(snapshots)], prompt.tobytes(), 1, params)
                for i, prompt in enumerate(prompts)
            )
        )

    async def publish(self) -> Figures:
        seconds: list[float] = []
        for _ in range(self.options.rounds + 1):
            started = time.perf_counter()
            await self.engine.snapshot("a", "published")
            await self.sample(1, 1, ["published"])
            seconds.append(time.perf_counter() - started)
        with tempfile.TemporaryDirectory(prefix="halteres-gpu-") as scratch:
            started = time.perf_counter()
            await self.engine.save_snapshot("published", str(Path(scratch) / "adapter"))
            saved_s = time.perf_counter() - started
            size = sum(file.stat().st_size for file in Path(scratch).rglob("*") if file.is_file())
        return {
            "first_token_ms": round(1000 * median(seconds[1:]), 1),
            "folder_ms": round(1000 * saved_s, 1),
            "folder_mb": round(size / 1e6, 1),
        }

    async def agreement(self) -> float:
        """Of 16 samples of one prompt."""
        import numpy as np
        from synthetic import datum

        from halteres.engine.protocol import LossSpec, SamplingParams

        await self.engine.snapshot("a", "published")
        prompt = np.random.default_rng(1).integers(3, 4000, PROMPT).astype(np.int32)
        result = await self.engine.sample(
            "published",
            prompt.tobytes(),
            16,
            SamplingParams(max_tokens=self.options.new, stop_tokens=()),
        )
        data = tuple(
            datum(np.concatenate([prompt, np.frombuffer(one.tokens, np.int32)]).astype(np.int32))
            for one in result.sequences
        )
        passed = await self.engine.forward_backward(
            "a", data, LossSpec(name="cross_entropy"), forward_only=True
        )
        differences = [
            np.frombuffer(trained.data, np.float32)[-self.options.new :]
            - np.frombuffer(one.logprobs, np.float32)
            for trained, one in zip(passed.logprobs, result.sequences, strict=True)
        ]
        return float(0.5 * np.mean(np.square(np.concatenate(differences))))

    async def adapters(self, count: int) -> Figures:
        """64 rows of as many adapters."""
        from halteres.engine.protocol import LoraConfig

        names = [f"s{i}" for i in range(count)]
        for i, name in enumerate(names):
            await self.engine.create_adapter(name, LoraConfig(rank=16, seed=i, train_unembed=False))
            await self.engine.snapshot(name, f"{name} sampled")
            await self.engine.drop(name)
        figures = await self.decode(64, [f"{name} sampled" for name in names])
        for name in names:
            await self.engine.drop(f"{name} sampled")
        return figures

    async def timed(self, work: Callable[[], Awaitable[object]]) -> float:
        """The median of some rounds after one that warms up, in seconds."""
        seconds: list[float] = []
        for _ in range(self.options.rounds + 1):
            started = time.perf_counter()
            await work()
            seconds.append(time.perf_counter() - started)
        return median(seconds[1:])


def random_model(device: str, *, heads: tuple[int, int], tied: bool = True, **sizes: Any) -> Any:
    """A model of this shape with random weights in bfloat16, on the device from the start."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from halteres.engine.torch.model import extract

    defaults = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128}
    config = Qwen3Config(
        **defaults | sizes,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return extract(model.requires_grad_(False), ())


def peak_tflops(device: str) -> float | None:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def machine_figures(device: str) -> Figures:
    """Part (a)."""
    from inspect import signature

    import torch
    from machine import machine
    from torch.nn.attention import varlen

    figures = machine()
    figures["packages"] = {}
    for name in ("torch", "transformers", "triton", "numpy", "msgspec", "safetensors", "vllm"):
        try:
            figures["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            figures["packages"][name] = None
    figures["varlen_attn"] = str(signature(varlen.varlen_attn))
    figures["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    figures["PYTORCH_ALLOC_CONF"] = os.environ.get("PYTORCH_ALLOC_CONF")
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures["gpu"] = torch.cuda.get_device_name()
        figures["capability"] = list(torch.cuda.get_device_capability())
        figures["cuda"] = torch.version.cuda
        figures["free_gb"], figures["total_gb"] = round(free / 1e9, 2), round(total / 1e9, 2)
    return figures


def kernel_figures(device: str) -> Figures:
    """The greatest difference, relative to the norm, of each kernel from plain matmuls in fp32; or
    why it does not run. Gradients are of queries, keys and values.
    """
    import torch

    from halteres.engine.torch import attention, flash
    from halteres.engine.torch.projections import unrounded

    torch.manual_seed(0)
    figures: Figures = {}

    def attended(width: int, counts: list[int], starts: list[int]) -> Figures:
        keys = [count + start for count, start in zip(counts, starts, strict=True)]
        shapes = [(sum(counts), 8, width), (sum(keys), 2, width), (sum(keys), 2, width)]
        # Values that bfloat16 holds: both sides read the same.
        parts = [torch.randn(shape).bfloat16().float().requires_grad_() for shape in shapes]
        narrow = [part.detach().to(device, torch.bfloat16).requires_grad_() for part in parts]
        out = flash.attend(*narrow, flash.Lengths(counts, keys, torch.device(device)))
        right = plain_attention(*parts, counts, keys)
        weights = torch.randn(right.shape).bfloat16().float()
        found = torch.autograd.grad(out, narrow, weights.to(out))
        expected = torch.autograd.grad(right, parts, weights)
        names = ("attended", "of queries", "of keys", "of values")
        pairs = zip((out, *found), (right, *expected), strict=True)
        return {name: apart(*pair) for name, pair in zip(names, pairs, strict=True)}

    def products() -> Figures:
        one, other = torch.randn(6, 4, 64).bfloat16(), torch.randn(6, 64, 96).bfloat16()
        weight = torch.randn(32, 64).bfloat16()
        wide = attention.wide_bmm(one.to(device), other.to(device))
        head = unrounded(one[0].to(device), weight.to(device))
        return {
            "bmm": apart(wide, one.float() @ other.float()),
            "mm": apart(head, one[0].float() @ weight.float().t()),
        }

    work: dict[str, Callable[[], Figures]] = {
        "causal, width 128": lambda: attended(128, [33, 200, 1], [0, 0, 0]),
        "causal, width 32": lambda: attended(32, [33, 200, 1], [0, 0, 0]),
        "behind a prefix": lambda: attended(128, [33, 200, 1], [64, 0, 500]),
        "products in fp32": products,
    }
    for name, compute in work.items():
        try:
            figures[name] = compute()
        except Exception as error:  # noqa: BLE001 - each kernel by itself
            figures[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    if device == "cpu":
        figures["remark"] = "These kernels are a GPU's alone: on a CPU they fail."
    return figures


def plain_attention(q: Any, k: Any, v: Any, counts: Sequence[int], keys: Sequence[int]) -> Any:
    """What `flash.attend` should compute, sequence by sequence."""
    import torch

    group = q.shape[1] // k.shape[1]
    found: list[Any] = []
    parts = zip(q.split(list(counts)), k.split(list(keys)), v.split(list(keys)), strict=True)
    for own, own_keys, own_values in parts:
        seen = torch.ones(len(own), len(own_keys), dtype=torch.bool)
        seen = seen.tril(len(own_keys) - len(own))
        scores = torch.einsum("ihw,lhw->hil", own, own_keys.repeat_interleave(group, 1))
        p = (scores / own.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        found.append(torch.einsum("hil,lhw->ihw", p, own_values.repeat_interleave(group, 1)))
    return torch.cat(found)


def apart(found: Any, right: Any) -> float:
    return float((found.detach().cpu().float() - right).norm() / right.norm())


async def check_figures(device: str, dtype: str) -> Figures:
    """Part (b): of the built-in model."""
    import msgspec

    from halteres.engine.torch.device import difference

    found = await difference(device, "bfloat16" if dtype == "bfloat16" else "float32")
    return {**msgspec.to_builtins(found), "problem": found.problem}


if __name__ == "__main__":
    main()
