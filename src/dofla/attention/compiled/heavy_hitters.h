// Eviction by score: the arithmetic of coding/heavy_hitters.py. All of it is of integers or of single correctly rounded
// operations, none of which may be fused with another.
#pragma once

#include "group.h"
#include "whole.h"

#include <cmath>
#include <utility>

namespace dofla::cache {

// The place of the least of `count` scores, the foremost of several; evicted tokens do not count.
template <typename Scores>
inline std::int64_t least(const Scores& score, std::int64_t count) {
  std::uint16_t best = kMostScore;  // below what kEvicted is
#pragma omp simd reduction(min : best)
  for (std::int64_t t = 0; t < count; ++t) best = std::min<std::uint16_t>(best, score[t]);
  return std::find(score, score + count, best) - score;
}

// How many places of a tier are free: the foremost.
inline std::int64_t free_places(const std::int16_t* score, std::int64_t count) {
  return std::partition_point(score, score + count, [](std::int16_t x) { return x == kFree; }) - score;
}

// One thread's scratch memory for queries of a KV head, `rows` of them, and tokens of the tier, up to `count`.
class Drawing {
 public:
  Drawing(const Group& group, std::int64_t rows, std::int64_t count)
      : group_(group), dim_(group.keys.dim), blocks_(dim_ / group.keys.block), stride_(whole_lanes(count, kAside)),
        across_(whole_lanes(dim_)), fineness_(dim_), power_(rows), rotated_query_(4 * across_), units_(rows * blocks_),
        rotation_(dim_ * across_), integers_(rows * dim_), rotated_(rows * dim_), tile_(kLanes * dim_),
        numbers_(dim_ / kPair * stride_), key_units_(blocks_ * stride_), steps_(rows * stride_), drawn_(stride_),
        gain_(stride_), bytes_(dim_) {}

  // A query [d] as row `row`.
  void take(std::int64_t row, const float* query) {
    std::int8_t exponent;
    coding::pack(query, dim_, bytes_.data(), &exponent);
    std::copy(bytes_.begin(), bytes_.end(), &integers_[row * dim_]);
    power_[row] = coding::power_of_two(exponent);
  }

  // Steps of the first `rows` queries and `count` tokens, of which token(t) is the place in `tokens`.
  template <typename Token>
  void measure(const Tokens& tokens, std::int64_t n, std::int64_t h, std::int64_t rows, std::int64_t count, const Token& token) {
    const coding::Coder coder = group_.keys.head(h);
    coding::with_block(coder.block, [&](auto block) {
      rotate_queries<block>(h, rows);
      unpack<block>(coder, tokens, n, h, count, token);
      for (std::int64_t t = 0; t < count; t += kAside * kLanes) {
        coding::with_groups(rows, [&](auto r, std::int64_t first) { count_steps<block, r>(first, t); });
      }
    });
  }

  // heavy_hitters._drawn: scores of `count` tokens after the queries of all heads, of which `first` is the first row.
  void draw(std::int64_t first, std::int64_t count, std::int16_t* __restrict score) {
    float *__restrict drawn = drawn_.data(), *__restrict gain = gain_.data();
    std::fill_n(gain, count, 0.0f);
    for (std::int64_t g = 0; g < group_.groups; ++g) {
      const float* __restrict steps = &steps_[(first + g) * stride_];
#pragma omp simd
      for (std::int64_t t = 0; t < count; ++t) drawn[t] = score[t] < 0 ? -2.0f * kMostSteps : steps[t];
      const float top = largest(drawn, count, -2.0f * kMostSteps);
#pragma omp simd
      for (std::int64_t t = 0; t < count; ++t) {
        const float apart = top - drawn[t], below = apart > 0.0f ? apart : 0.0f;
        drawn[t] = below < kLeastSteps ? below * static_cast<float>(-M_LN2 / kOctave) : -100.0f;
      }
      // heavy_hitters.WEIGHTS: none of those powers of two is so near the middle between two integers that this would miss it.
#pragma omp simd
      for (std::int64_t t = 0; t < count; ++t) drawn[t] = __builtin_rintf(4096.0f * exp_of_negative(drawn[t]));
      const float total = std::max(sum(drawn, count), 1.0f);
#pragma omp simd
      for (std::int64_t t = 0; t < count; ++t) {
        const float share = drawn[t] / total;
        gain[t] += __builtin_rintf(share * share * kGain);
      }
    }
#pragma omp simd
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int32_t before = score[t], decayed = before - (before + kDecay - 1) / kDecay;
      score[t] = before < 0 ? before : std::min(decayed + static_cast<std::int32_t>(gain[t]), kMostScore);
    }
  }

 private:
  // Coder.rotate_query_integer
  template <int N>
  void rotate_queries(std::int64_t h, std::int64_t rows) {
    if (h != head_) coding::whole_columns(group_.keys.head(h).back, dim_, rotation_.data(), across_, fineness_.data());
    head_ = h;
    const auto* rotation = reinterpret_cast<const float*>(rotation_.data());
    coding::with_groups(rows, [&](auto r, std::int64_t first) {
      for (std::int64_t j = 0; j < dim_; j += kLanes) {
        Sums sum[r] = {};
        for (std::int64_t i = 0; i < dim_; i += kPair) {
          const Sums numbers = load_numbers(rotation + i / kPair * across_ + j);
          for (int n = 0; n < r; ++n) sum[n] = plus_products(sum[n], numbers, everywhere(&integers_[(first + n) * dim_ + i]));
        }
        for (int n = 0; n < r; ++n) store(&rotated_query_[n * across_ + j], as_floats(sum[n]));
      }
      for (int n = 0; n < r; ++n) {
        float* x = &rotated_query_[n * across_];
        for (std::int64_t i = 0; i < dim_; ++i) x[i] *= fineness_[i] * power_[first + n];
        for (std::int64_t b = 0; b < blocks_; ++b) units_[(first + n) * blocks_ + b] = coding::whole<N>(x + b * N);
        std::copy_n(x, dim_, &rotated_[(first + n) * dim_]);
      }
    });
  }

  // Numbers of keys, number after number, and what one is worth in each block.
  template <int N, typename Token>
  void unpack(const coding::Coder& coder, const Tokens& tokens, std::int64_t n, std::int64_t h, std::int64_t count,
            const Token& token) {
    for (std::int64_t first = 0; first < count; first += kLanes) {
      for (std::int64_t t = 0; t < std::min(kLanes, count - first); ++t) {
        const std::int64_t place = token(first + t);
        const auto* codes = tokens.row<std::uint8_t>(0, n, h, place);
        const auto* scales = tokens.row<std::uint8_t>(1, n, h, place);
        for (std::int64_t b = 0; b < blocks_; ++b) {
          coding::with_bits(coder.bits[b], [&](auto bits) {
            store_numbers(&tile_[t * dim_ + b * N], coding::levels_of<N, bits>(codes, coder.tables.levels(bits)));
            codes += bits * N / 8;
          });
          key_units_[b * stride_ + first + t] = coder.tables.scales()[scales[b]];
        }
      }
      side_by_side(tile_.data(), dim_, &numbers_[first], stride_);
    }
  }

  // heavy_hitters._steps of R queries and the tokens from t on, kAside vectors of them: what is loaded serves several products.
  template <int N, int R>
  void count_steps(std::int64_t first, std::int64_t t) {
    const Number* asked = &rotated_[first * dim_];
    Lanes total[R][kAside];
    for (auto& row : total) std::fill_n(row, kAside, Lanes{});
    for (std::int64_t b = 0; b < blocks_; ++b) {
      Sums sum[R][kAside];
      for (auto& row : sum) std::fill_n(row, kAside, Sums{});
      for (std::int64_t i = b * N; i < (b + 1) * N; i += kPair) {
        Sums x[kAside];
        for (int v = 0; v < kAside; ++v) x[v] = in_register(load_numbers(&numbers_[i / kPair * stride_ + t + v * kLanes]));
        for (int r = 0; r < R; ++r) {
          const Sums y = everywhere(asked + r * dim_ + i);
          for (int v = 0; v < kAside; ++v) sum[r][v] = plus_products(sum[r][v], x[v], y);
        }
      }
      for (int v = 0; v < kAside; ++v) {
        const Lanes unit = load(&key_units_[b * stride_ + t + v * kLanes]);
        for (int r = 0; r < R; ++r) total[r][v] += in_register(as_floats(sum[r][v]) * units_[(first + r) * blocks_ + b] * unit);
      }
    }
    for (int r = 0; r < R; ++r) {
      float* __restrict to = &steps_[(first + r) * stride_ + t];
      for (int v = 0; v < kAside; ++v) store(to + v * kLanes, total[r][v] * group_.step);
#pragma omp simd
      for (std::int64_t i = 0; i < kAside * kLanes; ++i) {
        to[i] = std::clamp(__builtin_rintf(to[i]), -kMostSteps, kMostSteps);
      }
    }
  }

  static constexpr std::int64_t kAside = 2;

  const Group& group_;
  std::int64_t dim_, blocks_, stride_, across_, head_ = -1;  // strides of tokens and of numbers, and whose rotation there is
  std::vector<float> fineness_, power_, rotated_query_, units_;
  // The rotation as columns, queries, rotated ones, and keys on their way into the lanes of numbers_.
  std::vector<Number> rotation_, integers_, rotated_, tile_;
  Unwritten<float> numbers_, key_units_, steps_, drawn_, gain_;
  std::vector<std::int8_t> bytes_;
};

// What becomes of the tokens of a line of each KV head, the `places` of the tier followed by those that enter: which ones
// stand there before each block of queries, oldest first behind free ones; and from which query on each has left.
struct Evictions {
  std::int64_t places, length, block, blocks, rows;
  std::vector<std::int32_t> held, free, until;  // [units, rows, places], [units, blocks], [units, places + L]

  // A tier that grows needs one row for all blocks, as each token stands where it stood. Without `attend` nobody asks.
  Evictions(const Group& group, std::int64_t block, bool attend)
      : places(group.tier.count), length(group.length), block(block), blocks((length + block - 1) / block),
        rows(!attend ? 0 : group.numbers.grows ? 1 : blocks), held(group.units() * rows * places),
        free(group.units() * blocks), until(group.units() * (places + length), length) {}

  void hold(std::int64_t unit, std::int64_t first, const std::vector<std::int32_t>& place, std::int64_t there) {
    free[unit * blocks + first / block] = static_cast<std::int32_t>(places - there);
    if (rows) std::copy_n(place.begin(), there, row(unit, first));
  }
  std::int64_t held_before(std::int64_t unit, std::int64_t first, std::int64_t t) {
    const std::int64_t hidden = free[unit * blocks + first / block];
    return t < hidden ? t : row(unit, first)[t - hidden];
  }
  std::int32_t* until_of(std::int64_t unit) { return &until[unit * (places + length)]; }

 private:
  std::int32_t* row(std::int64_t unit, std::int64_t first) {
    return &held[(unit * rows + (rows > 1 ? first / block : 0)) * places];
  }
};

// heavy_hitters.select_survivors of a KV head, and the tier after it.
inline void select_survivors(const Group& group, const Tokens& line, std::int64_t n, std::int64_t h, Drawing& drawing, Evictions& evictions) {
  const std::int64_t count = evictions.places, length = evictions.length, unit = n * line.heads + h;
  const float* entering = &group.entering[n * length];
  std::int16_t* after = group.tier.scores(n, h);
  std::int32_t* until = evictions.until_of(unit);
  std::vector<std::int32_t> place(count + evictions.block);  // of those that are there, oldest first
  std::vector<std::int16_t> score(count + evictions.block);
  std::vector<float> query(group.keys.dim);
  std::int64_t free = free_places(after, count), there = count - free;
  for (std::int64_t t = 0; t < there; ++t) place[t] = count - 1 - t;
  std::reverse_copy(after + free, after + count, score.begin());
  for (std::int64_t first = 0; first < length; first += evictions.block) {
    const std::int64_t rows = std::min(evictions.block, length - first);
    evictions.hold(unit, first, place, there);
    bool asked = there > 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      place[there + i] = count + first + i;
      score[there + i] = entering[first + i] > kLogZero ? 0 : kEvicted;
      asked |= score[there + i] != kEvicted;
    }
    asked &= !group.numbers.grows;
    if (asked) {
      for (std::int64_t row = 0; row < rows * group.groups; ++row) {
        group.query.read(n, group.heads[h] * group.groups + row % group.groups, first + row / group.groups, query.data());
        drawing.take(row, query.data());
      }
      drawing.measure(line, n, h, rows * group.groups, there + rows, [&](std::int64_t t) { return place[t]; });
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      if (score[there + i] != kEvicted && --free < 0) {
        const std::int64_t leaves = least(score.data(), there + i + 1 - group.numbers.newest);
        until[place[leaves]] = first + i;
        score[leaves] = kEvicted;
        free = 0;
      }
      if (asked && group.scored(n, first + i)) drawing.draw(i * group.groups, there + i + 1, score.data());
    }
    for (std::int64_t t = 0, all = std::exchange(there, 0) + rows; t < all; ++t) {
      if (score[t] == kEvicted) continue;
      place[there] = place[t];
      score[there++] = score[t];
    }
  }
  for (std::int64_t t = 0, to = count - 1; t < there; ++t, --to) {
    if (place[t] != to) copy(line, group.tier, n, h, place[t], to, 1);
  }
  std::reverse_copy(score.begin(), score.begin() + there, after + count - there);
}

}  // namespace dofla::cache
