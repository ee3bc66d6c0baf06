// The exact part of causal hybrid layers: softmax scores for a window and for sinks, the arithmetic of exact.py, merged
// into what the features gave.
#pragma once

#include "matmul.h"
#include "vector.h"

#include <algorithm>
#include <cmath>

namespace dofla::exact {

constexpr std::int64_t kBlock = kChunk;  // rows whose keys are loaded together
constexpr std::int64_t kRows = 16;       // rows whose scores are one product: few more than their windows contain

struct Sizes {
  std::int64_t head_dim, value_dim, window, sinks;
  // Tokens that the windows of some rows cover.
  std::int64_t near(std::int64_t rows) const { return window == 0 ? 0 : rows + window - 1; }
};

// One KV head of one sequence. Near token i is the oldest in the window of row i.
struct Head : HeadInputs {
  std::int64_t rows;
  const float *sink_key, *sink_value, *sink_log_weight;
  const std::int64_t* visible_from;
};

// What the features gave for the rows of a block, from its first on; out is changed.
struct Seen {
  float* out;
  const float* normalizer;
  std::int64_t out_head, normalizer_head;
};

// Does a block at a time. The scores of a row are in the columns of the near tokens of its 16 rows and in those of the
// sinks, both padded to whole vectors.
class Worker {
 public:
  explicit Worker(const Sizes& sizes)
      : s_(sizes), block_columns_(whole_lanes(s_.near(kBlock)) + kRows), near_columns_(whole_lanes(s_.near(kRows))),
        columns_(near_columns_ + whole_lanes(s_.sinks)), keys_(s_.head_dim * block_columns_),
        values_(block_columns_ * s_.value_dim), sink_keys_(s_.head_dim * whole_lanes(s_.sinks)),
        queries_(kBlock * s_.head_dim), scores_(kBlock * columns_), out_(kBlock * s_.value_dim),
        column_weight_((kBlock / kRows) * columns_), band_(kRows * columns_, kLogZero) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      float* row = &band_[i * columns_];
      std::fill(row + i, row + i + s_.window, 0.0f);
      std::fill(row + near_columns_, row + near_columns_ + s_.sinks, 0.0f);
    }
  }

  // Rows first, first + 1, ... of the query heads of a KV head.
  void attend(const Head& head, const Seen& seen, std::int64_t first, std::int64_t groups, float scaling) {
    const std::int64_t rows = std::min(kBlock, head.rows - first);
    load(head, first, rows, scaling);
    for (std::int64_t g = 0; g < groups; ++g) attend_head(head, seen, g, first, rows);
  }

 private:
  // Scaled keys, transposed, and log-weights. Values stay where they are if there are enough of them.
  void load(const Head& head, std::int64_t first, std::int64_t rows, float scaling) {
    const std::int64_t near = s_.near(rows), value_dim = s_.value_dim;
    transpose(head.key + first * head.key_row, head.key_row, near, s_.head_dim, keys_.data(), block_columns_);
    transpose(head.sink_key, s_.head_dim, s_.sinks, s_.head_dim, sink_keys_.data(), whole_lanes(s_.sinks));
    for (float& x : keys_) x *= scaling;
    for (float& x : sink_keys_) x *= scaling;
    std::fill(column_weight_.begin(), column_weight_.end(), 0.0f);
    for (std::int64_t i = 0; i < rows; i += kRows) {
      float* weight = &column_weight_[i / kRows * columns_];
      std::copy_n(head.log_weight + first + i, s_.near(std::min(kRows, rows - i)), weight);
      std::copy_n(head.sink_log_weight, s_.sinks, weight + near_columns_);
    }
    const std::int64_t all = s_.near(kBlock);
    value_ = zero_padded({head.value + first * head.value_row, head.value_row}, near, all, value_dim, values_);
  }

  void attend_head(const Head& head, const Seen& seen, std::int64_t g, std::int64_t first, std::int64_t rows) {
    const std::int64_t dim = s_.head_dim, value_dim = s_.value_dim, sink_columns = columns_ - near_columns_;
    const float* given = head.query + g * head.query_head + first * head.query_row;
    const Rows query = zero_padded({given, head.query_row}, rows, kBlock, dim, queries_);
    float* sink_scores = scores_.data() + near_columns_;
    if (s_.sinks) {
      matmul(kBlock, sink_columns, dim, query.data, query.stride, sink_keys_.data(), sink_columns, sink_scores, columns_, false);
    }
    for (std::int64_t i = 0; near_columns_ > 0 && i < rows; i += kRows) {
      matmul(kRows, near_columns_, dim, query.data + i * query.stride, query.stride, &keys_[i], block_columns_,
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
      matmul(kRows, value_dim, s_.near(kRows), &scores_[i * columns_], columns_, value_.data + i * value_.stride,
             value_.stride, &out_[i * value_dim], value_dim, false);
    }
    if (s_.sinks) {
      matmul(kBlock, value_dim, s_.sinks, sink_scores, columns_, head.sink_value, value_dim, out_.data(), value_dim,
             near_columns_ > 0);
    }
    for (std::int64_t n = 0; n < rows; ++n) {
      if (best[n] > kLogZero / 2) merge(seen, g, n, best[n], mass[n]);
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

  // Two attentions over disjoint keys become one: each weighs as its normalizer.
  void merge(const Seen& seen, std::int64_t g, std::int64_t n, float best, float mass) {
    const float far = seen.normalizer[g * seen.normalizer_head + n], top = std::max(far, best);
    const float far_share = exp_of_negative(far - top), near_share = exp_of_negative(best - top);
    const float scale = 1.0f / (far_share + near_share * mass);
    float* __restrict to = seen.out + g * seen.out_head + n * s_.value_dim;
    const float* __restrict from = out_.data() + n * s_.value_dim;
    const float of_far = far_share * scale, of_near = near_share * scale;
#pragma omp simd
    for (std::int64_t m = 0; m < s_.value_dim; ++m) to[m] = of_far * to[m] + of_near * from[m];
  }

  Sizes s_;
  std::int64_t block_columns_, near_columns_, columns_;
  std::vector<float> keys_, values_, sink_keys_, queries_, scores_, out_, column_weight_, band_;
  Rows value_{};
};

}  // namespace dofla::exact
