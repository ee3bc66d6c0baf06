// Many tokens on their way into a compressed cache: all are packed in int8, and those that leave the window are coded.
#pragma once

#include "heavy_hitters.h"
#include "together.h"

namespace dofla::cache {

constexpr std::int64_t kPiece = 32;  // tokens that a thread codes at a time
constexpr std::int64_t kApart = kLanes / 4;  // fewer tokens than these are coded one by one

// Tokens i, i + 1, ... of the window's line as enter has them, `count` of them, up to kLanes.
inline void enter_together(const Group& group, const Tokens& from, std::int64_t i, const Tokens& to, std::int64_t j,
                           std::int64_t count, std::int64_t n, std::int64_t h, coding::Together& scratch) {
  const auto rows = [&](const Tokens& tokens, std::int64_t part, std::int64_t first) {
    return coding::BytesOf{tokens.row<std::uint8_t>(part, n, h, first), tokens.widths[part]};
  };
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    coding::with_block(coder.block, [&](auto block) {
      coding::encode<block>(coder, rows(from, part, i), rows(from, part + 1, i), count, scratch, rows(to, part, j), rows(to, part + 1, j));
    });
  }
}

// One thread's scratch memory.
struct Packing {
  std::vector<float> vector;
  std::vector<std::int16_t> integers;
  coding::Together together;

  explicit Packing(const Group& group)
      : vector(std::max(group.keys.dim, group.values.dim)), integers(vector.size()), together(vector.size()) {}
};

// What window and tier held before, followed by the tokens that came in. All pieces of a KV head's tokens are packed, then all
// are coded, then it is finished.
class Lines {
  std::vector<Unwritten<char>> memory_;  // in front of what is made in it
  std::vector<char> unsound_;            // tokens with NaN or infinity

 public:
  Tokens window, tier;
  std::vector<float> tier_weights;  // log-weights [units, n + L]
  std::vector<std::int64_t> sound;  // [units], how many tokens come before the first with NaN or infinity

  explicit Lines(const Group& group)
      : unsound_(group.units() * group.length), window(line(group, group.window)), tier(line(group, group.tier)), sound(group.units()) {
    for (std::int64_t unit = 0; unit < group.units(); ++unit) {
      const std::int64_t n = unit / tier.heads;
      const std::int16_t* held = group.tier.scores(n, unit % tier.heads);
      std::transform(held, held + group.tier.count, std::back_inserter(tier_weights), [](auto x) { return x == kFree ? kLogZero : 0.0f; });
      const float* entering = &group.entering[n * group.length];
      std::transform(entering, entering + group.length, std::back_inserter(tier_weights),
                     [](float x) { return x > kLogZero ? 0.0f : kLogZero; });
    }
  }

  void pack_piece(const Group& group, std::int64_t n, std::int64_t h, std::int64_t first, Packing& scratch) {
    const std::int64_t held = group.window.count, end = std::min(first + kPiece, group.length);
    if (first == 0) copy(group.window, window, n, h, 0, 0, held);
    for (std::int64_t i = first; i < end; ++i) {
      unsound_[(n * window.heads + h) * group.length + i] = !pack(group, i, !group.real(n, i), window, held + i, n, h, scratch.vector);
    }
  }

  void code_piece(const Group& group, std::int64_t n, std::int64_t h, std::int64_t first, Packing& scratch) {
    const std::int64_t held = group.tier.count, end = std::min(first + kPiece, group.length);
    if (first == 0) copy(group.tier, tier, n, h, 0, 0, held);
    std::int64_t i = first;
    // Nobody sees those that come in front of a sequence, as all do in a short prompt.
    for (; i < end && group.entering[n * group.length + i] <= kLogZero; ++i) clear(tier, n, h, held + i);
    for (; end - i >= kApart; i += std::min(end - i, kLanes)) {
      enter_together(group, window, i, tier, held + i, std::min(end - i, kLanes), n, h, scratch.together);
    }
    for (; i < end; ++i) enter(group, window, i, tier, held + i, n, h, scratch.integers);
  }

  // Window and sinks after.
  void finish(const Group& group, std::int64_t n, std::int64_t h) {
    const std::int64_t unit = n * window.heads + h;
    const auto first = unsound_.begin() + unit * group.length;
    sound[unit] = std::find(first, first + group.length, 1) - first;
    copy(window, group.window, n, h, group.length, 0, group.window.count);
    for (std::int64_t place = 0; group.sinks && place < group.sinks->count; ++place) {
      const std::int64_t source = group.sources[n * group.sinks->count + place];
      if (source >= 0) copy(window, *group.sinks, n, h, source, place, 1);
    }
  }

 private:
  Tokens line(const Group& group, const Tokens& of) {
    Tokens longer{of.heads, of.count + group.length, {}, of.widths};
    for (std::int64_t part = 0, end = 0; part < 4; ++part) {
      longer.starts[part] = end;
      end += (longer.heads * longer.count * of.widths[part] + kAlignment - 1) / kAlignment * kAlignment;
      longer.stride = end;
    }
    longer.rows = memory_.emplace_back(group.batch * longer.stride).data();
    return longer;
  }
};

}  // namespace dofla::cache
