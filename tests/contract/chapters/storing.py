"""Checkpoints, exports and records; errors that tell what to do."""

from __future__ import annotations

from .requirement import Requirement as Must

_REST = "tinker 0.38.0 lib/public_interfaces/rest_client.py"

STORING = (
    Must(
        id="checkpoint:exact",
        says=(
            "state with its optimiser is restored exactly: the next steps are those of an "
            "undisturbed run"
        ),
        source="tinker 0.38.0 lib/public_interfaces/training_client.py, load_state_with_optimizer",
    ),
    Must(
        id="checkpoint:weights-alone",
        says="without the optimiser the weights are restored and the optimiser starts fresh",
        source="tinker 0.38.0 lib/public_interfaces/training_client.py, load_state",
    ),
    Must(
        id="checkpoint:new-client",
        says=(
            "a client from state is one session-addressed load_weights (0.38) or three requests "
            "(before)"
        ),
        source="recorded traffic of 0.38.0 and 0.25.0 (24, 25)",
    ),
    Must(
        id="checkpoint:other-shape",
        says=(
            "a load of weights of another rank, or other trained families, into a training run "
            "is a user error"
        ),
        source="the hosted service's answer, in "
        "github.com/thinking-machines-lab/tinker-feedback/issues/65:"
        " 'Checkpoint model configuration is incompatible with target model'; that this holds for "
        "the rank, too, is"
        " our choice",
    ),
    Must(
        id="checkpoint:families-unsaid",
        says=(
            "a load by an SDK before 0.8.0 into a training run of all families takes those of the "
            "weights"
        ),
        source="tinker 0.3.0 to 0.7.0 lib/public_interfaces/service_client.py: a client from state "
        "asks for the rank of the state alone",
    ),
    Must(
        id="checkpoint:overwrite",
        says="overwrite replaces the weights under a name, metadata included",
        source="tinker 0.22.7 types/save_weights_request.py",
    ),
    Must(
        id="checkpoint:saved-again",
        says="a name of one's own training run that is saved again holds the newer weights, the "
        "older stay as NAME.1,"
        " NAME.2, …; what a publication, an export or somebody else holds is a user error",
        source=(
            "our choice; GEM's example saves its last state under a number that it may have "
            "saved before"
        ),
    ),
    Must(
        id="checkpoint:ttl",
        says="a time to live can be given and changed; what has passed it is gone",
        source=_REST,
    ),
    Must(
        id="checkpoint:publish",
        says="a checkpoint can be published and unpublished; a published one is readable by others",
        source=_REST,
    ),
    Must(
        id="checkpoint:delete",
        says=(
            "a deleted checkpoint is not listed, and using it is a user error that names what "
            "there is"
        ),
        source=_REST,
    ),
    Must(
        id="checkpoint:copy",
        says="a copy belongs to a run of its own and holds the same weights",
        source=_REST,
    ),
    Must(
        id="checkpoint:whole",
        says="half a checkpoint never exists, whatever is killed when",
        source="our choice",
    ),
    Must(
        id="checkpoint:peft",
        says=(
            "sampler and training weights are PEFT folders that peft loads and computes the same "
            "logits with"
        ),
        source="peft documentation",
    ),
    Must(
        id="export:external",
        says=(
            "external weights are files behind URLs that need no key, valid for more than five "
            "minutes"
        ),
        source="tinker 0.38.0 cli/commands/checkpoint.py",
    ),
    Must(
        id="export:cookbook",
        says="the export has tinker-cookbook's files and names: r, lora_alpha, unembed_tokens",
        source="tinker-cookbook 0.6.1, weights",
    ),
    Must(
        id="export:age",
        says=(
            "with recipients every file is an age v1 file NAME.age; a malformed one is a user "
            "error, never plain text"
        ),
        source="age specification; tinker 0.33.1 types/save_weights_external_request.py",
    ),
    Must(
        id="export:archive",
        says="up to 0.35 a checkpoint's archive is a redirect to a tar",
        source="tinker 0.33.1 lib/public_interfaces/rest_client.py",
    ),
    Must(
        id="export:merged",
        says="merged Hugging Face weights compute the adapter's logits",
        source="our choice",
    ),
    Must(
        id="export:cli",
        says="the SDK's own checkpoint commands list, show, download and delete",
        source="tinker 0.38.0 cli/",
    ),
    Must(
        id="records:runs",
        says="training runs are listed, newest first, and described",
        source=_REST,
    ),
    Must(
        id="records:checkpoints",
        says="checkpoints are listed per run and for the user, with a cursor",
        source=_REST,
    ),
    Must(
        id="records:weights-info",
        says="weights_info tells base model, rank and what is trained",
        source=_REST,
    ),
    Must(
        id="records:sessions",
        says="sessions are listed, shown with their runs and samplers",
        source=_REST,
    ),
    Must(
        id="records:search",
        says="sessions are found by id, metadata, name and status, newest first, with a cursor",
        source="tinker 0.36.0 types/session_search_request.py",
    ),
    Must(id="records:samplers", says="a sampler tells its base model and path", source=_REST),
    Must(
        id="records:zones",
        says="every time carries a zone",
        source="tinker 0.38.0 types/checkpoint.py",
    ),
    Must(
        id="records:administration",
        says="audit and billing answer with empty books",
        source="tinker 0.38.0 lib/public_interfaces/admin_client.py",
    ),
    Must(
        id="error:unknown-model",
        says="an unknown model or run is answered with what there is",
        source="our choice",
    ),
    Must(
        id="error:sentence",
        says=(
            "every refusal says what, why and what to do next, in `detail` or `error`; no body "
            "is empty"
        ),
        source="tinker 0.38.0 _exceptions.py: the text is what the user reads",
    ),
    Must(
        id="error:server",
        says="a bug or a crash is category server with an id that is in the log",
        source="our choice",
    ),
)
