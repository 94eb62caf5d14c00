"""Where keys and values lie while sequences are decoded: blocks of slots of one length.

A position that its slot's sequence has not written is zero, whatever the slot's last tenant left:
attention gives it the weight 0, but 0 * NaN is NaN.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.model import BaseModel, Heads
from halteres.engine.torch.projections import round_up

POSITION_STEP = 32  # bounds of what attention reads are multiples of this, as are lengths of slots
SHORTEST = 128
"""Positions of the shortest slot: steps of a small model have one or two blocks, and each costs
calls of its own.
"""

MOST_BYTES, MOST_SHARE = 32 << 20, 32
"""A block of several slots holds at most so many bytes, or this part of all memory where that is
more: blocks grow by copying, and what a copy takes has to be small beside a step's reading.
"""


def slot_length(positions: int, context: int) -> int:
    """Positions of the shortest slot that holds so many: 128, 256, 384, 512, 768, 1024, ..., the
    context.

    >>> [slot_length(positions, 2000) for positions in (1, 129, 300, 513, 1025, 1900)]
    [128, 256, 384, 768, 1536, 2016]
    """
    length = max(SHORTEST, 1 << max(positions - 1, 0).bit_length())
    if length > 2 * SHORTEST and positions <= length // 4 * 3:
        length = length // 4 * 3
    return min(length, max(SHORTEST, round_up(context, POSITION_STEP)))


class Block:
    """Keys and values of some slots, which are as many consecutive rows of a decode step."""

    def __init__(self, base: BaseModel, slots: int, length: int) -> None:
        layers, heads, width = len(base.layers), base.kv_heads, base.head_width
        self.slots, self.length, self.kv_heads = slots, length, heads
        self._data = torch.zeros(
            (2, layers, slots, heads, length, width), dtype=base.cache_dtype, device=base.device
        )
        self._rows = self._data.view(2 * layers, slots * heads, length, width)
        self._positions = self._data.view(2, layers, slots * heads * length, width)

    @property
    def area(self) -> int:
        """Positions of all slots; times the bytes of one it is the memory."""
        return self.slots * self.length

    @property
    def buffer(self) -> Tensor:
        """Keys, then values: 2 x layers x slots x key heads x length x width."""
        return self._data

    def index(self, positions_S: Tensor) -> Tensor:
        """Flat row numbers, slots * key heads, of one position of each of the first slots."""
        rows = torch.arange(positions_S.shape[0] * self.kv_heads, device=positions_S.device)
        return (rows * self.length).add_(positions_S.repeat_interleave(self.kv_heads))

    def append(self, layer: int, index_X: Tensor, k_X1W: Tensor, v_X1W: Tensor) -> None:
        """Write one position of each of the first slots."""
        for part, new_X1W in enumerate((k_X1W, v_X1W)):
            self._positions[part, layer].index_copy_(
                0, index_X, new_X1W.squeeze(1).to(self._data.dtype)
            )

    def read(self, slots: int, bound: int) -> Sequence[Tensor]:
        """Keys of every layer, then values of every layer, of the first slots up to a bound.

        Views, (slots * key heads) x L x W.
        """
        return self._rows[:, : slots * self.kv_heads, :bound].unbind(0)

    def write(self, layer: int, slot: int, heads: Heads, row: int, positions: range) -> None:
        """Copy a row of a prefill, without its padding, to these positions of a slot."""
        own, count = slice(row * self.kv_heads, (row + 1) * self.kv_heads), len(positions)
        for part, new_XTW in enumerate((heads.k_XTW, heads.v_XTW)):
            self._data[part, layer, slot, :, positions.start : positions.stop] = new_XTW[
                own, :count
            ]

    def slot(self, layer: int, slot: int, bound: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one slot up to a bound: views, key heads x L x W."""
        return self._data[0, layer, slot, :, :bound], self._data[1, layer, slot, :, :bound]

    def copy(
        self, slots: Sequence[int], source: Block, sources: Sequence[int], length: int
    ) -> None:
        """Copy slots of a block, this or another, up to a length; one source may go to all."""
        self._data[:, :, _range(slots), :, :length] = source._data[
            :, :, _range(sources), :, :length
        ]

    def pages(self, slot: int, numbers: range) -> list[Tensor]:
        """Copies of these pages of a slot, each 2 x layers x key heads x POSITION_STEP x width."""
        starts = [number * POSITION_STEP for number in numbers]
        views = [self._data[:, :, slot, :, start : start + POSITION_STEP] for start in starts]
        return [view.clone(memory_format=torch.contiguous_format) for view in views]

    def write_pages(self, slot: int, pages: Sequence[Tensor]) -> None:
        """Write pages to the beginning of a slot."""
        torch.cat([*pages], dim=3, out=self._data[:, :, slot, :, : len(pages) * POSITION_STEP])

    def clear(self, slots: range, length: int) -> None:
        """Zero slots that have lost their tenants, who wrote nothing from `length` on."""
        self._data[:, :, slots.start : slots.stop, :, :length] = 0


def _range(slots: Sequence[int]) -> slice | list[int]:
    """Neighbours as a slice, which is a view."""
    first, last = slots[0], slots[-1]
    return (
        slice(first, last + 1)
        if last - first + 1 == len(slots) and sorted(slots) == [*slots]
        else [*slots]
    )


Pages = dict[bytes, "Page"]  # by their tokens, int64


@dataclass(slots=True, eq=False)
class Page:
    """Keys and values of POSITION_STEP tokens that stay when their sequence has ended."""

    tokens: bytes
    heads: Tensor  # as `Block.pages` gives them
    following: Pages = field(default_factory=dict)  # what texts that begin so have behind it


class PrefixCache:
    """What ended sequences began with, in memory that no row needs: for each snapshot a tree of
    pages.

    A text is found page by page, so that its queries fall into the blocks in which a whole prefill
    has them, and have the same bits. What several texts begin with is kept once.

    The least recently used page goes first. A page counts as used after those that follow it, so
    none follows the one that goes. Finding, keeping and letting go take the time of the pages
    concerned, however many others there are. Those of a snapshot that nobody holds any more go at
    the next look for room.
    """

    def __init__(self, most: int) -> None:
        """Of `most` positions at most."""
        self._most = most
        self.hit_tokens, self.computed_tokens = 0, 0  # of all texts that were prefilled
        # Every page with the pages among which it is found; the least recently used first. A plain
        # dict would look for its first item among all those that went before it.
        self._found_in: OrderedDict[Page, Pages] = OrderedDict()
        self._first: dict[weakref.ref[Snapshot], Pages] = {}
        self._ended: deque[weakref.ref[Snapshot]] = deque()  # snapshots that nobody holds any more

    @property
    def area(self) -> int:
        """Positions of all."""
        return len(self._found_in) * POSITION_STEP

    def restore(self, snapshot: Snapshot, tokens: np.ndarray, block: Block, slot: int) -> int:
        """Write what is kept of a text's beginning into a slot; the number of its tokens.

        It is at least one token short of the text: the last one has to be computed.
        """
        path = self._path(snapshot, _pages(tokens[: len(tokens) - 1]))
        if path:
            self._use(path)
            block.write_pages(slot, [page.heads for page in path])
        return len(path) * POSITION_STEP

    def keep(
        self, snapshot: Snapshot, tokens: np.ndarray, block: Block, slot: int, room: int
    ) -> None:
        """Keep what a slot holds of these tokens, as far as `room` for all pages allows it."""
        room = min(room, self._most)
        texts = _pages(tokens[: max(room, 0)])
        path = self._path(snapshot, texts)
        self._use(path)
        new = texts[len(path) :]
        if not new:
            return
        # The path is what was used last, and there is room for it: others make way.
        self.shrink(room - len(new) * POSITION_STEP)
        heads = block.pages(slot, range(len(path), len(texts)))
        among = path[-1].following if path else self._beginnings(snapshot)
        for text, part in zip(new, heads, strict=True):
            page = among[text] = Page(text, part)
            self._found_in[page] = among
            path.append(page)
            among = page.following
        self._use(path)

    def shrink(self, area: int) -> None:
        """Keep so many positions at most."""
        while self._ended:
            self._drop(self._first.pop(self._ended.popleft()))
        while self._found_in and self.area > area:
            page, among = self._found_in.popitem(last=False)
            del among[page.tokens]

    def _beginnings(self, snapshot: Snapshot) -> Pages:
        # The callback may run in any thread, and holds no page.
        return self._first.setdefault(weakref.ref(snapshot, self._ended.append), {})

    def _path(self, snapshot: Snapshot, texts: Sequence[bytes]) -> list[Page]:
        """The pages that are kept of a text, from its beginning."""
        among, path = self._first.get(weakref.ref(snapshot), {}), list[Page]()
        for text in texts:
            page = among.get(text)
            if page is None:
                break
            path.append(page)
            among = page.following
        return path

    def _use(self, path: Sequence[Page]) -> None:
        for page in reversed(path):
            self._found_in.move_to_end(page)

    def _drop(self, pages: Pages) -> None:
        """These, and all that follow them."""
        rest = [*pages.values()]
        while rest:
            page = rest.pop()
            del self._found_in[page]
            rest += page.following.values()


def _pages(tokens: np.ndarray) -> list[bytes]:
    """The tokens of every whole page."""
    text, size = tokens.tobytes(), POSITION_STEP * tokens.itemsize
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


class CacheMemory:
    """How much all blocks take: at most `cache_bytes`, unless one row alone needs more."""

    def __init__(self, base: BaseModel, cache_bytes: int, prefixes: int = 0) -> None:
        self._base = base
        self._area = cache_bytes // base.cache_bytes_per_token
        self._most = max(MOST_BYTES, cache_bytes // MOST_SHARE) // base.cache_bytes_per_token
        self.used = 0  # positions of rows' blocks
        self.prefixes = PrefixCache(prefixes * base.context)

    @property
    def free(self) -> int:
        """Positions that no row has; prefixes make way. Below 0 where one row alone needed more
        than there is.
        """
        return self._area - self.used

    @property
    def context(self) -> int:
        """Positions that a sequence can have."""
        return self._base.context

    def most_slots(self, length: int) -> int:
        """Slots of one block."""
        return max(1, self._most // length)

    def block(self, slots: int, length: int) -> Block:
        """A new block; whoever asks has looked whether it is free."""
        self.prefixes.shrink(self.free - slots * length)
        block = Block(self._base, slots, length)
        self.used += block.area
        return block

    def release(self, block: Block) -> None:
        """A block has no tenants any more."""
        self.used -= block.area
