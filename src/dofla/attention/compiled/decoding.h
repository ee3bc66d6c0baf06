// A token of every sequence through a memory that fades.
#pragma once

#include "fading.h"

#include <ATen/Parallel.h>

#include <atomic>

namespace dofla::fading {

// One thread's scratch memory and what it does with a KV head of a sequence.
class Decoder {
 public:
  explicit Decoder(const Group& group)
      : group_(group), columns_(whole_lanes(group.window.count)), wide_(std::max(group.keys.dim, group.values.dim)),
        queries_(group.groups * group.keys.dim), turned_(queries_.size()), out_(group.groups * group.values.dim),
        turned_out_(out_.size()), beside_(group.groups), mass_(group.groups), best_(group.groups), whole_(group.groups),
        vector_(wide_.size()) {
    if (group.sinks) columns_ += whole_lanes(group.sinks->count);
    for (const Tokens& tokens : group.stages) columns_ += whole_lanes(tokens.count);
    scores_.resize(group.groups * columns_);
  }

  // The state after; false if a vector holds NaN or infinity.
  bool code(std::int64_t n, std::int64_t h) {
    const Group& group = group_;
    const std::int64_t last = group.window.count - 1;
    copy(group.window, group.window_after, n, h, 1, 0, last);
    if (!pack(group.key, 0, n, h, last) || !pack(group.value, 2, n, h, last)) return false;
    if (group.sinks_after) {
      for (std::int64_t place = 0; place < group.sinks->count; ++place) {
        if (group.sources[n * group.sinks->count + place] == 0) copy(group.window, *group.sinks_after, n, h, 0, place, 1);
      }
    }
    for (std::size_t stage = 0; stage < group.stages.size(); ++stage) {
      const Tokens &before = group.stages[stage], &after = group.stages_after[stage];
      copy(before, after, n, h, 1, 0, before.count - 1);
      move(group.keys, stage, 0, n, h, before.count - 1);
      move(group.values, stage, 2, n, h, before.count - 1);
    }
    return true;
  }

  // Output rows and log-normalisers [groups] of the query heads; false if a query holds NaN or infinity.
  bool attend(std::int64_t n, std::int64_t h, const Vectors& out, float* normaliser) {
    const Group& group = group_;
    const std::int64_t dim = group.keys.dim, first = group.heads[h] * group.groups;
    for (std::int64_t g = 0; g < group.groups; ++g) group.query.read(n, first + g, 0, &queries_[g * dim]);
    if (!coding::all_finite(queries_.data(), group.groups * dim)) return false;
    for (float& x : queries_) x *= group.scaling;
    score(n, h);
    for (std::int64_t g = 0; g < group.groups; ++g) exponentials(g);
    average(n, h);
    for (std::int64_t g = 0; g < group.groups; ++g) {
      float* row = &out_[g * group.values.dim];
      const bool seen = best_[g] > kLogZero / 2;
      const float scale = seen ? 1.0f / whole_[g] : 0.0f;
      for (std::int64_t i = 0; i < group.values.dim; ++i) row[i] *= scale;
      out.write(n, h * group.groups + g, 0, row);
      if (normaliser) normaliser[g] = seen ? best_[g] + std::log(whole_[g]) : kLogZero;
    }
    return true;
  }

  // The key and the value that leave the last stage.
  void leave(std::int64_t n, std::int64_t h, const Vectors& key, const Vectors& value) {
    const Tokens& last = group_.stages.back();
    const std::int64_t stage = group_.keys.stages - 1;
    remember(group_.keys.head(h), stage, last.row<std::uint8_t>(0, n, h, 0), last.row<std::uint8_t>(1, n, h, 0));
    key.write(n, h, 0, vector_.data());
    remember(group_.values.head(h), stage, last.row<std::uint8_t>(2, n, h, 0), last.row<std::uint8_t>(3, n, h, 0));
    value.write(n, h, 0, vector_.data());
  }

 private:
  bool pack(const Vectors& vectors, std::int64_t part, std::int64_t n, std::int64_t h, std::int64_t place) {
    const std::int64_t dim = group_.window.widths[part];
    const Tokens& after = group_.window_after;
    vectors.read(n, group_.heads[h], 0, vector_.data());
    if (after.log_weights(n)[place] <= kLogZero) std::fill_n(vector_.begin(), dim, 0.0f);
    if (!coding::all_finite(vector_.data(), dim)) return false;
    coding::pack(vector_.data(), dim, after.row<std::int8_t>(part, n, h, place), after.row<std::int8_t>(part + 1, n, h, place));
    return true;
  }

  // What enters a stage: the oldest of the window or of the stage before.
  void move(const Coders& coders, std::int64_t stage, std::int64_t part, std::int64_t n, std::int64_t h, std::int64_t place) {
    const coding::Coder coder = coders.head(h);
    const Tokens& after = group_.stages_after[stage];
    auto *codes = after.row<std::uint8_t>(part, n, h, place), *scales = after.row<std::uint8_t>(part + 1, n, h, place);
    coding::with_block(coder.block, [&](auto block) {
      if (stage == 0) {
        const Tokens& from = group_.window;
        coding::encode<block>(coder, from.row<std::int8_t>(part, n, h, 0), *from.row<std::int8_t>(part + 1, n, h, 0),
                              wide_.data(), codes, scales);
      } else {
        const Tokens& from = group_.stages[stage - 1];
        coding::age<block>(coder, stage - 1, from.row<std::uint8_t>(part, n, h, 0),
                           from.row<std::uint8_t>(part + 1, n, h, 0), codes, scales);
      }
    });
  }

  // A token of a stage as vector_, straight.
  void remember(const coding::Coder& coder, std::int64_t stage, const std::uint8_t* codes, const std::uint8_t* scales) {
    const float one = 1.0f;
    std::vector<float> turned(coder.dim);
    std::fill_n(vector_.begin(), coder.dim, 0.0f);
    coding::with_block(coder.block, [&](auto block) {
      coding::decode<block>(coder, stage, codes, scales, turned.data());
      coding::straighten<block, 1>(coder, turned.data(), &one, vector_.data());
    });
  }

  void score(std::int64_t n, std::int64_t h) {
    const Group& group = group_;
    const coding::Coder coder = group.keys.head(h);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups(group.groups, [&](auto g, std::int64_t first) {
        const float* queries = &queries_[first * coder.dim];
        float *turned = &turned_[first * coder.dim], *to = &scores_[first * columns_];
        coding::against<block, g>(coder, queries, turned, &beside_[first]);
        const auto exact = [&](const Tokens& tokens) {
          coding::scores<block, g>(coder.dim, tokens.row<std::int8_t>(0, n, h, 0), tokens.row<std::int8_t>(1, n, h, 0),
                                   tokens.count, queries, to, columns_);
          for (std::int64_t i = 0; i < g; ++i) weigh(tokens, n, 0.0f, to + i * columns_);
          to += whole_lanes(tokens.count);
        };
        exact(group.window_after);
        if (group.sinks) exact(sinks());
        for (std::size_t stage = 0; stage < group.stages.size(); ++stage) {
          const Tokens& tokens = group.stages_after[stage];
          coding::scores<block, g>(coder, stage, tokens.row<std::uint8_t>(0, n, h, 0), tokens.row<std::uint8_t>(1, n, h, 0),
                                   tokens.count, turned, to, columns_);
          for (std::int64_t i = 0; i < g; ++i) weigh(tokens, n, beside_[first + i], to + i * columns_);
          to += whole_lanes(tokens.count);
        }
      });
    });
  }

  // Scores of some tokens with their log-weights; nobody sees the columns behind them.
  void weigh(const Tokens& tokens, std::int64_t n, float added, float* __restrict scores) {
    const float* __restrict log_weight = tokens.log_weights(n);
#pragma omp simd
    for (std::int64_t t = 0; t < tokens.count; ++t) scores[t] += added + log_weight[t];
    std::fill(scores + tokens.count, scores + whole_lanes(tokens.count), kLogZero);
  }

  void exponentials(std::int64_t g) {
    float* __restrict score = &scores_[g * columns_];
    const float best = largest(score, columns_, kLogZero);
#pragma omp simd
    for (std::int64_t t = 0; t < columns_; ++t) score[t] = exp_of_negative(score[t] - best);
    best_[g] = best;
    whole_[g] = sum(score, columns_);
  }

  void average(std::int64_t n, std::int64_t h) {
    const Group& group = group_;
    const coding::Coder coder = group.values.head(h);
    std::fill(out_.begin(), out_.end(), 0.0f);
    std::fill(turned_out_.begin(), turned_out_.end(), 0.0f);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups(group.groups, [&](auto g, std::int64_t first) {
        float *to = &out_[first * coder.dim], *turned = &turned_out_[first * coder.dim];
        const float* weights = &scores_[first * columns_];
        const auto exact = [&](const Tokens& tokens) {
          coding::weighed<block, g>(coder.dim, tokens.row<std::int8_t>(2, n, h, 0), tokens.row<std::int8_t>(3, n, h, 0),
                                    tokens.count, weights, columns_, to);
          weights += whole_lanes(tokens.count);
        };
        exact(group.window_after);
        if (group.sinks) exact(sinks());
        const std::int64_t coded = columns_ - (weights - &scores_[first * columns_]);
        for (std::int64_t i = 0; i < g; ++i) mass_[first + i] = sum(weights + i * columns_, coded);
        for (std::size_t stage = 0; stage < group.stages.size(); ++stage) {
          const Tokens& tokens = group.stages_after[stage];
          coding::weighed<block, g>(coder, stage, tokens.row<std::uint8_t>(2, n, h, 0), tokens.row<std::uint8_t>(3, n, h, 0),
                                    tokens.count, weights, columns_, turned);
          weights += whole_lanes(tokens.count);
        }
        coding::straighten<block, g>(coder, turned, &mass_[first], to);
      });
    });
  }

  const Tokens& sinks() const { return group_.sinks_after ? *group_.sinks_after : *group_.sinks; }

  const Group& group_;
  std::int64_t columns_;
  std::vector<std::int16_t> wide_;
  std::vector<float> queries_, turned_, out_, turned_out_, beside_, mass_, best_, whole_, vector_, scores_;
};

inline Tensors decode(const Group& group, at::ScalarType type, bool behind) {
  const std::int64_t heads = group.keys.heads, queries = heads * group.groups;
  const auto options = at::TensorOptions().dtype(behind ? at::kFloat : type);
  Tensors found{at::empty({group.batch, queries, 1, group.values.dim}, options)};
  const Vectors out(found[0]);
  std::optional<Vectors> key, value;
  float* normaliser = nullptr;
  if (behind) {
    found.push_back(at::empty({group.batch, queries, 1}, options));
    found.push_back(at::empty({group.batch, heads, 1, group.keys.dim}, options));
    found.push_back(at::empty({group.batch, heads, 1, group.values.dim}, options));
    found.push_back(at::empty({group.batch, 1}, options));
    normaliser = found[1].mutable_data_ptr<float>();
    key.emplace(found[2]);
    value.emplace(found[3]);
    std::copy(group.leaving.begin(), group.leaving.end(), found[4].mutable_data_ptr<float>());
  }
  std::atomic<bool> finite{true};
  at::parallel_for(0, group.units(), 1, [&](std::int64_t begin, std::int64_t end) {
    Decoder decoder(group);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t n = unit / heads, h = unit % heads;
      float* own = normaliser ? normaliser + unit * group.groups : nullptr;
      if (!decoder.code(n, h) || !decoder.attend(n, h, out, own)) {
        finite = false;
        return;
      }
      if (behind) decoder.leave(n, h, *key, *value);
    }
  });
  if (!finite) return {};
  const Tensors after = group.after();
  found.insert(found.end(), after.begin(), after.end());
  return found;
}

}  // namespace dofla::fading
