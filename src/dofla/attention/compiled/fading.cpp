// The operators of a memory that fades: one call for a group of heads.
#include "decoding.h"
#include "prefill.h"

#include <torch/library.h>

namespace dofla::fading {
namespace {

// query [B, H, L, d], key [B, Hkv, L, d], value [B, Hkv, L, dv]; the state before [B, bytes] and the coders' rows of
// constants; how many tokens the state holds. Returns the output [B, H, L, dv] and the state after. With `behind`, for
// features behind the stages, the output is float32, and after the state come the output's log-normaliser and the keys and
// the values that leave the last stage, with their log-weights. A vector that holds NaN or infinity, which codes cannot
// keep, is kept as zeros, and the output is NaN: of a query its own row, of a key or a value those of its head from its
// token on. Shapes are said once more in shapes.py, for torch.compile.
Tensors fading(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& log_weight, const at::Tensor& state, const at::Tensor& keys,
               const at::Tensor& values, const at::Tensor& tables, double scaling, const std::vector<std::int64_t>& heads,
               bool behind, std::int64_t window, std::int64_t sinks, const std::vector<std::int64_t>& stages,
               std::int64_t kept) {
  const Group group(query, key, value, log_weight, state, keys, values, tables, scaling, heads, {window, sinks, stages, kept});
  return (group.length == 1 ? decode : prefill)(group, value.scalar_type(), behind);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def(
      "fading(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor state, Tensor keys, Tensor values, "
      "Tensor tables, float scaling, int[] heads, bool behind, int window, int sinks, int[] stages, int kept) -> Tensor[]");
  library.impl("fading", c10::DispatchKey::CPU, &fading);
}

}  // namespace dofla::fading
