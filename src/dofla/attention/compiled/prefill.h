// Many tokens through a compressed cache: all are coded, then blocks of queries see their bands.
#pragma once

#include "reading.h"

namespace dofla::cache {

// How many queries are done at once. In a short prompt they would see few of the columns of a large block.
inline std::int64_t rows_at_once(std::int64_t length) { return std::min<std::int64_t>(length, length > 512 ? 64 : 32); }

// A group's tokens on their way.
struct Prompt {
  Lines lines;
  Evictions evictions;

  Prompt(const Group& group, bool attend) : lines(group), evictions(group, rows_at_once(group.length), attend) {}
};

// What threads do of prompts, which may be of different lengths. Of each KV head all tokens are packed, then coded, in pieces; then
// somebody has to let them enter its tier one after the other, before blocks of its queries can be read. Whoever is free takes
// what comes next, first all of the first kind, and waits for what it needs: were each kind a loop of its own, all threads would
// wait for the slowest each time. Without `attend` there are no blocks.
class Work {
 public:
  Work(const std::vector<Job>& jobs, bool attend)
      : jobs_(jobs), units_(units_of(jobs)), packed_(units_.size()), coded_(units_.size()), chosen_(units_.size()) {
    for (const Job& job : jobs) prompts_.emplace_back(job.group, attend);
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      const std::int64_t length = length_of(unit), block = prompts_[units_[unit].group].evictions.block;
      for (std::int64_t first = 0; first < length; first += kPiece) pieces_.push_back({unit, first});
      for (std::int64_t first = 0; attend && first < length; first += block) blocks_.push_back({unit, first});
    }
  }

  // One thread's share.
  void take() {
#ifdef __AVX512BF16__
    if (jobs_[0].group.query.half() && multiplies_half()) return take<Half>();
#endif
    take<float>();
  }

 private:
  // Tokens of a unit, from one on.
  struct Part {
    std::size_t unit;
    std::int64_t first;
  };

  std::int64_t pieces_of(std::size_t unit) const { return (length_of(unit) + kPiece - 1) / kPiece; }
  std::int64_t length_of(std::size_t unit) const { return jobs_[units_[unit].group].group.length; }

  template <typename Real>
  void take() {
    const std::size_t packed = pieces_.size(), coded = 2 * packed, chosen = coded + units_.size(), all = chosen + blocks_.size();
    std::size_t place = next_++;
    {
      Mine<Packing> packing;
      for (; place < packed; place = next_++) pack(pieces_[place], packing);
      for (; place < coded; place = next_++) code(pieces_[place - packed], packing);
    }
    {
      Mine<Drawing> drawing;
      for (; place < chosen; place = next_++) select(place - coded, drawing);
    }
    Mine<Reader<Real>> reader;
    for (; place < all; place = next_++) read(blocks_[place - chosen], reader);
    Operands<Real>::release();
  }

  void pack(const Part& piece, Mine<Packing>& mine) {
    const auto [place, first] = piece;
    const Done done{packed_[place]};
    const auto [which, n, h] = units_[place];
    const Group& group = jobs_[which].group;
    prompts_[which].lines.pack_piece(group, n, h, first, mine.of(which, group));
  }

  void code(const Part& piece, Mine<Packing>& mine) {
    const auto [place, first] = piece;
    const Done done{coded_[place]};
    const auto [which, n, h] = units_[place];
    const Group& group = jobs_[which].group;
    wait_for(packed_[place], pieces_of(place));
    prompts_[which].lines.code_piece(group, n, h, first, mine.of(which, group));
  }

  void select(std::size_t place, Mine<Drawing>& mine) {
    const Done done{chosen_[place]};
    const auto [which, n, h] = units_[place];
    const Group& group = jobs_[which].group;
    Prompt& prompt = prompts_[which];
    wait_for(coded_[place], pieces_of(place));
    prompt.lines.finish(group, n, h);
    Evictions& evictions = prompt.evictions;
    Drawing& drawing = mine.of(which, group, evictions.block * group.groups, evictions.places + evictions.block);
    select_survivors(group, prompt.lines.tier, n, h, drawing, evictions);
  }

  template <typename Real>
  void read(const Part& block, Mine<Reader<Real>>& mine) {
    const auto [place, first] = block;
    const auto [which, n, h] = units_[place];
    const Group& group = jobs_[which].group;
    auto& [lines, evictions] = prompts_[which];
    wait_for(chosen_[place]);
    mine.of(which, group, lines, evictions).attend(n, h, first, lines.sound[n * group.keys.heads + h], jobs_[which].out);
  }

  const std::vector<Job>& jobs_;
  std::vector<Prompt> prompts_;
  std::vector<Unit> units_;
  std::vector<Part> pieces_, blocks_;
  std::vector<std::atomic<std::int64_t>> packed_, coded_, chosen_;  // how much is done of each unit
  std::atomic<std::size_t> next_ = 0;
};

inline void prefill(const std::vector<Job>& jobs, bool attend = true) {
  Work work(jobs, attend);
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) work.take();
  });
}

}  // namespace dofla::cache
