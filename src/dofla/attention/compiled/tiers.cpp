// The operator of a compressed cache: one call for all groups of a layer's heads.
#include "decoding.h"
#include "prefill.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace dofla::tiers {
namespace {

// query [B, H, L, d], key [B, Hkv, L, d], value [B, Hkv, L, dv]; of each group its states, the coders' rows of constants and its
// sizes. Fills the output [B, H, L, dv], zeros of heads in no group, which is float32 if there are features behind a group's
// tiers. A vector that holds NaN or infinity, which codes cannot keep, is kept as zeros, and the output is NaN: of a query its
// own row, of a key or a value those of its head from its token on.
std::pair<at::Tensor, std::vector<Job>> read(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const std::optional<at::Tensor>& log_weight, std::vector<States> states,
                                             const Tensors& keys, const Tensors& values, const at::Tensor& tables,
                                             double scaling, const std::vector<Sizes>& all) {
  TORCH_CHECK(!all.empty() && all.size() == states.size() && all.size() == keys.size() && all.size() == values.size(),
              "each group has sizes, a state and constants");
  std::int64_t heads = 0;
  bool behind = false;
  for (const Sizes& sizes : all) {
    heads += sizes.heads.size();
    behind |= sizes.behind;
  }
  // Tokens stand in front of heads, as what comes after attention wants them.
  const auto options = value.options().dtype(behind ? at::kFloat : value.scalar_type());
  const std::array shape{query.size(0), query.size(2), query.size(1), value.size(3)};
  const at::Tensor out = (heads == key.size(1) ? at::empty(shape, options) : at::zeros(shape, options)).transpose(1, 2);
  std::vector<Job> jobs;
  for (std::size_t n = 0; n < all.size(); ++n) {
    jobs.emplace_back(
        Group(query, key, value, log_weight, std::move(states[n]), keys[n], values[n], tables, scaling, all[n]), out);
  }
  query.size(2) == 1 ? decode(jobs) : prefill(jobs);
  return {out, std::move(jobs)};
}

// The output; of each group the states [B, bytes] after those given; and of each group with features the output's
// log-normalizer and the keys and the values that leave the last tier, with their log-weights. Shapes are said once more in
// shapes.py, for torch.compile.
Tensors attend_and_code(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const std::optional<at::Tensor>& log_weight, const Tensors& states, const Tensors& keys,
                        const Tensors& values, const at::Tensor& tables, double scaling,
                        const std::vector<std::int64_t>& groups) {
  std::vector<States> given(states.begin(), states.end());
  const auto [out, jobs] =
      read(query, key, value, log_weight, std::move(given), keys, values, tables, scaling, sizes_of(groups));
  Tensors found{out};
  for (const Job& job : jobs) found.push_back(job.group.states.after);
  for (const auto& [group, result, scores] : jobs) {
    result.weigh(group);
    found.insert(found.end(), result.left.begin(), result.left.end());
  }
  return found;
}

// The output alone, of groups without features: the states are rows `pages` [B], int64, of pools [P, bytes], and are updated
// there.
at::Tensor attend_and_code_in_pages(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const Tensors& pools, const at::Tensor& pages, const Tensors& keys, const Tensors& values,
                                    const at::Tensor& tables, double scaling, const std::vector<std::int64_t>& groups) {
  const std::vector<Sizes> all = sizes_of(groups);
  for (const Sizes& sizes : all) TORCH_CHECK(!sizes.behind, "states with features are not kept in pages");
  const at::Tensor of_sequences = pages.contiguous();
  std::vector<States> given;
  for (const at::Tensor& pool : pools) given.emplace_back(pool, of_sequences);
  return read(query, key, value, std::nullopt, std::move(given), keys, values, tables, scaling, all).first;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def(
      "attend_and_code(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor[] states, Tensor[] keys, Tensor[] values, "
      "Tensor tables, float scaling, int[] groups) -> Tensor[]");
  library.impl("attend_and_code", c10::DispatchKey::CPU, &attend_and_code);
  library.def(
      "attend_and_code_in_pages(Tensor query, Tensor key, Tensor value, Tensor(a!)[] pools, Tensor pages, Tensor[] keys, "
      "Tensor[] values, Tensor tables, float scaling, int[] groups) -> Tensor");
  library.impl("attend_and_code_in_pages", c10::DispatchKey::CPU, &attend_and_code_in_pages);
}

}  // namespace dofla::tiers
