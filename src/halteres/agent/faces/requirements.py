"""What the tools need of this process, in the seeds' words.

Owns: whether they may be offered; what is missing.
Never: asks for a key that no policy asks for: training here needs none.

Source: seed 002. It hid the tools without two keys; policy `hermes-compat` asks for them again.
"""

from __future__ import annotations

import sys

from halteres.config import environ
from halteres.config.policies import load_policy
from halteres.errors import InvalidConfig

OLDEST = (3, 11)


def check_rl_python_version() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info >= OLDEST


def check_rl_api_keys() -> bool:
    """Whether the tools can be used: the Python version, and keys where the policy in force asks for some."""
    return not get_missing_keys()


def get_missing_keys() -> list[str]:
    """What is missing, in words: a newer Python, or variables that the policy in force asks for."""
    missing = [name for name in _required() if not environ.is_set(name)]
    if check_rl_python_version():
        return missing
    current = ".".join(map(str, sys.version_info[:2]))
    return [f"Python >= {'.'.join(map(str, OLDEST))} (current: {current})", *missing]


def _required() -> tuple[str, ...]:
    """The keys without which a policy hides the tools; none where its file cannot be read, which every tool tells."""
    try:
        return load_policy().require_keys.gate
    except InvalidConfig:
        return ()
