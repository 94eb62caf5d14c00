"""What processes learn from outside: environment variables (name, meaning, default), read here
alone, never at import; and the request to stop in a run's `control` folder, stop.json: {"mode",
"t"}.
"""

from __future__ import annotations

import importlib.util
import json
import locale
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halteres.errors import InvalidConfig
from halteres.files import read_regular, replace_file

Mode = Literal["now", "after_step"]
"""`now` interrupts the step in progress, `after_step` lets it end; a checkpoint is written either
way.
"""

LARGEST_BATCH = 2**20
"""Sequences of one batch: the trajectory server chooses it in time and memory that grow with its
size.
"""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEVICES = ("cpu", "cuda", "auto")
LOOPBACK = ("127.0.0.1", "localhost")
HTTP_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")  # that httpx reads, in either spelling

API_KEY = "TINKER_API_KEY"
TRAJECTORY_TOKEN, SERVICE_KEY = "HALTERES_TRAJECTORY_TOKEN", "HALTERES_SERVICE_KEY"
REWARD_KEY = "HALTERES_REWARD_KEY"
HEARTBEAT = "HALTERES_HEARTBEAT"
_RUN_SECRET = "HALTERES_RUN_SECRET"  # noqa: S105 - a name


def home() -> Path:
    """HALTERES_HOME: where runs, services and models live (default ~/.halteres)."""
    return _folder("HALTERES_HOME") or Path.home() / ".halteres"


def log_level() -> str:
    """HALTERES_LOG: level of the log on stderr (default INFO)."""
    return _one_of(
        "HALTERES_LOG", (os.environ.get("HALTERES_LOG") or "INFO").strip().upper(), LOG_LEVELS
    )


def lifeline_fd() -> int | None:
    """HALTERES_LIFELINE_FD: descriptor of the pipe that ends when the starting process does."""
    return _number("HALTERES_LIFELINE_FD", "It is the number of an open descriptor.", 0)


def forget_lifeline() -> None:
    """HALTERES_LIFELINE_FD is not this process's: what started it handed no descriptor on."""
    os.environ.pop("HALTERES_LIFELINE_FD", None)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """Which process of a group this is, and where the group meets."""

    rank: int
    size: int
    local_rank: int  # among those of its machine
    address: str
    port: int
    has_launcher: bool = False  # the parent process is torchrun, not somebody else's launcher
    has_store: bool = False  # it listens at the address; else rank 0 does


def torchrun() -> Torchrun | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: this process's place among the ranks
    of a trainer; set by torchrun. None where it is alone.
    """
    rule = "It is a whole number, which torchrun sets."
    rank, size = _number("RANK", rule, 0), _number("WORLD_SIZE", rule, 1)
    local_rank, port = _number("LOCAL_RANK", rule, 0), _number("MASTER_PORT", rule, 1)
    address = os.environ.get("MASTER_ADDR")
    if rank is None or size is None or port is None or not address:
        return None
    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Torchrun(rank, size, local_rank or 0, address, port, has_launcher, has_store)


@dataclass(frozen=True, slots=True)
class AskedHeartbeat:
    """What HALTERES_HEARTBEAT says."""

    file: Path  # to be touched by the event loop
    limit_s: float  # the silence after which the process is ended

    @property
    def variable(self) -> dict[str, str]:
        """The variable for a child; none where it would never be ended."""
        if self.limit_s <= 0:
            return {}
        return {HEARTBEAT: f"{self.limit_s:g}:{self.file}"}


def heartbeat() -> AskedHeartbeat | None:
    """HALTERES_HEARTBEAT: SECONDS:FILE, by which an environment shows that its event loop turns;
    set by what starts it.
    """
    seconds, colon, file = os.environ.get(HEARTBEAT, "").partition(":")
    if not colon:
        return None
    try:
        return AskedHeartbeat(Path(file), float(seconds))
    except ValueError:
        return None


def service_url() -> str | None:
    """TINKER_BASE_URL: a training service to use instead of starting one."""
    return os.environ.get("TINKER_BASE_URL") or None


def api_key() -> str | None:
    """TINKER_API_KEY: the key sent to the training service."""
    return os.environ.get(API_KEY) or None


def trajectory_token() -> str | None:
    """HALTERES_TRAJECTORY_TOKEN: what a trajectory server of a run, or beyond this machine, asks
    its clients for.
    """
    return os.environ.get(TRAJECTORY_TOKEN) or None


def service_key() -> str | None:
    """HALTERES_SERVICE_KEY: a key that a training service takes from its one user, beside those of
    its file.
    """
    return os.environ.get(SERVICE_KEY) or None


def reward_key() -> str | None:
    """HALTERES_REWARD_KEY: what a reward server asks its clients for, where its address holds no
    login.
    """
    return os.environ.get(REWARD_KEY) or None


def sampler_key(variable: str) -> str | None:
    """The key of a sampler at an address: `inference.samplers` names its variable."""
    return os.environ.get(variable) or None


def run_secret() -> str:
    """HALTERES_RUN_SECRET: what a run's own servers ask for; the run sets it itself, never its
    user.
    """
    return os.environ[_RUN_SECRET]


def set_run_secret(secret: str) -> None:
    """Make it known to this process, which then strikes it out of whatever it writes, and hands it
    to no child.
    """
    os.environ[_RUN_SECRET] = secret


def database_url() -> str | None:
    """HALTERES_DATABASE_URL: the database of `halteres serve trajectories`, where `--database`
    names none.
    """
    return os.environ.get("HALTERES_DATABASE_URL") or None


def threads() -> int | None:
    """HALTERES_THREADS: threads of the engine (default: cores - 1, at least 1)."""
    return _number("HALTERES_THREADS", "It is a number of threads, 1 or more.", 1)


def device() -> str:
    """HALTERES_DEVICE: what the engine computes on: `cpu`, `cuda`, or `auto`: a GPU if there is
    one and the model is not small (default cpu: no GPU has been verified yet). One that fails the
    engine's check is refused.
    """
    return _one_of("HALTERES_DEVICE", os.environ.get("HALTERES_DEVICE") or "cpu", DEVICES)


def set_gpu_allocator() -> None:
    """PYTORCH_ALLOC_CONF, unless its user has set it: blocks of a cache that grow by copying would
    leave a GPU's memory full of holes. Call before torch is imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its name before torch 2.9
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def show_one_gpu(number: int) -> None:
    """CUDA_VISIBLE_DEVICES: of the GPUs that this process sees the one with this number, alone. A
    thread computes on the first GPU unless it says otherwise. Call before torch is imported.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
        return
    names = visible.split(",")
    if not names[number:]:
        raise InvalidConfig(
            f"The rank {number} of this machine has no GPU.",
            f"CUDA_VISIBLE_DEVICES is '{visible}'.",
            "Start as many ranks on a machine as it has GPUs.",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number]


def set_threads(count: int) -> None:
    """Fix the thread count of numeric libraries; call before they are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def prefer(values: Mapping[str, str]) -> None:
    """Set variables of numeric libraries, but for those that the user has set; call before the
    libraries compute anything.
    """
    for name, value in values.items():
        os.environ.setdefault(name, value)


def stay_offline() -> None:
    """From here on this process asks no Hugging Face hub, unless its user has set HF_HUB_OFFLINE;
    call before its libraries are imported. Models are folders of this machine; nothing is
    downloaded in the middle of work.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def use_utf8() -> None:
    """Begin this program anew in Python's UTF-8 mode where the locale has another encoding;
    otherwise do nothing.

    Arguments, file names, and what is read and written are UTF-8 then, here and in every process
    that is started. Call it first: nothing that the process holds survives.
    """
    if not sys.flags.utf8_mode and locale.getencoding().lower() != "utf-8":
        command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - ourselves


def check() -> None:
    """Read every variable that can be wrong. InvalidConfig names it."""
    log_level()
    threads()
    device()


def for_child(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a child: without telemetry, and with the
    loopback exempt from any proxy, which the SDK's httpx would ask for 127.0.0.1. Whether a hub is
    asked is left as it is.

    Where everything is exempt (`NO_PROXY=*`) there is no proxy: some HTTP clients do not know the
    asterisk, the SDK's (pyqwest 0.7) among them.
    """
    quiet = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_ERROR_REPORTING": "false",
    }
    own = {"HALTERES_LIFELINE_FD", HEARTBEAT}
    if _all_exempt():
        own |= set(proxies())
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    # urllib knows the asterisk only alone.
    exempt = "*"
    if not _all_exempt():
        exempt = ",".join(dict.fromkeys((*_exempt(), *LOOPBACK)))
    return {**quiet, **inherited, "no_proxy": exempt, "NO_PROXY": exempt, **changes}


def _exempt() -> list[str]:
    """What the user's variables exempt from proxies."""
    given = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}".split(",")
    return [name.strip() for name in given if name.strip()]


def _all_exempt() -> bool:
    return "*" in _exempt()


_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")
# as last words alone: there is PWD, and SSH_ASKPASS
_SECRET_WORDS = ("PASS", "PASSWD", "PWD", "PAT", "PASSPHRASE")
_ADDRESS = ("_URL", "_PROXY", "_DSN")  # their values may lack a scheme
_IS_ADDRESS = re.compile(r"\w[\w+.-]*://")
_LOGIN = re.compile(r"(?P<before>^|://)[^\s/:@]*:(?P<password>[^\s/]+)@")


_held_back = set[str]()  # see `hold_back`


def hold_back(names: Collection[str]) -> None:
    """From now on this process takes these variables for secrets, whatever they are called: a
    child gets them only where it is named, and what is written has `***` for their values.
    """
    _held_back.update(names)


def for_sandboxed(**changes: str) -> dict[str, str]:
    """The environment for a child that gets no secrets: `for_child` without anything named like
    one or held back, and with no login in an address.
    """
    return {
        name: _LOGIN.sub(r"\g<before>", value) if _holds_address(name, value) else value
        for name, value in for_child(**changes).items()
        if not _is_kept(name)
    }


_CAGED = (
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "TZ",
)


def for_caged(**changes: str) -> dict[str, str]:
    """The environment for a child whose code is not trusted: how Python and its libraries are
    found, and nothing of this user or run.
    """
    found = {name: os.environ[name] for name in _CAGED if name in os.environ}
    fixed = {
        # what a scorer finds in a set comes in the same order in each of its processes
        "PYTHONHASHSEED": "0",
        # a file of bytecode could not be written, and each thread counts as a process
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **found, **fixed, **changes}


def with_keys(*names: str, **changes: str) -> dict[str, str]:
    """The environment for a child that gets no secrets but these; and, where there are any, the
    proxies with their logins: a key is for somebody outside.
    """
    outside = {}
    if names and not _all_exempt():
        outside = proxies()
    return {**for_sandboxed(), **outside, **_set_among(names), **changes}


def for_loopback(*names: str, **changes: str) -> dict[str, str]:
    """The environment for a child that talks to this machine alone: no secrets but these, and no
    proxy, for which its HTTP client might want a package, or which it might ask for 127.0.0.1 all
    the same.
    """
    outside = proxies()
    inherited = {name: value for name, value in for_sandboxed().items() if name not in outside}
    return {**inherited, **_set_among(names), **changes}


def _set_among(names: Collection[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def secrets() -> dict[str, str]:
    """What is secret in this process's variables, by their names: values of those named like
    secrets or held back, passwords within addresses.
    """
    found = {name: value for name, value in os.environ.items() if value and _is_kept(name)}
    addresses = {name: value for name, value in os.environ.items() if _holds_address(name, value)}
    logins = {
        name: login["password"]
        for name, value in addresses.items()
        if (login := _LOGIN.search(value))
    }
    return logins | found


def _holds_address(name: str, value: str) -> bool:
    return name.upper().endswith(_ADDRESS) or _IS_ADDRESS.match(value) is not None


def _is_kept(name: str) -> bool:
    return name in _held_back or is_secret(name)


def is_secret(name: str) -> bool:
    """Whether a variable or a setting is named like a secret."""
    words = name.upper()
    ends_so = words not in ("PWD", "OLDPWD") and words.rpartition("_")[2] in _SECRET_WORDS
    return words.endswith(_SECRET) or ends_so


def hub_cache() -> Path:
    """HF_HUB_CACHE (HUGGINGFACE_HUB_CACHE), or `hub` in HF_HOME (default ~/.cache/huggingface):
    where Hugging Face's libraries look for what they would download.
    """
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("HF_HOME") or Path(base) / "huggingface") / "hub"
    return Path(os.path.expandvars(folder)).expanduser().absolute()


def proxies() -> dict[str, str]:
    """The addresses of proxies, by their variables: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and their
    like, in either spelling.
    """
    named = {
        name: value
        for name, value in os.environ.items()
        if name.upper().endswith("_PROXY") and value
    }
    return {name: value for name, value in named.items() if name.upper() != "NO_PROXY"}


def unusable_proxies() -> dict[str, str]:
    """Variables whose proxy the Tinker SDK cannot ask, each with the reason: its HTTP client is
    then not even made.
    """
    if _all_exempt():
        return {}
    found = dict[str, str]()
    for name, value in proxies().items():
        scheme, separator, _ = value.rpartition("://")
        if name.upper() not in HTTP_PROXIES or not separator or scheme in ("http", "https"):
            continue
        if scheme not in ("socks5", "socks5h"):
            found[name] = (
                f"The Tinker SDK knows proxies of http, https and socks5, and none of {scheme}."
            )
        elif importlib.util.find_spec("socksio") is None:
            found[name] = (
                "For a SOCKS proxy the Tinker SDK needs the package socksio: pip install "
                "'httpx[socks]'."
            )
    return found


def check_proxies() -> None:
    """See that the SDK can ask through the proxies that are set. InvalidConfig names the variable
    of one it cannot.
    """
    for name, why in unusable_proxies().items():
        raise InvalidConfig(
            f"The proxy in {name} cannot be used.", why, f"Or run: unset {name}", field=name
        )


def is_set(name: str) -> bool:
    """Whether a variable has a value: for keys whose presence alone matters."""
    return bool(os.environ.get(name))


def openrouter_key() -> str | None:
    """OPENROUTER_API_KEY: sent to the endpoint of `rl_test_inference` where models are not
    local.
    """
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


USUAL_WAIT_S = 50.0  # most hosts give a call 60 s


def longest_wait_s(default: float = USUAL_WAIT_S) -> float:
    """HALTERES_LONGEST_WAIT_S: seconds that a tool's call may wait at most, which is less than the
    host of the tools gives a call (default 50, more where the MCP client is known by its name to
    give a call longer; 45 to 3600). `halteres install-agent` sets it for hosts whose time-out is
    known.
    """
    return float(
        _number("HALTERES_LONGEST_WAIT_S", "It is a number of seconds from 45 to 3600.", 45, 3600)
        or default
    )


def hermes_home() -> Path | None:
    """HERMES_HOME: where links to logs are made too, under logs/rl_training, where it is set."""
    return _folder("HERMES_HOME")


def claude_config_dir() -> Path | None:
    """CLAUDE_CONFIG_DIR: where Claude Code keeps a user's settings, if not in ~/.claude.json and
    ~/.claude.
    """
    return _folder("CLAUDE_CONFIG_DIR")


def environment_folders() -> tuple[Path, ...]:
    """HALTERES_ENVIRONMENTS: folders of environments, separated as in PATH; then
    HALTERES_HOME/environments.
    """
    given = (os.environ.get("HALTERES_ENVIRONMENTS") or "").split(os.pathsep)
    return (
        *(Path(folder).expanduser().absolute() for folder in given if folder),
        home() / "environments",
    )


def has_display() -> bool:
    """Whether a window can be opened: DISPLAY or WAYLAND_DISPLAY, where systems have those."""
    return sys.platform in ("darwin", "win32") or is_set("DISPLAY") or is_set("WAYLAND_DISPLAY")


def _folder(name: str) -> Path | None:
    given = os.environ.get(name)
    if given:
        return Path(given).expanduser().absolute()
    return None


def _number(name: str, rule: str, least: int, most: float = float("inf")) -> int | None:
    value = os.environ.get(name)
    if value and not (value.isdecimal() and least <= int(value) <= most):
        raise _misread(name, value, rule)
    if value:
        return int(value)
    return None


def _one_of(name: str, value: str, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise _misread(name, value, f"It is one of {', '.join(allowed)}.")
    return value


def _misread(name: str, value: str, rule: str) -> InvalidConfig:
    return InvalidConfig(
        f"The variable {name} is '{value}'.", rule, "Correct it, or unset it for the default."
    )


def write_stop_request(file: Path, mode: Mode) -> None:
    """Ask for an end. OSError where the disk will not have it."""
    replace_file(file, json.dumps({"mode": mode, "t": time.time()}).encode())


def read_stop_request(file: Path) -> Mode | None:
    """The mode asked for; None where nobody asked. Half a request, or one that is no request at
    all, still is one.
    """
    try:
        request = json.loads(read_regular(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return "now"
    if isinstance(request, dict) and request.get("mode") == "after_step":
        return "after_step"
    return "now"
