// What a call of a compressed cache works on: of each group of heads its coders and its tokens, which it updates.
#pragma once

#include "rows.h"
#include "vectors.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

namespace dofla::cache {

constexpr std::int32_t kEvicted = -2;  // score of a token that leaves

// A group of heads: queries [B, H, L, d] of all heads, of which those of the KV heads `heads` are meant, as keys and values;
// log-weights [B, L] of the tokens, 0 if there are none.
struct Group {
  GroupNumbers numbers;
  std::int64_t batch, length, groups;
  float scaling;
  std::vector<std::int64_t> heads;
  Vectors query, key, value;
  Coders keys, values;
  States states;
  Tokens window, tier;
  std::optional<Tokens> sinks;
  float step;                          // of the logarithm of a weight, for a product of a query and a key (heavy_hitters.py)
  std::vector<float> line;             // log-weights of the window before the call and of the new tokens [B, n + L]
  std::vector<float> entering;         // ... of the tokens that enter the tier [B, L]
  std::vector<std::int64_t> sources;   // [B, s]: which of the tokens that leave the window becomes this sink; or -1

  Group(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& log_weight,
        const States& given, const Smoothing& smoothing, const Tensor& of_keys, const Tensor& of_values, const Tensor& tables, double scaling,
        const GroupNumbers& numbers, const std::int64_t* of_layer)
      : numbers(numbers), batch(q.size(0)), length(k.size(2)), groups(q.size(1) / k.size(1)),
        scaling(static_cast<float>(scaling)), heads(of_layer, of_layer + numbers.kv_heads), query(q, smoothing, groups), key(k, smoothing),
        value(v),
        keys(of_keys, numbers.kv_heads, numbers.key_dim, tables), values(of_values, numbers.kv_heads, numbers.value_dim, tables),
        states(given), step(static_cast<float>(scaling * M_LOG2E * 8)) {
    STD_TORCH_CHECK(tables.is_cpu() && tables.numel() == coding::Tables::kSize, "tables are elsewhere, or of another version");
    STD_TORCH_CHECK(q.size(3) == keys.dim && k.size(3) == keys.dim && v.size(3) == values.dim, "sizes of heads differ");
    for (const std::int64_t head : heads) STD_TORCH_CHECK(0 <= head && head < k.size(1), "there is no KV head ", head);
    lay_out();
    move_log_weights(log_weight ? log_weight->const_data_ptr<float>() : nullptr);
  }

  std::int64_t units() const { return batch * keys.heads; }

  // Scores that a query has after a token, at most.
  std::int64_t columns() const {
    return whole_lanes(window.count) + (sinks ? whole_lanes(sinks->count) : 0) + whole_lanes(tier.count);
  }

  // Whether new token i, which asks, is no padding.
  bool real(std::int64_t n, std::int64_t i) const {
    return line[n * (window.count + length) + window.count + i] > kLogZero;
  }

  // Whether it changes the scores of the tier: nobody is evicted from one that grows.
  bool scored(std::int64_t n, std::int64_t i) const { return !numbers.grows && real(n, i); }

 private:
  void lay_out() {
    const GroupNumbers& g = numbers;
    STD_TORCH_CHECK(g.window > 0 && g.newest > 0 && g.slots > g.newest, "a compressed cache has a window and a tier");
    STD_TORCH_CHECK(keys.head(0).bytes() == g.key_bytes && values.head(0).bytes() == g.value_bytes &&
                    keys.dim / keys.block == g.key_blocks && values.dim / values.block == g.value_blocks,
                "coders are of other sizes");
    const Tensor& rows = states.rows;
    STD_TORCH_CHECK(states.count == batch, "each sequence has a state");
    const auto tokens = [&](std::int64_t count, const Starts& starts, const Widths& widths) {
      return Tokens{g.kv_heads, count, starts, widths, static_cast<char*>(rows.data_ptr()), rows.stride(0), states.pages};
    };
    const Widths exact{g.key_dim, 1, g.value_dim, 1}, coded{g.key_bytes, g.key_blocks, g.value_bytes, g.value_blocks};
    window = tokens(g.window, {g.window_key, g.window_key_exponent, g.window_value, g.window_value_exponent, g.window_log_weight}, exact);
    if (g.sinks) {
      sinks = tokens(g.sinks, {g.sink_key, g.sink_key_exponent, g.sink_value, g.sink_value_exponent, g.sink_log_weight}, exact);
    }
    tier = tokens(g.slots, {g.tier_key, g.tier_key_scale, g.tier_value, g.tier_value_scale, g.tier_score}, coded);
    const std::int64_t end = g.tier_score + g.kv_heads * g.slots * static_cast<std::int64_t>(sizeof(std::int16_t));
    STD_TORCH_CHECK(end <= rows.size(1), "the state is another layer's");
  }

  // The new tokens go into the window at one end; what goes out at the other becomes a sink, or enters the tier.
  void move_log_weights(const float* given) {
    const std::int64_t held = window.count, all = held + length;
    line.resize(batch * all);
    entering.resize(batch * length);
    for (std::int64_t n = 0; n < batch; ++n) {
      float* row = line.data() + n * all;
      std::copy_n(window.log_weights(n), held, row);
      given ? std::copy_n(given + n * length, length, row + held) : std::fill_n(row + held, length, 0.0f);
      std::copy_n(row, length, entering.begin() + n * length);
      std::copy_n(row + length, held, window.log_weights(n));
    }
    take_sinks();
  }

  // The first real tokens that leave the window become sinks as long as slots are free, and are hidden in the tier.
  void take_sinks() {
    if (!sinks) return;
    sources.assign(batch * sinks->count, -1);
    for (std::int64_t n = 0; n < batch; ++n) {
      float* held = sinks->log_weights(n);
      std::int64_t place = std::count_if(held, held + sinks->count, [](float x) { return x > kLogZero; });
      for (std::int64_t i = 0; i < length && place < sinks->count; ++i) {
        float& log_weight = entering[n * length + i];
        if (log_weight <= kLogZero) continue;
        sources[n * sinks->count + place] = i;
        held[place++] = log_weight;
        log_weight = kLogZero;
      }
    }
  }
};

// Token i of `from`, a window, as token j of `to`, a tier. `wide` has room for a vector.
inline void enter(const Group& group, const Tokens& from, std::int64_t i, const Tokens& to, std::int64_t j, std::int64_t n,
                  std::int64_t h, std::vector<std::int16_t>& wide) {
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    const auto *integers = from.row<std::uint8_t>(part, n, h, i), *exponent = from.row<std::uint8_t>(part + 1, n, h, i);
    auto *codes = to.row<std::uint8_t>(part, n, h, j), *scales = to.row<std::uint8_t>(part + 1, n, h, j);
    coding::with_block(coder.block, [&](auto block) { coding::encode<block>(coder, integers, exponent, wide.data(), codes, scales); });
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

// A group, and where its rows of the layer's output go.
struct Job {
  Group group;
  Vectors out;
  double scores;  // that a KV head computes, more or less

  Job(Group given, const Tensor& out)
      : group(std::move(given)), out(out), scores(group.groups * group.length * group.columns()) {}
};

// A KV head of a sequence, and its group.
struct Unit {
  std::size_t group;
  std::int64_t n, h;
};

// All of them, those with most to do first, and those with the same coders one after the other.
inline std::vector<Unit> units_of(const std::vector<Job>& jobs) {
  std::vector<std::size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return jobs[a].scores > jobs[b].scores; });
  std::vector<Unit> units;
  for (const std::size_t which : order) {
    const Group& group = jobs[which].group;
    for (std::int64_t h = 0; h < group.keys.heads; ++h) {
      for (std::int64_t n = 0; n < group.batch; ++n) units.push_back({which, n, h});
    }
  }
  return units;
}

// Says that a part of a KV head's work is done, whatever happens: others wait for it.
struct Done {
  std::atomic<std::int64_t>& count;
  ~Done() { count.fetch_add(1, std::memory_order_release); }
};

inline void wait_for(const std::atomic<std::int64_t>& count, std::int64_t all = 1) {
  while (count.load(std::memory_order_acquire) < all) std::this_thread::yield();
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

}  // namespace dofla::cache
