// What is multiplied where a prompt is read: floats, or what they are nearest to in bfloat16, which a processor with AMX multiplies
// several times as fast. Products are summed as floats either way.
#pragma once

#include "matmul.h"
#include "vector.h"

namespace dofla {

// Columns (or terms) of one product. Torch compiles one for each size and each distance of rows, and keeps it: were they as
// wide as what a block of queries sees, there would be hundreds, in pieces of memory that stand between large freed ones.
constexpr std::int64_t kPanel = 64;

// Matrices as one thread's products take them, in scratch memory where they are not there so.
template <typename Real>
class Operands;

template <>
class Operands<float> {
 public:
  // On the left, rows [rows, columns] that stand `stride` apart, as they are.
  const float* left(const float* matrix, std::int64_t, std::int64_t, std::int64_t, Unwritten<float>&) const { return matrix; }

  // On the right, rows [columns, dim] transposed, panel by panel; of whole vectors.
  const float* across(const float* rows, std::int64_t columns, std::int64_t dim) {
    right_.resize(std::max<std::size_t>(right_.size(), whole_lanes(columns, kPanel / kLanes) * dim));
    for (std::int64_t first = 0; first < columns; first += kPanel) {
      transpose(rows + first * dim, dim, std::min(kPanel, columns - first), dim, &right_[first * dim], kPanel);
    }
    return right_.data();
  }

  // On the right, rows [inner, dim] as they are.
  const float* along(const float* rows, std::int64_t, std::int64_t) const { return rows; }

  // Once a thread has no more products.
  static void release() {}

 private:
  std::vector<float> right_;
};

#ifdef __AVX512BF16__
using Half = c10::BFloat16;

inline void round_to(Half* __restrict to, const float* __restrict from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = from[i];
}

// On the right, two rows of the product's inner dimension stand number by number next to each other.
template <>
class Operands<Half> {
 public:
  const Half* left(const float* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                   Unwritten<Half>& scratch) const {
    for (std::int64_t i = 0; i < rows; ++i) round_to(&scratch[i * stride], matrix + i * stride, columns);
    return scratch.data();
  }

  const Half* across(const float* rows, std::int64_t columns, std::int64_t dim) {
    rounded_.resize(std::max<std::size_t>(rounded_.size(), columns * dim));
    right_.resize(std::max<std::size_t>(right_.size(), whole_lanes(columns, kPanel / kLanes) * dim));
    round_to(rounded_.data(), rows, columns * dim);
    for (std::int64_t first = 0; first < columns; first += kPanel) {
      const auto* pairs = reinterpret_cast<const float*>(&rounded_[first * dim]);
      auto* to = reinterpret_cast<float*>(&right_[first * dim]);
      transpose(pairs, dim / 2, std::min(kPanel, columns - first), dim / 2, to, kPanel);
    }
    return right_.data();
  }

  const Half* along(const float* rows, std::int64_t inner, std::int64_t dim) {
    right_.resize(std::max<std::size_t>(right_.size(), inner * dim));
    for (std::int64_t i = 0; i < inner; i += 2) {
      const float *__restrict upper = rows + i * dim, *__restrict lower = upper + dim;
      Half* __restrict to = &right_[i * dim];
      for (std::int64_t j = 0; j < dim; ++j) {
        to[2 * j] = upper[j];
        to[2 * j + 1] = lower[j];
      }
    }
    return right_.data();
  }

  static void release() { at::native::cpublas::brgemm_release(true); }  // of the tiles of AMX

 private:
  std::vector<Half> rounded_, right_;
};

// matmul with a right side as Operands have it.
inline void matmul(std::int64_t rows, std::int64_t columns, std::int64_t inner, const Half* a, std::int64_t a_stride,
                   const Half* b, std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate) {
  at::native::cpublas::brgemm(rows, columns, inner, a_stride, b_stride, c_stride, accumulate, a, b, c, true);
}

// Whether halves are worth it: in the tiles of AMX. Elsewhere a product of them takes as long as one of floats, and rounding comes
// on top: a prompt takes 1.04 times as long.
inline bool multiplies_half() {
  static const bool found = __builtin_cpu_supports("amx-bf16") && torch_multiplies<Half>();
  return found;
}
#endif

// c [rows, columns] = a [rows, dim] @ across(columns of dim).
template <typename Real>
void times_across(std::int64_t rows, std::int64_t columns, std::int64_t dim, const Real* a, const Real* across, float* c,
                  std::int64_t c_stride) {
  for (std::int64_t first = 0; first < columns; first += kPanel) {
    const std::int64_t here = std::min(kPanel, columns - first);
    matmul(rows, here, dim, a, dim, across + first * dim, kPanel, c + first, c_stride, false);
  }
}

// c [rows, dim] = a [rows, inner] @ along(inner rows of dim) (+ c).
template <typename Real>
void times_along(std::int64_t rows, std::int64_t dim, std::int64_t inner, const Real* a, std::int64_t a_stride, const Real* along,
                 float* c, bool accumulate) {
  for (std::int64_t first = 0; first < inner; first += kPanel) {
    const std::int64_t here = std::min(kPanel, inner - first);
    matmul(rows, dim, here, a + first, a_stride, along + first * dim, dim, c, dim, accumulate || first);
  }
}

}  // namespace dofla
