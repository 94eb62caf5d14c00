"""What does the training service cost, with an engine that costs nothing?

The real SDK against `python -m halteres.service --engine scripted` on one machine: one-token samples one after the
other, a trivial forward_backward with its optim_step, a publish with its first sample, and many samples at once. The
aim is a p50 of at most 5 ms per sample; the SDK's own floor against a server that does nothing is about 2 ms of it.

    .venv/bin/python benchmarks/service_overhead.py [--repeat 300] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from halteres.process import block_torch

WARM_UP = 20
TOGETHER = 512


@contextmanager
def service(state: Path) -> Iterator[str]:
    """A service's address, while the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        command = [sys.executable, "-m", "halteres.service", "--state", str(state), "--engine", "scripted"]
        process = subprocess.Popen([*command, "--listen-fd", str(bound.fileno())], pass_fds=[bound.fileno()])
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            # answered when the engine is ready
            urllib.request.urlopen(f"{url}/halteres/v1/info", timeout=60).close()  # noqa: S310  our own address
            yield url
        finally:
            process.terminate()
            process.wait(20)


def milliseconds(call: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Median and tail of a call that is made again and again."""
    took = []
    for _ in range(WARM_UP + repeat):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e3)
    return {f"p{share}": round(float(np.percentile(took[WARM_UP:], share)), 2) for share in (50, 90, 99)}


def measure(url: str, repeat: int) -> dict[str, Any]:
    """Every figure."""
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    training = client.create_lora_training_client("halteres/tiny", rank=8).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt, one = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=1)
    inputs = {
        "target_tokens": types.TensorData(data=[6, 7, 8], dtype="int64"),
        "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32"),
    }
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]

    def step() -> None:
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()

    def publish() -> None:
        published = training.save_weights_and_get_sampling_client().result()
        published.sample(prompt, 1, one).result()

    def together() -> None:
        waiting = [sampling.sample(prompt, 1, one) for _ in range(TOGETHER)]
        for future in waiting:
            future.result()

    began = time.perf_counter()
    together()
    together_s = time.perf_counter() - began
    return {
        "sample_ms": milliseconds(lambda: sampling.sample(prompt, 1, one).result(), repeat),
        "forward_backward_and_optim_step_ms": milliseconds(step, repeat),
        "publish_and_first_sample_ms": milliseconds(publish, repeat // 4),
        "samples_per_second_together": round(TOGETHER / together_s),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument("--out", type=Path, help="also write the figures there")
    options = parser.parse_args()
    block_torch()
    os.environ |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    before = machine()
    with tempfile.TemporaryDirectory() as state, service(Path(state)) as url:
        figures = measure(url, options.repeat)
    report = {"machine": before, "load_average_after": machine()["load_average"], "repeat": options.repeat, **figures}
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
