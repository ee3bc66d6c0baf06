// What attention does with vectors in few bits and in eight, without unpacking them.
#pragma once

#include "coding.h"

namespace dofla::coding {

constexpr std::int64_t kTile = kLanes;  // tokens whose sums are one vector
constexpr int kHeads = kLanes == 16 ? 8 : 4;  // query heads for which what is decoded stays in registers

// The sum of the numbers of each of a tile's vectors: those S apart are folded into one, which has half of the sums of each.
template <int S = kTile / 2, int... Lane>
inline Lanes sums(Lanes* rows, std::integer_sequence<int, Lane...> lanes) {
#pragma GCC unroll 8
  for (int i = 0; i < S; ++i) {
    const Lanes upper = rows[i], lower = rows[i + S];
    rows[i] = shuffled<((Lane & S) ? kLanes + Lane : Lane)...>(upper, lower) +
              shuffled<((Lane & S) ? kLanes + Lane - S : Lane + S)...>(upper, lower);
  }
  if constexpr (S > 1) return sums<S / 2>(rows, lanes);
  return rows[0];
}

// Products of G queries [G, dim] with `count` vectors, at to[g * stride + t]; `of(t, own)` adds up those of a vector.
template <int N, int G, typename Of>
inline void products(std::int64_t count, float* to, std::int64_t stride, const Of& of) {
  for (std::int64_t first = 0; first < count; first += kTile) {
    Lanes rows[G][kTile];
    for (std::int64_t t = 0; t < kTile; ++t) {
      Floats<N> own[G] = {};
      if (first + t < count) of(first + t, own);
      for (int g = 0; g < G; ++g) rows[g][t] = own[g].lanes();
    }
    for (int g = 0; g < G; ++g) store(to + g * stride + first, sums(rows[g], kEachLane));
  }
}

// ... with vectors in int8.
template <int N, int G>
inline void scores(std::int64_t dim, const std::int8_t* integers, const std::int8_t* exponents, std::int64_t count,
                   const float* queries, float* to, std::int64_t stride) {
  products<N, G>(count, to, stride, [&](std::int64_t t, auto& own) {
    for (std::int64_t i = 0; i < dim; i += N) {
      const Floats<N> x = floats<N>(integers + t * dim + i);
      for (int g = 0; g < G; ++g) own[g] += Floats<N>::load(queries + g * dim + i) * x;
    }
    const float power = power_of_two(exponents[t]);
    for (int g = 0; g < G; ++g) own[g] *= power;
  });
}

// ... of rotated queries with codes.
template <int N, int G>
inline void scores(const Coder& coder, const std::uint8_t* codes, const std::uint8_t* scales,
                   std::int64_t count, const float* queries, float* to, std::int64_t stride) {
  const std::int64_t bytes = coder.bytes(), blocks = coder.blocks();
  products<N, G>(count, to, stride, [&](std::int64_t t, auto& own) {
    const std::uint8_t* code = codes + t * bytes;
    for (std::int64_t b = 0; b < blocks; ++b) {
      with_bits(coder.bits[b], [&](auto n) {
        const Floats<N> x =
            levels_of<N, n>(code, coder.tables.levels(n)) * coder.tables.scales()[scales[t * blocks + b]];
        for (int g = 0; g < G; ++g) own[g] += Floats<N>::load(queries + g * coder.dim + b * N) * x;
        code += n * N / 8;
      });
    }
  });
}

// Adds to [G, dim] vectors in int8, each times weights[g * stride + t].
template <int N, int G>
inline void weighed(std::int64_t dim, const std::int8_t* integers, const std::int8_t* exponents, std::int64_t count,
                    const float* weights, std::int64_t stride, float* to) {
  for (std::int64_t i = 0; i < dim; i += N) {
    Floats<N> sum[G];
    for (int g = 0; g < G; ++g) sum[g] = Floats<N>::load(to + g * dim + i);
    for (std::int64_t t = 0; t < count; ++t) {
      const Floats<N> x = floats<N>(integers + t * dim + i) * power_of_two(exponents[t]);
      for (int g = 0; g < G; ++g) sum[g] += x * weights[g * stride + t];
    }
    for (int g = 0; g < G; ++g) sum[g].store(to + g * dim + i);
  }
}

// ... rotated vectors in codes.
template <int N, int G>
inline void weighed(const Coder& coder, const std::uint8_t* codes, const std::uint8_t* scales,
                    std::int64_t count, const float* weights, std::int64_t stride, float* to) {
  const std::int64_t bytes = coder.bytes(), blocks = coder.blocks();
  for (std::int64_t b = 0; b < blocks; ++b) {
    with_bits(coder.bits[b], [&](auto n) {
      Floats<N> sum[G];
      for (int g = 0; g < G; ++g) sum[g] = Floats<N>::load(to + g * coder.dim + b * N);
      for (std::int64_t t = 0; t < count; ++t) {
        const Floats<N> x =
            levels_of<N, n>(codes + t * bytes, coder.tables.levels(n)) * coder.tables.scales()[scales[t * blocks + b]];
        for (int g = 0; g < G; ++g) sum[g] += x * weights[g * stride + t];
      }
      for (int g = 0; g < G; ++g) sum[g].store(to + g * coder.dim + b * N);
      codes += n * N / 8;
    });
  }
}

// Coder.rotate_query: G queries [G, dim] rotated, and their products with the mean.
template <int N, int G>
inline void rotate_query(const Coder& coder, const float* queries, float* rotated, float* beside) {
  const std::int64_t dim = coder.dim;
  constexpr int kSums = G * Floats<N>::kParts > 6 ? 1 : G * Floats<N>::kParts > 3 ? 2 : 4;
  for (std::int64_t j = 0; j < dim; j += N) {
    Floats<N> sum[kSums][G] = {};  // several, so that additions need not wait for each other
    for (std::int64_t i = 0; i < dim; i += kSums) {
      for (int n = 0; n < kSums; ++n) {
        const auto row = Floats<N>::load(coder.back + (i + n) * dim + j);
        for (int g = 0; g < G; ++g) sum[n][g] += row * queries[g * dim + i + n];
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int n = 1; n < kSums; ++n) sum[0][g] += sum[n][g];
      sum[0][g].store(rotated + g * dim + j);
    }
  }
  for (int g = 0; g < G; ++g) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (std::int64_t i = 0; i < dim; ++i) total += queries[g * dim + i] * coder.mean[i];
    beside[g] = total;
  }
}

// Coder.unrotate of G sums [G, dim] of rotated vectors, added to `to`; `mass` [G] is the sum of their weights.
template <int N, int G>
inline void unrotate(const Coder& coder, const float* rotated, const float* mass, float* to) {
  const std::int64_t dim = coder.dim;
  float found[G][kTile];
  for (std::int64_t begin = 0; begin < dim; begin += kTile) {
    const std::int64_t rows = std::min(kTile, dim - begin);
    products<N, G>(rows, found[0], kTile, [&](std::int64_t i, auto& own) {
      for (std::int64_t j = 0; j < dim; j += N) {
        const Floats<N> row = Floats<N>::load(coder.back + (begin + i) * dim + j);
        for (int g = 0; g < G; ++g) own[g] += Floats<N>::load(rotated + g * dim + j) * row;
      }
    });
    for (int g = 0; g < G; ++g) {
      for (std::int64_t i = 0; i < rows; ++i) to[g * dim + begin + i] += found[g][i] + mass[g] * coder.mean[begin + i];
    }
  }
}

}  // namespace dofla::coding
