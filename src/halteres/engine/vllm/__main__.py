"""The process above a vLLM of ours: `python -m halteres.engine.vllm SOCKET_FOLDER COMMAND...`.

vLLM's front process leaves its engine and workers behind when it is killed. They stay in the group
that this process leads; when it ends, however that is, the group does, for its parent sees to that.
Where the parent is gone the lifeline breaks; then this process removes the folder of its socket and
kills the group itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

from halteres.process import die_with_parent, hold_lifeline, outlive_parent


def main(socket_folder: str, *command: str) -> int:
    """Run a command to its end, which a signal to this process is passed on to; its exit code."""

    def end() -> None:
        shutil.rmtree(socket_folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    # killed with its parent it could not end the group
    outlive_parent()
    hold_lifeline(end)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    if code < 0:
        return 128 - code
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
