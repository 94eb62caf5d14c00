"""Shared prefixes computed once: the same bits as apart, and the same gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from halteres.engine.protocol import LoraConfig
from halteres.engine.torch.adapter import Adapter, Layout
from halteres.engine.torch.limits import Limits, PassBudget
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.losses import LOSSES, PerToken
from halteres.engine.torch.micro_batches import Example, MicroBatch, plan, planned
from halteres.engine.torch.model import BaseModel, Grid
from halteres.engine.torch.passes import JointAxis, PendingBatch
from halteres.engine.torch.trie import Trie, joins, shared_length, target_cells

from .requests import IMPORTANCE_SAMPLING
from .torch_fixtures import DTYPE, logprobs_of, of_answer, prompts, running, sample, trained, within

CPU = torch.device("cpu")


@pytest.fixture
def base(model_folder: Path) -> BaseModel:
    return load_base(model_folder, getattr(torch, DTYPE), CPU)


def moved_adapter(base: BaseModel) -> Adapter:
    layout = Layout.of(base, LoraConfig(rank=4, seed=1))
    flat = layout.initial(CPU)
    return Adapter(
        layout, flat + 0.02 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    )


def branching(seed: int, count: int = 14, longest: int = 420, targets: int = 0) -> list[Example]:
    """Sequences that leave earlier ones anywhere: nested prefixes, equal ones, of 1 to `longest`
    tokens and more.
    """
    random = np.random.default_rng(seed)
    sequences = [random.integers(3, 600, random.integers(longest // 2, longest))]
    for _ in range(count - 1):
        parent = sequences[random.integers(len(sequences))]
        kept = parent[: random.integers(0, len(parent) + 1)]
        sequences.append(
            np.concatenate(
                [kept, random.integers(3, 600, random.integers(0 if len(kept) else 1, 60))]
            )
        )
    shapes = [(len(tokens), *([targets] if targets else [])) for tokens in sequences]
    return [
        Example(
            tokens,
            random.integers(3, 600, shape),
            {"weights": random.standard_normal(shape)},
            index,
        )
        for index, (tokens, shape) in enumerate(zip(sequences, shapes, strict=True))
    ]


def computed(
    base: BaseModel, examples: list[Example], tokens: int, share: bool
) -> tuple[dict[int, Tensor], Tensor, int]:
    """Log-probabilities by datum, the gradient of their weighted sum, micro-batches that were
    tries.
    """
    adapter, found, tries = moved_adapter(base), dict[int, Tensor](), 0
    adapter.begin_pass()
    for part in planned(examples, tokens, share):
        batch = MicroBatch.of(part, CPU, share)
        loss = PerToken(LOSSES["cross_entropy"], {})
        logprobs = PendingBatch(
            base, PassBudget.of(Limits()), adapter, batch, loss, False
        ).logprobs()
        logprobs.backward(batch.inputs()["weights"].float())
        rows = zip(logprobs.detach(), batch.examples, strict=True)
        found |= {example.index: row[: len(example)] for row, example in rows}
        tries += batch.trie is not None
    return found, adapter._pass_gradient, tries


@pytest.mark.parametrize(
    ("seed", "tokens", "targets"), [(0, 2048, 0), (1, 2048, 3), (2, 600, 0), (3, 320, 0)]
)
def test_shared_prefixes_have_the_log_probabilities_of_separate_data_to_the_bit(
    base: BaseModel, seed: int, tokens: int, targets: int
) -> None:
    """Beyond 192 and 384 keys, too, where sums are split; and the gradient is the same but for
    rounding.
    """
    examples = branching(seed, targets=targets)
    apart, gradient, _ = computed(base, examples, tokens, share=False)
    shared, shared_gradient, tries = computed(base, examples, tokens, share=True)
    assert max(len(example) for example in examples) > 200
    assert tries
    assert all(torch.equal(apart[index], shared[index]) for index in range(len(examples)))
    assert (gradient - shared_gradient).norm() < within(3e-6, 2e-2) * gradient.norm()


def test_long_tries_of_several_adapters_lie_on_one_axis_each_attended_by_itself(
    base: BaseModel,
) -> None:
    """Sums over more keys than a block's are split by their number: such tries may not be attended
    together.
    """
    parts = [planned(branching(seed), 2048, True)[0] for seed in (0, 4)]
    batches = [MicroBatch.of(part, CPU, True) for part in parts]
    assert all(batch.trie is not None and not joins(batch.trie, base) for batch in batches)
    axis = JointAxis(base, batches)
    assert [size for size, _ in axis.attentions] == [batch.size for batch in batches]
    hidden_ND = base.hidden_states({}, axis.tokens_N, Grid.single(axis.positions_N), axis)
    for batch, own_ND in zip(batches, axis.own(hidden_ND), strict=True):
        alone = JointAxis(base, [batch])
        grid = Grid.single(alone.positions_N)
        assert torch.equal(own_ND, base.hidden_states({}, alone.tokens_N, grid, alone))


def test_equal_data_count_each(base: BaseModel) -> None:
    (example,) = branching(0, count=1, longest=40)
    _, once, _ = computed(base, [example], 2048, share=True)
    _, thrice, tries = computed(
        base, [replace(example, index=i) for i in range(3)], 2048, share=True
    )
    assert tries
    assert (thrice - 3 * once).norm() < within(1e-5, 2e-2) * thrice.norm()


async def test_a_group_that_shares_its_prompt_has_the_samplers_log_probabilities(
    model_folder: Path,
) -> None:
    async with running(model_folder) as engine:
        await trained(engine)
        await engine.snapshot("a", "s")
        data = []
        for prompt in prompts(2, low=60, high=200, seed=5):
            answers = await sample(engine, "s", prompt, n=6, seed=1)
            data += [of_answer(prompt, sequence, 1.0) for sequence in answers.sequences]
        passed = await engine.forward_backward("a", tuple(data), IMPORTANCE_SAMPLING)
        assert passed.metrics["log_ratio_squared:sum"] == 0
        for datum, found in zip(data, passed.logprobs, strict=True):
            sampled = logprobs_of(datum.inputs["logprobs"])
            assert np.array_equal(logprobs_of(found)[sampled != 0], sampled[sampled != 0])


def test_a_trie_holds_every_token_of_lexicographic_sequences_once() -> None:
    """As many as there are distinct prefixes."""
    sequences = [example.tokens for example in branching(4, count=30, longest=50)]
    (batch,) = plan(sequences, 1 << 20)
    ordered = [sequences[i] for i in batch]
    trie = Trie.of(ordered)
    prefixes = {
        tuple(tokens[: end + 1].tolist()) for tokens in ordered for end in range(len(tokens))
    }
    assert len(set(np.concatenate([run.path_L for run in trie.runs]).tolist())) <= len(
        prefixes
    ) + 7 * len(ordered)
    for run, tokens in zip(trie.runs, ordered, strict=True):
        assert np.array_equal(trie.tokens_N[run.path_L], tokens)
        assert np.array_equal(trie.positions_N[run.path_L], np.arange(len(tokens)))


def test_only_targets_that_differ_are_asked_twice_of_a_shared_token() -> None:
    one, other = np.array([5, 6, 7, 8, 9]), np.array([5, 6, 7, 8, 4])
    trie = Trie.of([one[:-1], other[:-1]])
    rows_P, targets_P, cells_BT = target_cells(trie, [one[1:], other[1:]], length=16)
    assert cells_BT[:, :4].tolist() == [[0, 1, 2, 3], [0, 1, 2, 4]]
    assert rows_P[:5].tolist() == [0, 1, 2, 3, 3]
    assert targets_P[:5].tolist() == [6, 7, 8, 9, 4]


def test_a_family_comes_together_and_is_split_within_the_budget() -> None:
    prompt = np.arange(3, 63)
    sequences = [np.concatenate([prompt, np.full(20, 100 + i)]) for i in range(12)]
    sequences.insert(5, np.arange(200, 290))
    for tokens in (160, 300, 4000):
        batches = plan(sequences, tokens)
        assert sorted(i for batch in batches for i in batch) == list(range(13))
        for batch in batches:
            made = Trie.of([sequences[i] for i in batch])
            assert len(made.tokens_N) <= max(tokens, 96)
    assert len(plan(sequences, 4000)) == 1 < len(plan(sequences, 300)) < len(plan(sequences, 160))


def test_without_shared_prefixes_rows_are_padded_side_by_side() -> None:
    random = np.random.default_rng(0)
    sequences = [random.integers(3, 600, length) for length in (3, 90, 17, 90, 5, 200, 17, 1)]
    assert plan(sequences, 196) == plan(sequences, 196, share=False)
    assert shared_length(sequences[0], sequences[1]) == 0
