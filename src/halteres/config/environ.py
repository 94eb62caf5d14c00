"""The only reader of environment variables.

Owns: every variable's name, meaning and default.
Never: is read at import; each function reads when called.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """HALTERES_HOME: where runs, services and models live (default ~/.halteres)."""
    return Path(os.environ.get("HALTERES_HOME") or Path.home() / ".halteres").expanduser().absolute()


def log_level() -> str:
    """HALTERES_LOG: level of the log on stderr (default INFO)."""
    return os.environ.get("HALTERES_LOG", "INFO").upper()


def lifeline_fd() -> int | None:
    """HALTERES_LIFELINE_FD: descriptor of the pipe that ends when the starting process does."""
    value = os.environ.get("HALTERES_LIFELINE_FD")
    return int(value) if value else None


def service_url() -> str | None:
    """TINKER_BASE_URL: a training service to use instead of starting one."""
    return os.environ.get("TINKER_BASE_URL") or None


def api_key() -> str | None:
    """TINKER_API_KEY: the key sent to the training service."""
    return os.environ.get("TINKER_API_KEY") or None


def threads() -> int | None:
    """HALTERES_THREADS: threads of the engine (default: cores - 1, at least 1)."""
    value = os.environ.get("HALTERES_THREADS")
    return int(value) if value else None


def set_threads(count: int) -> None:
    """Fix the thread count of numeric libraries; call before they are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def for_child(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a child. Names no hub and no telemetry: a run needs no network."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "HALTERES_LIFELINE_FD"}
    return {**quiet, **inherited, **changes}


_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")


def for_stranger(**changes: str) -> dict[str, str]:
    """The environment for a child that gets no secrets: `for_child` without anything named like one."""
    return {name: value for name, value in for_child(**changes).items() if not name.upper().endswith(_SECRET)}
