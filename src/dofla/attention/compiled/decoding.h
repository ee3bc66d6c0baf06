// A token of every sequence through a compressed cache.
#pragma once

#include "heavy_hitters.h"

#include <cmath>

namespace dofla::cache {

// Tokens of a part of a tier that grows, which threads share. The first part is what is left, with window and sinks.
constexpr std::int64_t kPart = 2048;

// What the queries of a KV head see of a part: their largest scores, sums of weights, and of the tier's alone [G]; weighted sums
// of values in eight bits, and of rotated ones [G, dv]. And whether the new key and value are finite.
struct Seen {
  std::vector<float> best, whole, mass, out, rotated;
  bool finite;
};

// One thread's scratch memory and what it does with a KV head of a sequence.
class Decoder {
 public:
  explicit Decoder(const Group& group)
      : group_(group), wide_(std::max(group.keys.dim, group.values.dim)), unsound_(group.groups), queries_(group.groups * group.keys.dim),
        rotated_(queries_.size()), beside_(group.groups), vector_(wide_.size()),
        scores_(group.groups * group.columns()) {}

  // What the queries see of one of the parts; with the first, puts the token into the state, and says so: its scores are then
  // somebody else's.
  void see(std::int64_t n, std::int64_t h, std::size_t part, std::vector<Seen>& parts, std::atomic<std::int64_t>& entered) {
    const Group& group = group_;
    const std::int64_t dim = group.keys.dim, first = group.heads[h] * group.groups;
    const std::int64_t end = group.tier.count - (part ? part - 1 : parts.size() - 1) * kPart;
    Seen& seen = parts[part];
    if (!part) seen.finite = code(n, h);
    for (std::int64_t g = 0; g < group.groups; ++g) unsound_[g] = !group.query.read(n, first + g, 0, &queries_[g * dim]);
    begin_ = part ? end - kPart : free_places(group.tier.scores(n, h), end);
    if (!part) entered.fetch_add(1, std::memory_order_release);
    count_ = end - begin_;
    near_.assign(!part, &group.window);
    if (!part && group.sinks) near_.push_back(&*group.sinks);
    columns_ = whole_lanes(count_);
    for (const Tokens* tokens : near_) columns_ += whole_lanes(tokens->count);
    for (float& x : queries_) x *= group.scaling;
    score(n, h);
    for (auto* sums : {&seen.best, &seen.whole, &seen.mass}) sums->resize(group.groups);
    for (auto* sums : {&seen.out, &seen.rotated}) sums->resize(group.groups * group.values.dim);
    const std::int64_t coded = whole_lanes(count_);
    for (std::int64_t g = 0; g < group.groups; ++g) {
      float* __restrict score = &scores_[g * columns_];
      const float best = largest(score, columns_, kLogZero);
#pragma omp simd
      for (std::int64_t t = 0; t < columns_; ++t) score[t] = exp_of_negative(score[t] - best);
      seen.best[g] = best;
      seen.whole[g] = sum(score, columns_);
      seen.mass[g] = sum(score + columns_ - coded, coded);
    }
    average(n, h, seen);
  }

  // Output rows of the query heads by all parts, the last of which this thread has seen; rows of NaN if the token is not
  // finite, or the query.
  void join(std::int64_t n, std::int64_t h, std::vector<Seen>& parts, const Vectors& out) {
    const Group& group = group_;
    const std::int64_t dim = group.values.dim;
    Seen& all = parts[0];
    for (std::int64_t g = 0; g < group.groups; ++g) {
      for (std::size_t part = 1; part < parts.size(); ++part) {
        const Seen& other = parts[part];  // of the tier alone
        const float best = std::max(all.best[g], other.best[g]);
        const float left = exp_of_negative(all.best[g] - best), share = exp_of_negative(other.best[g] - best);
        all.best[g] = best;
        all.whole[g] = left * all.whole[g] + share * other.whole[g];
        all.mass[g] = left * all.mass[g] + share * other.mass[g];
        for (std::int64_t i = g * dim; i < (g + 1) * dim; ++i) {
          all.out[i] *= left;
          all.rotated[i] = left * all.rotated[i] + share * other.rotated[i];
        }
      }
    }
    const coding::Coder coder = group.values.head(h);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups<coding::kHeads>(group.groups, [&](auto g, std::int64_t first) {
        coding::unrotate<block, g>(coder, &all.rotated[first * dim], &all.mass[first], &all.out[first * dim]);
      });
    });
    for (std::int64_t g = 0; g < group.groups; ++g) {
      float* row = &all.out[g * dim];
      const float scale = all.best[g] > kLogZero / 2 ? 1.0f / all.whole[g] : 0.0f;
      for (std::int64_t i = 0; i < dim; ++i) row[i] *= scale;
      if (unsound_[g] || !all.finite) std::fill_n(row, dim, NAN);
      out.write(n, group.heads[h] * group.groups + g, 0, row);
    }
  }

 private:
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

  // The place of the tier for a token that enters: the last free one, or the first, once the token of the least score has left,
  // the oldest of several, and those before it have moved.
  std::int64_t make_room(std::int64_t n, std::int64_t h) {
    const Tokens& tier = group_.tier;
    std::int16_t* scores = tier.scores(n, h);
    const std::int64_t free = free_places(scores, tier.count), place = std::max<std::int64_t>(free - 1, 0);
    if (!free) {
      const std::int64_t old = tier.count - (group_.numbers.newest - 1);
      const std::int64_t leaves = tier.count - 1 - least(std::make_reverse_iterator(scores + tier.count), old);
      copy(tier, tier, n, h, 0, 1, leaves);
      std::copy_backward(scores, scores + leaves, scores + leaves + 1);
    }
    scores[place] = 0;
    return place;
  }

  void score(std::int64_t n, std::int64_t h) {
    const coding::Coder coder = group_.keys.head(h);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups<coding::kHeads>(group_.groups, [&](auto g, std::int64_t first) {
        const float* queries = &queries_[first * coder.dim];
        float *rotated = &rotated_[first * coder.dim], *to = &scores_[first * columns_];
        coding::rotate_query<block, g>(coder, queries, rotated, &beside_[first]);
        // Nobody sees the columns behind tokens.
        const auto weigh = [&](std::int64_t count, const auto& weight) {
          for (std::int64_t i = 0; i < g; ++i) {
            float* __restrict scores = to + i * columns_;
            for (std::int64_t t = 0; t < count; ++t) scores[t] += weight(i, t);
            std::fill(scores + count, scores + whole_lanes(count), kLogZero);
          }
          to += whole_lanes(count);
        };
        for (const Tokens* tokens : near_) {
          coding::scores<block, g>(coder.dim, tokens->row<std::int8_t>(0, n, h, 0), tokens->row<std::int8_t>(1, n, h, 0),
                                   tokens->count, queries, to, columns_);
          weigh(tokens->count, [log_weights = tokens->log_weights(n)](std::int64_t, std::int64_t t) { return log_weights[t]; });
        }
        const Tokens& tier = group_.tier;
        coding::scores<block, g>(coder, tier.row<std::uint8_t>(0, n, h, begin_), tier.row<std::uint8_t>(1, n, h, begin_), count_,
                                 rotated, to, columns_);
        weigh(count_, [beside = &beside_[first]](std::int64_t i, std::int64_t) { return beside[i]; });
      });
    });
  }

  void average(std::int64_t n, std::int64_t h, Seen& seen) {
    const coding::Coder coder = group_.values.head(h);
    coding::with_block(coder.block, [&](auto block) {
      coding::with_groups<coding::kHeads>(group_.groups, [&](auto g, std::int64_t first) {
        const float* weights = &scores_[first * columns_];
        for (const Tokens* tokens : near_) {
          coding::weighed<block, g>(coder.dim, tokens->row<std::int8_t>(2, n, h, 0), tokens->row<std::int8_t>(3, n, h, 0),
                                    tokens->count, weights, columns_, &seen.out[first * coder.dim]);
          weights += whole_lanes(tokens->count);
        }
        const Tokens& tier = group_.tier;
        coding::weighed<block, g>(coder, tier.row<std::uint8_t>(2, n, h, begin_), tier.row<std::uint8_t>(3, n, h, begin_), count_,
                                  weights, columns_, &seen.rotated[first * coder.dim]);
      });
    });
  }

  const Group& group_;
  std::int64_t begin_ = 0, count_ = 0, columns_ = 0;  // of a part: tokens of the tier, and scores
  std::vector<const Tokens*> near_;                   // ... window and sinks
  std::vector<std::int16_t> wide_;
  std::vector<char> unsound_;
  std::vector<float> queries_, rotated_, beside_, vector_;
  Unwritten<float> scores_;
};

// One thread's scratch memory for the scores of a tier, and their update by the queries of a token that has entered.
class Scorer {
 public:
  explicit Scorer(const Group& group) : group_(group), drawing_(group, group.groups, group.tier.count), query_(group.keys.dim) {}

  void update(std::int64_t n, std::int64_t h) {
    const Tokens& tier = group_.tier;
    std::int16_t* scores = tier.scores(n, h);
    const std::int64_t begin = free_places(scores, tier.count), count = tier.count - begin;
    for (std::int64_t g = 0; g < group_.groups; ++g) {
      group_.query.read(n, group_.heads[h] * group_.groups + g, 0, query_.data());
      drawing_.take(g, query_.data());
    }
    drawing_.measure(tier, n, h, group_.groups, count, [&](std::int64_t t) { return begin + t; });
    drawing_.draw(0, count, scores + begin);
  }

 private:
  const Group& group_;
  Drawing drawing_;
  std::vector<float> query_;
};

// Scores of which a thread computes at least so many: another one that sleeps is awake after about as long.
constexpr double kWorthAThread = 500;

inline void decode(const std::vector<Job>& jobs) {
  const std::vector<Unit> units = units_of(jobs);
  double scores = 0;
  std::vector<std::vector<Seen>> seen(units.size());
  std::vector<std::atomic<std::size_t>> left(units.size());  // parts that are not done
  std::vector<std::atomic<std::int64_t>> entered(units.size());
  std::vector<std::pair<std::size_t, std::size_t>> parts;
  std::vector<std::size_t> scored;  // units whose tiers' scores change
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const auto [which, n, h] = units[unit];
    const auto& [numbers, tier] = std::tie(jobs[which].group.numbers, jobs[which].group.tier);
    const std::int64_t free = numbers.grows ? free_places(tier.scores(n, h), tier.count) : 0;
    left[unit] = 1 + (free ? (tier.count - free) / kPart : 0);  // where no place is free, all tokens move
    seen[unit].resize(left[unit]);
    for (std::size_t part = 0; part < left[unit]; ++part) parts.emplace_back(unit, part);
    scores += jobs[which].scores;
    if (jobs[which].group.scored(n, 0)) scored.push_back(unit);
  }
  const std::size_t all = parts.size();
  const auto most = std::min<std::int64_t>(torch::stable::get_num_threads(), all + scored.size());
  const auto threads = std::clamp<std::int64_t>(std::llround(scores / kWorthAThread), 1, most);
  // Scores are updated last, by whoever is free: two threads do not share attention to three heads evenly.
  std::atomic<std::size_t> next = 0;
  torch::stable::parallel_for(0, threads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      Mine<Decoder> decoders;
      std::size_t place = next++;
      for (; place < all; place = next++) {
        const auto [unit, part] = parts[place];
        const auto [which, n, h] = units[unit];
        Decoder& decoder = decoders.of(which, jobs[which].group);
        const Done done{entered[unit]};
        decoder.see(n, h, part, seen[unit], entered[unit]);
        if (!--left[unit]) decoder.join(n, h, seen[unit], jobs[which].out);
      }
      Mine<Scorer> scorers;
      for (; place < all + scored.size(); place = next++) {
        const std::size_t unit = scored[place - all];
        const auto [which, n, h] = units[unit];
        wait_for(entered[unit]);
        scorers.of(which, jobs[which].group).update(n, h);
      }
    }
  });
}

}  // namespace dofla::cache
