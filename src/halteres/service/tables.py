"""The journal's tables.

Owns: their columns.
Never: reads or writes them.

    requests     id, dedupe key, kind, whom it concerns, seq, body, drawn seeds; later its state and outcome
    sessions     one client's connection
    models       training runs
    samplers     sampling sessions
    checkpoints  named weights on disk
    burnt        sequence numbers that a refused request used up
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, LargeBinary, MetaData, String, Table

SCHEMA = MetaData()

REQUESTS = Table(
    "requests",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("key", String, nullable=False, unique=True),
    Column("kind", String, nullable=False),
    Column("subject", String, nullable=False, index=True),  # training run, sampling session or run
    Column("seq", BigInteger),
    Column("content_type", String, nullable=False),
    Column("body", LargeBinary, nullable=False),  # as it came, decompressed
    Column("drawn", JSON(none_as_null=True)),  # seeds that the service drew for it
    Column("accepted_at", Float, nullable=False),  # unix s
    Column("state", String, nullable=False),  # accepted, settled, lost
    Column("settled_at", Float),
    Column("outcome_type", String),
    Column("outcome", LargeBinary),  # of training requests; samples are drawn again
)

SESSIONS = Table(
    "sessions",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("finished", String),  # its reason
)

MODELS = Table(
    "models",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)

SAMPLERS = Table(
    "samplers",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("base_model", String, nullable=False),
    Column("model_path", String),  # None: the base model, or an ephemeral snapshot
    Column("ephemeral", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
)

CHECKPOINTS = Table(
    "checkpoints",
    SCHEMA,
    Column("path", String, primary_key=True),
    Column("model_id", String, nullable=False, index=True),
    Column("version", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)

BURNT = Table(
    "burnt",
    SCHEMA,
    Column("model_id", String, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
)
