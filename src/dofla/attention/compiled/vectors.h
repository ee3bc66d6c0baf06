// Vectors of a call, and the states before and after it.
#pragma once

#include "coding.h"
#include "tensor.h"

namespace dofla::cache {

// What the keys of a layer go through, and the queries (KeySmoothing): mean and scale [Hkv, d], or nothing.
using Smoothing = Tensors;

// Vectors [B, H, L, d] in float32 or bfloat16, read and written as float32.
class Vectors {
 public:
  explicit Vectors(const Tensor& t)
      : data_(static_cast<char*>(t.data_ptr())), batch_(t.stride(0)), head_(t.stride(1)), row_(t.stride(2)),
        dim_(t.size(3)), half_(t.scalar_type() == ScalarType::BFloat16) {
    STD_TORCH_CHECK(half_ || t.scalar_type() == ScalarType::Float, "vectors must be float32 or bfloat16");
    STD_TORCH_CHECK(t.stride(3) == 1, "rows must be contiguous");
  }

  // Keys that are read smoothed; or queries, of so many heads for each KV head.
  Vectors(const Tensor& t, const Smoothing& smoothing, std::int64_t queries = 0) : Vectors(t) {
    if (smoothing.empty()) return;
    for (const Tensor& x : smoothing) {
      STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.numel() * std::max<std::int64_t>(queries, 1) == t.size(1) * dim_,
                  "each channel of a KV head has a mean and a scale, in float32");
    }
    queries_ = queries;
    mean_ = smoothing.at(0).const_data_ptr<float>();
    scale_ = smoothing.at(1).const_data_ptr<float>();
  }

  bool half() const { return half_; }
  std::int64_t dim() const { return dim_; }

  // False if the vector holds NaN or infinity; `to` is zeros then.
  bool read(std::int64_t n, std::int64_t h, std::int64_t i, float* __restrict to) const {
    const char* from = at(n, h, i);
    if (half_) {
      const auto* __restrict bits = reinterpret_cast<const std::uint16_t*>(from);
      for (std::int64_t j = 0; j < dim_; ++j) {
        const std::uint32_t wide = static_cast<std::uint32_t>(bits[j]) << 16;
        std::memcpy(to + j, &wide, sizeof wide);
      }
    } else {
      std::memcpy(to, from, dim_ * sizeof(float));
    }
    if (scale_) smooth(h, to);
    if (coding::all_finite(to, dim_)) return true;
    std::fill_n(to, dim_, 0.0f);
    return false;
  }

  void write(std::int64_t n, std::int64_t h, std::int64_t i, const float* from) const {
    char* to = at(n, h, i);
    if (!half_) {
      std::memcpy(to, from, dim_ * sizeof(float));
      return;
    }
    for (std::int64_t j = 0; j < dim_; ++j) reinterpret_cast<c10::BFloat16*>(to)[j] = from[j];
  }

 private:
  char* at(std::int64_t n, std::int64_t h, std::int64_t i) const {
    return data_ + (n * batch_ + h * head_ + i * row_) * (half_ ? 2 : 4);
  }

  void smooth(std::int64_t h, float* __restrict to) const {
    const std::int64_t first = (queries_ ? h / queries_ : h) * dim_;
    const float *__restrict mean = mean_ + first, *__restrict scale = scale_ + first;
    for (std::int64_t j = 0; j < dim_; ++j) to[j] = queries_ ? to[j] * scale[j] : (to[j] - mean[j]) / scale[j];
  }

  char* data_;
  std::int64_t batch_, head_, row_, dim_, queries_ = 0;
  bool half_;
  const float *mean_ = nullptr, *scale_ = nullptr;
};

// The states of a call, which it updates: rows [B, bytes]; or those `pages` [B] of a pool [P, bytes].
struct States {
  Tensor rows;
  std::int64_t count;
  const std::int64_t* pages;

  explicit States(const Tensor& rows) : States(rows, rows.size(0), nullptr) {}
  States(const Tensor& rows, std::int64_t count, const std::int64_t* pages) : rows(rows), count(count), pages(pages) {
    STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Byte && rows.stride(1) == 1, "a state is a row of bytes, one after the other");
  }
};

}  // namespace dofla::cache
