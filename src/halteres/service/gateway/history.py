"""What of a new prompt was sampled before: a prompt is made of the token ids of the longest node
that it begins with, and of what is new behind them.

    text of the template    <user>Guess.</user><assistant>5</assistant><user>Too low.</user>
    a node's ids, its text  ───────────────────────────── 5</assistant>
    the rest, tokenised                                                ─────────────────────

Token ids are reused where the text that they stand for equals what the template writes, so that the
tokenisation alone may have differed. Which node a history goes on from is found by its messages as
well, for what programs change in them: calls whose JSON is written anew are put back into the words
in which they were sampled, and where a session keeps reasoning, so is an answer that the template
shortens. If a text still differs, the prompt is a new root, with its reason.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import replace

from halteres.service.context_window import text_too_long
from halteres.service.gateway.nodes import (
    DIGEST_BYTES,
    Conversation,
    Mark,
    Node,
    Origin,
    Why,
    token_list,
)
from halteres.service.inference.requests import (
    CHARACTERS_PER_TOKEN,
    Chat,
    Prompt,
    render,
)
from halteres.service.sampling.samples import packed
from halteres.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Tokens before new ones that are decoded with them: tokenizers join neighbours."""


class Beginnings:
    """Nodes by what they end, found by what begins so: the longest first."""

    def __init__(self) -> None:
        self._nodes: dict[Mark, list[Node]] = {}
        self._lengths: list[int] = []  # each once, ascending
        self._known_lengths = set[int]()

    def add(self, mark: Mark, node: Node) -> None:
        """A node that is recognised by this mark."""
        if mark.length not in self._known_lengths:
            self._known_lengths.add(mark.length)
            insort(self._lengths, mark.length)
        self._nodes.setdefault(mark, []).append(node)

    def longest(self, content: bytes, unit: int, harness_session: str | None) -> Node | None:
        """The node whose mark is of the longest beginning of the content, in units of so many
        bytes.
        """
        hasher, done, found = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, None
        for length in self._lengths:
            if length * unit > len(content):
                break
            hasher.update(content[done : length * unit])
            done = length * unit
            found = self.at(Mark(length, hasher.digest()), harness_session) or found
        return found

    def at(self, mark: Mark, harness_session: str | None) -> Node | None:
        """The newest node of this mark; one of the same program's session before all others."""
        nodes = self._nodes.get(mark)
        if not nodes:
            return None
        own = [node for node in nodes if node.harness_session == harness_session]
        return (own or nodes)[-1]


class History:
    """The nodes of one session, and which of them a prompt goes on from."""

    def __init__(
        self, tokenizer: Tokenizer, *, keep_reasoning: bool, train_shaped: bool = False
    ) -> None:
        self._tokenizer, self._keep_reasoning = tokenizer, keep_reasoning
        # Whether what was sampled under penalties or a grammar is trained on.
        self.train_shaped = train_shaped
        self.nodes: dict[str, Node] = {}  # by id, oldest first
        self._by_ids, self._by_text, self._by_chat = Beginnings(), Beginnings(), Beginnings()

    def add(self, node: Node) -> None:
        """One more."""
        self.nodes[node.id] = node
        self._by_ids.add(node.ids_end, node)
        if node.text_end is not None:
            self._by_text.add(node.text_end, node)
        if node.chat_end is not None:
            self._by_chat.add(node.chat_end, node)

    def ids_of(self, node: Node) -> bytes:
        """All token ids of a node, prompt and sampled ones, int32."""
        return self.prompt_of(node) + node.sampled

    def prompt_of(self, node: Node) -> bytes:
        """The token ids of a node's prompt, int32."""
        parts = [node.prompt]
        while node.parent is not None:
            node = self.nodes[node.parent]
            parts += (node.sampled, node.prompt)
        return b"".join(reversed(parts))

    def messages_of(self, node: Node) -> list[dict[str, object]]:
        """The messages of a node's request, leading system ones and its answer included."""
        parts, at = [[node.answer], node.messages], node
        while at.recalled and at.continues is not None:
            at = self.nodes[at.continues]
            parts += ([at.answer], at.messages)
        return [*node.system, *(message for part in reversed(parts) for message in part)]

    # A prompt

    def prompt(
        self,
        given: Chat | str | list[int],
        context: int,
        *,
        special: bool | None,
        harness_session: str | None,
    ) -> Prompt:
        """The prompt that a chat, a text or token ids become.

        Raises:
            InvalidData: the chat does not fit the template, or holds what is no text.
            ContextLengthExceeded: it cannot fit into `context` tokens.
        """
        if isinstance(given, Chat):
            return self._of_chat(given, context, special, harness_session)
        if isinstance(given, str):
            return self._of_text(given, context, special, harness_session)
        prompt = Prompt.of(given, self._tokenizer, context)
        parent = self._by_ids.longest(packed(given), 4, harness_session)
        if parent is None:
            return replace(prompt, origin=Origin(why="first"))
        return replace(prompt, origin=_goes_on(parent))

    def _of_text(
        self, text: str, context: int, special: bool | None, harness_session: str | None
    ) -> Prompt:
        _check_length(text, context)
        parent = self._after_text(text, harness_session)
        if parent is not None:
            return self._behind(parent, text, replace(_goes_on(parent), text=text))
        prompt = Prompt.of(text, self._tokenizer, context, special)
        return replace(prompt, origin=Origin(why="first", text=text))

    def _of_chat(
        self, chat: Chat, context: int, special: bool | None, harness_session: str | None
    ) -> Prompt:
        text = render(self._tokenizer, chat)
        _check_length(text, context)
        said = Conversation.of(chat)
        before = self._after_messages(said, harness_session)
        parent = self._after_text(text, harness_session)
        if before is not None and not _reaches(parent, before):
            for worded in self._in_sampled_words(chat, said, before):
                own = self._after_text(worded, harness_session)
                if own is not None and _reaches(own, before):
                    parent, text = own, worded
            is_same = said.system == before.system and said.tools == before.tools
            if self._keep_reasoning and is_same and not _reaches(parent, before):
                kept = self._keeping_reasoning(chat, said, before, text)
                if kept is not None:
                    return kept
        why = self._why(said, before, parent)
        origin = _continuing(before or parent, said, Origin(why=why, text=text))
        if parent is not None:
            goes_on = replace(origin, parent=parent.id, reused=parent.ids_end.length)
            return self._behind(parent, text, goes_on)
        return replace(Prompt.of(text, self._tokenizer, context, special), origin=origin)

    def _behind(self, parent: Node, text: str, origin: Origin) -> Prompt:
        """The prompt of a text that begins with a node's."""
        assert parent.text_end is not None  # noqa: S101 - it was found by that
        encoded = text.encode("utf-8", "surrogatepass")
        rest = encoded[parent.text_end.length :].decode("utf-8", "surrogatepass")
        tokens = token_list(self.ids_of(parent)) + self._tokenizer.encode(rest)
        return Prompt(tokens=tokens, text=text, origin=origin)

    # Which node it goes on from

    def _after_text(self, text: str, harness_session: str | None) -> Node | None:
        return self._by_text.longest(text.encode("utf-8", "surrogatepass"), 1, harness_session)

    def _after_messages(self, said: Conversation, harness_session: str | None) -> Node | None:
        for length in range(len(said.messages) - said.continued, 0, -1):
            found = self._by_chat.at(Mark(length, said.marks[length]), harness_session)
            if found is not None:
                return found
        return None

    def _why(self, said: Conversation, before: Node | None, parent: Node | None) -> Why | None:
        if before is None:
            if parent is not None:
                return None
            has_answers = any(message["role"] == "assistant" for message in said.messages)
            return "history_rewritten" if has_answers and self.nodes else "first"
        if _reaches(parent, before):
            return None
        if said.system != before.system:
            return "system_changed"
        if said.tools != before.tools:
            return "tools_changed"
        return "template"

    # Answers in the words in which they were sampled

    def _in_sampled_words(self, chat: Chat, said: Conversation, before: Node) -> Iterator[str]:
        """The chat's text with each call of a tool as it was sampled; not where the program left
        out what was thought before it.
        """
        messages, is_changed = list(chat.messages), False
        for place, node in self._answers(said, before):
            shown = said.messages[place - len(said.system)]
            is_whole = shown["content"].strip() == node.answer["content"].strip()
            if shown.get("tool_calls") and is_whole:
                worded = {"role": "assistant", "content": self._sampled_text(node)}
                messages[place], is_changed = worded, True
        if is_changed:
            yield render(self._tokenizer, replace(chat, messages=messages))

    def _keeping_reasoning(
        self, chat: Chat, said: Conversation, before: Node, text: str
    ) -> Prompt | None:
        """The node's ids, and what the template writes behind its answer; None where it does not
        write the answer.
        """
        messages = list(chat.messages)
        place, _ = next(self._answers(said, before))
        # no message has it: ids are random
        answer = f"[the answer {before.id}]"
        messages[place] = {"role": "assistant", "content": answer}
        rendered = render(self._tokenizer, replace(chat, messages=messages))
        _, found, rest = rendered.rpartition(answer)
        if not found:
            return None
        last = token_list(before.sampled)[-1:]
        if last and last[0] in self._tokenizer.eos_token_ids:
            rest = rest.removeprefix(self._tokenizer.token(last[0]))
        tokens = token_list(self.ids_of(before)) + self._tokenizer.encode(rest)
        origin = _continuing(before, said, _goes_on(before))
        return Prompt(tokens=tokens, text=text, origin=origin)

    def _answers(self, said: Conversation, before: Node) -> Iterator[tuple[int, Node]]:
        """The answers in a history that were sampled here, the newest first, and each one's place
        among the messages.
        """
        node = before
        while node.chat_end is not None:
            yield len(said.system) + node.chat_end.length - 1, node
            if node.continues is None or not node.recalled:
                return
            node = self.nodes[node.continues]

    def _sampled_text(self, node: Node) -> str:
        """What was answered, as it was sampled, without the token that ended it."""
        sampled = token_list(node.sampled)
        if sampled and sampled[-1] in self._tokenizer.eos_token_ids:
            sampled.pop()
        prompt = token_list(self.prompt_of(node)[-4 * CONTEXT_TOKENS :])
        return node.begun + text_behind(self._tokenizer, prompt, sampled)


def text_behind(tokenizer: Tokenizer, prompt: Sequence[int], sampled: Sequence[int]) -> str:
    """The text that sampled tokens add to that of a prompt's, special ones by name."""
    before = tokenizer.decode(prompt[-CONTEXT_TOKENS:], skip_special_tokens=False)
    whole = tokenizer.decode([*prompt[-CONTEXT_TOKENS:], *sampled], skip_special_tokens=False)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(sampled, skip_special_tokens=False)


def _continuing(node: Node | None, said: Conversation, origin: Origin) -> Origin:
    """The origin of a prompt whose history goes on from this node."""
    origin = replace(origin, conversation=said)
    if node is None:
        return origin
    mark, recalled = node.chat_end, 0
    if mark is not None and said.marks[mark.length : mark.length + 1] == [mark.digest]:
        recalled = mark.length
    return replace(origin, continues=node.id, recalled=recalled)


def _goes_on(parent: Node) -> Origin:
    return Origin(parent=parent.id, reused=parent.ids_end.length, continues=parent.id)


def _reaches(parent: Node | None, before: Node) -> bool:
    """Whether a node has as many messages as another at least."""
    if parent is None:
        return False
    if parent is before:
        return True
    mark, other = parent.chat_end, before.chat_end
    return mark is not None and other is not None and mark.length >= other.length


def _check_length(text: str, context: int) -> None:
    if len(text) > context * CHARACTERS_PER_TOKEN:
        raise text_too_long(len(text), context)
