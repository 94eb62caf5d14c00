"""Every public method of the installed SDK, called once against a live service.

Owns: the calls and how their outcomes are told.
Never: decides what ought to work; it writes down what does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal

import tinker
from clients.sdk.program.connection import Connection
from clients.sdk.program.steps import version_of_sdk

from .methods import ARGUMENTS, IN_THE_CLIENT, LiveService, base_of, public_methods

CALL_S = 60.0
REFUSALS = (tinker.APIStatusError, tinker.RequestFailedError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Row:
    """One method's outcome."""

    method: str
    outcome: Literal["works", "refused", "in the client"]
    says: str = ""


def rows(model: str, folder: str) -> list[Row]:
    """One row per public method; address and key come from the environment.

    Raises:
        KeyError: no arguments are known for a method: a new SDK has it.
    """
    # it ends everything
    methods = sorted(public_methods(), key=lambda method: method == "ServiceClient.close")
    world = LiveService(Connection(sdk=version_of_sdk(), model=model, folder=folder))
    found = asyncio.run(_all(world, methods))
    return sorted(found, key=lambda row: public_methods().index(row.method))


async def _all(world: LiveService, methods: list[str]) -> list[Row]:
    return [await _row(world, method) for method in methods]


async def _row(world: LiveService, method: str) -> Row:
    if method in IN_THE_CLIENT:
        return Row(method, "in the client")
    client, _, name = method.partition(".")
    prepared = ARGUMENTS[base_of(method)]
    # the name is that of the class's member
    called = getattr(await asyncio.to_thread(world.client, client), name)
    try:
        async with asyncio.timeout(CALL_S):
            arguments = await asyncio.to_thread(prepared, world)
            await _settled(called, arguments, method.endswith("_async"))
    except REFUSALS as error:
        return Row(method, "refused", sentence(str(error)))
    return Row(method, "works")


async def _settled(called: Any, arguments: tuple[Any, ...], is_coroutine: bool) -> None:
    """Call and wait: what waits by itself runs in a thread, what it gives may be a future of a
    future.
    """
    value = called(*arguments) if is_coroutine else await asyncio.to_thread(called, *arguments)
    while isinstance(value, Awaitable):
        value = await value


def sentence(text: str) -> str:
    """The words of a refusal, without ids, addresses and quotes of Python; the same on every
    machine.
    """
    told = re.search(r"'detail': (['\"])(.*?)\1[,}]", text)
    words = (
        told.group(2)
        if told
        else text.removeprefix("Request failed: ").partition(" for self.request_id=")[0]
    )
    words = re.sub(
        r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}(:\w+:\d+)?|(?<=-)[0-9a-f]{8}\b", "…", words
    )
    words = re.sub(r"(?<![\w/])/(?!api/)(?:[\w.-]+/)+[\w.-]*[\w-]", "/…", words)
    return re.sub(r"\s+", " ", words).strip().replace("|", "/")
