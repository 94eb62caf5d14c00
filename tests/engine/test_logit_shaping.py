"""Penalties, min-p and grammars: hand-computed, exact in any company, and refused where they cannot
be.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halteres.engine.grammar_trials import Grammars
from halteres.engine.protocol import (
    Called,
    Calls,
    ExtraLogprobs,
    Grammar,
    GrammarKind,
    SampleResult,
    SamplingParams,
)
from halteres.engine.stream_buffer import joined
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.logit_shaping import Follower, LogitShaper, shaped
from halteres.engine.torch.token_sampling import ShapedRows, Shaping, choose
from halteres.errors import InvalidData
from halteres.tokenizer import load_tokenizer
from halteres.tool_calls import read_calls

from .requests import packed
from .torch_fixtures import logprobs_of, prompts, running, sample, tokens_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bo"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def grammar(kind: GrammarKind, value: Any) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar(kind=kind, text=text, field="response_format")


SCHEMA = grammar("json_schema", PERSON)


def shaping(rows: int, **given: Any) -> Shaping:
    """Greedy, unless something else is given."""
    columns: dict[str, Any] = {
        "uniforms_N": np.full(rows, 0.5, np.float32),
        "temperature_N": np.zeros(rows, np.float32),
        "top_k_N": np.full(rows, -1),
        "top_p_N": np.ones(rows, np.float32),
        "min_p_N": np.zeros(rows, np.float32),
        "tempered_N": np.zeros(rows, np.bool_),
        "num_top_N": np.zeros(rows, np.int64),
    }
    return Shaping(**{**columns, **given})


def text_of(engine: TorchEngine, tokens: list[int]) -> str:
    folder = engine._info.folder
    return load_tokenizer(folder).decode(tokens, skip_special_tokens=True)


def texts(engine: TorchEngine, result: SampleResult) -> list[str]:
    return [text_of(engine, tokens_of(one)) for one in result.sequences]


# Penalties and min-p


def test_penalties_are_those_of_vllm_and_openai_computed_by_hand() -> None:
    """Repetition over prompt and answer, frequency and presence over the answer alone."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    shaper = LogitShaper(params, np.array([0, 1, 1]), None)
    for token in (2, 2, 0):
        shaper.take(token)
    logits_MV = torch.tensor([[3.0, -1.0, 2.0, 1.5]])
    #          3/2 - .5 - .25, -1*2, 2/2 - 2*.5 - .25, not there
    assert shaped(logits_MV, [shaper]).tolist() == [[0.75, -2.0, -0.25, 1.5]]
    assert logits_MV.tolist() == [[3.0, -1.0, 2.0, 1.5]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_reported_log_probabilities_are_the_models_own_under_a_penalty(temperature: float) -> None:
    """Of temperature 1, or where they are asked for of the sampling temperature; a departure from
    vLLM, whose processed ones are of the penalised logits.
    """
    logits_NV = torch.tensor([[3.0, -1.0, 2.0, 1.5]] * 2)
    other_MV = torch.tensor([[-9.0, -9.0, -9.0, 1.5]])
    shape = shaping(
        2,
        temperature_N=np.full(2, temperature, np.float32),
        tempered_N=np.array([False, True]),
    )
    for row, warm in ((0, 1.0), (1, temperature or 1.0)):
        found = choose(logits_NV, shape, ShapedRows(np.array([row]), other_MV))
        assert found.tokens_N[row] == 3
        own = np.array([3.0, -1.0, 2.0, 1.5]) / warm
        assert found.logprobs_N[row].item() == pytest.approx(
            own[3] - np.log(np.exp(own).sum()), abs=1e-6
        )
        alone = choose(logits_NV, shape)
        assert torch.equal(found.tokens_N[1 - row], alone.tokens_N[1 - row])
        assert torch.equal(found.logprobs_N[1 - row], alone.logprobs_N[1 - row])


def test_min_p_leaves_the_tokens_within_a_share_of_the_likeliest_at_the_temperature() -> None:
    """Shares .5 .25 .125 .125 at temperature 1; at 2 the square roots of those."""
    rows = 4001
    logits_NV = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(rows, -1).contiguous()
    for temperature, min_p, left in (
        (1.0, 0.3, {0, 1}),
        (1.0, 0.25, {0, 1, 2, 3}),
        (1.0, 0.6, {0}),
        (2.0, 0.6, {0, 1}),
    ):
        shape = shaping(
            rows,
            uniforms_N=np.linspace(0, 1 - 2**-23, rows, dtype=np.float32),
            temperature_N=np.full(rows, temperature, np.float32),
            min_p_N=np.full(rows, min_p, np.float32),
        )
        found = choose(logits_NV, shape)
        shares = np.bincount(found.tokens_N.numpy(), minlength=4) / rows
        assert set(np.flatnonzero(shares)) == left
        if left == {0, 1} and temperature == 1:
            assert shares == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-3)
        assert found.logprobs_N[0].item() == pytest.approx(np.log(0.5))


async def test_penalties_reach_every_row_of_an_engine(model_folder: Path) -> None:
    """Without them the built-in model says the same again and again; a frequency penalty of 2 lets
    no token be there often, and what is reported are the model's own log-probabilities.
    """
    prompt = prompts(1, seed=4)[0]
    async with running(model_folder) as engine:
        plain = await sample(engine, None, prompt, max_tokens=60, temperature=0.0)
        shy: dict[str, Any] = {"frequency_penalty": 2.0, "repetition_penalty": 1.5}
        told = await sample(engine, None, prompt, n=2, max_tokens=60, temperature=0.0, **shy)
        [again] = plain.sequences
        own = await own_logprobs(engine, prompt, tokens_of(told.sequences[0]))
    counts = [np.bincount(tokens_of(one)).max() for one in (again, *told.sequences)]
    assert max(counts[1:]) <= 6 < counts[0]
    assert told.sequences[0] == told.sequences[1]
    assert logprobs_of(told.sequences[0].logprobs) == pytest.approx(own, abs=1e-4)


async def own_logprobs(engine: TorchEngine, prompt: list[int], answer: list[int]) -> np.ndarray:
    """What the model gives the answer's tokens."""
    scored = await engine.sample(
        None,
        packed([*prompt, *answer]),
        1,
        SamplingParams(max_tokens=1),
        ExtraLogprobs(prompt_logprobs=True),
    )
    assert scored.prompt_logprobs is not None
    return logprobs_of(scored.prompt_logprobs)[len(prompt) :]


# Grammars


async def test_an_answer_is_a_value_of_its_schema_and_ends_with_it(model_folder: Path) -> None:
    """The end token follows where nothing else may, whatever the request stops at."""
    async with running(model_folder) as engine:
        for prompt in prompts(4, seed=5):
            result = await sample(engine, None, prompt, n=4, max_tokens=400, grammar=SCHEMA)
            for one, text in zip(result.sequences, texts(engine, result), strict=True):
                if one.stop_reason == "length":
                    continue
                value = json.loads(text)
                assert value["name"] in ("Ada", "Bo")
                assert 0 <= value["age"] <= 99
                assert tokens_of(one)[-1] in engine._base.eos_tokens
            assert any(one.stop_reason == "stop" for one in result.sequences)


async def test_every_kind_of_grammar_holds(model_folder: Path) -> None:
    prompt = prompts(1, seed=6)[0]
    calls = Calls(tools=(Called(name="add", arguments=PERSON), Called(name="b", arguments={})))
    async with running(model_folder) as engine:

        async def said(kind: GrammarKind, value: Any) -> list[str]:
            given = grammar(kind, value)
            result = await sample(engine, None, prompt, n=4, max_tokens=300, grammar=given)
            assert any(one.stop_reason == "stop" for one in result.sequences)
            found = zip(result.sequences, texts(engine, result), strict=True)
            return [text for one, text in found if one.stop_reason == "stop"]

        assert set(await said("regex", "(ab|ba){3}c")) <= {
            f"{a}{b}{c}c" for a in ("ab", "ba") for b in ("ab", "ba") for c in ("ab", "ba")
        }
        assert set(await said("choice", ['say "a"', "b\n// c"])) <= {'say "a"', "b\n// c"}
        assert set(await said("lark", 'start: "x" digit\ndigit: /[0-9]/')) <= {
            f"x{digit}" for digit in range(10)
        }
        for text in await said("calls", msgspec_json(calls)):
            prose, [call] = read_calls(text)
            assert (prose, call.error) == ("", None)
            assert call.name in ("add", "b")
            assert call.name == "b" or set(call.arguments or ()) == {"name", "age"}


def msgspec_json(calls: Calls) -> str:
    import msgspec

    return msgspec.json.encode(calls).decode()


async def test_an_answer_that_is_cut_in_its_middle_has_the_reason_length(
    model_folder: Path,
) -> None:
    async with running(model_folder) as engine:
        result = await sample(engine, None, prompts(1)[0], n=3, max_tokens=4, grammar=SCHEMA)
    for one in result.sequences:
        assert (one.stop_reason, len(tokens_of(one))) == ("length", 4)


async def test_log_probabilities_under_a_grammar_are_the_models_own(model_folder: Path) -> None:
    """Over the full vocabulary: also of tokens that were forced."""
    prompt = prompts(1, seed=7)[0]
    async with running(model_folder) as engine:
        result = await sample(engine, None, prompt, max_tokens=40, grammar=SCHEMA, seed=3)
        [one] = result.sequences
        own = await own_logprobs(engine, prompt, tokens_of(one))
    assert logprobs_of(one.logprobs) == pytest.approx(own, abs=1e-4)


async def test_a_stream_under_a_grammar_has_the_tokens_of_the_whole(model_folder: Path) -> None:
    prompt = packed(prompts(1, seed=8)[0])
    params = SamplingParams(
        max_tokens=120, seed=5, grammar=SCHEMA, stop_tokens=(), presence_penalty=0.5
    )
    async with running(model_folder) as engine:
        whole = await engine.sample(None, prompt, 3, params)
        pieces = [piece async for piece in engine.stream(None, prompt, 3, params)]
    for sample_number, sequence in enumerate(whole.sequences):
        found = joined([piece for piece in pieces if piece.sample == sample_number])
        assert found.tokens == sequence.tokens
        assert found.logprobs == sequence.logprobs
        assert found.stop_reason == sequence.stop_reason


async def test_rows_that_lose_their_slots_and_other_engines_write_the_same(
    model_folder: Path,
) -> None:
    """So an engine's successor answers as it would have."""
    prompt, results = prompts(1, seed=12)[0], list[SampleResult]()
    for limits in (Limits(), Limits(decode_rows=5), Limits(cache_bytes=200_000)):
        async with running(model_folder, limits) as engine:
            shape: dict[str, Any] = {"grammar": SCHEMA, "repetition_penalty": 1.3, "min_p": 0.05}
            results.append(await sample(engine, None, prompt, n=14, seed=2, max_tokens=60, **shape))
    assert all(result == results[0] for result in results)


async def test_a_grammar_is_tried_and_compiled_once_and_few_are_kept(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.engine.grammar_trials.KEPT", 2)
    async with running(model_folder) as engine:
        found = engine._grammars
        asked = [sample(engine, None, p, max_tokens=3, grammar=SCHEMA) for p in prompts(6)]
        await asyncio.gather(*asked)
        assert found.num_compiled == 1
        for letter in "ab":
            await sample(engine, None, [5], max_tokens=3, grammar=grammar("regex", letter))
        assert found.num_compiled == 3
        assert len(found._known) == 2
        await sample(engine, None, [5], max_tokens=3, grammar=SCHEMA)
        assert found.num_compiled == 4


BAD: dict[str, tuple[Grammar, str]] = {
    "no type": (grammar("json_schema", {"type": "strin"}), "strin"),
    "unknown format": (grammar("json_schema", {"type": "string", "format": "nope"}), "nope"),
    "remote reference": (grammar("json_schema", {"$ref": "https://example.com/x"}), "example.com"),
    "a file": (grammar("json_schema", {"$ref": "file:///etc/passwd"}), "passwd"),
    "unsatisfiable": (
        grammar("json_schema", {"required": ["a"], "properties": {"a": False}, "type": "object"}),
        "nsatisfiable",
    ),
    "not implemented": (
        grammar("json_schema", {"not": {}, "x-guidance": {"lenient": True}}),
        "not",
    ),
    "no JSON": (grammar("json_schema", "[1"), ""),
    "too deep": (grammar("json_schema", '{"items":' * 300 + "{}" + "}" * 300), ""),
    "no regular expression": (grammar("regex", "(a"), "unclosed"),
    "look-ahead": (grammar("regex", "(?=a)b"), "look-around"),
    "EBNF": (grammar("lark", 'root ::= "a"'), ""),
    "no text": (grammar("lark", "start: NONE\nNONE: /a/ & /b/"), ""),
    "too large": (grammar("regex", "a" * 200_000), "131072"),
    "slow to compile": (grammar("json_schema", {"type": "integer", "multipleOf": 1000003}), ""),
    "large in memory": (grammar("regex", "x(a{1000}){1000}"), ""),
    "exponential": (
        grammar(
            "json_schema",
            {
                "allOf": [
                    {"anyOf": [{"required": [a, b]} for b in "xyz"]} for a in "abcdefghijklmnop"
                ]
            },
        ),
        "",
    ),
}


async def test_a_grammar_that_cannot_be_used_is_refused_before_anything_is_sampled(
    model_folder: Path,
) -> None:
    """In a sentence that names its field; the engine goes on, and so does the process that tried
    them, or another.
    """
    async with running(model_folder) as engine:
        for name, (bad, word) in BAD.items():
            with pytest.raises(InvalidData) as refused:
                await sample(engine, None, [5, 6], grammar=bad)
            error = refused.value
            assert error.details["param"] == "response_format", name
            assert "`response_format`" in error.what, name
            assert word in error.sentence, (name, error.sentence)
        assert engine._worker._sampler.num_rows == 0
        await sample(engine, None, [5, 6], max_tokens=3, grammar=SCHEMA)


async def test_a_grammar_that_fails_under_way_fails_its_request_alone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_folder) as engine:
        alone = await sample(engine, None, [5, 6], n=2, max_tokens=30, seed=1)
        with monkeypatch.context() as patch:
            patch.setattr("halteres.engine.torch.logit_shaping.SLOWEST_MASK_S", -1.0)
            bad = sample(engine, None, [7, 8], n=3, max_tokens=30, grammar=SCHEMA)
            good = sample(engine, None, [5, 6], n=2, max_tokens=30, seed=1)
            failed, among = await asyncio.gather(bad, good, return_exceptions=True)
        assert isinstance(failed, InvalidData)
        assert "`response_format`" in failed.what
        assert among == alone
        assert (await sample(engine, None, [7, 8], max_tokens=3, grammar=SCHEMA)).sequences


class Stuck:
    """A matcher and its vocabulary, of a grammar that nothing fits any more."""

    def compute_bitmask(self) -> bytes:
        return b"\0"

    def is_error(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        return False

    def allowed(self, masks: list[bytes]) -> np.ndarray:
        return np.zeros((len(masks), 4), np.bool_)


def test_a_row_fails_where_nothing_can_follow_or_a_token_is_not_taken() -> None:
    for cause in ("no token", "not taken"):
        follower = Follower(Stuck(), Stuck(), "guided_regex")
        shaper = LogitShaper(SamplingParams(), np.array([0]), follower)
        if cause == "no token":
            shaped(torch.zeros(1, 4), [shaper])
        else:
            shaper.take(2)
        assert shaper.failure is not None
        assert "`guided_regex`" in shaper.failure.what


async def test_a_tokenizer_that_cannot_be_used_refuses_grammars_in_a_sentence(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": "none"}')
    found = Grammars(tmp_path, 100, (0,))
    try:
        with pytest.raises(InvalidData, match="tokenizer"):
            await found.find(SCHEMA)
    finally:
        found.close()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("min_p", (-0.1, 1.1, float("nan"))),
        ("repetition_penalty", (0.0, -1.0, float("inf"))),
        ("presence_penalty", (-2.1, 2.1, float("nan"))),
        ("frequency_penalty", (-2.1, 2.1)),
    ],
)
async def test_values_out_of_range_are_refused_by_name(
    model_folder: Path, field: str, values: tuple[float, ...]
) -> None:
    async with running(model_folder) as engine:
        for value in values:
            with pytest.raises(InvalidData, match=field) as refused:
                await sample(engine, None, [5, 6], **{field: value})
            assert refused.value.details["param"] == field
