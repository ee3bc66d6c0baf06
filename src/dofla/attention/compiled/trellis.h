// Trellis codes: the arithmetic of coding/trellis.py, a block at a time.
#pragma once

#include "whole.h"

#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace dofla::coding {

constexpr int kWindows = 1 << kWindow;

#ifdef __AVX2__
inline __m128i load_bytes(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

// The first N of 16 integers.
template <int N>
inline Floats<N> floats(__m128i bytes) {
  const auto eight = [](__m128i some) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(some)); };
  if constexpr (N == 8) {
    return {eight(bytes)};
  } else {
#ifdef __AVX512F__
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#else
    return {eight(bytes), eight(_mm_srli_si128(bytes, 8))};
#endif
  }
}
#endif

template <int N>
inline Floats<N> floats(const std::int8_t* from) {
#ifdef __AVX2__
  return floats<N>(N == 8 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)) : load_bytes(from));
#else
  float found[N];  // as a loop, of which the compiler makes vectors: those of bytes it would take apart
  for (int i = 0; i < N; ++i) found[i] = from[i];
  return Floats<N>::load(found);
#endif
}

// What windows of `bits` bits stand for, twice.
struct Levels {
  const float* floats;       // [kWindows]
  const std::int8_t* bytes;  // [kWindows]
};

// Where the windows of a block of N codes of `Bits` bits stand in its bytes: each in two of them, the first after the last,
// and what brings it to the upper end of those.
template <int N, int Bits>
struct Windows {
  static constexpr int kBytes = N * Bits / 8;
  std::uint8_t bytes[2 * N];
  std::int16_t factors[N];

  constexpr Windows() : bytes(), factors() {
    for (int i = 0; i < N; ++i) {
      const int place = Bits * (N - 1 - i);
      bytes[2 * i] = place / 8;
      bytes[2 * i + 1] = (place / 8 + 1) % kBytes;
      factors[i] = 1 << (16 - kWindow - place % 8);
    }
  }
};

// The levels that a block's codes stand for. 16 bytes may be read, as behind codes there are scales (rows.py).
template <int N, int Bits>
inline Floats<N> levels_of(const std::uint8_t* codes, const Levels& levels) {
  static constexpr Windows<N, Bits> kPlaces;
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (N == 16) {
    const __m256i pairs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_bytes(codes)),
                                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kPlaces.bytes)));
    const __m256i found = _mm256_mullo_epi16(pairs, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kPlaces.factors)));
    const __m512i window = _mm512_cvtepu16_epi32(_mm256_srli_epi16(found, 16 - kWindow));
    const auto among = [&](int from) {  // by the lower five bits
      return _mm512_permutex2var_ps(_mm512_loadu_ps(levels.floats + from), window, _mm512_loadu_ps(levels.floats + from + 16));
    };
    return {_mm512_mask_blend_ps(_mm256_movepi16_mask(found), among(0), among(32))};
  }
#endif
#if defined(__AVX2__)
  const __m128i all = load_bytes(codes);
  const auto eight = [&](int i) {
    const __m128i pairs = _mm_shuffle_epi8(all, load_bytes(kPlaces.bytes + 2 * i));
    return _mm_srli_epi16(_mm_mullo_epi16(pairs, load_bytes(kPlaces.factors + i)), 16 - kWindow);
  };
  const __m128i window = _mm_packus_epi16(eight(0), eight(N - 8));
  const __m128i low = _mm_and_si128(window, _mm_set1_epi8(15));
  const auto among = [&](int from) { return _mm_shuffle_epi8(load_bytes(levels.bytes + from), low); };
  const __m128i fifth = _mm_slli_epi16(window, 3), sixth = _mm_slli_epi16(window, 2);  // the highest of their bytes
  return floats<N>(
      _mm_blendv_epi8(_mm_blendv_epi8(among(0), among(16), fifth), _mm_blendv_epi8(among(32), among(48), fifth), sixth));
#elif defined(__aarch64__)
  const uint8x16_t all = vld1q_u8(codes);
  const auto eight = [&](int i) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(vqtbl1q_u8(all, vld1q_u8(kPlaces.bytes + 2 * i)));
    const auto* factors = reinterpret_cast<const std::uint16_t*>(kPlaces.factors + i);
    return vmovn_u16(vshrq_n_u16(vmulq_u16(pairs, vld1q_u16(factors)), 16 - kWindow));
  };
  std::int8_t found[16];
  vst1q_s8(found, vqtbl4q_s8(vld1q_s8_x4(levels.bytes), vcombine_u8(eight(0), eight(N - 8))));
  return floats<N>(found);
#else
  float found[N];
  for (int i = 0; i < N; ++i) {
    const int pair = codes[kPlaces.bytes[2 * i]] | codes[kPlaces.bytes[2 * i + 1]] << 8;
    found[i] = levels.floats[(pair * kPlaces.factors[i] & 0xffff) >> (16 - kWindow)];
  }
  return Floats<N>::load(found);
#endif
}

// Windows, so far apart, as bytes of their codes (blocks.to_bytes).
template <int N, int Bits>
inline void pack_codes(const std::int32_t* windows, std::int64_t apart, std::uint8_t* to) {
  for (int first = 0; first < N; first += 8) {
    std::uint64_t eight = 0;
    for (int i = 0; i < 8; ++i) {
      eight |= static_cast<std::uint64_t>(windows[(N - 1 - first - i) * apart] & ((1 << Bits) - 1)) << Bits * i;
    }
    std::memcpy(to + first / 8 * Bits, &eight, Bits);
  }
}

constexpr int kWide = kLanes;  // windows of a vector

// Viterbi's algorithm for a block of integers (trellis.search); lanes are windows.
template <int N, int Bits>
class Search {
 public:
  explicit Search(const float* levels) {
    for (int v = 0; v < kTotals; ++v) {
      const Integers level = __builtin_convertvector(load(levels + kWide * v), Integers);
      slope_[v] = -2 * kBranches * level;
      start_[v] = kBranches * kFine * level * level + (kWide * v + order(kEachLane)) / kStates;
    }
  }

  // The windows of the codes.
  void operator()(const std::int32_t* x, std::int32_t* windows) {
    constexpr auto totals = std::make_integer_sequence<int, kTotals>{};
    Integers cost[kVectors] = {};
    for (int i = 0; i < N; ++i) step(x[(i + N / 2) % N], cost, ways_[i], totals);
    std::int32_t least = cost[0][0];
    for (int state = 0; state < kStates; ++state) least = std::min(least, cost[state / kWide][state % kWide] + state);
    std::int32_t state = least & (kBranches - 1);
    for (int i = N - 1; i >= N - N / 2; --i) state = before(i, state) >> Bits;
    const std::int32_t end = state;
    for (int v = 0; v < kVectors; ++v) {
      cost[v] = (kWide * v + order(kEachLane)) % kStates == end ? Integers{} : kNowhere - Integers{};
    }
    for (int i = 0; i < N; ++i) step(x[i], cost, ways_[i], totals);
    for (int i = N - 1; i >= 0; --i) state = (windows[i] = before(i, state)) >> Bits;
  }

 private:
  static constexpr int kStates = kWindows >> Bits, kTotals = kWindows / kWide;
  static constexpr int kVectors = std::max(kStates / kWide, 1);  // fewer states than lanes stand there again

  // The window of number i on the path to `state` behind it.
  std::int32_t before(int i, std::int32_t state) const {
    return (ways_[i][state / kWide][state % kWide] & (kBranches - 1)) * kStates + state;
  }

  template <int... Lane>
  static Integers order(std::integer_sequence<int, Lane...>) {
    return Integers{Lane...};
  }

  // Costs of the states in which the windows of vector V begin.
  template <int V, int... Lane>
  static Integers begun(const Integers* cost, std::integer_sequence<int, Lane...>) {
    const Integers& states = cost[(kWide * V >> Bits) / kWide];
    return shuffled<(((kWide * V + Lane) >> Bits) % kWide)...>(states, states);
  }

  template <int Apart, int... Lane>
  static Integers moved(const Integers& x, std::integer_sequence<int, Lane...>) {
    return shuffled<((Lane + Apart) % kWide)...>(x, x);
  }

  template <int Apart>
  static Integers folded(const Integers& x) {
    if constexpr (Apart < kStates) {
      return x;
    } else {
      return folded<Apart / 2>(lesser(x, moved<Apart>(x, kEachLane)));
    }
  }

  template <int... V>
  void step(std::int32_t x, Integers* cost, Integers* ways, std::integer_sequence<int, V...>) const {
    const Integers totals[] = {begun<V>(cost, kEachLane) + (start_[V] + slope_[V] * x)...};
    for (int v = 0; v < kVectors; ++v) {
      Integers least = totals[v];
      for (int from = v + kVectors; from < kTotals; from += kVectors) least = lesser(least, totals[from]);
      ways[v] = folded<kWide / 2>(least);
    }
    for (int v = 0; v < kVectors; ++v) cost[v] = ways[v] & -kBranches;
  }

  Integers slope_[kTotals], start_[kTotals], ways_[N][kVectors];
};

// The same for as many blocks as there are lanes.
template <int N, int Bits>
class SearchSideBySide {
 public:
  explicit SearchSideBySide(const float* levels) {
    for (int w = 0; w < kWindows; ++w) {
      const auto level = static_cast<std::int32_t>(levels[w]);
      slope_[w] = factor(-2 * kBranches * level);
      start_[w] = kBranches * kFine * level * level + w / kStates;
    }
  }

  // The windows of the codes of numbers, of each block in a lane.
  void operator()(const std::int32_t (*numbers)[kLanes], std::int32_t (*windows)[kLanes]) {
    Integers x[N], begin[kStates] = {};
    std::memcpy(x, numbers, sizeof x);
    for (int i = 0; i < N; ++i) step(x[(i + N / 2) % N], i ? paths_[i - 1] : begin, paths_[i]);
    Integers least = cost(paths_[N - 1][0]);
    for (int state = 1; state < kStates; ++state) least = lesser(least, cost(paths_[N - 1][state]) + state);
    Integers state = least & (kBranches - 1);
    for (int i = N - 1; i >= N - N / 2; --i) state = before(i, state) >> Bits;
    for (int s = 0; s < kStates; ++s) begin[s] = state == s ? Integers{} : kNowhere - Integers{};
    for (int i = 0; i < N; ++i) step(x[i], i ? paths_[i - 1] : begin, paths_[i]);
    for (int i = N - 1; i >= 0; --i) {
      const Integers window = before(i, state);
      std::memcpy(windows[i], &window, sizeof window);
      state = window >> Bits;
    }
  }

 private:
  static constexpr int kStates = kWindows >> Bits, kCodes = 1 << Bits;
  static constexpr int kBeside = std::min(kCodes, kStates);  // states that are reached from the same ones, as many

  static Integers cost(const Integers& path) { return path & -kBranches; }

  Integers before(int i, const Integers& state) const {
    Integers way;
    for (int lane = 0; lane < kLanes; ++lane) way[lane] = paths_[i][state[lane]][lane];
    return (way & (kBranches - 1)) * kStates + state;
  }

  // Of the paths that end in each state, cost and way of the best, when x is next.
  void step(const Integers& x, const Integers* from, Integers* to) const {
    for (int first = 0; first < kStates; first += kBeside) {
      Integers costs[kBeside];
      for (int n = 0; n < kBeside; ++n) costs[n] = cost(from[(n * (kWindows / kBeside) + first) >> Bits]);
#pragma GCC unroll 4
      for (int state = first; state < first + kBeside; ++state) {
        Integers best;
#pragma GCC unroll 32
        for (int way = 0; way < kCodes; ++way) {
          const int w = way * kStates + state;
          const Integers total = plus_product(costs[way * kBeside / kCodes] + start_[w], x, slope_[w] - Integers{});
          best = way ? lesser(total, best) : total;
        }
        to[state] = best;
      }
    }
  }

  std::int32_t slope_[kWindows], start_[kWindows];
  Integers paths_[N][kStates];
};

}  // namespace dofla::coding
