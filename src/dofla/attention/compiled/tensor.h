// What the operators use of torch: its stable ABI, so that a library runs with any torch from 2.10 on.
#pragma once

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

namespace dofla {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// Numbers that are not written yet, on the CPU, of the type of `like`, with these strides.
template <std::size_t N>
inline Tensor empty_strided(const std::array<std::int64_t, N>& sizes, const std::array<std::int64_t, N>& strides, const Tensor& like) {
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(N, sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

template <std::size_t N>
inline Tensor empty(const std::array<std::int64_t, N>& sizes, const Tensor& like) {
  std::array<std::int64_t, N> strides;
  std::int64_t stride = 1;
  for (std::size_t i = N; i-- > 0; stride *= sizes[i]) strides[i] = stride;
  return empty_strided(sizes, strides, like);
}

// Some of its numbers, from the `offset`-th on, with these strides.
template <std::size_t N>
inline Tensor viewed(const Tensor& t, const std::array<std::int64_t, N>& sizes, const std::array<std::int64_t, N>& strides,
                     std::int64_t offset) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), N, sizes.data(), strides.data(), offset, &made));
  return Tensor(made);
}

// Contiguous, and nobody else's.
inline Tensor copied(const Tensor& t) { return torch::stable::clone(torch::stable::contiguous(t)); }

}  // namespace dofla
