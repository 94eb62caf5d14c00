"""The engine's process: `python -m halteres.engine --socket PATH --backend torch|scripted --model
FOLDER ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import get_args

from halteres.config import environ
from halteres.engine.connection import serve
from halteres.engine.protocol import AskedType, Engine
from halteres.errors import HalteresError
from halteres.process import begin, usable_cores


def main() -> int:
    """Run until SIGTERM, SIGINT, a `close` call or the end of the lifeline; exit code 0, or 1 with
    one sentence.
    """
    parser = argparse.ArgumentParser(
        prog="python -m halteres.engine", description="One engine behind a Unix socket."
    )
    parser.add_argument("--socket", type=Path, required=True, help="where to listen")
    parser.add_argument("--backend", choices=("torch", "scripted"), required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--name", required=True, help="name of the base model")
    parser.add_argument("--threads", type=int, default=max(1, usable_cores() - 1))
    parser.add_argument(
        "--cache-gb", type=float, help="for keys and values; default: by what is free"
    )
    parser.add_argument(
        "--dtype", choices=get_args(AskedType), default="auto", help="of the base weights"
    )
    parser.add_argument(
        "--device", choices=environ.DEVICES, help="default: HALTERES_DEVICE, or cpu"
    )
    options = parser.parse_args()
    environ.stay_offline()
    if (options.device or environ.device()) != "cpu":
        environ.set_gpu_allocator()
    begin("engine", torch=options.backend == "torch", threads=options.threads)
    try:
        asyncio.run(_run(options))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


async def _run(options: argparse.Namespace) -> None:
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    folder, name, threads = options.model, options.name, options.threads
    engine: Engine
    if options.backend == "scripted":
        from halteres.engine.scripted.engine import ScriptedEngine

        engine = ScriptedEngine(folder, name, threads)
    else:
        from halteres.engine.torch.device import usable
        from halteres.engine.torch.engine import TorchEngine

        device, dtype = await usable(options.device or environ.device(), folder, options.dtype)
        engine = TorchEngine(
            folder, name, threads, device=device, cache_gb=options.cache_gb, dtype=dtype
        )
    async with serve(engine, options.socket) as connections:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        # what follows is the log's: nothing can block on it
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        waits = {asyncio.create_task(event.wait()) for event in (end, connections.closed)}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await engine.close()


if __name__ == "__main__":
    sys.exit(main())
