"""What a sampling request may ask for beside tokens.

Owns: the bounds on top-k lists, scored targets and drawn alternatives, and the sentences that name what breaks them.
Never: computes any of it.
"""

from __future__ import annotations

import numpy as np

from halteres.engine.protocol import Array, ModelInfo, Wanted
from halteres.errors import InvalidData

MAX_K = 256
"""Values per position, of any kind; a smaller vocabulary is the bound for what is most likely."""

MAX_VALUES = 1 << 25
"""All values of one request together, each with its token id: 256 MiB."""


def check_wanted(wanted: Wanted, prompt_length: int, num_samples: int, limit: int, model: ModelInfo) -> None:
    """Refuse what cannot be computed, or not within bounds; `limit` is how many tokens a sequence may have.

    Raises:
        InvalidData: names what is out of range.
    """
    most_likely = min(MAX_K, model.vocab_size)
    for name, k, most in (
        ("topk_prompt_logprobs", wanted.topk_prompt, most_likely),
        ("topk_sample_logprobs", wanted.topk_sampled, most_likely),
        ("prompt_alt_tokens_k", wanted.alternatives, MAX_K),
    ):
        if not 0 <= k <= most:
            raise InvalidData(f"{name} is {k}.", f"It must be 0 (none) to {most}.", "Ask for fewer.")
    if wanted.targets is not None:
        _check_targets(wanted.targets, prompt_length - 1, model)
    values = (wanted.topk_prompt + wanted.alternatives) * prompt_length + wanted.topk_sampled * num_samples * limit
    if values > MAX_VALUES:
        raise InvalidData(
            f"This request asks for {values} log-probabilities beside its tokens.",
            f"{MAX_VALUES} are the limit: positions of the prompt, and num_samples times max_tokens, each times its k.",
            "Ask for a smaller k, fewer samples, or set max_tokens.",
        )


def check_streamed(wanted: Wanted) -> None:
    """Refuse what a stream cannot tell.

    Raises:
        InvalidData: something of the prompt is asked for.
    """
    if wanted.prompt_logprobs or wanted.topk_prompt or wanted.alternatives or wanted.targets is not None:
        raise InvalidData(
            "A stream tells of sampled tokens alone.",
            "Log-probabilities of the prompt were asked for.",
            "Ask for them without streaming.",
        )


def _check_targets(targets: Array, rows: int, model: ModelInfo) -> None:
    name = "target_prompt_logprobs"
    if targets.dtype != "int64" or len(targets.shape) != 2 or targets.shape[0] != rows:
        raise InvalidData(
            f"{name} is {targets.dtype} of shape {list(targets.shape)}.",
            f"It must be int64 of shape [{rows}, K]: row i scores position i + 1 of a prompt of {rows + 1} tokens.",
        )
    columns = targets.shape[1]
    if not 1 <= columns <= MAX_K:
        raise InvalidData(f"{name} has {columns} columns.", f"It must have 1 to {MAX_K}.", "Ask in several requests.")
    if len(targets.data) != rows * columns * 8:
        raise InvalidData(f"{name} holds {len(targets.data)} bytes, which is not its shape {list(targets.shape)}.")
    tokens = np.frombuffer(targets.data, np.int64)
    outside = (tokens < -1) | (tokens >= model.vocab_size)
    if outside.any():
        row, column = divmod(int(np.argmax(outside)), columns)
        raise InvalidData(
            f"{name} holds token {int(tokens[row * columns + column])} at [{row}, {column}].",
            f"The vocabulary of {model.name} ends at {model.vocab_size - 1}; -1 skips a cell.",
            "Use the model's own tokenizer.",
        )
