// The operators of a memory that fades: one call for a group of heads.
#include "decoding.h"
#include "prefill.h"

#include <torch/library.h>

namespace dofla::fading {
namespace {

// query [B, H, L, d], key [B, Hkv, L, d], value [B, Hkv, L, dv]; the state before and the constants as Group takes them.
// Returns the output [B, H, L, dv] and the state after: window, stages, sinks. With `behind`, for features behind the
// stages, the output is float32, and after it come its log-normaliser and the keys and the values that leave the last
// stage, with their log-weights. There is a `score` if the last stage keeps tokens beyond the `newest`; that after
// stands behind its tokens. A vector that holds NaN or infinity, which codes cannot keep, is kept as
// zeros, and the output is NaN: of a query its own row, of a key or a value those of its head from its token on.
// Shapes are said once more in shapes.py, for torch.compile.
Tensors fading(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& log_weight, const Tensors& window, const Tensors& sinks,
               const Tensors& stages, const Tensors& coders, const at::Tensor& tables, double scaling,
               const std::vector<std::int64_t>& heads, bool behind, const std::optional<at::Tensor>& score,
               std::int64_t newest) {
  Group group(query, key, value, log_weight, window, sinks, stages, coders, tables, scaling, heads, score, newest);
  return (group.length == 1 ? decode : prefill)(group, value.scalar_type(), behind);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def(
      "fading(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor[] window, Tensor[] sinks, "
      "Tensor[] stages, Tensor[] coders, Tensor tables, float scaling, int[] heads, bool behind, "
      "Tensor? score, int newest) -> Tensor[]");
  library.impl("fading", c10::DispatchKey::CPU, &fading);
}

}  // namespace dofla::fading
