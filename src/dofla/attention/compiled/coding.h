// Tokens in few bits and in eight: the arithmetic of coding/ and eight_bits.py, one vector at a time. Codes are those of
// plain torch bit for bit: sums are of whole numbers that a float holds, and every other operation is a single one,
// correctly rounded, or has an exact product in front of it, so that it does not matter whether the compiler fuses them.
#pragma once

#include "vector.h"

#include <cmath>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace dofla::coding {

constexpr int kMostBits = 5, kMostLevels = 32, kUnit = 32;  // as in levels.py

template <int N>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * N)));
  typedef std::int8_t Bytes __attribute__((vector_size(N)));
};
template <int N>
using Floats = typename Vectors<N>::Floats;

template <int N>
inline Floats<N> floats(const float* from) {
  Floats<N> found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

template <int N>
inline Floats<N> floats(const std::int8_t* from) {
  typename Vectors<N>::Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Floats<N>);
}

// fading.TABLES: levels and the borders between them by bits, scales and the borders between their squares, where what is missing
// of 32 or 256 numbers is infinite; and the weights of kept.py.
struct Tables {
  const float* data;
  static constexpr std::int64_t kWeights = 13 * 8 + 1, kSize = 2 * kMostBits * kMostLevels + 2 * 256 + kWeights;

  const float* levels(int bits) const { return data + (bits - 1) * kMostLevels; }
  const float* borders(int bits) const { return data + (kMostBits + bits - 1) * kMostLevels; }
  const float* scales() const { return data + 2 * kMostBits * kMostLevels; }
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

#ifdef __AVX2__
// Eight levels, by codes of `Bits` bits.
template <int Bits>
inline __m256 look_up(__m256i code, const float* levels) {
  const auto among = [&](int from) { return _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + from), code); };
  const auto by = [&](int bit) { return _mm256_castsi256_ps(_mm256_slli_epi32(code, 31 - bit)); };
  if constexpr (Bits <= 3) {
    return among(0);
  } else if constexpr (Bits == 4) {
    return _mm256_blendv_ps(among(0), among(8), by(3));
  } else {
    const __m256 low = _mm256_blendv_ps(among(0), among(8), by(3));
    return _mm256_blendv_ps(low, _mm256_blendv_ps(among(16), among(24), by(3)), by(4));
  }
}
#endif

// The levels that a block's codes stand for.
template <int N, int Bits>
inline Floats<N> levels_of(const std::uint8_t* codes, const float* levels) {
#ifdef __AVX512F__
  if constexpr (N == 16) {
    __m512i index = _mm512_setzero_si512();
    for (int bit = 0; bit < Bits; ++bit) {
      std::uint16_t plane;
      std::memcpy(&plane, codes + 2 * bit, sizeof plane);
      index = _mm512_mask_or_epi32(index, plane, index, _mm512_set1_epi32(1 << bit));
    }
    const __m512 low = _mm512_loadu_ps(levels);
    if constexpr (Bits <= 4) {
      return _mm512_permutexvar_ps(index, low);
    } else {
      return _mm512_permutex2var_ps(low, index, _mm512_loadu_ps(levels + 16));
    }
  }
#endif
  float found[N];
#ifdef __AVX2__
  for (int part = 0; part < N / 8; ++part) {
    std::uint64_t planes = 0;  // a byte for each bit of eight codes
    for (int bit = 0; bit < Bits; ++bit) planes |= std::uint64_t{codes[bit * (N / 8) + part]} << 8 * bit;
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), one = _mm256_set1_epi32(1);
    const __m256i first = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<std::int32_t>(planes)), lane);
    __m256i code = _mm256_and_si256(first, one);
    for (int bit = 1; bit < std::min(Bits, 4); ++bit) {
      code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(first, 7 * bit), _mm256_set1_epi32(1 << bit)));
    }
    if constexpr (Bits == 5) {
      const __m256i last = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<std::int32_t>(planes >> 32)), lane);
      code = _mm256_or_si256(code, _mm256_slli_epi32(_mm256_and_si256(last, one), 4));
    }
    _mm256_storeu_ps(found + 8 * part, look_up<Bits>(code, levels));
  }
#else
  for (int i = 0; i < N; ++i) {
    int code = 0;
    for (int bit = 0; bit < Bits; ++bit) code |= (codes[bit * (N / 8) + i / 8] >> i % 8 & 1) << bit;
    found[i] = levels[code];
  }
#endif
  return floats<N>(found);
}

// The levels of some codes, and those as planes of bits (blocks.to_bytes).
template <int N>
inline void look_up_and_pack(const std::int32_t* code, int bits, const float* levels, float* found, std::uint8_t* codes) {
#ifdef __AVX512F__
  if constexpr (N == 16) {
    const __m512i all = _mm512_loadu_si512(code);
    _mm512_storeu_ps(found, _mm512_permutex2var_ps(_mm512_loadu_ps(levels), all, _mm512_loadu_ps(levels + 16)));
    for (int bit = 0; bit < bits; ++bit) {
      const std::uint16_t plane = _mm512_test_epi32_mask(all, _mm512_set1_epi32(1 << bit));
      std::memcpy(codes + 2 * bit, &plane, sizeof plane);
    }
    return;
  }
#endif
  for (int i = 0; i < N; ++i) found[i] = levels[code[i]];
  for (int bit = 0; bit < bits; ++bit) {
    std::uint32_t plane = 0;
#pragma omp simd reduction(| : plane)
    for (int i = 0; i < N; ++i) plane |= static_cast<std::uint32_t>(code[i] >> bit & 1) << i;
    for (int byte = 0; byte < N / 8; ++byte) codes[bit * (N / 8) + byte] = static_cast<std::uint8_t>(plane >> 8 * byte);
  }
}

// blocks.encode
template <int N>
inline void encode_block(const float* numbers, float unit, int bits, const Tables& tables, std::uint8_t* codes,
                         std::uint8_t* scale) {
  const float *levels = tables.levels(bits), *borders = tables.borders(bits);
  float squares = 0.0f, powers = 0.0f, found[N];
  std::int32_t code[N] = {};
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < N; ++i) squares += numbers[i] * numbers[i];
  const float size = std::max(std::sqrt(squares / N), 1e-3f);
  float standard[N];
#pragma omp simd
  for (int i = 0; i < N; ++i) standard[i] = numbers[i] * kUnit / size;
  for (int border = 0; border < (1 << bits) - 1; ++border) {
#pragma omp simd
    for (int i = 0; i < N; ++i) code[i] += standard[i] > borders[border];
  }
  look_up_and_pack<N>(code, bits, levels, found, codes);
#pragma omp simd reduction(+ : powers)
  for (int i = 0; i < N; ++i) powers += found[i] * found[i];
  const float square = squares / powers * (unit * unit), *squared = tables.square_borders();
  *scale = static_cast<std::uint8_t>(std::lower_bound(squared, squared + 255, square) - squared);
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

// Coder.encode of a vector in eight bits.
template <int N>
inline void encode(const Coder& coder, const std::int8_t* integers, int exponent, std::int16_t* wide, std::uint8_t* codes,
                   std::uint8_t* scales) {
  const float power = power_of_two(exponent);
  for (std::int64_t j = 0; j < coder.dim; ++j) wide[j] = integers[j];
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    float x[N];
    for (int i = 0; i < N; ++i) {
      const std::int16_t* __restrict row = coder.turn + (b * N + i) * coder.dim;
      std::int32_t turned = 0;
#pragma omp simd reduction(+ : turned)
      for (std::int64_t j = 0; j < coder.dim; ++j) turned += static_cast<std::int32_t>(row[j]) * wide[j];
      x[i] = static_cast<float>(turned);
    }
    const float *fineness = coder.fineness + b * N, *middle = coder.middle + b * N;
#pragma omp simd
    for (int i = 0; i < N; ++i) x[i] = x[i] * (fineness[i] * power) - middle[i];
    const float unit = whole<N>(x);
    const int bits = coder.bits_of(0)[b];
    encode_block<N>(x, unit, bits, coder.tables, codes, scales + b);
    codes += bits * N / 8;
  }
}

// Coder.age
template <int N>
inline void age(const Coder& coder, std::int64_t stage, const std::uint8_t* codes, const std::uint8_t* scales,
                std::uint8_t* to_codes, std::uint8_t* to_scales) {
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    const int bits = coder.bits_of(stage)[b], next = coder.bits_of(stage + 1)[b];
    float numbers[N];
    with_bits(bits, [&](auto n) {
      const Floats<N> levels = levels_of<N, n>(codes, coder.tables.levels(n));
      std::memcpy(numbers, &levels, sizeof levels);
    });
    encode_block<N>(numbers, coder.tables.scales()[scales[b]], next, coder.tables, to_codes, to_scales + b);
    codes += bits * N / 8;
    to_codes += next * N / 8;
  }
}

// Coder.decode: the turned vector.
template <int N>
inline void decode(const Coder& coder, std::int64_t stage, const std::uint8_t* codes, const std::uint8_t* scales, float* to) {
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    with_bits(coder.bits_of(stage)[b], [&](auto n) {
      const Floats<N> found = levels_of<N, n>(codes, coder.tables.levels(n)) * coder.tables.scales()[scales[b]];
      std::memcpy(to + b * N, &found, sizeof found);
      codes += n * N / 8;
    });
  }
}

}  // namespace dofla::coding
