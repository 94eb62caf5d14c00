"""Pretraining of the built-in model on one CPU thread or more.

Owns: the architecture, the batches, the optimiser, the two stages' numbers.
Never: reads a clock to decide anything; a stage is a number of steps, so that a run can be repeated bit for bit.
"""

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from corpus import CLEAN, Blend, Demonstration, games, maths
from tokenizer import MAX_POSITIONS, SPECIALS, VOCABULARY_SIZE, render_prompt
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

ROWS, WIDTH = 8, 264  # of a batch; a demonstration never crosses a row's border
LOOKAHEAD = 24  # demonstrations waiting for a row with room
PROMPT_WEIGHT = 0.1  # of a prompt's token in the loss; an answer's token weighs 1
WARM_UP_STEPS = 50
HIDDEN = -1e9  # added to the attention scores of positions that must not be seen
LOG_EVERY = 100

log = logging.getLogger("recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stretch of pretraining with a fresh optimiser."""

    name: str
    blend: Blend
    steps: int
    peak_rate: float
    maths_share: float  # of the tokens; the rest are game turns


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised demonstration."""

    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed demonstrations; R rows, T positions of a row."""

    tokens_RT: torch.Tensor  # int64
    positions_RT: torch.Tensor  # int64, from 0 in each demonstration
    owners_RT: torch.Tensor  # int64, which demonstration of the row; -1 for padding
    weights_RT: torch.Tensor  # float32, of predicting the token at this position

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.owners_RT >= 0).sum())


CLEAN_STAGE = Stage(name="clean", blend=CLEAN, steps=12_000, peak_rate=4e-3, maths_share=0.45)
MIXTURE = Blend(careful=0.30, hasty=0.70, bisect=0.10, inside=0.25, blind=0.65)
MIXTURE_STAGE = Stage(name="mixture", blend=MIXTURE, steps=3_200, peak_rate=1e-3, maths_share=0.45)


def architecture() -> Qwen3Config:
    """Size xs: 873,856 parameters."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        use_cache=True,
        bos_token_id=None,
        pad_token_id=SPECIALS.index("<|endoftext|>"),
        eos_token_id=SPECIALS.index("<|im_end|>"),
    )


def fresh_model(seed: int) -> Qwen3ForCausalLM:
    """A model with random float32 weights; the same seed gives the same ones."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(architecture())
    model.set_attn_implementation("eager")  # with a block mask on a CPU, a quarter faster than sdpa
    return model


def train(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, stage: Stage, seed: int, on_log: Callable[[int], None] | None = None
) -> int:
    """Train the model in place; the number of tokens seen."""
    batches = pack(examples(tokenizer, stage, random.Random(f"{stage.name}/{seed}")))
    optimiser = torch.optim.AdamW(_decayed_matrices(model), betas=(0.9, 0.98), fused=True)
    num_tokens, loss_sum = 0, 0.0
    model.train()
    for step in range(1, stage.steps + 1):
        batch = next(batches)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(stage, step)
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        num_tokens, loss_sum = num_tokens + batch.num_tokens, loss_sum + loss.item()
        if step % LOG_EVERY == 0:
            log.info("%s step %d: loss %.4f, %.2f M tokens", stage.name, step, loss_sum / LOG_EVERY, num_tokens / 1e6)
            loss_sum = 0.0
            if on_log is not None:
                on_log(step)
    model.eval()
    return num_tokens


def learning_rate(stage: Stage, step: int) -> float:
    """Warm-up, constant, then half a cosine to 0 over the second half; `step` counts from 1."""
    half = stage.steps / 2
    decay = 1.0 if step <= half else 0.5 * (1 + math.cos(math.pi * (step - half) / half))
    return stage.peak_rate * min(1.0, step / WARM_UP_STEPS) * decay


def examples(tokenizer: Tokenizer, stage: Stage, rng: random.Random) -> Iterator[Example]:
    """Demonstrations without end, the two tasks in the stage's share of tokens."""
    sources = {True: maths(rng, stage.blend), False: games(rng, stage.blend)}
    seen = {True: 0, False: 0}
    while True:
        is_maths = seen[True] * (1 - stage.maths_share) <= seen[False] * stage.maths_share
        example = tokenised(tokenizer, next(sources[is_maths]))
        seen[is_maths] += len(example.tokens)
        yield example


def tokenised(tokenizer: Tokenizer, demonstration: Demonstration) -> Example:
    """Prompt and answer, encoded apart, as a sampler meets them; the answer ends with `<|im_end|>`."""
    prompt = tokenizer.encode(render_prompt(demonstration.message)).ids
    answer = tokenizer.encode(f"{demonstration.answer}<|im_end|>").ids
    return Example([*prompt, *answer], len(prompt))


def pack(source: Iterator[Example]) -> Iterator[Batch]:
    """Fill rows first come, first served; a demonstration without room waits for the next row."""
    waiting: deque[Example] = deque()
    while True:
        yield collate([_fill_row(source, waiting) for _ in range(ROWS)])


def collate(rows: list[list[Example]]) -> Batch:
    """Lay the rows' demonstrations end to end and pad them to WIDTH."""
    tokens = [[token for example in row for token in example.tokens] for row in rows]
    positions = [[i for example in row for i in range(len(example.tokens))] for row in rows]
    owners = [[k for k, example in enumerate(row) for _ in example.tokens] for row in rows]
    weights = [list(chain.from_iterable(map(_weights, row))) for row in rows]
    return Batch(
        torch.tensor([_padded(row, 0) for row in tokens]),
        torch.tensor([_padded(row, 0) for row in positions]),
        torch.tensor([_padded(row, -1) for row in owners]),
        torch.tensor([_padded(row, 0.0) for row in weights]),
    )


def _fill_row(source: Iterator[Example], waiting: deque[Example]) -> list[Example]:
    row: list[Example] = []
    room = WIDTH
    while len(waiting) < LOOKAHEAD:
        waiting.append(next(source))
    for example in list(waiting):
        if len(example.tokens) <= room:
            waiting.remove(example)
            row.append(example)
            room -= len(example.tokens)
    return row


def _weights(example: Example) -> list[float]:
    """A demonstration's first token is predicted from nothing and weighs 0."""
    answer_length = len(example.tokens) - example.prompt_length
    return [0.0] + [PROMPT_WEIGHT] * (example.prompt_length - 1) + [1.0] * answer_length


def _padded(row: Sequence[float], filler: float) -> list[float]:
    return [*row, *[filler] * (WIDTH - len(row))]


def _loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    same_owner_RTT = batch.owners_RT[:, :, None] == batch.owners_RT[:, None, :]
    hidden_R1TT = ~same_owner_RTT.tril()[:, None]
    mask_R1TT = torch.zeros(hidden_R1TT.shape, dtype=torch.bfloat16).masked_fill(hidden_R1TT, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_RTV = model(
            input_ids=batch.tokens_RT, attention_mask=mask_R1TT, position_ids=batch.positions_RT, use_cache=False
        ).logits
    targets_RT, weights_RT = batch.tokens_RT[:, 1:], batch.weights_RT[:, 1:]
    losses = cross_entropy(logits_RTV[:, :-1].flatten(0, 1).float(), targets_RT.flatten(), reduction="none")
    return (losses * weights_RT.flatten()).sum() / weights_RT.sum()


def _decayed_matrices(model: Qwen3ForCausalLM) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
