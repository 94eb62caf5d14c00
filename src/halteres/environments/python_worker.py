"""The process in a cage that runs one piece of a policy's Python: its Python may have none of
Halteres, so nothing of it is imported here.

    python python_worker.py

A question (`worker_loop`) {code, within_s, most_shown, usual_imports} is
answered by {output, errors, exit_code}: what was printed and the errors, cut, and the exit code,
which is negative for a signal and null where the time was up. The code runs in a Python of its own,
whose folder is empty and whose standard input has ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halteres.environments.worker_loop import serve
else:
    # the file next to this one: there may be no package
    from worker_loop import serve

DRAINED_S = 0.1
"""How long what is left in a pipe may take to be read."""

USUAL_IMPORTS = "; ".join(
    (
        "import bisect, collections, copy, datetime, functools, heapq, io, itertools, math",
        "import operator, os, random, re, string, sys",
        "from bisect import bisect_left, bisect_right, insort",
        "from collections import Counter, OrderedDict, defaultdict, deque",
        "from copy import deepcopy",
        "from functools import cache, cmp_to_key, lru_cache, partial, reduce",
        "from heapq import heapify, heappop, heappush, heapreplace, merge, nlargest, nsmallest",
        "from itertools import accumulate, chain, combinations, count, cycle, groupby, islice",
        "from itertools import pairwise, permutations, product, repeat, zip_longest",
        "from math import atan2, ceil, comb, factorial, floor, gcd, inf, isqrt, log, log10, log2",
        "from math import pi, prod, sqrt",
        "from operator import iand, itemgetter, or_, sub, xor",
        "from os.path import commonprefix",
        "from random import randrange, shuffle",
        "from re import search as re_search",
        "from string import ascii_lowercase, ascii_uppercase",
        "from time import time",
        "from typing import Any, Callable, Deque, Dict, Generator, Iterable, Iterator, List",
        "from typing import Optional, Set, Tuple, Union",
        r'exec("try:\n import numpy as np\n import pandas as pd\nexcept ImportError: pass")',
    )
)
"""The names that GEM 0.1.0 lends to code that fails for an undefined one, in one line; numpy and
pandas where they are installed.
"""


def main() -> None:
    """Answer questions until they end."""
    serve(lambda opening: answer)


def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
    """What became of a question's code. What fails here is not the code's fault: that reaches no
    further than its own process.
    """
    try:
        return run(**question)
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}", "code": "worker_lost"}


def run(code: str, within_s: float, most_shown: int, usual_imports: bool) -> Mapping[str, Any]:
    """Run the code, and a second time with the usual imports where a name was not defined."""
    ends = time.monotonic() + within_s
    answer = run_once(code, ends, most_shown)
    is_unknown_name = answer["exit_code"] and "is not defined" in answer["errors"]
    if usual_imports and is_unknown_name:
        # what the code left running may leave no room for another process
        with contextlib.suppress(OSError):
            answer = run_once(f"{USUAL_IMPORTS}\n{code}", ends, most_shown)
    return answer


def run_once(code: str, ends: float, most_shown: int) -> Mapping[str, Any]:
    """Run the code until it ends, or until the monotonic clock shows `ends`."""
    output, errors = Stream(most_shown), Stream(most_shown)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output.end,
            stderr=errors.end,
        )
    finally:
        os.close(output.end)
        os.close(errors.end)
    try:
        exit_code: int | None = process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        # what it started ends with the cage, which is used once
        process.kill()
        exit_code = None
    return {"output": output.shown(), "errors": errors.shown().strip(), "exit_code": exit_code}


class Stream:
    """A pipe whose text is read on a thread of its own; of a long one the beginning and the end are
    kept.
    """

    def __init__(self, most_shown: int) -> None:
        self.most_shown = most_shown  # characters
        self.start, self.end = os.pipe()
        # a character has up to four bytes
        self.most_kept = 4 * most_shown
        self.beginning, self.rest, self.num_bytes = b"", b"", 0
        self.reading = threading.Thread(target=self.read, daemon=True)
        self.reading.start()

    def read(self) -> None:
        """Read until every end of the pipe is closed."""
        while piece := os.read(self.start, 1 << 16):
            self.num_bytes += len(piece)
            room = self.most_kept - len(self.beginning)
            self.beginning += piece[:room]
            self.rest = (self.rest + piece[room:])[-self.most_kept :]

    def shown(self) -> str:
        """The text; of a longer one the beginning, a mark that tells how much was left out, and the
        end.
        """
        # what the code started may hold the pipe open; what it wrote itself is read by then
        self.reading.join(DRAINED_S)
        whole = (self.beginning + self.rest).decode(errors="replace")
        if len(whole) <= self.most_shown:
            return whole
        half = self.most_shown // 2
        head, tail = whole[:half], whole[-half:]
        left_out = self.num_bytes - len(head.encode()) - len(tail.encode())
        return f"{head}\n[... {left_out} bytes left out ...]\n{tail}"


if __name__ == "__main__":
    main()
