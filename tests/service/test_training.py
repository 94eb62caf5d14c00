"""Training through the real SDK 0.38.0."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tinker
from contract.requirements import proves
from tinker import types

from halteres.models import TINY
from halteres.service.checkpoints import Checkpoint
from halteres.service.keys import LOCAL

from .live_service import BASE, DATA, KEY, STEP, LiveService, datum, prompt, trainer

WAIT_S = 20


SEEDED = types.SamplingParams(max_tokens=4, seed=3)


async def test_a_client_trains_saves_and_samples(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    passed, stepped = training.forward_backward(DATA, "cross_entropy"), training.optim_step(STEP)
    output = await passed
    assert [len(one["logprobs"].data) for one in output.loss_fn_outputs] == [3, 5]
    assert output.metrics["loss:sum"] == pytest.approx(
        -sum(sum(one["logprobs"].data) for one in output.loss_fn_outputs)
    )
    assert (await stepped).metrics
    saved = await training.save_state("first")
    assert saved.path == f"tinker://{training.model_id}/weights/first"
    sampling = await training.save_weights_and_get_sampling_client()
    sampled = await sampling.sample(prompt(5, 6), 3, types.SamplingParams(max_tokens=4))
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 3
    assert all(len(sequence.tokens) == len(sequence.logprobs) for sequence in sampled.sequences)


@proves("order:pipelined")
async def test_a_step_is_promised_while_its_pass_still_runs_and_comes_after_it(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    held = scene.engine.block("forward_backward")
    passed, stepped = training.forward_backward(DATA, "cross_entropy"), training.optim_step(STEP)
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        while len(list(scene.service.futures.open())) < 2:
            await scene.get("/api/v1/healthz")  # the second request is on its way
    assert scene.engine.calls["optim_step"] == 0
    held.release()
    await passed
    await stepped
    assert scene.engine.calls["optim_step"] == 1


@proves("order:first-chunk-last")
async def test_2500_datums_come_back_in_order_from_parallel_chunks(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    data = [datum([5, 6 + index % 600, 7]) for index in range(2500)]
    output = await training.forward_backward(data, "cross_entropy")
    await training.optim_step(STEP)
    assert len(output.loss_fn_outputs) == 2500
    assert scene.engine.calls["forward_backward"] == 3
    alone = await training.forward_backward([data[1999]], "cross_entropy")
    before = (
        (await training.forward(data[1990:2000], "cross_entropy"))
        .loss_fn_outputs[9]["logprobs"]
        .data
    )
    np.testing.assert_array_equal(alone.loss_fn_outputs[0]["logprobs"].data, before)
    kinds = scene.rows("SELECT seq, kind FROM requests WHERE kind != 'create_model' ORDER BY seq")
    assert kinds == [
        (1, "forward_backward"),
        (2, "forward_backward"),
        (3, "forward_backward"),
        (4, "optim_step"),
        (5, "forward_backward"),
        (6, "forward"),
    ]


@proves("pass:accumulates")
async def test_a_forward_pass_leaves_no_gradient(client: tinker.ServiceClient) -> None:
    training = await trainer(client)
    await training.forward(DATA, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        await training.optim_step(STEP)


@proves("pass:bad-datum", "promise:failure")
async def test_a_bad_datum_fails_its_own_promise_with_a_sentence(
    client: tinker.ServiceClient,
) -> None:
    training = await trainer(client)
    bad = training.forward_backward([datum([5, 6, 700])], "cross_entropy")
    good = training.forward_backward(DATA, "cross_entropy")
    with pytest.raises(
        tinker.RequestFailedError, match="Datum 0: 'target_tokens' holds token 700"
    ) as caught:
        await bad
    assert caught.value.category is types.RequestErrorCategory.User
    await good
    await training.optim_step(STEP)


async def test_importance_sampling_takes_the_sampled_logprobs(client: tinker.ServiceClient) -> None:
    training = await trainer(client)
    sampling = await training.save_weights_and_get_sampling_client()
    sampled = (
        await sampling.sample(prompt(5, 6), 1, types.SamplingParams(max_tokens=6))
    ).sequences[0]
    tokens = [5, 6, *sampled.tokens]
    zeros = [0.0]
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
        "logprobs": types.TensorData(data=zeros + list(sampled.logprobs), dtype="float32"),
        "advantages": types.TensorData(data=zeros + [0.5] * len(sampled.tokens), dtype="float32"),
    }
    data = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    output = await training.forward_backward(data, "importance_sampling")
    assert output.metrics["loss:sum"] == pytest.approx(-0.5 * len(sampled.tokens))
    np.testing.assert_allclose(
        output.loss_fn_outputs[0]["logprobs"].data[1:], sampled.logprobs, atol=1e-6
    )


async def test_negative_learning_rates_are_user_errors(client: tinker.ServiceClient) -> None:
    training = await trainer(client)
    await training.forward_backward(DATA, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="learning_rate is -1"):
        await training.optim_step(types.AdamParams(learning_rate=-1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]
)
async def test_a_number_of_adam_that_json_makes_null_is_refused_and_not_taken_as_absent(
    scene: LiveService, client: tinker.ServiceClient, field: str, value: float
) -> None:
    training = await trainer(client)
    await training.forward_backward(DATA, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=f"{field} is no number.*NaN"):
        await training.optim_step(types.AdamParams(**{field: value}))
    await training.optim_step(STEP)  # the gradient is still there


@proves("checkpoint:new-client")
async def test_training_goes_on_from_saved_state_with_and_without_its_optimiser(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client, rank=4)
    for _ in range(3):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
    path = (await training.save_state("third")).path
    for resume in (
        client.create_training_client_from_state,
        client.create_training_client_from_state_with_optimizer,
    ):
        resumed = await resume(path)
        assert resumed.get_info().lora_rank == 4
        assert resumed.get_info().model_data.model_name == TINY
        await resumed.forward_backward(DATA, "cross_entropy")
        await resumed.optim_step(STEP)
        saved = await resumed.save_weights_for_sampler("next")
        assert scene.service.checkpoints.find(saved.path, LOCAL).version == 4


@proves("checkpoint:weights-alone")
async def test_saved_state_is_loaded_into_a_living_model(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    path = (await training.save_state("start")).path
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    with pytest.warns(FutureWarning):
        loading = training.load_state(path)
    assert (await loading).path == path
    assert (
        scene.service.checkpoints.find(
            (await training.save_weights_for_sampler("again")).path, LOCAL
        ).version
        == 0
    )


@proves("checkpoint:other-shape")
async def test_weights_of_another_shape_are_refused_and_the_adapter_stays(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    saved = await client.create_lora_training_client(TINY, rank=8)
    path = (await saved.save_state("of-rank-8")).path
    narrow = await client.create_lora_training_client(TINY, rank=4)
    without_mlp = await client.create_lora_training_client(TINY, rank=8, train_mlp=False)
    for training, says in (
        (narrow, "rank is 8 there and 4 here"),
        (without_mlp, "train_mlp is True there"),
    ):
        before = scene.service.models.find(training.model_id, LOCAL).lora
        for load in (training.load_state, training.load_state_with_optimizer):
            with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match=says):
                await load(path)
        assert scene.service.models.find(training.model_id, LOCAL).lora == before
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
    resumed = await client.create_training_client_from_state(path)
    assert resumed.get_info().lora_rank == 8


async def loaded_by_an_old_sdk(
    scene: LiveService, version: str, path: str, **lora: Any
) -> dict[str, Any]:
    """The training run that a client of this SDK makes and loads the state into, as `get_info`
    has it; or why it cannot.

    Source: tinker 0.3.0 to 0.7.0, `create_training_client_from_state`: create_model with the run's
    rank and all families, then load_weights.
    """
    agent = {"User-Agent": f"AsyncTinker/Python {version}"}
    body = {
        "session_id": await scene.session(),
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"train_unembed": True, "train_mlp": True, "train_attn": True, **lora},
        "type": "create_model",
    }
    _, promised = await scene.post("create_model", body, **agent)
    made = await scene.redeem(promised["request_id"])
    load = {"model_id": made["model_id"], "path": path, "seq_id": 1, "type": "load_weights"}
    _, promised = await scene.post("load_weights", load, **agent)
    outcome = await scene.redeem(promised["request_id"])
    if "error" in outcome:
        return outcome
    return (await scene.post("get_info", {"model_id": made["model_id"]}, **agent))[1]


@proves("checkpoint:families-unsaid")
@pytest.mark.parametrize("version", ["0.3.0", "0.7.0"])
async def test_an_sdk_that_cannot_say_which_families_are_trained_loads_a_state_without_some(
    scene: LiveService, client: tinker.ServiceClient, version: str
) -> None:
    saved = await client.create_lora_training_client(
        TINY, rank=4, train_mlp=False, train_unembed=False
    )
    path = (await saved.save_state("attention")).path
    loaded = await loaded_by_an_old_sdk(scene, version, path, rank=4)
    model = scene.service.models.find(loaded["model_id"], LOCAL)
    assert model.lora == scene.service.models.find(saved.model_id, LOCAL).lora
    assert model.lora is not None and not model.lora.train_mlp
    newer = await loaded_by_an_old_sdk(scene, "0.8.0", path, rank=4)
    others = [
        await loaded_by_an_old_sdk(scene, version, path, rank=8),
        await loaded_by_an_old_sdk(scene, version, path, rank=4, train_attn=False),
    ]
    assert [one["category"] for one in (newer, *others)] == ["user"] * 3


async def test_state_that_does_not_exist_is_a_user_error_that_names_the_newest(
    client: tinker.ServiceClient,
) -> None:
    training = await trainer(client)
    path = (await training.save_state("only")).path
    with pytest.raises(tinker.RequestFailedError, match=path):
        await client.create_training_client_from_state(path.replace("only", "onyl"))


@proves("error:unknown-model")
async def test_an_unknown_base_model_is_answered_with_what_there_is(
    client: tinker.ServiceClient,
) -> None:
    with pytest.raises(tinker.NotFoundError, match="This service serves 'halteres/tiny'"):
        await client.create_lora_training_client("Qwen/Qwen3-8B")


async def test_the_base_model_may_be_named_by_its_folder(client: tinker.ServiceClient) -> None:
    training = await client.create_lora_training_client(str(BASE.folder), rank=4)
    assert training.get_info().model_data.model_name == str(BASE.folder)
    sampling = await training.save_weights_and_get_sampling_client()
    assert sampling.get_base_model() == str(BASE.folder)


@proves("session:tokenizer")
async def test_a_training_client_finds_its_tokenizer_without_network(
    client: tinker.ServiceClient,
) -> None:
    training = await trainer(client)
    tokenizer = await asyncio.to_thread(training.get_tokenizer)
    assert tokenizer.decode(tokenizer.encode("What is 17 + 25?")) == "What is 17 + 25?"


@proves("records:runs", "records:checkpoints")
async def test_the_rest_client_lists_runs_and_checkpoints(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    state = await training.save_state("s")
    sampler = await training.save_weights_for_sampler("w", user_metadata={"step": "0"})
    rest = await asyncio.to_thread(tinker.RestClient, base_url=scene.url, api_key=KEY)
    listed = await rest.list_checkpoints(training.model_id)
    assert [one.tinker_path for one in listed.checkpoints] == [state.path, sampler.path]
    run = await rest.get_training_run(training.model_id)
    assert run.last_checkpoint and run.last_checkpoint.tinker_path == state.path
    assert (await rest.list_training_runs()).cursor.total_count == 1
    assert len((await rest.list_user_checkpoints()).checkpoints) == 2
    assert (await rest.get_weights_info_by_tinker_path(state.path)).lora_rank == 8
    assert client.holder.get_session_id() in (await rest.list_sessions()).sessions
    assert (await rest.get_session(client.holder.get_session_id())).training_run_ids == [
        training.model_id
    ]


@proves("sample:snapshot")
async def test_samplers_of_weights_that_are_being_overwritten_never_see_the_new_ones(
    scene: LiveService, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = await trainer(client)
    path = (await training.save_state("one")).path
    sampling = await client.create_sampling_client(model_path=path)
    before = await drawn(sampling)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    add, seen = scene.service.checkpoints.add, []

    async def added(*arguments: Any, **facts: Any) -> Checkpoint:
        """The folder has been replaced, and the journal does not know it yet."""
        seen.append(await drawn(sampling))
        return await add(*arguments, **facts)

    monkeypatch.setattr(scene.service.checkpoints, "add", added)
    await training.save_state("one", overwrite=True)
    await scene.host.die()
    seen.append(await drawn(sampling))
    assert seen == [before, before]
    new = await client.create_sampling_client(model_path=path)
    await new.sample(prompt(5), 1, types.SamplingParams(max_tokens=1))
    assert scene.service.snapshots.of(scene.service.checkpoints.find(path, LOCAL)).version == 1


async def drawn(sampling: tinker.SamplingClient) -> list[int]:
    return list((await sampling.sample(prompt(5, 6), 1, SEEDED)).sequences[0].tokens)
