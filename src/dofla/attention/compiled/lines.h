// Many tokens on their way into a compressed cache: all are packed in int8, and those that leave the window are coded.
#pragma once

#include "heavy_hitters.h"
#include "together.h"


namespace dofla::cache {

constexpr std::int64_t kPiece = 32;  // tokens that a thread codes at a time
constexpr std::int64_t kApart = kLanes / 4;  // fewer tokens than these are coded one by one

// What window and tier held before, followed by the tokens that came in.
class Lines {
  std::vector<Unwritten<char>> memory_;  // in front of what is made in it

 public:
  Tokens window, tier;
  std::vector<float> tier_weights;  // log-weights [units, n + L]

  explicit Lines(const Group& group) : window(line(group, group.window)), tier(line(group, group.tier)) {
    for (std::int64_t unit = 0; unit < group.units(); ++unit) {
      const std::int64_t n = unit / tier.heads;
      const std::int16_t* held = group.tier.scores(n, unit % tier.heads);
      std::transform(held, held + group.tier.count, std::back_inserter(tier_weights), [](auto x) { return x == kFree ? kLogZero : 0.0f; });
      const float* entering = &group.entering[n * group.length];
      std::transform(entering, entering + group.length, std::back_inserter(tier_weights),
                     [](float x) { return x > kLogZero ? 0.0f : kLogZero; });
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

// The lines, and window and sinks after; and of each KV head, how many tokens come before the first with NaN or infinity.
inline std::vector<std::int64_t> code(const Group& group, const Lines& lines) {
  const std::int64_t heads = group.keys.heads, length = group.length, chunks = (length + kPiece - 1) / kPiece;
  const std::int64_t wide = std::max(group.keys.dim, group.values.dim), window = group.window.count, held = group.tier.count;
  std::vector<char> unsound(group.units() * length);
  const auto for_tokens = [&](const auto& begin_unit, const auto& each) {
    torch::stable::parallel_for(0, group.units() * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> vector(wide);
      std::vector<std::int16_t> integers(wide);
      coding::Together together(wide);
      for (std::int64_t place = begin; place < end; ++place) {
        const std::int64_t unit = place / chunks, first = place % chunks * kPiece, n = unit / heads, h = unit % heads;
        if (first == 0) begin_unit(n, h);
        each(n, h, first, std::min(first + kPiece, length), vector, integers, together);
      }
    });
  };
  for_tokens([&](auto n, auto h) { copy(group.window, lines.window, n, h, 0, 0, window); },
             [&](auto n, auto h, auto i, auto end, auto& vector, auto&, auto&) {
               for (; i < end; ++i) {
                 unsound[(n * heads + h) * length + i] = !pack(group, i, !group.real(n, i), lines.window, window + i, n, h, vector);
               }
             });
  for_tokens([&](auto n, auto h) { copy(group.tier, lines.tier, n, h, 0, 0, held); },
             [&](auto n, auto h, auto i, auto end, auto&, auto& integers, auto& together) {
               // Nobody sees those that come in front of a sequence, as all do in a short prompt.
               for (; i < end && group.entering[n * length + i] <= kLogZero; ++i) clear(lines.tier, n, h, held + i);
               for (; end - i >= kApart; i += std::min(end - i, kLanes)) {
                 enter_together(group, lines.window, i, lines.tier, held + i, std::min(end - i, kLanes), n, h, together);
               }
               for (; i < end; ++i) enter(group, lines.window, i, lines.tier, held + i, n, h, integers);
             });
  std::vector<std::int64_t> sound(group.units());
  for (std::int64_t unit = 0; unit < group.units(); ++unit) {
    const std::int64_t n = unit / heads, h = unit % heads;
    const auto first = unsound.begin() + unit * length;
    sound[unit] = std::find(first, first + length, 1) - first;
    copy(lines.window, group.window, n, h, length, 0, window);
    for (std::int64_t place = 0; group.sinks && place < group.sinks->count; ++place) {
      const std::int64_t source = group.sources[n * group.sinks->count + place];
      if (source >= 0) copy(lines.window, *group.sinks, n, h, source, place, 1);
    }
  }
  return sound;
}

}  // namespace dofla::cache
