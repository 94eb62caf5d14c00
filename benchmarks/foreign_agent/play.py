"""A small agent that knows nothing of training: it asks a model over OpenAI's API, and writes the
answer to a file. No package is needed, so that starting it costs little.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path


def ask(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 64}).encode()
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - the session's own address
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - as above
        return json.load(answer)["choices"][0]["message"]["content"]


def main() -> None:
    task = json.loads(Path(os.environ["HALTERES_TASK_FILE"]).read_text(encoding="utf-8"))
    Path("answer.txt").write_text(
        ask([{"role": "user", "content": task["question"]}]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
