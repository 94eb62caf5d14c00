"""What the unmodified `litellm` package makes of our service's answers; prints one JSON object. Runs
in its own environment.

python litellm_program.py SERVICE_URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

SHORT: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
LONG: list[Any] = [{"role": "user", "content": "What is 17 + 25? " * 300}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]


def outcome(**asked: Any) -> Any:
    try:
        answer = litellm.completion(**asked, api_key="tml-test", num_retries=0, max_tokens=8)
    except litellm.exceptions.APIError as error:
        return type(error).__name__
    except litellm.exceptions.BadRequestError as error:
        return type(error).__name__
    return answer.choices[0].finish_reason


def main(url: str) -> None:
    providers = {
        "openai": f"{url}/v1",
        "hosted_vllm": f"{url}/v1",
        "anthropic": url,
    }
    told = {
        provider: {
            "short": outcome(model=f"{provider}/halteres/tiny", api_base=base, messages=SHORT),
            "tools": outcome(
                model=f"{provider}/halteres/tiny", api_base=base, messages=SHORT, tools=TOOLS
            ),
            "long": outcome(model=f"{provider}/halteres--tiny", api_base=base, messages=LONG),
        }
        for provider, base in providers.items()
    }
    sys.stdout.write(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main(sys.argv[1])
