"""What may not be set."""

from halteres.config.policies import (
    UNKNOWN_YET,
    Lock,
    how_to_unlock,
    is_own_wiring,
    locks_beside,
    over_cap,
    policy_lock,
    variant_lock,
)

__all__ = [
    "UNKNOWN_YET",
    "Lock",
    "how_to_unlock",
    "is_own_wiring",
    "locks_beside",
    "over_cap",
    "policy_lock",
    "variant_lock",
]
