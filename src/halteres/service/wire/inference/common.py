"""What requests for inference have in common, whoever's shape they have.

Owns: the sampling fields and their translation to the engine's parameters, reading a body with a struct per route.
Never: samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from halteres.engine.protocol import SamplingParams
from halteres.errors import InvalidData

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

TopCount = Annotated[int, msgspec.Meta(ge=0, le=256)]
"""Of the most likely tokens at a position; 256 is the engine's limit."""


class Sampled(msgspec.Struct, kw_only=True):
    """What every such request says about sampling. Defaults are OpenAI's and vLLM's."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: TokenId = -1
    stop: str | TokenId | list[str | TokenId] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return tuple(stop for stop in self._stops if isinstance(stop, str) and stop)

    @property
    def named_stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end the answer beside the model's own: those of both fields."""
        return (*(stop for stop in self._stops if isinstance(stop, int)), *(self.stop_token_ids or ()))

    @property
    def _stops(self) -> Sequence[str | int]:
        stop = self.stop
        return stop if isinstance(stop, list) else [] if stop is None else [stop]

    @property
    def keeps_stop(self) -> bool:
        """Whether the text holds what stopped it."""
        return self.include_stop_str_in_output

    def params(self, max_tokens: int | None, end_tokens: Sequence[int], seed: int) -> SamplingParams:
        """For the engine; the model's end tokens stop it beside those that were named."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            stop_tokens=(*self.named_stop_tokens, *(() if self.ignore_eos else end_tokens)),
            stop_strings=self.stop_strings,
        )


def several(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """The prompts of a field that holds a text, a list of texts, a list of token ids or a list of such lists.

    Raises:
        InvalidData: token ids stand beside texts or lists.
    """
    if isinstance(given, str):
        return [given]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [tokens]
    if tokens:
        raise InvalidData(f"`{field}` mixes token ids with prompts.", next="Send one list of ids, or a list of lists.")
    return [one for one in given if not isinstance(one, int)]


def read(body: bytes, kind: type[T]) -> T:
    """Parse a body; a null at its top, or among its sampling parameters, means that the field is absent.

    Raises:
        InvalidData: no JSON, or a field is missing or of the wrong type; the message names it.
    """
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            return msgspec.convert(_without_nulls(msgspec.json.decode(body)), type=kind)
    except msgspec.ValidationError as error:
        raise InvalidData("The body does not fit.", f"{error}.") from error
    except msgspec.DecodeError as error:
        raise InvalidData("The body is not JSON.", f"{error}.") from error
    except RecursionError as error:
        raise InvalidData("The body is nested too deeply to be read.") from error


def _without_nulls(body: Any) -> Any:
    """Deeper nulls stay: within a message or a tool's schema they are the client's own words."""
    if not isinstance(body, dict):
        return body
    params = body.get("sampling_params")
    kept = {name: value for name, value in body.items() if value is not None}
    return {**kept, "sampling_params": _without_nulls(params)} if isinstance(params, dict) else kept
