// The nearest of up to 256 levels, for 16 numbers at once.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

class Codebook {
 public:
  // 2^bits levels, ascending.
  Codebook(const float* levels, unsigned bits)
      : count_(std::size_t{1} << bits), levels_(std::max(count_, kLanes)), edges_(2 * std::max(count_, kLanes), kNone) {
    for (std::size_t i = 0; i < count_; ++i) levels_[i] = levels[i];
    for (std::size_t i = 0; i + 1 < count_; ++i) edges_[i] = 0.5f * (levels[i] + levels[i + 1]);
  }

  // Calls visit with the bits as a constant, which `nearest` takes.
  template <typename Visit>
  KVFOLD_INLINE auto with_bits(Visit visit) const {
    switch (count_) {
      case 2: return visit(std::integral_constant<std::size_t, 1>{});
      case 4: return visit(std::integral_constant<std::size_t, 2>{});
      case 8: return visit(std::integral_constant<std::size_t, 3>{});
      case 16: return visit(std::integral_constant<std::size_t, 4>{});
      case 32: return visit(std::integral_constant<std::size_t, 5>{});
      case 64: return visit(std::integral_constant<std::size_t, 6>{});
      case 128: return visit(std::integral_constant<std::size_t, 7>{});
      default: return visit(std::integral_constant<std::size_t, 8>{});
    }
  }

  // The level nearest to each lane, the lower of equals, and its index.
  template <std::size_t Bits>
  KVFOLD_INLINE Vec nearest(Vec u, Ints& index) const {
#ifdef __AVX512F__
    // A binary search; tables of up to 64 numbers are looked up in registers.
    __m512i at = _mm512_setzero_si512();
    each<Bits>([&](auto i) KVFOLD_LAMBDA {
      constexpr int step = 1 << (Bits - 1 - i);
      const float* edges = edges_.data() + step - 1;
      const __m512 edge = i ? look_up<Bits>(edges, at) : _mm512_set1_ps(*edges);
      at = _mm512_mask_add_epi32(at, _mm512_cmp_ps_mask(__m512(u), edge, _CMP_GT_OQ), at, _mm512_set1_epi32(step));
    });
    index = Ints(at);
    return Vec(look_up<Bits>(levels_.data(), at));
#else
    if constexpr (Bits <= 6) {
      index = Ints{};
      Vec level = all(levels_[0]);
      for (std::size_t i = 0; i + 1 < count_; ++i) {
        const Ints above = u > all(edges_[i]);
        index -= above;
        level = above ? all(levels_[i + 1]) : level;
      }
      return level;
    }
    Vec level{};
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      std::int32_t at = 0;
      for (auto step = static_cast<std::int32_t>(count_ / 2); step; step /= 2)
        if (u[lane] > edges_[static_cast<std::size_t>(at + step - 1)]) at += step;
      index[lane] = at, level[lane] = levels_[static_cast<std::size_t>(at)];
    }
    return level;
#endif
  }

 private:
#ifdef __AVX512F__
  template <std::size_t Bits>
  static KVFOLD_INLINE __m512 look_up(const float* table, __m512i at) {
    if constexpr (Bits <= 4) return _mm512_permutexvar_ps(at, _mm512_loadu_ps(table));
    if constexpr (Bits > 6) return _mm512_i32gather_ps(at, table, 4);
    const __m512 low = _mm512_permutex2var_ps(_mm512_loadu_ps(table), at, _mm512_loadu_ps(table + 16));
    if constexpr (Bits == 5) return low;
    const __m512 high = _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32), at, _mm512_loadu_ps(table + 48));
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), low, high);
  }
#endif

  static constexpr float kNone = std::numeric_limits<float>::infinity();
  std::size_t count_;
  Buffer levels_, edges_;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
