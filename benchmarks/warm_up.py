"""A base model for a benchmark: the built-in one after supervised steps on answers of the
benchmark's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Example = tuple[list[int], list[int]]  # the prompt's tokens and the answer's, each trained on


def warm_up(
    draw: Callable[[float], Example],
    folder: Path,
    *,
    steps: int,
    shared: Sequence[int] = (),
    rows: int = 16,
    rate: float = 2e-3,
) -> None:
    """Train the whole built-in model on answers and write it to a folder of its own.

    Args:
        draw: an example for the share of the steps that is done, from 0 to 1.
        folder: must not exist.
        steps: of AdamW, with a rate that rises and falls once.
        shared: what every prompt begins with beside the example's own part; it is computed once per
            step.
    """
    import torch
    from transformers import DynamicCache, Qwen3ForCausalLM

    from halteres.models import TINY, builtin_path

    source = builtin_path(TINY)
    assert source is not None, "the package has its built-in model"
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=rate, total_steps=steps, pct_start=0.05
    )
    for step in range(1, steps + 1):
        examples = [draw(step / steps) for _ in range(rows)]
        width = max(len(before) + len(after) for before, after in examples)
        tokens = torch.zeros(rows, width, dtype=torch.long)
        labels = torch.full((rows, width), -100)
        for row, (before, after) in enumerate(examples):
            tokens[row, : len(before) + len(after)] = torch.tensor([*before, *after])
            labels[row, len(before) : len(before) + len(after)] = torch.tensor(after)
        cache = DynamicCache(config=model.config)
        if shared:
            model(torch.tensor([list(shared)]), past_key_values=cache)
            cache.batch_repeat_interleave(rows)
        # padding is on the right: nobody sees it
        loss = model(tokens, past_key_values=cache, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        plan.step()
        optimiser.zero_grad()
        if step % 20 == 0:
            print(f"warm-up {step}/{steps}: loss {loss.item():.3f}", flush=True)
    shutil.copytree(source, folder)
    model.save_pretrained(folder)
