// Blocks of a prompt's queries see their bands of coded tokens.
#pragma once

#include "lines.h"
#include "operands.h"

#include <cmath>

namespace dofla::cache {

// One thread's scratch memory and what it does with a block of rows of a KV head. Scores and averages are products of `Real`.
template <typename Real>
class Reader {
 public:
  Reader(const Group& group, const Lines& lines, Evictions& evictions)
      : group_(group), evictions_(evictions), dim_(group.keys.dim), value_dim_(group.values.dim),
        block_(whole_lanes(evictions.block)), rows_(block_ * group.groups),
        window_{group.window.count, whole_lanes(block_ + group.window.count - 1), lines.window, group.line},
        tier_{group.tier.count, whole_lanes(block_ + group.tier.count), lines.tier, lines.tier_weights, true},
        unsound_(rows_), queries_(rows_ * dim_), rotated_(rows_ * dim_), out_(rows_ * value_dim_), rotated_out_(rows_ * value_dim_),
        beside_(rows_), back_(value_dim_ * whole_lanes(value_dim_)), rounded_(rows_ * dim_), rotated_rounded_(rows_ * dim_),
        until_(evictions.places + block_) {
    sink_columns_ = group.sinks ? whole_lanes(group.sinks->count) : 0;
    stride_ = distance(window_.most + tier_.most + sink_columns_);
    vectors_ = Unwritten<float>(std::max({window_.most, tier_.most, sink_columns_}) * std::max(dim_, value_dim_));
    scores_ = Unwritten<float>(rows_ * stride_);
    weights_ = Unwritten<Real>(rows_ * stride_);
    column_weight_.resize(stride_);
  }

  // Output rows first, first + 1, ...; rows of NaN from `sound` on, and of queries like that.
  void attend(std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t sound, const Vectors& out) {
    const std::int64_t rows = std::min(block_, group_.length - first);
    pass_over_hidden(n, h, first);
    load(n, h, first, rows, sound);
    score(n, h, first, rows, window_);
    if (tier_.columns) score(n, h, first, rows, tier_);
    const bool sinks = sees_sinks(n, first, rows);
    if (sinks) score_sinks(n, h, first, rows);
    const std::int64_t width = columns_ + (sinks ? sink_columns_ : 0);
    std::vector<float> best(rows_), whole(rows_), coded(rows_, 0.0f);
    for (std::int64_t row = 0; row < rows_; ++row) {
      float* __restrict score = &scores_[row * stride_];
      if (row % block_ >= rows) {
        std::fill_n(score, width, 0.0f);
        continue;
      }
      const float* __restrict weight = column_weight_.data();
#pragma omp simd
      for (std::int64_t t = 0; t < width; ++t) score[t] += weight[t];
      const float level = largest(score, width, kLogZero);
#pragma omp simd
      for (std::int64_t t = 0; t < width; ++t) score[t] = exp_of_negative(score[t] - level);
      best[row] = level;
      whole[row] = sum(score, width);
      coded[row] = sum(score + tier_.start, tier_.columns);
    }
    const Real* weights = operands_.left(scores_.data(), rows_, width, stride_, weights_);
    average(n, h, first, window_, weights, out_);
    if (tier_.columns) {
      average(n, h, first, tier_, weights, rotated_out_);
      unrotate(h);
    }
    if (sinks) average_sinks(n, h, weights);
    const coding::Coder coder = group_.values.head(h);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t g = row / block_, i = row % block_;
      if (i >= rows) continue;
      float* __restrict to = &out_[row * value_dim_];
      const bool seen = best[row] > kLogZero / 2;
      const float scale = seen ? 1.0f / whole[row] : 0.0f;
      for (std::int64_t j = 0; j < value_dim_; ++j) to[j] = (to[j] + coded[row] * coder.mean[j]) * scale;
      if (unsound_[row]) std::fill_n(to, value_dim_, NAN);
      out.write(n, group_.heads[h] * group_.groups + g, first + i, to);
    }
  }

 private:
  // Tokens of a line that a block sees, at `start` in the scores: row i sees `count` tokens of the window's line from its own
  // on; of the tier's, those that stood there before the block and have not left, and those that entered. The first `hidden` of
  // them, free slots and padding, have no columns.
  struct Band {
    std::int64_t count, most;  // columns at most
    const Tokens& line;
    const std::vector<float>& log_weights;
    bool coded = false;
    std::int64_t hidden = 0, columns = 0, start = 0;
  };

  // Columns of a block: whole vectors. All of the tier is passed over, or some.
  void pass_over_hidden(std::int64_t n, std::int64_t h, std::int64_t first) {
    columns_ = 0;
    for (Band* band : {&window_, &tier_}) {
      const float* log_weights = log_weights_of(*band, n, h);
      const std::int64_t there = this->there(*band, first);
      std::int64_t hidden = 0;
      while (hidden < there && log_weights[place(*band, n, h, first, hidden)] <= kLogZero) ++hidden;
      const bool none = band->coded && hidden == there;
      band->hidden = none ? band->most : std::min(hidden, there - 1) / kLanes * kLanes;
      band->columns = band->most - band->hidden;
      band->start = columns_;
      columns_ += band->columns;
    }
  }

  // Of the tokens of a band's line.
  const float* log_weights_of(const Band& band, std::int64_t n, std::int64_t h) const {
    return &band.log_weights[(band.coded ? n * group_.keys.heads + h : n) * band.line.count];
  }

  void load(std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t rows, std::int64_t sound) {
    std::fill(queries_.begin(), queries_.end(), 0.0f);
    for (std::int64_t row = 0; row < rows_; ++row) {
      if (row % block_ >= rows) continue;
      const std::int64_t head = group_.heads[h] * group_.groups + row / block_;
      const std::int64_t i = first + row % block_;
      unsound_[row] = !group_.query.read(n, head, i, &queries_[row * dim_]) || i >= sound;
    }
    for (float& x : queries_) x *= group_.scaling;
    query_operand_ = operands_.left(queries_.data(), rows_, dim_, dim_, rounded_);
    if (!tier_.columns) return;
    const coding::Coder coder = group_.keys.head(h);
    matmul(rows_, dim_, dim_, queries_.data(), dim_, coder.back, dim_, rotated_.data(), dim_, false);
    for (std::int64_t row = 0; row < rows_; ++row) {
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (std::int64_t i = 0; i < dim_; ++i) total += queries_[row * dim_ + i] * coder.mean[i];
      beside_[row] = total;
    }
    rotated_operand_ = operands_.left(rotated_.data(), rows_, dim_, dim_, rotated_rounded_);
  }

  // Numbers from one row of scores to the next: one of few, and of no power of two, at which all rows would compete for the same
  // places of a processor's cache.
  static std::int64_t distance(std::int64_t columns) { return whole_lanes(columns, 512 / kLanes) + 16; }

  // How many tokens of a band's line a block sees, and the place there of one.
  std::int64_t there(const Band& band, std::int64_t first) const {
    return std::min(block_, group_.length - first) + band.count - !band.coded;
  }
  std::int64_t place(const Band& band, std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t t) const {
    if (!band.coded) return first + 1 + t;
    return t < band.count ? evictions_.held_before(n * group_.keys.heads + h, first, t) : first + t;
  }

  // Keys (or values, part 2) of a band as vectors_ [columns, dim], zeros behind the line. Those of the tier are rotated.
  void unpack(std::int64_t n, std::int64_t h, std::int64_t first, const Band& band, std::int64_t part) {
    const coding::Coder coder = (part == 0 ? group_.keys : group_.values).head(h);
    const std::int64_t there = this->there(band, first);
    coding::with_block(coder.block, [&](auto block) {
      for (std::int64_t t = band.hidden; t < there; ++t) {
        float* to = &vectors_[(t - band.hidden) * coder.dim];
        const std::int64_t from = place(band, n, h, first, t);
        if (band.coded) {
          coding::decode<block>(coder, band.line.template row<std::uint8_t>(part, n, h, from),
                                band.line.template row<std::uint8_t>(part + 1, n, h, from), to);
        } else {
          unpack_exactly<block>(band.line, part, n, h, from, to);
        }
      }
    });
    std::fill(&vectors_[(there - band.hidden) * coder.dim], &vectors_[band.columns * coder.dim], 0.0f);
  }

  template <int N>
  void unpack_exactly(const Tokens& tokens, std::int64_t part, std::int64_t n, std::int64_t h, std::int64_t token, float* to) {
    const std::int8_t* integers = tokens.row<std::int8_t>(part, n, h, token);
    const float power = coding::power_of_two(*tokens.row<std::int8_t>(part + 1, n, h, token));
    for (std::int64_t i = 0; i < tokens.widths[part]; i += N) {
      (coding::floats<N>(integers + i) * power).store(to + i);
    }
  }

  void score(std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t rows, const Band& band) {
    const std::int64_t seen = there(band, first) - band.hidden;
    unpack(n, h, first, band, 0);
    const Real *queries = band.coded ? rotated_operand_ : query_operand_, *keys = operands_.across(vectors_.data(), band.columns, dim_);
    times_across(rows_, band.columns, dim_, queries, keys, &scores_[band.start], stride_);
    const auto place = [&](std::int64_t t) { return this->place(band, n, h, first, band.hidden + t); };
    const float* log_weights = log_weights_of(band, n, h);
    for (std::int64_t t = 0; t < seen; ++t) column_weight_[band.start + t] = log_weights[place(t)];
    std::fill_n(&column_weight_[band.start + seen], band.columns - seen, kLogZero);
    if (band.coded) {
      const std::int32_t* until = evictions_.until_of(n * group_.keys.heads + h);
      for (std::int64_t t = 0; t < seen; ++t) until_[t] = until[place(t)];
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t i = row % block_;
      if (i >= rows) continue;
      float* __restrict score = &scores_[row * stride_ + band.start];
      const auto column = [&](std::int64_t t) { return std::max<std::int64_t>(t - band.hidden, 0); };
      if (band.coded) {
        const float added = beside_[row];
        const std::int32_t *__restrict until = until_.data(), query = static_cast<std::int32_t>(first + i);
        const std::int64_t end = column(band.count + i + 1);
#pragma omp simd
        for (std::int64_t t = 0; t < end; ++t) score[t] = query < until[t] ? score[t] + added : kLogZero;
        std::fill(score + end, score + band.columns, kLogZero);
      } else {
        std::fill(score, score + column(i), kLogZero);
        std::fill(score + column(i + band.count), score + band.columns, kLogZero);
      }
    }
  }

  // Whether any row sees a sink.
  bool sees_sinks(std::int64_t n, std::int64_t first, std::int64_t rows) const {
    for (std::int64_t place = 0; sink_columns_ && place < group_.sinks->count; ++place) {
      if (group_.sinks->log_weights(n)[place] > kLogZero && unseen(n, first, place) < rows) return true;
    }
    return false;
  }

  // How many rows do not see a sink. It is seen once it has left the window, for before that it is seen there.
  std::int64_t unseen(std::int64_t n, std::int64_t first, std::int64_t place) const {
    return group_.sources[n * group_.sinks->count + place] - first;
  }

  void score_sinks(std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t rows) {
    const Tokens& sinks = *group_.sinks;
    unpack_sinks(sinks, n, h, 0);
    const Real* keys = operands_.across(vectors_.data(), sink_columns_, dim_);
    times_across(rows_, sink_columns_, dim_, query_operand_, keys, &scores_[columns_], stride_);
    std::copy_n(sinks.log_weights(n), sinks.count, &column_weight_[columns_]);
    std::fill_n(&column_weight_[columns_ + sinks.count], sink_columns_ - sinks.count, kLogZero);
    for (std::int64_t place = 0; place < sinks.count; ++place) {
      const std::int64_t unseen = std::min(this->unseen(n, first, place), rows);
      for (std::int64_t row = 0; row < rows_; ++row) {
        if (row % block_ < unseen) scores_[row * stride_ + columns_ + place] = kLogZero;
      }
    }
  }

  void unpack_sinks(const Tokens& sinks, std::int64_t n, std::int64_t h, std::int64_t part) {
    const std::int64_t dim = sinks.widths[part];
    coding::with_block((part == 0 ? group_.keys : group_.values).block, [&](auto block) {
      for (std::int64_t t = 0; t < sinks.count; ++t) unpack_exactly<block>(sinks, part, n, h, t, &vectors_[t * dim]);
    });
    std::fill(&vectors_[sinks.count * dim], &vectors_[sink_columns_ * dim], 0.0f);
  }

  void average(std::int64_t n, std::int64_t h, std::int64_t first, const Band& band, const Real* weights, std::vector<float>& to) {
    unpack(n, h, first, band, 2);
    const Real* values = operands_.along(vectors_.data(), band.columns, value_dim_);
    times_along(rows_, value_dim_, band.columns, weights + band.start, stride_, values, to.data(), false);
  }

  void average_sinks(std::int64_t n, std::int64_t h, const Real* weights) {
    unpack_sinks(*group_.sinks, n, h, 2);
    const Real* values = operands_.along(vectors_.data(), sink_columns_, value_dim_);
    times_along(rows_, value_dim_, sink_columns_, weights + columns_, stride_, values, out_.data(), true);
  }

  void unrotate(std::int64_t h) {
    const std::int64_t stride = whole_lanes(value_dim_);
    if (loaded_ != h) transpose(group_.values.head(h).back, value_dim_, value_dim_, value_dim_, back_.data(), stride);
    loaded_ = h;
    matmul(rows_, value_dim_, value_dim_, rotated_out_.data(), value_dim_, back_.data(), stride, out_.data(), value_dim_, true);
  }

  const Group& group_;
  Evictions& evictions_;
  std::int64_t dim_, value_dim_, block_, rows_, stride_ = 0, columns_ = 0, sink_columns_ = 0, loaded_ = -1;
  Band window_, tier_;
  std::vector<char> unsound_;
  std::vector<float> queries_, rotated_, out_, rotated_out_, beside_, back_, column_weight_;
  Unwritten<float> vectors_, scores_;
  Operands<Real> operands_;
  const Real *query_operand_ = nullptr, *rotated_operand_ = nullptr;
  Unwritten<Real> rounded_, rotated_rounded_, weights_;
  std::vector<std::int32_t> until_;
};

}  // namespace dofla::cache
