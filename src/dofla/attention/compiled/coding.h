// Tokens in few bits and in eight: the arithmetic of coding/ and eight_bits.py, one vector at a time. Codes are those of
// plain torch bit for bit: sums are of whole numbers that a float holds, and every other operation is a single one,
// correctly rounded, or has an exact product in front of it, so that it does not matter whether the compiler fuses them.
#pragma once

#include "trellis.h"

#include <cmath>
#include <type_traits>

namespace dofla::coding {


// fading.TABLES: levels by bits, as floats and as bytes; scales and the borders between their squares; the weights of kept.py.
struct Tables {
  const float* data;
  static constexpr std::int64_t kWeights = 13 * 8 + 1, kLevels = kMostBits * kWindows;
  static constexpr std::int64_t kSize = kLevels + kLevels / 4 + 2 * 256 + kWeights;

  Levels levels(int bits) const {
    const std::int64_t from = (bits - 1) * kWindows;
    return {data + from, reinterpret_cast<const std::int8_t*>(data + kLevels) + from};
  }
  const float* scales() const { return data + kLevels + kLevels / 4; }
  const float* square_borders() const { return scales() + 256; }
  const float* weights() const { return scales() + 2 * 256; }
};

// coder.py for one KV head.
struct Coder {
  std::int64_t dim, block;
  const std::int16_t* turn;                            // [dim, dim]
  const float *fineness, *back, *mean, *middle;        // [dim], [dim, dim], [dim], [dim]
  const std::uint8_t* bits;                            // [stages, blocks]
  Tables tables;

  std::int64_t blocks() const { return dim / block; }
  const std::uint8_t* bits_of(std::int64_t stage) const { return bits + stage * blocks(); }
  std::int64_t bytes(std::int64_t stage) const {
    std::int64_t total = 0;
    for (std::int64_t b = 0; b < blocks(); ++b) total += bits_of(stage)[b] * block / 8;
    return total;
  }
};

// `call` with a number of the type system: a block's size, its bits, up to four query heads from `first` on.
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

template <typename Call>
inline void with_groups(std::int64_t groups, const Call& call) {
  std::int64_t first = 0;
  for (; first + 4 <= groups; first += 4) call(std::integral_constant<int, 4>{}, first);
  switch (groups - first) {
    case 3: return call(std::integral_constant<int, 3>{}, first);
    case 2: return call(std::integral_constant<int, 2>{}, first);
    case 1: return call(std::integral_constant<int, 1>{}, first);
  }
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

// coder._whole_rows of `from` [dim, dim] transposed: columns of whole numbers, and what one is worth in each.
inline void whole_columns(const float* from, std::int64_t dim, float* __restrict to, float* __restrict fineness) {
  std::vector<double> total(dim), most(dim);
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
  }
  for (std::int64_t i = 0; i < dim; ++i) {
    for (std::int64_t j = 0; j < dim; ++j) to[i * dim + j] = __builtin_rintf(from[i * dim + j] / fineness[j]);
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

// blocks.encode of `Many` blocks of as many bits, of each its numbers and their unit; to codes[j] + at and scales[j] + b.
template <int N, int Bits, int Many>
inline void encode_blocks(const float (*numbers)[N], const float* unit, const Tables& tables, std::uint8_t* const* codes,
                          std::int64_t at, std::uint8_t* const* scales, std::int64_t b) {
  const Levels levels = tables.levels(Bits);
  std::int32_t standard[Many][N], windows[Many][N];
  float squares[Many] = {};
  for (int j = 0; j < Many; ++j) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < N; ++i) total += numbers[j][i] * numbers[j][i];
    const float size = std::max(std::sqrt(total / N), 1e-3f);
#pragma omp simd
    for (int i = 0; i < N; ++i) {
      standard[j][i] = static_cast<std::int32_t>(__builtin_rintf(numbers[j][i] * (kFine * kUnit) / size));
    }
    squares[j] = total;
  }
  Search<N, Bits, Many>(levels.floats)(standard, windows);
  for (int j = 0; j < Many; ++j) {
    pack_codes<N, Bits>(windows[j], codes[j] + at);
    float power = 0.0f;
    for (int i = 0; i < N; ++i) power += levels.floats[windows[j][i]] * levels.floats[windows[j][i]];
    const float square = squares[j] / power * (unit[j] * unit[j]), *squared = tables.square_borders();
    scales[j][b] = static_cast<std::uint8_t>(std::lower_bound(squared, squared + 255, square) - squared);
  }
}

// ... of all blocks of `Many` vectors, as a stage keeps them; `read(j, b, x)` gives the numbers of a
// block and returns their unit.
template <int N, int Many, typename Read>
inline void encode_vectors(const Coder& coder, std::int64_t stage, const Read& read, std::uint8_t* const* codes,
                           std::uint8_t* const* scales) {
  std::int64_t at = 0;
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    float numbers[Many][N], unit[Many];
    for (int j = 0; j < Many; ++j) unit[j] = read(j, b, numbers[j]);
    with_bits(coder.bits_of(stage)[b], [&](auto n) {
      encode_blocks<N, n, Many>(numbers, unit, coder.tables, codes, at, scales, b);
      at += n * N / 8;
    });
  }
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

// Coder.encode of `Many` vectors in eight bits, as bytes; `wide` has room for as many.
template <int N, int Many>
inline void encode(const Coder& coder, const std::uint8_t* const* integers, const std::uint8_t* const* exponents,
                   std::int16_t* wide, std::uint8_t* const* codes, std::uint8_t* const* scales) {
  for (int j = 0; j < Many; ++j) {
    std::copy_n(reinterpret_cast<const std::int8_t*>(integers[j]), coder.dim, wide + j * coder.dim);
  }
  const auto turn = [&](int vector, std::int64_t b, float* x) {
    const float power = power_of_two(static_cast<std::int8_t>(*exponents[vector]));
    const std::int16_t* __restrict numbers = wide + vector * coder.dim;
    for (int i = 0; i < N; ++i) {
      const std::int16_t* __restrict row = coder.turn + (b * N + i) * coder.dim;
      std::int32_t turned = 0;
      for (std::int64_t j = 0; j < coder.dim; ++j) turned += static_cast<std::int32_t>(row[j]) * numbers[j];
      x[i] = static_cast<float>(turned);
    }
    const float *fineness = coder.fineness + b * N, *middle = coder.middle + b * N;
#pragma omp simd
    for (int i = 0; i < N; ++i) x[i] = x[i] * (fineness[i] * power) - middle[i];
    return whole<N>(x);
  };
  encode_vectors<N, Many>(coder, 0, turn, codes, scales);
}

// Coder.age of `Many` vectors
template <int N, int Many>
inline void age(const Coder& coder, std::int64_t stage, const std::uint8_t* const* codes, const std::uint8_t* const* scales,
                std::uint8_t* const* to_codes, std::uint8_t* const* to_scales) {
  std::int64_t at[Many] = {};
  const auto decode = [&](int j, std::int64_t b, float* x) {
    with_bits(coder.bits_of(stage)[b], [&](auto n) {
      levels_of<N, n>(codes[j] + at[j], coder.tables.levels(n)).store(x);
      at[j] += n * N / 8;
    });
    return coder.tables.scales()[scales[j][b]];
  };
  encode_vectors<N, Many>(coder, stage + 1, decode, to_codes, to_scales);
}

// Coder.decode: the turned vector.
template <int N>
inline void decode(const Coder& coder, std::int64_t stage, const std::uint8_t* codes, const std::uint8_t* scales, float* to) {
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    with_bits(coder.bits_of(stage)[b], [&](auto n) {
      (levels_of<N, n>(codes, coder.tables.levels(n)) * coder.tables.scales()[scales[b]]).store(to + b * N);
      codes += n * N / 8;
    });
  }
}

}  // namespace dofla::coding
