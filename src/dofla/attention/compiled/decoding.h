// A token of every sequence through a compressed cache.
#pragma once

#include "heavy_hitters.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>

namespace dofla::cache {

// One thread's scratch memory and what it does with a KV head of a sequence.
class Decoder {
 public:
  explicit Decoder(const Group& group)
      : group_(group), drawing_(group, group.groups, group.tier.count),
        wide_(std::max(group.keys.dim, group.values.dim)), unsound_(group.groups), queries_(group.groups * group.keys.dim),
        rotated_(queries_.size()), out_(group.groups * group.values.dim), rotated_out_(out_.size()), beside_(group.groups),
        mass_(group.groups), best_(group.groups), whole_(group.groups), vector_(wide_.size()),
        scores_(group.groups * group.columns()) {}

  // Puts the token into the state; false if the key or the value holds NaN or infinity.
  bool code(std::int64_t n, std::int64_t h) {
    const Group& group = group_;
    const std::int64_t last = group.window.count - 1;
    if (group.entering[n] > kLogZero) enter(group, group.window, 0, group.tier, make_room(n, h), n, h, wide_);
    for (std::int64_t place = 0; group.sinks && place < group.sinks->count; ++place) {
      if (group.sources[n * group.sinks->count + place] == 0) copy(group.window, *group.sinks, n, h, 0, place, 1);
    }
    copy(group.window, group.window, n, h, 1, 0, last);
    return pack(group, 0, group.window.log_weights(n)[last] <= kLogZero, group.window, last, n, h, vector_);
  }

  // Output rows of the query heads; rows of NaN if the token is not `finite`, or the query.
  void attend(std::int64_t n, std::int64_t h, bool finite, const Vectors& out) {
    const Group& group = group_;
    const std::int64_t dim = group.keys.dim, first = group.heads[h] * group.groups;
    for (std::int64_t g = 0; g < group.groups; ++g) {
      unsound_[g] = !group.query.read(n, first + g, 0, &queries_[g * dim]) || !finite;
    }
    hidden_ = free_places(group.tier.scores(n, h), group.tier.count);
    columns_ = group.columns() + whole_lanes(group.tier.count - hidden_) - whole_lanes(group.tier.count);
    draw(n, h);
    for (float& x : queries_) x *= group.scaling;
    score(n, h);
    for (std::int64_t g = 0; g < group.groups; ++g) exponentials(g);
    average(n, h);
    for (std::int64_t g = 0; g < group.groups; ++g) {
      float* row = &out_[g * group.values.dim];
      const float scale = best_[g] > kLogZero / 2 ? 1.0f / whole_[g] : 0.0f;
      for (std::int64_t i = 0; i < group.values.dim; ++i) row[i] *= scale;
      if (unsound_[g]) std::fill_n(row, group.values.dim, NAN);
      out.write(n, first + g, 0, row);
    }
  }

 private:
  // The place of the tier for a token that enters: the last free one, or the first, once the token of the least score has left,
  // the oldest of several, and those before it have moved.
  std::int64_t make_room(std::int64_t n, std::int64_t h) {
    const Tokens& tier = group_.tier;
    std::int16_t* scores = tier.scores(n, h);
    const std::int64_t free = free_places(scores, tier.count), newest = group_.numbers.newest - 1;
    if (!free) {
      const std::int16_t lowest = least(scores + newest, tier.count - newest);
      std::int64_t leaves = tier.count - 1;
      while (scores[leaves] != lowest) --leaves;
      copy(tier, tier, n, h, 0, 1, leaves);
      std::copy_backward(scores, scores + leaves, scores + leaves + 1);
    }
    const std::int64_t place = std::max<std::int64_t>(free - 1, 0);
    scores[place] = 0;
    return place;
  }

  // The scores of the tier's tokens after the queries.
  void draw(std::int64_t n, std::int64_t h) {
    if (!group_.scored(n, 0)) return;
    const Tokens& tier = group_.tier;
    for (std::int64_t g = 0; g < group_.groups; ++g) drawing_.take(g, &queries_[g * group_.keys.dim]);
    drawing_.measure(tier, n, h, group_.groups, tier.count - hidden_, [&](std::int64_t t) { return hidden_ + t; });
    drawing_.draw(0, tier.count - hidden_, tier.scores(n, h) + hidden_);
  }

  void score(std::int64_t n, std::int64_t h) {
    const Group& group = group_;
    const coding::Coder coder = group.keys.head(h);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups(group.groups, [&](auto g, std::int64_t first) {
        const float* queries = &queries_[first * coder.dim];
        float *rotated = &rotated_[first * coder.dim], *to = &scores_[first * columns_];
        coding::rotate_query<block, g>(coder, queries, rotated, &beside_[first]);
        const auto exact = [&](const Tokens& tokens) {
          coding::scores<block, g>(coder.dim, tokens.row<std::int8_t>(0, n, h, 0), tokens.row<std::int8_t>(1, n, h, 0),
                                   tokens.count, queries, to, columns_);
          for (std::int64_t i = 0; i < g; ++i) weigh_exact(tokens, n, to + i * columns_);
          to += whole_lanes(tokens.count);
        };
        exact(group.window);
        if (group.sinks) exact(*group.sinks);
        const Tokens& tier = group.tier;
        coding::scores<block, g>(coder, tier.row<std::uint8_t>(0, n, h, hidden_), tier.row<std::uint8_t>(1, n, h, hidden_),
                                 tier.count - hidden_, rotated, to, columns_);
        for (std::int64_t i = 0; i < g; ++i) weigh_coded(beside_[first + i], to + i * columns_);
      });
    });
  }

  // Scores with the log-weights of their tokens; nobody sees the columns behind them.
  void weigh_exact(const Tokens& tokens, std::int64_t n, float* __restrict scores) {
    const float* __restrict log_weight = tokens.log_weights(n);
#pragma omp simd
    for (std::int64_t t = 0; t < tokens.count; ++t) scores[t] += log_weight[t];
    std::fill(scores + tokens.count, scores + whole_lanes(tokens.count), kLogZero);
  }

  void weigh_coded(float added, float* __restrict scores) {
    const std::int64_t count = group_.tier.count - hidden_;
#pragma omp simd
    for (std::int64_t t = 0; t < count; ++t) scores[t] += added;
    std::fill(scores + count, scores + whole_lanes(count), kLogZero);
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
    std::fill(rotated_out_.begin(), rotated_out_.end(), 0.0f);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups(group.groups, [&](auto g, std::int64_t first) {
        float *to = &out_[first * coder.dim], *rotated = &rotated_out_[first * coder.dim];
        const float* weights = &scores_[first * columns_];
        const auto exact = [&](const Tokens& tokens) {
          coding::weighed<block, g>(coder.dim, tokens.row<std::int8_t>(2, n, h, 0), tokens.row<std::int8_t>(3, n, h, 0),
                                    tokens.count, weights, columns_, to);
          weights += whole_lanes(tokens.count);
        };
        exact(group.window);
        if (group.sinks) exact(*group.sinks);
        const std::int64_t coded = columns_ - (weights - &scores_[first * columns_]);
        for (std::int64_t i = 0; i < g; ++i) mass_[first + i] = sum(weights + i * columns_, coded);
        const Tokens& tier = group.tier;
        coding::weighed<block, g>(coder, tier.row<std::uint8_t>(2, n, h, hidden_), tier.row<std::uint8_t>(3, n, h, hidden_),
                                  tier.count - hidden_, weights, columns_, rotated);
        coding::unrotate<block, g>(coder, rotated, &mass_[first], to);
      });
    });
  }

  const Group& group_;
  std::int64_t columns_ = 0, hidden_ = 0;  // free slots in front of the tier have no columns
  Drawing drawing_;
  std::vector<std::int16_t> wide_;
  std::vector<char> unsound_;
  std::vector<float> queries_, rotated_, out_, rotated_out_, beside_, mass_, best_, whole_, vector_;
  Unwritten<float> scores_;
};

// Scores of which a thread computes at least so many: waking another one takes as long.
constexpr double kWorthAThread = 2000;

inline void decode(const std::vector<Job>& jobs) {
  const std::vector<Unit> units = units_of(jobs);
  double scores = 0;
  for (const Unit& unit : units) scores += jobs[unit.group].scores;
  const std::int64_t most = std::min<std::int64_t>(at::get_num_threads(), units.size());
  const auto threads = std::clamp<std::int64_t>(std::llround(scores / kWorthAThread), 1, most);
  std::atomic<std::size_t> next = 0;
  at::parallel_for(0, threads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      Mine<Decoder> mine;
      for (std::size_t place = next++; place < units.size(); place = next++) {
        const auto [which, n, h] = units[place];
        Decoder& decoder = mine.of(which, jobs[which].group);
        decoder.attend(n, h, decoder.code(n, h), jobs[which].out);
      }
    }
  });
}

}  // namespace dofla::cache
