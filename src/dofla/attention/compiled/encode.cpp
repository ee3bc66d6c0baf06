// The operator that encodes tokens alone, for those that a prefill retains.
#include "rows.h"
#include "together.h"

#include <tuple>

namespace dofla::cache {
namespace {

// Codes [B, Hkv, n, bytes] and scales [B, Hkv, n, blocks], uint8, of vectors [B, Hkv, n, d] and exponents [B, Hkv, n], int8.
std::tuple<Tensor, Tensor> encode(const Tensor& integers, const Tensor& exponents, const Tensor& constants,
                                          const Tensor& tables) {
  STD_TORCH_CHECK(integers.is_contiguous() && integers.scalar_type() == ScalarType::Char && integers.dim() == 4, "integers must be int8");
  STD_TORCH_CHECK(exponents.is_contiguous() && exponents.scalar_type() == ScalarType::Char && exponents.numel() * integers.size(3) == integers.numel(),
              "there is an exponent for each vector");
  const std::int64_t heads = integers.size(1), count = integers.size(2), dim = integers.size(3);
  const Coders coders(constants, heads, dim, tables);
  const std::int64_t bytes = coders.head(0).bytes(), blocks = dim / coders.block;
  const Tensor codes = empty<4>({integers.size(0), heads, count, bytes}, constants), scales = empty<4>({integers.size(0), heads, count, blocks}, constants);
  const std::int64_t parts = (count + kLanes - 1) / kLanes;
  const auto rows = [](const Tensor& t, std::int64_t first, std::int64_t stride) {
    return coding::BytesOf{static_cast<std::uint8_t*>(t.data_ptr()) + first * stride, stride};
  };
  torch::stable::parallel_for(0, integers.size(0) * heads * parts, 1, [&](std::int64_t begin, std::int64_t end) {
    coding::Together scratch(dim);
    for (std::int64_t place = begin; place < end; ++place) {
      const std::int64_t unit = place / parts, from = place % parts * kLanes, first = unit * count + from;
      const coding::Coder coder = coders.head(unit % heads);
      coding::with_block(coder.block, [&](auto block) {
        coding::encode<block>(coder, rows(integers, first, dim), rows(exponents, first, 1), std::min(count - from, std::int64_t{kLanes}),
                              scratch, rows(codes, first, bytes), rows(scales, first, blocks));
      });
    }
  });
  return {codes, scales};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def("encode(Tensor integers, Tensor exponents, Tensor constants, Tensor tables) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dofla, CPU, library) { library.impl("encode", TORCH_BOX(&encode)); }

}  // namespace dofla::cache
