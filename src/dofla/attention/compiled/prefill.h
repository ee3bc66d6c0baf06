// Many tokens through a compressed cache: all are coded, then blocks of queries see their bands.
#pragma once

#include "reading.h"

namespace dofla::cache {

// How many queries are done at once. In a short prompt they would see few of the columns of a large block.
inline std::int64_t rows_at_once(std::int64_t length) { return std::min<std::int64_t>(length, length > 512 ? 64 : 32); }

// A group's tokens once they are coded.
struct Prompt {
  Lines lines;
  std::vector<std::int64_t> sound;
  Evictions evictions;

  Prompt(const Group& group, bool attend)
      : lines(group), sound(code(group, lines)), evictions(group, rows_at_once(group.length), attend) {}
};

// What threads do of prompts, which may be of different lengths. Of each KV head somebody has to let tokens enter its tier one
// after the other before blocks of its queries can be read. Whoever is free takes what comes next: first all of the former.
// Without `attend` there are no blocks.
class Work {
 public:
  Work(const std::vector<Job>& jobs, bool attend)
      : jobs_(jobs), units_(units_of(jobs)), chosen_(units_.size()) {
    for (const Job& job : jobs) prompts_.emplace_back(job.group, attend);
    for (std::size_t unit = 0; attend && unit < units_.size(); ++unit) {
      const std::int64_t length = jobs[units_[unit].group].group.length;
      for (std::int64_t first = 0; first < length; first += prompts_[units_[unit].group].evictions.block) blocks_.push_back({unit, first});
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
  // Queries of a unit, from one on.
  struct Block {
    std::size_t unit;
    std::int64_t first;
  };

  template <typename Real>
  void take() {
    const std::size_t choices = units_.size(), all = choices + blocks_.size();
    std::size_t place = next_++;
    Mine<Drawing> drawing;
    for (; place < choices; place = next_++) select(place, drawing);
    Mine<Reader<Real>> reader;
    for (; place < all; place = next_++) read(blocks_[place - choices], reader);
    Operands<Real>::release();
  }

  void select(std::size_t place, Mine<Drawing>& mine) {
    const Done done{chosen_[place]};
    const auto [which, n, h] = units_[place];
    const Group& group = jobs_[which].group;
    Prompt& prompt = prompts_[which];
    Evictions& evictions = prompt.evictions;
    Drawing& drawing = mine.of(which, group, evictions.block * group.groups, evictions.places + evictions.block);
    select_survivors(group, prompt.lines.tier, n, h, drawing, evictions);
  }

  template <typename Real>
  void read(const Block& block, Mine<Reader<Real>>& mine) {
    const auto [place, first] = block;
    const auto [which, n, h] = units_[place];
    const Group& group = jobs_[which].group;
    auto& [lines, sound, evictions] = prompts_[which];
    wait_for(chosen_[place]);
    mine.of(which, group, lines, evictions).attend(n, h, first, sound[n * group.keys.heads + h], jobs_[which].out);
  }

  const std::vector<Job>& jobs_;
  std::vector<Prompt> prompts_;
  std::vector<Unit> units_;
  std::vector<Block> blocks_;
  std::vector<std::atomic<bool>> chosen_;
  std::atomic<std::size_t> next_ = 0;
};

inline void prefill(const std::vector<Job>& jobs, bool attend = true) {
  Work work(jobs, attend);
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) work.take();
  });
}

}  // namespace dofla::cache
