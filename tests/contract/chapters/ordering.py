"""What a server owes a client while it works: promises, order, repetition, durability, ids."""

from __future__ import annotations

from .requirement import Requirement as Must

ORDERING = (
    Must(
        id="promise:not-ready",
        says=(
            "an unsettled promise answers 408 with its queue state within 30 s, and the SDK asks "
            "again"
        ),
        source="tinker 0.38.0 lib/api_future_impl.py",
    ),
    Must(
        id="promise:same-bytes",
        says="a repeated poll gets the same bytes, for a while",
        source="our choice",
    ),
    Must(
        id="promise:failure",
        says=(
            "a request that fails settles as 200 {error, category} and raises RequestFailedError "
            "with the sentence"
        ),
        source="tinker 0.38.0 lib/api_future_impl.py",
    ),
    Must(
        id="promise:lost-sample",
        says="a sampling promise that cannot be kept answers 410, and the client submits it again",
        source="tinker 0.38.0 lib/public_interfaces/sampling_client.py",
    ),
    Must(
        id="promise:metadata",
        says=(
            "complete_metadata with the payload's size is sent only where allow_metadata_only is "
            "true"
        ),
        source="tinker 0.38.0 lib/api_future_impl.py",
    ),
    Must(
        id="promise:cancel",
        says="cancel_future answers 204 and frees what the sample held",
        source="tinker 0.38.0 lib/internal_client_holder.py",
    ),
    Must(
        id="order:seq-id",
        says="requests of one model run in seq_id order; a gap is awaited",
        source="tinker 0.38.0 lib/public_interfaces/training_client.py, _take_turn",
    ),
    Must(
        id="order:first-chunk-last",
        says="chunks of one pass may arrive in any order, the first one last",
        source=(
            "tinker 0.38.0 lib/public_interfaces/training_client.py, _run_fwd_bwd; recorded traffic"
        ),
    ),
    Must(
        id="order:burnt-number",
        says="a request that is refused has used up its seq_id: the next ones run",
        source="recorded traffic of 0.38.0: after a 4xx the client goes on with seq_id + 1",
    ),
    Must(
        id="order:pipelined",
        says="an optim_step that is sent while its pass is open runs after it",
        source="recorded traffic of 0.38.0",
    ),
    Must(
        id="order:models-apart",
        says="one model never waits for another's gap",
        source="our choice",
    ),
    Must(
        id="retry:training",
        says="a repeated (model_id, seq_id) gets the first promise and runs once",
        source="tinker 0.38.0 lib/internal_client_holder.py, execute_with_retries",
    ),
    Must(
        id="retry:ephemeral-save",
        says="a repeated ephemeral save with a new sampling_session_seq_id gets the first sampler",
        source="recorded traffic of 0.38.0",
    ),
    Must(
        id="retry:sampling",
        says=(
            "a repeated (sampling_session_id, seq_id) gets the same sample, and a repeated "
            "session the same id"
        ),
        source="tinker 0.38.0 lib/public_interfaces/sampling_client.py",
    ),
    Must(
        id="retry:create",
        says="a repeated (session_id, model_seq_id) makes one model",
        source="tinker 0.38.0 lib/public_interfaces/service_client.py",
    ),
    Must(
        id="retry:copy",
        says="a repeated X-Idempotency-Key makes one copy",
        source="tinker 0.38.0 lib/public_interfaces/rest_client.py",
    ),
    Must(
        id="retry:no-lasting-409",
        says="no lasting conflict is answered 409, which the client repeats for five minutes",
        source="tinker 0.38.0 lib/internal_client_holder.py",
    ),
    Must(
        id="retry:hold-back",
        says="too many samples answer 429; the client waits and sends the same seq_id again",
        source="recorded traffic of 0.38.0 (scen-asample429)",
    ),
    Must(
        id="durable:journal",
        says="every accepted request is a row, with any seed drawn for it, before it runs",
        source="our choice",
    ),
    Must(
        id="durable:kill-service",
        says=(
            "after kill -9 of the service a plain SDK loop ends with the losses of an "
            "undisturbed run"
        ),
        source="our choice",
    ),
    Must(
        id="durable:kill-engine",
        says=(
            "after kill -9 of the engine a plain SDK loop ends with the losses of an undisturbed "
            "run"
        ),
        source="our choice",
    ),
    Must(
        id="durable:one-answer",
        says="a sample that its engine would not draw the same way again is kept: it has one "
        "answer, the first, or an"
        " error that says that it is gone",
        source="our choice",
    ),
    Must(
        id="durable:known-again",
        says="sessions, models, samplers and checkpoints are known again after a restart",
        source="our choice",
    ),
    Must(
        id="tenants:no-leak",
        says=(
            "no weight and no sample of one client changes by a bit because of another's "
            "requests or failures"
        ),
        source="our choice",
    ),
    Must(
        id="id:training-run",
        says="a training run's id is SESSION:train:NUMBER; 0.38 computes it itself",
        source="tinker 0.38.0 lib/public_interfaces/service_client.py",
    ),
    Must(
        id="id:path",
        says=(
            "a path is tinker://RUN/KIND/NAME; a name with '/' or a way out of the folder is "
            "refused"
        ),
        source="tinker 0.38.0 types/checkpoint.py",
    ),
    Must(
        id="id:sequences",
        says="a sample's promise carries num_samples sequence ids, unique in the session",
        source="tinker 0.38.0 lib/public_interfaces/sampling_client.py",
    ),
    Must(
        id="id:int64",
        says=(
            "a sampling seq_id may be near 1e18: unpickled clients start at a random multiple of "
            "1e9"
        ),
        source="recorded traffic of 0.38.0 (60_pickled_sampler_sample)",
    ),
)
