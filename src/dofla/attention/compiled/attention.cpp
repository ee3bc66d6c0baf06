// The operator: which threads do what, and where in the tensors.
#include "exact.h"
#include "features.h"
#include "tensor.h"

#include <optional>
#include <tuple>
#include <vector>

namespace dofla {
namespace {

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Whether each sequence's numbers [B, L] follow each other; a single one has no stride to speak of.
bool in_a_row(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1; }

// Where head h of sequence n begins.
const float* start(const Tensor& t, std::int64_t n, std::int64_t h) {
  return t.const_data_ptr<float>() + n * t.stride(0) + h * t.stride(1);
}

// The inputs of KV head h of sequence n, and of its query heads.
HeadInputs inputs(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& log_weight,
                  std::int64_t n, std::int64_t h, std::int64_t groups) {
  const float* weight = log_weight.const_data_ptr<float>() + n * log_weight.stride(0);
  return {start(query, n, h * groups), start(key, n, h), start(value, n, h), weight,
          query.stride(1), query.stride(2), key.stride(2), value.stride(2)};
}

// One of two affine maps, if there are any: weight [Hkv, M, d] and bias [Hkv, M] of each; scale and curvature of each.
features::Map map_of(std::size_t which, const Tensors& maps, const std::vector<double>& numbers) {
  if (maps.empty()) return {nullptr, nullptr, 1.0f, 0.0f};
  const Tensor &weight = maps[2 * which], &bias = maps[2 * which + 1];
  STD_TORCH_CHECK(weight.is_contiguous() && bias.is_contiguous(), "maps must be contiguous");
  return {weight.const_data_ptr<float>(), bias.const_data_ptr<float>(), static_cast<float>(numbers[2 * which]),
          static_cast<float>(numbers[2 * which + 1])};
}

// The exact part of a hybrid layer: query [B, H, L, d]; key and value [B, Hkv, L + window - 1, .] and log_weight
// [B, L + window - 1] of near tokens; s sinks [B, Hkv, s, .], their log-weights and the row they are seen from [B, s].
struct Exact {
  const Tensor &query, &key, &value, &log_weight, &sink_key, &sink_value, &sink_log_weight, &visible_from;
  std::int64_t window;
  float scaling;

  Exact(const Tensors& t, std::int64_t window, double scaling)
      : query(t[0]), key(t[1]), value(t[2]), log_weight(t[3]), sink_key(t[4]), sink_value(t[5]), sink_log_weight(t[6]),
        visible_from(t[7]), window(window), scaling(static_cast<float>(scaling)) {
    STD_TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1 && in_a_row(log_weight) &&
                    sink_key.is_contiguous() && sink_value.is_contiguous() && sink_log_weight.is_contiguous() &&
                    visible_from.is_contiguous(),
                "rows must be contiguous");
  }

  exact::Sizes sizes() const { return {query.size(3), value.size(3), window, sink_key.size(2)}; }

  exact::Head head(std::int64_t n, std::int64_t h, std::int64_t groups) const {
    const std::int64_t unit = n * key.size(1) + h, sinks = sink_key.size(2);
    exact::Head head{inputs(query, key, value, log_weight, n, h, groups)};
    head.rows = query.size(2);
    head.sink_key = sink_key.const_data_ptr<float>() + unit * sinks * query.size(3);
    head.sink_value = sink_value.const_data_ptr<float>() + unit * sinks * value.size(3);
    head.sink_log_weight = sink_log_weight.const_data_ptr<float>() + n * sinks;
    head.visible_from = visible_from.const_data_ptr<std::int64_t>() + n * sinks;
    return head;
  }
};

// One thread's part of the work.
struct Worker {
  features::Worker features;
  std::optional<exact::Worker> windows;

  Worker(const features::Sizes& sizes, const std::optional<Exact>& exact) : features(sizes) {
    if (exact) windows.emplace(exact->sizes());
  }
};

// query [B, H, L, M or d], key [B, Hkv, L, M or d], value [B, Hkv, L, dv], log_weight [B, L] and mean [B, Hkv, M, dv] in
// float32, log_mass [B, Hkv, M] in float64. The log-normalizer is that of the features alone.
Result linear_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& log_weight, const Tensor& mean, const Tensor& log_mass,
                        const Tensors& maps, const std::vector<double>& map_numbers,
                        const Tensors& exact_part, std::int64_t window, double scaling) {
  STD_TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1 && in_a_row(log_weight),
              "rows must be contiguous");
  const std::int64_t batch = query.size(0), heads = query.size(1), length = query.size(2), kv_heads = key.size(1);
  const features::Sizes sizes{mean.size(2), query.size(3), value.size(3), heads / kv_heads};
  const features::Map query_map = map_of(0, maps, map_numbers), key_map = map_of(1, maps, map_numbers);
  std::optional<Exact> exact;
  if (!exact_part.empty()) exact.emplace(exact_part, window, scaling);
  const Tensor out = empty<4>({batch, heads, length, sizes.value_dim}, query);
  const Tensor normalizer = empty<3>({batch, heads, length}, query);
  const Tensor mean_after = copied(mean);
  const Tensor log_mass_after = copied(log_mass);

  const std::int64_t units = batch * kv_heads, chunks = (length + kChunk - 1) / kChunk;
  const std::int64_t mean_size = sizes.features * sizes.value_dim;
  const auto tokens = [&](std::int64_t unit, std::int64_t chunk) {
    const std::int64_t n = unit / kv_heads, h = unit % kv_heads, first = n * heads + h * sizes.groups;
    features::Tokens all{inputs(query, key, value, log_weight, n, h, sizes.groups)};
    all.query_map = query_map.of_head(h, sizes);
    all.key_map = key_map.of_head(h, sizes);
    all.out = out.mutable_data_ptr<float>() + first * length * sizes.value_dim;
    all.normalizer = normalizer.mutable_data_ptr<float>() + first * length;
    all.out_head = length * sizes.value_dim;
    all.normalizer_head = length;
    return all.part(chunk * kChunk, std::min(kChunk, length - chunk * kChunk), sizes.value_dim);
  };
  const auto state = [&](std::int64_t unit) {
    return features::State{mean_after.mutable_data_ptr<float>() + unit * mean_size,
                           log_mass_after.mutable_data_ptr<double>() + unit * sizes.features};
  };
  const auto add_exact = [&](Worker& worker, const features::Tokens& seen, std::int64_t unit, std::int64_t chunk) {
    if (!exact) return;
    worker.windows->attend(exact->head(unit / kv_heads, unit % kv_heads, sizes.groups),
                           {seen.out, seen.normalizer, seen.out_head, seen.normalizer_head}, chunk * kChunk, sizes.groups,
                           exact->scaling);
  };

  const std::int64_t threads = torch::stable::get_num_threads();
  if (chunks == 1 || units % threads == 0 || units >= 8 * threads) {
    torch::stable::parallel_for(0, units, 1, [&](std::int64_t begin, std::int64_t end) {
      Worker worker(sizes, exact);
      for (std::int64_t unit = begin; unit < end; ++unit) {
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
          const features::Tokens own = tokens(unit, chunk);
          worker.features.attend_and_absorb(own, state(unit));
          add_exact(worker, own, unit, chunk);
        }
      }
    });
    return {out, normalizer, mean_after, log_mass_after};
  }

  // Too few heads to keep all threads busy: keep the state before each chunk, then all chunks are independent.
  const Tensor means = empty<2>({units * chunks, mean_size}, mean_after);
  const Tensor log_masses = empty<2>({units * chunks, sizes.features}, log_mass_after);
  const auto state_before = [&](std::int64_t place) {
    return features::State{means.mutable_data_ptr<float>() + place * mean_size,
                           log_masses.mutable_data_ptr<double>() + place * sizes.features};
  };
  torch::stable::parallel_for(0, units, 1, [&](std::int64_t begin, std::int64_t end) {
    Worker worker(sizes, exact);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        const features::State before = state_before(unit * chunks + chunk), running = state(unit);
        std::copy_n(running.mean, mean_size, before.mean);
        std::copy_n(running.log_mass, sizes.features, before.log_mass);
        worker.features.absorb(tokens(unit, chunk), running);
      }
    }
  });
  torch::stable::parallel_for(0, units * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    Worker worker(sizes, exact);
    for (std::int64_t place = begin; place < end; ++place) {
      const std::int64_t unit = place / chunks, chunk = place % chunks;
      const features::Tokens own = tokens(unit, chunk);
      worker.features.attend(own, state_before(place));
      add_exact(worker, own, unit, chunk);
    }
  });
  return {out, normalizer, mean_after, log_mass_after};
}

}  // namespace

STABLE_TORCH_LIBRARY(dofla, library) {
  library.def(
      "linear_attention(Tensor query, Tensor key, Tensor value, Tensor log_weight, Tensor mean, Tensor log_mass, "
      "Tensor[] maps, float[] map_numbers, Tensor[] exact_part, int window, float scaling) -> (Tensor, Tensor, Tensor, "
      "Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dofla, CPU, library) { library.impl("linear_attention", TORCH_BOX(&linear_attention)); }

}  // namespace dofla
