// The product of small matrices: torch's own where it has one, else that of product.h.
#pragma once

#include "product.h"

#ifdef __x86_64__
#include <torch/headeronly/util/BFloat16.h>

#include <exception>

// Not in torch's stable ABI: null where this torch has none, or has it by another name.
namespace at::native::cpublas {
[[gnu::weak]] void brgemm(std::int64_t rows, std::int64_t columns, std::int64_t inner, std::int64_t a_stride, std::int64_t b_stride,
                          std::int64_t c_stride, bool accumulate, const float* a, const float* b, float* c, bool b_is_packed);
[[gnu::weak]] void brgemm(std::int64_t rows, std::int64_t columns, std::int64_t inner, std::int64_t a_stride, std::int64_t b_stride,
                          std::int64_t c_stride, bool accumulate, const c10::BFloat16* a, const c10::BFloat16* b, float* c,
                          bool b_is_packed);
[[gnu::weak]] void brgemm_release(bool b_is_packed);
}  // namespace at::native::cpublas
#endif

namespace dofla {

#ifdef __x86_64__
constexpr std::int64_t kFewRows = 16;  // a product of torch is compiled for each size it meets, so sizes are few

// Whether torch multiplies matrices of `Real` here: it needs oneDNN and some vector instructions.
template <typename Real>
inline bool torch_multiplies() {
  static const bool found = [] {
    const auto brgemm = static_cast<void (*)(std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                                             const Real*, const Real*, float*, bool)>(at::native::cpublas::brgemm);
    const std::vector<Real> a(256), b(256);
    std::vector<float> c(256);
    try {
      if (!brgemm || !at::native::cpublas::brgemm_release) return false;
      brgemm(16, 16, 16, 16, 16, 16, false, a.data(), b.data(), c.data(), sizeof(Real) < 4);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }();
  return found;
}
#else
constexpr std::int64_t kFewRows = product::kRows;
#endif

// c [rows, columns] = a [rows, inner] @ b [inner, columns] (+ c), all row-major with the given strides between rows.
inline void matmul(std::int64_t rows, std::int64_t columns, std::int64_t inner, const float* a, std::int64_t a_stride,
                   const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate) {
#ifdef __x86_64__
  if (torch_multiplies<float>()) {
    return at::native::cpublas::brgemm(rows, columns, inner, a_stride, b_stride, c_stride, accumulate, a, b, c, false);
  }
#endif
  product::matmul(rows, columns, inner, a, a_stride, b, b_stride, c, c_stride, accumulate);
}

}  // namespace dofla
