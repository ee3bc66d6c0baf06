// What is multiplied where a prompt is read: floats, or what they are nearest to in bfloat16, which a processor with AMX multiplies
// several times as fast. Products are summed as floats either way.
#pragma once

#include "matmul.h"
#include "vector.h"

namespace dofla {

// Matrices as one thread's products take them, in scratch memory where they are not there so.
template <typename Real>
class Operands;

template <>
class Operands<float> {
 public:
  // On the left, rows [rows, columns] that stand `stride` apart, as they are.
  const float* left(const float* matrix, std::int64_t, std::int64_t, std::int64_t, Unwritten<float>&) const { return matrix; }

  // On the right, rows [columns, dim] transposed; of whole vectors.
  const float* across(const float* rows, std::int64_t columns, std::int64_t dim) {
    right_.resize(std::max<std::size_t>(right_.size(), columns * dim));
    transpose(rows, dim, columns, dim, right_.data(), columns);
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
    right_.resize(std::max<std::size_t>(right_.size(), columns * dim));
    round_to(rounded_.data(), rows, columns * dim);
    const auto* pairs = reinterpret_cast<const float*>(rounded_.data());
    transpose(pairs, dim / 2, columns, dim / 2, reinterpret_cast<float*>(right_.data()), columns);
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

// Whether they are worth it: in the tiles of AMX. Elsewhere a product of them takes as long as one of floats, and rounding comes
// on top: a prompt takes 1.04 times as long.
inline bool multiplies_half() {
  static const bool found = __builtin_cpu_supports("amx-bf16") && torch_multiplies<Half>();
  return found;
}
#endif

}  // namespace dofla
