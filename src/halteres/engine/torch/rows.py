"""Sampling requests on their way, the sequences that they wait for (rows), and the cache slots that
rows have.

Rows lie without gaps: all blocks of one length but the last are full, and a block's rows have its
first slots. A row has a slot of the shortest length that holds it, and moves on when it has filled
that. A row that loses its slot goes on from its prompt and the tokens it has, bit for bit: its
random numbers are a function of (seed, sample, position).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from halteres.engine.checks import bytes_of
from halteres.engine.protocol import ExtraLogprobs, Piece, SampleResult, SamplingParams, TopK
from halteres.engine.protocol import Sequence as Sampled
from halteres.engine.stream_buffer import PieceQueue, end_to_end
from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.cache import Block, CacheMemory, slot_length
from halteres.engine.torch.logit_shaping import Follower, LogitShaper
from halteres.errors import HalteresError


class Newest(NamedTuple):
    """A token that was just sampled."""

    token: int
    logprob: float
    top: TopK | None = None  # of length 1, where the request asks for one


@dataclass(slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One call of `sample` or `stream`."""

    snapshot: Snapshot
    prompt: bytes  # int32
    tokens: np.ndarray  # the same, int64
    num_samples: int
    params: SamplingParams
    limit: int  # new tokens per sequence
    stop_tokens: frozenset[int]
    decode: Callable[[list[int]], str]  # the text of tokens, special ones by name
    future: Future[SampleResult]
    extra: ExtraLogprobs = ExtraLogprobs()  # noqa: RUF009 - frozen
    # where each row's answer begins in the grammar of `params`, where that has one
    new_follower: Callable[[], Follower] | None = None
    pieces: PieceQueue | None = None  # where a stream goes
    number: int = 0  # among all requests of a sampler: the lowest goes first
    scores: SampleResult | None = None  # what it has of the prompt
    cache_hit_tokens: int = 0  # of the prompt
    waiting: deque[Row] = field(init=False)  # rows without a slot
    finished: dict[int, Sampled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = deque(Row(self, sample) for sample in range(self.num_samples))

    @property
    def full_length(self) -> int:
        """Positions a sequence may take."""
        return len(self.tokens) + self.limit

    @property
    def needs(self) -> int:
        """Positions of all its sequences: how much memory it takes, compared with others."""
        return self.num_samples * self.full_length

    def new_shaper(self) -> LogitShaper | None:
        """For a row that has no token yet; None where its logits stay as they are."""
        if self.params.is_plain:
            return None
        follower = None
        if self.new_follower is not None:
            follower = self.new_follower()
        return LogitShaper(self.params, self.tokens, follower)

    def wait_for_slots(self, rows: Iterable[Row]) -> None:
        """These rows have lost their slots and wait for others, in order with those that never had
        one.
        """
        self.waiting = deque(sorted([*self.waiting, *rows], key=lambda row: row.sample))

    def finish(self, sample: int, sequence: Sampled) -> None:
        """One sequence is complete; the last one answers the request."""
        self.finished[sample] = sequence
        if len(self.finished) == self.num_samples:
            result = msgspec.structs.replace(
                self.scores or SampleResult(sequences=(), version=0),
                sequences=tuple(self.finished[i] for i in range(self.num_samples)),
                version=self.snapshot.version,
                prompt_cache_hit_tokens=self.cache_hit_tokens,
            )
            with suppress(InvalidStateError):  # cancelled
                self.future.set_result(result)
            if self.pieces is not None:
                self.pieces.end()

    def fail(self, error: HalteresError) -> None:
        """Answer with an error, if nothing was answered yet."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)
            if self.pieces is not None:
                self.pieces.end(error)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence that is being sampled."""

    request: SampleRequest
    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopK] = field(default_factory=list)
    # once it has had a slot, where its logits do not stay as they are
    shaper: LogitShaper | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.tokens) + len(self.tokens)

    @property
    def age(self) -> tuple[int, int]:
        """The lower, the longer it has been asked for: where memory ends, the highest makes way."""
        return self.request.number, self.sample

    @property
    def text(self) -> np.ndarray:
        """Prompt and answer, int64."""
        return np.concatenate([self.request.tokens, np.array(self.tokens, np.int64)])

    def take(self, newest: Newest) -> bool:
        """Add a token; True if the row ended with it (its request has the sequence then)."""
        self.tokens.append(newest.token)
        self.logprobs.append(newest.logprob)
        if newest.top is not None:
            self.tops.append(newest.top)
        if self.shaper is not None:
            self.shaper.take(newest.token)
        request = self.request
        reason = "length" if len(self.tokens) >= request.limit else None
        stops = request.params.stop_strings
        # a token holds at least one byte of text
        tail = max(map(bytes_of, stops)) + 4 if stops else 0
        text = request.decode(self.tokens[-tail:]) if stops else ""
        if newest.token in request.stop_tokens or any(stop in text for stop in stops):
            reason = "stop"
        if request.pieces is not None:
            piece = Piece(
                sample=self.sample,
                tokens=np.int32(newest.token).tobytes(),
                logprobs=np.float32(newest.logprob).tobytes(),
                version=request.snapshot.version,
                top=newest.top,
                stop_reason=reason,
            )
            request.pieces.put(piece)
        if reason is None:
            return False
        request.finish(
            self.sample,
            Sampled(
                tokens=np.array(self.tokens, dtype="<i4").tobytes(),
                logprobs=np.array(self.logprobs, dtype="<f4").tobytes(),
                stop_reason=reason,
                top=end_to_end(self.tops),
            ),
        )
        return True


COLUMNS = np.dtype(
    [
        ("token", np.int64),  # the newest one, to be fed next
        ("position", np.int64),  # ... at this position
        ("seed", np.uint64),
        ("sample", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("tempered", np.bool_),
        ("num_top", np.int64),  # most likely tokens that go with every token
    ],
    align=True,
)


class RowBlock:
    """Rows in the slots of one block: row i in slot i."""

    def __init__(self, cache: Block) -> None:
        self.cache = cache
        self.rows: list[Row] = []
        self.columns_S = np.zeros(cache.slots, COLUMNS)

    @property
    def vacant(self) -> int:
        """Slots without a row."""
        return self.cache.slots - len(self.rows)

    @property
    def written_R(self) -> np.ndarray:
        """Positions that each row's slot holds: the newest token is not there yet."""
        return self.columns_S["position"][: len(self.rows)]

    def exchange(self, cache: Block) -> Block:
        """Move all rows into another block with room for them; the old one."""
        count, old = len(self.rows), self.cache
        if count:
            slots = range(count)
            cache.copy(slots, old, slots, int(self.written_R.max()))
        columns_S = np.zeros(cache.slots, COLUMNS)
        columns_S[:count] = self.columns_S[:count]
        self.cache, self.columns_S = cache, columns_S
        return old


Place = tuple[RowBlock, range]  # neighbouring slots of a block


class Rows:
    """All rows, in the order of a step."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._blocks: dict[int, list[RowBlock]] = {}  # by length, the shortest first

    def __len__(self) -> int:
        return sum(len(block.rows) for block in self.blocks)

    def __iter__(self) -> Iterator[Row]:
        return (row for block in self.blocks for row in block.rows)

    @property
    def blocks(self) -> list[RowBlock]:
        """All that have rows, or room for some."""
        return [block for blocks in self._blocks.values() for block in blocks]

    @property
    def places(self) -> list[Place]:
        """All rows'."""
        return [(block, range(len(block.rows))) for block in self.blocks if block.rows]

    @property
    def vacant(self) -> int:
        """Positions of slots without a row: what `trim` would free."""
        return sum(block.vacant * block.cache.length for block in self.blocks)

    def make_room(self, length: int, count: int, *, forced: bool = False) -> int:
        """Slots of this length that are free now: `count`, or as many as there is memory for;
        forced, at least one.
        """
        memory = self._memory
        while (vacant := self._vacant(length)) < count:
            fit = memory.free // length
            fit = max(fit, 1 - vacant) if forced else fit
            if fit < 1:
                break
            last, most = (self._blocks.get(length) or [None])[-1], memory.most_slots(length)
            if last is None or last.cache.slots >= most:
                block = RowBlock(memory.block(min(count - vacant, fit, most), length))
                self._blocks.setdefault(length, []).append(block)
                self._blocks = dict(sorted(self._blocks.items()))
            else:
                slots = last.cache.slots
                self._resize(last, min(slots + min(max(slots, count - vacant), fit), most))
        return min(count, self._vacant(length))

    def enter(self, length: int, rows: Sequence[Row], columns: np.ndarray) -> list[Place]:
        """Give rows free slots; `make_room` was asked for them."""
        places: list[Place] = []
        taken = 0
        for block in self._blocks[length]:
            part = rows[taken : taken + block.vacant]
            if part:
                slots = range(len(block.rows), len(block.rows) + len(part))
                block.columns_S[slots.start : slots.stop] = columns[taken : taken + len(part)]
                block.rows += part
                places.append((block, slots))
                taken += len(part)
        return places

    def leave(self, rows: Collection[Row]) -> None:
        """Rows go."""
        for blocks in self._blocks.values():
            _leave(blocks, rows)
        self._drop_empty()

    @property
    def grown(self) -> dict[int, list[Row]]:
        """Rows that have filled their slots, by the slots' length."""
        found: dict[int, list[Row]] = {}
        for length, blocks in self._blocks.items():
            full = [
                (block, slot)
                for block in blocks
                for slot in np.flatnonzero(block.written_R >= length)
            ]
            if full:
                found[length] = [block.rows[slot] for block, slot in full]
        return found

    def move_on(self, *, forced: bool = False) -> int:
        """Rows that have filled their slots get longer ones, the oldest first, while there is
        memory; how many did.

        Forced, one does in any case.
        """
        moved = 0
        for length, rows in sorted(self.grown.items(), reverse=True):
            longer = slot_length(length + 1, self._memory.context)
            count = self.make_room(longer, len(rows), forced=forced and not moved)
            if count:
                self._move(sorted(rows, key=lambda row: row.age)[:count], length, longer)
                moved += count
        self._drop_empty()
        return moved

    def keep_prefixes(self, rows: Collection[Row]) -> None:
        """What these rows' slots hold stays as prefixes, as far as there is room."""
        gone = set(rows)
        for block in self.blocks:
            for slot, row in enumerate(block.rows):
                if row in gone:
                    text = row.text[: int(block.columns_S["position"][slot])]
                    self._memory.prefixes.keep(
                        row.request.snapshot, text, block.cache, slot, self._memory.free
                    )

    def trim(self) -> None:
        """Free the memory of slots without rows."""
        for block in self.blocks:
            if block.rows and block.vacant:
                self._resize(block, len(block.rows))
        self._drop_empty()

    def release(self) -> None:
        """Let go of everything."""
        for block in self.blocks:
            self._memory.release(block.cache)
        self._blocks = {}

    def _move(self, rows: Sequence[Row], length: int, longer: int) -> None:
        slots = {
            row: (block, slot)
            for block in self._blocks[length]
            for slot, row in enumerate(block.rows)
        }
        old = [slots[row] for row in rows]
        columns = np.array([block.columns_S[slot] for block, slot in old], COLUMNS)
        moved = 0
        for block, places in self.enter(longer, rows, columns):
            for slot in places:
                source, number = old[moved]
                block.cache.copy([slot], source.cache, [number], length)
                moved += 1
        _leave(self._blocks[length], rows)

    def _vacant(self, length: int) -> int:
        return sum(block.vacant for block in self._blocks.get(length, ()))

    def _resize(self, block: RowBlock, slots: int) -> None:
        self._memory.release(block.exchange(self._memory.block(slots, block.cache.length)))

    def _drop_empty(self) -> None:
        for length, blocks in list(self._blocks.items()):
            for block in blocks:
                if not block.rows:
                    self._memory.release(block.cache)
            self._blocks[length] = [block for block in blocks if block.rows]
        self._blocks = {length: blocks for length, blocks in self._blocks.items() if blocks}


def _leave(blocks: Sequence[RowBlock], rows: Collection[Row]) -> None:
    """The last rows of all these blocks close the gaps; nothing stays behind in slots that are free
    then.
    """
    gone = set(rows)
    before = [(len(block.rows), int(block.written_R.max(initial=0))) for block in blocks]
    for block in reversed(blocks):
        for slot in range(len(block.rows) - 1, -1, -1):
            if block.rows[slot] in gone:
                last = next(last for last in reversed(blocks) if last.rows)
                number = len(last.rows) - 1
                if block is not last or slot != number:  # the last row takes this slot
                    length = int(
                        max(block.columns_S["position"][slot], last.columns_S["position"][number])
                    )
                    block.cache.copy([slot], last.cache, [number], length)
                    block.rows[slot], block.columns_S[slot] = (
                        last.rows[number],
                        last.columns_S[number],
                    )
                last.rows.pop()
                last.columns_S[number] = np.zeros((), COLUMNS)
    for block, (count, written) in zip(blocks, before, strict=True):
        if block.rows and len(block.rows) < count:
            block.cache.clear(range(len(block.rows), count), written)
