// Products of integers of 16 bits, two to a lane where the processor multiplies and adds them at once.
#pragma once

#include "vector.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace dofla {

inline Integers lesser(const Integers& a, const Integers& b) { return a < b ? a : b; }

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))

// sum + x * y of both numbers in a lane.
inline Integers plus_products(const Integers& sum, const Integers& x, const Integers& y) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Integers>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x),
                                                        reinterpret_cast<__m512i>(y)));
#elif defined(__AVX512F__)
  return sum + reinterpret_cast<Integers>(_mm512_madd_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
#else
  return sum + reinterpret_cast<Integers>(_mm256_madd_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
#endif
}

// Sums of products that stay below 2^24, which a float holds: vectors of pairs, of the numbers' type.
constexpr int kPair = 2;
using Number = std::int16_t;
using Sums = Integers;

inline Sums everywhere(const Number* pair) {
  std::int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return both - Sums{};
}

inline Lanes as_floats(const Sums& sums) { return __builtin_convertvector(sums, Lanes); }

template <int Size>
struct Shorter {
  typedef std::int32_t Wide __attribute__((vector_size(4 * Size)));
  typedef Number Narrow __attribute__((vector_size(2 * Size)));
};

template <int N>
inline void store_numbers(Number* to, const Floats<N>& x) {
  constexpr int kPart = Floats<N>::kPart;
  for (int p = 0; p < Floats<N>::kParts; ++p) {
    const auto wide = __builtin_convertvector(x.parts[p], typename Shorter<kPart>::Wide);
    const auto narrow = __builtin_convertvector(wide, typename Shorter<kPart>::Narrow);
    std::memcpy(to + p * kPart, &narrow, sizeof narrow);
  }
}

// sum + x * y, of numbers of 16 bits, and what y is to be for that.
inline Integers plus_product(const Integers& sum, const Integers& x, const Integers& y) { return plus_products(sum, x, y); }
inline std::int32_t factor(std::int32_t y) { return y & 0xffff; }
#else
constexpr int kPair = 1;
using Number = float;
using Sums = Lanes;

inline Sums plus_products(const Sums& sum, const Sums& x, const Sums& y) { return sum + x * y; }
template <typename Any>
inline Sums everywhere(const Any* number) {
  return static_cast<float>(*number) - Sums{};
}
inline Lanes as_floats(const Sums& sums) { return sums; }

template <int N>
inline void store_numbers(Number* to, const Floats<N>& x) {
  x.store(to);
}
inline Integers plus_product(const Integers& sum, const Integers& x, const Integers& y) { return sum + x * y; }
inline std::int32_t factor(std::int32_t y) { return y; }
#endif

// Rows [kLanes, dim] of numbers as dim / kPair vectors, `stride` apart, a row in each lane; they have the size of floats.
inline void side_by_side(const Number* rows, std::int64_t dim, float* to, std::int64_t stride) {
  const std::int64_t columns = dim / kPair;
  transpose(reinterpret_cast<const float*>(rows), columns, kLanes, columns, to, stride);
}

inline Sums load_numbers(const float* from) {
  Sums found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

}  // namespace dofla
