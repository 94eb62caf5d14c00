"""The grammars of one model: each tried in a process that can be ended, then compiled once.

Owns: that process, the grammars that were used last and those that were refused.
Guarantees: no grammar holds the engine up, or takes its memory, for more than a trial may.
"""

from __future__ import annotations

import asyncio
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from halteres.config import environ
from halteres.engine.protocol import Grammar
from halteres.errors import InvalidData, NotReady
from halteres.process import Child

KEPT = 32  # grammars, compiled or refused
ANSWERS_WITHIN_S = 60.0  # a trial's CPU seconds on a machine that is busy, and the process's start

Key = tuple[str, str]


class Grammars:
    """Of one model."""

    def __init__(self, folder: Path, vocabulary_size: int, ends: tuple[int, ...]) -> None:
        """Args as of `grammar.Vocabulary`; nothing is read before the first grammar comes."""
        self._arguments = folder, vocabulary_size, ends
        self._vocabulary: Any = None
        # a matcher, or why it is refused; unused for longest first
        self._known: OrderedDict[Key, Any] = OrderedDict()
        self._change = threading.Lock()  # of those
        self._trials: Child | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.num_compiled = 0

    async def find(self, grammar: Grammar) -> Any:
        """A matcher at the beginning of an answer, to be copied. InvalidData where the grammar
        cannot be used.
        """
        found = self._used(grammar)
        if found is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "grammars")
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, self._found, grammar)
        if isinstance(found, str):
            raise InvalidData(
                f"`{grammar.field}` cannot be used.",
                f"{found[:1].upper()}{found[1:].rstrip('.')}.",
                "Send another, or a simpler one.",
                param=grammar.field,
            )
        return found

    @property
    def vocabulary(self) -> Any:
        """That of the grammars that were found."""
        return self._vocabulary

    def close(self) -> None:
        """End the process; nothing is found any more. A grammar that is being tried is given up."""
        if self._trials is not None:
            self._trials.kill()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._let_go()

    def _used(self, grammar: Grammar) -> Any:
        """What is known of it, if anything."""
        key = grammar.kind, grammar.text
        with self._change:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    # On the one thread

    def _found(self, grammar: Grammar) -> Any:
        found = self._used(grammar)
        if found is None:
            found = self._tried(grammar) or self._compiled(grammar)
            with self._change:
                self._known[grammar.kind, grammar.text] = found
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return found

    def _compiled(self, grammar: Grammar) -> Any:
        # an engine that no grammar comes to needs no library
        from halteres.engine.grammar import GrammarRefused, Vocabulary, compiled

        try:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._arguments)
            self.num_compiled += 1
            return compiled(self._vocabulary, grammar)
        except GrammarRefused as error:
            return str(error)

    def _tried(self, grammar: Grammar) -> str:
        """Why it cannot be used; "" where it can."""
        if self._trials is not None and self._trials.exit.done():
            self._let_go()
        if self._trials is None:
            folder, size, ends = self._arguments
            self._trials = Child(
                [
                    *(sys.executable, "-m", "halteres.engine.grammar"),
                    *map(str, (folder, size, *ends)),
                ],
                environment=environ.with_keys(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        trials, process, line = self._trials, self._trials.process, b""
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        # it may have ended
        with suppress(OSError):
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
            answered = select.poll()
            answered.register(process.stdout, select.POLLIN)
            if not answered.poll(1000 * ANSWERS_WITHIN_S):
                trials.kill()
                what = f"`{grammar.field}` was not tried within {ANSWERS_WITHIN_S:g} s."
                raise NotReady(what, "The machine is busy.", "Ask again.")
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=str)
        if trials.kill() == -signal.SIGXCPU:
            return "it takes too long to be followed"
        return "it takes too much time or memory to be followed"

    def _let_go(self) -> None:
        """Of a process that has ended."""
        if self._trials is not None:
            for pipe in (self._trials.process.stdin, self._trials.process.stdout):
                if pipe is not None:
                    # what it was to be told
                    with suppress(OSError):
                        pipe.close()
        self._trials = None
