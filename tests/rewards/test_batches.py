"""Every row once an epoch, in an order that seed and epoch alone decide; what texts begin with alike
is computed once, and they score as if each were alone.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from halteres.rewards.torch.batches import Rows, Tokens, epoch_batches, padded_parts
from halteres.rewards.torch.network import PART_TOKENS, ScoringNetwork

from .torch_fixtures import random_network

_DRAWN = random.Random(0)
LENGTHS = [_DRAWN.randint(5, 300) for _ in range(203)]


def padding(batches: list[list[int]]) -> float:
    computed = sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in batches)
    return 1 - sum(LENGTHS) / computed


@pytest.mark.parametrize("by_length", [True, False])
def test_an_epoch_has_every_row_once_and_is_another_each_time(by_length: bool) -> None:
    def epoch(number: int, seed: int = 7) -> list[list[int]]:
        return epoch_batches(LENGTHS, 8, seed=seed, epoch=number, by_length=by_length)

    first = epoch(0)
    assert sorted(row for batch in first for row in batch) == list(range(len(LENGTHS)))
    assert epoch(0) == first
    assert first not in (epoch(1), epoch(0, seed=8))


def test_rows_of_one_length_meet() -> None:
    bucketed = epoch_batches(LENGTHS, 8, seed=0, epoch=0)
    assert (
        padding(bucketed)
        < 0.1
        < 0.3
        < padding(epoch_batches(LENGTHS, 8, seed=0, epoch=0, by_length=False))
    )


def test_a_part_is_begun_where_padding_would_cost_more() -> None:
    lengths = [100, 20, 95, 90, 18]
    assert padded_parts(lengths, 40) == [[0, 2, 3], [1, 4]]
    assert padded_parts(lengths, 400) == [[0, 2, 3, 1, 4]]


def texts(prefix: int, *own: int, seed: int = 0) -> list[Tokens]:
    drawn = random.Random(seed)
    beginning = [drawn.randint(1, 96) for _ in range(prefix)]
    return [
        np.array(beginning + [drawn.randint(1, 96) for _ in range(count)], np.int64)
        for count in own
    ]


def real_tokens(network: ScoringNetwork) -> int:
    """Computed so far, without padding."""
    return network.num_computed_tokens - network.num_padding_tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_texts_that_share_a_prefix_score_as_each_alone(family: str) -> None:
    network = random_network(family)
    assert network.shares_prefixes
    groups = [texts(31, 3, 7), texts(15, 1, 2, 9, 4, seed=1), texts(0, 6, 3, seed=2)]
    together = [text for group in groups for text in group]
    before = real_tokens(network)
    with torch.inference_mode():
        found = network.scores(together)
        computed = real_tokens(network) - before
        apart = torch.cat([network.scores([text]) for text in together])
    assert computed <= sum(map(len, together)) - 31 - 3 * 15
    assert len(set(apart.tolist())) == len(apart)
    torch.testing.assert_close(found, apart, rtol=1e-5, atol=1e-5)


def test_rows_of_very_different_lengths_are_scored_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = random_network("llama")
    rows = [*texts(11, 3, 7), *texts(60, 0), *texts(4, 0, seed=3), texts(60, 0)[0][:20]]
    monkeypatch.setitem(PART_TOKENS, "cpu", 10)
    with torch.inference_mode():
        apart = torch.cat([network.scores([text]) for text in rows])
        for share in (True, False):
            found = network.outputs(rows, share=share).squeeze(-1)
            torch.testing.assert_close(found, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_their_gradients_are_those_of_separate_rows(checkpointing: bool) -> None:
    """Also where layers are computed once more in the backward pass, each with its own trie."""
    network = random_network("qwen3")
    if checkpointing:
        network.model.gradient_checkpointing_enable()  # pyright: ignore
        network.model.train()
    groups = [texts(40, 4, 9), texts(50, 6, 8, seed=1)]
    gradients: list[list[torch.Tensor]] = []
    for share in (True, False):
        network.model.zero_grad()
        before = network.num_computed_tokens
        scores = torch.cat([network.outputs(group, share=share).squeeze(-1) for group in groups])
        assert (network.num_computed_tokens - before < 140) == share
        torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).sum().backward()
        gradients.append(
            [one.grad.clone() for one in network.trained().values() if one.grad is not None]
        )
    for shared, separate in zip(*gradients, strict=True):
        torch.testing.assert_close(shared, separate, rtol=1e-4, atol=1e-6)


def test_texts_that_grow_out_of_each_other_are_computed_as_the_last_of_them() -> None:
    """States of a text, in any order: such as end as the whole does, and such as have an end token
    of their own.
    """
    network = random_network("llama")
    whole = texts(80, 0)[0]
    ended = [np.append(whole[:60], 96), np.append(whole[:40], 95)]
    group = [whole[:40], ended[0], whole, ended[1], np.append(whole[:20], [94, 93]), whole]
    rows = Rows.joined(group)
    assert len(rows.tokens) == 4
    assert rows.num_tokens - rows.num_shared == 80 + 1 + 1 + 2
    before = real_tokens(network)
    with torch.inference_mode():
        together = network.scores(group)
        assert real_tokens(network) - before == 80 + 1 + 1 + 2
        torch.testing.assert_close(
            together,
            torch.cat([network.scores([text]) for text in group]),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_beginnings_of_a_text_are_read_out_of_its_row(family: str) -> None:
    """By any model, also by one whose attention has a window."""
    network = random_network(family, **({"sliding_window": 8} if family == "mistral" else {}))
    text = texts(15, 0)[0]
    before = network.num_computed_tokens
    with torch.inference_mode():
        states = network.scores([text[:5], text[:10], text])
        assert network.num_computed_tokens - before == 15
        torch.testing.assert_close(
            states, torch.cat([network.scores([text[:end]]) for end in (5, 10, 15)])
        )


def test_a_model_whose_attention_is_another_computes_texts_apart() -> None:
    """A window counts tokens of the row; weights that are dropped, or capped scores, are no
    business of a trie's attention.
    """
    assert not random_network("mistral", sliding_window=8).shares_prefixes
    assert not random_network("llama", attention_dropout=0.1).shares_prefixes
    assert not random_network("llama", attn_implementation="eager").shares_prefixes
    assert not random_network(
        "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1
    ).shares_prefixes


def test_the_model_can_be_called_by_others_as_before() -> None:
    """With a mask of padding, for example, which the attention of a trie does not read."""
    network = random_network("llama")
    long, short = (torch.from_numpy(text) for text in texts(9, 6, 2))
    tokens = torch.zeros((2, len(long)), dtype=torch.int64)
    tokens[0], tokens[1, -len(short) :] = long, short
    with torch.inference_mode():
        found = network.model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits[:, 0]
        expected = network.scores([long.numpy(), short.numpy()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
