"""The journal's tables.

requests       id, dedupe key, kind, whom it concerns, seq, body, drawn seeds; later its state and outcome
sessions       one client's connection
models         training runs, each with the point from which its adapter can be brought back
samplers       sampling sessions
checkpoints    named weights on disk
burnt          sequence numbers that a refused request used up
custom_losses  graphs of operations that clients wrote, by session
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Index, LargeBinary, MetaData, String, Table

LAYOUT = 2  # written into the file (PRAGMA user_version); a journal of another layout is refused

SCHEMA = MetaData()

REQUESTS = Table(
    "requests",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("key", String, nullable=False, unique=True),
    Column("kind", String, nullable=False),
    Column("subject", String, nullable=False),  # training run, sampling session or run
    Column("tenant", String, nullable=False),
    Column("seq", BigInteger),
    Column("content_type", String, nullable=False),
    Column("body", LargeBinary, nullable=False),  # as it came, decompressed
    Column("drawn", JSON(none_as_null=True)),  # seeds that the service drew for it
    Column("accepted_at", Float, nullable=False),  # unix s
    Column("state", String, nullable=False),  # accepted, done, or failed_user, failed_server
    Column("settled_at", Float),
    Column("outcome_type", String),
    Column("outcome", LargeBinary),  # of training requests and of failures; samples are drawn again
    Index("requests_of_subject", "subject", "seq"),
    Index("requests_by_settling", "settled_at"),
    Index("requests_open", "state", sqlite_where=Column("state") == "accepted"),
)

SESSIONS = Table(
    "sessions",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("project_id", String),
    Column("display_name", String),
    Column("created_at", Float, nullable=False),
    Column("finished", String),  # its reason
    Column("finished_at", Float),
)

MODELS = Table(
    "models",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("tenant", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("point", BigInteger),  # number of the request after which its newest restore point was taken
    Column("covered", BigInteger),  # ... up to which no request is needed to bring its adapter back
    Column("settled", BigInteger),  # ... and up to which everything was settled then
)

SAMPLERS = Table(
    "samplers",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("tenant", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("model_path", String),  # of named weights
    Column("model_id", String),  # of unnamed ones: the training run ...
    Column("seq", BigInteger),  # ... the number of the request that published them
    Column("snapshot", String),  # ... and their name in the engine
    Column("version", BigInteger),  # ... and policy version
    Column("inflight", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
)

CHECKPOINTS = Table(
    "checkpoints",
    SCHEMA,
    Column("path", String, primary_key=True),
    Column("model_id", String, nullable=False, index=True),
    Column("tenant", String, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("public", Boolean, nullable=False),
    Column("request_id", String),  # whose outcome it is
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)

BURNT = Table(
    "burnt", SCHEMA, Column("model_id", String, primary_key=True), Column("seq", BigInteger, primary_key=True)
)

CUSTOM_LOSSES = Table(
    "custom_losses",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("seq", BigInteger, nullable=False),
    Column("name", String, nullable=False),  # of the client's function
    Column("loss", JSON, nullable=False),  # CustomLoss, checked
    Column("created_at", Float, nullable=False),
)
