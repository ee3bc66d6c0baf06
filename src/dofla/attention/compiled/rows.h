// What stands in rows of bytes (rows.py): a coder's constants, and the tokens that a memory holds.
#pragma once

#include "codes.h"

#include <ATen/core/Tensor.h>

#include <array>

namespace dofla::tiers {

// Where the parts of a row of bytes begin, one after the other, as in rows.py.
class Cut {
 public:
  std::int64_t next(std::int64_t bytes) {
    const std::int64_t start = end_;
    end_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return start;
  }

  std::int64_t end() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

// One side of a group's coders, from the row of constants that coder.py keeps.
class Coders {
 public:
  std::int64_t heads, dim, block, tiers;
  coding::Tables tables;

  Coders(const at::Tensor& row, std::int64_t heads, std::int64_t dim, std::int64_t tiers, const at::Tensor& tables)
      : heads(heads), dim(dim), block(dim % 16 == 0 && dim >= 32 ? 16 : 8), tiers(tiers),
        tables{tables.const_data_ptr<float>()}, row_(static_cast<const char*>(row.const_data_ptr())) {
    TORCH_CHECK(row.is_contiguous() && row.scalar_type() == at::kByte, "constants must be a row of bytes");
    const std::int64_t numbers = heads * dim, blocks = dim / block;
    Cut cut;
    turn_ = cut.next(numbers * dim * sizeof(std::int16_t));
    fineness_ = cut.next(numbers * sizeof(float));
    back_ = cut.next(numbers * dim * sizeof(float));
    mean_ = cut.next(numbers * sizeof(float));
    middle_ = cut.next(numbers * sizeof(float));
    bits_ = cut.next(tiers * blocks);
    TORCH_CHECK(dim % block == 0 && row.numel() == cut.end(), "constants are of other sizes");
    for (std::int64_t n = 0; n < tiers * blocks; ++n) {
      const int found = part<std::uint8_t>(bits_)[n];
      TORCH_CHECK(found >= 1 && found <= kMostBits, "blocks have 1 to 5 bits");
    }
  }

  coding::Coder head(std::int64_t h) const {
    return {dim, block, part<std::int16_t>(turn_) + h * dim * dim, part<float>(fineness_) + h * dim,
            part<float>(back_) + h * dim * dim, part<float>(mean_) + h * dim, part<float>(middle_) + h * dim,
            part<std::uint8_t>(bits_), tables};
  }

 private:
  template <typename T>
  const T* part(std::int64_t start) const {
    return reinterpret_cast<const T*>(row_ + start);
  }

  const char* row_;
  std::int64_t turn_, fineness_, back_, mean_, middle_, bits_;
};

// Bytes of a token's key and of what scales it, of its value and of what scales that.
using Widths = std::array<std::int64_t, 4>;

// Tokens of all heads of a group in rows of bytes, one for each sequence: [Hkv, n, .] for each width, and log-weights [n], or
// scores [Hkv, n] where heads hold other tokens. A window and sinks are PackedTokens, tiers CodedTokens or ScoredTokens.
struct Tokens {
  std::int64_t heads = 0, count = 0;
  bool apart = false;  // heads hold other tokens
  Widths widths{};
  std::array<std::int64_t, 5> starts{};  // of codes and scales, of log-weights or scores in a row
  char* rows = nullptr;
  std::int64_t stride = 0;              // bytes from a row to the next
  const std::int64_t* pages = nullptr;  // row of each sequence; or the n-th has row n

  Tokens() = default;
  Tokens(std::int64_t heads, std::int64_t count, bool apart, const Widths& widths, Cut& cut)
      : heads(heads), count(count), apart(apart), widths(widths) {
    for (std::int64_t part = 0; part < 4; ++part) starts[part] = cut.next(heads * count * widths[part]);
    starts[4] = cut.next(apart ? heads * count * sizeof(std::int16_t) : count * sizeof(float));
  }

  Tokens in(const at::Tensor& memory, const std::int64_t* of_sequences = nullptr) const {
    Tokens other = *this;
    other.rows = static_cast<char*>(memory.data_ptr());
    other.stride = memory.stride(0);
    other.pages = of_sequences;
    return other;
  }

  template <typename T>
  T* row(std::int64_t part, std::int64_t n, std::int64_t h, std::int64_t token) const {
    return reinterpret_cast<T*>(of(n) + starts[part] + (h * count + token) * widths[part]);
  }

  float* log_weights(std::int64_t n) const { return reinterpret_cast<float*>(of(n) + starts[4]); }

  std::int16_t* scores(std::int64_t n, std::int64_t h) const {
    return reinterpret_cast<std::int16_t*>(of(n) + starts[4]) + h * count;
  }

 private:
  char* of(std::int64_t n) const { return rows + (pages ? pages[n] : n) * stride; }
};

inline void copy(const Tokens& from, const Tokens& to, std::int64_t n, std::int64_t h, std::int64_t first,
                 std::int64_t place, std::int64_t count) {
  for (std::int64_t part = 0; part < 4; ++part) {
    std::memcpy(to.row<char>(part, n, h, place), from.row<char>(part, n, h, first), count * from.widths[part]);
  }
}

}  // namespace dofla::tiers
