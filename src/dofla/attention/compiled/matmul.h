// The product of small matrices: torch's own where it has one.
#pragma once

#ifdef __x86_64__
#include <ATen/native/CPUBlas.h>

#include <cstdint>
#else
#include "product.h"
#endif

namespace dofla {

#ifdef __x86_64__
constexpr std::int64_t kFewRows = 16;  // a product is compiled for each size it meets, so sizes are few

// c [rows, columns] = a [rows, inner] @ b [inner, columns] (+ c), all row-major with the given strides between rows.
inline void matmul(std::int64_t rows, std::int64_t columns, std::int64_t inner, const float* a, std::int64_t a_stride,
                   const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate) {
  at::native::cpublas::brgemm(rows, columns, inner, a_stride, b_stride, c_stride, accumulate, a, b, c, false);
}
#else
constexpr std::int64_t kFewRows = product::kRows;
using product::matmul;
#endif

}  // namespace dofla
