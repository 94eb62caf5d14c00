"""Which sampler a request goes to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from zlib import crc32

from halteres.engine.protocol import ModelInfo, Samples
from halteres.service.fleet import Fleet, Host, Pick

OVERLOADED = 1.5  # times the mean of requests under way
REMEMBERED = 4096  # prompts whose sampler is known


def anything(_: ModelInfo) -> bool:
    """Every sampler can answer the request."""
    return True


class Router:
    """Which sampler a request goes to.

    The same one for the same adapter and prompt, and for the later turns of a conversation, which
    begin with an earlier prompt: it has their keys and values. One that has OVERLOADED times the
    mean of requests under way is spared, so that a slow one gets fewer.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._under_way = Counter[Host[Samples]]()  # requests
        # who answered a prompt, by adapter, length and checksum; unused for longest first
        self._answered = OrderedDict[tuple[str, int, int], Host[Samples]]()
        self._lengths: dict[str, Counter[int]] = {}  # of those prompts, by adapter

    @contextmanager
    def route(
        self,
        snapshot: str | None,
        prompt: bytes,
        fits: Callable[[ModelInfo], bool] = anything,
    ) -> Iterator[Pick[Samples]]:
        """What picks a sampler for a request, and another after each death, as long as the block
        runs.
        """
        now: list[Host[Samples]] = []

        def pick(dead: Collection[Host[Samples]]) -> Host[Samples]:
            release()
            host = self._pick(snapshot or "", prompt, fits, dead)
            now.append(host)
            self._under_way[host] += 1
            return host

        def release() -> None:
            while now:
                self._under_way[now.pop()] -= 1

        try:
            yield pick
        finally:
            release()

    def _pick(
        self,
        adapter: str,
        prompt: bytes,
        fits: Callable[[ModelInfo], bool],
        dead: Collection[Host[Samples]],
    ) -> Host[Samples]:
        every = self._fleet.samplers
        able = [host for host in every if host.info is None or fits(host.info)] or list(every)
        ready = [host for host in able if host.state == "ready"]
        able = [host for host in ready if host not in dead] or ready or able
        checksums = self._checksums(adapter, prompt)
        known = (self._answered.get((adapter, *one)) for one in reversed(checksums))
        whole = checksums[-1]
        host = next((one for one in known if one in able), None) or able[whole[1] % len(able)]
        loads = [self._under_way[one] for one in able]
        load = self._under_way[host]
        if load and load >= OVERLOADED * sum(loads) / len(loads):
            host = able[loads.index(min(loads))]
        self._remember((adapter, *whole), host)
        return host

    def _checksums(self, adapter: str, prompt: bytes) -> list[tuple[int, int]]:
        """Length and checksum of the prompt's beginnings that are as long as a prompt which was
        answered, shortest first; the whole is the last.
        """
        lengths = {one for one in self._lengths.get(adapter, ()) if one < len(prompt)}
        found, begins, checksum = list[tuple[int, int]](), 0, crc32(adapter.encode())
        for length in (*sorted(lengths), len(prompt)):
            checksum = crc32(prompt[begins:length], checksum)
            found.append((length, checksum))
            begins = length
        return found

    def _remember(self, key: tuple[str, int, int], host: Host[Samples]) -> None:
        if key not in self._answered:
            self._lengths.setdefault(key[0], Counter())[key[1]] += 1
        self._answered[key] = host
        self._answered.move_to_end(key)
        while len(self._answered) > REMEMBERED:
            (adapter, length, _), _ = self._answered.popitem(last=False)
            lengths = self._lengths[adapter]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._lengths[adapter]
