// Causal softmax attention, as in FlashAttention (arXiv 2205.14135): blocks of queries go over blocks of keys, and what they have
// summed is rescaled where a larger score comes.
#pragma once

#include "operands.h"
#include "vectors.h"

#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

namespace dofla::causal {

constexpr std::int64_t kKeys = 8 * kPanel;  // at once
constexpr std::int64_t kRows = 256;         // queries of all heads of a KV head at once, at most

inline std::int64_t queries_at_once(std::int64_t groups) { return std::clamp<std::int64_t>(kRows / groups / 8 * 8, 8, kPanel); }

// Keys and values of a KV head as products take them: those of real tokens, the others being seen by nobody, and zeros behind the
// last. How many of them each query sees, the last of which stands for it itself; 0 if it is not real. And how many come before the
// first that holds NaN or infinity.
template <typename Real>
struct Head {
  std::vector<std::int64_t> tokens, seen;
  std::int64_t sound;
  Unwritten<float> value_rows;
  Operands<Real> key_operands, value_operands;
  const Real *keys, *values;

  // `real` says which tokens are: of `count`, of which the last `queries` ask. All are if it is null.
  Head(const cache::Vectors& key, const cache::Vectors& value, std::int64_t n, std::int64_t h, std::int64_t count, std::int64_t queries,
       const bool* real) {
    for (std::int64_t i = 0; i < count; ++i) {
      const bool there = !real || real[i];
      if (there) tokens.push_back(i);
      if (i >= count - queries) seen.push_back(there ? tokens.size() : 0);
    }
    sound = tokens.size();
    keys = key_operands.across(read(key, n, h).data(), columns(), key.dim());
    value_rows = read(value, n, h);
    values = value_operands.along(value_rows.data(), columns(), value.dim());
  }

 private:
  std::int64_t columns() const { return whole_lanes(tokens.size(), kPanel / kLanes); }

  Unwritten<float> read(const cache::Vectors& from, std::int64_t n, std::int64_t h) {
    const std::int64_t dim = from.dim(), count = tokens.size();
    Unwritten<float> rows(columns() * dim);
    std::fill_n(rows.data() + count * dim, (columns() - count) * dim, 0.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      if (!from.read(n, h, tokens[i], rows.data() + i * dim)) sound = std::min(sound, i);
    }
    return rows;
  }
};

// One thread's scratch memory.
template <typename Real>
class Block {
 public:
  Block(std::int64_t groups, std::int64_t dim, std::int64_t value_dim)
      : groups_(groups), dim_(dim), value_dim_(value_dim), at_once_(queries_at_once(groups)), rows_(at_once_ * groups),
        queries_(rows_ * dim), out_(rows_ * value_dim), best_(rows_), whole_(rows_), unsound_(rows_), rounded_(rows_ * dim),
        scores_(rows_ * kStride), weights_(rows_ * kStride) {}

  // Outputs of the queries from `first` on.
  void attend(const cache::Vectors& query, const Head<Real>& head, std::int64_t n, std::int64_t h, std::int64_t first, float scaling,
              const cache::Vectors& out) {
    const std::int64_t* seen = &head.seen[first];
    const std::int64_t count = std::min<std::int64_t>(at_once_, head.seen.size() - first), rows = count * groups_;
    const std::int64_t end = *std::max_element(seen, seen + count);
    std::fill(queries_.begin() + rows * dim_, queries_.end(), 0.0f);
    for (std::int64_t row = 0; row < rows; ++row) {
      const bool fine = query.read(n, h * groups_ + row % groups_, first + row / groups_, &queries_[row * dim_]);
      unsound_[row] = !fine || seen[row / groups_] > head.sound;
    }
    for (float& x : queries_) x *= scaling;
    const Real* queries = operands_.left(queries_.data(), rows_, dim_, dim_, rounded_);
    std::fill(best_.begin(), best_.end(), kLogZero);
    std::fill(whole_.begin(), whole_.end(), 0.0f);
    for (std::int64_t start = 0; start < end; start += kKeys) {
      const std::int64_t columns = whole_lanes(std::min(kKeys, end - start), kPanel / kLanes);
      times_across(rows_, columns, dim_, queries, head.keys + start * dim_, scores_.data(), kStride);
      for (std::int64_t row = 0; row < rows_; ++row) {
        weigh(row, row < rows ? std::clamp<std::int64_t>(seen[row / groups_] - start, 0, columns) : 0, columns);
      }
      const Real* weights = operands_.left(scores_.data(), rows_, columns, kStride, weights_);
      times_along(rows_, value_dim_, columns, weights, kStride, head.values + start * value_dim_, out_.data(), start > 0);
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      float* __restrict to = &out_[row * value_dim_];
      const float scale = unsound_[row] ? NAN : 1.0f / whole_[row];
      for (std::int64_t j = 0; j < value_dim_; ++j) to[j] = seen[row / groups_] ? to[j] * scale : 0.0f;
      out.write(n, h * groups_ + row % groups_, first + row / groups_, to);
    }
  }

 private:
  static constexpr std::int64_t kStride = kKeys + kLanes;  // no power of two: rows would compete for places of a cache

  // Makes weights of the scores of a row, of which the first `seen` are of tokens that it sees.
  void weigh(std::int64_t row, std::int64_t seen, std::int64_t columns) {
    float* __restrict score = &scores_[row * kStride];
    if (seen > 0) {
      const float before = best_[row], best = best_[row] = largest(score, seen, before);
      if (before > kLogZero && best > before) {
        const float factor = exp_of_negative(before - best);
        whole_[row] *= factor;
        for (std::int64_t j = 0; j < value_dim_; ++j) out_[row * value_dim_ + j] *= factor;
      }
#pragma omp simd
      for (std::int64_t t = 0; t < seen; ++t) score[t] = exp_of_negative(score[t] - best);
      whole_[row] += sum(score, seen);
    }
    std::fill(score + seen, score + columns, 0.0f);
  }

  std::int64_t groups_, dim_, value_dim_, at_once_, rows_;
  std::vector<float> queries_, out_, best_, whole_;
  std::vector<char> unsound_;
  Operands<Real> operands_;
  Unwritten<Real> rounded_;
  Unwritten<float> scores_;
  Unwritten<Real> weights_;
};

// Of queries [B, H, L, d], keys [B, Hkv, P, d] and values [B, Hkv, P, dv], which are real or not [B, Hkv, P], into out [B, H, L, dv].
template <typename Real>
void attend(const Tensor& query, const Tensor& key, const Tensor& value, float scaling, const bool* real, const Tensor& out) {
  const cache::Vectors asked(query), keys(key), values(value), to(out);
  const std::int64_t heads = key.size(1), units = key.size(0) * heads, length = query.size(2), groups = query.size(1) / heads;
  const std::int64_t at_once = queries_at_once(groups), blocks = (length + at_once - 1) / at_once;
  std::vector<std::optional<Head<Real>>> sides(units);
  torch::stable::parallel_for(0, units, 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      const std::int64_t count = key.size(2);
      sides[begin].emplace(keys, values, begin / heads, begin % heads, count, length, real ? real + begin * count : nullptr);
    }
  });
  // The last blocks, which see most, come first; whoever is free takes the next.
  std::atomic<std::int64_t> next = 0;
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      Block<Real> block(groups, keys.dim(), values.dim());
      for (std::int64_t place = next++; place < units * blocks; place = next++) {
        const std::int64_t unit = place % units, first = (blocks - 1 - place / units) * at_once;
        block.attend(asked, *sides[unit], unit / heads, unit % heads, first, scaling, to);
      }
      Operands<Real>::release();
    }
  });
}

}  // namespace dofla::causal
