// The operators of a compressed cache: one call for all groups of a layer's heads.
#include "causal.h"
#include "decoding.h"
#include "prefill.h"
#include "retaining.h"

#include <algorithm>

namespace dofla::cache {
namespace {

using Integers64 = std::vector<std::int64_t>;

// The groups of a layer: their heads one after the other, their numbers (layout.py), what smooths keys and queries, and
// constants of each side's coders.
struct Groups {
  const Integers64 &heads, &numbers;
  const Tensors &smoothing, &keys, &values;
  const Tensor& tables;
  double scaling;

  void check(const Tensor& key) const {
    STD_TORCH_CHECK(!numbers.empty() && numbers.size() % kGroupNumbers == 0 && keys.size() == numbers.size() / kGroupNumbers &&
                    keys.size() == values.size() && heads.size() == static_cast<std::size_t>(key.size(1)),
                "each group has numbers and constants, each KV head a group");
  }

  // The jobs of queries [B, H, L, d], keys [B, Hkv, L, d] and values [B, Hkv, L, dv] with their states.
  void add(std::vector<Job>& jobs, const Tensor& query, const Tensor& key, const Tensor& value,
           const std::optional<Tensor>& log_weight, const States& states, const Tensor& out) const {
    auto head = heads.data();
    for (std::size_t n = 0; n < keys.size(); ++n) {
      GroupNumbers own;
      std::memcpy(&own, &numbers[n * kGroupNumbers], sizeof own);
      STD_TORCH_CHECK(own.kv_heads > 0 && own.kv_heads <= heads.data() + heads.size() - head, "groups have other heads");
      jobs.emplace_back(
          Group(query, key, value, log_weight, states, smoothing, keys[n], values[n], tables, scaling, own, head), out);
      head += own.kv_heads;
    }
  }
};

// Where the output [B, H, L, dv] goes. Tokens stand in front of heads, as what comes after attention wants them.
Tensor output(const Tensor& query, const Tensor& value) {
  const std::int64_t batch = query.size(0), heads = query.size(1), length = query.size(2), dim = value.size(3);
  return empty_strided<4>({batch, heads, length, dim}, {length * heads * dim, dim, heads * dim, 1}, value);
}

// query [B, H, L, d], key [B, Hkv, L, d], value [B, Hkv, L, dv], the states [B, bytes], which are updated. Returns the output
// [B, H, L, dv]. A vector that holds NaN or infinity, which codes cannot keep, is kept as zeros, and the output is NaN: of
// a query its own row, of a key or a value those of its head from its token to the end of the call. Without `attend` the
// output is undefined. For torch.compile, shapes.py says shapes again.
Tensor read_compressed(const Tensor& query, const Tensor& key, const Tensor& value,
                           const std::optional<Tensor>& log_weight, const Tensor& state, const Tensors& smoothing,
                           const Tensors& keys, const Tensors& values, const Tensor& tables, double scaling, const Integers64& heads,
                           const Integers64& numbers, bool attend) {
  const Groups groups{heads, numbers, smoothing, keys, values, tables, scaling};
  groups.check(key);
  STD_TORCH_CHECK(query.size(2) == key.size(2), "each token has a query");
  const Tensor out = output(query, value);
  std::vector<Job> jobs;
  groups.add(jobs, query, key, value, log_weight, States(state), out);
  query.size(2) == 1 ? decode(jobs) : prefill(jobs, attend);
  return out;
}

// Causal softmax attention [B, H, L, dv] of queries [B, H, L, d] of the last of the tokens with keys [B, Hkv, P, d] and values
// [B, Hkv, P, dv]. Those that are not `real` [B, Hkv, P] are seen by nobody, and have an output of zeros. NaN or infinity makes NaN as
// above.
Tensor softmax_attention(const Tensor& query, const Tensor& key, const Tensor& value, double scaling, const std::optional<Tensor>& real) {
  STD_TORCH_CHECK(query.size(2) <= key.size(2) && key.size(2) == value.size(2) && query.size(3) == key.size(3) && query.size(1) % key.size(1) == 0,
                  "each token has a key and a value, each KV head as many queries");
  STD_TORCH_CHECK(!real || (real->scalar_type() == ScalarType::Bool && real->is_contiguous() && real->numel() * key.size(3) == key.numel()),
                  "each token of a KV head is real or not");
  const Tensor out = output(query, value);
  const bool* there = real ? real->const_data_ptr<bool>() : nullptr;
#ifdef __AVX512BF16__
  const bool half = query.scalar_type() == ScalarType::BFloat16 && key.scalar_type() == ScalarType::BFloat16;
  if (half && value.scalar_type() == ScalarType::BFloat16 && multiplies_half()) {
    causal::attend<Half>(query, key, value, static_cast<float>(scaling), there, out);
    return out;
  }
#endif
  causal::attend<float>(query, key, value, static_cast<float>(scaling), there, out);
  return out;
}

// The states [B, bytes] after keys [B, Hkv, L, d] and values [B, Hkv, L, dv], which begin sequences, where the importance
// [B, Hkv, L] of tokens is known; the given ones are empty. The attention of the last queries [B, H, Q, d] counts beside it.
void retain_important(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& importance, const Tensor& state,
                      const Tensors& smoothing, const Tensors& keys, const Tensors& values, const Tensor& tables, double scaling,
                      const Integers64& heads, const Integers64& numbers) {
  const Groups groups{heads, numbers, smoothing, keys, values, tables, scaling};
  groups.check(key);
  STD_TORCH_CHECK(importance.scalar_type() == ScalarType::Float && importance.is_contiguous() && importance.dim() == 3 &&
                  importance.size(0) == key.size(0) && importance.size(1) == key.size(1) && importance.size(2) == key.size(2),
              "each key has an importance, in float32");
  std::vector<Job> jobs;
  groups.add(jobs, query, key, value, std::nullopt, States(state), value);
  const Lately lately{Vectors(query, smoothing, query.size(1) / key.size(1)), query.size(2)};
#ifdef __AVX512BF16__
  if (lately.query.half() && multiplies_half()) return retain<Half>(jobs, importance, lately);
#endif
  retain<float>(jobs, importance, lately);
}

// The tokens of several sequences, one after the other: query [L, H, 1, d], key [L, Hkv, 1, d], value [L, Hkv, 1, dv], of which
// sequence n has those from starts[n] to starts[n + 1]; those with one token stand first. Their states are rows `pages` [n],
// int64, of the pool [P, bytes], and are updated there. Returns the output [L, H, 1, dv].
Tensor read_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& pool,
                      const Tensor& pages, const Integers64& starts, const Tensors& smoothing, const Tensors& keys, const Tensors& values,
                      const Tensor& tables, double scaling, const Integers64& heads, const Integers64& numbers) {
  const Groups groups{heads, numbers, smoothing, keys, values, tables, scaling};
  groups.check(key);
  const std::int64_t sequences = pages.numel();
  STD_TORCH_CHECK(starts.size() == static_cast<std::size_t>(sequences) + 1 && starts.front() == 0 && starts.back() == query.size(0) &&
                  std::is_sorted(starts.begin(), starts.end()),
              "each sequence has a page and a start, in order");
  const Tensor of_sequences = torch::stable::contiguous(pages), out = output(query, value);
  // Jobs of sequences from `first` on, `count` of them, all of one length.
  const auto add = [&](std::vector<Job>& jobs, std::int64_t first, std::int64_t count) {
    const States states(pool, count, of_sequences.const_data_ptr<std::int64_t>() + first);
    const std::int64_t length = starts[first + 1] - starts[first];
    const auto part = [&](const Tensor& x) {
      const std::int64_t row = x.stride(0);
      return viewed<4>(x, {count, x.size(1), length, x.size(3)}, {length * row, x.stride(1), row, x.stride(3)}, starts[first] * row);
    };
    groups.add(jobs, part(query), part(key), part(value), std::nullopt, states, part(out));
  };
  std::int64_t tokens = 0;
  while (tokens < sequences && starts[tokens + 1] - starts[tokens] == 1) ++tokens;
  std::vector<Job> single, longer;
  if (tokens) add(single, 0, tokens);
  for (std::int64_t n = tokens; n < sequences; ++n) {
    if (const std::int64_t length = starts[n + 1] - starts[n]) add(length == 1 ? single : longer, n, 1);
  }
  if (!single.empty()) decode(single);
  if (!longer.empty()) prefill(longer);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dofla, library) {
  library.def(
      "read_compressed(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor(a!) state, Tensor[] smoothing, "
      "Tensor[] keys, Tensor[] values, Tensor tables, float scaling, int[] heads, int[] groups, bool attend=True) -> Tensor");
  library.def("softmax_attention(Tensor query, Tensor key, Tensor value, float scaling, Tensor? real=None) -> Tensor");
  library.def(
      "retain_important(Tensor query, Tensor key, Tensor value, Tensor importance, Tensor(a!) state, Tensor[] smoothing, "
      "Tensor[] keys, Tensor[] values, Tensor tables, float scaling, int[] heads, int[] groups) -> ()");
  library.def(
      "read_pages(Tensor query, Tensor key, Tensor value, Tensor(a!) pool, Tensor pages, int[] starts, Tensor[] smoothing, "
      "Tensor[] keys, Tensor[] values, Tensor tables, float scaling, int[] heads, int[] groups) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dofla, CPU, library) {
  library.impl("read_compressed", TORCH_BOX(&read_compressed));
  library.impl("softmax_attention", TORCH_BOX(&softmax_attention));
  library.impl("retain_important", TORCH_BOX(&retain_important));
  library.impl("read_pages", TORCH_BOX(&read_pages));
}

}  // namespace dofla::cache
