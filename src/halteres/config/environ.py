"""The only reader of environment variables.

Owns: every variable's name, meaning and default.
Never: is read at import; each function reads when called.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from halteres.errors import InvalidConfig

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEVICES = ("cpu", "cuda")
LOOPBACK = ("127.0.0.1", "localhost")


def home() -> Path:
    """HALTERES_HOME: where runs, services and models live (default ~/.halteres)."""
    return Path(os.environ.get("HALTERES_HOME") or Path.home() / ".halteres").expanduser().absolute()


def log_level() -> str:
    """HALTERES_LOG: level of the log on stderr (default INFO)."""
    level = (os.environ.get("HALTERES_LOG") or "INFO").strip().upper()
    if level not in LOG_LEVELS:
        raise _misread("HALTERES_LOG", level, f"It is one of {', '.join(LOG_LEVELS)}.")
    return level


def lifeline_fd() -> int | None:
    """HALTERES_LIFELINE_FD: descriptor of the pipe that ends when the starting process does."""
    value = os.environ.get("HALTERES_LIFELINE_FD")
    if not value:
        return None
    if not value.isdecimal():
        raise _misread("HALTERES_LIFELINE_FD", value, "It is the number of an open descriptor.")
    return int(value)


def service_url() -> str | None:
    """TINKER_BASE_URL: a training service to use instead of starting one."""
    return os.environ.get("TINKER_BASE_URL") or None


API_KEY = "TINKER_API_KEY"


def api_key() -> str | None:
    """TINKER_API_KEY: the key sent to the training service."""
    return os.environ.get(API_KEY) or None


TRAJECTORY_TOKEN, SERVICE_KEY = "HALTERES_TRAJECTORY_TOKEN", "HALTERES_SERVICE_KEY"
REWARD_KEY = "HALTERES_REWARD_KEY"
_RUN_SECRET = "HALTERES_RUN_SECRET"  # noqa: S105 - a name


def trajectory_token() -> str | None:
    """HALTERES_TRAJECTORY_TOKEN: what a trajectory server of a run, or beyond this machine, asks its clients for."""
    return os.environ.get(TRAJECTORY_TOKEN) or None


def service_key() -> str | None:
    """HALTERES_SERVICE_KEY: a key that a training service takes from its one user, beside those of its file."""
    return os.environ.get(SERVICE_KEY) or None


def reward_key() -> str | None:
    """HALTERES_REWARD_KEY: what a reward server asks its clients for, where its address holds no login."""
    return os.environ.get(REWARD_KEY) or None


def run_secret() -> str:
    """HALTERES_RUN_SECRET: what a run's own servers ask for; the run sets it itself, never its user."""
    return os.environ[_RUN_SECRET]


def set_run_secret(secret: str) -> None:
    """Make it known to this process, which then strikes it out of whatever it writes, and hands it to no child."""
    os.environ[_RUN_SECRET] = secret


def database_url() -> str | None:
    """HALTERES_DATABASE_URL: the database of `halteres serve trajectories`, where `--database` names none."""
    return os.environ.get("HALTERES_DATABASE_URL") or None


def threads() -> int | None:
    """HALTERES_THREADS: threads of the engine (default: cores - 1, at least 1)."""
    value = os.environ.get("HALTERES_THREADS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise _misread("HALTERES_THREADS", value, "It is a number of threads, 1 or more.")
    return int(value)


def device() -> str:
    """HALTERES_DEVICE: what the engine computes on, `cpu` or `cuda` (default cpu: `cuda` is not verified yet)."""
    name = os.environ.get("HALTERES_DEVICE") or "cpu"
    if name not in DEVICES:
        raise _misread("HALTERES_DEVICE", name, f"It is one of {', '.join(DEVICES)}.")
    return name


def set_threads(count: int) -> None:
    """Fix the thread count of numeric libraries; call before they are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def stay_offline() -> None:
    """From here on this process asks no Hugging Face hub, unless its user has set HF_HUB_OFFLINE; call before its
    libraries are imported. Models are folders of this machine; nothing is downloaded in the middle of work."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def check() -> None:
    """Read every variable that can be wrong. InvalidConfig names it."""
    log_level()
    threads()
    device()


def for_child(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a child.

    Names no telemetry. Whether a hub is asked is left as it is: an environment may load its data from one
    (`stay_offline` is for processes of ours). Exempts loopback from any proxy: what talks to the processes of a run
    (the SDK's httpx among them) would ask the proxy for 127.0.0.1.
    """
    quiet = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_ERROR_REPORTING": "false",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "HALTERES_LIFELINE_FD"}
    return {**quiet, **inherited, **_past_proxies(), **changes}


def _past_proxies() -> dict[str, str]:
    """Both spellings of NO_PROXY, each with what was exempt already and with loopback."""
    given = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}".split(",")
    names = dict.fromkeys([*(name.strip() for name in given if name.strip()), *LOOPBACK])
    exempt = "*" if "*" in names else ",".join(names)  # urllib knows the asterisk only alone
    return {"no_proxy": exempt, "NO_PROXY": exempt}


_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")
_SECRET_WORDS = ("PASS", "PASSWD", "PWD", "PAT", "PASSPHRASE")  # as last words alone: there is PWD, and SSH_ASKPASS
_ADDRESS = ("_URL", "_PROXY", "_DSN")
_LOGIN = re.compile(r"(?P<before>^|://)[^\s/:@]*:(?P<password>[^\s/]+)@")


def for_sandboxed(**changes: str) -> dict[str, str]:
    """The environment for a child that gets no secrets: `for_child` without anything named like one, and with no login
    in an address."""
    return {
        name: _LOGIN.sub(r"\g<before>", value) if _is_address(name) else value
        for name, value in for_child(**changes).items()
        if not is_secret(name)
    }


def with_keys(*names: str, **changes: str) -> dict[str, str]:
    """The environment for a child that gets no secrets but these; and, where there are any, the proxies with their
    logins: a key is for somebody outside."""
    given = {name for name in os.environ if name in names or (names and name.upper().endswith("_PROXY"))}
    told = {name: os.environ[name] for name in given if name.upper() != "NO_PROXY"}
    return {**for_sandboxed(), **told, **changes}


def secrets() -> dict[str, str]:
    """What is secret in this process's variables, by their names: values of those named like secrets, passwords within
    addresses."""
    found = {name: _secret(name, value) for name, value in os.environ.items()}
    return {name: secret for name, secret in found.items() if secret}


def _secret(name: str, value: str) -> str:
    if is_secret(name):
        return value
    login = _LOGIN.search(value) if _is_address(name) else None
    return login["password"] if login else ""


def is_secret(name: str) -> bool:
    """Whether a variable or a setting is named like a secret."""
    words = name.upper()
    own = words not in ("PWD", "OLDPWD") and words.rpartition("_")[2] in _SECRET_WORDS
    return words.endswith(_SECRET) or own


def _is_address(name: str) -> bool:
    return name.upper().endswith(_ADDRESS)


def hub_cache() -> Path:
    """HF_HUB_CACHE (HUGGINGFACE_HUB_CACHE), or `hub` in HF_HOME (default ~/.cache/huggingface): where Hugging Face's
    libraries look for what they would download."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not named:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        named = Path(os.environ.get("HF_HOME") or Path(base) / "huggingface") / "hub"
    return Path(os.path.expandvars(named)).expanduser().absolute()


def has_proxy() -> bool:
    """Whether HTTP goes through a proxy: HTTP_PROXY, HTTPS_PROXY or ALL_PROXY in either spelling."""
    return any(is_set(name) or is_set(name.lower()) for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"))


def is_set(name: str) -> bool:
    """Whether a variable has a value: for keys whose presence alone matters."""
    return bool(os.environ.get(name))


def openrouter_key() -> str | None:
    """OPENROUTER_API_KEY: sent to the endpoint of `rl_test_inference` where models are not local."""
    return os.environ.get("OPENROUTER_API_KEY") or None


def openrouter_url() -> str:
    """OPENROUTER_BASE_URL: any OpenAI-compatible endpoint (default OpenRouter's)."""
    return (os.environ.get("OPENROUTER_BASE_URL") or "https://openrouter.ai/api/v1").rstrip("/")


def wandb_project() -> str:
    """WANDB_PROJECT: default of run.wandb_project (atropos-tinker where unset)."""
    return os.environ.get("WANDB_PROJECT") or "atropos-tinker"


def wandb_entity() -> str | None:
    """WANDB_ENTITY: default of run.wandb_entity."""
    return os.environ.get("WANDB_ENTITY") or None


def trackio_dir(default: Path) -> Path:
    """TRACKIO_DIR: where trackio keeps its database; set to `default` where it is not."""
    return Path(os.environ.setdefault("TRACKIO_DIR", str(default))).expanduser().absolute()


def agent_session() -> str | None:
    """HALTERES_SESSION: the draft that tools work on where no call names one."""
    return os.environ.get("HALTERES_SESSION") or None


def longest_wait_s() -> float:
    """HALTERES_LONGEST_WAIT_S: seconds that a tool's call may wait at most, which is less than the host of the tools
    gives a call (default 50; 45 to 3600). `halteres install-agent` sets it for hosts whose time-out is known."""
    value = os.environ.get("HALTERES_LONGEST_WAIT_S")
    if not value:
        return 50.0
    if not value.isdecimal() or not 45 <= int(value) <= 3600:
        raise _misread("HALTERES_LONGEST_WAIT_S", value, "It is a number of seconds from 45 to 3600.")
    return float(value)


def hermes_home() -> Path | None:
    """HERMES_HOME: where links to logs are made too, under logs/rl_training, where it is set."""
    given = os.environ.get("HERMES_HOME")
    return Path(given).expanduser().absolute() if given else None


def claude_config_dir() -> Path | None:
    """CLAUDE_CONFIG_DIR: where Claude Code keeps a user's settings, if not in ~/.claude.json and ~/.claude."""
    given = os.environ.get("CLAUDE_CONFIG_DIR")
    return Path(given).expanduser().absolute() if given else None


def codex_home() -> Path:
    """CODEX_HOME: where Codex keeps a user's settings (default ~/.codex)."""
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex").expanduser().absolute()


def environment_folders() -> tuple[Path, ...]:
    """HALTERES_ENVIRONMENTS: folders of environments, separated as in PATH; then HALTERES_HOME/environments."""
    given = (os.environ.get("HALTERES_ENVIRONMENTS") or "").split(os.pathsep)
    return (*(Path(folder).expanduser().absolute() for folder in given if folder), home() / "environments")


def has_display() -> bool:
    """Whether a window can be opened: DISPLAY or WAYLAND_DISPLAY, where systems have those."""
    return sys.platform in ("darwin", "win32") or is_set("DISPLAY") or is_set("WAYLAND_DISPLAY")


def _misread(name: str, value: str, rule: str) -> InvalidConfig:
    return InvalidConfig(f"The variable {name} is '{value}'.", rule, "Correct it, or unset it for the default.")
