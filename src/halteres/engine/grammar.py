"""Grammars over a model's vocabulary: which tokens an answer may go on with.

By llguidance. Imported by an engine, and as a process of its own by `grammar_trials`: a grammar
may need more time or memory than there is, and that is found out where it can be ended.

V tokens of the model's vocabulary.
"""

from __future__ import annotations

import codecs
import json
import math
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from halteres.engine.protocol import Calls, Grammar
from halteres.tool_calls import CLOSE, OPEN

TRIED_TOKENS = 48  # of an answer that a trial writes
TRIAL_CPU_S, TRIAL_BYTES = 2, 256 << 20
"""Of a trial: CPU seconds, rounded up to whole ones, and memory beside the vocabulary's own."""

LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)

LONGEST_REASON = 200  # characters of what the library says


BLANKS = r"(\r?\n[\x20\x09]{0,16}|[\x20\x09]{1,2})"
"""Between the parts of a JSON value: a new line and its indentation, or a blank or two. A model
that is made to write JSON and would rather not may go on with blanks for ever.
"""


class GrammarRefused(Exception):
    """A grammar that cannot be used; the text says why."""


class Vocabulary:
    """The V tokens of a model as the library needs them.

    Tokens that stand for no text are in no text; all others are, `<tool_call>` among them, which
    the library's own reading of a tokenizer.json takes for special, as all tokens that were added.
    """

    def __init__(self, folder: Path, size: int, ends: Sequence[int]) -> None:
        """Of a model's folder. GrammarRefused where its tokenizer cannot be used.

        Args:
            size: V, which may be more than the tokenizer has.
            ends: tokens that end an answer.
        """
        content = (folder / "tokenizer.json").read_bytes().removeprefix(codecs.BOM_UTF8)
        try:
            read = LLTokenizer(content.decode())
            added = json.loads(content).get("added_tokens", [])
            self.size, self._read = size, read
            self.eos_token_id, self.bos_token_id = ends[0], None
            self.special_token_ids = [one["id"] for one in added if one["special"]]
            self.tokens = [read.decode_bytes([token]) for token in range(read.vocab_size)]
            self.tokenizer = LLTokenizer(
                llguidance.TokenizerWrapper(self),
                n_vocab=max(size, read.vocab_size),
                eos_token=list(ends),
            )
        except (ValueError, IndexError) as error:
            raise GrammarRefused(f"this model's tokenizer cannot be used for it: {error}") from None

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text, for the library."""
        return self._read.tokenize_bytes(text)

    def allowed(self, masks: Sequence[bytes]) -> np.ndarray:
        """Masks of the library's as booleans, one row each, V columns."""
        packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
        return np.unpackbits(packed, axis=1, bitorder="little")[:, : self.size].astype(np.bool_)


def compiled(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    """What follows an answer from its beginning; GrammarRefused where it cannot be."""
    try:
        written = _written(grammar)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise GrammarRefused(str(error)) from None
    matcher = LLMatcher(vocabulary.tokenizer, written, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarRefused(reason(matcher))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """What a matcher that failed says, on one line."""
    said = matcher.get_error().partition("<non-verbose")[0].partition("<state>")[0]
    text = " ".join(said.split())
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]}…"
    return text or "it cannot be followed"


def try_grammar(vocabulary: Vocabulary, grammar: Grammar) -> None:
    """Compile it and write one answer by it, at random; GrammarRefused where that fails."""
    matcher, random = compiled(vocabulary, grammar), np.random.default_rng(0)
    for _ in range(TRIED_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarRefused(reason(matcher))
        [allowed_V] = vocabulary.allowed([mask])
        tokens = np.flatnonzero(allowed_V)
        if not tokens.size:
            raise GrammarRefused("no text fits it that these tokens can write")
        if matcher.is_stopped():
            return
        if not matcher.consume_token(int(random.choice(tokens))):
            raise GrammarRefused(reason(matcher))
        if matcher.is_stopped():
            return


def _written(grammar: Grammar) -> str:
    """A grammar in the library's form."""
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(_schema(json.loads(grammar.text)))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = msgspec.json.decode(grammar.text, type=list[str])
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, texts)))
    if grammar.kind == "calls":
        calls = msgspec.json.decode(grammar.text, type=Calls)
        return LLMatcher.grammar_from_lark(lark_of_calls(calls))
    return LLMatcher.grammar_from_lark(grammar.text)


def lark_of_calls(calls: Calls) -> str:
    """Calls of tools as models are told to write them (`tool_calls.describe_tools`)."""
    rules, names = list[str](), list[str]()
    for number, tool in enumerate(calls.tools):
        name = json.dumps(tool.name, ensure_ascii=False)
        before = _quoted(f'{OPEN}\n{{"name": {name}, "arguments": ')
        after = _quoted(f"}}\n{CLOSE}")
        rules.append(f"call_{number}: {before} arguments_{number} {after}")
        rules.append(f"arguments_{number}: %json {_schema({'type': 'object', **tool.arguments})}")
        names.append(f"call_{number}")
    answers = ["call"]
    if calls.several:
        answers = ['call ("\\n" call)*']
    if calls.otherwise is not msgspec.UNSET:
        answers.append("value")
        rules.append(f"value: %json {_schema(calls.otherwise)}")
    return "\n".join([f"start: {' | '.join(answers)}", f"call: {' | '.join(names)}", *rules])


def _schema(schema: Any) -> str:
    """A schema as JSON, read by our options alone: what it cannot be held to is refused."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}
    return json.dumps(schema, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def main() -> None:
    """Try the grammars of standard input, one a line; what is written is why one cannot be used, ""
    where it can. What takes too long, or too much memory, ends the process.
    """
    folder, size, *ends = sys.argv[1:]
    # where it fails it fails in the engine, too, which says so
    with suppress(GrammarRefused):
        _try_lines(Vocabulary(Path(folder), int(size), tuple(map(int, ends))))
    for _ in sys.stdin.buffer:
        _answer("")


def _try_lines(vocabulary: Vocabulary) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # not on every system
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        most_bytes = pages * resource.getpagesize() + TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most_s = math.ceil(used.ru_utime + used.ru_stime) + TRIAL_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
        why = ""
        try:
            try_grammar(vocabulary, msgspec.json.decode(line, type=Grammar))
        except GrammarRefused as error:
            why = str(error)
        _answer(why)


def _answer(why: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(why) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
