"""The scripted engine keeps the promises that the real one makes, without weights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from halteres.engine.protocol import Adam, ExtraLogprobs, LoraConfig, LossSpec, SamplingParams
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.errors import Conflict, InvalidData, NotFound, NotReady, ServerError, UserError

from .requests import (
    CROSS_ENTROPY,
    EVERYTHING,
    IMPORTANCE_SAMPLING,
    PROMPT,
    array,
    floats,
    from_folder,
    packed,
    rewarded,
    streamed,
    unpacked,
    weighted,
)

DATUM = weighted([5, 6, 7], [6, 7, 8])


async def stepped(engine: ScriptedEngine, adapter: str, steps: int = 1) -> None:
    for _ in range(steps):
        await engine.forward_backward(adapter, (DATUM,), CROSS_ENTROPY)
        await engine.optim_step(adapter, Adam())


@pytest.fixture
async def engine(scripted: ScriptedEngine) -> ScriptedEngine:
    await scripted.create_adapter("a", LoraConfig(rank=4, seed=1))
    return scripted


async def test_sampled_logprobs_are_those_the_pass_computes_at_the_same_version(
    engine: ScriptedEngine,
) -> None:
    await stepped(engine, "a", 3)
    assert (await engine.snapshot("a", "s")).version == 3
    sampled = await engine.sample(
        "s", packed(PROMPT), 2, SamplingParams(max_tokens=8, seed=4, stop_tokens=())
    )
    for sequence in sampled.sequences:
        tokens = [*PROMPT, *unpacked(sequence.tokens)]
        passed = await engine.forward_backward(
            "a", (weighted(tokens[:-1], tokens[1:]),), CROSS_ENTROPY, forward_only=True
        )
        assert floats(passed.logprobs[0])[len(PROMPT) - 1 :] == floats(sequence.logprobs)


async def test_sampled_tokens_are_a_function_of_version_prompt_seed_and_index(
    engine: ScriptedEngine,
) -> None:
    params = SamplingParams(max_tokens=6, seed=9, stop_tokens=())
    four = (await engine.sample(None, packed(PROMPT), 4, params)).sequences
    two = (await engine.sample(None, packed(PROMPT), 2, params)).sequences
    assert four[:2] == two
    assert len({sequence.tokens for sequence in four}) == 4
    for other in (
        await engine.sample(None, packed([3, *PROMPT[1:]]), 4, params),
        await engine.sample(
            None, packed(PROMPT), 4, SamplingParams(max_tokens=6, seed=10, stop_tokens=())
        ),
    ):
        assert other.sequences != four
    await stepped(engine, "a")
    await engine.snapshot("a", "v1")
    assert (await engine.sample("v1", packed(PROMPT), 4, params)).sequences != four


async def test_logprobs_are_normalised_over_the_vocabulary(engine: ScriptedEngine) -> None:
    size = (await engine.info()).vocab_size
    row = [7] * size
    passed = await engine.forward_backward(
        "a", (weighted(row, range(size)),), CROSS_ENTROPY, forward_only=True
    )
    assert np.exp(floats(passed.logprobs[0])).sum() == pytest.approx(1.0, abs=1e-5)


async def test_a_snapshot_keeps_its_version_while_training_goes_on(engine: ScriptedEngine) -> None:
    await engine.snapshot("a", "s")
    before = await engine.sample("s", packed(PROMPT), 1, SamplingParams(max_tokens=5))
    await stepped(engine, "a", 2)
    assert await engine.sample("s", packed(PROMPT), 1, SamplingParams(max_tokens=5)) == before
    assert before.version == 0


async def test_greedy_takes_the_likeliest_token(engine: ScriptedEngine) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0, stop_tokens=())
    sampled = await engine.sample(None, packed(PROMPT), 2, greedy)
    assert sampled.sequences[0] == sampled.sequences[1]
    narrow = SamplingParams(max_tokens=4, top_k=1, seed=3, stop_tokens=())
    assert (await engine.sample(None, packed(PROMPT), 1, narrow)).sequences[0] == sampled.sequences[
        0
    ]
    nucleus = SamplingParams(max_tokens=4, top_p=1e-9, seed=3, stop_tokens=())
    assert (await engine.sample(None, packed(PROMPT), 1, nucleus)).sequences[
        0
    ] == sampled.sequences[0]


async def test_max_tokens_cuts_and_stop_tokens_stop(engine: ScriptedEngine) -> None:
    free = SamplingParams(max_tokens=64, seed=2, stop_tokens=())
    (whole,) = (await engine.sample(None, packed(PROMPT), 1, free)).sequences
    assert len(unpacked(whole.tokens)) == 64
    assert whole.stop_reason == "length"
    third = unpacked(whole.tokens)[2]
    stopping = SamplingParams(max_tokens=64, seed=2, stop_tokens=(third,))
    (cut,) = (await engine.sample(None, packed(PROMPT), 1, stopping)).sequences
    assert unpacked(cut.tokens) == unpacked(whole.tokens)[: unpacked(whole.tokens).index(third) + 1]
    assert cut.stop_reason == "stop"


async def test_answers_end_with_the_end_token_by_default(engine: ScriptedEngine) -> None:
    sampled = await engine.sample(None, packed(PROMPT), 32, SamplingParams(max_tokens=200))
    reasons = {sequence.stop_reason for sequence in sampled.sequences}
    assert reasons == {"stop"}
    assert {unpacked(sequence.tokens)[-1] for sequence in sampled.sequences} == {2}


async def test_a_stop_string_ends_the_answer_that_holds_it(engine: ScriptedEngine) -> None:
    free = SamplingParams(max_tokens=40, seed=2, stop_tokens=())
    (whole,) = (await engine.sample(None, packed(PROMPT), 1, free)).sequences
    stop = engine._tokenizer.decode(unpacked(whole.tokens)[4:6])
    params = SamplingParams(max_tokens=40, seed=2, stop_tokens=(), stop_strings=(stop,))
    (cut,) = (await engine.sample(None, packed(PROMPT), 1, params)).sequences
    assert stop in engine._tokenizer.decode(unpacked(cut.tokens))
    assert len(cut.tokens) <= 6 * 4
    assert cut.stop_reason == "stop"


async def test_prompt_logprobs_begin_with_nan(engine: ScriptedEngine) -> None:
    sampled = await engine.sample(
        None, packed(PROMPT), 1, SamplingParams(max_tokens=1), ExtraLogprobs(prompt_logprobs=True)
    )
    assert sampled.prompt_logprobs is not None
    values = floats(sampled.prompt_logprobs)
    assert len(values) == len(PROMPT)
    assert np.isnan(values[0])
    assert np.isfinite(values[1:]).all()


async def test_losses_are_sums_over_tokens(engine: ScriptedEngine) -> None:
    only = (await engine.forward_backward("a", (DATUM,), CROSS_ENTROPY)).metrics["loss:sum"]
    twice = await engine.forward_backward("a", (DATUM, DATUM), CROSS_ENTROPY)
    assert twice.metrics["loss:sum"] == pytest.approx(2 * only)
    assert only == pytest.approx(-sum(floats(twice.logprobs[0])))
    on_policy = rewarded([5, 6, 7], [6, 7, 8], floats(twice.logprobs[0]), 0.5)
    passed = await engine.forward_backward("a", (on_policy,), IMPORTANCE_SAMPLING)
    assert passed.metrics["loss:sum"] == pytest.approx(-1.5)


async def test_a_step_needs_a_gradient_and_counts_versions(engine: ScriptedEngine) -> None:
    with pytest.raises(UserError, match="no gradient"):
        await engine.optim_step("a", Adam())
    await engine.forward_backward("a", (DATUM,), CROSS_ENTROPY, forward_only=True)
    with pytest.raises(UserError, match="no gradient"):
        await engine.optim_step("a", Adam())
    await stepped(engine, "a", 2)
    assert (await engine.snapshot("a", "s")).version == 2


@pytest.mark.parametrize(
    ("datum", "loss", "says"),
    [
        (weighted([5, 672], [6, 7]), "cross_entropy", "token 672 at position 1"),
        (weighted([5, 6], [6, -1]), "cross_entropy", "'target_tokens' holds token -1"),
        (weighted([5, 6], [6]), "cross_entropy", r"shape \[1\]"),
        (weighted([5, 6], [6, 7], [1.0, float("nan")]), "cross_entropy", "NaN"),
        (weighted([5, 6], [6, 7]), "importance_sampling", "no loss function input 'logprobs'"),
        (weighted([], []), "cross_entropy", "empty"),
        (weighted([5] * 2049, [5] * 2049), "cross_entropy", "2048"),
        (weighted([5], [6]), "cross_entrop", "Did you mean 'cross_entropy'"),
    ],
)
async def test_a_bad_datum_is_refused_and_leaves_no_trace(
    engine: ScriptedEngine, datum, loss: str, says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        await engine.forward_backward(
            "a", (DATUM, datum) if loss != "importance_sampling" else (datum,), LossSpec(name=loss)
        )
    with pytest.raises(UserError, match="no gradient"):
        await engine.optim_step("a", Adam())


async def test_a_misshapen_array_is_refused(engine: ScriptedEngine) -> None:
    datum = weighted([5, 6], [6, 7])
    datum.inputs["weights"] = array([[1.0, 1.0]])
    with pytest.raises(InvalidData, match=r"shape \[1, 2\]"):
        await engine.forward_backward("a", (datum,), CROSS_ENTROPY)


@pytest.mark.parametrize(
    ("prompt", "num_samples", "params", "says"),
    [
        ([], 1, SamplingParams(), "empty"),
        ([700], 1, SamplingParams(), "token 700"),
        ([5], 0, SamplingParams(), "num_samples"),
        ([5], 1, SamplingParams(max_tokens=0), "max_tokens is out of range: 0"),
        ([5], 1, SamplingParams(top_k=-2), "top_k is out of range: -2"),
        ([5], 1, SamplingParams(temperature=-1), "temperature is out of range: -1"),
        ([5], 1, SamplingParams(top_p=0), "top_p"),
        ([5] * 2048, 1, SamplingParams(), "no room"),
    ],
)
async def test_a_bad_sampling_request_is_refused(
    engine: ScriptedEngine, prompt: list[int], num_samples: int, params: SamplingParams, says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        await engine.sample(None, packed(prompt), num_samples, params)


async def test_without_max_tokens_an_answer_may_fill_the_context(engine: ScriptedEngine) -> None:
    sampled = await engine.sample(None, packed([5] * 2040), 1, SamplingParams(stop_tokens=()))
    assert len(unpacked(sampled.sequences[0].tokens)) == 8


async def test_saving_writes_a_peft_folder_and_loading_restores_the_version(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    await stepped(engine, "a", 3)
    saved = await engine.save("a", str(tmp_path / "w"), optimizer=True)
    files = sorted(file.name for file in (tmp_path / "w").iterdir())
    assert files == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert saved.version == 3
    assert saved.size_bytes == sum(file.stat().st_size for file in (tmp_path / "w").iterdir())
    assert json.loads((tmp_path / "w" / "state.json").read_text())["version"] == 3
    assert json.loads((tmp_path / "w" / "adapter_config.json").read_text())["r"] == 4
    assert [
        name for name in load_file(tmp_path / "w" / "adapter_model.safetensors") if "lora_A" in name
    ]
    assert (await engine.load("b", str(tmp_path / "w"), optimizer=True)).version == 3
    assert [file.name for file in tmp_path.iterdir()] == ["w"]


async def test_a_snapshot_survives_saving_and_loading(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    await stepped(engine, "a")
    await engine.snapshot("a", "s")
    await engine.save_snapshot("s", str(tmp_path / "s"))
    assert await engine.hold("t", from_folder(tmp_path / "s")) == 1
    params = SamplingParams(max_tokens=4)
    assert await engine.sample("s", packed(PROMPT), 2, params) == await engine.sample(
        "t", packed(PROMPT), 2, params
    )
    with pytest.raises(NotFound, match=r"optimizer\.safetensors"):
        await engine.load("b", str(tmp_path / "s"), optimizer=True)
    assert (await engine.load("b", str(tmp_path / "s"), optimizer=False)).version == 1


async def test_saving_replaces_a_folder_whole(engine: ScriptedEngine, tmp_path: Path) -> None:
    await engine.save("a", str(tmp_path / "w"), optimizer=True)
    await stepped(engine, "a")
    await engine.save("a", str(tmp_path / "w"), optimizer=False)
    assert not (tmp_path / "w" / "optimizer.safetensors").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["w"]


async def test_a_folder_that_cannot_be_written_is_told_and_leaves_nothing(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ServerError, match="could not be written"):
        await engine.save("a", str(tmp_path / "file" / "w"), optimizer=False)


async def test_names_that_are_not_there_are_told(engine: ScriptedEngine, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no adapter 'x'"):
        await engine.forward_backward("x", (DATUM,), CROSS_ENTROPY)
    with pytest.raises(NotFound, match="no snapshot 'x'"):
        await engine.sample("x", packed(PROMPT), 1, SamplingParams())
    with pytest.raises(NotFound, match=r"adapter_config\.json"):
        await engine.load("b", str(tmp_path / "none"), optimizer=False)
    with pytest.raises(Conflict, match="exists"):
        await engine.create_adapter("a", LoraConfig(rank=4))
    await engine.drop("x")
    await engine.drop("a")
    with pytest.raises(NotFound):
        await engine.save("a", str(tmp_path / "w"), optimizer=False)


async def test_calls_of_one_adapter_run_in_the_order_they_came(engine: ScriptedEngine) -> None:
    held = engine.block("forward_backward")
    first = asyncio.create_task(engine.forward_backward("a", (DATUM,), CROSS_ENTROPY))
    second = asyncio.create_task(engine.optim_step("a", Adam()))
    async with asyncio.timeout(5):
        await held.inside()
        sampled = await engine.sample(None, packed(PROMPT), 1, SamplingParams(max_tokens=1))
        assert sampled.version == 0
        assert not second.done()
        held.release()
        await first
        assert (await second).version == 1


async def test_failures_come_as_planned_and_change_nothing(engine: ScriptedEngine) -> None:
    engine.fail_next("forward_backward", ServerError("The device is lost."))
    with pytest.raises(ServerError, match="device is lost"):
        await engine.forward_backward("a", (DATUM,), CROSS_ENTROPY)
    await stepped(engine, "a")
    assert engine.calls["forward_backward"] == 2


async def test_closing_fails_what_is_held_inside(engine: ScriptedEngine) -> None:
    held = engine.block("sample")
    sampling = asyncio.create_task(engine.sample(None, packed(PROMPT), 1, SamplingParams()))
    async with asyncio.timeout(5):
        await held.inside()
        await engine.close()
        with pytest.raises(NotReady):
            await sampling


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import halteres.engine.scripted.engine, "
        "halteres.engine.process"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_a_saved_folder_is_as_readable_as_any_other(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    (tmp_path / "any").mkdir()
    await engine.save("a", str(tmp_path / "w"), optimizer=False)
    assert (tmp_path / "w").stat().st_mode == (tmp_path / "any").stat().st_mode


async def test_a_folder_that_cannot_be_replaced_still_stands(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.save("a", str(tmp_path / "w"), optimizer=True)
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name.startswith(".new-"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ServerError, match="could not be written"):
        await engine.save("a", str(tmp_path / "w"), optimizer=False)
    assert (tmp_path / "w" / "optimizer.safetensors").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["w"]


async def test_a_special_token_is_text_to_a_stop_string(engine: ScriptedEngine) -> None:
    end = engine._tokenizer.token(2)
    params = SamplingParams(max_tokens=400, seed=2, stop_tokens=(), stop_strings=(end,))
    (sequence,) = (await engine.sample(None, packed(PROMPT), 1, params)).sequences
    assert (unpacked(sequence.tokens)[-1], sequence.stop_reason) == (2, "stop")


async def test_what_is_asked_for_beside_tokens_is_the_models(engine: ScriptedEngine) -> None:
    """Everything is a pure function of the request, and asking moves no token."""
    await stepped(engine, "a")
    await engine.snapshot("a", "s")
    params = SamplingParams(max_tokens=6, seed=4, stop_tokens=())
    result = await engine.sample("s", packed(PROMPT), 2, params, EVERYTHING)
    assert repr(await engine.sample("s", packed(PROMPT), 2, params, EVERYTHING)) == repr(result)
    plain = await engine.sample("s", packed(PROMPT), 2, params)
    assert [s.tokens for s in plain.sequences] == [s.tokens for s in result.sequences]
    rows = engine._bigram(1).logprobs(np.asarray(PROMPT[:-1]))
    assert result.topk_prompt is not None
    assert (result.topk_prompt.k, result.topk_prompt.length) == (3, len(PROMPT))
    ids = np.frombuffer(result.topk_prompt.ids, np.int32).reshape(-1, 3)
    known = np.frombuffer(result.topk_prompt.logprobs, np.float32).reshape(-1, 3)
    assert ids[0].tolist() == [0, 0, 0]
    assert known[0].tolist() == [-99999.0] * 3
    assert np.array_equal(known[1:], -np.sort(-rows, axis=1)[:, :3])
    assert result.target_logprobs is not None
    scored = np.frombuffer(result.target_logprobs.data, np.float32).reshape(4, 2)
    assert scored.tolist() == [
        [rows[0, 20], 0.0],
        [0.0, 0.0],
        [rows[2, 41], rows[2, 0]],
        [rows[3, 7], rows[3, 671]],
    ]
    assert result.alternatives is not None
    drawn = np.frombuffer(result.alternatives.ids, np.int32).reshape(4, 5)
    assert np.array_equal(
        np.frombuffer(result.alternatives.logprobs, np.float32).reshape(4, 5),
        np.take_along_axis(rows, drawn, 1),
    )
    for sequence in result.sequences:
        assert sequence.top is not None
        assert (sequence.top.k, sequence.top.length) == (2, 6)


async def test_alternatives_are_greedy_at_temperature_zero_and_vary_with_the_seed(
    engine: ScriptedEngine,
) -> None:
    async def drawn(**params: float) -> bytes:
        shape = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
        result = await engine.sample(None, packed(PROMPT), 1, shape, ExtraLogprobs(alternatives=64))
        assert result.alternatives is not None
        return result.alternatives.ids

    rows = engine._bigram(0).logprobs(np.asarray(PROMPT[:-1]))
    assert unpacked(await drawn(temperature=0)) == np.repeat(rows.argmax(1), 64).tolist()
    assert await drawn(seed=1) != await drawn(seed=2)
    assert len(set(unpacked(await drawn(seed=1)))) > 32


async def test_log_probabilities_of_the_sampling_temperature_are_on_request(
    engine: ScriptedEngine,
) -> None:
    shape = {"max_tokens": 3, "seed": 4, "stop_tokens": (), "temperature": 0.5}
    warm = await engine.sample(
        None, packed(PROMPT), 1, SamplingParams(**shape, logprobs="tempered")
    )
    raw = await engine.sample(None, packed(PROMPT), 1, SamplingParams(**shape))
    tokens = unpacked(warm.sequences[0].tokens)
    assert tokens == unpacked(raw.sequences[0].tokens)
    rows = (
        engine._bigram(0).logprobs(np.asarray([PROMPT[-1], *tokens[:-1]])).astype(np.float64) / 0.5
    )
    expected = (rows - np.log(np.exp(rows).sum(1, keepdims=True)))[range(3), tokens]
    assert floats(warm.sequences[0].logprobs) == pytest.approx(expected, abs=1e-5)
    cold = [
        await engine.sample(
            None, packed(PROMPT), 1, SamplingParams(max_tokens=3, temperature=0, logprobs=kind)
        )  # type: ignore[arg-type]
        for kind in ("raw", "tempered")
    ]
    assert cold[0] == cold[1]


async def test_a_stream_tells_what_sample_answers(engine: ScriptedEngine) -> None:
    params, extra = SamplingParams(max_tokens=20, seed=4), ExtraLogprobs(topk_sampled=2)
    told = await streamed(engine.stream(None, packed(PROMPT), 5, params, extra))
    assert told == (await engine.sample(None, packed(PROMPT), 5, params, extra)).sequences
    with pytest.raises(InvalidData, match="sampled tokens alone"):
        await streamed(
            engine.stream(None, packed(PROMPT), 1, params, ExtraLogprobs(prompt_logprobs=True))
        )


async def test_a_stream_can_be_held_before_each_piece_and_counts_while_it_is_read(
    engine: ScriptedEngine,
) -> None:
    held = engine.block("piece")
    reading = asyncio.create_task(
        streamed(engine.stream(None, packed(PROMPT), 1, SamplingParams(max_tokens=4)))
    )
    async with asyncio.timeout(5):
        await held.inside()
        assert (engine.calls["stream"], engine.under_way["stream"]) == (1, 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert engine.under_way["stream"] == 0


@pytest.mark.parametrize("rank", [0, 513, 10**9])
async def test_an_absurd_rank_is_refused(engine: ScriptedEngine, rank: int) -> None:
    with pytest.raises(InvalidData, match="rank"):
        await engine.create_adapter("b", LoraConfig(rank=rank))
