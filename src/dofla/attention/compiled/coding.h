// Tokens in few bits and in eight: the arithmetic of coding/ and eight_bits.py, one vector at a time. Codes are those of
// plain torch bit for bit: sums are of integers that a float holds, and every other operation is a single one,
// correctly rounded, or has an exact product in front of it, so that it does not matter whether the compiler fuses them.
#pragma once

#include "trellis.h"

#include <cmath>
#include <type_traits>

namespace dofla::coding {

// levels.TABLES: levels by bits, as floats and as bytes; scales and the borders between their squares.
struct Tables {
  const float* data;
  static constexpr std::int64_t kLevels = kMostBits * kWindows, kSize = kLevels + kLevels / 4 + 2 * 256;

  Levels levels(int bits) const {
    const std::int64_t from = (bits - 1) * kWindows;
    return {data + from, reinterpret_cast<const std::int8_t*>(data + kLevels) + from};
  }
  const float* scales() const { return data + kLevels + kLevels / 4; }
  const float* square_borders() const { return scales() + 256; }
};

// coder.py for one KV head.
struct Coder {
  std::int64_t dim, block;
  const std::int16_t* rotation;                            // [dim, dim]
  const float *fineness, *back, *mean, *middle;        // [dim], [dim, dim], [dim], [dim]
  const std::uint8_t* bits;                            // [blocks]
  Tables tables;

  std::int64_t blocks() const { return dim / block; }
  std::int64_t bytes() const {
    std::int64_t total = 0;
    for (std::int64_t b = 0; b < blocks(); ++b) total += bits[b] * block / 8;
    return total;
  }
};

// `call` with a number that the compiler knows: a block's size, its bits, or how many query heads it does at once, up to `Most`,
// from `first` on.
template <typename Call>
inline void with_block(std::int64_t block, const Call& call) {
  block == 16 ? call(std::integral_constant<int, 16>{}) : call(std::integral_constant<int, 8>{});
}

template <typename Call>
inline void with_bits(int bits, const Call& call) {
  switch (bits) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    case 4: return call(std::integral_constant<int, 4>{});
    default: return call(std::integral_constant<int, 5>{});
  }
}

template <int Most, typename Call>
inline void with_rest(std::int64_t groups, std::int64_t first, const Call& call) {
  if constexpr (Most > 0) {
    groups == Most ? call(std::integral_constant<int, Most>{}, first) : with_rest<Most - 1>(groups, first, call);
  }
}

template <int Most = 4, typename Call>
inline void with_groups(std::int64_t groups, const Call& call) {
  std::int64_t first = 0;
  for (; first + Most <= groups; first += Most) call(std::integral_constant<int, Most>{}, first);
  with_rest<Most - 1>(groups - first, first, call);
}

// The exponent that std::frexp gives; subnormal numbers have that of the smallest normal one, which is clamped anyway.
inline int exponent_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int field = bits >> 23 & 255;
  return x == 0.0f || field == 255 ? 0 : field - 126;
}

inline float power_of_two(int exponent) {
  const std::uint32_t bits = static_cast<std::uint32_t>(exponent + 127) << 23;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

inline float largest_size(const float* x, std::int64_t n) {
  float most = 0.0f;
#pragma omp simd reduction(max : most)
  for (std::int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  return most;
}

// coder._whole_rows of `from` [dim, dim] transposed: columns of integers, a vector of them every `stride` pairs, and
// what one is worth in each.
inline void whole_columns(const float* from, std::int64_t dim, Number* __restrict to, std::int64_t stride,
                          float* __restrict fineness) {
  std::vector<double> total(dim), most(dim);
  std::vector<float> inverse(dim);
  for (std::int64_t i = 0; i < dim; ++i) {
    for (std::int64_t j = 0; j < dim; ++j) {
      const double size = std::abs(from[i * dim + j]);
      total[j] += size;
      most[j] = std::max(most[j], size);
    }
  }
  for (std::int64_t j = 0; j < dim; ++j) {
    int exponent;
    const double needed = std::max({total[j] / (16777215.0 / 127), most[j] / 32767, 1e-30});
    const double mantissa = std::frexp(needed, &exponent);
    fineness[j] = static_cast<float>(std::ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent));
    inverse[j] = 1.0f / fineness[j];
  }
  for (std::int64_t i = 0; i < dim; i += kPair) {
    Number* __restrict row = to + i / kPair * stride * kPair;
    for (std::int64_t j = 0; j < dim; ++j) {
      for (int n = 0; n < kPair; ++n) {
        row[j * kPair + n] = static_cast<Number>(__builtin_rintf(from[(i + n) * dim + j] * inverse[j]));
      }
    }
  }
}

inline bool all_finite(const float* x, std::int64_t n) {
  float zero = 0.0f;
#pragma omp simd reduction(+ : zero)
  for (std::int64_t i = 0; i < n; ++i) zero += x[i] * 0.0f;
  return zero == 0.0f;
}

// eight_bits.pack
inline void pack(const float* x, std::int64_t dim, std::int8_t* integers, std::int8_t* exponent) {
  const int power = std::clamp(exponent_of(largest_size(x, dim)) - 7, -120, 120);
  const float scale = power_of_two(-power);
#pragma omp simd
  for (std::int64_t i = 0; i < dim; ++i) {
    integers[i] = static_cast<std::int8_t>(std::clamp(__builtin_rintf(x[i] * scale), -127.0f, 127.0f));
  }
  *exponent = static_cast<std::int8_t>(power);
}

// The byte of the scale that makes levels, of which `power` is the sum of squares, as long as a block: numbers of which
// `squares` is that sum, and one is worth `unit`.
inline std::int32_t scale_of(const Tables& tables, float squares, float power, float unit) {
  const float square = squares / power * (unit * unit), *borders = tables.square_borders();
  std::int32_t place = 0;
  for (std::int32_t step = 128; step > 0; step /= 2) place = borders[place + step - 1] < square ? place + step : place;
  return place;
}

// blocks.encode of numbers and their unit, to `codes` and `scale`.
template <int N, int Bits>
inline void encode_block(const float* numbers, float unit, const Tables& tables, std::uint8_t* codes, std::uint8_t* scale) {
  const Levels levels = tables.levels(Bits);
  std::int32_t standard[N], windows[N];
  float squares = 0.0f, power = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < N; ++i) squares += numbers[i] * numbers[i];
  const float size = std::max(std::sqrt(squares / N), 1e-3f);
#pragma omp simd
  for (int i = 0; i < N; ++i) {
    standard[i] = static_cast<std::int32_t>(__builtin_rintf(numbers[i] * (kFine * kUnit) / size));
  }
  Search<N, Bits>(levels.floats)(standard, windows);
  pack_codes<N, Bits>(windows, 1, codes);
  for (int i = 0; i < N; ++i) power += levels.floats[windows[i]] * levels.floats[windows[i]];
  *scale = static_cast<std::uint8_t>(scale_of(tables, squares, power, unit));
}

// blocks.whole of a block, in place; what one is worth.
template <int N>
inline float whole(float* x) {
  const int exponent = std::clamp(exponent_of(largest_size(x, N)), -100, 100) - 8;  // up to 256
  const float scale = power_of_two(-exponent);
#pragma omp simd
  for (int i = 0; i < N; ++i) x[i] = __builtin_rintf(x[i] * scale);
  return power_of_two(exponent);
}

// Coder.encode of a vector in int8, as bytes; `wide` has room for it.
template <int N>
inline void encode(const Coder& coder, const std::uint8_t* integers, const std::uint8_t* exponent,
                   std::int16_t* __restrict wide, std::uint8_t* codes, std::uint8_t* scales) {
  std::copy_n(reinterpret_cast<const std::int8_t*>(integers), coder.dim, wide);
  const float power = power_of_two(static_cast<std::int8_t>(*exponent));
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    float x[N];
    for (int i = 0; i < N; ++i) {
      const std::int16_t* __restrict row = coder.rotation + (b * N + i) * coder.dim;
      std::int32_t rotated = 0;
      for (std::int64_t j = 0; j < coder.dim; ++j) rotated += static_cast<std::int32_t>(row[j]) * wide[j];
      x[i] = static_cast<float>(rotated);
    }
    const float *fineness = coder.fineness + b * N, *middle = coder.middle + b * N;
#pragma omp simd
    for (int i = 0; i < N; ++i) x[i] = x[i] * (fineness[i] * power) - middle[i];
    const float unit = whole<N>(x);
    with_bits(coder.bits[b], [&](auto bits) {
      encode_block<N, bits>(x, unit, coder.tables, codes, scales + b);
      codes += bits * N / 8;
    });
  }
}

// Coder.decode: the rotated vector.
template <int N>
inline void decode(const Coder& coder, const std::uint8_t* codes, const std::uint8_t* scales, float* to) {
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    with_bits(coder.bits[b], [&](auto n) {
      (levels_of<N, n>(codes, coder.tables.levels(n)) * coder.tables.scales()[scales[b]]).store(to + b * N);
      codes += n * N / 8;
    });
  }
}

}  // namespace dofla::coding
