"""What the unmodified `anthropic` package gets from our service; prints one JSON object. Runs in
its own environment.

python anthropic_program.py SERVICE_URL TINKER_PATH
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "system": "Be brief.",
    "max_tokens": 12,
    "extra_body": {"seed": 1},
}


def refusal(client: anthropic.Anthropic, **extra: Any) -> str:
    try:
        client.messages.create(model="halteres/tiny", **(BODY | extra))
    except anthropic.APIStatusError as error:
        return f"{type(error).__name__} {error.body['error']['type']}"
    return "none"


def main(url: str, path: str) -> None:
    told: dict[str, Any] = {}
    for prefix in ("", "/anthropic/api"):
        with anthropic.Anthropic(
            base_url=url + prefix, api_key="tml-test", max_retries=0
        ) as client:
            whole = client.messages.create(model=path, **BODY)
            with client.messages.stream(model=path, **BODY) as stream:
                streamed = "".join(stream.text_stream)
                final = stream.get_final_message()
            counted = client.messages.count_tokens(
                model=path, messages=BODY["messages"], system=BODY["system"]
            )
            image = {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": ""},
            }
            told[prefix] = {
                "text": whole.content[0].text,
                "streamed": streamed,
                "final": final.content[0].text,
                "reasons": [whole.stop_reason, final.stop_reason],
                "usage": [
                    [one.usage.input_tokens, one.usage.output_tokens] for one in (whole, final)
                ],
                "counted": counted.input_tokens,
                "image": refusal(client, messages=[{"role": "user", "content": [image]}]),
                "unknown": refusal(client, tool_choice={"type": "any"}),
            }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
