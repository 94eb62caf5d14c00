"""What a session's nodes are trained on: its branches, each of them one sequence.

    root ── a ── b ── c        a branch: root, a, b, c
             └── d              another: root, a, d; the tokens of root and a belong to the first

A token that was sampled is trained on in one sequence, the first that has it. What is context, and
what a program wrote in an assistant's name, is masked everywhere. Two kinds of nodes are no part of
any sequence: one that a program threw away (it sampled the same prompt again, and went on from that
answer), and a conversation of one call without tools beside others that have some, as programs
start for titles and the like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from halteres.service.gateway.history import History
from halteres.service.gateway.nodes import Node, token_list
from halteres.types import CONTEXT_LOGPROB, MASKED

NO_VERSION = -1  # of a token that was not sampled

Untrained = Literal["discarded", "auxiliary", "shaped", "not_finite", "late"]
"""Why a node is no part of a sequence: another answer to its prompt was gone on from; it is a call
beside the episode; it was sampled under penalties or a grammar; one of its log-probabilities is no
number; it ended after its session.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTurn:
    """Where the tokens that one node sampled lie, in the sequence that owns them."""

    node: Node
    sequence: int
    start: int
    stop: int  # one past the last


@dataclass(slots=True, kw_only=True)
class Branch:
    """One sequence of N tokens."""

    leaf: Node
    nodes: list[str]  # from its root to its leaf
    tokens: list[int] = field(default_factory=list[int])  # N
    masks: list[int] = field(default_factory=list[int])  # N: MASKED, or the token itself
    logprobs: list[float] = field(default_factory=list[float])  # N: CONTEXT_LOGPROB where masked
    versions: list[int] = field(default_factory=list[int])  # N: NO_VERSION on context

    def add_context(self, tokens: list[int], version: int = NO_VERSION) -> None:
        """Tokens that are not trained on here."""
        self.tokens += tokens
        self.masks += [MASKED] * len(tokens)
        self.logprobs += [CONTEXT_LOGPROB] * len(tokens)
        self.versions += [version] * len(tokens)

    def add_sampled(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Tokens that are."""
        self.tokens += tokens
        self.masks += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """What is trained on of one session."""

    branches: list[Branch]
    turns: list[BranchTurn]  # of all branches, in order of time
    untrained: Mapping[str, Untrained]  # by node

    @property
    def num_trained(self) -> int:
        """Tokens that are trained on."""
        return sum(turn.stop - turn.start for turn in self.turns)


def branches_of(history: History) -> Branches:
    """The branches of a session's nodes."""
    # calls that come meanwhile add theirs, and this runs in a thread
    nodes = dict(history.nodes)
    untrained: dict[str, Untrained] = {}
    for node in nodes.values():
        if node.late:
            untrained[node.id] = "late"
        elif node.shaped_by and not history.train_shaped:
            untrained[node.id] = "shaped"
        elif not np.isfinite(np.frombuffer(node.logprobs, np.float32)).all():
            untrained[node.id] = "not_finite"
    kept = [node for node in nodes.values() if untrained.get(node.id) != "late"]
    untrained |= dict.fromkeys(_discarded(kept), "discarded")
    untrained |= dict.fromkeys(_auxiliary(kept), "auxiliary")
    trained = [node for node in kept if node.id not in untrained]
    lines = {node.id: _line(nodes, node) for node in trained}
    inner = {one for line in lines.values() for one in line[:-1]}
    found, turns, owned = list[Branch](), list[BranchTurn](), set[str]()
    for leaf in trained:
        if leaf.id in inner:
            continue
        branch = Branch(leaf=leaf, nodes=lines[leaf.id])
        for node in (nodes[one] for one in branch.nodes):
            branch.add_context(token_list(node.prompt))
            tokens = token_list(node.sampled)
            if node.id in owned or node.id in untrained:
                branch.add_context(tokens, node.version_max)
                continue
            owned.add(node.id)
            start = len(branch.tokens)
            logprobs = np.frombuffer(node.logprobs, np.float32).tolist()
            branch.add_sampled(tokens, logprobs, node.version_max)
            turns.append(
                BranchTurn(node=node, sequence=len(found), start=start, stop=len(branch.tokens))
            )
        found.append(branch)
    turns.sort(key=lambda turn: turn.node.at)
    return Branches(branches=found, turns=turns, untrained=untrained)


def _line(nodes: Mapping[str, Node], node: Node) -> list[str]:
    """From a node's root to the node."""
    line = [node.id]
    while node.parent is not None:
        node = nodes[node.parent]
        line.append(node.id)
    return line[::-1]


def _discarded(kept: Iterable[Node]) -> set[str]:
    """Nodes that nothing goes on from, beside one of the same prompt that something does."""
    kept = list(kept)
    continued = {node.parent for node in kept} | {node.continues for node in kept}
    of_prompt: dict[tuple[str | None, str | None, bytes], list[str]] = {}
    for node in kept:
        prompt = (node.harness_session, node.parent, node.prompt)
        of_prompt.setdefault(prompt, []).append(node.id)
    return {
        one
        for siblings in of_prompt.values()
        if any(sibling in continued for sibling in siblings)
        for one in siblings
        if one not in continued
    }


def _auxiliary(kept: Iterable[Node]) -> set[str]:
    """Conversations of one call without tools, in a session in which others have some."""
    kept = list(kept)
    if not any(node.tools for node in kept):
        return set()
    continued = {node.parent for node in kept} | {node.continues for node in kept}
    return {
        node.id
        for node in kept
        if not node.tools
        and node.chat_end is not None
        and node.parent is None
        and node.continues is None
        and node.id not in continued
    }
