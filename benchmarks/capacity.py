"""What does one machine carry: how many requests and tokens per second go through one service, and
how many groups through one trajectory server, until something is at its limit?

    .venv/bin/python benchmarks/capacity.py          # five minutes, on a machine without other work
    .venv/bin/python benchmarks/capacity_report.py   # its figures into docs/several-machines.md
    .venv/bin/python benchmarks/capacity.py --quick --only costs --out FILE         # a quick look

The service has scripted vLLMs as samplers (`scripted_vllm.py`), which answer after the time that a
real one takes and cost next to nothing; clients (`capacity_load.py`) keep 256 requests in flight
for each of them. More samplers are added until the service's event loop has no time left. What is
reported is the CPU time of the service's process alone: with it the limit of one core follows, on
whatever machine.

The samplers' rate is what is published for vLLM with a model of 8 billion parameters in bfloat16
on one H100: 12,500 tokens a second (https://www.morphllm.com/vllm-benchmarks, April 2026, Llama
3.1 8B). Assumed are 256 sequences at a time, so 20 ms for each token of each, and that a prompt is
read at 50,000 tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from capacity_load import RUN, Load
from capacity_report import draw
from fleet_simulation import all_simulated
from scripted_vllm import LOWEST

from benchmarks import servers
from benchmarks.machine import machine
from benchmarks.trajectories.parties import Halteres
from benchmarks.trajectories.wire import Connection, timed
from benchmarks.trajectories.workload import BATCH_OF, PLAIN, registered
from halteres.models import TINY

HERE = Path(__file__).parent
RESULT = HERE / "results" / "capacity.json"

ROWS = 256  # sequences that a sampler decodes at a time
RATE = 12_500.0  # tokens a second that it writes then
TOKEN_S, PROMPT_TOKEN_S = ROWS / RATE, 1 / 50_000

PROMPTS = (128, 384)  # tokens
# tokens of answers, drawn alike often: quantiles of a log-normal distribution with the mean 256 and
# a standard deviation as large
ANSWERS = (43, 69, 92, 115, 139, 166, 197, 236, 286, 356, 472, 765)
SAMPLERS = (1, 8, 16)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")

UNLIMITED = ("--limit", "samples=1000000", "--limit", "requests_per_s=1000000")


def cpu_s(pid: int) -> float:
    """Of a process so far, without its children: of a service, not of its engine."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def resident_bytes(pid: int) -> int:
    """Memory of a process, without its children."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def child(program: str, argument: str, sockets: list[socket.socket]) -> Iterator[Any]:
    """A program of this folder, which says something on its first line and ends with its input."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / program), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[one.fileno() for one in sockets],
        text=True,
        encoding="utf-8",
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def line_of(process: Any) -> str:
    """What it says next."""
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"error: {' '.join(process.args[:2])} ended with {process.wait()}.")
    return line


@contextmanager
def samplers(number: int, token_s: float, prompt_token_s: float) -> Iterator[tuple[str, int]]:
    """So many scripted vLLMs: what `--samplers` is told, and the process that they are in."""
    with ExitStack() as stack:
        bound = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
            for _ in range(number)
        ]
        given = {
            "sockets": [one.fileno() for one in bound],
            "token_s": token_s,
            "prompt_token_s": prompt_token_s,
        }
        process = stack.enter_context(child("scripted_vllm.py", json.dumps(given), bound))
        line_of(process)
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in bound]
        yield ",".join(urls), process.pid


class Service:
    """One service with scripted samplers, a run that has published, and a session of the SDK."""

    def __init__(self, stack: ExitStack, number: int, rates: tuple[float, float]) -> None:
        import tinker

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halteres-bench-")))
        given, self.sampler_pid = stack.enter_context(samplers(number, *rates))
        further = ("--samplers", given, *UNLIMITED)
        self.url = stack.enter_context(
            servers.halteres(scratch / "service", TINY, "scripted", *further)
        )
        self.port = int(self.url.rpartition(":")[2])
        facts = json.loads((scratch / "service" / "state" / "service.json").read_bytes())
        self.pid, self.rates, self.num_requests = facts["pid"], rates, 0
        wait_for_samplers(self.url)
        client = tinker.ServiceClient(
            base_url=self.url, api_key="tml-benchmark", user_metadata={"halteres_run": RUN}
        )
        stack.callback(client.holder.close)
        training = client.create_lora_training_client(TINY, rank=4, train_unembed=False)
        self.sampling = training.result().save_weights_and_get_sampling_client().result()

    def load(self, route: str, **given: Any) -> Load:
        """Requests of this route for it."""
        token_s, prompt_token_s = self.rates
        return Load(
            port=self.port,
            route=route,
            token_s=token_s,
            prompt_token_s=prompt_token_s,
            session=self.sampling._sampling_session_id,
            first_request=self.num_requests,
            **given,
        )

    def measured(self, load: Load) -> dict[str, float]:
        """Figures of a window."""
        with child("capacity_load.py", load.start(), []) as process:
            line_of(process)
            own, other = cpu_s(self.pid), cpu_s(self.sampler_pid)
            counted = json.loads(line_of(process))
            spent_s, sampler_s = cpu_s(self.pid) - own, cpu_s(self.sampler_pid) - other
            resident = resident_bytes(self.pid)
        # numbers of requests are never used twice
        self.num_requests += 10_000_000
        seconds = counted["seconds"]
        return {
            "in_flight": load.in_flight,
            "requests_per_s": counted["requests"] / seconds,
            "tokens_per_s": counted["tokens"] / seconds,
            "cores": spent_s / seconds,
            "sampler_cores": sampler_s / seconds,
            "cpu_ms_per_request": 1e3 * spent_s / max(counted["requests"], 1),
            "added_ms_p50": counted["added_ms_p50"],
            "added_ms_p99": counted["added_ms_p99"],
            "resident_mb": resident / 1e6,
        }


def wait_for_samplers(url: str, within_s: float = 60.0) -> None:
    """Until the service has looked at each of its samplers."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        with urllib.request.urlopen(f"{url}/halteres/v1/info", timeout=10) as answer:  # noqa: S310
            states = {one["state"] for one in json.load(answer)["samplers"]}
        if states == {"ready"}:
            return
        time.sleep(0.1)
    raise SystemExit(f"error: the samplers are {', '.join(states)} after {within_s:g} s.")


ROUTES = ("generate", "sample")
MEAN_ANSWER = sum(ANSWERS) // len(ANSWERS)


def levels(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Each route with more and more samplers, a fresh service for each number."""
    found: dict[str, list[dict[str, float]]] = {route: [] for route in ROUTES}
    for number in options.samplers:
        with ExitStack() as stack:
            service = Service(stack, number, (TOKEN_S, PROMPT_TOKEN_S))
            resident = resident_bytes(service.pid)
            for route in ROUTES:
                load = service.load(
                    route,
                    in_flight=ROWS * number,
                    prompt=PROMPTS,
                    answers=ANSWERS,
                    warm_up_s=options.warm_up_s,
                    window_s=options.window_s,
                )
                figures = {"samplers": number, **service.measured(load)}
                # of the requests that would be answered by samplers alone
                scripted_s = load.rates.seconds(sum(PROMPTS) // 2, MEAN_ANSWER)
                figures["carried"] = figures["requests_per_s"] * scripted_s / load.in_flight
                figures["resident_mb_idle"] = resident / 1e6
                report(f"{route}, {number} samplers", figures)
                found[route].append(figures)
    return found


# tokens of a prompt and of an answer: what a request costs, and what a token of either adds
CASES = {"short": (64, 32), "long answer": (64, 1024), "long prompt": (1600, 32)}


def costs(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """CPU time of the service for a request, and for tokens of prompt and answer, by route."""
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        service = Service(stack, 4, (0.0, 0.0))
        for route in ROUTES:
            spent = dict[str, float]()
            for name, (prompt, answer) in CASES.items():
                load = service.load(
                    route,
                    in_flight=32,
                    prompt=(prompt, prompt),
                    answers=(answer,),
                    warm_up_s=1.0,
                    window_s=options.cost_window_s,
                )
                spent[name] = service.measured(load)["cpu_ms_per_request"]
            found[route] = per_token(spent)
            report(f"{route}, CPU time", found[route])
        found["sdk"] = {"cpu_ms_per_request": of_sdk(service, options.sdk_samples)}
        report("the SDK itself", found["sdk"])
    return found


def per_token(spent: dict[str, float]) -> dict[str, float]:
    """CPU milliseconds of a request without tokens, and of 1,000 tokens, of the CASES' times."""
    prompt, answer = CASES["short"]
    of_answer = (spent["long answer"] - spent["short"]) / (CASES["long answer"][1] - answer)
    of_prompt = (spent["long prompt"] - spent["short"]) / (CASES["long prompt"][0] - prompt)
    bare = spent["short"] - answer * of_answer - prompt * of_prompt
    typical = bare + MEAN_ANSWER * of_answer + sum(PROMPTS) / 2 * of_prompt
    return {
        "cpu_ms_per_request": bare,
        "cpu_ms_per_1k_answer_tokens": 1e3 * of_answer,
        "cpu_ms_per_1k_prompt_tokens": 1e3 * of_prompt,
        # what one core carries of the requests of `levels`
        "requests_per_core_s": 1e3 / typical,
        "tokens_per_core_s": 1e3 / typical * MEAN_ANSWER,
        "samplers_per_core": 1e3 / typical * MEAN_ANSWER / RATE,
    }


def of_sdk(service: Service, number: int) -> float:
    """CPU milliseconds of the service for a sample of the unmodified SDK, of mean lengths."""
    from tinker import types

    prompt = types.ModelInput.from_ints([LOWEST] * (sum(PROMPTS) // 2))
    params = types.SamplingParams(max_tokens=MEAN_ANSWER, temperature=1.0)

    def ask(times: int) -> None:
        coming = [service.sampling.sample(prompt, 1, params) for _ in range(times)]
        for one in coming:
            assert len(one.result(timeout=120).sequences[0].tokens) == MEAN_ANSWER

    ask(number // 8)  # warms up
    before = cpu_s(service.pid)
    ask(number)
    return 1e3 * (cpu_s(service.pid) - before) / number


POSTERS = ((1, (16, 512)), (8, (16, 512)), (32, (16, 512)), (8, (16, 4096)))


def trajectories(options: argparse.Namespace) -> list[dict[str, float]]:
    """Groups posted to one trajectory server while a trainer takes batches of 128 sequences."""
    found: list[dict[str, float]] = []
    for posters, shape in POSTERS:
        with tempfile.TemporaryDirectory(prefix="halteres-bench-") as scratch:
            server = Halteres("halteres", Path(scratch) / "server")
            server.start()
            try:
                (env_id,) = registered(server, PLAIN)
                load = Load(
                    port=server.port,
                    route="post",
                    in_flight=posters,
                    env_id=env_id,
                    shape=shape,
                    warm_up_s=1.0,
                    window_s=options.window_s,
                )
                figures = posted(server, load)
            finally:
                server.close()
        report(f"{posters} posting {shape[0]}x{shape[1]}", figures)
        found.append(figures)
    return found


def posted(server: Halteres, load: Load) -> dict[str, float]:
    """Figures of a window."""
    ended, taken = threading.Event(), [0]

    def take_batches() -> None:
        with Connection(server.port, room=1 << 25) as connection:
            while not ended.is_set():
                _, reply = timed(connection, BATCH_OF["identity"])
                if len(reply.content) > 100:
                    taken[0] += 1
                else:
                    time.sleep(0.002)

    trainer = threading.Thread(target=take_batches)
    with child("capacity_load.py", load.start(), []) as process:
        trainer.start()
        try:
            line_of(process)
            own, batches = cpu_s(server.pid), taken[0]
            counted = json.loads(line_of(process))
            spent_s, batches = cpu_s(server.pid) - own, taken[0] - batches
            resident = resident_bytes(server.pid)
        finally:
            ended.set()
            trainer.join()
    seconds = counted["seconds"]
    return {
        "posters": load.in_flight,
        "sequences": load.shape[0],
        "tokens_of_sequence": load.shape[1],
        "groups_per_s": counted["requests"] / seconds,
        "tokens_per_s": counted["tokens"] / seconds,
        "batches_per_s": batches / seconds,
        "cores": spent_s / seconds,
        "cpu_ms_per_group": 1e3 * spent_s / max(counted["requests"], 1),
        "groups_per_core_s": counted["requests"] / spent_s,
        "tokens_per_core_s": counted["tokens"] / spent_s,
        "post_ms_p50": counted["added_ms_p50"],
        "post_ms_p99": counted["added_ms_p99"],
        "resident_mb": resident / 1e6,
    }


def report(what: str, figures: dict[str, float]) -> None:
    """For whoever waits."""
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    print(f"{what}: {shown}", file=sys.stderr, flush=True)


def rounded(value: Any) -> Any:
    """Four digits of every number that is not whole."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samplers", type=int, nargs="+", default=SAMPLERS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--quick", action="store_true", help="short windows")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    options.warm_up_s, options.window_s, options.cost_window_s = 1.0, 5.0, 3.0
    options.sdk_samples = 400
    if options.quick:
        options.warm_up_s, options.window_s, options.cost_window_s = 0.5, 2.0, 1.0
        options.sdk_samples = 64
    before = machine()
    with tempfile.TemporaryDirectory(prefix="halteres-bench-") as home:
        os.environ["HALTERES_HOME"] = home
        os.environ["TINKER_TELEMETRY"] = "0"
        found = {name: PARTS[name](options) for name in options.only}
    told = {
        "command": " ".join(["python", "benchmarks/capacity.py", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "assumed": {
            "sampler_tokens_per_s": RATE,
            "rows_of_sampler": ROWS,
            "answer_tokens_mean": MEAN_ANSWER,
            "prompt_tokens_mean": sum(PROMPTS) / 2,
        },
        **rounded(found),
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if "simulation" in found:
        draw(found["simulation"], options.out.with_suffix(".png"))


def simulation(options: argparse.Namespace) -> dict[str, Any]:
    """What comes beyond one machine, on paper: `fleet_simulation.py`."""
    return all_simulated(16 if options.quick else 1000)


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "costs": costs,
    "levels": levels,
    "trajectories": trajectories,
    "simulation": simulation,
}

if __name__ == "__main__":
    main()
