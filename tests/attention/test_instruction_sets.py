"""Codes are the same whatever vectors a processor has, one by one or side by side; plain torch is the measure."""

import ctypes
import math
import platform

import pytest
import torch
from headers import library_of, needs_compiler

from dofla.attention import Coder
from dofla.attention.coding.coder import Moments
from dofla.attention.coding.heavy_hitters import WEIGHTS
from dofla.attention.coding.levels import TABLES
from dofla.attention.constants import OCTAVE
from dofla.attention.eight_bits import pack

SOURCE = """
#include "together.h"
using namespace dofla::coding;
using Size = std::int64_t;
extern "C" void encode(Size dim, Size count, bool together, const std::int16_t* rotation, const float* fineness,
                       const float* middle, const std::uint8_t* bits, const float* tables, std::uint8_t* integers,
                       std::uint8_t* exponents, std::uint8_t* codes, std::uint8_t* scales) {
  const Coder coder{dim, dim >= 32 ? 16 : 8, rotation, fineness, nullptr, nullptr, middle, bits, Tables{tables}};
  const Size bytes = coder.bytes(), blocks = coder.blocks();
  Together scratch(dim);
  std::vector<std::int16_t> wide(dim);
  with_block(coder.block, [&](auto block) {
    const Size step = together ? dofla::kLanes : 1;
    for (Size i = 0; i < count; i += step) {
      const Size some = std::min(step, count - i);
      std::uint8_t *from = integers + i * dim, *power = exponents + i;
      std::uint8_t *to = codes + i * bytes, *scale = scales + i * blocks;
      if (together) {
        encode<block>(coder, {from, dim}, {power, 1}, some, scratch, {to, bytes}, {scale, blocks});
      } else {
        encode<block>(coder, from, power, wide.data(), to, scale);
      }
    }
  });
}
extern "C" void powers(Size count, const float* x, float* to) {
  for (Size i = 0; i < count; ++i) to[i] = __builtin_rintf(4096.0f * dofla::exp_of_negative(x[i]));
}
"""

LESS = {"x86_64": ("-mno-avx512vnni", "-mno-avx512f", "-mno-avx")}
"""Flags by which a compiler leaves out some instructions, or the longest vectors."""

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.fixture(scope="module", params=LESS.get(platform.machine(), ()) or ("-O2",))
def library(request, tmp_path_factory):
    return library_of(SOURCE, tmp_path_factory.mktemp("codes"), request.param)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("dim", "bits"), [(64, 3.0), (32, 1.5), (24, 4.0)])
def test_codes_are_those_of_plain_torch(library, dim, bits, together):
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(1, 1, 37, dim, generator=generator) * torch.logspace(1, -2, dim)
    x[:, :, 5] = 0
    coder = Coder(1, dim, bits)
    coder.calibrate(Moments.of(x[0]))
    integers, exponents = (part.contiguous() for part in pack(x))
    constants = [coder.rotation, coder.fineness, coder.middle, coder.bits, TABLES, integers, exponents.to(torch.int8)]
    expected = coder.encode(x)
    found = [torch.zeros_like(part).contiguous() for part in expected]
    pointers = [ctypes.c_void_p(part.data_ptr()) for part in (*constants, *found)]
    library.encode(ctypes.c_int64(dim), ctypes.c_int64(x.shape[2]), ctypes.c_bool(together), *pointers)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_weights_of_scores_are_those_of_the_table(library):
    found = torch.empty(len(WEIGHTS) - 1)
    exponents = torch.arange(len(found)) * (-math.log(2) / OCTAVE)
    library.powers(ctypes.c_int64(len(found)), *(ctypes.c_void_p(x.data_ptr()) for x in (exponents, found)))
    assert torch.equal(found, WEIGHTS[:-1])
