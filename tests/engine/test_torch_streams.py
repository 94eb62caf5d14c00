"""Streams of the torch engine: the tokens of `sample`, told while they are written; and every way
of stopping.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.requirements import proves
from deadlines import until

from halteres.engine.protocol import ExtraLogprobs, Piece, SamplingParams
from halteres.engine.stream_buffer import PieceQueue
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.rows import Newest, Row
from halteres.errors import InvalidData, NotReady, UserError
from halteres.tokenizer import load_tokenizer

from .requests import packed, streamed
from .torch_fixtures import lists, prompts, running, sample, tokens_of, trained

pytestmark = pytest.mark.runs

PROMPT = prompts(1, seed=41)[0]


def stream(
    engine: TorchEngine, snapshot: str | None = None, n: int = 1, **params: Any
) -> AsyncIterator[Piece]:
    extra = params.pop("extra", ExtraLogprobs())
    chosen = SamplingParams(**{"max_tokens": 12, "stop_tokens": (), **params})
    return engine.stream(snapshot, packed(PROMPT), n, chosen, extra)


@proves("inference:streaming")
async def test_a_stream_tells_what_sample_answers_bit_for_bit(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.snapshot("a", "s")
        shape: dict[str, Any] = {
            "n": 5,
            "seed": 7,
            "max_tokens": 40,
            "temperature": 1.2,
            "stop_tokens": None,
        }
        told = await streamed(stream(engine, "s", **shape, extra=ExtraLogprobs(topk_sampled=3)))
        chosen = SamplingParams(**{key: value for key, value in shape.items() if key != "n"})
        whole = await engine.sample("s", packed(PROMPT), 5, chosen, ExtraLogprobs(topk_sampled=3))
    assert told == whole.sequences


async def test_pieces_come_while_the_answer_is_being_written(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        pieces = stream(engine, n=2, max_tokens=400)
        first = await anext(pieces)
        assert first.stop_reason is None
        assert len(first.tokens) < 4 * 400
        assert first.version == 0
        rest = [piece async for piece in pieces]
        assert {piece.sample for piece in rest if piece.stop_reason == "length"} == {0, 1}
        assert sum(len(piece.tokens) for piece in (first, *rest)) == 4 * 2 * 400


async def test_a_reader_that_goes_away_frees_the_rows(model_folder: Path) -> None:
    async with running(model_folder, Limits(decode_rows=8)) as engine:
        leaving = stream(engine, n=8, max_tokens=2000)
        await anext(leaving)
        await leaving.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            assert len((await sample(engine, None, [4, 5, 6], n=8, max_tokens=4)).sequences) == 8

        async def read() -> None:
            async for _ in stream(engine, n=8, max_tokens=2000):
                reading.set()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        async with asyncio.timeout(20):
            await reading.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await sample(engine, None, [4, 5, 6], n=8, max_tokens=4)
            await until(lambda: not engine._worker._sampler.busy)


async def test_a_stream_that_cannot_be_is_refused(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        for extra in (
            ExtraLogprobs(prompt_logprobs=True),
            ExtraLogprobs(topk_prompt=1),
            ExtraLogprobs(alternatives=1),
        ):
            with pytest.raises(InvalidData, match="sampled tokens alone"):
                await anext(stream(engine, extra=extra))
        with pytest.raises(InvalidData, match="max_tokens"):
            await anext(stream(engine, max_tokens=0))


async def test_a_stream_ends_with_what_went_wrong(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await trained(engine, steps=1)
        await engine.snapshot("a", "bad")
        flat = engine._snapshots["bad"].flat
        assert flat is not None
        flat.fill_(float("nan"))
        for lora in engine._snapshots["bad"].weights.values():
            lora.fuse()
        with pytest.raises(UserError, match="diverged"):
            await streamed(stream(engine, "bad"))
        long = stream(engine, max_tokens=2000)
        await anext(long)
        await engine.close()
        with pytest.raises(NotReady, match="closed"):
            await streamed(long)


async def test_what_a_slow_reader_missed_comes_as_one_piece_per_sequence() -> None:
    pieces = PieceQueue()
    for token in range(5):
        for number in (0, 1):
            reason = "length" if token == 4 else None
            pieces.put(
                Piece(
                    sample=number,
                    tokens=packed([token]),
                    logprobs=b"\0" * 4,
                    version=3,
                    stop_reason=reason,
                )  # type: ignore[arg-type]
            )
    pieces.end()
    read = [piece async for piece in pieces.read()]
    assert [(piece.sample, piece.tokens, piece.stop_reason) for piece in read] == [
        (0, packed(range(5)), "length"),
        (1, packed(range(5)), "length"),
    ]


async def test_stop_strings_of_every_kind(model_folder: Path) -> None:
    """Several; one that spans tokens; one of several bytes per character; none, where not even the
    end token stops.
    """
    tokenizer = load_tokenizer(str(model_folder))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}])
    async with running(model_folder) as engine:
        free = await sample(engine, None, chat, n=8, seed=2, max_tokens=60, temperature=1.5)
        # an empty stop list: EOS is a token like others
        assert any(2 in tokens_of(s)[:-1] for s in free.sequences)
        assert {s.stop_reason for s in free.sequences} == {"length"}
        for sequence in free.sequences:
            tokens = tokens_of(sequence)
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            stop = text[len(text) // 3 :][:6]
            stops = ("no such text", stop, text[-3:])
            number = free.sequences.index(sequence)
            cut = await sample(
                engine, None, chat, n=8, seed=2, max_tokens=60, temperature=1.5, stop_strings=stops
            )
            ended = tokens_of(cut.sequences[number])
            said = tokenizer.decode(ended, skip_special_tokens=False)
            before = tokenizer.decode(ended[:-1], skip_special_tokens=False)
            assert ended == tokens[: len(ended)]
            assert any(stop in said for stop in stops)
            assert not any(stop in before for stop in stops)
            assert cut.sequences[number].stop_reason == "stop"


async def test_a_stop_string_of_several_bytes_a_character_is_seen_when_its_last_byte_comes(
    model_folder: Path,
) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    greek = tokenizer.encode("λ")
    assert len(greek) > 1  # bytes that are tokens of their own
    answer = [*tokenizer.encode("ab "), *greek, *tokenizer.encode(" c")]
    async with running(model_folder) as engine:
        request = await engine._request(
            None,
            packed(PROMPT),
            1,
            SamplingParams(max_tokens=40, stop_tokens=(), stop_strings=("λ",)),
            ExtraLogprobs(),
        )
        row = Row(request, 0)
        ends = [
            row.take(Newest(token, -1.0))
            for token in answer[: len(tokenizer.encode("ab ")) + len(greek)]
        ]
    assert ends == [False] * (len(ends) - 1) + [True]
    assert request.future.result(0).sequences[0].stop_reason == "stop"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"stop_strings": ("",)}, "strings of 1 to 1024 bytes"),
        ({"stop_strings": ("x" * 1025,)}, "strings of 1 to 1024 bytes"),
        ({"stop_strings": ("x",) * 65}, "at most 64"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
async def test_parameters_out_of_range_are_refused(
    model_folder: Path, params: dict[str, Any], says: str
) -> None:
    async with running(model_folder) as engine:
        with pytest.raises(InvalidData, match=says):
            await sample(engine, None, PROMPT, **params)


async def test_absurd_but_lawful_parameters_do_what_they_say(model_folder: Path) -> None:
    """A surrogate half stops nothing, any integer is a seed, top_k beyond the vocabulary is off,
    1e-30 is greedy.
    """
    async with running(model_folder) as engine:
        plain = await sample(engine, None, PROMPT, seed=1)
        for same in ({"top_k": 10**30}, {"top_k": 0}, {"stop_strings": ("\ud800",)}):
            assert await sample(engine, None, PROMPT, seed=1, **same) == plain
        greedy = await sample(engine, None, PROMPT, temperature=0.0)
        assert (await sample(engine, None, PROMPT, temperature=1e-30)).sequences == greedy.sequences
        assert (await sample(engine, None, PROMPT, seed=5, top_k=1)).sequences == greedy.sequences
        assert (
            await sample(engine, None, PROMPT, seed=5, top_p=1e-9)
        ).sequences == greedy.sequences
        assert (
            len((await sample(engine, None, PROMPT, seed=-(2**70), temperature=1e6)).sequences) == 1
        )


@proves("sample:top")
async def test_top_k_and_top_p_together_keep_what_both_keep(model_folder: Path) -> None:
    """Every token of 200 answers is among the 4 likeliest, and no likelier ones hold 60 % before
    it.
    """
    async with running(model_folder) as engine:
        chosen = SamplingParams(
            max_tokens=4, stop_tokens=(), seed=3, top_k=4, top_p=0.6, temperature=1.0
        )
        result = await engine.sample(
            None, packed(PROMPT), 200, chosen, ExtraLogprobs(topk_sampled=8)
        )
    for sequence in result.sequences:
        ids, logprobs = lists(sequence.top)
        for token, row, lps in zip(tokens_of(sequence), ids, logprobs, strict=True):
            rank = list(row).index(token)
            assert rank < 4
            assert np.exp(lps[:rank]).sum() < 0.6
