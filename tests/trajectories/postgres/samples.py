"""Records to store: one of every kind of change, each field filled."""

from __future__ import annotations

from typing import Any

from halteres.trajectories.records import (
    Change,
    Delivery,
    EnvRecord,
    EnvSeen,
    GroupArrived,
    GroupRecord,
    Place,
    RunRecord,
    Standing,
    Update,
)
from halteres.trajectories.schema import EnvRegistration, Registration
from halteres.trajectories.stores.postgres import PostgresStore

REGISTRATION = Registration(
    wandb_group="g",
    wandb_project="p",
    batch_size=4,
    max_token_len=64,
    checkpoint_dir="/ckpt",
    save_checkpoint_interval=5,
    starting_step=3,
    num_steps=10,
    run_id="r17",
    max_staleness=0,
)
ENV = EnvRegistration(
    max_token_length=64, desired_name="sums", weight=0.5, group_size=2, min_batch_allocation=0.25
)


def group(number: int, **changes: Any) -> GroupRecord:
    """A group of two sequences that waits."""
    plain: dict[str, Any] = {
        "id": number,
        "env_id": 0,
        "size": 2,
        "num_bytes": 10,
        "received_at": 1000.0 + number,
        "place": Place.QUEUED,
        "position": number,
    }
    return GroupRecord(**{**plain, **changes})


def arrived(number: int, body: bytes = b"", **changes: Any) -> GroupArrived:
    """A group comes in; its tokens are its number unless said."""
    return GroupArrived(group(number, **changes), body or b"%d" % number)


def keyed(number: int, key: str, **changes: Any) -> GroupArrived:
    """A group comes in with an Idempotency-Key."""
    return arrived(
        number, key=key, fingerprint=number * 2**32, verdict=b'{"status":"received"}', **changes
    )


def bare(change: GroupArrived) -> GroupArrived:
    """As other servers hear of it: without its tokens."""
    return GroupArrived(change.group, b"")


def batch(
    number: int, *groups: int, standing: Standing = Standing.LEASED, **changes: Any
) -> Delivery:
    """A batch of groups of two sequences."""
    plain: dict[str, Any] = {"version": None, "made_at": 2000.0, "num_sequences": 2 * len(groups)}
    return Delivery(id=number, standing=standing, groups=groups, **{**plain, **changes})


def delivered(number: int, *groups: int, step: int) -> list[Change]:
    """A batch is delivered: its own record, and the run's."""
    done = batch(number, *groups, standing=Standing.DELIVERED, step=step)
    return [done, RunRecord(registration=REGISTRATION, step=step, last=done)]


def turn(store: PostgresStore, *changes: Change) -> Update:
    """One turn that changes this; gives the news it began with."""
    news = store.begin()
    store.commit(changes)
    return news


ADOPTED = EnvRecord(id=7, name="adopted_7", desired_name="adopted_7", registration=None)

CHANGES: list[Change] = [
    RunRecord(
        registration=REGISTRATION,
        uuid=str(2**127 + 1),
        started=True,
        step=4,
        first_group=1,
        asked_version=2**31,
        last=batch(1, 1, 2, standing=Standing.DELIVERED, step=4),
        parked=True,
    ),
    EnvRecord(id=0, name="sums_0", desired_name="sums", registration=ENV, connected=False),
    EnvSeen(0, 1234.5),
    GroupArrived(
        group(
            5,
            env_id=None,
            place=Place.SET_ASIDE,
            versions=(2, 3),
            reason="not_finite",
            why="scores[0] is NaN — ‘no number’.",
            delivery=9,
            key="k" * 200,
            fingerprint=2**62,
            verdict=b'{"status":"received"}',
        ),
        b'{"tokens":[[1]]}',
    ),
    group(6, place=Place.BUFFERED, position=0),
    batch(2, 3, 4, expires_at=2060.5, version=1),
]
