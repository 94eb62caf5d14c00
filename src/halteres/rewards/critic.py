"""The process of a run's critic: `python -m halteres.rewards.critic FOLDER --state DIR`.

Owns: the critic's weights and optimiser, on disk after every update.
Never: more than one computation at a time; an update twice.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.access_policy import AccessControl, AccessPolicy
from halteres.clients.critic import SAVE, UPDATE, VALUES, SaveRequest, UpdateRequest, ValuesRequest
from halteres.config import environ
from halteres.errors import HalteresError, ServerError, boundary
from halteres.loopback import HOST, open_listener, serve, url_of
from halteres.process import begin, usable_cores
from halteres.rewards.server import body_of, json_answer, on_error, on_missing

if TYPE_CHECKING:
    from halteres.rewards.torch.critic import Critic

T = TypeVar("T")
MOST_BODY_BYTES = 1 << 30


class CriticServer:
    """A critic behind HTTP; its one thread computes what comes, in order."""

    def __init__(self, critic: Critic) -> None:
        self._critic = critic
        self._thread = ThreadPoolExecutor(1, "critic")

    async def values(self, request: Request) -> Response:
        """Of the places of the body's sequences."""
        body = await body_of(request, ValuesRequest, most_bytes=MOST_BODY_BYTES)
        critic = self._critic
        return json_answer(await self._computed(lambda: critic.values(body.step, body.sequences)))

    async def update(self, request: Request) -> Response:
        """Learn the returns of the body."""
        body = await body_of(request, UpdateRequest, most_bytes=MOST_BODY_BYTES)
        return json_answer(await self._computed(lambda: self._critic.update(body)))

    async def save(self, request: Request) -> Response:
        """Keep the state."""
        body = await body_of(request, SaveRequest)
        await self._computed(lambda: self._critic.save(body.step))
        return json_answer({"step": body.step})

    async def health(self, request: Request) -> Response:
        """How many updates it has done."""
        return json_answer({"status": "ok", "step": self._critic.step})

    def end(self) -> None:
        """Wait for what is being computed: an update is written whole or not at all."""
        self._thread.shutdown(cancel_futures=True)

    async def _computed(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        with boundary(ServerError, "The critic"):
            return await loop.run_in_executor(self._thread, work)


def create_app(critic: Critic, *, address: str = HOST, key: str | None = None) -> Starlette:
    """The app over a critic; requests must carry the `key`, if any."""
    server = CriticServer(critic)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.end()

    def left(request: Request, error: Any) -> Response:
        """The client hung up, and reads no answer."""
        return Response(status_code=400)

    return Starlette(
        routes=[
            Route(VALUES, server.values, methods=["POST"]),
            Route(UPDATE, server.update, methods=["POST"]),
            Route(SAVE, server.save, methods=["POST"]),
            Route("/health", server.health),
        ],
        lifespan=lifespan,
        middleware=[Middleware(AccessControl, policy=AccessPolicy.of(address, key, ()))],
        exception_handlers={
            HalteresError: on_error,
            HTTPException: on_missing,
            ClientDisconnect: left,
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or the end of the lifeline; exit code 0, or 1 with one
    sentence.
    """
    given = parser().parse_args(arguments)
    environ.stay_offline()
    threads = given.threads or environ.threads() or max(1, usable_cores() - 1)
    begin("critic", torch=True, threads=threads)
    try:
        _serve(given)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _serve(given: argparse.Namespace) -> None:
    from halteres.rewards.torch.critic import Critic

    with open_listener(given.port, given.listen_fd) as bound:
        critic = Critic.open(
            given.folder, given.state, rank=given.rank, seed=given.seed, step=given.step
        )
        app = create_app(critic, address=bound.getsockname()[0], key=environ.reward_key())
        sys.stdout.write(f"The critic answers on {url_of(bound)}, after {critic.step} updates.\n")
        sys.stdout.flush()
        serve(app, bound)


def parser() -> argparse.ArgumentParser:
    """The arguments of the process."""
    made = argparse.ArgumentParser(
        prog="python -m halteres.rewards.critic", description="The critic of a run."
    )
    add = made.add_argument
    add("folder", type=Path, help="base model or reward model that it begins from")
    add("--state", type=Path, required=True, help="folder of its states")
    add("--rank", type=int, default=16, help="of its LoRA [%(default)s]")
    add("--seed", type=int, default=0, help="of its first weights [%(default)s]")
    add("--step", type=int, default=0, help="updates that count as done at first [%(default)s]")
    add("--threads", type=int, help="that compute; default: HALTERES_THREADS, or cores - 1")
    add("--port", type=int, default=0, help="0 takes a free one [%(default)s]")
    add("--listen-fd", type=int, metavar="FD", help="inherited socket that listens already")
    return made


if __name__ == "__main__":
    sys.exit(main())
