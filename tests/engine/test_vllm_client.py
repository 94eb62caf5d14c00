"""vLLM's wire: what is sent, what is made of its answers, and every way in which it fails."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from deadlines import until
from safetensors.numpy import load_file, save_file

from halteres.engine.folders import digest
from halteres.engine.protocol import (
    Array,
    Called,
    Calls,
    EngineGone,
    ExtraLogprobs,
    Grammar,
    LoraConfig,
    SamplingParams,
    Weights,
    WeightsDamaged,
)
from halteres.engine.scripted import engine as scripted
from halteres.engine.vllm.adapters import LARGEST, AdapterFolders, Projections
from halteres.engine.vllm.answers import Generated
from halteres.engine.vllm.client import Demands, VllmSamples
from halteres.engine.vllm.requests import TokenPrompt
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotFound, ServerError
from halteres.models import TINY

from . import recorded_vllm
from .recorded_vllm import (
    ABORTED,
    CUT,
    FAILING,
    FIRST,
    FLAWS,
    HANGING,
    NAN,
    RECORDED,
    SLOW_S,
    RecordedVllm,
    in_thread,
)

WAIT_S = 20


def packed(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def unpacked(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


PROMPT = packed(5, 60, 70, 80)


@contextmanager
def vllm(*flaws: str) -> Iterator[RecordedVllm]:
    server = in_thread(*flaws)
    try:
        yield server
    finally:
        server.end()


@asynccontextmanager
async def opened(
    server: RecordedVllm, model_folder: Path, place: Path, **demands: object
) -> AsyncIterator[VllmSamples]:
    wanted = {"context": 512, "places": 4, **demands}
    client = VllmSamples(
        Demands(name=TINY, folder=model_folder, **wanted),  # type: ignore[arg-type]
        Projections.of(model_folder),
        AdapterFolders(place),
        address=f"http://127.0.0.1:{server.socket.getsockname()[1]}",
    )
    try:
        await client.open()
        yield client
    finally:
        await client.disconnect()


def published(place: Path, version: int) -> Weights:
    """Weights of this version, as a trainer writes them."""
    folder, lora = place / f"published-{version}", LoraConfig(rank=4, train_unembed=False)
    scripted.Weights(lora=lora, version=version).write(folder, False, TINY, 128)
    return Weights(name="s", version=version, folder=str(folder), sha256=digest(folder))


async def test_sampled_tokens_and_their_logprobs_are_vllms(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            params = SamplingParams(max_tokens=3, seed=7, stop_tokens=())
            result = await client.sample(None, PROMPT, 2, params)
        sent = server.requests[-1][1]
    recorded = RECORDED["generate"]["body"]["choices"]
    assert [unpacked(one.tokens) for one in result.sequences] == [
        one["token_ids"] for one in recorded
    ]
    for one, choice in zip(result.sequences, recorded, strict=True):
        wanted = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert np.frombuffer(one.logprobs, np.float32) == pytest.approx(wanted)
        assert one.stop_reason == "length"
    sampling = sent["sampling_params"]
    assert (sampling["n"], sampling["max_tokens"]) == (2, 3)
    assert sampling["ignore_eos"] is True
    assert sampling["detokenize"] is False


async def test_penalties_and_grammars_are_sent_in_vllms_own_fields(
    model_folder: Path, tmp_path: Path
) -> None:
    """All of them, also neutral ones: a model's folder may have defaults for what is not sent."""
    calls = Calls(tools=(Called(name="add", arguments={"required": ["a"]}),))
    grammars = {
        Grammar(kind="json_schema", text='{"type":"integer"}'): ("json", '{"type":"integer"}'),
        Grammar(kind="regex", text="a+"): ("regex", "a+"),
        Grammar(kind="choice", text='["a","b"]'): ("choice", ["a", "b"]),
        Grammar(kind="lark", text="start: /a/"): ("grammar", "start: /a/"),
        Grammar(kind="calls", text=msgspec.json.encode(calls).decode()): ("structural_tag", None),
    }
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            await client.sample(None, PROMPT, 1, SamplingParams(max_tokens=3))
            plain = server.requests[-1][1]["sampling_params"]
            for grammar, (name, value) in grammars.items():
                bodies = list(
                    client._bodies(
                        None,
                        PROMPT,
                        1,
                        SamplingParams(
                            min_p=0.1,
                            repetition_penalty=1.2,
                            presence_penalty=0.3,
                            frequency_penalty=-0.4,
                            stop_tokens=(7,),
                            grammar=grammar,
                        ),
                        ExtraLogprobs(),
                    )
                )
                [body] = [msgspec.to_builtins(one) for one in bodies]
                sampling = body["sampling_params"]
                assert sampling["min_p"] == 0.1
                assert sampling["repetition_penalty"] == 1.2
                assert sampling["presence_penalty"] == 0.3
                assert sampling["frequency_penalty"] == -0.4
                # its end token ends an answer that has its form
                assert (sampling["ignore_eos"], sampling["stop_token_ids"]) == (False, [7])
                [(sent, told)] = sampling["structured_outputs"].items()
                assert sent == name
                if value is not None:
                    assert told == value
                    continue
                [tag] = json.loads(told)["format"]["tags"]
                assert tag["begin"] == '<tool_call>\n{"name": "add", "arguments": '
                assert tag["content"]["json_schema"] == {"type": "object", "required": ["a"]}
    neutral = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "structured_outputs": None,
    }
    assert plain.items() >= neutral.items()


async def test_log_probabilities_under_a_grammar_are_asked_for_again(
    model_folder: Path, tmp_path: Path
) -> None:
    """vLLM's are of what the grammar leaves; whole and as a stream, which then comes in one piece."""
    recorded = RECORDED["prompt"]["body"]["prompt_logprobs"]
    tokens = [int(next(iter(row))) for row in recorded[1:]]
    params = SamplingParams(max_tokens=3, grammar=Grammar(kind="regex", text="a+"))
    answer = {
        "choices": [
            {
                "index": 0,
                "token_ids": tokens[-2:],
                "finish_reason": "stop",
                "logprobs": {"content": [{"token_id": t, "logprob": 0.0} for t in tokens[-2:]]},
            }
        ]
    }
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            asked = client._generate

            async def generate(body: TokenPrompt, snapshot: str | None) -> Generated:
                if body.sampling_params.prompt_logprobs is None:
                    return msgspec.convert(answer, Generated)
                assert body.token_ids[-2:] == tokens[-2:]
                return await asked(body, snapshot)

            client._generate = generate  # type: ignore[method-assign]
            prompt = packed(5, *tokens[:-2])
            extra = ExtraLogprobs(topk_sampled=2)
            whole = await client.sample(None, prompt, 1, params, extra)
            pieces = [one async for one in client.stream(None, prompt, 1, params, extra)]
    wanted = [recorded[-2][str(tokens[-2])]["logprob"], recorded[-1][str(tokens[-1])]["logprob"]]
    [sequence] = whole.sequences
    assert np.frombuffer(sequence.logprobs, np.float32) == pytest.approx(wanted)
    assert sequence.top is not None
    assert sequence.top.length == 2
    [piece] = pieces
    assert (piece.tokens, piece.logprobs) == (sequence.tokens, sequence.logprobs)
    assert (piece.top, piece.stop_reason) == (sequence.top, "stop")


async def test_the_likeliest_and_the_prompts_own_are_vllms(
    model_folder: Path, tmp_path: Path
) -> None:
    """Of K likeliest K + 1 are asked for: the sampled one counts there."""
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            greedy = SamplingParams(max_tokens=3, temperature=0)
            likely = await client.sample(None, PROMPT, 1, greedy, ExtraLogprobs(topk_sampled=3))
            assert server.requests[-1][1]["sampling_params"]["logprobs"] == 4
            extra = ExtraLogprobs(prompt_logprobs=True, topk_prompt=2)
            scored = await client.sample(None, PROMPT, 1, SamplingParams(max_tokens=1), extra)
    (sequence,) = likely.sequences
    assert sequence.top is not None
    ids = np.frombuffer(sequence.top.ids, np.int32).reshape(3, 3)
    content = RECORDED["greedy"]["body"]["choices"][0]["logprobs"]["content"]
    assert ids.tolist() == [[top["token_id"] for top in one["top_logprobs"]] for one in content]
    assert scored.prompt_logprobs is not None
    assert scored.topk_prompt is not None
    own = np.frombuffer(scored.prompt_logprobs, np.float32)
    assert np.isnan(own[0])
    assert own[1] == pytest.approx(-8.3277941)
    assert unpacked(scored.topk_prompt.ids) == [0, 0, 47, 402, 47, 402, 47, 402]


async def test_a_stream_brings_what_vllm_sends_token_by_token(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            params = SamplingParams(max_tokens=3, stop_tokens=())
            pieces = [piece async for piece in client.stream(None, PROMPT, 2, params)]
    drawn: dict[int, list[int]] = {0: [], 1: []}
    for piece in pieces:
        drawn[piece.sample] += unpacked(piece.tokens)
    assert drawn == {0: [539, 31, 31], 1: [47, 331, 331]}
    assert [piece.stop_reason for piece in pieces[-2:]] == ["length", "length"]


async def test_requests_with_neighbouring_seeds_share_no_samples(
    model_folder: Path, tmp_path: Path
) -> None:
    """Sample number i of a request has the request's seed + i there."""
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            for seed in (11, 12):
                await client.sample(None, PROMPT, 70, SamplingParams(max_tokens=1, seed=seed))
        bodies = [body for path, body in server.requests if path.endswith("generate")][-4:]
    seeds = [
        {body["sampling_params"]["seed"] + i for i in range(body["sampling_params"]["n"])}
        for body in bodies
    ]
    assert [len(one) for one in seeds] == [64, 6, 64, 6]
    assert len(set.union(*seeds)) == 140
    assert all(0 <= one < 2**63 for one in set.union(*seeds))


async def test_names_loaded_stay_within_what_vllm_keeps_and_each_keeps_its_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path / "held") as client:
            weights = [published(tmp_path, version) for version in range(12)]
            for one in weights:
                assert await client.hold(f"snapshot-{one.version}", one) == one.version
            async with asyncio.timeout(WAIT_S):
                results = await asyncio.gather(
                    *(
                        client.sample(
                            f"snapshot-{i % 12}", PROMPT, 1, SamplingParams(max_tokens=1, seed=i)
                        )
                        for i in range(48)
                    )
                )
            assert [one.version for one in results] == [i % 12 for i in range(48)]
            assert [unpacked(one.sequences[0].tokens)[0] - FIRST for one in results] == [
                i % 12 for i in range(48)
            ]
            assert server.most_loaded <= 4
            for one in weights:
                await client.drop(f"snapshot-{one.version}")
            assert server.adapters == {}
            assert list((tmp_path / "held").iterdir()) == []


async def test_a_folder_stays_until_its_name_is_unloaded(
    model_folder: Path, tmp_path: Path
) -> None:
    """Also where the published one is removed."""
    with vllm() as server:
        async with opened(server, model_folder, tmp_path / "held") as client:
            weights = published(tmp_path, 7)
            await client.hold("snapshot-x", weights)
            assert weights.folder is not None
            for file in Path(weights.folder).iterdir():
                file.unlink()
            result = await client.sample("snapshot-x", PROMPT, 1, SamplingParams(max_tokens=1))
            assert unpacked(result.sequences[0].tokens)[0] == FIRST + 7
            with pytest.raises(NotFound):
                await client.sample("snapshot-y", PROMPT, 1, SamplingParams(max_tokens=1))


REFUSALS = {
    "version": "It is version 0.31.2",
    "html": "It does not answer as vLLM does",
    "key": "It refuses the key",
    "no_tokens": "--enable-scale-out",
    "no_loading": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "other_model": "It serves 'someone/else'",
    "vocabulary": "Its vocabulary is larger",
    "short": "It reads 64 tokens",
    "rank": "--max-lora-rank",
    "blind": "It does not see the folder",
    "processed": "",
}


@pytest.mark.parametrize("flaw", FLAWS)
async def test_a_vllm_that_is_not_what_is_needed_is_refused_in_one_sentence(
    model_folder: Path, tmp_path: Path, flaw: str
) -> None:
    with vllm(flaw) as server:
        if not REFUSALS[flaw]:
            async with opened(server, model_folder, tmp_path, tempered=True) as client:
                assert (await client.info()).logprobs == ("tempered",)
            return
        with pytest.raises(InvalidConfig) as refused:
            async with opened(server, model_folder, tmp_path):
                raise AssertionError("it was taken")
        assert REFUSALS[flaw] in refused.value.why
        assert server.adapters == {}


async def test_a_run_at_another_temperature_needs_its_logprobs(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm() as server, pytest.raises(InvalidConfig, match="processed_logprobs"):
        async with opened(server, model_folder, tmp_path, tempered=True):
            raise AssertionError("it was taken")


async def test_a_key_is_sent(model_folder: Path, tmp_path: Path) -> None:
    with vllm("key") as server:
        with pytest.raises(InvalidConfig, match="It refuses the key"):
            async with opened(server, model_folder, tmp_path, key="another"):
                raise AssertionError("it was taken")
        async with opened(server, model_folder, tmp_path, key="secret") as client:
            assert (await client.info()).trains is False


def damaged_folders(folder: Path) -> dict[str, tuple[type[HalteresError], str]]:
    """Adapters that vLLM would take, or end by, each made of a good one."""
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = whole[8 : 8 + length], whole[8 + length :]

    def write(name: str, content: bytes, config: str | None = None) -> None:
        place = folder.parent / name
        place.mkdir()
        (place / "adapter_model.safetensors").write_bytes(content)
        own = (folder / "adapter_config.json").read_text()
        (place / "adapter_config.json").write_text(config or own)

    nan = bytearray(whole)
    nan[-4:] = struct.pack("<f", float("nan"))
    write("nan", bytes(nan))
    write("cut", whole[:-8])
    write("no-file", b"hello")
    wide = header.replace(b"[4,128]", b"[8,64]\x20").replace(b"[128,4]", b"[64,8]\x20")
    assert wide != header
    write("wide", whole[:8] + wide + data)
    head = header.replace(b"model.layers.0.self_attn.q_proj", b"lm_head")
    write("head", struct.pack("<Q", len(head)) + head + data)
    own = (folder / "adapter_config.json").read_text()
    write("rank", whole, own.replace('"r": 4', '"r": 48'))
    write("dora", whole, json.dumps(json.loads(own) | {"use_dora": True}))
    return {
        "nan": (InvalidData, "NaN"),
        "cut": (WeightsDamaged, "cut off"),
        "no-file": (WeightsDamaged, "cut off"),
        "wide": (InvalidData, "of shape"),
        "head": (InvalidData, "of the unembedding"),
        "rank": (InvalidData, "rank is 48"),
        "dora": (InvalidData, "use_dora"),
        "missing": (WeightsDamaged, "not there"),
    }


async def test_what_would_poison_vllm_never_reaches_it(model_folder: Path, tmp_path: Path) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path / "held") as client:
            good = published(tmp_path, 3)
            assert good.folder is not None
            await client.hold("snapshot-good", good)
            loads = len([path for path, _ in server.requests if path.endswith("load_lora_adapter")])
            for name, (kind, words) in damaged_folders(Path(good.folder)).items():
                source = Weights(name=name, version=1, folder=str(tmp_path / name))
                with pytest.raises(kind, match=words):
                    await client.hold(f"snapshot-{name}", source)
            paths = [path for path, _ in server.requests if path.endswith("load_lora_adapter")]
            assert len(paths) == loads
            with pytest.raises(WeightsDamaged, match="did not arrive whole"):
                (Path(good.folder) / "state.json").write_text("{}")
                await client.hold("snapshot-other", good)
            assert [path.name for path in (tmp_path / "held").iterdir()] == ["snapshot-good"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_a_number_beyond_what_the_server_computes_with_is_refused(
    model_folder: Path, tmp_path: Path, dtype: str
) -> None:
    """It would be infinite there. B counts times alpha / rank, which is 8 here."""
    most = LARGEST[dtype]
    with vllm() as server:
        async with opened(server, model_folder, tmp_path / "held", largest=most) as client:
            for version, (value, fits) in enumerate(((most / 16, True), (most / 4, False))):
                weights = published(tmp_path, version)
                assert weights.folder is not None
                file = Path(weights.folder) / "adapter_model.safetensors"
                tensors = load_file(file)
                for name, tensor in tensors.items():
                    if "lora_B" in name:
                        tensor[-1, -1] = -value
                save_file(tensors, file)
                # who wrote it knows, or every number is read
                for known in (None, value * 8):
                    source = Weights(name="s", version=1, folder=weights.folder, largest=known)
                    name = f"snapshot-{version}-{known is None}"
                    if fits:
                        assert await client.hold(name, source) == 1
                        continue
                    with pytest.raises(InvalidData, match=r"beyond|is the largest"):
                        await client.hold(name, source)


async def test_a_request_never_asks_for_more_sequences_than_the_server_decodes(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path, most_samples=2) as client:
            result = await client.sample(None, PROMPT, 5, SamplingParams(max_tokens=1))
            assert len(result.sequences) == 5
            pieces = [
                piece
                async for piece in client.stream(None, PROMPT, 4, SamplingParams(max_tokens=3))
            ]
        asked = [body for path, body in server.requests if path.endswith("generate")][-5:]
    assert [body["sampling_params"]["n"] for body in asked] == [2, 2, 1, 2, 2]
    assert {piece.sample for piece in pieces} == {0, 1, 2, 3}


async def test_what_vllm_has_not_is_refused_before_it_is_sent(
    model_folder: Path, tmp_path: Path
) -> None:
    targets = Array(dtype="int64", shape=(3, 1), data=np.zeros((3, 1), np.int64).tobytes())
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            before = len(server.requests)
            for params, extra in (
                (SamplingParams(logprobs="tempered", temperature=0.5), ExtraLogprobs()),
                (SamplingParams(), ExtraLogprobs(targets=targets)),
                (SamplingParams(), ExtraLogprobs(alternatives=1)),
                (SamplingParams(), ExtraLogprobs(topk_sampled=21)),
                (SamplingParams(), ExtraLogprobs(topk_prompt=21)),
            ):
                with pytest.raises(InvalidData, match="not to be had of this sampler"):
                    await client.sample(None, PROMPT, 1, params, extra)
            assert len(server.requests) == before


@pytest.mark.parametrize(
    ("token", "kind", "words"),
    [
        (NAN, ServerError, "not finite"),
        (FAILING, EngineGone, "EngineCore"),
        (ABORTED, EngineGone, "abort"),
    ],
    ids=["nan", "its engine died", "it gave up"],
)
async def test_an_answer_that_is_none_is_an_error(
    model_folder: Path, tmp_path: Path, token: int, kind: type[HalteresError], words: str
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            with pytest.raises(kind, match=words):
                await client.sample(None, packed(5, token), 1, SamplingParams(max_tokens=3))
            assert client.broken.is_set() is (kind is EngineGone)


@pytest.mark.parametrize("token", [FAILING, CUT], ids=["its engine died", "its front was killed"])
async def test_a_stream_that_breaks_off_says_so(
    model_folder: Path, tmp_path: Path, token: int
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path) as client:
            drawn = []
            with pytest.raises(EngineGone):
                async for piece in client.stream(
                    None, packed(5, token), 2, SamplingParams(max_tokens=3, stop_tokens=())
                ):
                    drawn.append(piece)
            assert drawn
            assert client.broken.is_set()


async def test_whoever_goes_away_frees_the_name(model_folder: Path, tmp_path: Path) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path / "held", places=1) as client:
            for version in (1, 2):
                weights = published(tmp_path, version)
                await client.hold(f"snapshot-{version}", weights)
            hanging = asyncio.create_task(
                client.sample("snapshot-1", packed(5, HANGING), 1, SamplingParams(max_tokens=1))
            )
            waiting = asyncio.create_task(
                client.sample("snapshot-2", PROMPT, 1, SamplingParams(max_tokens=1))
            )

            def has_come() -> bool:
                return any(HANGING in body.get("token_ids", ()) for _, body in server.requests)

            async with asyncio.timeout(WAIT_S):
                await until(has_come, within_s=WAIT_S)
                assert not waiting.done()
                hanging.cancel()
                assert (await waiting).version == 2
            assert server.most_loaded == 1


async def test_a_vllm_that_was_started_again_has_lost_every_name(
    model_folder: Path, tmp_path: Path
) -> None:
    """Both a sample and a ping notice it."""
    with vllm() as server:
        weights = published(tmp_path, 1)
        async with opened(server, model_folder, tmp_path / "held") as client:
            await client.hold("snapshot-1", weights)
            server.adapters.clear()
            with pytest.raises(EngineGone, match="started again"):
                await client.sample("snapshot-1", PROMPT, 1, SamplingParams(max_tokens=1))
        async with opened(server, model_folder, tmp_path / "held") as client:
            await client.hold("snapshot-1", weights)
            server.adapters.clear()
            with pytest.raises(EngineGone, match="started again"):
                await client.info()


async def test_a_load_that_its_dying_engine_cancels_is_no_refusal(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm("dying") as server:
        async with opened(server, model_folder, tmp_path / "held") as client:
            with pytest.raises(EngineGone):
                await client.hold("snapshot-1", published(tmp_path, 1))
            assert client.broken.is_set()


async def test_names_that_come_and_go_while_it_is_asked_are_not_lost(
    model_folder: Path, tmp_path: Path
) -> None:
    with vllm() as server:
        async with opened(server, model_folder, tmp_path / "held", places=2) as client:
            for version in range(4):
                await client.hold(f"snapshot-{version}", published(tmp_path, version))

            async def ping() -> None:
                for _ in range(20):
                    await client.info()

            async def sample(number: int) -> None:
                await client.sample(
                    f"snapshot-{number % 4}", PROMPT, 1, SamplingParams(max_tokens=1)
                )

            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(ping(), *map(sample, range(30)))
            assert not client.broken.is_set()


async def test_names_of_an_earlier_life_make_room(model_folder: Path, tmp_path: Path) -> None:
    with vllm() as server:
        server.adapters |= {"snapshot-old": tmp_path, "of-others": tmp_path}
        async with opened(server, model_folder, tmp_path / "held"):
            assert list(server.adapters) == ["of-others"]


def test_the_recorded_bodies_are_small() -> None:
    assert Path(recorded_vllm.__file__).with_suffix(".json").stat().st_size < 20_000


async def test_a_caller_that_goes_away_while_names_change_leaves_them_known(
    model_folder: Path, tmp_path: Path
) -> None:
    """Its load or unload is made to the end: nothing is there that nobody unloads, no folder goes
    before its name, and nothing is taken for lost.
    """
    with vllm("slow") as server:
        async with opened(server, model_folder, tmp_path / "held", places=2) as client:
            for version in range(2):
                await client.hold(f"snapshot-{version}", published(tmp_path, version))
            for version in range(2, 8):
                holding = asyncio.create_task(
                    client.hold(f"snapshot-{version}", published(tmp_path, version))
                )
                await asyncio.sleep(SLOW_S * (0.5 + version % 2))  # in an unload, in a load
                holding.cancel()
                with suppress(asyncio.CancelledError):
                    await holding
                    await client.drop(f"snapshot-{version}")
                await client.info()
            assert all(folder.is_dir() for folder in server.adapters.values())
            assert server.most_loaded <= 2
            assert set(server.adapters) <= {"snapshot-0", "snapshot-1"}
            for version in range(2):
                await client.sample(f"snapshot-{version}", PROMPT, 1, SamplingParams(max_tokens=1))
