"""How long does a training loop stand still when its engine, its service or both are killed with
SIGKILL?

The real SDK trains the built-in model: on-policy steps of 16 samples each, published without a
name. At chosen steps a process is killed, the service is started again at once (an init system
would), and the time until the step under way is done is compared with the median of all steps: the
difference is what the death cost. The losses are compared, too: they must be those of a loop that
nobody disturbed. The aim is 5 s.

    .venv/bin/python benchmarks/recovery.py [--steps 60] [--kills 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import machine

from halteres.models import TINY
from halteres.process import block_torch

AIM_S = 5.0
CASES = ("undisturbed", "engine", "service", "both")


@dataclass
class Kept:
    """A service that is started again whenever it ends."""

    state: Path
    descriptor: int
    process: subprocess.Popen[bytes] = field(init=False)
    done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "halteres.service",
            "--state",
            str(self.state),
            "--threads",
            "1",
        ]
        with (self.state / "log").open("ab") as log:
            descriptors = [self.descriptor]
            command += ["--listen-fd", str(self.descriptor)]
            self.process = subprocess.Popen(command, pass_fds=descriptors, stdout=log, stderr=log)

    def keep(self) -> None:
        """Until `done`."""
        while not self.done.is_set():
            self.process.wait()
            if not self.done.is_set():
                self.start()

    def kill(self, whom: str) -> None:
        engine = json.loads((self.state / "service.json").read_bytes())["engine_pid"]
        for pid in {
            "engine": [engine],
            "service": [self.process.pid],
            "both": [engine, self.process.pid],
        }[whom]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def kept() -> Iterator[tuple[Kept, str]]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as bound:
        service = Kept(Path(folder), bound.fileno())
        service.start()
        keeper = threading.Thread(target=service.keep, daemon=True)
        keeper.start()
        try:
            yield service, f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            service.done.set()
            service.process.terminate()
            keeper.join(30)


def loop(url: str, steps: int, kill: dict[int, Any]) -> tuple[list[float], list[float]]:
    """Seconds and loss of every step; at the steps named in `kill` its function is called inside
    the step.
    """
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    training = client.create_lora_training_client(TINY, rank=16, seed=1).result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    seconds, losses = [], []
    for step in range(steps):
        began = time.perf_counter()
        sampling = training.save_weights_and_get_sampling_client().result()
        asked = types.SamplingParams(max_tokens=24, seed=step, stop=[])
        drawn = sampling.sample(prompt, num_samples=16, sampling_params=asked).result()
        data = [
            taught(types, prompt.to_ints(), one, (-1.0) ** row)
            for row, one in enumerate(drawn.sequences)
        ]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        if step in kill:
            kill[step]()
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        seconds.append(time.perf_counter() - began)
    return seconds, losses


def taught(types: Any, prompt: list[int], sequence: Any, advantage: float) -> Any:
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": (tokens[1:], "int64"),
        "logprobs": ([0.0] * before + list(sequence.logprobs), "float32"),
        "advantages": ([0.0] * before + [advantage] * len(sequence.tokens), "float32"),
    }
    arrays = {
        name: types.TensorData(data=data, dtype=dtype) for name, (data, dtype) in inputs.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=4, help="of each kind")
    parser.add_argument("--out", type=Path, help="also write the figures there")
    options = parser.parse_args()
    block_torch()
    os.environ |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    report: dict[str, Any] = {
        "machine": machine(),
        "steps": options.steps,
        "kills_of_each_kind": options.kills,
    }
    instants = [
        (number + 1) * options.steps // (options.kills + 1) for number in range(options.kills)
    ]
    undisturbed: list[float] = []
    for whom in CASES:
        with kept() as (service, url):
            kill = (
                {}
                if whom == "undisturbed"
                else {step: lambda whom=whom: service.kill(whom) for step in instants}
            )
            seconds, losses = loop(url, options.steps, kill)
        undisturbed = undisturbed or losses
        median_s = statistics.median(seconds[1:])
        stood_still_s = [round(seconds[step] - median_s, 3) for step in kill]
        report[whom] = {"median_step_s": round(median_s, 4), "same_losses": losses == undisturbed}
        if kill:
            report[whom] |= {
                "stood_still_s": stood_still_s,
                "within_aim": max(stood_still_s) <= AIM_S,
            }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
