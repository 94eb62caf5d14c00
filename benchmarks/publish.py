"""What it costs to publish an adapter of an 8B model as a folder that another engine samples from.

    .venv/bin/python benchmarks/publish.py

The shape of Qwen3-8B (`gpu.SHAPES`), LoRA r32 on attention and MLP: 87 million numbers. The base
has shapes and no weights (torch's meta device), so 2 GB of memory are enough.

`fp32, read again`: by safetensors, then read for its digest, as before. `fp32` and `bf16`: the
engine's own `write_snapshot`, which hashes while it writes. `check`: what the machine that samples
does with the folder before it is loaded (digest, shapes, rank; numbers are read only of folders
that others wrote, told as `read through`), for the bf16 one.

Wall clock and CPU seconds, one thread, a folder of the machine's temporary directory (page cache,
not a disk's platter). Medians of `--rounds` after one that warms up, the ways in turns. Writes
benchmarks/results/publish.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gpu import SHAPES, random_model
from machine import machine

RESULTS = Path(__file__).parent / "results" / "publish.json"
RANK = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where it is written; default: temporary")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halteres-publish-", dir=options.folder) as scratch:
        figures = measured(options.shape, options.rounds, Path(scratch))
    found = {"machine": machine(), "shape": options.shape, "rank": RANK, **figures}
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2), "\n->", options.output)


def measured(shape: str, rounds: int, place: Path) -> dict[str, Any]:
    import torch

    from halteres.engine.folders import digest
    from halteres.engine.protocol import LoraConfig, Saved
    from halteres.engine.shapes import WEIGHTS
    from halteres.engine.torch.adapter import Checkpoint, Layout
    from halteres.engine.torch.peft_checkpoint import write_checkpoint, write_snapshot
    from halteres.engine.vllm.adapters import LARGEST, Projections, check_adapter

    torch.set_num_threads(1)
    base = random_model("meta", **SHAPES[shape])
    layout = Layout.of(base, LoraConfig(rank=RANK, seed=1, train_unembed=False))
    generator = torch.Generator().manual_seed(1)
    flat = torch.empty(layout.size).uniform_(-0.01, 0.01, generator=generator)
    checkpoint = Checkpoint(layout=layout, flat=flat, version=1, adam=None)
    projections = Projections(
        sizes={
            part.module: (part.stop - part.start, one.inputs)
            for one in layout.projections
            for part in one.parts
        },
        vocabulary=1,
        context=1,
        architecture="",
    )

    def read_again(folder: Path) -> Saved:
        saved = write_checkpoint(folder, shape, checkpoint)
        digest(folder)
        return saved

    ways: dict[str, Callable[[Path], Saved]] = {
        "fp32, read again": read_again,
        "fp32": lambda folder: write_snapshot(folder, shape, checkpoint),
        "bf16": lambda folder: write_snapshot(folder, shape, checkpoint, "bfloat16"),
    }
    timings: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, int] = {}

    def looked_at(folder: Path, largest: float | None) -> None:
        check_adapter(folder, projections, RANK, LARGEST["bfloat16"], largest)

    def timed(name: str, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        timings.setdefault(name, []).append(spent)

    for _ in range(rounds + 1):
        for name, write in ways.items():
            folder = place / "adapter"
            timed(name, lambda write=write, folder=folder: write(folder))
            sizes[name] = (folder / WEIGHTS).stat().st_size
            if name == "bf16":
                saved_digest = digest(folder)
                timed("check", lambda folder=folder: (digest(folder), looked_at(folder, 0.01)))
                timed("read through", lambda folder=folder: looked_at(folder, None))
                assert write(place / "second").sha256 == saved_digest
                shutil.rmtree(place / "second")
            shutil.rmtree(folder)

    def figures(name: str) -> dict[str, float]:
        wall, cpu = zip(*timings[name][1:], strict=True)
        found = {"wall_ms": round(1000 * median(wall)), "cpu_ms": round(1000 * median(cpu))}
        if name in sizes:
            found["megabytes"] = round(sizes[name] / 1e6, 1)
        return found

    return {
        "numbers": layout.size,
        "rounds": rounds,
        "ways": {name: figures(name) for name in timings},
    }


if __name__ == "__main__":
    main()
