// What a call that begins a sequence leaves, where the importance of its tokens is known (prefill.py): of each KV head the tokens
// of the highest scores, which alone are packed and coded.
#pragma once

#include "lines.h"
#include "operands.h"

#include <cmath>

namespace dofla::cache {

constexpr std::int64_t kAsked = 32;  // queries that are done at once

// The last queries [B, H, Q, d] of a call, and how many they are.
struct Lately {
  Vectors query;
  std::int64_t asks;
};

// How many tokens of a call the last query sees outside window and sinks.
inline std::int64_t far_tokens(const Group& group) {
  return std::max<std::int64_t>(group.length - group.numbers.window - group.numbers.sinks, 0);
}

// Columns of their scores: whole panels, so that products are of one size (operands.h).
inline std::int64_t columns_of(const Group& group) { return whole_lanes(far_tokens(group), kPanel / kLanes); }

// The keys of those of a KV head, as products take them.
template <typename Real>
struct FarKeys {
  Unwritten<float> rows;
  Operands<Real> operands;
  const Real* keys;

  FarKeys(const Group& group, std::int64_t n, std::int64_t h) : rows(columns_of(group) * group.keys.dim) {
    const std::int64_t dim = group.keys.dim, far = far_tokens(group), columns = columns_of(group);
    for (std::int64_t t = 0; t < far; ++t) group.key.read(n, group.heads[h], group.numbers.sinks + t, rows.data() + t * dim);
    std::fill_n(rows.data() + far * dim, (columns - far) * dim, 0.0f);
    keys = operands.across(rows.data(), columns, dim);
  }
};

// One thread's scratch memory for the attention that a KV head's tokens drew from queries.
template <typename Real>
class Asking {
 public:
  Asking(const Group& group, const Lately& lately)
      : group_(group), lately_(lately), dim_(group.keys.dim), rows_(kAsked * group.groups), far_(far_tokens(group)),
        columns_(columns_of(group)), stride_(whole_lanes(columns_, 512 / kLanes) + kLanes), queries_(rows_ * dim_),
        rounded_(rows_ * dim_), scores_(rows_ * stride_) {}

  // Adds to `drawn`, one for each far token, what it drew from queries `first` and after (drawn.drawn_lately).
  void ask(std::int64_t n, std::int64_t h, std::int64_t first, const Real* keys, float* __restrict drawn) {
    const std::int64_t rows = std::min(kAsked, lately_.asks - first);
    std::fill(queries_.begin(), queries_.end(), 0.0f);
    for (std::int64_t row = 0; row < rows * group_.groups; ++row) {
      const std::int64_t head = group_.heads[h] * group_.groups + row % group_.groups;
      lately_.query.read(n, head, first + row / group_.groups, &queries_[row * dim_]);
    }
    for (float& x : queries_) x *= group_.scaling;
    const Real* queries = operands_.left(queries_.data(), rows_, dim_, dim_, rounded_);
    times_across(rows_, columns_, dim_, queries, keys, scores_.data(), stride_);
    for (std::int64_t row = 0; row < rows * group_.groups; ++row) {
      const std::int64_t after = lately_.asks - 1 - (first + row / group_.groups), seen = far_ - after;
      if (seen <= 0) continue;
      float* __restrict score = &scores_[row * stride_];
      const float level = largest(score, seen, kLogZero);
#pragma omp simd
      for (std::int64_t t = 0; t < seen; ++t) score[t] = exp_of_negative(score[t] - level);
      const float whole = sum(score, seen), decay = std::pow(1.0f - 1.0f / kDecay, static_cast<float>(after));
      const float weight = decay / (whole * whole);
#pragma omp simd
      for (std::int64_t t = 0; t < seen; ++t) drawn[t] += score[t] * score[t] * weight;
    }
  }

  static void release() { Operands<Real>::release(); }

 private:
  const Group& group_;
  const Lately& lately_;
  std::int64_t dim_, rows_, far_, columns_, stride_;  // the last: of few sizes, and of no power of two
  std::vector<float> queries_;
  Operands<Real> operands_;
  Unwritten<Real> rounded_;
  Unwritten<float> scores_;
};

// The tokens of a KV head's tier, the newest first, whose scores are written; `drawn` may be null.
inline std::vector<std::int32_t> choose(const Group& group, std::int64_t n, std::int64_t h, const float* importance, const float* drawn) {
  const std::int64_t sinks = group.numbers.sinks, slots = group.numbers.slots, end = group.length - group.numbers.window;
  const std::int64_t count = std::max<std::int64_t>(end - sinks, 0), taken = std::min(count, slots);
  std::vector<float> score(count), later(count);
  for (std::int64_t t = 0; t < count; ++t) {
    const auto sound = [](float x) { return x > 0.0f ? x : 0.0f; };  // 0 for NaN
    const float lately = drawn ? sound(drawn[t]) : 0.0f, own = sound(importance[sinks + t]);
    score[t] = sinks + t >= end - group.numbers.newest ? INFINITY : own + kLatelyWeight * lately;
    later[t] = std::min(__builtin_rintf((own + lately) * kGain), static_cast<float>(kMostScore));
  }
  std::vector<std::int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (taken < count) {
    std::nth_element(order.begin(), order.begin() + taken, order.end(),
                     [&](auto a, auto b) { return score[a] != score[b] ? score[a] > score[b] : a > b; });
    order.resize(taken);
  }
  std::sort(order.begin(), order.end(), std::greater<>());
  std::int16_t* after = group.tier.scores(n, h) + slots - taken;
  for (std::int32_t& token : order) {
    *after++ = group.numbers.grows ? 0 : static_cast<std::int16_t>(later[token]);
    token += static_cast<std::int32_t>(sinks);
  }
  return order;
}

// Tokens from[0], from[1], ... of a call, up to kLanes, as places `place` and after of the tier.
inline void enter_apart(const Group& group, const std::int32_t* from, std::int64_t count, std::int64_t place, std::int64_t n, std::int64_t h,
                        Packing& scratch) {
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    std::vector<std::int8_t> integers(count * coder.dim), exponents(count);
    for (std::int64_t t = 0; t < count; ++t) {
      (part == 0 ? group.key : group.value).read(n, group.heads[h], from[t], scratch.vector.data());
      coding::pack(scratch.vector.data(), coder.dim, &integers[t * coder.dim], &exponents[t]);
    }
    const auto rows = [](void* data, std::int64_t stride) { return coding::BytesOf{static_cast<std::uint8_t*>(data), stride}; };
    const auto of_tier = [&](std::int64_t which) { return rows(group.tier.row<char>(which, n, h, place), group.tier.widths[which]); };
    coding::with_block(coder.block, [&](auto block) {
      coding::encode<block>(coder, rows(integers.data(), coder.dim), rows(exponents.data(), 1), count, scratch.together, of_tier(part),
                            of_tier(part + 1));
    });
  }
}

// All of it, of the groups of a layer; importance [B, Hkv, L].
template <typename Real>
void retain(const std::vector<Job>& jobs, const Tensor& importance, const Lately& lately) {
  const std::vector<Unit> units = units_of(jobs);
  const std::int64_t parts = (lately.asks + kAsked - 1) / kAsked, all = units.size();
  std::vector<std::optional<FarKeys<Real>>> keys(all);
  torch::stable::parallel_for(0, parts ? all : 0, 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) keys[begin].emplace(jobs[units[begin].group].group, units[begin].n, units[begin].h);
  });
  std::vector<std::vector<float>> drawn(all * parts);
  torch::stable::parallel_for(0, all * parts, 1, [&](std::int64_t begin, std::int64_t end) {
    Mine<Asking<Real>> mine;
    for (std::int64_t place = begin; place < end; ++place) {
      const Unit& unit = units[place / parts];
      const Group& group = jobs[unit.group].group;
      drawn[place].resize(far_tokens(group));
      if (!drawn[place].empty() && !group.numbers.grows) {
        mine.of(unit.group, group, lately).ask(unit.n, unit.h, place % parts * kAsked, keys[place / parts]->keys, drawn[place].data());
      }
    }
    Asking<Real>::release();
  });
  std::vector<std::vector<std::int32_t>> chosen(all);
  torch::stable::parallel_for(0, all, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t place = begin; place < end; ++place) {
      const auto [which, n, h] = units[place];
      const Group& group = jobs[which].group;
      for (std::int64_t part = 1; part < parts; ++part) {
        for (std::size_t t = 0; t < drawn[place * parts].size(); ++t) drawn[place * parts][t] += drawn[place * parts + part][t];
      }
      const float* of_head = importance.const_data_ptr<float>() + (n * importance.size(1) + group.heads[h]) * group.length;
      chosen[place] = choose(group, n, h, of_head, parts ? drawn[place * parts].data() : nullptr);
      Packing scratch(group);
      for (std::int64_t held = group.window.count, i = std::max<std::int64_t>(group.length - held, 0); i < group.length; ++i) {
        pack(group, i, false, group.window, held - group.length + i, n, h, scratch.vector);
      }
      for (std::int64_t sink = 0; group.sinks && sink < group.sinks->count; ++sink) {
        const std::int64_t source = group.sources[n * group.sinks->count + sink] - group.window.count;
        if (source >= 0) pack(group, source, false, *group.sinks, sink, n, h, scratch.vector);
      }
    }
  });
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;  // of a unit, from a place on
  for (std::int64_t place = 0; place < all; ++place) {
    for (std::size_t first = 0; first < chosen[place].size(); first += kLanes) pieces.emplace_back(place, first);
  }
  torch::stable::parallel_for(0, pieces.size(), 1, [&](std::int64_t begin, std::int64_t end) {
    Mine<Packing> mine;
    for (; begin < end; ++begin) {
      const auto [place, first] = pieces[begin];
      const auto [which, n, h] = units[place];
      const Group& group = jobs[which].group;
      const std::int64_t there = chosen[place].size(), count = std::min<std::int64_t>(there - first, kLanes);
      enter_apart(group, &chosen[place][first], count, group.tier.count - there + first, n, h, mine.of(which, group));
    }
  });
}

}  // namespace dofla::cache
