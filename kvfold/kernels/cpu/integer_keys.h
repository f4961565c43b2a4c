// Scores from the codes of keys, in integers.
#pragma once

#include "integer.h"

#ifdef __AVX512VNNI__
namespace kvfold::KVFOLD_ISA {
namespace {

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
  }

  bool fits() const { return numbers_.fits(); }

  // Takes rows of q̃, (rows, head_dim).
  void prepare(const float* query, std::size_t rows) {
    const std::size_t blocks = (rows + kBlock - 1) / kBlock;
    if (blocks > block_count_) {
      block_count_ = blocks;
      query_ = Buffer(blocks * kBlock * width_), steps_ = Buffer(blocks * kBlock * width_);
      upper_ = Buffer(blocks * width_), lower_ = Buffer(blocks * width_);
      parts_.reset(new Part[blocks * numbers_.segment_count()]), centre_ = Buffer(blocks * kBlock);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < side_.shape.head_dim; ++c) {
        const float q = query[r * side_.shape.head_dim + c];
        query_[r * width_ + c] = q, steps_[r * width_ + c] = q * numbers_.step(c / kTile);
      }
      for (std::size_t i = 0; i < numbers_.segment_count(); ++i) {
        const std::size_t first = numbers_.segment(i).first_tile * kTile, count = numbers_.segment(i).tiles * kTile;
        float total = 0;
        for (std::size_t c = first; c < std::min(first + count, side_.shape.head_dim); ++c) total += query_[r * width_ + c];
        part(r, i).total[r % kBlock] = total;
      }
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
  // A segment's queries, for each row of a block.
  struct alignas(16) Part {
    float worth[kBlock] = {};  // what 1 stands for in the rounded ones
    float base[kBlock] = {};   // Σ q̃ ⊙ S · middle, and what takes the 128 off
    float total[kBlock] = {};  // Σ q̃
  };

  static std::uint8_t* bytes(Buffer& buffer) { return reinterpret_cast<std::uint8_t*>(buffer.data()); }

  Part& part(std::size_t r, std::size_t segment) { return parts_[r / kBlock * numbers_.segment_count() + segment]; }

  // q̃ ⊙ S · step as whole numbers.
  template <std::size_t Rows>
  void round(std::size_t r) {
    for (std::size_t i = 0; i < numbers_.segment_count(); ++i)
      numbers_.segment(i).two_bytes ? round_segment<Rows, true>(i, r) : round_segment<Rows, false>(i, r);
  }

  // Those of one segment, in 8 bits or in 16 as 256 · upper + lower.
  template <std::size_t Rows, bool TwoBytes>
  KVFOLD_INLINE void round_segment(std::size_t index, std::size_t r) {
    const std::size_t first = numbers_.segment(index).first_tile, last = first + numbers_.segment(index).tiles;
    const float *steps = &steps_[r * width_], *scale = page_.channel_scale();
    Vec most[kBlock] = {}, middle[kBlock] = {};
    for (std::size_t g = first; g < last; ++g) {
      const Vec s = load(scale + g * kTile);
      for (std::size_t i = 0; i < Rows; ++i)
        most[i] = Vec(_mm512_range_ps(__m512(most[i]), __m512(load(steps + i * width_ + g * kTile) * s), kLargerSize));
    }
    const __m128 one = _mm_mul_ps(largest_four(most), _mm_set1_ps(1.0f / (TwoBytes ? 32512.0f : 127.0f)));
    _mm_store_ps(part(r, index).worth, one);
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
    total = _mm_mul_ps(total, _mm_sub_ps(_mm_setzero_ps(), one));
    if (any_middle_) total = _mm_add_ps(total, sum_four(middle));
    _mm_store_ps(part(r, index).base, total);
  }

  template <std::size_t Rows>
  void centre(std::size_t r) {
    Vec dot[kBlock] = {};
    for (std::size_t c = 0; c < width_; c += kLanes) {
      const Vec z = load(page_.centre() + c);
      for (std::size_t i = 0; i < Rows; ++i) dot[i] += load(&query_[(r + i) * width_ + c]) * z;
    }
    _mm_store_ps(&centre_[r / kBlock * kBlock], sum_four(dot));
  }

  // Adds what one segment makes of the scores of Rows rows with Width tiles of tokens.
  template <std::size_t Rows, std::size_t Width, bool TwoBytes>
  void add(std::size_t index, const std::uint8_t* code, std::size_t r, std::size_t tile, float* scores) {
    const Numbers::Segment& segment = numbers_.segment(index);
    __m512i upper[Rows][Width], lower[Rows][Width];
    clear(upper), clear(lower);
    for (std::size_t i = segment.first; i < segment.first + segment.count; ++i) {
      const Numbers::Run& run = numbers_.run(i);
      if (run.bits == 1) products<1, TwoBytes>(run, code, r, tile, upper, lower);
      if (run.bits == 2) products<2, TwoBytes>(run, code, r, tile, upper, lower);
      if (run.bits == 3) products<3, TwoBytes>(run, code, r, tile, upper, lower);
      if (run.bits == 4) products<4, TwoBytes>(run, code, r, tile, upper, lower);
      if constexpr (TwoBytes) {
        if (run.bits == 5) products<5, true>(run, code, r, tile, upper, lower);
        if (run.bits == 6) products<6, true>(run, code, r, tile, upper, lower);
      }
    }
    const Part& own = part(r, index);
    const float* centre = &centre_[r / kBlock * kBlock];
    for (std::size_t w = 0; w < Width; ++w) {
      const std::size_t token = (tile + w) * kTile, scale = segment.group * size_ + token;
      for (std::size_t i = 0; i < Rows; ++i) {
        float* to = scores + i * size_ + token;
        const float one = own.worth[i];
        __m512 y = _mm512_set1_ps(own.base[i]);
        y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper[i][w]), _mm512_set1_ps(TwoBytes ? 256.0f * one : one), y);
        if constexpr (TwoBytes) y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lower[i][w]), _mm512_set1_ps(one), y);
        const __m512 before = index ? _mm512_load_ps(to) : _mm512_set1_ps(centre[i]);
        y = _mm512_fmadd_ps(y, _mm512_load_ps(page_.scale() + scale), before);
        if (side_.offset) y = _mm512_fmadd_ps(_mm512_load_ps(page_.offset() + scale), _mm512_set1_ps(own.total[i]), y);
        _mm512_store_ps(to, y);
      }
    }
  }

  // Adds the products with upper, and perhaps lower, bytes of the queries over one run of channel tiles.
  template <unsigned Bits, bool TwoBytes, std::size_t Rows, std::size_t Width>
  KVFOLD_INLINE void products(const Numbers::Run& run, const std::uint8_t* code, std::size_t r, std::size_t tile,
                              __m512i (&upper)[Rows][Width], __m512i (&lower)[Rows][Width]) {
    const std::size_t row_bytes = 32 * numbers_.all_bits(), ahead = page_.ahead(), last = run.first + run.count;
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
  std::size_t width_, size_, block_count_ = 0;
  bool any_middle_ = false;
  std::unique_ptr<Part[]> parts_;
  Buffer query_, steps_, upper_, lower_;  // upper and lower: bytes, as `store_four` leaves them
  Buffer centre_;                         // q̃ · z of each row
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#endif
