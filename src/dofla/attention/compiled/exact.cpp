// The exact part of causal hybrid layers: softmax scores for a window and for sinks, the arithmetic of exact.py, merged
// into what the features gave.
#include "vector.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace dofla {
namespace {

constexpr float kLogZero = -0x1p100f;  // LOG_ZERO of state.py

constexpr std::int64_t kBlock = 64;  // rows whose keys are loaded together
constexpr std::int64_t kRows = 16;   // rows whose scores are one product: few more than their windows contain

std::int64_t padded(std::int64_t n) { return (n + 15) / 16 * 16; }

struct Sizes {
  std::int64_t head_dim, value_dim, window, sinks;
  // Tokens that the windows of some rows cover.
  std::int64_t near(std::int64_t rows) const { return window == 0 ? 0 : rows + window - 1; }
};

// One KV head of one sequence. Near token i is the oldest in the window of row i.
struct Head {
  std::int64_t rows, groups;
  const float *query, *key, *value, *log_weight;
  std::int64_t query_head, query_row, key_row, value_row;
  const float *sink_key, *sink_value, *sink_log_weight;
  const std::int64_t* visible_from;
  float* out;
  const float* normaliser;
  std::int64_t out_head, normaliser_head;
};

// Does a block at a time. The scores of a row are in the columns of the near tokens of its 16 rows and in those of the
// sinks, both padded to whole vectors.
class Worker {
 public:
  explicit Worker(const Sizes& sizes)
      : s_(sizes), block_columns_(padded(s_.near(kBlock)) + kRows), near_columns_(padded(s_.near(kRows))),
        columns_(near_columns_ + padded(s_.sinks)), keys_(s_.head_dim * block_columns_),
        values_(block_columns_ * s_.value_dim), sink_keys_(s_.head_dim * padded(s_.sinks)),
        queries_(kBlock * s_.head_dim), scores_(kBlock * columns_), out_(kBlock * s_.value_dim),
        column_weight_((kBlock / kRows) * columns_), band_(kRows * columns_, kLogZero) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      float* row = &band_[i * columns_];
      std::fill(row + i, row + i + s_.window, 0.0f);
      std::fill(row + near_columns_, row + near_columns_ + s_.sinks, 0.0f);
    }
  }

  void attend(const Head& head, std::int64_t first, float scaling) {
    const std::int64_t rows = std::min(kBlock, head.rows - first);
    load(head, first, rows, scaling);
    for (std::int64_t g = 0; g < head.groups; ++g) attend_head(head, g, first, rows);
  }

 private:
  // Scaled keys, transposed, and log-weights. Values stay where they are if there are enough of them.
  void load(const Head& head, std::int64_t first, std::int64_t rows, float scaling) {
    const std::int64_t near = s_.near(rows), value_dim = s_.value_dim;
    transpose(head.key + first * head.key_row, head.key_row, near, s_.head_dim, keys_.data(), block_columns_);
    transpose(head.sink_key, s_.head_dim, s_.sinks, s_.head_dim, sink_keys_.data(), padded(s_.sinks));
    for (float& x : keys_) x *= scaling;
    for (float& x : sink_keys_) x *= scaling;
    std::fill(column_weight_.begin(), column_weight_.end(), 0.0f);
    for (std::int64_t i = 0; i < rows; i += kRows) {
      float* weight = &column_weight_[i / kRows * columns_];
      std::copy_n(head.log_weight + first + i, s_.near(std::min(kRows, rows - i)), weight);
      std::copy_n(head.sink_log_weight, s_.sinks, weight + near_columns_);
    }
    value_ = head.value + first * head.value_row;
    value_row_ = head.value_row;
    if (rows == kBlock) return;
    for (std::int64_t j = 0; j < near; ++j) std::copy_n(value_ + j * value_row_, value_dim, &values_[j * value_dim]);
    std::fill(values_.begin() + near * value_dim, values_.end(), 0.0f);
    value_ = values_.data();
    value_row_ = value_dim;
  }

  void attend_head(const Head& head, std::int64_t g, std::int64_t first, std::int64_t rows) {
    const std::int64_t dim = s_.head_dim, value_dim = s_.value_dim, sink_columns = columns_ - near_columns_;
    const float* query = head.query + g * head.query_head + first * head.query_row;
    std::int64_t query_row = head.query_row;
    if (rows < kBlock) {
      std::fill(queries_.begin(), queries_.end(), 0.0f);
      for (std::int64_t n = 0; n < rows; ++n) std::copy_n(query + n * query_row, dim, &queries_[n * dim]);
      query = queries_.data();
      query_row = dim;
    }
    float* sink_scores = scores_.data() + near_columns_;
    if (s_.sinks) {
      matmul(kBlock, sink_columns, dim, query, query_row, sink_keys_.data(), sink_columns, sink_scores, columns_, false);
    }
    for (std::int64_t i = 0; near_columns_ > 0 && i < rows; i += kRows) {
      matmul(kRows, near_columns_, dim, query + i * query_row, query_row, &keys_[i], block_columns_,
             &scores_[i * columns_], columns_, false);
    }
    float best[kBlock], mass[kBlock];
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t j = 0; j < s_.sinks; ++j) {
        if (first + n < head.visible_from[j]) sink_scores[n * columns_ + j] = kLogZero;
      }
      exponentials(n, best[n], mass[n]);
    }
    for (std::int64_t i = 0; near_columns_ > 0 && i < rows; i += kRows) {
      matmul(kRows, value_dim, s_.near(kRows), &scores_[i * columns_], columns_, value_ + i * value_row_, value_row_,
             &out_[i * value_dim], value_dim, false);
    }
    if (s_.sinks) {
      matmul(kBlock, value_dim, s_.sinks, sink_scores, columns_, head.sink_value, value_dim, out_.data(), value_dim,
             near_columns_ > 0);
    }
    for (std::int64_t n = 0; n < rows; ++n) {
      if (best[n] > kLogZero / 2) merge(head, g, n, first + n, best[n], mass[n]);
    }
  }

  // Row n of the scores becomes exp(score - best), and 0 where it does not look.
  void exponentials(std::int64_t n, float& best, float& mass) {
    float* __restrict score = scores_.data() + n * columns_;
    const float* __restrict band = band_.data() + n % kRows * columns_;
    const float* __restrict column_weight = column_weight_.data() + n / kRows * columns_;
#pragma omp simd
    for (std::int64_t j = 0; j < columns_; ++j) score[j] += band[j] + column_weight[j];
    const float level = largest(score, columns_, kLogZero);
#pragma omp simd
    for (std::int64_t j = 0; j < columns_; ++j) score[j] = exp_of_negative(score[j] - level);
    best = level;
    mass = sum(score, columns_);
  }

  // Two attentions over disjoint keys become one: each weighs as its normaliser.
  void merge(const Head& head, std::int64_t g, std::int64_t n, std::int64_t row, float best, float mass) {
    const float far = head.normaliser[g * head.normaliser_head + row], top = std::max(far, best);
    const float far_share = exp_of_negative(far - top), near_share = exp_of_negative(best - top);
    const float scale = 1.0f / (far_share + near_share * mass);
    float* __restrict to = head.out + g * head.out_head + row * s_.value_dim;
    const float* __restrict from = out_.data() + n * s_.value_dim;
    const float of_far = far_share * scale, of_near = near_share * scale;
#pragma omp simd
    for (std::int64_t m = 0; m < s_.value_dim; ++m) to[m] = of_far * to[m] + of_near * from[m];
  }

  Sizes s_;
  std::int64_t block_columns_, near_columns_, columns_;
  std::vector<float> keys_, values_, sink_keys_, queries_, scores_, out_, column_weight_, band_;
  const float* value_ = nullptr;
  std::int64_t value_row_ = 0;
};

// query [B, H, L, d]; key, value [B, Hkv, L + window - 1, .], log_weight [B, L + window - 1]; s sinks [B, Hkv, s, .] with
// log-weights [B, s], each seen from row visible_from [B, s] on. Changes out [B, H, L, dv], whose log-normaliser [B, H, L] is given.
void add_exact_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& log_weight, std::int64_t window, const at::Tensor& sink_key,
                         const at::Tensor& sink_value, const at::Tensor& sink_log_weight, const at::Tensor& visible_from,
                         double scaling, const at::Tensor& out, const at::Tensor& normaliser) {
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1 && log_weight.stride(1) == 1 &&
                  sink_key.is_contiguous() && sink_value.is_contiguous() && sink_log_weight.is_contiguous() &&
                  visible_from.is_contiguous() && out.is_contiguous() && normaliser.is_contiguous(),
              "rows must be contiguous");
  const std::int64_t heads = query.size(1), rows = query.size(2), kv_heads = key.size(1), groups = heads / kv_heads;
  const Sizes sizes{query.size(3), value.size(3), window, sink_key.size(2)};
  const std::int64_t blocks = (rows + kBlock - 1) / kBlock;
  at::parallel_for(0, query.size(0) * kv_heads * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    Worker worker(sizes);
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t unit = task / blocks, n = unit / kv_heads, h = unit % kv_heads, first = n * heads + h * groups;
      const Head head{rows, groups,
                      query.const_data_ptr<float>() + n * query.stride(0) + h * groups * query.stride(1),
                      key.const_data_ptr<float>() + n * key.stride(0) + h * key.stride(1),
                      value.const_data_ptr<float>() + n * value.stride(0) + h * value.stride(1),
                      log_weight.const_data_ptr<float>() + n * log_weight.stride(0),
                      query.stride(1), query.stride(2), key.stride(2), value.stride(2),
                      sink_key.const_data_ptr<float>() + unit * sizes.sinks * sizes.head_dim,
                      sink_value.const_data_ptr<float>() + unit * sizes.sinks * sizes.value_dim,
                      sink_log_weight.const_data_ptr<float>() + n * sizes.sinks,
                      visible_from.const_data_ptr<std::int64_t>() + n * sizes.sinks,
                      out.mutable_data_ptr<float>() + first * rows * sizes.value_dim,
                      normaliser.const_data_ptr<float>() + first * rows,
                      rows * sizes.value_dim, rows};
      worker.attend(head, task % blocks * kBlock, static_cast<float>(scaling));
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def(
      "add_exact_attention(Tensor query, Tensor key, Tensor value, Tensor log_weight, int window, Tensor sink_key, "
      "Tensor sink_value, Tensor sink_log_weight, Tensor visible_from, float scaling, Tensor(a!) out, "
      "Tensor normaliser) -> ()");
  library.impl("add_exact_attention", c10::DispatchKey::CPU, &add_exact_attention);
}

}  // namespace dofla
