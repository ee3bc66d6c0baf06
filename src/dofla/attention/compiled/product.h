// The product of small matrices in vectors alone, for processors on which torch has none (matmul.h).
#pragma once

#include "vector.h"

namespace dofla::product {

constexpr std::int64_t kDepth = 256;  // rows of b done at once: as many columns of them as a block has stay in the cache
constexpr int kRows = 4;              // of a block
constexpr int kBroad = 4;             // vectors that its rows are long; behind them one, down to a part of one

// The next R rows of c, V vectors long of which `width` numbers are meant: a [R, depth] @ panel [depth, V] (+ c).
template <int R, int V, typename Width>
inline void block(const float* a, std::int64_t a_stride, const Lanes* panel, std::int64_t depth, float* c,
                  std::int64_t c_stride, Width width, bool accumulate) {
  Lanes sum[R][V] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * a_stride + k] * panel[k * V + v];
    }
  }
  for (int r = 0; r < R; ++r) {
    Lanes found[V] = {};
    if (accumulate) std::memcpy(found, c + r * c_stride, width * sizeof(float));
    for (int v = 0; v < V; ++v) found[v] += sum[r][v];
    std::memcpy(c + r * c_stride, found, width * sizeof(float));
  }
}

// Columns of c, as many as `width` says, V vectors or less.
template <int V, typename Width>
inline void columns(std::int64_t rows, Width width, std::int64_t inner, const float* a, std::int64_t a_stride,
                    const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate) {
  Lanes panel[kDepth * V];
  for (std::int64_t first = 0; first < inner; first += kDepth) {
    const std::int64_t depth = std::min(kDepth, inner - first);
    for (std::int64_t k = 0; k < depth; ++k) {
      if (width < V * kLanes) std::fill_n(&panel[k * V], V, Lanes{});
      std::memcpy(&panel[k * V], b + (first + k) * b_stride, width * sizeof(float));
    }
    std::int64_t i = 0;
    const auto next = [&](auto count) {
      block<count, V>(a + i * a_stride + first, a_stride, panel, depth, c + i * c_stride, c_stride, width, accumulate);
      i += count;
    };
    while (i + kRows <= rows) next(std::integral_constant<int, kRows>{});
    while (i < rows) next(std::integral_constant<int, 1>{});
    accumulate = true;
  }
}

// c [rows, columns] = a [rows, inner] @ b [inner, columns] (+ c), all row-major with the given strides between rows.
inline void matmul(std::int64_t rows, std::int64_t columns, std::int64_t inner, const float* a, std::int64_t a_stride,
                   const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate) {
  std::int64_t j = 0;
  const auto next = [&](auto vectors, auto width) {
    product::columns<vectors>(rows, width, inner, a, a_stride, b + j, b_stride, c + j, c_stride, accumulate);
    j += width;
  };
  constexpr std::integral_constant<std::int64_t, kBroad * kLanes> many{};
  constexpr std::integral_constant<std::int64_t, kLanes> one{};
  while (j + many <= columns) next(std::integral_constant<int, kBroad>{}, many);
  while (j + one <= columns) next(std::integral_constant<int, 1>{}, one);
  if (j < columns) next(std::integral_constant<int, 1>{}, columns - j);
}

}  // namespace dofla::product
