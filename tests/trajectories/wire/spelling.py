"""Bodies as text, number by number: JSON has many spellings of a value, and readers differ in the
spellings they know.

Owns: the spellings, and strategies that make groups of them.
Never: goes through a JSON writer, which knows one spelling of each value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

Tree = Any
"""A text as it stands in the body, a list of trees, or a tuple of pairs (key, tree), whose keys may
come twice.
"""


class Layout(NamedTuple):
    comma: str
    colon: str
    inside: str  # brackets


PYTHON, COMPACT = Layout(", ", ": ", ""), Layout(",", ":", "")
LAYOUTS = [PYTHON, COMPACT, Layout(",\n  ", ": ", "\n  "), Layout(" ,\t", " :\r", " ")]

TOKENS = ["0", "-0", "7", "-100", "151643", "128009", "999999"]
NUMBERS = [
    "-2.3841855790367e-07",
    "-0.0",
    "1.0",
    "0",
    "-1",
    "-12.25",
    "1e-320",
    "1e-999",
    "12345678901234567890",
]
LONG = [str(10**15), "9" * 16, str(10**18), str(2**63), str(-(10**30)), "9" * 19, "9" * 400]
ODD = [
    "1.0",
    "2e0",
    '"3"',
    "true",
    "null",
    "[1]",
    "[]",
    "{}",
    "1.5",
    "1e400",
    "-1e400",
    "NaN",
    "-Infinity",
    *LONG,
]
ODD_NUMBERS = [
    *ODD,
    "Infinity",
    "1E-7",
    "1e+2",
    "1e5",
    "9" * 200,
    "0." + "3" * 300,
    "1e308",
    "-1e-7",
    '"NaN"',
    '"e-"',
]
VALUES = [
    *(
        "null",
        "[]",
        "{}",
        "[[]]",
        "0",
        "-0.0",
        "1e400",
        "NaN",
        "true",
        '"x"',
        '"]],[["',
        r'"\ud83d\udca5"',
        '"💥"',
    ),
    *(
        r'"\ud800"',
        r'"\u005b\u005B"',
        r'"\u0000\"\\"',
        str(10**30),
        "9" * 400,
        "[[[[1]]]]",
        '{"a": {"a": [1e-7, null]}}',
        '{"a":1,"a":2}',
    ),
]
MESSAGES = [
    *(
        "null",
        "[]",
        "[[]]",
        '[[{"role":"user","content":"]],[["}]]',
        '[[{"role":"user","content":null,"x":1e-7}], []]',
    ),
    *(
        r'[[{"role":"\ud83d","content":"é"}]]',
        '[[{"role":"user"}]]',
        '[{"role":"user","content":""}]',
        "{}",
        "[[1]]",
    ),
]
OBJECTS = [
    "null",
    "{}",
    '{"temperature": 0.7}',
    '{"a":1e400}',
    '{"a":NaN}',
    r'{"\ud800":1}',
    "[]",
    '{"a":1,"a":2}',
]
LISTS = [
    "null",
    "[]",
    "[{}]",
    '[{"set_advantage_to_zero": true}, {}]',
    "[null]",
    "[[]]",
    "{}",
    '[{"a":1e400}]',
]
ENV_IDS = ["null", "0", "7", "-1", "2147483648", str(10**30), "1.0", '"1"', "1.5", "true", "[]"]
VERSIONS = [
    "null",
    "-1",
    "3",
    "3.0",
    '"3"',
    "-2",
    "2147483649",
    "[]",
    "[[3, 4]]",
    "[[3,4],[4,3]]",
    "[[1]]",
    "true",
]
EPISODES = [
    "null",
    "[]",
    "[0]",
    "[0, 0, 1]",
    "[0, 1, 2, 3, 4]",
    "[1]",
    "[0, 2]",
    "[-1]",
    "[0.5]",
    '"0"',
    "[[0]]",
]
SPANS = [
    "null",
    "[]",
    "[[0, 0, 1, 0.5]]",
    "[[0, 0, 1, 1], [1, 0, 2, -0.25]]",
    "[[9, 0, 1, 0.0]]",
    "[[0, 2, 1, 0.0]]",
]
SPANS += ["[[0, 0, 1, 1e400]]", "[[0, 0, 1, NaN]]", "[[0, 0, 1]]", "[0]", "{}", '[[0, 0, 1, "1"]]']
KEYS = ["null", '"k"', '"1"', r'"\u006b"', '"é"', "1", "[]"]
ASIDE = {
    "messages": MESSAGES,
    "generation_params": OBJECTS,
    "group_overrides": OBJECTS,
    "overrides": LISTS,
    "images": VALUES,
    "env_id": ENV_IDS,
    "policy_version": VERSIONS,
    "episodes": EPISODES,
    "spans": SPANS,
    "halteres_key": KEYS,
    "distill_token_ids": ["null", "[]", "[[[1]]]", "[[[1, 2]], [[3, 4]]]", "[[[1.0]]]"],
    "distill_logprobs": ["null", "[]", "[[[-0.5]]]", "[[[1e400]]]"],
    "group_id": VALUES,
    r"\ud800": VALUES,
}
"""What may stand beside the arrays, with its spellings."""

USUAL = {
    "messages": MESSAGES[:4],
    "generation_params": OBJECTS[:3],
    "group_overrides": OBJECTS[:3],
    "overrides": LISTS[:4],
    "images": [*VALUES[:6], *VALUES[8:13]],
    "env_id": ENV_IDS[:5],
    "policy_version": [*VERSIONS[:3], *VERSIONS[7:10]],
    "episodes": EPISODES[:7],
    "spans": SPANS[:6],
    "distill_token_ids": ["null", "[]", "[[[1]]]", "[[[1, 2]], [[3, 4]]]"],
    "distill_logprobs": ["null", "[]", "[[[-0.5]]]"],
}
"""The same as clients write it."""


def spelled(tree: Tree, layout: Layout) -> str:
    """The text of a tree."""
    if isinstance(tree, str):
        return tree
    if isinstance(tree, tuple):
        pairs = (f'"{name}"{layout.colon}{spelled(value, layout)}' for name, value in tree)
        return "{" + layout.inside + layout.comma.join(pairs) + layout.inside + "}"
    return (
        "["
        + layout.inside
        + layout.comma.join(spelled(each, layout) for each in tree)
        + layout.inside
        + "]"
    )


def rows(cells: Sequence[str], lengths: Sequence[int]) -> st.SearchStrategy[Tree]:
    """An array of these lengths."""
    num = sum(lengths)
    flat = st.lists(st.sampled_from(cells), min_size=num, max_size=num)
    return flat.map(
        lambda found: [found[sum(lengths[:at]) :][:length] for at, length in enumerate(lengths)]
    )


def spoilt(array: Tree, at: int, text: str) -> Tree:
    """The array with one of its numbers, rows or itself spelt otherwise."""
    if at == 0 or not array:
        return text
    row = at % len(array)
    if at < 3 or not array[row]:
        return [*array[:row], text, *array[row + 1 :]]
    column = at % len(array[row])
    return [
        *array[:row],
        [*array[row][:column], text, *array[row][column + 1 :]],
        *array[row + 1 :],
    ]


@st.composite
def groups(draw: Callable[[st.SearchStrategy[Any]], Any], *, usual: bool) -> bytes:
    """The body of a group; `usual`: as a client writes it, so that it needs no coercion."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    numbers = [
        "inference_logprobs",
        *draw(st.lists(st.sampled_from(["advantages", "ref_logprobs"]), unique=True)),
    ]
    scores = st.lists(st.sampled_from(NUMBERS[1:]), min_size=len(lengths), max_size=len(lengths))
    pairs = [(name, draw(rows(TOKENS, lengths))) for name in ("tokens", "masks")]
    pairs += [("scores", draw(scores)), *((name, draw(rows(NUMBERS, lengths))) for name in numbers)]
    if not usual and draw(st.booleans()):
        which = draw(st.integers(0, len(pairs) - 1))
        name, array = pairs[which]
        odd = st.sampled_from(ODD if which < 2 else ODD_NUMBERS)
        pairs[which] = (name, spoilt(array, draw(st.integers(0, 20)), draw(odd)))
    aside = USUAL if usual else ASIDE
    for name in draw(st.lists(st.sampled_from([*aside]), unique=usual, max_size=4)):
        pairs.append((name, draw(st.sampled_from(aside[name]))))
    if not usual and draw(st.integers(0, 3)) == 0:
        pairs.append(draw(st.sampled_from(pairs)))
    order = draw(st.permutations(pairs)) if draw(st.booleans()) else pairs
    return spelled(tuple(order), draw(st.sampled_from(LAYOUTS[:2] if usual else LAYOUTS))).encode()
