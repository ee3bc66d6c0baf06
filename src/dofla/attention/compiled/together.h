// As many vectors as there are lanes coded side by side: the arithmetic of coding.h, a vector in each lane.
#pragma once

#include "coding.h"

namespace dofla::coding {

// Rows of bytes, one for each vector.
struct BytesOf {
  std::uint8_t* data;
  std::int64_t stride;
};

// One thread's scratch memory.
struct Together {
  std::vector<Number> rows;
  std::vector<float> numbers;

  explicit Together(std::int64_t dim) : rows(kLanes * dim), numbers(kLanes * dim / kPair) {}
};

typedef float Side[kLanes];  // a number of each vector

// blocks.whole of a block of each vector, in place; what one is worth.
template <int N>
inline void whole(Side* x, float* __restrict unit) {
  Lanes most{};
  for (int i = 0; i < N; ++i) {
    const Lanes size = load(x[i]), negative = -size;
    most = most > size ? most : size;
    most = most > negative ? most : negative;
  }
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) {
    const int exponent = std::clamp(exponent_of(most[lane]), -100, 100) - 8;
    unit[lane] = power_of_two(exponent);
  }
  for (int i = 0; i < N; ++i) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) x[i][lane] = __builtin_rintf(x[i][lane] * (1.0f / unit[lane]));
  }
}

// encode_block of `count` vectors.
template <int N, int Bits>
inline void encode_block(const Side* x, const float* unit, const Tables& tables, std::int64_t count, const BytesOf& codes,
                         const BytesOf& scales) {
  const Levels levels = tables.levels(Bits);
  Side squares = {}, size, power = {};
  std::int32_t standard[N][kLanes], windows[N][kLanes];
  for (int i = 0; i < N; ++i) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) squares[lane] += x[i][lane] * x[i][lane];
  }
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) size[lane] = std::max(std::sqrt(squares[lane] / N), 1e-3f);
  for (int i = 0; i < N; ++i) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      standard[i][lane] = static_cast<std::int32_t>(__builtin_rintf(x[i][lane] * (kFine * kUnit) / size[lane]));
    }
  }
  SearchSideBySide<N, Bits>(levels.floats)(standard, windows);
  for (int i = 0; i < N; ++i) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) power[lane] += levels.floats[windows[i][lane]] * levels.floats[windows[i][lane]];
  }
  std::int32_t scale[kLanes];
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) scale[lane] = scale_of(tables, squares[lane], power[lane], unit[lane]);
  for (std::int64_t t = 0; t < count; ++t) {
    pack_codes<N, Bits>(&windows[0][t], kLanes, codes.data + t * codes.stride);
    scales.data[t * scales.stride] = static_cast<std::uint8_t>(scale[t]);
  }
}

// encode of `count` vectors, up to kLanes.
template <int N>
inline void encode(const Coder& coder, const BytesOf& integers, const BytesOf& exponents, std::int64_t count,
                   Together& scratch, const BytesOf& codes, const BytesOf& scales) {
  const std::int64_t dim = coder.dim;
  Side power = {};
  std::fill(scratch.rows.begin() + count * dim, scratch.rows.begin() + kLanes * dim, Number{});
  for (std::int64_t t = 0; t < count; ++t) {
    std::copy_n(reinterpret_cast<const std::int8_t*>(integers.data + t * integers.stride), dim, &scratch.rows[t * dim]);
    power[t] = power_of_two(static_cast<std::int8_t>(exponents.data[t * exponents.stride]));
  }
  side_by_side(scratch.rows.data(), dim, scratch.numbers.data(), kLanes);
  BytesOf to_codes = codes, to_scales = scales;
  for (std::int64_t b = 0; b < coder.blocks(); ++b) {
    Side x[N], unit;
    constexpr int kAtOnce = kLanes == 16 ? 16 : 8;  // sums that registers have room for
    for (int first = 0; first < N; first += kAtOnce) {
      constexpr int kSums = std::min(N, kAtOnce);
      Sums sums[kSums] = {};
      for (std::int64_t j = 0; j < dim; j += kPair) {
        const Sums numbers = load_numbers(&scratch.numbers[j / kPair * kLanes]);
        for (int i = 0; i < kSums; ++i) {
          sums[i] = plus_products(sums[i], numbers, everywhere(coder.rotation + (b * N + first + i) * dim + j));
        }
      }
      for (int i = 0; i < kSums; ++i) {
        const std::int64_t row = b * N + first + i;
        store(x[first + i], as_floats(sums[i]) * (coder.fineness[row] * load(power)) - coder.middle[row]);
      }
    }
    whole<N>(x, unit);
    with_bits(coder.bits[b], [&](auto bits) {
      encode_block<N, bits>(x, unit, coder.tables, count, to_codes, to_scales);
      to_codes.data += bits * N / 8;
    });
    ++to_scales.data;
  }
}

}  // namespace dofla::coding
