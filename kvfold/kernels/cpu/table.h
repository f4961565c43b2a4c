// Numbers looked up for each lane of a register.
#pragma once

#include <bit>

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// Size = 2^k numbers, in registers if they have room: gathering from memory takes several times as long.
template <std::size_t Size>
class Table {
 public:
  explicit KVFOLD_INLINE Table(const float* numbers) : numbers_(numbers) {
    if constexpr (!kInRegisters) return;
    if constexpr (Size < kPart)
      std::memcpy(&parts_[0], numbers, Size * sizeof(float));  // nothing is read beyond the table
    else
      std::memcpy(&parts_, numbers, sizeof parts_);
  }

  // The numbers at the lowest k bits of `at`. If Size < kPart, the instruction reads as many bits as kPart lanes need,
  // and those beyond k must be 0.
  KVFOLD_INLINE Register operator[](RegisterInts at) const {
    if constexpr (kInRegisters) return among<0, kTables>(at);
    at &= static_cast<std::int32_t>(Size - 1);
#if defined(__AVX512F__)
    return Register(_mm512_i32gather_ps(__m512i(at), numbers_, 4));
#elif defined(__AVX2__)
    return Register(_mm256_i32gather_ps(numbers_, __m256i(at), 4));
#else
    Register out;
    for (std::size_t lane = 0; lane < kPart; ++lane) out[lane] = numbers_[at[lane]];
    return out;
#endif
  }

 private:
#ifdef __AVX2__
  static constexpr bool kInRegisters = Size <= 64;
#else
  static constexpr bool kInRegisters = false;  // no instruction looks them up there
#endif
  static constexpr std::size_t kTables = kInRegisters ? std::max<std::size_t>(Size / kPart, 1) : 1;

  // Among the numbers of Count registers from First on.
  template <std::size_t First, std::size_t Count>
  KVFOLD_INLINE Register among(RegisterInts at) const {
#if defined(__AVX512F__)
    if constexpr (Count == 1) return Register(_mm512_permutexvar_ps(__m512i(at), __m512(parts_[First])));
    if constexpr (Count == 2)
      return Register(_mm512_permutex2var_ps(__m512(parts_[First]), __m512i(at), __m512(parts_[First + 1])));
    if constexpr (Count > 2) {
      const __mmask16 upper = _mm512_test_epi32_mask(__m512i(at), _mm512_set1_epi32(Count / 2 * kPart));
      return Register(_mm512_mask_blend_ps(upper, __m512(among<First, Count / 2>(at)), __m512(among<First + Count / 2, Count / 2>(at))));
    }
#elif defined(__AVX2__)
    if constexpr (Count == 1) return Register(_mm256_permutevar8x32_ps(__m256(parts_[First]), __m256i(at)));
    if constexpr (Count > 1) {
      const __m256 upper = __m256(at << (31 - std::countr_zero(Count / 2 * kPart)));  // the bit that tells becomes the sign
      return Register(_mm256_blendv_ps(__m256(among<First, Count / 2>(at)), __m256(among<First + Count / 2, Count / 2>(at)), upper));
    }
#endif
    return Register{};
  }

  const float* numbers_;
  Register parts_[kTables];
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
