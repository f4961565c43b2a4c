// Products of a page's codes with 8-bit numbers, by dot-product instructions (VNNI). Codes become 8-bit levels in
// registers and are multiplied there; nothing is unfolded to memory. integer_keys.h and integer_values.h do it.
//
// A level is middle + step · number. That is exact for codebooks on such a grid; elsewhere the error is far below the distance of
// levels of up to 4 bits. Weights of values have a scale for each page and scale group, and 8 bits, or 16 where a value has 5.
// Queries have a scale for each segment of tiles that need equal precision, and 8 bits. They have 16 where levels have 5 to 7
// (few channels do, and their queries are large) or tokens have offsets (which leave small errors, in channels of all sizes).
#pragma once

#include <memory>

#include "page.h"

#ifdef __AVX512VNNI__
namespace kvfold::KVFOLD_ISA {
namespace {

constexpr unsigned kMostBits = 7, kMostValueBits = 5;
constexpr unsigned kRounded = 4;  // levels of more bits must lie on the grid, those of 7 evenly

// For each byte of `index`, the entry at its low 6 bits of a table of 64, which repeats every 2^Bits.
template <unsigned Bits>
KVFOLD_INLINE __m512i look_up(__m512i index, __m512i table) {
#ifdef __AVX512VBMI__
  return _mm512_permutexvar_epi8(index, table);
#else
  const __m512i low = _mm512_and_si512(index, _mm512_set1_epi8(15));
  const __m512i first = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(table, table, 0x00), low);
  if constexpr (Bits <= 4) return first;
  const __m512i second = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(table, table, 0x55), low);
  const __mmask64 odd = _mm512_test_epi8_mask(index, _mm512_set1_epi8(16));
  const __m512i lower = _mm512_mask_blend_epi8(odd, first, second);
  if constexpr (Bits <= 5) return lower;
  const __m512i third = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(table, table, 0xaa), low);
  const __m512i fourth = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(table, table, 0xff), low);
  const __mmask64 upper = _mm512_test_epi8_mask(index, _mm512_set1_epi8(32));
  return _mm512_mask_blend_epi8(upper, lower, _mm512_mask_blend_epi8(odd, third, fourth));
#endif
}

// `plane` with bit F of each byte moved to bit To.
template <std::size_t F, std::size_t To>
KVFOLD_INLINE __m512i move_bit(__m512i plane) {
  if constexpr (F < To) return _mm512_slli_epi16(plane, To - F);
  if constexpr (F > To) return _mm512_srli_epi16(plane, F - To);
  return plane;
}

// The numbers of field F of one tile: byte 4 · lane + j is that of step 4 · F + j. Bits of an index beyond Bits may be
// anything, as tables repeat. 7 bits have no table: levels are evenly spaced, and numbers are 2 · code + 1.
template <unsigned Bits, std::size_t F>
KVFOLD_INLINE __m512i tile_numbers(const std::uint8_t* packed, __m512i table) {
  static_assert(Bits >= 1 && Bits <= kMostBits);
  constexpr int kSelect = 0xca;  // of _mm512_ternarylogic (in some compilers a macro): second where the first is 1, else third
  __m512i index;
  if constexpr (Bits == 7) {
    const __m512i low = _mm512_loadu_si512(packed + F / 2 * 64), pairs = _mm512_loadu_si512(packed + 128);
    const __m512i fours = F % 2 ? _mm512_srli_epi16(low, 3) : _mm512_slli_epi16(low, 1);
    const __m512i twos = F < 3 ? _mm512_slli_epi16(pairs, 5 - 2 * F) : _mm512_srli_epi16(pairs, 1);
    index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x1e), fours, twos, kSelect);
    index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x7e), index, (move_bit<F, 7>(__m512i(one_bit_plane(packed + 192, 0)))), kSelect);
    return _mm512_or_si512(index, _mm512_set1_epi8(1));
  }
  if constexpr (Bits >= 4) {
    index = _mm512_loadu_si512(packed + F / 2 * 64);
    if constexpr (F % 2) index = _mm512_srli_epi16(index, 4);
    if constexpr (Bits == 5)
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), index, (move_bit<F, 4>(__m512i(one_bit_plane(packed + 128, 0)))), kSelect);
    if constexpr (Bits == 6) {
      const __m512i pairs = _mm512_loadu_si512(packed + 128);
      const __m512i high = F < 2 ? _mm512_slli_epi16(pairs, 4 - 2 * F) : _mm512_srli_epi16(pairs, 2 * F - 4);
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), index, high, kSelect);
    }
  } else if constexpr (Bits >= 2) {
    index = _mm512_srli_epi16(_mm512_loadu_si512(packed), 2 * F);
    if constexpr (Bits == 3)
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), index, (move_bit<F, 2>(__m512i(one_bit_plane(packed + 64, 0)))), kSelect);
  } else {
    index = move_bit<F, 0>(__m512i(one_bit_plane(packed, 0)));
  }
  return look_up<Bits>(index, table);
}

// Lines to prefetch while `bytes` of codes are read: about half as many, as the rest of the work prefetches some, too.
constexpr std::size_t share_of(std::size_t bytes) { return (bytes / 2 + 63) / 64; }

constexpr std::size_t kFields = 4;  // of a tile, each of four steps

// The codebooks of one side's channel tiles in 8-bit numbers.
class Numbers {
 public:
  // Neighbouring channel tiles with equal levels, of one scale group; `before` is the sum of the bits of all tiles before.
  struct Run {
    unsigned bits;
    std::size_t first, count, before, group;
  };

  // A run, or a run of 2 bits and the run of 1 bit after it. A query has one scale for all channels of a segment.
  // `first` and `count` are of its runs.
  struct Segment {
    std::size_t first, count, first_tile, tiles, group;
    bool two_bytes;
  };

  // Numbers are stored with `bias` added.
  Numbers(const Side& side, unsigned most_bits, int bias) : tiles_(padded(side.shape.head_dim) / kTile) {
    fits_ = side.shape.bits && !side.plain && !side.unit_levels;
    if (!fits_) return;
    tables_ = Buffer(tiles_ * 64 / sizeof(float)), step_ = Buffer(tiles_), middle_ = Buffer(tiles_);
    runs_.reset(new Run[tiles_]), segments_.reset(new Segment[tiles_]);
    for (std::size_t g = 0; g < tiles_; ++g) {
      const unsigned bits = side.shape.bits[g];
      fits_ = fits_ && bits <= most_bits;
      if (!fits_) return;
      const std::size_t group = side.group_of_tile ? side.group_of_tile[g] : 0;
      const float* lut = side.lut + g * side.lut_stride;
      const std::size_t count = std::size_t{1} << bits;
      const Run* last = run_count_ ? &runs_[run_count_ - 1] : nullptr;
      if (!last || last->bits != bits || last->group != group || !std::equal(lut, lut + count, lut - side.lut_stride)) {
        const bool joins = last && bits == 1 && last->bits == 2 && last->group == group;
        if (!joins) segments_[segment_count_++] = {run_count_, 0, g, 0, group, bits > 4 || side.offset};
        ++segments_[segment_count_ - 1].count;
        runs_[run_count_++] = {bits, g, 0, sum_, group};
      }
      ++runs_[run_count_ - 1].count, ++segments_[segment_count_ - 1].tiles;
      sum_ += bits;
      auto* table = reinterpret_cast<std::uint8_t*>(tables_.data()) + 64 * g;
      if (runs_[run_count_ - 1].count > 1) {  // as the tile before
        middle_[g] = middle_[g - 1], step_[g] = step_[g - 1];
        std::memcpy(table, table - 64, 64);
        continue;
      }
      const auto [low, high] = std::minmax_element(lut, lut + count);
      middle_[g] = 0.5f * (*low + *high);
      const bool even = are_even(lut, count);
      step_[g] = std::max(*high - *low, 1e-30f) / static_cast<float>(254 - (even ? 254 % (count - 1) : 0));
      fits_ = fits_ && (bits < 7 || (even && bias == 128));
      for (std::size_t i = 0; i < count; ++i) {
        const float exact = (lut[i] - middle_[g]) / step_[g], number = std::rint(exact);
        fits_ = fits_ && (bits <= kRounded || std::fabs(exact - number) < 0.01f);
        if (bits < 7) table[i] = static_cast<std::uint8_t>(static_cast<int>(number) + bias);
      }
      for (std::size_t held = count; held < 64; held *= 2) std::memcpy(table + held, table, held);
    }
  }

  // Whether levels rise in equal steps. Then equally many numbers lie between all neighbours, at most 254 in all.
  static bool are_even(const float* lut, std::size_t count) {
    const float distance = (lut[count - 1] - lut[0]) / static_cast<float>(count - 1);
    for (std::size_t i = 0; i < count; ++i)
      if (std::fabs(lut[i] - lut[0] - distance * static_cast<float>(i)) > 1e-4f * distance) return false;
    return true;
  }

  bool fits() const { return fits_; }
  std::size_t tiles() const { return tiles_; }
  std::size_t all_bits() const { return sum_; }
  std::size_t run_count() const { return run_count_; }
  const Run& run(std::size_t i) const { return runs_[i]; }
  std::size_t segment_count() const { return segment_count_; }
  const Segment& segment(std::size_t i) const { return segments_[i]; }
  float step(std::size_t tile) const { return step_[tile]; }
  float middle(std::size_t tile) const { return middle_[tile]; }
  __m512i table(std::size_t tile) const {
    return _mm512_load_si512(reinterpret_cast<const std::uint8_t*>(tables_.data()) + 64 * tile);
  }

 private:
  std::size_t tiles_, run_count_ = 0, segment_count_ = 0, sum_ = 0;
  bool fits_;
  Buffer tables_, step_, middle_;
  std::unique_ptr<Run[]> runs_;
  std::unique_ptr<Segment[]> segments_;
};

inline __m512i broadcast_four(const void* from) {
  std::int32_t four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

template <std::size_t Rows, std::size_t Width>
KVFOLD_INLINE void clear(__m512i (&sums)[Rows][Width]) {
  each<Rows>([&](auto i) KVFOLD_LAMBDA { each<Width>([&](auto w) KVFOLD_LAMBDA { sums[i][w] = _mm512_setzero_si512(); }); });
}

constexpr int kLargerSize = 0b1011;  // of _mm512_range_ps: the larger of two magnitudes

KVFOLD_INLINE Four largest_four(const Vec (&of)[kBlock]) {
  return reduce_four(of, [](Vec a, Vec b) KVFOLD_LAMBDA { return Vec(_mm512_max_ps(__m512(a), __m512(b))); });
}

// Stores whole numbers of four rows as bytes side by side, as they are multiplied: step 4 · f + j of row i is at byte
// 16 · f + 4 · i + j. Numbers that no byte holds are saturated.
template <bool Signed>
inline __m512i store_four(std::uint8_t* to, const __m512i (&rows)[kBlock]) {
  const __m512i ab = _mm512_packs_epi32(rows[0], rows[1]), cd = _mm512_packs_epi32(rows[2], rows[3]);
  const __m512i all = Signed ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  _mm512_store_si512(to, all);
  return all;
}

// The sum over f for each row, of a vector as `store_four` lays it out.
inline __m128i sum_of_fours(__m512i v) {
  v = _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0x4e));
  return _mm512_castsi512_si128(_mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0xb1)));
}

// Calls visit<Width>(first) over tiles, Most of them at a time.
template <std::size_t Most, typename Visit>
inline void in_widths(std::size_t tiles, Visit visit) {
  std::size_t t = 0;
  for (; t + Most <= tiles; t += Most) visit(std::integral_constant<std::size_t, Most>{}, t);
  for (; t < tiles; ++t) visit(std::integral_constant<std::size_t, 1>{}, t);
}

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#endif
