"""What a server owes a client before any work: start-up, keys, encodings, sessions."""

from __future__ import annotations

from .requirement import Requirement as Must

CONNECTING = (
    Must(
        id="connect:start-up",
        says=(
            "client/config, client/dynamic_config and create_session answer in this order, and "
            "steer the client"
        ),
        source="tinker 0.38.0 lib/internal_client_holder.py",
    ),
    Must(
        id="connect:capabilities",
        says="healthz and get_server_capabilities name the models that can be trained and sampled",
        source="tinker 0.38.0 resources/service.py",
    ),
    Must(
        id="connect:older-sdks",
        says="every generation from 0.3 to the newest connects, trains, saves and samples",
        source="tinker 0.3.0 to 0.38.0, recorded traffic",
    ),
    Must(
        id="connect:retired-routes",
        says=(
            "routes that only older SDKs call (models/{id}/checkpoints, forward, archive) answer "
            "as they did"
        ),
        source="tinker 0.3.0, 0.24 and 0.35 resources/",
    ),
    Must(
        id="wire:null-and-unknown",
        says=(
            "unknown request fields are ignored, null counts as absent, and absent fields get "
            "the SDK's defaults"
        ),
        source="recorded traffic of 0.9.0: only fields that the user set are sent",
    ),
    Must(
        id="wire:content-type",
        says="protobuf and JSON bodies of one request mean the same",
        source="tinker 0.24.1 and 0.25.0 resources/training.py",
    ),
    Must(
        id="wire:accept",
        says=(
            "samples and passes are answered in protobuf or JSON as Accept says: JSON up to "
            "0.24, protobuf since"
        ),
        source="tinker 0.18.2 lib/api_future_impl.py",
    ),
    Must(
        id="wire:zstd",
        says="zstd bodies are read, and one that would unpack beyond the cap is refused",
        source="tinker 0.38.0 proto/request_conv.py (proto_compress_fwdbwd)",
    ),
    Must(
        id="wire:nothing-breaks-it",
        says=(
            "random, truncated or absurd bodies give a 4xx or a typed failure, never a 500 and "
            "never a dead engine"
        ),
        source="our choice",
    ),
    Must(
        id="session:heartbeat",
        says=(
            "a heartbeat keeps a session alive; a finished one answers 410, which ends the "
            "client's loop"
        ),
        source="tinker 0.38.0 lib/internal_client_holder.py",
    ),
    Must(
        id="session:finish",
        says="finish answers 204, the first reason wins, and what the session saved stays",
        source="tinker 0.38.0 lib/public_interfaces/service_client.py",
    ),
    Must(
        id="session:silent",
        says=(
            "a session that falls silent is reaped late and configurably; its checkpoints never are"
        ),
        source="our choice",
    ),
    Must(
        id="session:telemetry",
        says="telemetry is accepted with 2xx and not kept",
        source="tinker 0.38.0 lib/telemetry.py",
    ),
    Must(
        id="session:tokenizer",
        says=(
            "training clients find their tokenizer without a hub: get_info names an absolute folder"
        ),
        source=(
            "tinker 0.38.0 lib/public_interfaces/training_client.py, "
            "_load_tokenizer_from_model_info"
        ),
    ),
    Must(
        id="session:sampler-tokenizer",
        says=(
            "sampling clients find it where the base model is named by its folder or registered "
            "in the hub's cache"
        ),
        source="tinker 0.38.0 lib/public_interfaces/sampling_client.py",
    ),
    Must(
        id="keys:needed-beyond-loopback",
        says="on loopback any key will do; anywhere else a known key is needed, and others get 401",
        source="our choice",
    ),
    Must(
        id="keys:hashed",
        says="keys are hashed at rest, can be listed and revoked; a revoked one is refused at once",
        source="our choice",
    ),
    Must(
        id="keys:isolation",
        says="sessions, models, samplers and checkpoints of another tenant are not found",
        source="our choice",
    ),
    Must(
        id="keys:limits",
        says=(
            "rates and sizes beyond a tenant's limits are refused with a sentence and leave the "
            "others alone"
        ),
        source="our choice",
    ),
    Must(
        id="keys:whoami",
        says="rest.whoami() tells who the caller is",
        source="tinker 0.38.0 lib/public_interfaces/rest_client.py",
        gap=(
            "the SDK reads it from a JWT that only the hosted service's login issues; it asks no "
            "server"
        ),
    ),
)
