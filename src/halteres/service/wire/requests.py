"""Requests of a training sequence, as their clients wrote them and as they are executed.

Owns: which kind of request is read by which codec, by content type; a request's value, the same whether it has just
come or is read from the journal again.
Never: executes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from halteres.errors import InvalidData
from halteres.service.wire import bodies, passes
from halteres.service.wire.codec import PROTOBUF
from halteres.service.wire.json_passes import read_json_pass

Asked = bodies.CreateModel | bodies.LoadWeights | bodies.OptimStep | bodies.SaveWeights | passes.PassRequest

PASSES = ("forward_backward", "forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a training run's sequence."""

    id: str  # of its promise
    kind: str
    seq: int
    asked: Asked
    drawn: Mapping[str, int | list[int]] = field(default_factory=dict[str, "int | list[int]"])


def _reader(kind: type[Asked]) -> Callable[[bytes], Asked]:
    return lambda body: bodies.read(body, kind)


_JSON: Mapping[str, Callable[[bytes], Asked]] = {
    "create_model": _reader(bodies.CreateModel),
    "load_weights": _reader(bodies.LoadWeights),
    "optim_step": _reader(bodies.OptimStep),
    "save_weights": _reader(bodies.SaveWeights),
    "save_weights_for_sampler": _reader(bodies.SaveWeights),
    "save_weights_external": _reader(bodies.SaveWeights),
}


def read_request(kind: str, content_type: str, body: bytes) -> Asked:
    """Parse the body of a request of this kind.

    Raises:
        InvalidData: it does not fit, or has no number in its model's sequence.
    """
    asked = _read(kind, content_type, body)
    if isinstance(asked, passes.PassRequest | bodies.OptimStep | bodies.SaveWeights | bodies.LoadWeights):
        _check_number(asked.seq_id)
    return asked


def _read(kind: str, content_type: str, body: bytes) -> Asked:
    if kind not in PASSES:
        return _JSON[kind](body)
    if content_type == PROTOBUF:
        return passes.read_pass(body)
    return read_json_pass(body, forward_only=kind == "forward")


def _check_number(seq: int | None) -> None:
    """Number 0 is the model's creation: a request that took it would be given that one's promise."""
    if seq is not None and seq < 1:
        raise InvalidData(f"seq_id is {seq}.", "The requests of a model are numbered from 1.", "Send its number.")


def address_of(kind: str, content_type: str, body: bytes) -> tuple[str, int] | None:
    """Model and number of a request whose other fields are broken, where they can still be read."""
    binary = kind in PASSES and (content_type == PROTOBUF or not body.lstrip().startswith(b"{"))
    found = passes.address_of(body) if binary else bodies.address_of(body)
    return found if found is not None and found[1] >= 1 else None
