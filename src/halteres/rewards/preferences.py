"""Preference data: completions of one prompt, ranked, or steps of one completion, each right or
wrong; read, checked and split. Texts are never changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from typing import Any, Literal

from pydantic import BaseModel

from halteres.documents import DocumentError, parse_json
from halteres.errors import InvalidConfig, InvalidData
from halteres.rewards.components import RESERVED_PARTS
from halteres.rewards.preference_files import EXAMPLE, NumberedRows, RowProblem, Source, read_rows
from halteres.tokenizer import Message, flat, text_of

Text = str | Sequence[Message] | Sequence[int]  # a string, messages, or tokens
# strings, messages, or tokens: all rows are of one form
Form = Literal["standard", "conversational", "pre-tokenised"]
# what becomes of a row that ranks a text above itself
OnIdentical = Literal["error", "tie", "drop"]

MOST_ROWS = 10  # row numbers that are listed of one problem; the rest are counted
# between the steps of a completion that are strings. Steps that are messages need none.
STEP_SEPARATOR = "\n"
STEPS_EXAMPLE = (
    '{"prompt": "2 + 2 + 2?", "completions": ["2 + 2 = 4.", "4 + 2 = 7."], "labels": [true, false]}'
)
IDENTICAL = "the completions are identical"
PROMPT_TWICE = "the completions hold the prompt, which would be read twice: leave 'prompt' out"
MIXED = "standard and conversational completions are mixed"

_TOKEN_COLUMNS = (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))
_PROMPT_TOKENS = ("prompt_ids", "prompt_input_ids")
# fmt: off
_PROMPT_COLUMNS = frozenset((
    "question", "questions", "query", "instruction", "instructions", "input", "inputs",
    "problem", "task", "context", "system", "system_prompt", "system_message", "user",
    "user_prompt", "prompts", "history", "messages", "conversation", "conversations", "dialog",
    "dialogue",
))
# fmt: on
"""Columns that hold a prompt, or a part of it, in data sets of other projects; not read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """K >= 2 completions of one prompt with their ranks: one row. A pair is K = 2 with the ranks 0
    and 1.

    Of a completion in steps, the completions are its states: what there is of it after each step
    that has a label.
    """

    completions: tuple[Text, ...]  # K, all of one form
    ranks: tuple[int, ...]  # K: 0 is the best; equal ranks are a tie, and states are not ranked
    # of states, K: whether the step that led there is right; empty: ranked completions
    labels: tuple[bool, ...] = ()
    prompt: str | Sequence[Message] | None = None  # None: each completion holds everything
    margin: float = 0.0  # lead asked of the chosen side, in raw scores; of a pair
    weight: float = 1.0  # in the loss, >= 0
    kind: str | None = None  # a label that results are told apart by
    # what the ranks or labels judge, of a model with several outputs; None: all of it
    objective: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # functions in OpenAI's form, for the chat template
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`
    id: str = ""  # as the data has it; of a benchmark's rows
    row: int = 0  # in its file, from 1

    @property
    def form(self) -> Form:
        """Of all its completions."""
        return _form(self.completions[0])

    @property
    def prompt_key(self) -> str:
        """Equal for rows of one prompt; where the completions hold the prompt, what they begin with
        alike.
        """
        if self.prompt is not None:
            return _canonical(self.prompt)
        parts = [text.splitlines() if isinstance(text, str) else text for text in self.completions]
        alike = takewhile(
            lambda places: all(place == places[0] for place in places), zip(*parts, strict=False)
        )
        return _canonical([places[0] for places in alike] or self.completions[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Checked preference data."""

    comparisons: tuple[Comparison, ...]
    source: str  # the file's name, or "data"
    digest: str  # SHA-256 of what was read
    warnings: tuple[str, ...] = ()  # what was dropped or is odd, with its first row numbers
    # asked for, of rows whose texts are the same once they are cut, too
    on_identical: OnIdentical = "error"

    @property
    def form(self) -> Form:
        """Of all its rows."""
        return self.comparisons[0].form

    @property
    def objectives(self) -> tuple[str, ...]:
        """Those that rows name, sorted."""
        return tuple(
            sorted({one.objective for one in self.comparisons if one.objective is not None})
        )


class MarginFrom(BaseModel, frozen=True, extra="forbid"):
    """A margin made of two columns of scores: scale * (chosen - rejected)."""

    columns: tuple[str, str] = ("score_chosen", "score_rejected")
    scale: float = 1.0


def read_preferences(
    source: Source, *, on_identical: OnIdentical = "error", margin_from: MarginFrom | None = None
) -> Preferences:
    """Read preference data and check every row of it.

    Args:
        source: a JSONL, JSON or Parquet file, OWNER/NAME[:SPLIT] on the Hugging Face hub,
            `halteres/arithmetic-pairs`, a `datasets.Dataset`, or mappings. A row has `chosen` and
            `rejected`, strings or messages, with or without a `prompt`; or `chosen_ids` and
            `rejected_ids`; or several completions of one prompt: `completions` with `ranks` (the
            lowest is the best) or `scores` (the highest is), or lists in `chosen` and `rejected`,
            all of one list ranked alike; or the steps of one completion: `completions` with
            `labels`, true, false, or null for a step that is not judged. Optional: `margin`,
            `weight`, `kind` (or `subset`), `objective`, `tie`, `tools`, `chat_template_kwargs`,
            `id`. Content of messages is a text, null, or parts of text. Other columns are left
            alone, but not without a word where they hold a prompt that is in none of the row's
            texts.
        on_identical: what to do with a row that prefers a text to itself.
        margin_from: the columns of scores that margins are made of; they go before a column
            `margin`.

    Raises:
        InvalidData: some rows cannot be used; each problem comes once, with the numbers of its
            first rows. Or there is no row.
        NotFound, InvalidConfig: there is no such file, or it cannot be read here.
    """
    return _checked(read_rows(source), on_identical, margin_from)


def read_rewardbench(source: Source) -> Preferences:
    """RewardBench's two versions as conversations: `chosen` and `rejected` are strings, or lists of
    them.
    """

    def as_messages(row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        changed = dict(row)
        for column, role in (
            ("prompt", "user"),
            ("chosen", "assistant"),
            ("rejected", "assistant"),
        ):
            value = row.get(column)
            if isinstance(value, str):
                changed[column] = [{"role": role, "content": value}]
            elif (
                column != "prompt"
                and isinstance(value, Sequence)
                and all(isinstance(text, str) for text in value)
            ):
                changed[column] = [[{"role": role, "content": text}] for text in value]
        return changed

    found = read_rows(source)
    return _checked(
        replace(found, rows=tuple((number, as_messages(row)) for number, row in found.rows))
    )


def hold_out(
    preferences: Preferences, share: float = 0.1, *, seed: int = 0
) -> tuple[Preferences, Preferences]:
    """The rows to train on and the held-out ones, about `share` of the prompts; no prompt is on
    both sides.

    Ordered by a hash with the seed, most prompts keep their side when rows are added.
    InvalidConfig: a side is empty.
    """
    keys = [comparison.prompt_key for comparison in preferences.comparisons]
    ordered = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    count = round(share * len(ordered))
    if not 0 < count < len(ordered):
        why = f"It has {len(ordered)} prompts, of which {count} would be held out."
        fix = "Choose another share, or name a file of held-out rows."
        raise InvalidConfig(
            f"A share of {share:g} cannot be held out of {preferences.source}.", why, fix
        )
    chosen = set(ordered[:count])

    def side(name: str, is_held_out: bool) -> Preferences:
        rows = zip(preferences.comparisons, keys, strict=True)
        digest = hashlib.sha256(f"{preferences.digest}:{share}:{seed}:{name}".encode()).hexdigest()
        own = tuple(one for one, key in rows if (key in chosen) == is_held_out)
        return replace(preferences, comparisons=own, digest=digest)

    return side("train", False), replace(side("held_out", True), warnings=())


def overlap(train: Preferences, held_out: Preferences) -> str:
    """The warning that held-out rows have prompts of the training rows; empty where none has."""
    prompts = {comparison.prompt_key for comparison in train.comparisons}
    rows = [
        comparison.row for comparison in held_out.comparisons if comparison.prompt_key in prompts
    ]
    return (
        f"{held_out.source} {row_numbers(rows)}: the prompt is also in {train.source}."
        if rows
        else ""
    )


def _checked(
    found: NumberedRows, on_identical: OnIdentical = "error", margin_from: MarginFrom | None = None
) -> Preferences:
    source = found.source
    comparisons: list[Comparison] = []
    problems: dict[str, list[int]] = {}
    details: dict[str, str] = {}
    dropped: list[int] = []
    odd: dict[str, list[int]] = {}
    for number, row in found.rows:
        try:
            comparison = _comparison(row, number, margin_from)
            first = comparisons[0] if comparisons else comparison
            kinds = ("ranked completions", "steps with labels")[:: -1 if comparison.labels else 1]
            is_kind = bool(comparison.labels) == bool(first.labels)
            _require(is_kind, f"holds {kinds[0]}, while row {first.row} holds {kinds[1]}")
            is_form = comparison.form == first.form
            _require(is_form, f"is {comparison.form}, while row {first.row} is {first.form}")
            texts, ranks = comparison.completions, comparison.ranks
            if prefers_to_itself(texts, ranks):
                _require(on_identical != "error", IDENTICAL)
                if on_identical == "drop":
                    dropped.append(number)
                    continue
                comparison = replace(comparison, ranks=tied_ranks(texts, ranks))
            for warning in _warnings_of(row, comparison):
                odd.setdefault(warning, []).append(number)
            comparisons.append(comparison)
        except RowProblem as problem:
            problems.setdefault(str(problem), []).append(number)
            if problem.detail:
                details.setdefault(str(problem), f" ({problem.detail})")
    if problems:
        raise _refused(found, problems, details)
    if not comparisons:
        why = f"All {len(dropped)} have identical completions."
        raise InvalidData(f"{source} holds no row that can be used.", why)
    firsts: dict[str, int] = {}
    for one in comparisons:
        firsts.setdefault(
            _canonical([one.prompt, one.completions, one.ranks, one.labels, one.objective]), one.row
        )
    new, labels = set(firsts.values()), {label for one in comparisons for label in one.labels}
    warnings = {
        **odd,
        "dropped, the completions are identical": dropped,
        "the same as a row before": [one.row for one in comparisons if one.row not in new],
        f"every step is {'right' if True in labels else 'wrong'}": [
            one.row for one in comparisons if len(labels) == 1
        ],
    }
    return Preferences(
        comparisons=tuple(comparisons),
        source=source,
        digest=found.digest,
        warnings=tuple(
            f"{source} {row_numbers(rows)}: {what}." for what, rows in warnings.items() if rows
        ),
        on_identical=on_identical,
    )


def _refused(
    found: NumberedRows, problems: Mapping[str, list[int]], details: Mapping[str, str]
) -> InvalidData:
    """The error for rows that are wrong: problem -> their numbers, problem -> more of it."""
    source = found.source
    has_steps = any(isinstance(row, Mapping) and "labels" in row for _, row in found.rows)
    example = STEPS_EXAMPLE if has_steps else EXAMPLE
    next = f"A row is {example}, or has messages in place of the strings."
    if IDENTICAL in problems:
        next += " Identical ones can be read as ties or dropped: on_identical 'tie' or 'drop'."
    listed = [
        f"{source} {row_numbers(rows)}: {problem}{details.get(problem, '')}"
        for problem, rows in problems.items()
    ]
    num_wrong = sum(map(len, problems.values()))
    return InvalidData(
        f"{source} cannot be used: {num_wrong} of {len(found.rows)} rows are wrong.",
        f"{'. '.join(listed)}.",
        next,
        problems=[
            {"problem": one, "rows": rows[:MOST_ROWS], "count": len(rows)}
            for one, rows in problems.items()
        ],
    )


def prefers_to_itself(texts: Sequence[Any], ranks: Sequence[Any]) -> bool:
    """Whether equal texts have different ranks, or different labels."""
    pairs = combinations(zip(texts, ranks, strict=True), 2)
    return any(one == other and rank != another for (one, rank), (other, another) in pairs)


def tied_ranks(texts: Sequence[Any], ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks without gaps, with equal texts in the best of their places.

    >>> tied_ranks(["a", "b", "a"], [0, 1, 2])
    (0, 1, 0)
    """
    both = list(zip(texts, ranks, strict=True))
    best = [min(rank for other, rank in both if other == text) for text in texts]
    order = sorted(set(best))
    return tuple(order.index(rank) for rank in best)


def row_numbers(numbers: Sequence[int]) -> str:
    """The first of these rows, and how many more there are."""
    first = ", ".join(map(str, numbers[:MOST_ROWS]))
    more = f" and {len(numbers) - MOST_ROWS} more" if len(numbers) > MOST_ROWS else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {first}{more}"


def _comparison(row: Any, number: int, margin_from: MarginFrom | None) -> Comparison:
    if isinstance(row, RowProblem):
        raise row
    _require(isinstance(row, Mapping), "is not a JSON object")
    labels: tuple[bool, ...] = ()
    if "labels" in row and "completions" in row and "ranks" not in row and "scores" not in row:
        completions, labels = _states(row)
        ranks = (0,) * len(completions)
    else:
        completions, ranks = _ranked(row)
    form, prompt = _form(completions[0]), row.get("prompt")
    if form == "pre-tokenised":  # the tokens of a side hold the prompt's
        prompt = None
    elif prompt is not None:
        prompt = (
            _encodable(prompt, "prompt") if isinstance(prompt, str) else _messages(prompt, "prompt")
        )
        mixed = (
            "a string and a list of messages are mixed: 'prompt' is the one, a completion the other"
        )
        _require(isinstance(prompt, str) == (form == "standard"), mixed)
        _require(not any(holds_prompt(prompt, text) for text in completions), PROMPT_TWICE)
    _check_prompt_tokens(row, completions)
    if margin_from is None:
        margin = _number(row, "margin", 0.0)
    else:
        for column in margin_from.columns:
            _required(row, column)
        chosen, rejected = (_number(row, column, 0.0) for column in margin_from.columns)
        margin = margin_from.scale * (chosen - rejected)
    tie = _optional(row, "tie", bool)
    if tie or margin:
        _require(not labels, "'tie' and 'margin' are for two completions, not for steps")
        _require(
            len(completions) == 2,
            "'tie' and 'margin' are for two completions; equal 'ranks' are a tie",
        )
    weight = _number(row, "weight", 1.0)
    _require(weight >= 0, "'weight' is negative")
    objective = _optional(row, "objective", str) or None
    _require(
        objective not in RESERVED_PARTS,
        f"the objective '{objective}' has the name of another metric",
    )
    tools, arguments = _parsed(row, "tools"), _parsed(row, "chat_template_kwargs")
    are_functions = isinstance(tools, list | tuple | None) and all(
        isinstance(one, Mapping) for one in tools or ()
    )
    _require(are_functions, "'tools' is not a list of functions")
    _require(isinstance(arguments, Mapping | None), "'chat_template_kwargs' is not a mapping")
    return Comparison(
        completions=completions,
        ranks=(0, 0) if tie else ranks,
        labels=labels,
        prompt=prompt,
        margin=margin,
        weight=weight,
        kind=_optional(row, "kind", str) or _optional(row, "subset", str),
        objective=objective,
        tools=tuple(tools or ()),
        template_arguments={
            name: part for name, part in (arguments or {}).items() if part is not None
        },
        id="" if row.get("id") is None else str(row["id"]),
        row=number,
    )


def _check_prompt_tokens(row: Mapping[str, Any], completions: Sequence[Text]) -> None:
    """RowProblem where the prompt's tokens stand in a column by themselves: they are not put before
    a side's.
    """
    if _form(completions[0]) != "pre-tokenised":
        return
    for column in _PROMPT_TOKENS:
        prompt = row.get(column)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            begins = all(list(tokens[: len(prompt)]) == list(prompt) for tokens in completions)
            _require(
                begins,
                f"'{column}' is not read: the tokens of each side have to begin with the prompt's",
            )


def _warnings_of(row: Mapping[str, Any], comparison: Comparison) -> list[str]:
    """What is odd about a row that is used. RowProblem where its prompt is in a column that is not
    read.
    """
    prompt, completions = comparison.prompt, comparison.completions
    if comparison.form == "pre-tokenised":
        return []
    warnings: list[str] = []
    if isinstance(prompt, str) and prompt.strip():
        begin = prompt.strip()
        if all(isinstance(text, str) and text.lstrip().startswith(begin) for text in completions):
            warnings.append("the completions begin with the prompt, which is read twice")
    read = _squeezed(
        " ".join(piece for part in (prompt, *completions) for piece in _texts_in(part))
    )
    unread = [
        column
        for column, value in row.items()
        if str(column).lower() in _PROMPT_COLUMNS
        and any(_squeezed(piece) not in read for piece in _texts_in(value))
    ]
    if unread:
        names = ", ".join(map(repr, unread))
        problem = f"what stands in {names} is not read, and is in none of the row's texts"
        _require(_has_prompt(comparison), f"{problem}: name the column 'prompt', or remove it")
        warnings.append(problem)
    return warnings


def _has_prompt(comparison: Comparison) -> bool:
    """Whether the row has a prompt, or its completions a user's message: of strings, it cannot be
    seen.
    """
    chats = [text for text in comparison.completions if not isinstance(text, str)]
    asked = any(
        isinstance(one, Mapping) and one["role"] == "user" for chat in chats for one in chat
    )
    return comparison.prompt is not None or asked


def holds_prompt(prompt: str | Sequence[Message] | None, completion: Text) -> bool:
    """Whether a chat's completion begins with its prompt, or with the end of it: it would be read
    twice.
    """
    if (
        not prompt
        or isinstance(prompt, str)
        or not completion
        or _form(completion) != "conversational"
    ):
        return False
    said = [_said(message) for message in prompt]
    answered = [_said(message) for message in completion]
    before_answer = takewhile(lambda one: one[0] != "assistant", answered)
    return answered[: len(said)] == said or said[-1] in before_answer


def _said(message: Any) -> tuple[str, str, str]:
    calls = message.get("tool_calls")
    return (
        str(message.get("role")),
        text_of(message.get("content")).strip(),
        _canonical(calls) if calls else "",
    )


def _texts_in(value: Any, depth: int = 4) -> Iterator[str]:
    """The texts of a prompt, a completion or another column: strings, messages of any form, and
    lists of them.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and depth:
        yield from _texts_in(
            value.get("content") or value.get("value") or value.get("text"), depth - 1
        )
    elif isinstance(value, Sequence) and depth:
        for one in value:
            yield from _texts_in(one, depth - 1)


def _squeezed(text: str) -> str:
    return " ".join(text.split()).casefold()


def _ranked(row: Mapping[str, Any]) -> tuple[tuple[Text, ...], tuple[int, ...]]:
    """Completions with their ranks, from 0 without gaps."""
    for columns in _TOKEN_COLUMNS:
        if any(column in row for column in columns):
            values = [_required(row, column) for column in columns]
            for tokens, column in zip(values, columns, strict=True):
                are_ids = isinstance(tokens, Sequence) and all(
                    type(one) is int and one >= 0 for one in tokens
                )
                _require(are_ids, f"'{column}' is not a list of token ids")
                _require(tokens, f"'{column}' is empty")
            return tuple(map(tuple, values)), (0, 1)
    if "completions" in row:
        values = _required(row, "completions")
        _require(_is_list(values) and len(values) > 1, "'completions' is not a list of two or more")
        column = "ranks" if "ranks" in row else "scores"
        _require(column in row, "'completions' has neither 'ranks' nor 'scores' beside it")
        order = _required(row, column)
        are_numbers = (
            isinstance(order, Sequence)
            and len(order) == len(values)
            and all(map(_is_finite, order))
        )
        _require(
            are_numbers,
            f"'{column}' is not a list of as many finite numbers as there are completions",
        )
        places = sorted(set(order), reverse=column == "scores")
        ranks = tuple(places.index(value) for value in order)
        texts = tuple(_completion(value, "completions") for value in values)
    else:
        sides: list[tuple[Text, ...]] = []
        for column in ("chosen", "rejected"):
            side = _required(row, column)
            # One completion, or a list of several: messages are mappings, so a list of anything
            # else holds texts.
            several = _is_list(side) and side and not isinstance(side[0], Mapping)
            sides.append(tuple(_completion(one, column) for one in (side if several else [side])))
        texts, ranks = sides[0] + sides[1], (0,) * len(sides[0]) + (1,) * len(sides[1])
    _require(len({_form(text) for text in texts}) == 1, MIXED)
    return texts, ranks


def _states(row: Mapping[str, Any]) -> tuple[tuple[Text, ...], tuple[bool, ...]]:
    """What there is of a completion after each of its steps that has a label."""
    steps, labels = (_required(row, column) for column in ("completions", "labels"))
    for column, values in (("completions", steps), ("labels", labels)):
        _require(_is_list(values) and values, f"'{column}' is not a list of one or more")
    _require(len(labels) == len(steps), "'labels' are not as many as 'completions'")
    _require(
        all(isinstance(label, bool | None) for label in labels),
        "a label is neither true, false nor null",
    )
    _require(any(label is not None for label in labels), "no step has a label")
    _require(len({isinstance(step, str) for step in steps}) == 1, MIXED)
    states: list[Text] = []
    if isinstance(steps[0], str):
        texts = [str(_completion(step, "completions")) for step in steps]
        states += [STEP_SEPARATOR.join(texts[:end]) for end in range(1, len(texts) + 1)]
    else:
        chat: tuple[Message, ...] = ()
        for step in steps:  # a message, or several
            messages = _messages([step] if isinstance(step, Mapping) else step, "completions")
            _require(messages, "'completions' is empty")
            chat += messages
            states.append(chat)
    judged = [
        (state, label) for state, label in zip(states, labels, strict=True) if label is not None
    ]
    return tuple(state for state, _ in judged), tuple(label for _, label in judged)


def _completion(value: Any, column: str) -> Text:
    if isinstance(value, str):
        _require(value.strip(), f"'{column}' is empty")
        return _encodable(value, column)
    messages = _messages(value, column)
    _require(messages, f"'{column}' is empty")
    last = messages[-1]
    _require(last["role"] == "assistant", f"the last message of '{column}' is not the assistant's")
    says_something = last.get("tool_calls") or text_of(last.get("content")).strip()
    _require(says_something, f"the last message of '{column}' is empty")
    return messages


def _messages(values: Any, column: str) -> tuple[Message, ...]:
    """With content as one text, and without empty fields: tables give every message the fields of
    all.
    """
    are_objects = isinstance(values, Sequence) and all(isinstance(one, Mapping) for one in values)
    _require(are_objects, f"'{column}' is {_type_name(values)}, not a string or a list of messages")
    messages: list[Message] = []
    for one in values:
        _require(isinstance(one.get("role"), str), f"a message of '{column}' has no 'role'")
        says_nothing = "content" not in one and not one.get("tool_calls")
        _require(not says_nothing, f"a message of '{column}' has no 'content'")
        try:
            message = flat(one)
        except InvalidData as error:
            what = error.what.removesuffix(".")
            raise RowProblem(
                f"in '{column}', {what[0].lower()}{what[1:]}, and text alone is read"
            ) from None
        _encodable(json.dumps(message, ensure_ascii=False, default=str), column)
        messages.append(
            {name: part for name, part in message.items() if part is not None or name == "content"}
        )
    return tuple(messages)


def _encodable(text: str, column: str) -> str:
    """JSON can hold one half of a surrogate pair; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowProblem(
            f"'{column}' holds half of a surrogate pair, which is no character"
        ) from None
    return text


def _number(row: Mapping[str, Any], column: str, default: float) -> float:
    value = default if row.get(column) is None else row[column]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number, f"'{column}' is {_type_name(value)}, not a number")
    _require(_is_finite(value), f"'{column}' is not finite")
    return float(value)


def _optional(row: Mapping[str, Any], column: str, kind: type) -> Any:
    value = row.get(column)
    noun = "string" if kind is str else "truth value"
    _require(
        value is None or isinstance(value, kind), f"'{column}' is {_type_name(value)}, not a {noun}"
    )
    return value


def _required(row: Mapping[str, Any], column: str) -> Any:
    _require(row.get(column) is not None, f"'{column}' is {'null' if column in row else 'missing'}")
    return row[column]


def _parsed(row: Mapping[str, Any], column: str) -> Any:
    """A table keeps what differs from row to row as JSON text."""
    value = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, most_values=len(value)) if value.strip() else None
    except DocumentError as error:
        raise RowProblem(f"'{column}' is not JSON that can be read", str(error)) from None


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise RowProblem(problem)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_finite(value: Any) -> bool:
    """Also of whole numbers too large for a float, which JSON can hold."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def _type_name(value: Any) -> str:
    names = {
        str: "a string",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), "a list" if isinstance(value, Sequence) else "an object")


def _form(text: Text) -> Form:
    if isinstance(text, str):
        return "standard"
    return "conversational" if isinstance(text[0], Mapping) else "pre-tokenised"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
