"""The small matrix product of processors on which torch has none: float64's, and nothing else is written."""

import ctypes

import pytest
import torch
from arithmetic import sum_error
from headers import library_of, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = """
#include "product.h"
using Size = std::int64_t;
extern "C" void matmul(Size rows, Size columns, Size inner, const float* a, Size a_stride, const float* b,
                       Size b_stride, float* c, Size c_stride, bool accumulate) {
  dofla::product::matmul(rows, columns, inner, a, a_stride, b, b_stride, c, c_stride, accumulate);
}
"""

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def matmul(tmp_path_factory):
    function = library_of(SOURCE, tmp_path_factory.mktemp("product")).matmul
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [size, size, size, pointer, size, pointer, size, pointer, size, ctypes.c_bool]
    function.restype = None
    return function


def matrix(rows, columns, more, generator):
    """Of rows that stand apart."""
    return torch.randn(rows, columns + more, generator=generator)[:, :columns]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 4, 6, 16, 64]),
    columns=st.integers(1, 150),
    inner=st.sampled_from([1, 2, 64, 256, 257, 600]),
    more=st.tuples(*[st.sampled_from([0, 1, 16])] * 3),
    accumulate=st.booleans(),
)
def test_products_are_those_of_float64(matmul, rows, columns, inner, more, accumulate):
    generator = torch.Generator().manual_seed(rows + columns + inner)
    a, b = matrix(rows, inner, more[0], generator), matrix(inner, columns, more[1], generator)
    whole = torch.randn(rows, columns + more[2], generator=generator)
    before, c = whole.clone(), whole[:, :columns]
    expected = a.double() @ b.double() + (c.double() if accumulate else 0)
    size = float((a.double().abs() @ b.double().abs()).max() + c.abs().max())
    operands = [argument for t in (a, b, c) for argument in (t.data_ptr(), t.stride(0))]
    matmul(rows, columns, inner, *operands, accumulate)
    assert (c - expected).abs().max() <= sum_error(inner + 1, size)
    assert torch.equal(whole[:, columns:], before[:, columns:])
