"""The reward server's process: `python -m halteres.rewards DIR...`, `halteres reward serve`.

It answers when its models are loaded; a client that connects earlier waits.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from halteres.config import environ
from halteres.errors import HalteresError, InvalidConfig
from halteres.loopback import HOST, is_loopback, open_listener, serve, url_of
from halteres.process import begin, usable_cores
from halteres.rewards.model_folder import Device, names_of
from halteres.rewards.server import PORT, create_app

if TYPE_CHECKING:
    from halteres.rewards.torch.model import RewardModel

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or the end of the lifeline; exit code 0, or 1 with one
    sentence.
    """
    given = parser().parse_args(arguments)
    environ.stay_offline()
    begin(
        "reward",
        torch=True,
        threads=given.threads or environ.threads() or max(1, usable_cores() - 1),
    )
    try:
        _serve(given)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _serve(given: argparse.Namespace) -> None:
    try:
        if given.key_file is None:
            key = environ.reward_key()
        else:
            key = given.key_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = "It is no text"
        if isinstance(error, OSError):
            why = error.strerror
        raise InvalidConfig(
            f"The key's file {given.key_file} cannot be read.", f"{why}."
        ) from error
    try:  # beyond the loopback only with a key
        bound = open_listener(
            given.port, given.listen_fd, host=given.host, beyond=key is not None or given.insecure
        )
    except InvalidConfig as error:
        advice = f"Give it a key (--key-file FILE, or {environ.REWARD_KEY}), or say --insecure."
        raise InvalidConfig(error.what, error.why, error.next or advice) from error
    with bound:
        address = bound.getsockname()[0]
        if not is_loopback(address):
            readable = (
                "Key and texts are readable on the way: let a proxy end TLS before it, or "
                "stay in a safe network."
            )
            open_to_all = "Whoever reaches this address can have texts scored: there is no key."
            log.warning(open_to_all if key is None else readable)
        models = load_models(given)
        app = create_app(
            models,
            address=address,
            key=key,
            allowed_hosts=[name.lower() for name in given.allow_host],
        )
        sys.stdout.write(f"The reward server answers on {url_of(bound)}: {', '.join(models)}.\n")
        sys.stdout.flush()
        serve(app, bound)


def load_models(given: argparse.Namespace) -> Mapping[str, RewardModel]:
    """The models of the folders by name, loaded and hashed."""
    from halteres.rewards.torch.model import RewardModel

    settings = {"max_tokens_per_forward": given.max_tokens_per_forward, "device": given.device}
    models = {
        name: RewardModel.load(folder, **settings)
        for name, folder in names_of(given.folders).items()
    }
    for name, model in models.items():
        # all weights are hashed here, not when the first client asks
        log.info("%s: digest %s", name, model.digest)
        for note in model.notes:
            log.warning("%s: %s", name, note)
    return models


def parser() -> argparse.ArgumentParser:
    """The arguments of the process."""
    made = argparse.ArgumentParser(prog="halteres reward serve", description="Serve reward models.")
    add = made.add_argument
    add(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folder of a reward model; the first answers unnamed",
    )
    add(
        "--host",
        default=HOST,
        help="address to listen on; beyond this machine with a key [%(default)s]",
    )
    add("--port", type=int, default=PORT, help="0 takes a free one [%(default)s]")
    add(
        "--listen-fd",
        type=int,
        metavar="FD",
        help="inherited socket that listens already, instead of host and port",
    )
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"holds what requests must carry [{environ.REWARD_KEY}]",
    )
    add("--insecure", action="store_true", help="serve other machines without a key")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a DNS name of this server; may be repeated",
    )
    add(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="auto: a GPU where there is one [%(default)s]",
    )
    add(
        "--threads",
        type=int,
        help="that compute; default: HALTERES_THREADS, or cores - 1, at least 1",
    )
    bound = "of one forward pass, padding included: bounds the memory [%(default)s]"
    add("--max-tokens-per-forward", type=int, default=8192, metavar="N", help=bound)
    return made


if __name__ == "__main__":
    sys.exit(main())
