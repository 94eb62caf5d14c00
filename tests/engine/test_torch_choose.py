"""Top-k and top-p look at the likeliest tokens alone, and draw what the whole vocabulary, sorted,
would give.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from halteres.engine.torch import token_sampling as choosing
from halteres.engine.torch.token_sampling import Chosen, Shaping, choose

WAYS = [
    (1, 1.0),
    (50, 1.0),
    (512, 1.0),
    (3000, 1.0),
    (-1, 0.9),
    (-1, 0.1),
    (-1, 0.0),
    (-1, 0.999999),
    (40, 0.95),
]
VOCABULARY = 6151  # no multiple of anything

random = np.random.default_rng(3)
noise = torch.randn(len(WAYS) * 8, VOCABULARY, generator=torch.Generator().manual_seed(1))

LOGITS = {
    "peaked": noise * 6,
    "flat": noise,
    "tied in steps": (noise * 4).round(),
    "all equal": torch.zeros_like(noise),
    "two tokens": torch.full_like(noise, -400.0).index_fill_(1, torch.tensor([7, 6150]), 0.0),
    "a likely tail": torch.where(torch.arange(VOCABULARY) > VOCABULARY - 8, 12.0, noise),
}


def shaping(rows: int, ways: list[tuple[int, float]] = WAYS) -> Shaping:
    """The ways in turn, row by row."""
    chosen = [ways[row % len(ways)] for row in range(rows)]
    return Shaping(
        uniforms_N=random.random(rows, dtype=np.float32) * (1 - 2**-23),
        temperature_N=np.where(np.arange(rows) % 3 == 0, 0.7, 1.0).astype(np.float32),
        top_k_N=np.array([k for k, _ in chosen]),
        top_p_N=np.array([p for _, p in chosen], np.float32),
        min_p_N=np.zeros(rows, np.float32),
        tempered_N=np.zeros(rows, np.bool_),
        num_top_N=np.zeros(rows, np.int64),
    )


def sorted_whole(logits_NV: Tensor, shape: Shaping) -> Chosen:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "CANDIDATES", ())
        return choose(logits_NV, shape)


@pytest.mark.parametrize("kind", LOGITS)
def test_the_likeliest_tokens_give_what_the_whole_vocabulary_gives(kind: str) -> None:
    logits_NV = LOGITS[kind]
    shape = shaping(len(logits_NV))
    found, expected = choose(logits_NV, shape), sorted_whole(logits_NV, shape)
    assert torch.equal(found.tokens_N, expected.tokens_N)
    assert torch.equal(found.logprobs_N, expected.logprobs_N)


def test_rows_that_truncate_leave_those_that_do_not_as_they_are() -> None:
    logits_NV = LOGITS["peaked"][:12]
    mixed = shaping(12, [(-1, 1.0), (20, 1.0), (-1, 0.5)])
    found = choose(logits_NV, mixed)
    for row in range(12):
        alone = choose(logits_NV[row : row + 1], mixed[row : row + 1])
        assert torch.equal(found.tokens_N[row], alone.tokens_N[0])


def test_few_rows_sort_a_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows: list[int] = []
    among_all = choosing.among_all

    def counted(probs_NV: Tensor, shape: Shaping) -> Tensor:
        sorted_rows.append(len(probs_NV))
        return among_all(probs_NV, shape)

    monkeypatch.setattr(choosing, "among_all", counted)
    logits_NV = torch.cat([LOGITS["peaked"][:4], LOGITS["flat"][:2]])
    choose(logits_NV, shaping(6, [(-1, 0.9)]))
    assert sorted_rows == [2]
    choose(logits_NV, shaping(6, [(50, 0.95)]))
    assert sorted_rows == [2]
