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
from halteres.errors import HalteresError, InvalidConfig
from halteres.models import model_folder
from halteres.process import begin, die_with_parent, usable_cores

ENDS_WITHIN_S = 1.5  # a rank, once it was asked to; torchrun waits 2 s


def main() -> int:
    """Run until SIGTERM, SIGINT, a `close` call or the end of the lifeline; exit code 0, or 1 with
    one sentence.
    """
    parser = argparse.ArgumentParser(
        prog="python -m halteres.engine", description="One engine behind a Unix socket."
    )
    parser.add_argument("--socket", type=Path, help="where it listens; of several ranks the first")
    parser.add_argument("--backend", choices=("torch", "scripted"), required=True)
    parser.add_argument(
        "--model", required=True, help="folder of the base model; of several ranks its name too"
    )
    parser.add_argument("--name", help="of the base model; default: --model")
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
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes that train as one, started by torchrun"
    )
    parser.add_argument(
        "--shard", action="store_true", help="each rank has a part of the base model"
    )
    parser.add_argument("--comes-within", type=float, help="seconds that ranks wait for each other")
    options = parser.parse_args()
    if options.socket is None and not options.ranks:
        parser.error("--socket is required")
    environ.stay_offline()
    if (options.device or environ.device()) != "cpu":
        environ.set_gpu_allocator()
    run = _run
    if options.ranks:
        run = _run_rank
        # torchrun hands no descriptor on: a rank ends with torchrun
        die_with_parent()
        environ.forget_lifeline()
    begin("engine", torch=options.backend == "torch", threads=options.threads)
    try:
        asyncio.run(run(options))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


async def _run(options: argparse.Namespace) -> None:
    end = _asked_to_end()
    folder, name, threads = Path(options.model), options.name or options.model, options.threads
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
        await _until(end, connections.closed)
        await engine.close()


async def _run_rank(options: argparse.Namespace) -> None:
    """One of several ranks: the first listens, the others follow it."""
    place = environ.torchrun()
    if place is not None and (options.device or environ.device()) != "cpu":
        environ.show_one_gpu(place.local_rank)

    from halteres.engine.torch.device import usable
    from halteres.engine.torch.engine import TorchEngine
    from halteres.engine.torch.ranks import COMES_WITHIN_S, Leader, Ranks, card_of, follow

    # People start the ranks of further machines, with the name that they give the service.
    folder = model_folder(options.model, environ.home() / "models") or Path(options.model)
    name = options.name or options.model
    socket: Path | None = options.socket
    if place is not None and place.rank:
        _log_alone()
    device, dtype = await usable(options.device or environ.device(), folder, options.dtype)
    if socket is None and (place is None or place.rank == 0):
        raise InvalidConfig(
            "Rank 0 has no --socket, by which a service would reach it.",
            next="`halteres serve --trainer-ranks N` starts it, and those of its machine.",
        )
    ranks = Ranks.join(
        card_of(folder, dtype, options.ranks, shard=options.shard),
        device,
        options.comes_within or COMES_WITHIN_S,
    )
    engine = TorchEngine(
        folder,
        name,
        options.threads,
        device=device,
        cache_gb=options.cache_gb,
        dtype=dtype,
        ranks=ranks,
    )
    ranks.watch()
    if ranks.rank or socket is None:
        # torchrun asks all ranks of its machine to end; rank 0 then sends its last call to them
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ranks.end_within, ENDS_WITHIN_S)
        await follow(engine, ranks)
    else:
        end, leader = _asked_to_end(), Leader(engine, ranks)
        async with serve(engine, socket, leader.execute) as connections:
            await _until(end, connections.closed)
            # a call under way may wait for ranks that have ended
            ranks.end_within(ENDS_WITHIN_S)
            # Those of other machines were not asked to end. Where the service was not either, but
            # died, they fail, so that what starts them again goes on.
            if end.is_set():
                await leader.close()
    await engine.close()
    ranks.leave()


def _asked_to_end() -> asyncio.Event:
    """It is set by a signal that asks this process to end."""
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    return end


def _log_alone() -> None:
    """From now on standard output is the log's: nothing can block on a pipe that nobody reads."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


async def _until(*events: asyncio.Event) -> None:
    """Say that the engine listens, and wait for one of these."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _log_alone()
    waits = {asyncio.create_task(event.wait()) for event in events}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


if __name__ == "__main__":
    sys.exit(main())
