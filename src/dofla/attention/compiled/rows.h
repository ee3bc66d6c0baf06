// What stands in rows of bytes: a coder's constants (rows.py), and the tokens of a state (layout.py).
#pragma once

#include "codes.h"
#include "layout.h"
#include "tensor.h"

#include <array>

namespace dofla::cache {

// One side of a group's coders, from the row of constants that coder.py keeps.
class Coders {
 public:
  std::int64_t heads, dim, block;
  coding::Tables tables;

  Coders(const Tensor& row, std::int64_t heads, std::int64_t dim, const Tensor& tables)
      : heads(heads), dim(dim), block(dim % 16 == 0 && dim >= 32 ? 16 : 8),
        tables{tables.const_data_ptr<float>()}, row_(static_cast<const char*>(row.const_data_ptr())) {
    STD_TORCH_CHECK(row.is_contiguous() && row.scalar_type() == ScalarType::Byte, "constants must be a row of bytes");
    const std::int64_t numbers = heads * dim, blocks = dim / block;
    std::int64_t end = 0;
    const auto next = [&](std::int64_t bytes) {
      const std::int64_t start = end;
      end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return start;
    };
    rotation_ = next(numbers * dim * sizeof(std::int16_t));
    fineness_ = next(numbers * sizeof(float));
    back_ = next(numbers * dim * sizeof(float));
    mean_ = next(numbers * sizeof(float));
    middle_ = next(numbers * sizeof(float));
    bits_ = next(blocks);
    STD_TORCH_CHECK(dim % block == 0 && row.numel() == end, "constants are of other sizes");
    for (std::int64_t n = 0; n < blocks; ++n) {
      const int found = part<std::uint8_t>(bits_)[n];
      STD_TORCH_CHECK(found >= 1 && found <= kMostBits, "blocks have 1 to 5 bits");
    }
  }

  coding::Coder head(std::int64_t h) const {
    return {dim, block, part<std::int16_t>(rotation_) + h * dim * dim, part<float>(fineness_) + h * dim,
            part<float>(back_) + h * dim * dim, part<float>(mean_) + h * dim, part<float>(middle_) + h * dim,
            part<std::uint8_t>(bits_), tables};
  }

 private:
  template <typename T>
  const T* part(std::int64_t start) const {
    return reinterpret_cast<const T*>(row_ + start);
  }

  const char* row_;
  std::int64_t rotation_, fineness_, back_, mean_, middle_, bits_;
};

// Where the five parts of a kind of tokens begin in a row: key, what scales it, value, what scales that, log-weights or scores.
using Starts = std::array<std::int64_t, 5>;
// Bytes of a token in the first four.
using Widths = std::array<std::int64_t, 4>;

// Tokens of all heads of a group in rows of bytes, one for each sequence: a window and sinks, or a tier.
struct Tokens {
  std::int64_t heads = 0, count = 0;
  Starts starts{};
  Widths widths{};
  char* rows = nullptr;
  std::int64_t stride = 0;              // bytes from a row to the next
  const std::int64_t* pages = nullptr;  // row of each sequence; or the n-th has row n

  template <typename T>
  T* row(std::int64_t part, std::int64_t n, std::int64_t h, std::int64_t token) const {
    return reinterpret_cast<T*>(of(n) + starts[part] + (h * count + token) * widths[part]);
  }

  // Of a window or sinks, whose tokens all heads share.
  float* log_weights(std::int64_t n) const { return reinterpret_cast<float*>(of(n) + starts[4]); }

  // Of a tier, whose tokens each head has for itself.
  std::int16_t* scores(std::int64_t n, std::int64_t h) const {
    return reinterpret_cast<std::int16_t*>(of(n) + starts[4]) + h * count;
  }

 private:
  char* of(std::int64_t n) const { return rows + (pages ? pages[n] : n) * stride; }
};

inline void copy(const Tokens& from, const Tokens& to, std::int64_t n, std::int64_t h, std::int64_t first,
                 std::int64_t place, std::int64_t count) {
  for (std::int64_t part = 0; part < 4; ++part) {
    std::memmove(to.row<char>(part, n, h, place), from.row<char>(part, n, h, first), count * from.widths[part]);
  }
}

inline void clear(const Tokens& tokens, std::int64_t n, std::int64_t h, std::int64_t place) {
  for (std::int64_t part = 0; part < 4; ++part) std::memset(tokens.row<char>(part, n, h, place), 0, tokens.widths[part]);
}

}  // namespace dofla::cache
