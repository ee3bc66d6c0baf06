"""Small matrix products: of floats where torch has none, and of what prompts multiply panel by panel; float64's, and
nothing else is written."""

import ctypes
from pathlib import Path

import pytest
import torch
from arithmetic import sum_error
from headers import library_of, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention.compiled.prebuilt import flags_of_processor

SOURCE = """
#include "product.h"
using Size = std::int64_t;
extern "C" void matmul(Size rows, Size columns, Size inner, const float* a, Size a_stride, const float* b,
                       Size b_stride, float* c, Size c_stride, bool accumulate) {
  dofla::product::matmul(rows, columns, inner, a, a_stride, b, b_stride, c, c_stride, accumulate);
}
"""

OPERANDS = """
#include "operands.h"
using Size = std::int64_t;
template <typename Real>
void product(Size rows, Size columns, Size inner, const float* a, const float* b, bool transposed, float* c) {
  dofla::Operands<Real> operands;
  dofla::Unwritten<Real> scratch(rows * inner);
  const Real* left = operands.left(a, rows, inner, inner, scratch);
  if (transposed) {
    dofla::times_across(rows, columns, inner, left, operands.across(b, columns, inner), c, columns);
  } else {
    dofla::times_along(rows, columns, inner, left, inner, operands.along(b, inner, columns), c, false);
  }
  operands.release();
}
extern "C" bool floats(Size rows, Size columns, Size inner, const float* a, const float* b, bool transposed, float* c) {
  product<float>(rows, columns, inner, a, b, transposed, c);
  return true;
}
#ifdef __AVX512BF16__
extern "C" bool halves(Size rows, Size columns, Size inner, const float* a, const float* b, bool transposed, float* c) {
  if (!dofla::torch_multiplies<dofla::Half>()) return false;
  product<dofla::Half>(rows, columns, inner, a, b, transposed, c);
  return true;
}
#endif
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


@settings(max_examples=60)
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


@pytest.fixture(scope="module")
def operands(tmp_path_factory):
    torch_folder = Path(torch.__file__).parent
    flags = "-isystem", torch_folder / "include", "-L", torch_folder / "lib", "-Wl,--no-as-needed", "-ltorch_cpu"
    return library_of(OPERANDS, tmp_path_factory.mktemp("operands"), *map(str, flags))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(16, 32, 64), (64, 112, 64), (192, 64, 336)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_panels_are_those_of_float64(operands, rows, columns, inner, transposed, dtype):
    if dtype == torch.bfloat16 and "avx512_bf16" not in flags_of_processor():
        pytest.skip("no products of bfloat16")
    function = operands.floats if dtype == torch.float32 else operands.halves
    generator = torch.Generator().manual_seed(rows)
    a, b = torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)
    given, c = b.T.contiguous() if transposed else b, torch.full((rows, columns), torch.nan)
    sizes = map(ctypes.c_int64, (rows, columns, inner))
    if not function(*sizes, pointer(a), pointer(given), ctypes.c_bool(transposed), pointer(c)):
        pytest.skip(f"torch has no products of {dtype}")
    a, b = a.to(dtype).double(), b.to(dtype).double()
    assert (c - a @ b).abs().max() <= sum_error(inner, float((a.abs() @ b.abs()).max()))


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())
