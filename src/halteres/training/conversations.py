"""Rows of a file as tokens with their answers marked: conversations, prompts with completions, and
pairs of answers.

What is trained on is what the policy would have written itself. An answer begins where the chat
template's generation prompt ends, and ends with its end token; everything else is context, and
moves nothing. A text is tokenised as it grows, as sampling would meet it: where a prompt's tokens
are not the beginning of the whole text's, the answer is tokenised alone behind them.

A template may rewrite answers that are not the last one (Qwen3's leaves out their thinking). Such a
conversation becomes one sequence for each answer, behind what the template makes of the messages
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halteres.errors import HalteresError, InvalidData
from halteres.rewards.preference_files import NumberedRows, RowProblem
from halteres.rewards.preferences import Comparison, row_numbers
from halteres.tokenizer import Message, Tokenizer, flat, text_of

SFT_EXAMPLE = (
    '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'
)
NO_ANSWER = "no assistant message has a text to train on"


@dataclass(frozen=True, slots=True)
class AnsweredTokens:
    """One sequence of T tokens, and which of them are answers."""

    tokens_T: NDArray[np.int64]
    answers_T: NDArray[np.bool_]  # false for the first token, which nothing predicts

    @property
    def num_answers(self) -> int:
        """Tokens of answers."""
        return int(self.answers_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One row of a file. Of a preference, the sequences are the chosen answer and the rejected
    one, each behind the prompt.
    """

    number: int  # in its file, from 1
    key: str  # equal for rows of one prompt
    sequences: tuple[AnsweredTokens, ...]
    weight: float = 1.0  # in the loss

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(one.tokens_T) for one in self.sequences)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(one.tokens_T) for one in self.sequences)

    @property
    def num_answers(self) -> int:
        """Tokens of all its answers."""
        return sum(one.num_answers for one in self.sequences)


def read_conversations(found: NumberedRows, tokenizer: Tokenizer) -> tuple[TokenRow, ...]:
    """Rows to imitate. A row has `messages`, whose assistant's messages are the answers (one with
    `weight` 0 is context); or `prompt` and `completion`, both strings, which are taken as they are,
    or both lists of messages. Optional: `tools`, `chat_template_kwargs`.

    Raises:
        InvalidData: some rows cannot be used; each problem comes once, with the numbers of its
            first rows.
    """

    def read(number: int, row: Any) -> list[TokenRow]:
        if isinstance(row, RowProblem):
            raise row
        _require(isinstance(row, Mapping), "is not a JSON object")
        key, sequences = _conversation(row, tokenizer)
        return [TokenRow(number=number, key=key, sequences=sequences)]

    return _read_each(found.source, found.rows, read, f"A row is {SFT_EXAMPLE}")


def read_pairs(
    source: str, comparisons: Sequence[Comparison], tokenizer: Tokenizer
) -> tuple[TokenRow, ...]:
    """Preferences as pairs of sequences: the chosen answer, the rejected one. Of more than two
    ranked answers every two of different rank are a pair, and share the weight of their row.

    Without a prompt the answers begin where their tokens first differ: what they have in common
    cancels in the loss.

    Raises:
        InvalidData: some rows cannot be used, as `read_conversations`.
    """

    def read(number: int, row: Comparison) -> list[TokenRow]:
        _require(not row.labels, "has steps with labels: a preference is needed")
        places = [
            (one, other)
            for one, other in combinations(range(len(row.completions)), 2)
            if row.ranks[one] != row.ranks[other]
        ]
        _require(places, "is a tie: a preference is needed")
        answered = _answered(row, tokenizer)
        pairs: list[TokenRow] = []
        for one, other in places:
            chosen, rejected = sorted((one, other), key=lambda place: row.ranks[place])
            sequences = answered[chosen], answered[rejected]
            if row.prompt is None:
                sequences = _from_first_difference(*sequences)
            weight = row.weight / len(places)
            pairs.append(
                TokenRow(number=number, key=row.prompt_key, sequences=sequences, weight=weight)
            )
        return pairs

    rows = tuple((row.row, row) for row in comparisons)
    return _read_each(
        source, rows, read, 'A row is {"prompt": ..., "chosen": ..., "rejected": ...}'
    )


def _read_each(
    source: str,
    rows: Sequence[tuple[int, Any]],
    read: Callable[[int, Any], list[TokenRow]],
    next: str,
) -> tuple[TokenRow, ...]:
    """Every row by `read`, or one error with all that is wrong."""
    found: list[TokenRow] = []
    problems: dict[str, list[int]] = {}
    details: dict[str, str] = {}
    for number, row in rows:
        try:
            found += read(number, row)
        except RowProblem as problem:
            problems.setdefault(str(problem), []).append(number)
            if problem.detail:
                details.setdefault(str(problem), f" ({problem.detail})")
    if problems:
        listed = [
            f"{source} {row_numbers(numbers)}: {problem}{details.get(problem, '')}"
            for problem, numbers in problems.items()
        ]
        num_wrong = sum(map(len, problems.values()))
        raise InvalidData(
            f"{source} cannot be used: {num_wrong} of {len(rows)} rows are wrong.",
            f"{'. '.join(listed)}.",
            next,
            problems=[
                {"problem": one, "rows": numbers[:10], "count": len(numbers)}
                for one, numbers in problems.items()
            ],
        )
    return tuple(found)


def _conversation(
    row: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[str, tuple[AnsweredTokens, ...]]:
    """What rows of one prompt have in common, and the sequences of a row."""
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
        first = 0
    elif "prompt" in row or "completion" in row:
        for column in ("prompt", "completion"):
            _require(row.get(column) is not None, f"'{column}' is missing")
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            _require(completion.strip(), "'completion' is empty")
            return prompt, (_plain(tokenizer, prompt, completion),)
        are_lists = not isinstance(prompt, str) and not isinstance(completion, str)
        _require(are_lists, "one of 'prompt' and 'completion' is a string, the other is not")
        before = _messages(prompt, "prompt")
        first = len(before)
        messages = (*before, *_messages(completion, "completion"))
    else:
        raise RowProblem("has neither 'messages' nor 'prompt' and 'completion'")
    answers = [
        place
        for place, message in enumerate(messages)
        if place >= first and message["role"] == "assistant" and _is_trained_on(message)
    ]
    _require(answers, NO_ANSWER)
    for place in answers:
        says = text_of(messages[place].get("content")).strip() or messages[place].get("tool_calls")
        _require(says, "an answer is empty")
    chat = [
        {name: part for name, part in message.items() if name != "weight"} for message in messages
    ]
    sequences = chat_sequences(tokenizer, chat, answers, **_template_arguments(row))
    key = repr([(message["role"], message.get("content")) for message in chat[: answers[0]]])
    return key, sequences


def _is_trained_on(message: Mapping[str, Any]) -> bool:
    """Whether an answer is no mere context. A Parquet file has null where no weight was given."""
    weight = message.get("weight")
    _require(weight in (None, 0, 1), "the 'weight' of a message is neither 0 nor 1")
    return weight != 0


def _template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template is given in addition to the messages."""
    tools, arguments = row.get("tools"), row.get("chat_template_kwargs") or {}
    _require(isinstance(tools, list | None), "'tools' is not a list of functions")
    _require(isinstance(arguments, Mapping), "'chat_template_kwargs' is not a mapping")
    given = dict(arguments)
    if tools:
        given["tools"] = tools
    return given


def _messages(values: Any, column: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(values, list | tuple) or not values:
        raise RowProblem(f"'{column}' is not a list of messages")
    found: list[Mapping[str, Any]] = []
    for one in values:
        if not isinstance(one, Mapping):
            raise RowProblem(f"a message of '{column}' is no object")
        says_nothing = "content" not in one and not one.get("tool_calls")
        _require(not says_nothing, f"a message of '{column}' has no 'content'")
        try:
            found.append(flat(one))
        except InvalidData as error:
            raise RowProblem(f"in '{column}': {error.what.rstrip('.')}") from None
    return tuple(found)


def chat_sequences(
    tokenizer: Tokenizer, messages: Sequence[Message], answers: Sequence[int], **extra: Any
) -> tuple[AnsweredTokens, ...]:
    """A conversation as sequences: one, or where the template rewrites earlier answers one for each
    answer.

    Args:
        tokenizer: of the base model, with a chat template.
        messages: of the conversation.
        answers: places of the messages that are trained on, ascending.
        extra: for the chat template.

    Raises:
        RowProblem: the template refuses the messages, or does not begin an answer with its
            generation prompt.
    """
    whole = _rendered(tokenizer, messages, **extra)
    spans: list[tuple[int, int]] = []
    for place in answers:
        before, after = _around(tokenizer, messages, place, extra)
        if not whole.startswith(after):
            break
        spans.append((len(before), len(after)))
    if len(spans) == len(answers):
        return (_marked(tokenizer, whole[: spans[-1][1]], spans),)
    sequences: list[AnsweredTokens] = []
    for place in answers:
        before, after = _around(tokenizer, messages, place, extra)
        sequences.append(_marked(tokenizer, after, [(len(before), len(after))]))
    return tuple(sequences)


def _around(
    tokenizer: Tokenizer, messages: Sequence[Message], place: int, extra: Mapping[str, Any]
) -> tuple[str, str]:
    """The texts that end before this answer and after it."""
    before = _rendered(tokenizer, messages[:place], add_generation_prompt=True, **extra)
    after = _rendered(tokenizer, messages[: place + 1], **extra)
    _require(
        after.startswith(before),
        "the chat template does not begin an answer as its generation prompt does",
    )
    return before, after


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    **extra: Any,
) -> str:
    try:
        return tokenizer.render(messages, add_generation_prompt=add_generation_prompt, **extra)
    except HalteresError as error:
        raise RowProblem(error.what.rstrip("."), error.why.rstrip(".")) from error


def _marked(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> AnsweredTokens:
    """A text whose answers are these spans of characters, ascending."""
    pieces: list[tuple[str, bool]] = []
    at = 0
    for start, stop in spans:
        pieces.append((text[at:start], False))
        pieces.append((text[start:stop], True))
        at = stop
    return _encoded(tokenizer, pieces)


def _plain(tokenizer: Tokenizer, prompt: str, completion: str) -> AnsweredTokens:
    """A prompt and its completion as they are, and the end token."""
    return _encoded(tokenizer, [(prompt, False), (completion, True)], add_special_tokens=True)


def _encoded(
    tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]], *, add_special_tokens: bool = False
) -> AnsweredTokens:
    """The tokens of the pieces of a text, whose last one is an answer; each answer ends with its
    end token. The last gets one where it has none: else the policy would learn not to end.
    """
    tokens: list[int] = []
    marks: list[bool] = []
    ends = set(tokenizer.eos_token_ids)
    text = ""
    if add_special_tokens:
        # those that the tokenizer puts before a text; what it puts behind one is no part of it
        tokens = _begin_tokens(tokenizer)
        marks = [False] * len(tokens)
    num_begin = len(tokens)
    for piece, is_answer in pieces:
        text += piece
        whole = tokens[:num_begin] + tokenizer.encode(text)
        if whole[: len(tokens)] == tokens:
            new = whole[len(tokens) :]
        else:
            new = tokenizer.encode(piece)
        last = len(new)
        if is_answer:
            # the line break that a template writes behind an end token is context
            last = next((at + 1 for at in reversed(range(len(new))) if new[at] in ends), last)
        tokens += new
        marks += [is_answer and at < last for at in range(len(new))]
    tokens, marks = _without_context_at_end(tokens, marks)
    if ends and tokens and tokens[-1] not in ends:
        tokens.append(tokenizer.eos_token_id)
        marks.append(True)
    _require(len(tokens) > 1, "is too short: nothing stands before the answer")
    answers_T = np.array(marks, dtype=np.bool_)
    answers_T[0] = False
    return AnsweredTokens(np.array(tokens, dtype=np.int64), answers_T)


def _begin_tokens(tokenizer: Tokenizer) -> list[int]:
    """Those that the tokenizer puts before every text."""
    text = tokenizer.encode("a")
    whole = tokenizer.encode("a", add_special_tokens=True)
    for at in range(len(whole)):
        if whole[at : at + len(text)] == text:
            return whole[:at]
    return []


def _without_context_at_end(tokens: list[int], marks: list[bool]) -> tuple[list[int], list[bool]]:
    """Up to the last token of an answer: what comes behind it is never read."""
    last = max((at for at, mark in enumerate(marks) if mark), default=-1)
    return tokens[: last + 1], marks[: last + 1]


def _answered(row: Comparison, tokenizer: Tokenizer) -> list[AnsweredTokens]:
    """Every completion of a preference behind its prompt."""
    arguments = dict(row.template_arguments)
    if row.tools:
        arguments["tools"] = list(row.tools)
    found: list[AnsweredTokens] = []
    for completion in row.completions:
        if row.form == "pre-tokenised":
            tokens_T = np.array(completion, dtype=np.int64)
            answers_T = np.ones(len(tokens_T), dtype=np.bool_)
            answers_T[0] = False
            found.append(AnsweredTokens(tokens_T, answers_T))
        elif isinstance(completion, str):
            found.append(_plain(tokenizer, str(row.prompt or ""), completion))
        else:
            found.append(_chat_answer(tokenizer, row.prompt or (), completion, arguments))
    return found


def _chat_answer(
    tokenizer: Tokenizer, prompt: Any, completion: Any, arguments: Mapping[str, Any]
) -> AnsweredTokens:
    """The messages of a completion behind those of its prompt, all of them one answer."""
    whole = _rendered(tokenizer, (*prompt, *completion), **arguments)
    start = 0
    if prompt:
        before = _rendered(tokenizer, prompt, add_generation_prompt=True, **arguments)
        _require(
            whole.startswith(before),
            "the chat template does not begin an answer as its generation prompt does",
        )
        start = len(before)
    return _marked(tokenizer, whole, [(start, len(whole))])


def _from_first_difference(
    chosen: AnsweredTokens, rejected: AnsweredTokens
) -> tuple[AnsweredTokens, AnsweredTokens]:
    """Two sequences whose answers begin where they first differ."""
    shared = 0
    for one, other in zip(chosen.tokens_T, rejected.tokens_T, strict=False):
        if one != other:
            break
        shared += 1
    _require(
        shared < min(len(chosen.tokens_T), len(rejected.tokens_T)), "one answer begins the other"
    )
    _require(shared > 0, "has no prompt, and its answers have no token in common before them")

    def behind(sequence: AnsweredTokens) -> AnsweredTokens:
        answers_T = sequence.answers_T.copy()
        answers_T[:shared] = False
        return AnsweredTokens(sequence.tokens_T, answers_T)

    return behind(chosen), behind(rejected)


def packed(sequences: Sequence[AnsweredTokens], longest: int) -> list[AnsweredTokens]:
    """Sequences joined to as few as fit, each of at most `longest` tokens, by best fit of the
    longest first. Every token sees those before it in its sequence, of other rows too.

    >>> one = AnsweredTokens(np.arange(3), np.array([False, True, True]))
    >>> [len(joined.tokens_T) for joined in packed([one, one, one], 6)]
    [6, 3]
    """
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place].tokens_T))
    bins: list[list[int]] = []
    room: list[int] = []
    for place in order:
        length = len(sequences[place].tokens_T)
        fits = [one for one, left in enumerate(room) if left >= length]
        if fits:
            best = min(fits, key=lambda one: room[one])
            bins[best].append(place)
            room[best] -= length
        else:
            bins.append([place])
            room.append(longest - length)
    return [_joined([sequences[place] for place in places]) for places in bins]


def _joined(sequences: Sequence[AnsweredTokens]) -> AnsweredTokens:
    return AnsweredTokens(
        np.concatenate([one.tokens_T for one in sequences]),
        np.concatenate([one.answers_T for one in sequences]),
    )


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise RowProblem(problem)
