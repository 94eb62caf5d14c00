"""The tables of a trajectory database.

Owns: names and types of columns; one row type per record.
Never: is queried here (`sqlite` does).
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

SCHEMA_VERSION = 1

metadata = MetaData()

run = Table(
    "run",
    metadata,
    Column("id", Integer, primary_key=True),  # always 1: the run being served
    Column("registration", Text),  # JSON; null before /register
    Column("uuid", String(40), nullable=False),
    Column("started", Boolean, nullable=False),
    Column("step", Integer, nullable=False),
    Column("first_group", Integer, nullable=False),
    Column("asked_version", Integer),
    Column("last_delivery", Integer),
    Column("parked", Boolean, nullable=False),
)

environments = Table(
    "environments",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("desired_name", Text, nullable=False),
    Column("registration", Text),  # JSON; null if adopted
    Column("connected", Boolean, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("env_id", BigInteger),
    Column("size", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("place", String(16), nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("version_min", Integer),
    Column("version_max", Integer),
    Column("reason", String(64)),
    Column("why", Text),
    Column("delivery", Integer),
    Column("key", Text, unique=True),
    Column("fingerprint", BigInteger, nullable=False),
    Column("verdict", LargeBinary, nullable=False),
    Index("groups_by_place", "place", "position"),
    Index("groups_by_delivery", "delivery"),
)

bodies = Table(
    "bodies",
    metadata,
    Column("group_id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("element", LargeBinary, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("version", Integer),
    Column("num_sequences", Integer, nullable=False),
    Column("delivered_at", Float, nullable=False),
)
