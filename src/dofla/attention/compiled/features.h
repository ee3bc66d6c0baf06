// Causal linear attention: the arithmetic of chunked.py, with each chunk kept in the cache. Queries and keys come as
// log-features, or as vectors with an affine map (affine.py) that is then applied chunk by chunk.
#pragma once

#include "matmul.h"
#include "vector.h"

#include <algorithm>
#include <cmath>

namespace dofla::features {

// Rows of a product for so many tokens.
inline std::int64_t padded(std::int64_t length) {
  std::int64_t size = kFewRows;
  while (size < length) size *= 2;
  return size;
}

struct Sizes {
  std::int64_t features, vector_dim, value_dim, groups;  // groups: query heads per KV head
};

// log-features = scale weight @ x + bias - curvature |x|^2, weight [M, d]. Without a weight, x are the log-features.
struct Map {
  const float* weight;
  const float* bias;
  float scale, curvature;

  Map of_head(std::int64_t head, const Sizes& sizes) const {
    if (!weight) return *this;
    return {weight + head * sizes.vector_dim * sizes.features, bias + head * sizes.features, scale, curvature};
  }
};

struct State {
  float* mean;       // [features, value_dim]
  double* log_mass;  // [features]
};

// Some tokens of one KV head and of its query heads. Rows of the results follow each other.
struct Tokens : HeadInputs {
  std::int64_t length;
  Map query_map, key_map;
  float *out, *normalizer;
  std::int64_t out_head, normalizer_head;

  Tokens part(std::int64_t begin, std::int64_t count, std::int64_t value_dim) const {
    Tokens t = *this;
    t.length = count;
    t.query += begin * query_row;
    t.key += begin * key_row;
    t.value += begin * value_row;
    t.log_weight += begin;
    t.out += begin * value_dim;
    t.normalizer += begin;
    return t;
  }
};

// One thread's scratch memory and what it does with a chunk.
class Worker {
 public:
  explicit Worker(const Sizes& sizes)
      : sizes_(sizes), keys_(sizes.features * kChunk), top_(sizes.features), past_(sizes.features),
        values_(kChunk * sizes.value_dim), vectors_(kChunk * sizes.vector_dim), log_features_(kChunk * sizes.features),
        queries_(kChunk * sizes.features), to_past_(kChunk * sizes.features), pairs_(kChunk * kChunk),
        out_(kChunk * sizes.value_dim), best_(kChunk), mass_(kChunk), added_(std::max(kChunk, sizes.features)) {}

  // Rows of one chunk after `state`, which is not changed.
  void attend(const Tokens& tokens, const State& state) {
    load(tokens, state);
    for (std::int64_t g = 0; g < sizes_.groups; ++g) {
      if (!attend_head(tokens, g, state) && tokens.length > 1) return attend_halves(tokens, state);
    }
  }

  // `state` after the keys of one chunk.
  void absorb(const Tokens& tokens, const State& state) {
    load(tokens, state);
    absorb_loaded(tokens, state);
  }

  void attend_and_absorb(const Tokens& tokens, const State& state) {
    attend(tokens, state);
    if (loaded_ != tokens.key || loaded_length_ != tokens.length) load(tokens, state);
    absorb_loaded(tokens, state);
  }

 private:
  // A map's weight, transposed and scaled; kept as long as the head stays the same.
  struct Weight {
    const float* source = nullptr;
    std::vector<float> transposed;
  };

  // The products of a map, without the rest of it.
  Rows project(const Map& map, Weight& weight, Rows x, std::int64_t length) {
    if (!map.weight) return x;
    const std::int64_t dim = sizes_.vector_dim, stride = whole_lanes(sizes_.features);
    if (weight.source != map.weight) {
      weight.source = map.weight;
      weight.transposed.resize(dim * stride);
      transpose(map.weight, dim, sizes_.features, dim, weight.transposed.data(), stride);
      for (float& w : weight.transposed) w *= map.scale;
    }
    const Rows rows = zero_padded(x, length, padded(length), dim, vectors_);
    matmul(padded(length), sizes_.features, dim, rows.data, rows.stride, weight.transposed.data(), stride,
           log_features_.data(), sizes_.features, false);
    return {log_features_.data(), sizes_.features};
  }

  // curvature |x|^2 of one vector.
  float penalty(const Map& map, const float* __restrict x) const {
    if (map.curvature == 0.0f) return 0.0f;
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (std::int64_t n = 0; n < sizes_.vector_dim; ++n) total += x[n] * x[n];
    return map.curvature * total;
  }

  // keys_ [features, kChunk]: exp(b - top), the level being the largest log-feature of the chunk or of the past.
  void load(const Tokens& tokens, const State& state) {
    const std::int64_t length = tokens.length, size = padded(length);
    loaded_ = tokens.key;
    loaded_length_ = length;
    const Rows b = project(tokens.key_map, key_weight_, {tokens.key, tokens.key_row}, length);
    transpose(b.data, b.stride, length, sizes_.features, keys_.data(), kChunk);
    for (std::int64_t j = 0; j < length; ++j) {
      added_[j] = tokens.log_weight[j] - penalty(tokens.key_map, tokens.key + j * tokens.key_row);
    }
    for (std::int64_t m = 0; m < sizes_.features; ++m) {
      float* __restrict row = keys_.data() + m * kChunk;
      const float* __restrict added = added_.data();
      const float bias = tokens.key_map.weight ? tokens.key_map.bias[m] : 0.0f;
#pragma omp simd
      for (std::int64_t j = 0; j < length; ++j) row[j] = row[j] + bias + added[j];
      const float best = largest(row, length, static_cast<float>(state.log_mass[m]));
#pragma omp simd
      for (std::int64_t j = 0; j < length; ++j) row[j] = exp_of_negative(row[j] - best);
      for (std::int64_t j = length; j < size; ++j) row[j] = 0.0f;
      top_[m] = best;
      past_[m] = static_cast<float>(std::exp(state.log_mass[m] - best));
    }
    value_ = zero_padded({tokens.value, tokens.value_row}, length, size, sizes_.value_dim, values_);
  }

  // False if a row's mass is so small that terms may have been lost.
  bool attend_head(const Tokens& tokens, std::int64_t g, const State& state) {
    const std::int64_t length = tokens.length, size = padded(length), features = sizes_.features;
    const std::int64_t value_dim = sizes_.value_dim;
    const float* vectors = tokens.query + g * tokens.query_head;
    const Rows a_rows = project(tokens.query_map, query_weight_, {vectors, tokens.query_row}, length);
    for (std::int64_t m = 0; m < features; ++m) {
      added_[m] = top_[m] + (tokens.query_map.weight ? tokens.query_map.bias[m] : 0.0f);
    }
    for (std::int64_t i = 0; i < length; ++i) {
      const float* __restrict a = a_rows.data + i * a_rows.stride;
      const float* __restrict added = added_.data();
      const float* __restrict past = past_.data();
      float* __restrict query = queries_.data() + i * features;
      float* __restrict to_past = to_past_.data() + i * features;
#pragma omp simd
      for (std::int64_t m = 0; m < features; ++m) query[m] = a[m] + added[m];
      const float best = largest(query, features, query[0]);
#pragma omp simd
      for (std::int64_t m = 0; m < features; ++m) {
        query[m] = exp_of_negative(query[m] - best);
        to_past[m] = query[m] * past[m];
      }
      best_[i] = best;
      mass_[i] = sum(to_past, features);
    }
    std::fill(queries_.begin() + length * features, queries_.begin() + size * features, 0.0f);
    std::fill(to_past_.begin() + length * features, to_past_.begin() + size * features, 0.0f);

    matmul(size, size, features, queries_.data(), features, keys_.data(), kChunk, pairs_.data(), kChunk, false);
    bool trusted = true;
    for (std::int64_t i = 0; i < length; ++i) {
      float* __restrict row = pairs_.data() + i * kChunk;
      std::fill(row + i + 1, row + size, 0.0f);
      mass_[i] += sum(row, size);
      trusted = trusted && !(mass_[i] < kSmallestTrustedMass);
    }
    if (!trusted && length > 1) return false;

    matmul(size, value_dim, size, pairs_.data(), kChunk, value_.data, value_.stride, out_.data(), value_dim, false);
    matmul(size, value_dim, features, to_past_.data(), features, state.mean, value_dim, out_.data(), value_dim, true);
    for (std::int64_t i = 0; i < length; ++i) {
      const float scale = 1.0f / mass_[i];
      const float* __restrict from = out_.data() + i * value_dim;
      float* __restrict to = tokens.out + g * tokens.out_head + i * value_dim;
#pragma omp simd
      for (std::int64_t n = 0; n < value_dim; ++n) to[n] = from[n] * scale;
      tokens.normalizer[g * tokens.normalizer_head + i] =
          best_[i] + std::log(mass_[i]) - penalty(tokens.query_map, vectors + i * tokens.query_row);
    }
    return true;
  }

  // A later key stands so far above that earlier rows underflow: half the chunk at a time. At length 1 the best feature
  // of the row is present in full, so this ends.
  void attend_halves(const Tokens& tokens, const State& state) {
    const std::int64_t half = tokens.length / 2, value_dim = sizes_.value_dim;
    std::vector<float> mean(state.mean, state.mean + sizes_.features * value_dim);
    std::vector<double> log_mass(state.log_mass, state.log_mass + sizes_.features);
    const State between{mean.data(), log_mass.data()};
    attend_and_absorb(tokens.part(0, half, value_dim), between);
    attend(tokens.part(half, tokens.length - half, value_dim), between);
  }

  void absorb_loaded(const Tokens& tokens, const State& state) {
    const std::int64_t size = padded(tokens.length), value_dim = sizes_.value_dim;
    loaded_ = nullptr;
    for (std::int64_t m = 0; m < sizes_.features; ++m) {
      float* __restrict row = keys_.data() + m * kChunk;
      float* __restrict mean = state.mean + m * value_dim;
      // In double: a mass in which small keys shall not be lost after many steps.
      const double past = std::exp(state.log_mass[m] - top_[m]), mass = past + sum(row, size);
      state.log_mass[m] = top_[m] + std::log(mass);
      const float left = static_cast<float>(past / mass), share = static_cast<float>(1.0 / mass);
#pragma omp simd
      for (std::int64_t j = 0; j < size; ++j) row[j] *= share;
#pragma omp simd
      for (std::int64_t n = 0; n < value_dim; ++n) mean[n] *= left;
    }
    matmul(sizes_.features, value_dim, size, keys_.data(), kChunk, value_.data, value_.stride, state.mean, value_dim, true);
  }

  Sizes sizes_;
  std::vector<float> keys_, top_, past_, values_, vectors_, log_features_, queries_, to_past_, pairs_, out_, best_, mass_,
      added_;
  Weight query_weight_, key_weight_;
  Rows value_{};
  const float* loaded_ = nullptr;
  std::int64_t loaded_length_ = 0;
};

}  // namespace dofla::features
