"""The search tool of GEM's wrapper: a query within an answer is sent to a search server, its passages come back.

Source: gem-llm 0.1.0 (tools/search_tool.py), which follows Search-R1. A server of GEM's, or one that answers in its
form: POST of a msgpack map {query, topk, return_scores}; {result: [{document: {contents: "title\\ntext"}}]} comes back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from halteres.clients.plain import post_bytes
from halteres.errors import HalteresError, InvalidConfig

_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a tool made of an answer."""

    action: str  # the answer up to the end of the call
    observation: str
    error: str | None  # why the tool failed


class _Document(msgspec.Struct):
    contents: str


class _Passage(msgspec.Struct):
    document: _Document


class _Reply(msgspec.Struct):
    result: list[_Passage]


class SearchTool:
    """Sends the first `<search>…</search>` of an answer to a search server; no proxy is asked.

    Args:
        url: of the server, to which queries are posted.
        top_k: passages asked for.
        timeout_s: to wait for the connection, and for each part of the answer.

    Raises:
        InvalidConfig: this is no address of a web server.
    """

    kind = "search"

    instructions = (
        "You have access to a search engine to help answer questions.\n\n"
        "Additional instructions:\n"
        "- If your initial reasoning in <think> shows you lack some knowledge, explain what you need to find next"
        " inside a new <think> block.\n"
        "- Then issue a search query using:\n"
        "  <search> your query here </search>\n"
        "- The search engine will provide results inside:\n"
        "  <information> ... </information>\n"
        "- You may repeat the <think> and <search> steps as many times as needed.\n"
        "- When you are ready, give your final answer in:\n"
        "  <answer> your answer here </answer>"
    )

    def __init__(self, url: str, *, top_k: int = 3, timeout_s: float = 5.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"The search_url '{url}' is no address of a web server.", next="It begins with http://."
            )
        self.url, self.top_k, self.timeout_s = url, top_k, timeout_s

    def use(self, answer: str) -> ToolUse | None:
        """Search for what an answer asks for; None where it asks for nothing. A search that fails is a use too."""
        found = _QUERY.search(answer)
        if found is None:
            return None
        documents, error = self._answered(found[1].strip())
        observation = f"\n\n<information>{documents}</information>\n\n"
        return ToolUse(action=answer[: found.end()], observation=observation, error=error)

    def _answered(self, query: str) -> tuple[str, str | None]:
        """What the policy is shown, and why the search failed if it did."""
        try:
            return _passages(self._search(query)), None
        except HalteresError as failure:
            error = failure.what  # what a server says beside its status is not for the policy
        except (msgspec.MsgspecError, UnicodeError) as failure:
            error = str(failure)
        return f"[SearchTool Error: {error}]", error

    def _search(self, query: str) -> _Reply:
        asked: dict[str, Any] = {"query": query, "topk": self.top_k, "return_scores": True}
        body = msgspec.msgpack.encode(asked)
        answer = post_bytes(self.url, body, self.timeout_s, content_type="application/msgpack")
        return msgspec.msgpack.decode(answer, type=_Reply)


def _passages(reply: _Reply) -> str:
    documents = ""
    for number, passage in enumerate(reply.result, start=1):
        title, _, text = passage.document.contents.partition("\n")
        documents += f"Doc {number}(Title: {title}) {text}\n"
    return documents
