"""What the unmodified `openai` package gets from v1/responses, its types checked strictly; prints one
JSON object. Runs in its own environment.

python openai_responses_program.py SERVICE_URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from openai.types.responses import Response

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}


def shape(response: Response) -> list[Any]:
    """The items of a response, each with what it holds."""
    found = list[Any]()
    for item in response.output:
        if item.type == "function_call":
            found.append([item.type, item.name, json.loads(item.arguments)])
        else:
            found.append([item.type, [part.text for part in item.content]])
    return found


def checked(value: Any) -> Any:
    """The same: the package makes its values without looking at them; here they have to fit."""
    type(value).model_validate(value.to_dict(), strict=False)
    return value


def main(url: str, model: str) -> None:
    told: dict[str, Any] = {}
    for prefix in ("/v1", "/oai/api/v1"):
        with openai.OpenAI(base_url=url + prefix, api_key="tml-test", max_retries=0) as client:
            body: dict[str, Any] = {"model": model, "input": "What is 17 + 25?", "tools": [TOOL]}
            logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
            whole = checked(client.responses.create(**body, **logprobs))
            raw = [checked(event) for event in client.responses.create(**body, stream=True)]
            with client.responses.stream(**body) as stream:
                kinds = [event.type for event in stream]
                final = stream.get_final_response()
            call = final.output[-1]
            given = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            history = [{"role": "user", "content": body["input"]}, *final.output, given]
            answered = checked(client.responses.create(**{**body, "input": history}))
            cut = checked(client.responses.create(**body, max_output_tokens=1))
            told[prefix] = {
                "shapes": [shape(one) for one in (whole, raw[-1].response, final)],
                "logprobs": "".join(
                    entry.token for entry in whole.output[1].content[0].logprobs
                ).strip(),
                "kinds": [event.type for event in raw],
                "same_kinds": kinds == [event.type for event in raw],
                "numbers": [event.sequence_number for event in raw] == list(range(len(raw))),
                "usage": [one.usage.to_dict() == whole.usage.to_dict() for one in (final,)],
                "answered": answered.output_text,
                "cut": [cut.status, cut.incomplete_details.reason],
            }
            try:
                client.responses.create(**body, previous_response_id=whole.id)
            except openai.BadRequestError as error:
                told[prefix]["previous"] = [error.code, error.param]
            try:
                client.responses.create(model=model, input="1 2 " * 1500)
            except openai.BadRequestError as error:
                told[prefix]["length"] = error.code
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
