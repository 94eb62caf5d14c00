"""Arrays on the wire: dense and sparse, of every dtype, whole and broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract.requirements import proves
from tinker import types
from tinker.proto import request_conv

from halteres.engine.protocol import Array
from halteres.errors import HalteresError, InvalidData
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire import training
from halteres.service.wire.bodies import Tensor
from halteres.service.wire.training import MAX_CELLS, Budget, tensor_of

CSR = {"shape": [3, 4], "sparse_crow_indices": [0, 2, 2, 3], "sparse_col_indices": [3, 0, 1]}
FULL = [[9, 0, 0, 7], [0, 0, 0, 0], [0, 8, 0, 0]]


def request_of(
    tensor: pb.Tensor, loss: str = "cross_entropy", name: str = "weights"
) -> training.PassRequest:
    """A pass with this one input."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    datum.loss_fn_inputs[name].CopyFrom(tensor)
    return training.read_pass(message.SerializeToString())


def read(tensor: pb.Tensor, loss: str = "cross_entropy", name: str = "weights") -> Array:
    asked = request_of(tensor, loss, name)
    assert asked.flaw is None, asked.flaw
    return asked.data[0].inputs[name]


def flaw(tensor: pb.Tensor) -> HalteresError:
    found = request_of(tensor).flaw
    assert found is not None
    return found


def values(array: Array) -> Any:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape).tolist()


def ours(tensor: types.TensorData) -> pb.Tensor:
    """As the SDK writes it."""
    return pb.Tensor.FromString(request_conv._tensor_data_to_proto(tensor).SerializeToString())


@proves("pass:csr")
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_sparse_arrays_are_written_out_with_zeros(dtype: Any) -> None:
    array = read(ours(types.TensorData(data=[7, 9, 8], dtype=dtype, **CSR)))
    assert (array.dtype, array.shape, values(array)) == (dtype, (3, 4), FULL)
    json = tensor_of("x", Tensor(data=[7, 9, 8], dtype=dtype, **CSR), Budget(), pad=-1)
    assert values(json) == [[cell or -1 for cell in row] for row in FULL]


@pytest.mark.parametrize("shape", [[6], [2, 3], [6, 1], None])
def test_dense_arrays_keep_their_shape(shape: list[int] | None) -> None:
    sent = types.TensorData(data=[1, 2, 3, 4, 5, 6], dtype="int64", shape=shape)
    array = read(ours(sent))
    assert (array.shape, np.frombuffer(array.data, np.int64).tolist()) == (
        tuple(shape or [6]),
        [1, 2, 3, 4, 5, 6],
    )


def test_narrow_dtypes_are_widened() -> None:
    narrow = np.array([1, -2], np.int32)
    assert values(read(pb.Tensor(dense=narrow.tobytes(), dtype=pb.DTYPE_INT32))) == [1, -2]
    half = (np.array([1.5, -0.25], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    array = read(pb.Tensor(dense=half.tobytes(), dtype=pb.DTYPE_BFLOAT16))
    assert (array.dtype, values(array)) == ("float32", [1.5, -0.25])


def test_one_value_without_a_shape_is_one_token() -> None:
    one = pb.Tensor(dense=np.float32(0.5).tobytes(), dtype=pb.DTYPE_FLOAT32)
    assert read(one, "ppo", "advantages").shape == (1,)


def sparse(crow: list[int], col: list[int], shape: list[int], count: int = 3) -> pb.Tensor:
    def packed(data: list[int]) -> bytes:
        return np.array(data, np.int64).tobytes()

    csr = pb.SparseCsr(
        values=packed([1] * count), crow_indices=packed(crow), col_indices=packed(col)
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=shape)


BIG = 2**63 - 1

BROKEN: list[tuple[pb.Tensor, str]] = [
    (sparse([0, 2, 2, 3], [3, 0, 1], [3]), "shape"),
    (sparse([0, 2, 2, 3], [3, 0, 1], []), "shape"),
    (sparse([0, 2, 2, 3], [3, 0, 1], [-3, -4]), "shape"),
    (sparse([0, 2, 3], [3, 0, 1], [3, 4]), "row pointers"),
    (sparse([], [3, 0, 1], [3, 4]), "row pointers"),
    (sparse([1, 2, 2, 3], [3, 0, 1], [3, 4]), "row pointers"),
    (sparse([0, 3, 2, 3], [3, 0, 1], [3, 4]), "row pointers"),
    (sparse([0, 2, 2, 4], [3, 0, 1], [3, 4]), "row pointers"),
    (sparse([0, BIG, -BIG - 1, -1, 3], [3, 0, 1], [4, 4]), "row pointers"),
    (sparse([0, 2, 2, 3], [3, 0], [3, 4]), "columns"),
    (sparse([0, 2, 2, 3], [4, 0, 1], [3, 4]), "columns"),
    (sparse([0, 2, 2, 3], [-1, 0, 1], [3, 4]), "columns"),
    (sparse([0, 2, 2, 3], [0, 0, 1], [3, 4]), "twice"),
    (sparse([0, 2, 2, 3], [3, 0, 1], [3, BIG]), "written out"),
    (sparse([0, 2, 2, 3], [3, 0, 1], [3, MAX_CELLS // 2]), "written out"),
    (pb.Tensor(dense=bytes(7), dtype=pb.DTYPE_INT64), "whole number"),
    (pb.Tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[2]), "not the shape"),
    (pb.Tensor(dense=bytes(8), dtype=pb.DTYPE_FLOAT32, shape=[-1, -2]), "not the shape"),
    (pb.Tensor(dense=bytes(8), dtype=pb.DTYPE_FLOAT32, shape=[1, 1, 2]), "not the shape"),
    (pb.Tensor(dense=bytes(8), shape=[1]), "dtype"),
]


@proves("pass:bad-datum")
@pytest.mark.parametrize(("tensor", "sentence"), BROKEN)
def test_a_broken_array_is_a_flaw_that_names_the_datum_and_the_input(
    tensor: pb.Tensor, sentence: str
) -> None:
    found = flaw(tensor).sentence
    assert "Datum 0: 'weights'" in found
    assert sentence in found


def test_the_sparse_arrays_of_a_request_are_bounded_together() -> None:
    budget, half = Budget(), MAX_CELLS // 2
    budget.take("x", half)
    budget.take("x", half)
    with pytest.raises(InvalidData, match=str(MAX_CELLS)):
        budget.take("x", 1)


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (Tensor(data=[2**63], dtype="int64"), "no int64"),
        (Tensor(data=[2**70, 1], dtype="int64"), "no int64"),
        (Tensor(data=[1.5], dtype="int64"), "no int64"),
        (Tensor(data=[float("nan")], dtype="int64"), "no int64"),
        (Tensor(data=[10**400], dtype="float32"), "cannot hold"),
        (Tensor(data=[1], dtype="float64"), "dtype"),
        (Tensor(data=[1], dtype="int64", sparse_crow_indices=[0, 1]), "without its"),
        (
            Tensor(
                data=[1],
                dtype="int64",
                sparse_crow_indices=[0, 1],
                sparse_col_indices=[2**70],
                shape=[1, 1],
            ),
            "int64",
        ),
        (Tensor(data=[1], dtype="int64", shape=[2**70, 2**70]), "not the shape"),
    ],
)
def test_numbers_that_do_not_fit_are_flaws(tensor: Tensor, sentence: str) -> None:
    with pytest.raises(InvalidData, match=sentence):
        tensor_of("x", tensor, Budget())


def test_whole_floats_are_integers_and_infinities_are_left_to_the_loss() -> None:
    assert values(tensor_of("x", Tensor(data=[1.0, 2], dtype="int64"), Budget())) == [1, 2]
    assert values(tensor_of("x", Tensor(data=[1e300], dtype="float32"), Budget())) == [float("inf")]
    assert values(tensor_of("x", Tensor(data=[], dtype="int64"), Budget())) == []
