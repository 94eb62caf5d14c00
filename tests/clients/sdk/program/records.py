"""Steps: what the REST client lists, shows and changes; what is refused; the end."""

from __future__ import annotations

from typing import Any

from tinker import types

from .connection import Client, Connection, datum, plain, refused, scores, step, unique, wait
from .sampling import all_scores
from .steps import Facts, Step, all_close, close_to


def saved(scene: Connection, name: str, **options: Any) -> str:
    """The path of a checkpoint of the common training client."""
    return wait(scene.training.save_state(unique(name), **options)).path


def listed(scene: Connection, path: str) -> Any:
    """What the list of the run says of this checkpoint."""
    every = wait(scene.rest.list_checkpoints(scene.training.model_id)).checkpoints
    return next((one for one in every if one.tinker_path == path), None)


def training_runs(scene: Connection) -> Facts:
    run_id = scene.training.model_id
    path = saved(scene, "run")
    found = wait(scene.rest.list_training_runs(limit=100))
    assert run_id in [run.training_run_id for run in found.training_runs]
    assert found.cursor.total_count >= len(found.training_runs)
    run = wait(scene.rest.get_training_run(run_id))
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (
        run_id,
        scene.model,
        True,
        8,
    ), run
    assert run.last_checkpoint.tinker_path == path and run.last_request_time.tzinfo is not None
    assert wait(scene.rest.get_training_run_by_tinker_path(path)).training_run_id == run_id
    return {"owner": run.model_owner}


def checkpoints(scene: Connection) -> Facts:
    path = saved(scene, "listed")
    sampler = wait(scene.training.save_weights_for_sampler(unique("listed"))).path
    training, sampling = listed(scene, path), listed(scene, sampler)
    assert training.checkpoint_type == "training" and training.checkpoint_id.startswith(
        "weights/"
    ), training
    assert sampling.checkpoint_type == "sampler" and sampling.checkpoint_id.startswith(
        "sampler_weights/"
    ), sampling
    assert training.time.tzinfo is not None
    return {}


def user_checkpoints(scene: Connection) -> Facts:
    path = saved(scene, "mine")
    found = wait(scene.rest.list_user_checkpoints(limit=100))
    ours = next(one for one in found.checkpoints if one.tinker_path == path)
    assert ours.size_bytes and ours.size_bytes > 1000, ours
    return {"total": found.cursor.total_count > 0}


def publish(scene: Connection) -> Facts:
    path = saved(scene, "public")
    assert listed(scene, path).public is False
    wait(scene.rest.publish_checkpoint_from_tinker_path(path))
    assert listed(scene, path).public is True
    wait(scene.rest.unpublish_checkpoint_from_tinker_path(path))
    assert listed(scene, path).public is False
    return {}


def ttl(scene: Connection) -> Facts:
    path = saved(scene, "short", ttl_seconds=3600)
    kept = listed(scene, path)
    close_to((kept.expires_at - kept.time).total_seconds(), 3600, "expires_at", 0.01)
    wait(scene.rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    assert listed(scene, path).expires_at > kept.expires_at
    wait(scene.rest.set_checkpoint_ttl_from_tinker_path(path, None))
    assert listed(scene, path).expires_at is None
    return {}


def metadata(scene: Connection) -> Facts:
    path = saved(scene, "noted", user_metadata={"note": "seven"})
    assert listed(scene, path).user_metadata == {"note": "seven"}
    return {}


def weights_info(scene: Connection) -> Facts:
    found = wait(scene.rest.get_weights_info_by_tinker_path(saved(scene, "info")))
    assert (found.base_model, found.is_lora, found.lora_rank) == (scene.model, True, 8), found
    return {"lora_rank": found.lora_rank}


def sessions(scene: Connection) -> Facts:
    session = scene.training.model_id.partition(":")[0]
    assert session in wait(scene.rest.list_sessions(limit=100)).sessions
    found = wait(scene.rest.get_session(session))
    assert scene.training.model_id in found.training_run_ids
    sampler = scene.sampler(base_model=scene.model)
    assert wait(scene.rest.get_session(session)).sampler_ids
    return {"sampler": type(sampler).__name__}


def sampler(scene: Connection) -> Facts:
    path = wait(scene.training.save_weights_for_sampler(unique("known"))).path
    scene.sampler(model_path=path)
    session = scene.training.model_id.partition(":")[0]
    ids = wait(scene.rest.get_session(session)).sampler_ids
    known = [wait(scene.rest.get_sampler(one)) for one in ids]
    assert path in [one.model_path for one in known] and {one.base_model for one in known} >= {
        scene.model
    }
    return {"samplers": len(ids) > 0}


def search(scene: Connection) -> Facts:
    session = scene.training.model_id.partition(":")[0]
    found = wait(scene.rest.search_sessions(types.SessionSearchRequest(session_id=session)))
    assert [one.session_id for one in found.sessions] == [session], found
    page = wait(
        scene.rest.search_sessions(
            types.SessionSearchRequest(user_metadata={"program": "contract"}, limit=1)
        )
    )
    assert len(page.sessions) == 1
    none = wait(
        scene.rest.search_sessions(types.SessionSearchRequest(user_metadata={"program": "another"}))
    )
    assert none.sessions == []
    return {"status": found.sessions[0].status}


def copied(scene: Connection) -> Facts:
    """A copy belongs to a run of its own and holds the same weights."""
    trainer = scene.trainer()
    step(trainer)
    path = wait(trainer.save_weights_for_sampler(unique("source"))).path
    if scene.sdk >= (0, 34):
        copy = wait(scene.rest.copy_weights(path, "a-project", ttl_seconds=3600))
    else:
        copy = wait(scene.service.copy_weights(path, ttl_seconds=3600))
    assert copy != path and "/sampler_weights/" in copy, copy
    all_close(
        all_scores(scene.sampler(model_path=copy)), scores(trainer), "the copy's log-probabilities"
    )
    return {}


def deleted(scene: Connection) -> Facts:
    """Both ways of deleting; what is gone is not listed, and loading it is refused with its
    name.
    """
    run_id = scene.training.model_id
    by_path, by_id = saved(scene, "gone"), saved(scene, "gone-too")
    wait(scene.rest.delete_checkpoint_from_tinker_path(by_path))
    wait(scene.rest.delete_checkpoint(run_id, by_id.partition(f"{run_id}/")[2]))
    assert listed(scene, by_path) is None and listed(scene, by_id) is None
    sentence = refused(lambda: scene.trainer().load_state(by_path))
    assert "gone" in sentence, sentence
    return {"refused": sentence.replace(by_path, "PATH").replace(run_id, "RUN")[:300]}


def bad_data(scene: Connection) -> Facts:
    """A datum without the loss's inputs fails its request with the key's name; the next ones are
    served.
    """
    trainer = scene.trainer()
    sentence = refused(lambda: trainer.forward_backward([datum([5, 6, 7])], "importance_sampling"))
    assert "logprobs" in sentence or "advantages" in sentence, sentence
    far = datum([5, 10_000_000, 7], weights=plain()[1].loss_fn_inputs["weights"])
    assert refused(lambda: trainer.forward_backward([far], "cross_entropy"))
    assert step(trainer) > 0
    return {"refused": sentence[:300]}


def unknown_names(scene: Connection) -> Facts:
    def model() -> Client:
        scene.made(scene.service.create_lora_training_client("nobody/nothing", rank=4))
        raise AssertionError("a model that does not exist was made")

    sentence = refused(model)
    assert scene.model in sentence, f"the sentence names what there is: {sentence}"
    return {"refused": sentence[:300]}


def dimuon(scene: Connection) -> Facts:
    def model() -> Client:
        scene.trainer(optimizer=types.DimuonOptimizerConfig())
        raise AssertionError("a model with the dimuon optimiser was made")

    sentence = refused(model)
    assert "dimuon" in sentence.lower(), sentence
    return {"refused": sentence[:300]}


def assigned(scene: Connection) -> Facts:
    """Projects belong to the hosted console; a session may be put into one all the same."""
    session = scene.training.model_id.partition(":")[0]
    wait(scene.rest.assign_session_project(session, "a-project"))
    return {}


def administration(scene: Connection) -> Facts:
    """The hosted service's books: answered, though there is nothing in them."""
    audit = wait(scene.rest.get_audit_log())
    usage = wait(scene.rest.get_billing_usage("2030-01-01T00:00:00Z", "2030-01-02T00:00:00Z"))
    assert audit.entries == [] and list(usage.data) == []
    return {}


def close(scene: Connection) -> Facts:
    wait(scene.service.close("success", detail="the program ends"))
    return {}


STEPS = (
    Step(
        "training runs",
        training_runs,
        proves=(
            "records:runs",
            "records:zones",
        ),
    ),
    Step("list_checkpoints", checkpoints, proves=("records:checkpoints",)),
    Step("list_user_checkpoints", user_checkpoints, since=(0, 9), proves=("records:checkpoints",)),
    Step("publish and unpublish", publish, since=(0, 9), proves=("checkpoint:publish",)),
    Step("time to live", ttl, since=(0, 14), proves=("checkpoint:ttl",)),
    Step("user_metadata of a checkpoint", metadata, since=(0, 27)),
    Step("get_weights_info", weights_info, since=(0, 9), proves=("records:weights-info",)),
    Step("sessions", sessions, since=(0, 9), proves=("records:sessions",)),
    Step("get_sampler", sampler, since=(0, 9), proves=("records:samplers",)),
    Step("search_sessions", search, since=(0, 36), proves=("records:search",)),
    Step("copy_weights", copied, since=(0, 27), proves=("checkpoint:copy",)),
    Step("delete checkpoints", deleted, proves=("checkpoint:delete",)),
    Step(
        "bad data is the user's error",
        bad_data,
        proves=(
            "promise:failure",
            "pass:bad-datum",
        ),
    ),
    Step("unknown names", unknown_names, proves=("error:unknown-model",)),
    Step("dimuon is refused", dimuon, since=(0, 29, 1), proves=("optim:dimuon-refused",)),
    Step("assign_session_project", assigned, since=(0, 22)),
    Step("audit and billing", administration, since=(0, 25), proves=("records:administration",)),
    Step("close", close, since=(0, 27, 2), proves=("session:finish",)),
)
