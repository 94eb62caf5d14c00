"""stable_reinforce through the service: whose tokens it trains, who reads that the formula is ours,
who refuses it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from contract.requirements import proves
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest, LossFnType
from typer.testing import CliRunner

from halteres.cli import serve
from halteres.errors import InvalidData
from halteres.service import server as process
from halteres.service.routes.training import STAND_IN
from halteres.service.service import Options
from halteres.service.wire.training import PassRequest, read_json_pass, read_pass

from .live_service import LiveService, closing, prompt, serving, trainer
from .test_wire_json import body_of, chunk, json_datum, promised, tensor

Prompt, Sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
TOKENS = [5, 6, 7, 8, 9, 10]
SPANS: list[types.PromptProvenanceSpan | types.SampledProvenanceSpan] = [
    Prompt(sequence_id="a", length=2),
    Sampled(sequence_id="a", length=2),
    Prompt(sequence_id="b", offset=3, length=0),
    Sampled(sequence_id="b", offset=4, length=1),
]
NUMBERS = [0, 0, 1, 1, 2]


def judged(advantages: Sequence[float], spans: Any = None) -> types.Datum:
    """A datum of five targets."""
    arrays = {"logprobs": [-1.0] * 5, "advantages": list(advantages)}
    inputs = {
        name: types.TensorData(data=data, dtype="float32", shape=[5])
        for name, data in arrays.items()
    }
    targets = types.TensorData(data=TOKENS[1:], dtype="int64", shape=[5])
    made = types.Datum(
        model_input=prompt(*TOKENS[:-1]), loss_fn_inputs={"target_tokens": targets, **inputs}
    )
    return dataclasses.replace(made, model_input_spans=spans, loss_fn_input_spans=spans)


def by_proto(data: types.Datum, loss: LossFnType = "stable_reinforce") -> PassRequest:
    asked = ForwardBackwardRequest(
        model_id="m",
        seq_id=1,
        forward_backward_input=ForwardBackwardInput(data=[data], loss_fn=loss),
    )
    return read_pass(forward_backward_request_to_proto(asked).SerializeToString())


def by_json(spans: Any, loss: str = "stable_reinforce") -> PassRequest:
    sent = {
        **json_datum(chunk(*TOKENS[:-1]), target_tokens=tensor(*TOKENS[1:], dtype="int64")),
        **spans,
    }
    return read_json_pass(
        json.dumps(body_of("m", 1, sent, loss_fn=loss)).encode(), forward_only=False
    )


def numbers(asked: PassRequest) -> list[int] | None:
    assert asked.flaw is None
    found = asked.data[0].sequences
    return None if found is None else np.frombuffer(found, np.int32).tolist()


@proves("loss:stable_reinforce")
def test_provenance_tells_which_sampled_sequence_a_target_belongs_to_in_both_bodies() -> None:
    assert numbers(by_proto(judged([1] * 5, SPANS))) == NUMBERS
    assert numbers(by_proto(judged([1] * 5))) is None
    written = [
        {
            "sampled_tokens" if isinstance(span, Sampled) else "prompt_tokens": dataclasses.asdict(
                span
            )
        }
        for span in SPANS
    ]
    assert numbers(by_json({"loss_fn_input_spans": written})) == NUMBERS
    assert numbers(by_json({"loss_fn_input_spans": None})) is numbers(by_json({})) is None


def test_spans_of_one_sequence_in_pieces_are_one_sequence() -> None:
    pieces = [Sampled(sequence_id=name, length=1) for name in "abaca"]
    assert numbers(by_proto(judged([1] * 5, pieces))) == [1, 2, 1, 3, 1]


@pytest.mark.parametrize(
    "spans", [[Prompt(sequence_id="a", length=4)], [Sampled(sequence_id="a", length=2**62)] * 2]
)
def test_spans_that_do_not_cover_the_targets_are_a_flaw_of_the_loss_that_reads_them_alone(
    spans: Any,
) -> None:
    asked = by_proto(judged([0] * 5, spans))
    assert isinstance(asked.flaw, InvalidData)
    assert "5 targets" in asked.flaw.why
    assert numbers(by_proto(judged([0] * 5, spans), "importance_sampling")) is None


def test_a_json_span_that_names_no_sequence_is_too() -> None:
    spans = {"loss_fn_input_spans": [{"sampled_tokens": {"length": 5}}]}
    assert isinstance(by_json(spans).flaw, InvalidData)
    assert by_json(spans, "cross_entropy").flaw is None


@pytest.mark.parametrize("spans", [5, [7], [{"sampled_tokens": {"length": "x"}}]])
def test_json_spans_that_cannot_be_read_are_refused(spans: Any) -> None:
    with pytest.raises(InvalidData):
        by_json({"loss_fn_input_spans": spans})


@proves("loss:stable_reinforce")
async def test_it_trains_sampled_tokens_alone(client: tinker.ServiceClient) -> None:
    training = await trainer(client)
    found = await training.forward_backward([judged([0, 0, 1, 1, -1], SPANS)], "stable_reinforce")
    lp = found.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    assert found.metrics["loss:sum"] == pytest.approx(
        -(lp[2] + lp[3]) + lp[4], rel=1e-5
    )  # the scripted engine's number
    with pytest.raises(
        tinker.RequestFailedError, match=r"Datum 0: 'advantages' is not 0 at position 1"
    ) as caught:
        await training.forward_backward([judged([0, 0.5, 1, 1, -1], SPANS)], "stable_reinforce")
    assert caught.value.category is types.RequestErrorCategory.User


@proves("loss:stable_reinforce")
async def test_samples_whose_stability_is_to_be_recorded_are_samples(
    client: tinker.ServiceClient,
) -> None:
    """record_stability_info is accepted, and means nothing here."""
    training = await trainer(client)
    asked = types.SamplingParams(max_tokens=8, seed=3)
    drawn = [
        (
            await (
                await training.save_weights_and_get_sampling_client(record_stability_info=info)
            ).sample(prompt(5), 1, asked)
        )
        for info in (False, True)
    ]
    assert drawn[0].sequences[0].tokens == drawn[1].sequences[0].tokens
    assert drawn[1].sequences[0].sequence_id


@proves("loss:stable_reinforce-ours")
async def test_the_user_and_the_log_read_once_per_training_run_that_the_formula_is_ours(
    client: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await trainer(client), await trainer(client)
    with caplog.at_level(logging.WARNING):
        for training in (first, first, second):
            await training.forward_backward([judged([1] * 5)], "stable_reinforce")
        await first.forward_backward([judged([1] * 5)], "importance_sampling")
    read = [
        record.name.split(".")[0] for record in caplog.records if STAND_IN in record.getMessage()
    ]
    assert sorted(read) == ["halteres", "halteres", "tinker", "tinker"]


@proves("loss:stable_reinforce-ours")
async def test_an_operator_may_refuse_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        serving(tmp_path, Options(refuse_stable_reinforce=True)) as scene,
        closing(await scene.client()) as client,
    ):
        training = await trainer(client)
        with pytest.raises(
            tinker.RequestFailedError, match=r"not public.*'importance_sampling'"
        ) as caught:
            await training.forward_backward([judged([1] * 5)], "stable_reinforce")
        assert caught.value.category is types.RequestErrorCategory.User
        await training.forward_backward([judged([1] * 5)], "importance_sampling")
    assert STAND_IN not in caplog.text


def test_the_operators_flag_reaches_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def become(_: str, argv: list[str]) -> None:
        started.append(argv)

    monkeypatch.setattr("os.execv", become)
    for flags in ([], ["--refuse-stable-reinforce"]):
        CliRunner().invoke(serve.app, ["--state", str(tmp_path), *flags])
    parser, options_of = process.parser(), process._options  # pyright: ignore[reportPrivateUsage]
    options = [options_of(parser.parse_args(argv[3:])) for argv in started]
    assert [one.refuse_stable_reinforce for one in options] == [False, True]


async def test_what_was_trained_before_an_operator_refused_it_is_not_lost(tmp_path: Path) -> None:
    """An adapter is brought back by executing its requests again."""
    inputs = {"logprobs": tensor(*[-1] * 5), "advantages": tensor(*[1] * 5)}
    data = json_datum(
        chunk(*TOKENS[:-1]), target_tokens=tensor(*TOKENS[1:], dtype="int64"), **inputs
    )
    sent = body_of("", 1, data, loss_fn="stable_reinforce")
    async with serving(tmp_path) as scene:
        run = await scene.model()
        assert isinstance(
            await _redeemed(scene, "forward_backward", {**sent, "model_id": run}), bytes
        )
    async with serving(tmp_path, Options(refuse_stable_reinforce=True)) as scene:
        stepped = await _redeemed(
            scene, "optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}}
        )
        assert stepped["metrics"]["policy_version:max"] == 1


async def _redeemed(scene: LiveService, path: str, body: Any) -> Any:
    return await scene.redeem(await promised(scene, path, body))
