// What a call of a compressed cache works on: of each group of heads its coders and its state before and after.
#pragma once

#include "rows.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

namespace dofla::tiers {

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

  bool half() const { return half_; }

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

constexpr std::int32_t kEvicted = -2;  // score of a token that leaves

inline float log_weight_of(std::int32_t score) { return score == kFree ? kLogZero : 0.0f; }

// What the last tier has besides its tokens where it keeps what draws attention (coding/heavy_hitters.py). The newest ones cannot
// leave.
struct HeavyHitters {
  std::int64_t newest;
  float step;                       // of the logarithm of a weight, for a product of a query and a key
  std::int64_t stride;              // of vectors of pairs of `rotation`
  std::vector<Number> rotation;         // as Coder.rotate_query_integer turns queries [Hkv, d, d]
  std::vector<float> fineness;      // [Hkv, d]
  mutable std::vector<float> left;  // log-weights of the tokens that leave [B, Hkv, L]

  HeavyHitters(std::int64_t newest, double scaling, const Coders& keys, std::int64_t tokens)
      : newest(newest), step(static_cast<float>(scaling * M_LOG2E * 8)), stride(whole_lanes(keys.dim)),
        rotation(keys.heads * keys.dim * stride), fineness(keys.heads * keys.dim), left(tokens) {
    const std::int64_t dim = keys.dim;
    for (std::int64_t h = 0; h < keys.heads; ++h) {
      coding::whole_columns(keys.head(h).back, dim, &rotation[h * dim * stride], stride, &fineness[h * dim]);
    }
  }
};

// Which KV heads a group has; how many tokens its memory holds, those of the last tier that go by age, and besides those
// that stay while they draw attention; and whether features stand behind.
struct Sizes {
  std::vector<std::int64_t> heads, tiers;
  std::int64_t window, sinks, heavy_hitters;
  bool behind;
};

// Those of all groups, one after the other, as Layout.sizes (flat.py) has them: how many heads, and which; window, sinks,
// kept, behind; how many tiers, and tokens of each.
inline std::vector<Sizes> sizes_of(const std::vector<std::int64_t>& numbers) {
  std::vector<Sizes> found;
  auto at = numbers.begin();
  const auto next = [&] {
    TORCH_CHECK(at != numbers.end(), "sizes of groups end too soon");
    return *at++;
  };
  const auto several = [&] {
    const std::int64_t count = next();
    TORCH_CHECK(0 <= count && count <= numbers.end() - at, "sizes of groups end too soon");
    at += count;
    return std::vector<std::int64_t>(at - count, at);
  };
  while (at != numbers.end()) {
    Sizes& sizes = found.emplace_back();
    sizes.heads = several();
    sizes.window = next();
    sizes.sinks = next();
    sizes.heavy_hitters = next();
    sizes.behind = next();
    sizes.tiers = several();
  }
  return found;
}

// The states of a group between calls: [B, bytes], made anew by the call; or rows `pages` [B] of a pool [P, bytes], which the
// call updates. Those before are copied first, as tokens move within a state.
struct States {
  at::Tensor before, after;
  const std::int64_t* pages = nullptr;

  explicit States(const at::Tensor& given) : before(given.contiguous()), after(at::empty(before.sizes(), before.options())) {
    std::memset(after.mutable_data_ptr(), 0, after.numel());  // between the parts as well: equal states have equal bytes
  }

  States(const at::Tensor& pool, const at::Tensor& of_sequences)
      : before(at::index_select(pool, 0, of_sequences)), after(pool), pages(of_sequences.const_data_ptr<std::int64_t>()) {
    TORCH_CHECK(pool.stride(1) == 1, "bytes of a state must be contiguous");
  }
};

// A group of heads: queries [B, H, L, d] of all heads, of which those of the KV heads `heads` are meant, as keys and values;
// log-weights [B, L] of the tokens, 0 if there are none.
struct Group {
  std::int64_t batch, length, groups;
  float scaling;
  std::vector<std::int64_t> heads;
  bool behind;
  Vectors query, key, value;
  Coders keys, values;
  States states;
  Tokens window, window_after;
  std::optional<Tokens> sinks, sinks_after;
  std::vector<Tokens> tiers, tiers_after;
  std::optional<HeavyHitters> heavy_hitters;
  // Log-weights of all tokens of a kind, those before and then the new ones [B, n + L] (of heavy hitters [B, Hkv, n + L],
  // but for a single token): window, tiers; what leaves, or enters heavy hitters.
  std::vector<std::vector<float>> lines;
  std::vector<float> leaving;
  std::vector<std::int64_t> sources;  // [B, s]: which of the tokens that leave the window becomes this sink; or -1

  Group(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& log_weight,
        States given, const at::Tensor& of_keys, const at::Tensor& of_values, const at::Tensor& tables, double scaling,
        const Sizes& sizes)
      : batch(q.size(0)), length(q.size(2)), groups(q.size(1) / k.size(1)), scaling(static_cast<float>(scaling)),
        heads(sizes.heads), behind(sizes.behind), query(q), key(k), value(v),
        keys(of_keys, heads.size(), k.size(3), sizes.tiers.size(), tables),
        values(of_values, keys.heads, v.size(3), keys.tiers, tables), states(std::move(given)) {
    TORCH_CHECK(tables.is_cpu() && tables.numel() == coding::Tables::kSize, "tables are elsewhere, or of another version");
    TORCH_CHECK(q.size(3) == keys.dim, "sizes of heads differ");
    for (const std::int64_t head : heads) TORCH_CHECK(0 <= head && head < k.size(1), "there is no KV head ", head);
    lay_out(sizes);
    if (sizes.heavy_hitters) heavy_hitters.emplace(sizes.tiers.back(), scaling, keys, units() * length);
    move_log_weights(log_weight ? log_weight->const_data_ptr<float>() : nullptr);
  }

  std::int64_t units() const { return batch * keys.heads; }

  // Scores that a query has after a token, at most.
  std::int64_t columns() const {
    std::int64_t total = whole_lanes(window.count);
    if (sinks) total += whole_lanes(sinks->count);
    for (const Tokens& tokens : tiers) total += whole_lanes(tokens.count);
    return total;
  }

  bool keeps(std::size_t tier) const { return heavy_hitters && tier + 1 == tiers.size(); }

  // The log-weight of the i-th token that leaves the last tier: of heavy hitters as many are real in every head.
  float left(std::int64_t n, std::int64_t i) const {
    if (!heavy_hitters) return leaving[n * length + i];
    float most = kLogZero;
    for (std::int64_t h = 0; h < keys.heads; ++h) most = std::max(most, heavy_hitters->left[(n * keys.heads + h) * length + i]);
    return most;
  }

  // Whether new token i, which asks, is no padding.
  bool real(std::int64_t n, std::int64_t i) const {
    return lines[0][n * (window.count + length) + window.count + i] > kLogZero;
  }

 private:
  // Where in a row what stands, as flat.py has it.
  void lay_out(const Sizes& sizes) {
    TORCH_CHECK(sizes.window > 0 && !sizes.tiers.empty(), "a compressed cache has a window and tiers");
    const coding::Coder of_keys = keys.head(0), of_values = values.head(0);
    const Widths exact{keys.dim, 1, values.dim, 1};
    Cut cut;
    const auto next = [&](std::int64_t count, bool apart, const Widths& widths) {
      const Tokens tokens(keys.heads, count, apart, widths, cut);
      return std::pair(tokens.in(states.before), tokens.in(states.after, states.pages));
    };
    std::tie(window, window_after) = next(sizes.window, false, exact);
    if (sizes.sinks) std::tie(sinks, sinks_after) = next(sizes.sinks, false, exact);
    for (std::int64_t tier = 0; tier < keys.tiers; ++tier) {
      const std::int64_t more = tier + 1 == keys.tiers ? sizes.heavy_hitters : 0;
      const Widths widths{of_keys.bytes(tier), of_keys.blocks(), of_values.bytes(tier), of_values.blocks()};
      const auto [held, held_after] = next(sizes.tiers[tier] + more, more > 0, widths);
      tiers.push_back(held);
      tiers_after.push_back(held_after);
    }
    const at::Tensor& before = states.before;
    TORCH_CHECK(before.scalar_type() == at::kByte && before.size(0) == batch && before.size(1) == cut.end(),
                "the state is another layer's");
  }

  void move_log_weights(const float* given) {
    leaving.assign(batch * length, 0.0f);
    if (given) std::copy_n(given, batch * length, leaving.begin());
    enter(window, window_after);
    take_sinks();
    for (std::size_t tier = 0; tier < tiers.size(); ++tier) {
      if (!keeps(tier)) enter(tiers[tier], tiers_after[tier]);
      else if (length > 1) enter_scored(tiers[tier]);  // decoding has no use for the line
    }
  }

  void enter_scored(const Tokens& before) {
    std::vector<float>& line = lines.emplace_back();
    for (std::int64_t unit = 0; unit < units(); ++unit) {
      const std::int64_t n = unit / before.heads;
      const std::int16_t* held = before.scores(n, unit % before.heads);
      std::transform(held, held + before.count, std::back_inserter(line), log_weight_of);
      std::transform(&leaving[n * length], &leaving[n * length] + length, std::back_inserter(line),
                     [](float x) { return x > kLogZero ? 0.0f : kLogZero; });
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
    sources.assign(batch * sinks->count, -1);
    for (std::int64_t n = 0; n < batch; ++n) {
      const float* held = sinks->log_weights(n);
      std::copy_n(held, sinks->count, sinks_after->log_weights(n));
      for (std::int64_t h = 0; h < keys.heads; ++h) copy(*sinks, *sinks_after, n, h, 0, 0, sinks->count);
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

// Token i of `from`, the window or what the tier before keeps, as token j of `to`, which is what `tier` keeps. `wide` has
// room for a vector.
inline void enter(const Group& group, std::int64_t tier, const Tokens& from, std::int64_t i, const Tokens& to, std::int64_t j,
                  std::int64_t n, std::int64_t h, std::vector<std::int16_t>& wide) {
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    const auto *codes = from.row<std::uint8_t>(part, n, h, i), *scales = from.row<std::uint8_t>(part + 1, n, h, i);
    auto *to_codes = to.row<std::uint8_t>(part, n, h, j), *to_scales = to.row<std::uint8_t>(part + 1, n, h, j);
    coding::with_block(coder.block, [&](auto block) {
      if (tier > 0) {
        coding::age<block>(coder, tier - 1, codes, scales, to_codes, to_scales);
      } else {
        coding::encode<block>(coder, codes, scales, wide.data(), to_codes, to_scales);
      }
    });
  }
}

// New token i as token `place` of `to`, in int8; false if it holds NaN or infinity, and is no padding.
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

// Token i of the last tier's `from`, unrotated, as token j of key and value.
inline void leave(const Group& group, const Tokens& from, std::int64_t i, std::int64_t n, std::int64_t h, const Vectors& key,
                  const Vectors& value, std::int64_t j, std::vector<float>& rotated, std::vector<float>& unrotated) {
  const float one = 1.0f;
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    std::fill_n(unrotated.begin(), coder.dim, 0.0f);
    coding::with_block(coder.block, [&](auto block) {
      coding::decode<block>(coder, group.keys.tiers - 1, from.row<std::uint8_t>(part, n, h, i),
                            from.row<std::uint8_t>(part + 1, n, h, i), rotated.data());
      coding::unrotate<block, 1>(coder, rotated.data(), &one, unrotated.data());
    });
    (part == 0 ? key : value).write(n, h, j, unrotated.data());
  }
}

// What a call gives back of a group: rows of the layer's output, and the state after; for features behind the tiers also
// the output's log-normalizer and the tokens that leave the last tier, with their log-weights.
struct Result {
  Vectors out;
  Tensors left;               // log-normalizer [B, H', L], keys and values [B, Hkv', L, .], log-weights [B, L]
  std::vector<Vectors> rows;  // of the keys and the values
  float* normalizer = nullptr;

  Result(const Group& group, const at::Tensor& out) : out(out) {
    if (!group.behind) return;
    const std::int64_t heads = group.keys.heads, length = group.length;
    const auto options = out.options().dtype(at::kFloat);
    left.push_back(at::empty({group.batch, heads * group.groups, length}, options));
    left.push_back(at::empty({group.batch, heads, length, group.keys.dim}, options));
    left.push_back(at::empty({group.batch, heads, length, group.values.dim}, options));
    left.push_back(at::empty({group.batch, length}, options));
    normalizer = left[0].mutable_data_ptr<float>();
    rows.emplace_back(left[1]);
    rows.emplace_back(left[2]);
  }

  // Log-weights of what left, once it has.
  void weigh(const Group& group) const {
    if (!group.behind) return;
    float* log_weights = left[3].mutable_data_ptr<float>();
    for (std::int64_t n = 0; n < group.batch; ++n) {
      for (std::int64_t i = 0; i < group.length; ++i) log_weights[n * group.length + i] = group.left(n, i);
    }
  }
};

// A group and what becomes of it.
struct Job {
  Group group;
  Result result;
  double scores;  // that a KV head computes, more or less

  Job(Group given, const at::Tensor& out)
      : group(std::move(given)), result(group, out), scores(group.groups * group.length * group.columns()) {}
};

// A KV head of a sequence, and its group.
struct Unit {
  std::size_t group;
  std::int64_t n, h;
};

// All of them, those with most to do first.
inline std::vector<Unit> units_of(const std::vector<Job>& jobs) {
  std::vector<std::size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return jobs[a].scores > jobs[b].scores; });
  std::vector<Unit> units;
  for (const std::size_t which : order) {
    const Group& group = jobs[which].group;
    for (std::int64_t n = 0; n < group.batch; ++n) {
      for (std::int64_t h = 0; h < group.keys.heads; ++h) units.push_back({which, n, h});
    }
  }
  return units;
}

// A thread's scratch memory for the group that it works on.
template <typename Scratch>
class Mine {
 public:
  template <typename... Of>
  Scratch& of(std::size_t group, Of&&... of) {
    if (!scratch_ || group != group_) scratch_.emplace(std::forward<Of>(of)...);
    group_ = group;
    return *scratch_;
  }

 private:
  std::size_t group_ = 0;
  std::optional<Scratch> scratch_;
};

}  // namespace dofla::tiers
