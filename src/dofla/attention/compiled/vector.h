// Common to all kernels: vectors as long as the processor's, and an exponential the compiler can vectorize.
#pragma once

#include "constants.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace dofla {

constexpr std::int64_t kChunk = 64;  // tokens done at once

// Numbers that are written before they are read. A vector would fill all of them with zeros first, and of what a memory has
// places for a text may use few.
template <typename Real>
class Unwritten {
 public:
  explicit Unwritten(std::int64_t count = 0) : numbers_(new Real[count]) {}
  Real* data() { return numbers_.get(); }
  Real& operator[](std::int64_t place) { return numbers_[place]; }

 private:
  std::unique_ptr<Real[]> numbers_;
};

// exp(x) for x at most about 0, to float precision; exactly 0 where a float would be subnormal. Cody-Waite reduction to
// |r| <= ln(2)/2 and a polynomial of degree 6. Unlike std::exp it has no branch, so that loops over it become vectors.
inline float exp_of_negative(float x) {
  constexpr float kRound = 12582912.0f;  // adding 1.5 * 2^23 leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const float bounded = x < -87.0f ? 0.0f : shifted;
  std::int32_t bits;
  std::memcpy(&bits, &bounded, sizeof bits);
  bits = static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) << 23) + 0x3f800000;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// As many floats as the processor takes at once: compilers are bad at vectors that are longer.
#if defined(__AVX512F__)
constexpr std::int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr std::int64_t kLanes = 8;
#else
constexpr std::int64_t kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Integers __attribute__((vector_size(4 * kLanes)));
constexpr auto kEachLane = std::make_integer_sequence<int, kLanes>{};

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(float* to, const Lanes& lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// x in a register, where the compiler can neither fuse what made it with what comes after, nor load it anew for each use.
template <typename Vector>
inline Vector in_register(Vector x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+x"(x));
#endif
  return x;
}

// Lanes of x and y: those of y are numbered from kLanes on. GCC has clang's name for it from version 12 on only.
template <int... Lane, typename Vector>
inline Vector shuffled(const Vector& x, const Vector& y) {
#ifdef __clang__
  return __builtin_shufflevector(x, y, Lane...);
#else
  return __builtin_shuffle(x, y, Integers{Lane...});
#endif
}

// All lanes brought together by `both`, in each of them.
template <int Apart = kLanes / 2, typename Both, int... Lane>
inline Lanes folded(const Lanes& x, const Both& both, std::integer_sequence<int, Lane...> lanes) {
  const Lanes half = both(x, shuffled<(Lane ^ Apart)...>(x, x));
  if constexpr (Apart == 1) {
    return half;
  } else {
    return folded<Apart / 2>(half, both, lanes);
  }
}

// x[0..n) brought together by `both`, lane by lane: left to themselves, compilers keep the order of float operations.
template <typename Both>
inline float reduce(const float* x, std::int64_t n, float start, const Both& both) {
  Lanes all = start - Lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) all = both(all, load(x + i));
  if (i < n) {
    Lanes rest = start - Lanes{};
    std::memcpy(&rest, x + i, (n - i) * sizeof(float));
    all = both(all, rest);
  }
  return folded(all, both, kEachLane)[0];
}

// The largest of `start` and x[0..n).
inline float largest(const float* x, std::int64_t n, float start) {
  return reduce(x, n, start, [](const Lanes& a, const Lanes& b) { return a > b ? a : b; });
}

inline float sum(const float* x, std::int64_t n) {
  return reduce(x, n, 0.0f, [](const Lanes& a, const Lanes& b) { return a + b; });
}

// The next multiple of the length of so many vectors.
inline std::int64_t whole_lanes(std::int64_t n, std::int64_t vectors = 1) {
  const std::int64_t size = vectors * kLanes;
  return (n + size - 1) / size * size;
}

// Queries, keys, values and log-weights of a KV head and its query heads, and the steps between heads and between rows.
struct HeadInputs {
  const float *query, *key, *value, *log_weight;
  std::int64_t query_head, query_row, key_row, value_row;
};

struct Rows {
  const float* data;
  std::int64_t stride;
};

// The first `length` rows, followed by zeros up to `size` of them: copied only if they are fewer.
inline Rows zero_padded(Rows rows, std::int64_t length, std::int64_t size, std::int64_t dim, std::vector<float>& copy) {
  if (length == size) return rows;
  for (std::int64_t j = 0; j < length; ++j) std::copy_n(rows.data + j * rows.stride, dim, &copy[j * dim]);
  std::fill(copy.begin() + length * dim, copy.begin() + size * dim, 0.0f);
  return {copy.data(), dim};
}

// The steps from S on of the transposition of a square tile: rows i and i + S exchange their off-diagonal blocks of width S.
template <int S = kLanes / 2, int... Lane>
inline void transpose_tile(Lanes* rows, std::integer_sequence<int, Lane...> lanes) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Lanes upper = rows[i], lower = rows[i + S];
    rows[i] = shuffled<((Lane & S) ? kLanes + Lane - S : Lane)...>(upper, lower);
    rows[i + S] = shuffled<((Lane & S) ? kLanes + Lane : Lane + S)...>(upper, lower);
  }
  if constexpr (S > 1) transpose_tile<S / 2>(rows, lanes);
}

// to [columns, to_stride] = from [rows, columns] transposed; behind each row less than a vector of zeros may be written.
inline void transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, float* to,
                      std::int64_t to_stride) {
  const std::int64_t whole = columns / kLanes * kLanes;
  for (std::int64_t i0 = 0; i0 < rows; i0 += kLanes) {
    for (std::int64_t j0 = 0; j0 < whole; j0 += kLanes) {
      Lanes tile[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) tile[i] = i0 + i < rows ? load(from + (i0 + i) * from_stride + j0) : Lanes{};
      transpose_tile(tile, kEachLane);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(to + (j0 + j) * to_stride + i0, tile[j]);
    }
    for (std::int64_t j = whole; j < columns; ++j) {
      for (std::int64_t i = i0; i < std::min(i0 + kLanes, rows); ++i) to[j * to_stride + i] = from[i * from_stride + j];
    }
  }
}

// N numbers, N being 8 or 16, in as few vectors as hold them.
template <int N>
struct Floats {
  static constexpr int kPart = std::min<int>(N, kLanes), kParts = N / kPart;
  typedef float Part __attribute__((vector_size(4 * kPart)));
  Part parts[kParts];

  static Floats load(const float* from) {
    Floats found;
    for (int p = 0; p < kParts; ++p) std::memcpy(&found.parts[p], from + p * kPart, sizeof(Part));
    return found;
  }

  void store(float* to) const {
    for (int p = 0; p < kParts; ++p) std::memcpy(to + p * kPart, &parts[p], sizeof(Part));
  }

  // Sums of some of the numbers, zeros where there are none.
  Lanes lanes() const {
    Lanes total{};
    if constexpr (kPart < kLanes) {
      std::memcpy(&total, parts, sizeof parts);
    } else {
      for (const Part& part : parts) total += part;
    }
    return total;
  }

  Floats& operator+=(const Floats& other) {
    for (int p = 0; p < kParts; ++p) parts[p] += other.parts[p];
    return *this;
  }
  Floats& operator*=(const Floats& other) {
    for (int p = 0; p < kParts; ++p) parts[p] *= other.parts[p];
    return *this;
  }
  Floats& operator*=(float x) {
    for (Part& part : parts) part *= x;
    return *this;
  }
  friend Floats operator*(Floats a, const Floats& b) { return a *= b; }
  friend Floats operator*(Floats a, float x) { return a *= x; }
};

}  // namespace dofla
