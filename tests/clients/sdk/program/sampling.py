"""Steps: published weights and what is sampled from them."""

from __future__ import annotations

import asyncio
import base64
import pickle
from typing import Any

from tinker import types

from .connection import (
    SEQUENCES,
    Client,
    Connection,
    integers,
    plain,
    prompt,
    scores,
    step,
    unique,
    wait,
)
from .steps import Facts, Step, all_close, differ

ASKED = SEQUENCES[2]


def drawn(
    sampler: Client, num_samples: int = 1, tokens: list[int] | None = None, **options: Any
) -> Any:
    """A sample; options that are not of SamplingParams go to `sample`."""
    known = {"seed", "stop", "temperature", "top_k", "top_p", "max_tokens"}
    params: dict[str, Any] = {
        "max_tokens": 8,
        **{name: value for name, value in options.items() if name in known},
    }
    others = {name: value for name, value in options.items() if name not in known}
    asked = sampler.sample(
        prompt(tokens or ASKED), num_samples, types.SamplingParams(**params), **others
    )
    return wait(asked)


def scored(sampler: Client, tokens: list[int]) -> list[float]:
    """The log-probability of every token but the first."""
    found = wait(sampler.compute_logprobs(prompt(tokens)))
    assert len(found) == len(tokens) and found[0] is None, found
    return [float(value) for value in found[1:]]


def all_scores(sampler: Client) -> list[float]:
    """Those of SEQUENCES, in the order in which a trainer gives them."""
    return [value for tokens in SEQUENCES for value in scored(sampler, tokens)]


def named(scene: Connection) -> Facts:
    trainer = scene.trainer()
    step(trainer)
    name = unique("policy")
    path = wait(trainer.save_weights_for_sampler(name)).path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/{name}", path
    sampler = scene.sampler(model_path=path)
    all_close(
        all_scores(sampler), scores(trainer), "the sampler's and the trainer's log-probabilities"
    )
    return {}


def ephemeral(scene: Connection) -> Facts:
    """A snapshot never moves, whatever is trained afterwards."""
    trainer = scene.trainer()
    step(trainer)
    sampler, kept = scene.published(trainer), scores(trainer)
    step(trainer, learning_rate=0.1)
    all_close(all_scores(sampler), kept, "the snapshot is that of the moment it was taken")
    differ(all_scores(scene.published(trainer)), kept, "a later snapshot is another")
    return {}


def inflight(scene: Connection) -> Facts:
    """Mutable weights: a client sees its own save or newer."""
    trainer = scene.trainer()
    step(trainer)
    first = scene.published(trainer, kind="inflight")
    own = scores(trainer)
    all_close(all_scores(first), own, "its own save")
    step(trainer, learning_rate=0.1)
    second = scene.published(trainer, kind="inflight")
    all_close(all_scores(second), scores(trainer), "the newer client")
    all_close(all_scores(first), scores(trainer), "the older client samples the newer weights")
    return {}


def base_model(scene: Connection) -> Facts:
    """The base model is what a fresh adapter is."""
    sampler = scene.sampler(base_model=scene.model)
    all_close(all_scores(sampler), scores(scene.trainer()), "base model and fresh adapter")
    return {}


def three(scene: Connection) -> Facts:
    sampler = scene.published(scene.trainer())
    stop = {"stop": [drawn(sampler, temperature=0.0).sequences[0].tokens[3]]}
    one, other = (drawn(sampler, 3, seed=11, **stop).sequences for _ in range(2))
    assert [seen.tokens for seen in one] == [seen.tokens for seen in other], (
        "the same seed, other tokens"
    )
    assert len({tuple(seen.tokens) for seen in one}) > 1, (
        "the samples of one request repeat each other"
    )
    assert len(one) == 3 and all(1 <= len(seen.tokens) <= 8 for seen in one)
    for seen in one:
        assert len(seen.logprobs) == len(seen.tokens) and all(value <= 0 for value in seen.logprobs)
    another = drawn(sampler, 3, seed=12, **stop).sequences
    assert [seen.tokens for seen in another] != [seen.tokens for seen in one], (
        "another seed, the same tokens"
    )
    return {"lengths": [len(seen.tokens) for seen in one]}


def stops(scene: Connection) -> Facts:
    """Stop tokens end a sample and are part of it; `stop=[]` ends nothing."""
    sampler = scene.sampler(base_model=scene.model)
    free = drawn(sampler, temperature=0.0, max_tokens=24, stop=[]).sequences[0]
    assert len(free.tokens) == 24 and free.stop_reason == "length", free
    token = free.tokens[3]
    stopped = drawn(sampler, temperature=0.0, max_tokens=24, stop=[token]).sequences[0]
    end = free.tokens.index(token) + 1
    assert stopped.tokens == free.tokens[:end] and stopped.stop_reason == "stop", (
        stopped,
        free.tokens,
    )
    text = scene.training.get_tokenizer().decode([token])
    by_text = drawn(sampler, temperature=0.0, max_tokens=24, stop=text).sequences[0]
    assert by_text.stop_reason == "stop" and len(by_text.tokens) <= end, (by_text, text)
    return {"tokens": len(stopped.tokens)}


def greedy(scene: Connection) -> Facts:
    sampler = scene.sampler(base_model=scene.model)
    one, other = (drawn(sampler, 2, temperature=0.0, seed=seed).sequences for seed in (1, 2))
    assert {tuple(seen.tokens) for seen in (*one, *other)} == {tuple(one[0].tokens)}, (
        "temperature 0 is greedy"
    )
    cut = drawn(sampler, temperature=1.0, top_k=1, seed=3).sequences[0]
    assert cut.tokens == one[0].tokens, "top_k=1 is greedy too"
    return {"tokens": one[0].tokens}


def compute_logprobs(scene: Connection) -> Facts:
    """What a sample says of its own tokens is what the same tokens score as a prompt, and what the
    trainer gives.
    """
    trainer = scene.trainer()
    step(trainer)
    sampler = scene.published(trainer)
    seen = drawn(sampler, seed=5).sequences[0]
    again = scored(sampler, ASKED + list(seen.tokens))[len(ASKED) - 1 :]
    all_close([float(value) for value in seen.logprobs], again, "sampled and recomputed")
    both = drawn(sampler, seed=5, include_prompt_logprobs=True)
    assert both.sequences[0].tokens == seen.tokens
    all_close(
        [float(value) for value in both.prompt_logprobs[1:]],
        scored(sampler, ASKED),
        "of a sample's prompt",
    )
    return {"logprobs": list(seen.logprobs)[:3]}


def topk_prompt(scene: Connection) -> Facts:
    sampler = scene.sampler(base_model=scene.model)
    answer = drawn(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=4)
    rows = answer.topk_prompt_logprobs
    assert len(rows) == len(ASKED) and not rows[0], rows
    for at, row in enumerate(rows[1:], start=1):
        values = [float(value) for _, value in row]
        assert len(row) == 4 and values == sorted(values, reverse=True), row
        own = dict(row).get(ASKED[at])
        if own is not None:
            all_close(
                [float(own)],
                [float(answer.prompt_logprobs[at])],
                "the prompt's own token among the top",
            )
    following = drawn(sampler, temperature=0.0, max_tokens=1, tokens=ASKED[:-1]).sequences[0]
    assert rows[-1][0][0] == following.tokens[0], "the likeliest token is the greedy one"
    return {"rows": len(rows)}


def topk_sampled(scene: Connection) -> Facts:
    sampler = scene.sampler(base_model=scene.model)
    seen = drawn(sampler, temperature=0.0, topk_sample_logprobs=3).sequences[0]
    assert len(seen.topk_logprobs) == len(seen.tokens)
    for token, value, row in zip(seen.tokens, seen.logprobs, seen.topk_logprobs):  # noqa: B905
        assert len(row) == 3 and row[0][0] == token, (token, row)
        all_close([float(row[0][1])], [float(value)], "the greedy token is the first of its row")
    return {"rows": len(seen.topk_logprobs)}


def targets(scene: Connection) -> Facts:
    """Chosen ids at chosen positions; -1 skips."""
    sampler = scene.sampler(base_model=scene.model)
    rows = [[token, -1] for token in ASKED[1:]]
    wanted = integers([token for row in rows for token in row], [len(rows), 2])
    answer = drawn(sampler, max_tokens=1, target_prompt_logprobs=wanted)
    found = answer.target_prompt_logprobs.tolist()
    all_close(
        [row[0] for row in found], scored(sampler, ASKED), "the prompt's own tokens as targets"
    )
    assert [row[1] for row in found] == [0.0] * len(rows), found
    return {"shape": [len(found), len(found[0])]}


def alternatives(scene: Connection) -> Facts:
    sampler = scene.sampler(base_model=scene.model)
    answer = drawn(sampler, max_tokens=1, seed=3, prompt_alt_tokens_k=5).prompt_alt_tokens
    tokens, values = answer.tokens.tolist(), answer.logprobs.tolist()
    assert len(tokens) == len(ASKED) - 1 and {len(row) for row in (*tokens, *values)} == {5}
    alternative = [*ASKED[:-1], int(tokens[-1][0])]
    all_close(
        [values[-1][0]],
        scored(sampler, alternative)[-1:],
        "the log-probability of a drawn alternative",
    )
    return {"last": tokens[-1]}


def last_tokens(scene: Connection) -> Facts:
    sampler = scene.sampler(base_model=scene.model)
    found = wait(sampler.compute_logprobs(prompt(ASKED), prompt_logprobs_last_n=2))
    assert len(found) == len(ASKED) and found[:-2] == [None] * (len(ASKED) - 2), found
    all_close([float(value) for value in found[-2:]], scored(sampler, ASKED)[-2:], "the last two")
    return {}


def asynchronous(scene: Connection) -> Facts:
    sampler = scene.sampler(base_model=scene.model)

    async def course() -> list[list[int]]:
        params = types.SamplingParams(max_tokens=4, seed=9)
        asked = [sampler.sample_async(prompt(ASKED), 1, params) for _ in range(16)]
        return [list(answer.sequences[0].tokens) for answer in await asyncio.gather(*asked)]

    together = asyncio.run(course())
    alone = list(drawn(sampler, max_tokens=4, seed=9).sequences[0].tokens)
    assert together == [alone] * 16, "a seed gives the same tokens, whatever else is being sampled"
    return {"tokens": alone}


def tokenizer(scene: Connection) -> Facts:
    """A sampling client knows its base model's name alone; the folder is a name that asks no
    hub.
    """
    found = scene.sampler(base_model=scene.folder).get_tokenizer()
    assert found.decode(found.encode("four")) == "four"
    return {}


def pickled(scene: Connection) -> Facts:
    """Another process's client: its sequence numbers start near 1e9 times a random number."""
    sampler = scene.published(scene.trainer())
    copy = pickle.loads(pickle.dumps(sampler))  # noqa: S301 - our own bytes
    ours, theirs = (drawn(one, seed=21).sequences[0].tokens for one in (sampler, copy))
    assert list(ours) == list(theirs)
    return {}


def by_handle(scene: Connection) -> Facts:
    sampler = scene.published(scene.trainer())
    handle = sampler.get_sampler_handle()
    assert b"tml-" not in base64.urlsafe_b64decode(handle), "a handle carries no key"
    copy = type(sampler).from_sampler_handle(handle)
    assert list(drawn(copy, seed=22).sequences[0].tokens) == list(
        drawn(sampler, seed=22).sequences[0].tokens
    )
    return {}


def raw(scene: Connection) -> Facts:
    """Log-probabilities are those at temperature 1, whatever temperature was sampled at: the
    service's default.
    """
    sampler = scene.sampler(base_model=scene.model)
    seen = drawn(sampler, seed=5, temperature=0.5).sequences[0]
    again = scored(sampler, ASKED + list(seen.tokens))[len(ASKED) - 1 :]
    all_close([float(value) for value in seen.logprobs], again, "sampled at 0.5 and recomputed")
    return {}


def likelier(scene: Connection) -> Facts:
    """What was trained on becomes likelier for the sampler."""
    trainer = scene.trainer()
    before = sum(all_scores(scene.published(trainer)))
    for _ in range(3):
        step(trainer, plain())
    after = sum(all_scores(scene.published(trainer)))
    assert after > before, (before, after)
    return {"before": before, "after": after}


STEPS = (
    Step("save_weights_for_sampler", named),
    Step("save_weights_and_get_sampling_client", ephemeral, proves=("sample:snapshot",)),
    Step(
        "save_weights_and_get_sampling_client, inflight",
        inflight,
        since=(0, 38),
        proves=("sample:inflight",),
    ),
    Step("create_sampling_client, base model", base_model),
    Step(
        "sample, three with stop and seed",
        three,
        proves=(
            "sample:seed",
            "id:sequences",
        ),
    ),
    Step("sample, stop tokens and texts", stops, proves=("sample:stop",)),
    Step("sample, greedy", greedy, proves=("sample:greedy",)),
    Step("compute_logprobs", compute_logprobs, proves=("sample:agrees",)),
    Step("topk_prompt_logprobs", topk_prompt, proves=("sample:topk-prompt",)),
    Step("topk_sample_logprobs", topk_sampled, since=(0, 29, 1), proves=("sample:topk-sampled",)),
    Step("target_prompt_logprobs", targets, since=(0, 30), proves=("sample:targets",)),
    Step("prompt_alt_tokens_k", alternatives, since=(0, 32), proves=("sample:alternatives",)),
    Step(
        "prompt_logprobs_last_n", last_tokens, since=(0, 33, 1), proves=("sample:prompt-logprobs",)
    ),
    Step("async forms of sampling", asynchronous, proves=("sample:seed",)),
    Step("sampling get_tokenizer", tokenizer, since=(0, 9), proves=("session:sampler-tokenizer",)),
    Step("pickled sampling client", pickled, since=(0, 14), proves=("id:int64",)),
    Step("sampler handle", by_handle, since=(0, 33, 1)),
    Step("sample at another temperature", raw),
    Step("training makes samples likelier", likelier),
)
