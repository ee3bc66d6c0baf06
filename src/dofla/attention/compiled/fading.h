// What a call of a fading memory works on: one group of heads, its coders, its state before and after.
#pragma once

#include "codes.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <optional>
#include <vector>

namespace dofla::fading {

using Tensors = std::vector<at::Tensor>;

// Vectors [B, H, L, d] in float32 or bfloat16, read and written as float32.
class Vectors {
 public:
  explicit Vectors(const at::Tensor& t)
      : data_(static_cast<char*>(t.data_ptr())), batch_(t.stride(0)), head_(t.stride(1)), row_(t.stride(2)),
        dim_(t.size(3)), half_(t.scalar_type() == at::kBFloat16) {
    TORCH_CHECK(half_ || t.scalar_type() == at::kFloat, "vectors must be float32 or bfloat16");
    TORCH_CHECK(t.stride(3) == 1, "rows must be contiguous");
  }

  // False if the vector holds NaN or infinity; `to` is zeros then.
  bool read(std::int64_t n, std::int64_t h, std::int64_t i, float* __restrict to) const {
    const char* from = at(n, h, i);
    if (half_) {
      const auto* __restrict bits = reinterpret_cast<const std::uint16_t*>(from);
      for (std::int64_t j = 0; j < dim_; ++j) {
        const std::uint32_t wide = static_cast<std::uint32_t>(bits[j]) << 16;
        std::memcpy(to + j, &wide, sizeof wide);
      }
    } else {
      std::memcpy(to, from, dim_ * sizeof(float));
    }
    if (coding::all_finite(to, dim_)) return true;
    std::fill_n(to, dim_, 0.0f);
    return false;
  }

  void write(std::int64_t n, std::int64_t h, std::int64_t i, const float* from) const {
    char* to = at(n, h, i);
    if (!half_) {
      std::memcpy(to, from, dim_ * sizeof(float));
      return;
    }
    for (std::int64_t j = 0; j < dim_; ++j) reinterpret_cast<c10::BFloat16*>(to)[j] = from[j];
  }

 private:
  char* at(std::int64_t n, std::int64_t h, std::int64_t i) const {
    return data_ + (n * batch_ + h * head_ + i * row_) * (half_ ? 2 : 4);
  }

  char* data_;
  std::int64_t batch_, head_, row_, dim_;
  bool half_;
};

// One side of a group's coders: turn, fineness, back, mean, middle and bits, from `first` on, as coder.py keeps them.
struct Coders {
  std::int64_t heads, dim, block, stages;
  Tensors parts;
  coding::Tables tables;

  Coders(const Tensors& all, std::int64_t first, const at::Tensor& tables)
      : heads(all[first].size(0)), dim(all[first].size(1)), block(dim / all[first + 5].size(1)),
        stages(all[first + 5].size(0)), parts(all.begin() + first, all.begin() + first + 6),
        tables{tables.const_data_ptr<float>()} {
    for (const at::Tensor& part : parts) TORCH_CHECK(part.is_contiguous(), "constants must be contiguous");
    const at::Tensor& bits = parts[5];
    TORCH_CHECK((block == 8 || block == 16) && block * bits.size(1) == dim, "blocks are of 8 or 16 numbers");
    for (std::int64_t n = 0; n < bits.numel(); ++n) {
      const int found = bits.const_data_ptr<std::uint8_t>()[n];
      TORCH_CHECK(found >= 1 && found <= coding::kMostBits, "blocks have 1 to 5 bits");
    }
  }

  coding::Coder head(std::int64_t h) const {
    return {dim, block, parts[0].const_data_ptr<std::int16_t>() + h * dim * dim,
            parts[1].const_data_ptr<float>() + h * dim, parts[2].const_data_ptr<float>() + h * dim * dim,
            parts[3].const_data_ptr<float>() + h * dim, parts[4].const_data_ptr<float>() + h * dim,
            parts[5].const_data_ptr<std::uint8_t>(), tables};
  }
};

// Bytes of a token's key and of what scales it, of its value and of what scales that.
using Widths = std::array<std::int64_t, 4>;

// Tokens of all heads of a group: a byte tensor [B, Hkv, n, .] for each width, and log-weights [B, n], or [B, Hkv, n]
// where heads hold other tokens. A window and sinks are PackedTokens, whose exponents have no last dimension; stages are
// CodedTokens or KeptTokens.
struct Tokens {
  std::int64_t heads, count;
  bool apart;  // heads hold other tokens
  Widths widths;
  std::array<at::Tensor, 5> parts;
  std::array<char*, 4> data{};

  // Those of a state, five of `all` from `first` on.
  Tokens(const Tensors& all, std::int64_t first, std::int64_t batch, std::int64_t heads, const Widths& widths)
      : heads(heads), count(all[first].size(2)), apart(all[first + 4].dim() == 3), widths(widths) {
    for (std::int64_t n = 0; n < 5; ++n) {
      parts[n] = all[first + n].contiguous();
      const std::int64_t size = batch * count * (n < 4 ? heads * widths[n] : apart ? heads : 1);
      TORCH_CHECK(parts[n].numel() == size && parts[n].element_size() == (n < 4 ? 1 : 4), "the state is another layer's");
    }
    find();
  }

  // Room for as many.
  Tokens like() const {
    Tokens other = *this;
    for (at::Tensor& part : other.parts) part = at::empty(part.sizes(), part.options());
    other.find();
    return other;
  }

  // Room for others, without log-weights.
  Tokens line(std::int64_t tokens) const {
    Tokens other = *this;
    other.count = tokens;
    const std::int64_t units = parts[0].size(0) * heads;
    for (std::int64_t n = 0; n < 4; ++n) other.parts[n] = at::empty({units * tokens * widths[n]}, parts[n].options());
    other.parts[4] = at::Tensor();
    other.find();
    return other;
  }

  Tokens copied() const {
    Tokens other = *this;
    for (at::Tensor& part : other.parts) part = part.clone();
    other.find();
    return other;
  }

  template <typename T>
  T* row(std::int64_t part, std::int64_t n, std::int64_t h, std::int64_t token) const {
    return reinterpret_cast<T*>(data[part] + ((n * heads + h) * count + token) * widths[part]);
  }

  float* log_weights(std::int64_t n, std::int64_t h = 0) const {
    return parts[4].mutable_data_ptr<float>() + (apart ? n * heads + h : n) * count;
  }

 private:
  void find() {
    for (std::int64_t n = 0; n < 4; ++n) data[n] = static_cast<char*>(parts[n].data_ptr());
  }
};

inline void copy(const Tokens& from, const Tokens& to, std::int64_t n, std::int64_t h, std::int64_t first,
                 std::int64_t place, std::int64_t count) {
  for (std::int64_t part = 0; part < 4; ++part) {
    std::memcpy(to.row<char>(part, n, h, place), from.row<char>(part, n, h, first), count * from.widths[part]);
  }
}

// What the last stage has besides its tokens where it keeps what draws attention (coding/kept.py). The newest ones cannot
// leave.
struct Kept {
  std::int64_t newest;
  float step;                         // of the logarithm of a weight, for a product of a query and a key
  std::vector<float> turn, fineness;  // as Coder.asking turns queries: [Hkv, d, d] and [Hkv, d]
  at::Tensor score, score_after;      // [B, Hkv, n], int16
  at::Tensor left;                    // log-weights of the tokens that leave [B, Hkv, L]

  Kept(const at::Tensor& given, std::int64_t newest, double scaling, const Coders& keys, const Tokens& tokens,
       std::int64_t length)
      : newest(newest), step(static_cast<float>(scaling * M_LOG2E * 8)), turn(keys.heads * keys.dim * keys.dim),
        fineness(keys.heads * keys.dim), score(given.contiguous()),
        score_after(at::empty(score.sizes(), score.options())),
        left(at::empty({score.size(0), score.size(1), length}, at::kFloat)) {
    TORCH_CHECK(tokens.apart && score.numel() == tokens.parts[4].numel(), "the state is another layer's");
    TORCH_CHECK(newest > 0 && newest < tokens.count, "some tokens of a stage that keeps others are the newest, not all");
    const std::int64_t dim = keys.dim;
    for (std::int64_t h = 0; h < keys.heads; ++h) {
      coding::whole_columns(keys.head(h).back, dim, &turn[h * dim * dim], &fineness[h * dim]);
    }
  }
};

// A group of heads: queries [B, H, L, d] of all heads, of which those of the KV heads `heads` are meant (of all if none
// are named), as keys and values; log-weights [B, L] of the tokens, 0 if there are none.
struct Group {
  std::int64_t batch, length, groups;
  float scaling;
  std::vector<std::int64_t> heads;
  Vectors query, key, value;
  Coders keys, values;
  Tokens window, window_after;
  std::optional<Tokens> sinks, sinks_after;
  std::vector<Tokens> stages, stages_after;
  std::optional<Kept> kept;
  // Log-weights of all tokens of a kind, those before and then the new ones [B, n + L] (of kept ones [B, Hkv, n + L]):
  // window, stages; what leaves, or enters kept ones.
  std::vector<std::vector<float>> lines;
  std::vector<float> leaving;
  std::vector<std::int64_t> sources;  // [B, s]: which of the tokens that leave the window becomes this sink; or -1

  Group(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& log_weight,
        const Tensors& near, const Tensors& first, const Tensors& coded, const Tensors& coders, const at::Tensor& tables,
        double scaling, const std::vector<std::int64_t>& named, const std::optional<at::Tensor>& score, std::int64_t newest)
      : batch(q.size(0)), length(q.size(2)), groups(q.size(1) / k.size(1)), scaling(static_cast<float>(scaling)),
        heads(named), query(q), key(k), value(v), keys(coders, 0, tables), values(coders, 6, tables),
        window(near, 0, batch, keys.heads, {keys.dim, 1, values.dim, 1}), window_after(window.like()) {
    TORCH_CHECK(tables.numel() == coding::Tables::kSize, "tables are of another version");
    TORCH_CHECK(q.size(3) == keys.dim && k.size(3) == keys.dim && v.size(3) == values.dim, "sizes of heads differ");
    for (std::int64_t h = 0; heads.size() < static_cast<std::size_t>(keys.heads); ++h) heads.push_back(h);
    TORCH_CHECK(coded.size() == 5 * static_cast<std::size_t>(keys.stages), "the state has other stages");
    if (!first.empty()) sinks.emplace(first, 0, batch, keys.heads, window.widths);
    for (std::int64_t stage = 0; stage < keys.stages; ++stage) {
      const coding::Coder of_keys = keys.head(0), of_values = values.head(0);
      const Widths widths{of_keys.bytes(stage), of_keys.blocks(), of_values.bytes(stage), of_values.blocks()};
      stages.emplace_back(coded, 5 * stage, batch, keys.heads, widths);
      stages_after.push_back(stages.back().like());
    }
    if (score) kept.emplace(*score, newest, scaling, keys, stages.back(), length);
    move_log_weights(log_weight ? log_weight->const_data_ptr<float>() : nullptr);
  }

  std::int64_t units() const { return batch * keys.heads; }

  bool keeps(std::size_t stage) const { return kept && stage + 1 == stages.size(); }

  // Whether new token i, which asks, is no padding.
  bool real(std::int64_t n, std::int64_t i) const {
    return lines[0][n * (window.count + length) + window.count + i] > kLogZero;
  }

  Tensors after() const {
    Tensors found(window_after.parts.begin(), window_after.parts.end());
    for (const Tokens& tokens : stages_after) found.insert(found.end(), tokens.parts.begin(), tokens.parts.end());
    if (kept) found.push_back(kept->score_after);
    if (sinks_after) found.insert(found.end(), sinks_after->parts.begin(), sinks_after->parts.end());
    return found;
  }

 private:
  void move_log_weights(const float* given) {
    leaving.assign(batch * length, 0.0f);
    if (given) std::copy_n(given, batch * length, leaving.begin());
    enter(window, window_after);
    take_sinks();
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      keeps(stage) ? enter_kept(stages[stage]) : enter(stages[stage], stages_after[stage]);
    }
  }

  void enter_kept(const Tokens& before) {
    std::vector<float>& line = lines.emplace_back();
    for (std::int64_t unit = 0; unit < units(); ++unit) {
      const std::int64_t n = unit / before.heads;
      const float* held = before.log_weights(n, unit % before.heads);
      line.insert(line.end(), held, held + before.count);
      line.insert(line.end(), leaving.begin() + n * length, leaving.begin() + (n + 1) * length);
    }
  }

  // `leaving` goes in at one end, and what goes out at the other takes its place.
  void enter(const Tokens& before, const Tokens& after) {
    const std::int64_t all = before.count + length;
    std::vector<float> line(batch * all);
    for (std::int64_t n = 0; n < batch; ++n) {
      float* row = line.data() + n * all;
      std::copy_n(before.log_weights(n), before.count, row);
      std::copy_n(leaving.begin() + n * length, length, row + before.count);
      std::copy_n(row, length, leaving.begin() + n * length);
      std::copy_n(row + length, before.count, after.log_weights(n));
    }
    lines.push_back(std::move(line));
  }

  // The first real tokens that leave the window become sinks as long as places are free, and are hidden behind.
  void take_sinks() {
    if (!sinks) return;
    sinks_after = sinks->copied();
    sources.assign(batch * sinks->count, -1);
    for (std::int64_t n = 0; n < batch; ++n) {
      const float* held = sinks->log_weights(n);
      std::int64_t place = std::count_if(held, held + sinks->count, [](float x) { return x > kLogZero; });
      for (std::int64_t i = 0; i < length && place < sinks->count; ++i) {
        float& log_weight = leaving[n * length + i];
        if (log_weight <= kLogZero) continue;
        sources[n * sinks->count + place] = i;
        sinks_after->log_weights(n)[place++] = log_weight;
        log_weight = kLogZero;
      }
    }
  }
};

// Token i of `from`, the window or what the stage before keeps, as token j of `to`, which is what `stage` keeps.
inline void enter(const Group& group, std::int64_t stage, const Tokens& from, std::int64_t i, const Tokens& to,
                  std::int64_t j, std::int64_t n, std::int64_t h, std::vector<std::int16_t>& wide) {
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    const auto *codes = from.row<std::uint8_t>(part, n, h, i), *scales = from.row<std::uint8_t>(part + 1, n, h, i);
    auto *to_codes = to.row<std::uint8_t>(part, n, h, j), *to_scales = to.row<std::uint8_t>(part + 1, n, h, j);
    coding::with_block(coder.block, [&](auto block) {
      if (stage > 0) {
        coding::age<block>(coder, stage - 1, codes, scales, to_codes, to_scales);
      } else {
        const auto* exponent = reinterpret_cast<const std::int8_t*>(scales);
        coding::encode<block>(coder, reinterpret_cast<const std::int8_t*>(codes), *exponent, wide.data(), to_codes, to_scales);
      }
    });
  }
}

// New token i as token `place` of `to`, in eight bits; false if it holds NaN or infinity, and is no padding.
inline bool pack(const Group& group, std::int64_t i, bool hidden, const Tokens& to, std::int64_t place, std::int64_t n,
                 std::int64_t h, std::vector<float>& vector) {
  bool finite = true;
  for (const std::int64_t part : {0, 2}) {
    const std::int64_t dim = to.widths[part];
    finite &= (part == 0 ? group.key : group.value).read(n, group.heads[h], i, vector.data());
    if (hidden) std::fill_n(vector.begin(), dim, 0.0f);
    coding::pack(vector.data(), dim, to.row<std::int8_t>(part, n, h, place), to.row<std::int8_t>(part + 1, n, h, place));
  }
  return finite || hidden;
}

// Token i of the last stage's `from`, straight, as token j of key and value.
inline void leave(const Group& group, const Tokens& from, std::int64_t i, std::int64_t n, std::int64_t h, const Vectors& key,
                  const Vectors& value, std::int64_t j, std::vector<float>& turned, std::vector<float>& straight) {
  const float one = 1.0f;
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    std::fill_n(straight.begin(), coder.dim, 0.0f);
    coding::with_block(coder.block, [&](auto block) {
      coding::decode<block>(coder, group.keys.stages - 1, from.row<std::uint8_t>(part, n, h, i),
                            from.row<std::uint8_t>(part + 1, n, h, i), turned.data());
      coding::straighten<block, 1>(coder, turned.data(), &one, straight.data());
    });
    (part == 0 ? key : value).write(n, h, j, straight.data());
  }
}

// What a call gives back: the output, for features behind the stages also its log-normaliser and the tokens that leave
// the last stage, with their log-weights; and the state after.
struct Result {
  Tensors found;
  std::vector<Vectors> rows;  // of the output and of the key and the value that leave
  float* normaliser = nullptr;

  // Tokens stand in front of heads, as what comes after attention wants them.
  Result(const Group& group, at::ScalarType type, bool behind) {
    const std::int64_t heads = group.keys.heads, queries = heads * group.groups, length = group.length;
    const auto options = at::TensorOptions().dtype(behind ? at::kFloat : type);
    found.push_back(at::empty({group.batch, length, queries, group.values.dim}, options).transpose(1, 2));
    rows.emplace_back(found[0]);
    if (!behind) return;
    found.push_back(at::empty({group.batch, queries, length}, options));
    found.push_back(at::empty({group.batch, heads, length, group.keys.dim}, options));
    found.push_back(at::empty({group.batch, heads, length, group.values.dim}, options));
    found.push_back(at::empty({group.batch, length}, options));
    normaliser = found[1].mutable_data_ptr<float>();
    rows.emplace_back(found[2]);
    rows.emplace_back(found[3]);
  }

  bool behind() const { return normaliser != nullptr; }

  Tensors with(const Group& group) const {
    Tensors all = found;
    if (behind() && group.kept) {
      all[4] = group.kept->left.amax(1);
    } else if (behind()) {
      std::copy(group.leaving.begin(), group.leaving.end(), all[4].mutable_data_ptr<float>());
    }
    const Tensors after = group.after();
    all.insert(all.end(), after.begin(), after.end());
    return all;
  }
};

}  // namespace dofla::fading
