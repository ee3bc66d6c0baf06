// Many tokens on their way into a compressed cache: all are coded, tier by tier.
#pragma once

#include "heavy_hitters.h"
#include "together.h"

#include <ATen/Parallel.h>

namespace dofla::tiers {

constexpr std::int64_t kApart = kLanes / 4;  // fewer tokens than these are coded one by one

// What each kind of tokens held before, followed by those that came in.
struct Lines {
  Tokens window;
  std::vector<Tokens> tiers;

  explicit Lines(const Group& group) {
    window = line(group, group.window);
    for (const Tokens& tokens : group.tiers) tiers.push_back(line(group, tokens));
  }

  const Tokens& before(std::size_t tier) const { return tier ? tiers[tier - 1] : window; }

 private:
  Tokens line(const Group& group, const Tokens& of) {
    Cut cut;
    const Tokens longer(of.heads, of.count + group.length, of.apart, of.widths, cut);
    memory_.push_back(at::empty({group.batch, cut.end()}, at::kByte));
    return longer.in(memory_.back());
  }

  std::vector<at::Tensor> memory_;
};

// Tokens i, i + 1, ... as enter has them, `count` of them, up to kLanes.
inline void enter_together(const Group& group, std::int64_t tier, const Tokens& from, std::int64_t i, const Tokens& to,
                           std::int64_t j, std::int64_t count, std::int64_t n, std::int64_t h, coding::Together& scratch) {
  const auto rows = [&](const Tokens& tokens, std::int64_t part, std::int64_t first) {
    return coding::BytesOf{tokens.row<std::uint8_t>(part, n, h, first), tokens.widths[part]};
  };
  for (const std::int64_t part : {0, 2}) {
    const coding::Coder coder = (part == 0 ? group.keys : group.values).head(h);
    const auto codes = rows(from, part, i), scales = rows(from, part + 1, i);
    const auto to_codes = rows(to, part, j), to_scales = rows(to, part + 1, j);
    coding::with_block(coder.block, [&](auto block) {
      if (tier > 0) {
        coding::age<block>(coder, tier - 1, codes, scales, count, to_codes, to_scales);
      } else {
        coding::encode<block>(coder, codes, scales, count, scratch, to_codes, to_scales);
      }
    });
  }
}

// The lines, and the state after; and of each KV head, how many tokens come before the first whose key or value holds NaN
// or infinity.
inline std::vector<std::int64_t> code(const Group& group, const Lines& lines) {
  const std::int64_t heads = group.keys.heads, length = group.length, chunks = (length + kChunk - 1) / kChunk;
  const std::int64_t wide = std::max(group.keys.dim, group.values.dim);
  std::vector<char> unsound(group.units() * length);
  const auto for_tokens = [&](const auto& begin_unit, const auto& each) {
    at::parallel_for(0, group.units() * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> vector(wide);
      std::vector<std::int16_t> integers(wide);
      coding::Together together(wide);
      for (std::int64_t place = begin; place < end; ++place) {
        const std::int64_t unit = place / chunks, first = place % chunks * kChunk, n = unit / heads, h = unit % heads;
        if (first == 0) begin_unit(n, h);
        each(n, h, first, std::min(first + kChunk, length), vector, integers, together);
      }
    });
  };
  const std::int64_t window = group.window.count;
  for_tokens([&](auto n, auto h) { copy(group.window, lines.window, n, h, 0, 0, window); },
             [&](auto n, auto h, auto i, auto end, auto& vector, auto&, auto&) {
               for (; i < end; ++i) {
                 const bool hidden = group.lines[0][n * (window + length) + window + i] <= kLogZero;
                 unsound[(n * heads + h) * length + i] = !pack(group, i, hidden, lines.window, window + i, n, h, vector);
               }
             });
  for (std::size_t tier = 0; tier < lines.tiers.size(); ++tier) {
    const Tokens &line = lines.tiers[tier], &from = lines.before(tier);
    const std::int64_t count = group.tiers[tier].count;
    for_tokens([&](auto n, auto h) { copy(group.tiers[tier], line, n, h, 0, 0, count); },
               [&](auto n, auto h, auto i, auto end, auto&, auto& integers, auto& together) {
                 for (; end - i >= kApart; i += std::min(end - i, kLanes)) {
                   enter_together(group, tier, from, i, line, count + i, std::min(end - i, kLanes), n, h, together);
                 }
                 for (; i < end; ++i) enter(group, tier, from, i, line, count + i, n, h, integers);
               });
  }
  std::vector<std::int64_t> sound(group.units());
  for (std::int64_t unit = 0; unit < group.units(); ++unit) {
    const std::int64_t n = unit / heads, h = unit % heads;
    const auto first = unsound.begin() + unit * length;
    sound[unit] = std::find(first, first + length, 1) - first;
    copy(lines.window, group.window_after, n, h, length, 0, window);
    for (std::size_t tier = 0; tier < lines.tiers.size() && !group.keeps(tier); ++tier) {
      copy(lines.tiers[tier], group.tiers_after[tier], n, h, length, 0, group.tiers[tier].count);
    }
    for (std::int64_t place = 0; group.sinks && place < group.sinks->count; ++place) {
      const std::int64_t source = group.sources[n * group.sinks->count + place];
      if (source >= 0) copy(lines.window, *group.sinks_after, n, h, source, place, 1);
    }
  }
  return sound;
}

}  // namespace dofla::tiers
