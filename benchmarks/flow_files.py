"""Our files of which a function runs while one request is served, in all processes that serve it;
imports aside.

Every process is started with a profiler that writes each function's file and name once for each
request. Which request it is stands in the first byte of a shared file.

`--list` names the files. Of those in the tool and the run's supervisor it says how many lines and
importers they have, and which functions run: what a reader of a start meets.
"""

from __future__ import annotations

import ast
import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import httpx

ROOT = Path(__file__).resolve().parent.parent
PROFILER = """
import mmap, os, sys, threading
folder, ours = os.environ["FLOW"], os.environ["FLOW_SOURCE"]
supervising = any("supervisor" in part for part in sys.orig_argv)
kind = "supervisor" if supervising else "tool" if "halteres" in sys.orig_argv else "child"
with open(folder + "/now", "rb") as file:
    now = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
seen = set()

def importing(frame):
    while frame:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False

def profiler(frame, event, _):
    code = frame.f_code
    is_ours = code.co_filename.startswith(ours) and code.co_flags & 1
    if event != "call" or now[0] == 48 or not is_ours:
        return
    line = chr(now[0]) + " " + code.co_filename[len(ours) + 1:] + " " + code.co_qualname
    if line not in seen and not importing(frame):
        seen.add(line)
        written = os.open(f"{folder}/{kind}-{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(written, (line + "\\n").encode())
        os.close(written)

threading.setprofile(profiler)
sys.setprofile(profiler)
"""


class Flows:
    """Processes under the profiler, and the request that is served now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(PROFILER, encoding="utf-8")
        (folder / "now").write_bytes(b"0")
        with (folder / "now").open("r+b") as file:
            self._now = mmap.mmap(file.fileno(), 1)
        source = {
            "PYTHONPATH": str(folder),
            "FLOW": str(folder),
            "FLOW_SOURCE": str(ROOT / "src" / "halteres"),
        }
        self.variables = {**os.environ, **source, "HALTERES_HOME": str(folder / "home")}

    @contextmanager
    def request(self, number: int) -> Iterator[None]:
        self._now[0] = ord("0") + number
        try:
            yield
        finally:
            time.sleep(0.3)  # what follows an answer belongs to it
            self._now[0] = ord("0")

    def files(self, number: int, *kinds: str) -> dict[str, set[str]]:
        """File -> its functions that ran: in all processes, or in those of these kinds: tool,
        supervisor, child.
        """
        found: dict[str, set[str]] = {}
        for kind in kinds or ("*",):
            for written in self.folder.glob(f"{kind}-[0-9]*"):
                for line in written.read_text(encoding="utf-8").splitlines():
                    request, file, function = line.split(" ")
                    if request == str(number):
                        found.setdefault(file, set()).add(function.removesuffix(".<locals>"))
        return dict(sorted(found.items()))

    @contextmanager
    def server(self, *arguments: str) -> Iterator[str]:
        """A server on a free port; gives its address once it answers."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        command = [sys.executable, "-m", "halteres", *arguments, "--port", port]
        process = subprocess.Popen(
            command, env=self.variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def importers() -> Counter[str]:
    """File below src/halteres -> how many of our files import it or a name of it."""
    source = ROOT / "src" / "halteres"
    found = Counter[str]()
    for file in source.rglob("*.py"):
        names = set[str]()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        imported = set[str]()
        for name in names:
            if not name.startswith("halteres."):
                continue
            path = "/".join(name.split(".")[1:])
            # a module, or a name of one
            for place in (path, path.rpartition("/")[0]):
                files = (f"{place}.py", f"{place}/__init__.py")
                imported |= {file for file in files if (source / file).is_file()}
        found.update(imported)
    return found


def print_start(files: Mapping[str, set[str]]) -> None:
    """Of each file: lines, importers, and the functions that ran."""
    known = importers()
    for file, functions in files.items():
        lines = len((ROOT / "src" / "halteres" / file).read_text(encoding="utf-8").splitlines())
        names = sorted(name for name in functions if "<" not in name)
        print(f"      {file}: {lines} lines, {known[file]} importers: {', '.join(names)}")


def until(holds: Any, within_s: float = 90) -> None:
    ends = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends:
            raise SystemExit(f"error: not within {within_s} s")
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=1)
    except httpx.TransportError:
        return False
    return True


def start_training(flows: Flows) -> None:
    """rl_start_training until the first child of the run is ready."""
    tools = [sys.executable, "-m", "halteres", "rl"]
    subprocess.run(
        [*tools, "select-environment", "arithmetic"],
        env=flows.variables,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    changes = json.dumps({"inference.engine": "scripted", "trainer.total_steps": 200})
    with flows.request(1):
        subprocess.run(
            [*tools, "start-training", "--changes", changes],
            env=flows.variables,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        runs = flows.folder / "home" / "runs"
        until(
            lambda: any(
                '"ready"' in file.read_text(encoding="utf-8")
                for file in runs.glob("[!.]*/events.jsonl")
            )
        )
    run_id = next(runs.glob("[!.]*")).name
    subprocess.run(
        [*tools, "stop-training", run_id],
        env=flows.variables,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def forward_backward(flows: Flows) -> None:
    """One forward_backward of the SDK through service and engine."""
    os.environ["TINKER_API_KEY"] = "tml-flow"
    import tinker
    from tinker import types

    with flows.server("serve") as url:
        trainer = (
            tinker.ServiceClient(base_url=url)
            .create_lora_training_client("halteres/tiny", rank=8)
            .result()
        )
        array = {
            "target_tokens": types.TensorData(data=[6, 7, 8], dtype="int64", shape=[3]),
            "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
        }
        data = [
            types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=array)
        ]
        trainer.forward_backward(data, "cross_entropy").result()
        with flows.request(2):
            trainer.forward_backward(data, "cross_entropy").result()


def post_group(flows: Flows) -> None:
    """One posted group and the batch that it makes."""

    def round_trip() -> None:
        group = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}
        httpx.post(f"{url}/scored_data", json=group).raise_for_status()
        until(lambda: httpx.get(f"{url}/batch").json()["batch"])

    with flows.server("serve", "trajectories") as url:
        trainer = {
            "wandb_group": "",
            "wandb_project": "",
            "batch_size": 2,
            "max_token_len": 64,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 10,
        }
        httpx.post(f"{url}/register", json=trainer).raise_for_status()
        httpx.get(f"{url}/batch")
        round_trip()
        with flows.request(3):
            round_trip()


async def tool_call(flows: Flows, log: TextIO) -> None:
    """One tool call over MCP."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "halteres", "mcp"], env=flows.variables
    )
    async with stdio_client(parameters, log) as streams, ClientSession(*streams) as session:
        await session.initialize()
        await session.call_tool("rl_list_runs", {})
        with flows.request(4):
            await session.call_tool("rl_list_runs", {})


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="halteres-flows-") as folder:
        flows = Flows(Path(folder))
        start_training(flows)
        forward_backward(flows)
        post_group(flows)
        with (Path(folder) / "mcp.log").open("w", encoding="utf-8") as log:
            asyncio.run(tool_call(flows, log))
        titles = (
            "rl_start_training until the first child is ready",
            "a forward_backward through service and engine",
            "a posted group and its batch",
            "a tool call over MCP (rl_list_runs)",
        )
        for number, title in enumerate(titles, 1):
            files = flows.files(number)
            print(f"{len(files):3} files: {title}")
            if "--list" in sys.argv:
                print("".join(f"      {file}\n" for file in files), end="")
            if number == 1:
                own = flows.files(1, "tool", "supervisor")
                print(f"{len(own):3} files: of these in the tool and the run's supervisor")
                if "--list" in sys.argv:
                    print_start(own)


if __name__ == "__main__":
    main()
