"""Steps: forward and backward passes, each loss against its formula in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tinker import types

from .connection import (
    SEQUENCES,
    WEIGHTS,
    Connection,
    Datums,
    datum,
    flat,
    floats,
    integers,
    logprobs_of,
    plain,
    scores,
    wait,
    weighted,
)
from .steps import Facts, Step, all_close, close_to

Formula = Callable[[float, float, float], float]
"""The loss of one token: log-probability, the sampler's log-probability, advantage."""

LOW, HIGH, BETA = 0.9, 1.1, 0.05


def cross_entropy(scene: Connection) -> Facts:
    output = wait(scene.trainer().forward_backward(weighted(), "cross_entropy"))
    logprobs = logprobs_of(output)
    assert [len(one) for one in logprobs] == [len(one) for one in WEIGHTS]
    assert all(value < 0 for value in flat(logprobs))
    weights = [weight for one in WEIGHTS for weight in one]
    expected = -sum(weight * logprob for weight, logprob in zip(weights, flat(logprobs)))  # noqa: B905
    close_to(output.metrics["loss:sum"], expected, "loss:sum is -sum(w * logprob)")
    return {"loss:sum": output.metrics["loss:sum"]}


def forward(scene: Connection) -> Facts:
    trainer = scene.trainer()
    ahead = wait(trainer.forward(weighted(), "cross_entropy"))
    passed = wait(trainer.forward_backward(weighted(), "cross_entropy"))
    all_close(
        flat(logprobs_of(ahead)), flat(logprobs_of(passed)), "forward and forward_backward agree"
    )
    close_to(ahead.metrics["loss:sum"], passed.metrics["loss:sum"], "loss:sum of both")
    return {"loss:sum": ahead.metrics["loss:sum"]}


def two_columns(scene: Connection) -> Facts:
    """[N, K] targets: each position scores K tokens."""
    trainer = scene.trainer()
    tokens = SEQUENCES[0]
    single = scores(trainer, [plain()[0]])
    pairs = [token for target in tokens[1:] for token in (target, 30)]
    inputs = {"target_tokens": integers(pairs, [4, 2]), "weights": floats([1.0, 0.0] * 4, [4, 2])}
    wide = datum(tokens, **inputs)
    output = wait(trainer.forward_backward([wide], "cross_entropy"))
    found = output.loss_fn_outputs[0]["logprobs"]
    assert list(found.shape) == [4, 2], found.shape
    all_close(
        [float(value) for value in list(found.data)[::2]],
        single,
        "the first column is the plain targets",
    )
    close_to(output.metrics["loss:sum"], -sum(single), "loss:sum counts the weighted column")
    return {"shape": list(found.shape)}


def compressed_rows(scene: Connection) -> Facts:
    """The same as CSR: unlisted cells are token 0 with weight 0."""
    trainer = scene.trainer()
    tokens = SEQUENCES[0]
    single = scores(trainer, [plain()[0]])
    rows: dict[str, Any] = {
        "shape": [4, 8],
        "sparse_crow_indices": [0, 1, 2, 3, 4],
        "sparse_col_indices": [0, 3, 5, 7],
    }
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", **rows),
        "weights": types.TensorData(data=[1.0, 1.0, 0.5, -1.0], dtype="float32", **rows),
    }
    output = wait(trainer.forward_backward([datum(tokens, **inputs)], "cross_entropy"))
    found = output.loss_fn_outputs[0]["logprobs"]
    assert list(found.shape) == [4, 8], found.shape
    listed = [
        float(found.data[8 * row + column]) for row, column in enumerate(rows["sparse_col_indices"])
    ]
    all_close(listed, single, "the listed cells are the plain targets")
    expected = -(single[0] + single[1] + 0.5 * single[2] - single[3])
    close_to(output.metrics["loss:sum"], expected, "loss:sum counts the listed cells")
    return {"shape": list(found.shape)}


def policy_data(
    scene: Connection, **extra: float
) -> tuple[list[float], list[float], list[float], Datums]:
    """Log-probabilities, those of a sampler a little off, advantages of both signs, and the datums
    that carry them.
    """
    logprobs = logprobs_of(wait(scene.trainer().forward(plain(), "cross_entropy")))
    offset, data, sampler, advantages = 0, [], [], []
    for tokens, known in zip(SEQUENCES, logprobs):  # noqa: B905
        count = len(known)
        here = [value + 0.3 * math.sin(offset + at) for at, value in enumerate(known)]
        wanted = [(-1.0) ** (offset + at) * (0.5 + 0.1 * at) for at in range(count)]
        inputs = {name: floats([value] * count) for name, value in extra.items()}
        data.append(datum(tokens, logprobs=floats(here), advantages=floats(wanted), **inputs))
        sampler.extend(here)
        advantages.extend(wanted)
        offset += count
    return flat(logprobs), sampler, advantages, data


def policy_loss(
    scene: Connection, name: str, formula: Formula, config: dict[str, float] | None = None
) -> Facts:
    """One of the losses that are a sum over tokens."""
    logprobs, sampler, advantages, data = policy_data(scene)
    output = wait(scene.trainer().forward_backward(data, name, config))
    expected = sum(formula(*token) for token in zip(logprobs, sampler, advantages))  # noqa: B905
    close_to(output.metrics["loss:sum"], expected, f"loss:sum of {name}")
    all_close(flat(logprobs_of(output)), logprobs, "the log-probabilities come back")
    return {"loss:sum": output.metrics["loss:sum"]}


def clipped(ratio: float) -> float:
    return min(max(ratio, LOW), HIGH)


def importance_sampling(logprob: float, sampler: float, advantage: float) -> float:
    return -math.exp(logprob - sampler) * advantage


def ppo(logprob: float, sampler: float, advantage: float) -> float:
    ratio = math.exp(logprob - sampler)
    return -min(ratio * advantage, clipped(ratio) * advantage)


def ppo_by_default(logprob: float, sampler: float, advantage: float) -> float:
    ratio = math.exp(logprob - sampler)
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)


def cispo(logprob: float, sampler: float, advantage: float) -> float:
    return -clipped(math.exp(logprob - sampler)) * logprob * advantage


def dro(logprob: float, sampler: float, advantage: float) -> float:
    return -(logprob * advantage - 0.5 * BETA * (logprob - sampler) ** 2)


def gspo(scene: Connection) -> Facts:
    """The ratio is of the sequence: the mean of its tokens' differences."""
    logprobs, sampler, advantages, data = policy_data(scene, sequence_ratio_mask=1.0)
    config = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
    output = wait(scene.trainer().forward_backward(data, "gspo", config))
    expected, start = 0.0, 0
    for tokens in SEQUENCES:
        span = range(start, start + len(tokens) - 1)
        ratio = math.exp(sum(logprobs[at] - sampler[at] for at in span) / len(span))
        expected -= sum(min(ratio * advantages[at], clipped(ratio) * advantages[at]) for at in span)
        start += len(span)
    close_to(output.metrics["loss:sum"], expected, "loss:sum of gspo")
    return {"loss:sum": output.metrics["loss:sum"]}


def stable_reinforce(scene: Connection) -> Facts:
    """Of each datum the last two targets were sampled, as one sequence; the prompt has no
    advantage, and no loss.
    """
    logprobs, sampler, advantages, _ = policy_data(scene)
    expected, start, named = 0.0, 0, list[types.Datum]()
    for number, tokens in enumerate(SEQUENCES):
        count = len(tokens) - 1
        end, of = start + count, str(number)
        sampled = range(end - 2, end)
        ratio = min(2.0, math.exp(sum(logprobs[at] - sampler[at] for at in sampled) / 2))
        expected -= sum(ratio * advantages[at] * logprobs[at] for at in sampled)
        inputs = {
            "logprobs": sampler[start:end],
            "advantages": [0.0] * (count - 2) + advantages[end - 2 : end],
        }
        spans = (
            types.PromptProvenanceSpan(sequence_id=of, length=count - 2),
            types.SampledProvenanceSpan(sequence_id=of, length=2),
        )
        whole = datum(tokens, **{name: floats(values) for name, values in inputs.items()})
        named.append(whole.with_provenance(model_input=list(spans), loss_fn_inputs=list(spans)))
        start = end
    output = wait(scene.trainer().forward_backward(named, "stable_reinforce"))
    close_to(output.metrics["loss:sum"], expected, "loss:sum of stable_reinforce")
    all_close(flat(logprobs_of(output)), logprobs, "the log-probabilities come back")
    return {"loss:sum": output.metrics["loss:sum"]}


def chunks(scene: Connection) -> Facts:
    """More datums than one request may carry: several, of which the first may arrive last."""
    trainer = scene.trainer()
    alone = [float(value) for value in scores(trainer, [plain()[0]])]
    data = [datum([5, 6 + at % 4], weights=floats([1.0])) for at in range(2500)]
    few = scores(trainer, data[:4])
    output = wait(trainer.forward_backward(data, "cross_entropy"))
    all_close(
        flat(logprobs_of(output)),
        [few[at % 4] for at in range(2500)],
        "each datum has its own answer",
    )
    close_to(output.metrics["loss:sum"], -625 * sum(few), "loss:sum over all chunks")
    all_close(scores(trainer, [plain()[0]]), alone, "nothing moved without optim_step")
    return {"loss:sum": output.metrics["loss:sum"]}


CLIP = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}

STEPS = (
    Step(
        "forward_backward cross_entropy",
        cross_entropy,
        proves=(
            "loss:cross_entropy",
            "pass:sums",
            "pass:any-weights",
            "pass:logprobs",
        ),
    ),
    Step("forward", forward, proves=("pass:logprobs",)),
    Step(
        "forward_backward [N, K] targets", two_columns, since=(0, 18), proves=("pass:wide-targets",)
    ),
    Step("forward_backward CSR targets", compressed_rows, since=(0, 18), proves=("pass:csr",)),
    Step(
        "importance_sampling",
        partial(policy_loss, name="importance_sampling", formula=importance_sampling),
        proves=("loss:importance_sampling",),
    ),
    Step("ppo", partial(policy_loss, name="ppo", formula=ppo, config=CLIP), proves=("loss:ppo",)),
    Step(
        "ppo, default clipping",
        partial(policy_loss, name="ppo", formula=ppo_by_default),
        proves=("loss:ppo",),
    ),
    Step(
        "cispo",
        partial(policy_loss, name="cispo", formula=cispo, config=CLIP),
        since=(0, 9),
        proves=("loss:cispo",),
    ),
    Step(
        "dro",
        partial(policy_loss, name="dro", formula=dro, config={"beta": BETA}),
        since=(0, 9),
        proves=("loss:dro",),
    ),
    Step("gspo", gspo, since=(0, 34), proves=("loss:gspo",)),
    Step("stable_reinforce", stable_reinforce, since=(0, 35), proves=("loss:stable_reinforce",)),
    Step("2500 datums in chunks", chunks, proves=("order:first-chunk-last",)),
)
