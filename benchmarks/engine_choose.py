"""What do top-k and top-p cost beside plain sampling?

    OMP_NUM_THREADS=1 python -m benchmarks.engine_choose [--out
    benchmarks/results/engine_choose.json]

`choose` alone, from logits to tokens and log-probabilities, on logits as peaked as a language
model's (normal, scaled by 5: the likeliest thousand tokens hold 97 to 99 %) and flatter ones
(scaled by 3: they hold about 70 %, so that more than the first candidates are looked at). CPU ms
per row of one thread, medians; plain and truncated alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import machine
from halteres.engine.torch.token_sampling import Shaping, choose

VOCABULARIES, ROWS, ROUNDS = (151_936, 49_152), (1, 8, 64), 11
WAYS = {
    "plain": (-1, 1.0),
    "top_k 50": (50, 1.0),
    "top_p 0.9": (-1, 0.9),
    "top_k 50, top_p 0.95": (50, 0.95),
}


def shaping(rows: int, top_k: int, top_p: float) -> Shaping:
    """Temperature 1 for all rows."""
    return Shaping(
        uniforms_N=np.random.default_rng(0).random(rows, dtype=np.float32),
        temperature_N=np.ones(rows, np.float32),
        top_k_N=np.full(rows, top_k),
        top_p_N=np.full(rows, top_p, np.float32),
        min_p_N=np.zeros(rows, np.float32),
        tempered_N=np.zeros(rows, np.bool_),
        num_top_N=np.zeros(rows, np.int64),
    )


def measured(vocabulary: int, rows: int, scale: float) -> dict[str, float]:
    """CPU ms per row of each way."""
    logits_NV = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * scale
    found: defaultdict[str, list[float]] = defaultdict(list)
    repeats = max(1, 8 // rows)  # one row alone is too quick for the clock
    for _ in range(ROUNDS + 1):
        for way, (top_k, top_p) in WAYS.items():
            shape = shaping(rows, top_k, top_p)
            began = time.process_time()
            for _ in range(repeats):
                choose(logits_NV, shape)
            found[way].append((time.process_time() - began) / repeats / rows * 1e3)
    return {way: statistics.median(values[1:]) for way, values in found.items()}


def main() -> None:
    """Print the table; write it where asked."""
    parser = argparse.ArgumentParser(description="What top-k and top-p cost beside plain sampling.")
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    table = []
    for scale in (5.0, 3.0):
        for vocabulary in VOCABULARIES:
            for rows in ROWS:
                ms = measured(vocabulary, rows, scale)
                ratios = {way: value / ms["plain"] for way, value in ms.items() if way != "plain"}
                table.append(
                    {
                        "scale": scale,
                        "vocabulary": vocabulary,
                        "rows": rows,
                        "ms_per_row": ms,
                        "ratios": ratios,
                    }
                )
                told = ", ".join(f"{way}: {ratio:.2f}x" for way, ratio in ratios.items())
                print(
                    f"{vocabulary} tokens, {rows} rows, scale {scale:g}: plain {ms['plain']:.3f} "
                    f"ms; {told}"
                )
    if out is not None:
        out.write_text(
            json.dumps({"machine": machine(), "measured": table}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
