// Products of a page's codes with 8-bit numbers, by dot-product instructions (VNNI). Codes become 8-bit levels in
// registers and are multiplied there; nothing is unfolded to memory.
//
// A level is middle + step · number. That is exact for codebooks on such a grid, and elsewhere far below the distance of
// levels of up to 4 bits. Weights of values have 8 bits, with a scale a page. Queries have 8, with a scale for each segment
// of tiles that need equal precision, and 16 where levels have 5 or 6: few channels have so many, and large queries.
#pragma once

#include <memory>

#include "page.h"

#ifdef __AVX512VNNI__
namespace kvfold::KVFOLD_ISA {
namespace {

// The entry of a table of 64 that each byte of `index` names by its low 6 bits; the table repeats every 2^Bits.
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
template <int F, int To>
KVFOLD_INLINE __m512i move_bit(__m512i plane) {
  if constexpr (F < To) return _mm512_slli_epi16(plane, To - F);
  if constexpr (F > To) return _mm512_srli_epi16(plane, F - To);
  return plane;
}

// The numbers of field F of one tile: byte 4 · lane + j is that of step 4 · F + j. Bits of an index beyond Bits may be
// anything, as tables repeat.
template <unsigned Bits, int F>
KVFOLD_INLINE __m512i tile_numbers(const std::uint8_t* packed, __m512i table) {
  static_assert(Bits >= 1 && Bits <= 6);
  constexpr int kSelect = 0xca;  // of _mm512_ternarylogic: second where the first is 1, else third
  __m512i index;
  if constexpr (Bits >= 4) {
    index = _mm512_loadu_si512(packed + F / 2 * 64);
    if constexpr (F % 2) index = _mm512_srli_epi16(index, 4);
    if constexpr (Bits == 5)
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), index, move_bit<F, 4>(bit_plane(packed + 128)), kSelect);
    if constexpr (Bits == 6) {
      const __m512i pairs = _mm512_loadu_si512(packed + 128);
      const __m512i high = F < 2 ? _mm512_slli_epi16(pairs, 4 - 2 * F) : _mm512_srli_epi16(pairs, 2 * F - 4);
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), index, high, kSelect);
    }
  } else if constexpr (Bits >= 2) {
    index = _mm512_srli_epi16(_mm512_loadu_si512(packed), 2 * F);
    if constexpr (Bits == 3)
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), index, move_bit<F, 2>(bit_plane(packed + 64)), kSelect);
  } else {
    index = move_bit<F, 0>(bit_plane(packed));
  }
  return look_up<Bits>(index, table);
}

constexpr unsigned kRounded = 4;  // levels of more bits must lie on the grid

// The codebooks of one side's channel tiles in 8-bit numbers.
class Numbers {
 public:
  // Neighbouring channel tiles with equal bits; `before` is the sum of the bits of all tiles before them.
  struct Run {
    unsigned bits;
    std::size_t first, count, before;
  };

  // Neighbouring runs that share a scale of the other factor: those of up to 2 bits, or one run of more.
  struct Segment {
    std::size_t first, count, first_tile, tiles;
    bool two_bytes;
  };

  // Numbers are stored with `bias` added.
  Numbers(const Side& side, unsigned most_bits, int bias) : tiles_(padded(side.shape.head_dim) / kTile) {
    fits_ = side.shape.bits && side.groups == 1;
    if (!fits_) return;
    tables_ = Buffer(tiles_ * 64 / sizeof(float)), step_ = Buffer(tiles_), middle_ = Buffer(tiles_);
    runs_.reset(new Run[tiles_]), segments_.reset(new Segment[tiles_]);
    for (std::size_t g = 0; g < tiles_; ++g) {
      const unsigned bits = side.shape.bits[g];
      fits_ = fits_ && bits <= most_bits;
      if (!fits_) return;
      if (!run_count_ || runs_[run_count_ - 1].bits != bits) {
        const bool joins = run_count_ && bits <= 2 && runs_[run_count_ - 1].bits <= 2;
        if (!joins) segments_[segment_count_++] = {run_count_, 0, g, 0, bits > 4};
        ++segments_[segment_count_ - 1].count;
        runs_[run_count_++] = {bits, g, 0, sum_};
      }
      ++runs_[run_count_ - 1].count, ++segments_[segment_count_ - 1].tiles;
      sum_ += bits;
      const float* lut = side.lut + g * side.lut_stride;
      const std::size_t count = std::size_t{1} << bits;
      const auto [low, high] = std::minmax_element(lut, lut + count);
      middle_[g] = 0.5f * (*low + *high);
      step_[g] = std::max(*high - *low, 1e-30f) / 254.0f;
      auto* table = reinterpret_cast<std::uint8_t*>(tables_.data()) + 64 * g;
      for (std::size_t i = 0; i < 64; ++i) {
        const float exact = (lut[i % count] - middle_[g]) / step_[g], number = std::rint(exact);
        fits_ = fits_ && (bits <= kRounded || std::fabs(exact - number) < 0.01f);
        table[i] = static_cast<std::uint8_t>(static_cast<int>(number) + bias);
      }
    }
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
  for (std::size_t i = 0; i < Rows; ++i)
    for (std::size_t w = 0; w < Width; ++w) sums[i][w] = _mm512_setzero_si512();
}

template <typename Visit>
KVFOLD_INLINE void for_each_field(Visit visit) {
  visit(std::integral_constant<int, 0>{}), visit(std::integral_constant<int, 1>{});
  visit(std::integral_constant<int, 2>{}), visit(std::integral_constant<int, 3>{});
}

constexpr int kLargerSize = 0b1011;  // of _mm512_range_ps: the larger of two magnitudes
constexpr std::size_t kBlock = 4;  // rows that are multiplied together

// The sums, or the largest, of four vectors.
template <typename Combine>
inline __m128 reduce_four(const Vec (&of)[kBlock], Combine combine) {
  const auto pair = [&](Vec a, Vec b) {
    return combine(_mm512_unpacklo_ps(__m512(a), __m512(b)), _mm512_unpackhi_ps(__m512(a), __m512(b)));
  };
  const __m512d a = _mm512_castps_pd(pair(of[0], of[1])), b = _mm512_castps_pd(pair(of[2], of[3]));
  __m512 all = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  all = combine(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  all = combine(all, _mm512_shuffle_f32x4(all, all, 0xb1));
  return _mm512_castps512_ps128(all);
}
inline __m128 sum_four(const Vec (&of)[kBlock]) {
  return reduce_four(of, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
inline __m128 largest_four(const Vec (&of)[kBlock]) {
  return reduce_four(of, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}

// Bytes of four rows side by side, as they are multiplied: byte j of step 4 · f + j of row i is at 16 · f + 4 · i + j.
inline __m512i store_four(std::uint8_t* to, const __m128i (&rows)[kBlock]) {
  const __m256i ab = _mm256_inserti128_si256(_mm256_castsi128_si256(rows[0]), rows[1], 1);
  const __m256i cd = _mm256_inserti128_si256(_mm256_castsi128_si256(rows[2]), rows[3], 1);
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i all = _mm512_permutexvar_epi32(order, _mm512_inserti64x4(_mm512_castsi256_si512(ab), cd, 1));
  _mm512_store_si512(to, all);
  return all;
}

// Of vectors as `store_four` returns them, the sum over f for each row.
inline __m128i sum_of_fours(__m512i v) {
  v = _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0x4e));
  return _mm512_castsi512_si128(_mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0xb1)));
}

// Calls visit<Rows>(first) over rows in blocks of up to four.
template <typename Visit>
inline void in_blocks(std::size_t rows, Visit visit) {
  std::size_t r = 0;
  for (; r + 4 <= rows; r += 4) visit(std::integral_constant<std::size_t, 4>{}, r);
  if (rows - r == 3) visit(std::integral_constant<std::size_t, 3>{}, r);
  if (rows - r == 2) visit(std::integral_constant<std::size_t, 2>{}, r);
  if (rows - r == 1) visit(std::integral_constant<std::size_t, 1>{}, r);
}

// Calls visit<Width>(first) over tiles, Most of them at a time.
template <std::size_t Most, typename Visit>
inline void in_widths(std::size_t tiles, Visit visit) {
  std::size_t t = 0;
  for (; t + Most <= tiles; t += Most) visit(std::integral_constant<std::size_t, Most>{}, t);
  for (; t < tiles; ++t) visit(std::integral_constant<std::size_t, 1>{}, t);
}

// Scores of query rows with the keys of a page. Their numbers are unsigned, by 128 too large, which is taken off again.
class IntegerKeys {
 public:
  explicit IntegerKeys(const Page& page)
      : page_(page),
        side_(page.side()),
        numbers_(side_, 6, 128),
        width_(padded(side_.shape.head_dim)),
        size_(side_.shape.page_size) {
    if (!numbers_.fits()) return;
    for (std::size_t g = 0; g < numbers_.tiles(); ++g) any_middle_ = any_middle_ || numbers_.middle(g) != 0.0f;
    ahead_ = kAhead * side_.shape.code_bytes();
  }

  bool fits() const { return numbers_.fits(); }

  // Takes rows of q̃, (rows, head_dim).
  void prepare(const float* query, std::size_t rows) {
    const std::size_t blocks = (rows + kBlock - 1) / kBlock;
    if (blocks > block_count_) {
      block_count_ = blocks;
      query_ = Buffer(blocks * kBlock * width_), steps_ = Buffer(blocks * kBlock * width_);
      upper_ = Buffer(blocks * width_), lower_ = Buffer(blocks * width_);
      blocks_.reset(new Block[blocks]);
      worth_ = Buffer(blocks * numbers_.segment_count() * kBlock);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      float total = 0;
      for (std::size_t c = 0; c < side_.shape.head_dim; ++c) {
        const float q = query[r * side_.shape.head_dim + c];
        total += q;
        query_[r * width_ + c] = q, steps_[r * width_ + c] = q * numbers_.step(c / kTile);
      }
      blocks_[r / kBlock].total[r % kBlock] = total;
    }
    if (!side_.channel_scale) in_blocks(rows, [&](auto some, std::size_t r) { round<some()>(r); });
  }

  // scores[r · page_size + t] with the page that `page` found last, whose codes are at `code`.
  void scores(const std::uint8_t* code, std::size_t rows, float* scores) {
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      if (side_.channel_scale) round<Rows>(r);
      if (side_.centre) centre<Rows>(r);
      float* out = scores + r * size_;
      for (std::size_t i = 0; i < numbers_.segment_count(); ++i)
        if (numbers_.segment(i).two_bytes)
          in_widths<2>(size_ / kTile, [&](auto width, std::size_t t) { add<Rows, width(), true>(i, code, r, t, out); });
        else
          in_widths<4>(size_ / kTile, [&](auto width, std::size_t t) { add<Rows, width(), false>(i, code, r, t, out); });
    });
  }

 private:
  struct alignas(16) Block {
    float base[kBlock] = {};    // Σ q̃ ⊙ S · middle, and what takes the 128 off
    float centre[kBlock] = {};  // q̃ · z
    float total[kBlock] = {};   // Σ q̃
  };

  static std::uint8_t* bytes(Buffer& buffer) { return reinterpret_cast<std::uint8_t*>(buffer.data()); }

  // What 1 stands for in the rounded queries of a segment, for each row of a block.
  float* worth(std::size_t r, std::size_t i) { return &worth_[(r / kBlock * numbers_.segment_count() + i) * kBlock]; }

  // q̃ ⊙ S · step as whole numbers.
  template <std::size_t Rows>
  void round(std::size_t r) {
    Vec middle[kBlock] = {};
    __m128 base = _mm_setzero_ps();
    for (std::size_t i = 0; i < numbers_.segment_count(); ++i)
      base = _mm_add_ps(base, numbers_.segment(i).two_bytes ? round_segment<Rows, true>(i, r, middle)
                                                            : round_segment<Rows, false>(i, r, middle));
    if (any_middle_) base = _mm_add_ps(base, sum_four(middle));
    _mm_store_ps(blocks_[r / kBlock].base, base);
  }

  // Those of one segment, in 8 bits or in 16 as 256 · upper + lower. Adds up q̃ ⊙ S · middle, and returns what takes the
  // 128 off.
  template <std::size_t Rows, bool TwoBytes>
  KVFOLD_INLINE __m128 round_segment(std::size_t index, std::size_t r, Vec (&middle)[kBlock]) {
    const std::size_t first = numbers_.segment(index).first_tile, last = first + numbers_.segment(index).tiles;
    const float *steps = &steps_[r * width_], *scale = page_.channel_scale();
    Vec most[kBlock] = {};
    for (std::size_t g = first; g < last; ++g) {
      const Vec s = load(scale + g * kTile);
      for (std::size_t i = 0; i < Rows; ++i)
        most[i] = Vec(_mm512_range_ps(__m512(most[i]), __m512(load(steps + i * width_ + g * kTile) * s), kLargerSize));
    }
    const __m128 one = _mm_mul_ps(largest_four(most), _mm_set1_ps(1.0f / (TwoBytes ? 32512.0f : 127.0f)));
    _mm_store_ps(worth(r, index), one);
    alignas(16) float per_one[kBlock];
    _mm_store_ps(per_one, _mm_div_ps(_mm_set1_ps(1.0f), _mm_max_ps(one, _mm_set1_ps(1e-30f))));
    const __m512i bias = _mm512_set1_epi8(-128);  // unsigned: 128
    __m512i upper_sum{}, lower_sum{};
    for (std::size_t g = first; g < last; ++g) {
      const Vec s = load(scale + g * kTile);
      __m128i upper[kBlock] = {}, lower[kBlock] = {};
      for (std::size_t i = 0; i < Rows; ++i) {
        const Vec v = load(steps + i * width_ + g * kTile) * s;
        __m512i whole = _mm512_cvtps_epi32(__m512(v * per_one[i]));
        if (any_middle_) middle[i] += v * (numbers_.middle(g) / numbers_.step(g));
        if constexpr (TwoBytes) {
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
          lower[i] = _mm512_cvtepi32_epi8(_mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8)));
          whole = high;
        }
        upper[i] = _mm512_cvtepi32_epi8(whole);
      }
      const std::size_t at = r * width_ + g * kTile * kBlock;
      upper_sum = _mm512_dpbusd_epi32(upper_sum, bias, store_four(bytes(upper_) + at, upper));
      if constexpr (TwoBytes) lower_sum = _mm512_dpbusd_epi32(lower_sum, bias, store_four(bytes(lower_) + at, lower));
    }
    __m128 total = _mm_cvtepi32_ps(sum_of_fours(upper_sum));
    if constexpr (TwoBytes)
      total = _mm_fmadd_ps(total, _mm_set1_ps(256.0f), _mm_cvtepi32_ps(sum_of_fours(lower_sum)));
    return _mm_mul_ps(total, _mm_sub_ps(_mm_setzero_ps(), one));
  }

  template <std::size_t Rows>
  void centre(std::size_t r) {
    Vec dot[kBlock] = {};
    for (std::size_t c = 0; c < width_; c += kLanes) {
      const Vec z = load(page_.centre() + c);
      for (std::size_t i = 0; i < Rows; ++i) dot[i] += load(&query_[(r + i) * width_ + c]) * z;
    }
    _mm_store_ps(blocks_[r / kBlock].centre, sum_four(dot));
  }

  // Adds what one segment makes of the scores of Rows rows with Width tiles of tokens; with the last they are whole.
  template <std::size_t Rows, std::size_t Width, bool TwoBytes>
  void add(std::size_t index, const std::uint8_t* code, std::size_t r, std::size_t tile, float* scores) {
    const Numbers::Segment& segment = numbers_.segment(index);
    __m512i upper[Rows][Width], lower[Rows][Width];
    clear(upper), clear(lower);
    for (std::size_t i = segment.first; i < segment.first + segment.count; ++i) {
      const Numbers::Run& run = numbers_.run(i);
      if constexpr (TwoBytes) {
        if (run.bits == 5) products<5, true>(run, code, r, tile, upper, lower);
        if (run.bits == 6) products<6, true>(run, code, r, tile, upper, lower);
      } else {
        if (run.bits == 1) products<1, false>(run, code, r, tile, upper, lower);
        if (run.bits == 2) products<2, false>(run, code, r, tile, upper, lower);
        if (run.bits == 3) products<3, false>(run, code, r, tile, upper, lower);
        if (run.bits == 4) products<4, false>(run, code, r, tile, upper, lower);
      }
    }
    const Block& block = blocks_[r / kBlock];
    const float* one = worth(r, index);
    const bool is_first = index == 0, is_last = index + 1 == numbers_.segment_count();
    for (std::size_t w = 0; w < Width; ++w) {
      const std::size_t token = (tile + w) * kTile;
      for (std::size_t i = 0; i < Rows; ++i) {
        float* to = scores + i * size_ + token;
        __m512 y = is_first ? _mm512_set1_ps(block.base[i]) : _mm512_load_ps(to);
        y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper[i][w]), _mm512_set1_ps(TwoBytes ? 256.0f * one[i] : one[i]), y);
        if constexpr (TwoBytes) y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lower[i][w]), _mm512_set1_ps(one[i]), y);
        if (is_last) {
          y = _mm512_fmadd_ps(y, _mm512_load_ps(page_.scale() + token), _mm512_set1_ps(block.centre[i]));
          if (side_.offset)
            y = _mm512_fmadd_ps(_mm512_load_ps(page_.offset() + token), _mm512_set1_ps(block.total[i]), y);
        }
        _mm512_store_ps(to, y);
      }
    }
  }

  // Adds the products with upper, and perhaps lower, bytes of the queries over one run of channel tiles.
  template <unsigned Bits, bool TwoBytes, std::size_t Rows, std::size_t Width>
  KVFOLD_INLINE void products(const Numbers::Run& run, const std::uint8_t* code, std::size_t r, std::size_t tile,
                              __m512i (&upper)[Rows][Width], __m512i (&lower)[Rows][Width]) {
    const std::size_t row_bytes = 32 * numbers_.all_bits(), ahead = ahead_, last = run.first + run.count;
    const std::uint8_t* at = code + row_bytes * tile + 32 * run.before;
    const std::uint8_t* up = bytes(upper_) + r * width_ + run.first * kTile * kBlock;
    const std::uint8_t* low = bytes(lower_) + r * width_ + run.first * kTile * kBlock;
    for (std::size_t g = run.first; g < last; ++g) {
      const __m512i table = numbers_.table(g);
      for (std::size_t w = 0; w < Width; ++w) ask_for(at + w * row_bytes + ahead, 32 * Bits);
      for_each_field([&](auto f) __attribute__((always_inline)) {
        __m512i number[Width];
        for (std::size_t w = 0; w < Width; ++w) number[w] = tile_numbers<Bits, f()>(at + w * row_bytes, table);
        for (std::size_t i = 0; i < Rows; ++i) {
          const __m512i x = broadcast_four(up + 16 * f() + 4 * i);
          for (std::size_t w = 0; w < Width; ++w) upper[i][w] = _mm512_dpbusd_epi32(upper[i][w], number[w], x);
          if constexpr (TwoBytes) {
            const __m512i rest = broadcast_four(low + 16 * f() + 4 * i);
            for (std::size_t w = 0; w < Width; ++w) lower[i][w] = _mm512_dpbusd_epi32(lower[i][w], number[w], rest);
          }
        }
      });
      at += 32 * Bits, up += kTile * kBlock, low += kTile * kBlock;
    }
  }

  const Page& page_;
  const Side& side_;
  Numbers numbers_;
  std::size_t width_, size_, ahead_ = 0, block_count_ = 0;
  bool any_middle_ = false;
  std::unique_ptr<Block[]> blocks_;
  Buffer query_, steps_, worth_, upper_, lower_;  // upper and lower: bytes, as `store_four` leaves them
};

// Sums of a page's values, weighted by rows of probabilities.
class IntegerValues {
 public:
  explicit IntegerValues(const Page& page)
      : page_(page), side_(page.side()), numbers_(side_, kRounded, 0), size_(side_.shape.page_size) {
    if (!fits()) return;
    for (std::size_t g = 0; g < numbers_.tiles(); ++g) any_middle_ = any_middle_ || numbers_.middle(g) != 0.0f;
    ahead_ = kAhead * side_.shape.code_bytes();
    weights_ = Buffer(kBlock * size_ / sizeof(float));
  }

  bool fits() const { return numbers_.fits() && !side_.channel_scale; }

  // Adds to sums[r · width + c], width being head_dim padded to whole tiles, what `rows` rows of probabilities make of
  // the page that `page` found last.
  void add(const std::uint8_t* code, std::size_t rows, const float* probabilities, float* sums) {
    const std::size_t width = numbers_.tiles() * kTile;
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      prepare<Rows>(probabilities + r * size_);
      for (std::size_t i = 0; i < numbers_.run_count(); ++i) {
        const Numbers::Run& run = numbers_.run(i);
        in_widths<4>(run.count, [&](auto many, std::size_t tile) {
          const std::uint8_t* from = code + 2 * size_ * (run.before + run.bits * tile);
          float* to = sums + r * width;
          if (run.bits == 1) block<1, Rows, many()>(from, run.first + tile, to);
          if (run.bits == 2) block<2, Rows, many()>(from, run.first + tile, to);
          if (run.bits == 3) block<3, Rows, many()>(from, run.first + tile, to);
          if (run.bits == 4) block<4, Rows, many()>(from, run.first + tile, to);
        });
      }
    });
  }

 private:
  std::uint8_t* weights() { return reinterpret_cast<std::uint8_t*>(weights_.data()); }

  // Probabilities times scales as whole numbers of 8 bits.
  template <std::size_t Rows>
  void prepare(const float* probabilities) {
    Vec most[kBlock] = {}, total[kBlock] = {}, offset[kBlock] = {};
    for (std::size_t t = 0; t < size_; t += kLanes) {
      const Vec scale = load(page_.scale() + t);
      for (std::size_t i = 0; i < Rows; ++i) {
        const Vec p = load(probabilities + i * size_ + t);
        most[i] = Vec(_mm512_max_ps(__m512(most[i]), __m512(p * scale)));
        if (side_.centre) total[i] += p;
        if (side_.offset) offset[i] += p * load(page_.offset() + t);
      }
    }
    const __m128 worth = _mm_div_ps(largest_four(most), _mm_set1_ps(255.0f));
    _mm_store_ps(one_, worth);
    __m512i count{};
    alignas(16) float per[kBlock];
    _mm_store_ps(per, _mm_div_ps(_mm_set1_ps(1.0f), _mm_max_ps(worth, _mm_set1_ps(1e-30f))));
    for (std::size_t t = 0; t < size_; t += kLanes) {
      const Vec scale = load(page_.scale() + t);
      __m128i bytes[kBlock] = {};
      for (std::size_t i = 0; i < Rows; ++i)
        bytes[i] = _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(__m512(load(probabilities + i * size_ + t) * scale * per[i])));
      count = _mm512_dpbusd_epi32(count, store_four(weights() + t * kBlock, bytes), _mm512_set1_epi8(1));
    }
    if (side_.centre) _mm_store_ps(total_, sum_four(total));
    if (side_.offset) _mm_store_ps(offset_, sum_four(offset));
    _mm_store_ps(count_, _mm_cvtepi32_ps(sum_of_fours(count)));
  }

  // Rows rows over Width tiles of channels.
  template <unsigned Bits, std::size_t Rows, std::size_t Width>
  void block(const std::uint8_t* code, std::size_t tile, float* to) {
    const std::size_t tile_bytes = 2 * size_ * Bits, ahead = ahead_, size = size_;
    __m512i sums[Rows][Width], table[Width];
    clear(sums);
    for (std::size_t w = 0; w < Width; ++w) table[w] = numbers_.table(tile + w);
    const std::uint8_t* weight = weights();
    for (std::size_t t = 0; t < size; t += kTile, code += 32 * Bits, weight += kTile * kBlock) {
      for (std::size_t w = 0; w < Width; ++w) ask_for(code + w * tile_bytes + ahead, 32 * Bits);
      for_each_field([&](auto f) __attribute__((always_inline)) {
        __m512i number[Width];
        for (std::size_t w = 0; w < Width; ++w) number[w] = tile_numbers<Bits, f()>(code + w * tile_bytes, table[w]);
        for (std::size_t i = 0; i < Rows; ++i) {
          const __m512i x = broadcast_four(weight + 16 * f() + 4 * i);
          for (std::size_t w = 0; w < Width; ++w) sums[i][w] = _mm512_dpbusd_epi32(sums[i][w], x, number[w]);
        }
      });
    }
    const std::size_t width = numbers_.tiles() * kTile;
    for (std::size_t w = 0; w < Width; ++w) {
      const std::size_t c = (tile + w) * kTile;
      for (std::size_t i = 0; i < Rows; ++i) {
        float* at = to + i * width + c;
        __m512 y = _mm512_load_ps(at);
        y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][w]), _mm512_set1_ps(numbers_.step(tile + w) * one_[i]), y);
        if (any_middle_) y = _mm512_add_ps(y, _mm512_set1_ps(numbers_.middle(tile + w) * one_[i] * count_[i]));
        if (side_.offset) y = _mm512_add_ps(y, _mm512_set1_ps(offset_[i]));
        if (side_.centre) y = _mm512_fmadd_ps(_mm512_load_ps(page_.centre() + c), _mm512_set1_ps(total_[i]), y);
        _mm512_store_ps(at, y);
      }
    }
  }

  const Page& page_;
  const Side& side_;
  Numbers numbers_;
  std::size_t size_, ahead_ = 0;
  bool any_middle_ = false;
  Buffer weights_;  // bytes, as `store_four` leaves them
  // Of each row: what a weight of 1 is worth, Σ of the weights, Σ p, Σ p · a.
  alignas(16) float one_[kBlock] = {}, count_[kBlock] = {}, total_[kBlock] = {}, offset_[kBlock] = {};
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#endif
