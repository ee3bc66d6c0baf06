// The operator of a compressed cache: one call for all groups of a layer's heads.
#include "decoding.h"
#include "prefill.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

namespace dofla::tiers {
namespace {

// The groups of a call, with what they take of their own: a row of constants of each side's coders.
struct Groups {
  std::vector<Sizes> all;
  const Tensors &keys, &values;
  const at::Tensor& tables;
  double scaling;
  bool behind = false;
  std::int64_t heads = 0;

  Groups(const std::vector<std::int64_t>& numbers, std::size_t states, const Tensors& keys, const Tensors& values,
         const at::Tensor& tables, double scaling)
      : all(sizes_of(numbers)), keys(keys), values(values), tables(tables), scaling(scaling) {
    TORCH_CHECK(!all.empty() && all.size() == states && all.size() == keys.size() && all.size() == values.size(),
                "each group has sizes, a state and constants");
    for (const Sizes& sizes : all) {
      heads += sizes.heads.size();
      behind |= sizes.behind;
    }
  }

  // Where the output [B, H, L, dv] goes: zeros of heads in no group; float32 if there are features behind a group's tiers.
  // Tokens stand in front of heads, as what comes after attention wants them.
  at::Tensor output(const at::Tensor& query, const at::Tensor& value) const {
    const auto options = value.options().dtype(behind ? at::kFloat : value.scalar_type());
    const std::array shape{query.size(0), query.size(2), query.size(1), value.size(3)};
    return (heads == value.size(1) ? at::empty(shape, options) : at::zeros(shape, options)).transpose(1, 2);
  }

  // The jobs of queries [B, H, L, d], keys [B, Hkv, L, d] and values [B, Hkv, L, dv], with states of each group.
  void add(std::vector<Job>& jobs, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
           const std::optional<at::Tensor>& log_weight, std::vector<States> states, const at::Tensor& out) const {
    for (std::size_t n = 0; n < all.size(); ++n) {
      jobs.emplace_back(
          Group(query, key, value, log_weight, std::move(states[n]), keys[n], values[n], tables, scaling, all[n]), out);
    }
  }
};

// query [B, H, L, d], key [B, Hkv, L, d], value [B, Hkv, L, dv]; of each group the state before [B, bytes], the coders' rows of
// constants and its sizes. Returns the output [B, H, L, dv]; the states after; and of each group with features behind its tiers
// the output's log-normalizer and the keys and the values that leave the last tier, with their log-weights. A vector that holds
// NaN or infinity, which codes cannot keep, is kept as zeros, and the output is NaN: of a query its own row, of a key or a value
// those of its head from its token on. Shapes are said once more in shapes.py, for torch.compile.
Tensors attend_and_code(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const std::optional<at::Tensor>& log_weight, const Tensors& states, const Tensors& keys,
                        const Tensors& values, const at::Tensor& tables, double scaling,
                        const std::vector<std::int64_t>& sizes) {
  const Groups groups(sizes, states.size(), keys, values, tables, scaling);
  const at::Tensor out = groups.output(query, value);
  std::vector<Job> jobs;
  groups.add(jobs, query, key, value, log_weight, std::vector<States>(states.begin(), states.end()), out);
  query.size(2) == 1 ? decode(jobs) : prefill(jobs);
  Tensors found{out};
  for (const Job& job : jobs) found.push_back(job.group.states.after);
  for (const auto& [group, result, scores] : jobs) {
    result.weigh(group);
    found.insert(found.end(), result.left.begin(), result.left.end());
  }
  return found;
}

// Sequences of different lengths, one after the other: query [1, H, L, d], key [1, Hkv, L, d], value [1, Hkv, L, dv], of which
// sequence n has the tokens from starts[n] to starts[n + 1]; those with one token stand first. Of groups without features the
// states are rows `pages` [n], int64, of pools [P, bytes], and are updated there. Returns the output [1, H, L, dv].
at::Tensor attend_and_code_in_pages(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const Tensors& pools, const at::Tensor& pages, const std::vector<std::int64_t>& starts,
                                    const Tensors& keys, const Tensors& values, const at::Tensor& tables, double scaling,
                                    const std::vector<std::int64_t>& sizes) {
  const Groups groups(sizes, pools.size(), keys, values, tables, scaling);
  const std::int64_t sequences = pages.numel();
  TORCH_CHECK(!groups.behind, "states with features are not kept in pages");
  TORCH_CHECK(starts.size() == static_cast<std::size_t>(sequences) + 1 && starts.front() == 0 && starts.back() == query.size(2) &&
                  std::is_sorted(starts.begin(), starts.end()),
              "each sequence has a page and a start, in order");
  const at::Tensor of_sequences = pages.contiguous(), out = groups.output(query, value);
  // Jobs of sequences from `first` on, `count` of them, all of one length.
  const auto jobs_of = [&](std::vector<Job>& jobs, std::int64_t first, std::int64_t count) {
    const at::Tensor own = of_sequences.narrow(0, first, count);
    std::vector<States> states;
    for (const at::Tensor& pool : pools) states.emplace_back(pool, own);
    const auto part = [&](const at::Tensor& x) {
      const at::Tensor rows = x.narrow(2, starts[first], starts[first + count] - starts[first]);
      return count == 1 ? rows : rows.transpose(0, 2);
    };
    groups.add(jobs, part(query), part(key), part(value), std::nullopt, std::move(states), part(out));
  };
  std::int64_t tokens = 0;
  while (tokens < sequences && starts[tokens + 1] - starts[tokens] == 1) ++tokens;
  std::vector<Job> single, longer;
  if (tokens) jobs_of(single, 0, tokens);
  for (std::int64_t n = tokens; n < sequences; ++n) {
    if (const std::int64_t length = starts[n + 1] - starts[n]) jobs_of(length == 1 ? single : longer, n, 1);
  }
  if (!single.empty()) decode(single);
  if (!longer.empty()) prefill(longer);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def(
      "attend_and_code(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor[] states, Tensor[] keys, Tensor[] values, "
      "Tensor tables, float scaling, int[] groups) -> Tensor[]");
  library.impl("attend_and_code", c10::DispatchKey::CPU, &attend_and_code);
  library.def(
      "attend_and_code_in_pages(Tensor query, Tensor key, Tensor value, Tensor(a!)[] pools, Tensor pages, int[] starts, "
      "Tensor[] keys, Tensor[] values, Tensor tables, float scaling, int[] groups) -> Tensor");
  library.impl("attend_and_code_in_pages", c10::DispatchKey::CPU, &attend_and_code_in_pages);
}

}  // namespace dofla::tiers
