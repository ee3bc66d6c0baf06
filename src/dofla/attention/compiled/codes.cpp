// The operators that encode tokens alone, and decode them: those that an exact prefill retains, and that are there before it.
#include "rows.h"
#include "together.h"

#include <tuple>

namespace dofla::cache {
namespace {

constexpr std::int64_t kWorthAThread = 64;  // vectors that are decoded, at least

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

// Rotated vectors [B, Hkv, n, d], float32, of codes [B, Hkv, n, bytes] and scales [B, Hkv, n, blocks].
Tensor decode(const Tensor& codes, const Tensor& scales, const Tensor& constants, const Tensor& tables, std::int64_t dim) {
  const std::int64_t heads = codes.size(1), count = codes.size(2);
  const Coders coders(constants, heads, dim, tables);
  const std::int64_t bytes = coders.head(0).bytes(), blocks = dim / coders.block;
  STD_TORCH_CHECK(codes.is_contiguous() && codes.scalar_type() == ScalarType::Byte && codes.size(3) == bytes, "codes must be uint8");
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Byte && scales.numel() * bytes == codes.numel() * blocks,
                  "there is a scale for each block");
  const Tensor out = empty<4>({codes.size(0), heads, count, dim}, tables);
  const auto* code = static_cast<const std::uint8_t*>(codes.data_ptr());
  const auto* scale = static_cast<const std::uint8_t*>(scales.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  torch::stable::parallel_for(0, codes.size(0) * heads * count, kWorthAThread, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::uint8_t> row(bytes + 16);  // more than a vector's own codes may be read
    for (; begin < end; ++begin) {
      std::copy_n(code + begin * bytes, bytes, row.data());
      const coding::Coder coder = coders.head(begin / count % heads);
      coding::with_block(coder.block, [&](auto block) {
        coding::decode<block>(coder, row.data(), scale + begin * blocks, to + begin * dim);
      });
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def("encode(Tensor integers, Tensor exponents, Tensor constants, Tensor tables) -> (Tensor, Tensor)");
  library.def("decode(Tensor codes, Tensor scales, Tensor constants, Tensor tables, int dim) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dofla, CPU, library) {
  library.impl("encode", TORCH_BOX(&encode));
  library.impl("decode", TORCH_BOX(&decode));
}

}  // namespace dofla::cache
