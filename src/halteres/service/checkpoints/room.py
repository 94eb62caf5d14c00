"""Room for a further checkpoint.

Owns: how large it will be, before it is there.
Never: deletes one to make room.
"""

from __future__ import annotations

from collections.abc import Sequence

from halteres.service.checkpoints.checkpoint import Checkpoint
from halteres.service.checkpoints.paths import TinkerPath
from halteres.service.tenancy.limits import Allowances
from halteres.service.tenancy.tenants import Tenant


def refuse_save(
    allowances: Allowances, held: Sequence[Checkpoint], tenant: Tenant, path: TinkerPath, *, kept: bool
) -> None:
    """Raise LimitReached if a tenant, which holds these, has no room for a further checkpoint at `path`.

    How large it will be is known from the last one of its training run: adapters do not grow. The first is saved where
    there is room at all. One that takes another's place needs no room, unless that other one is `kept`.
    """
    sizes = {str(found.path): found.size_bytes for found in held}
    alike = [one for one in held if (one.path.run, one.path.kind) == (path.run, path.kind)]
    used = sum(sizes.values()) - (0 if kept else sizes.get(str(path), 0))
    allowances.of(tenant).check_storage(used, alike[-1].size_bytes if alike else 1, sizes)
