// Scores from the codes of keys, in integers.
#pragma once

#include "integer.h"
#include "page.h"

#ifdef __AVX512VNNI__
namespace kvfold::KVFOLD_ISA {
namespace {

// Scores of query rows with the keys of a few pages. The keys' numbers are unsigned, 128 too large; that is subtracted again.
// If channels have scales, queries are rounded for each page, and for all pages before the first is read, as rounding has a
// long latency.
class IntegerKeys {
 public:
  explicit IntegerKeys(const Side& side)
      : side_(side), numbers_(side_, kMostBits, 128), width_(padded(side_.shape.head_dim)), size_(side_.shape.page_size) {
    if (!numbers_.fits()) return;
    for (std::size_t g = 0; g < numbers_.tiles(); ++g) any_middle_ = any_middle_ || numbers_.middle(g) != 0.0f;
  }

  bool fits() const { return numbers_.fits(); }

  // Takes rows of q̃, (rows, head_dim), for up to `pages` pages at a time.
  void prepare(const float* query, std::size_t rows, std::size_t pages) {
    blocks_ = (rows + kBlock - 1) / kBlock;
    if (const std::size_t own = blocks_ * kBlock * width_; own > query_.size()) query_ = Buffer(own), steps_ = Buffer(own);
    if (pages * blocks_ > room_) {
      room_ = pages * blocks_;
      upper_ = Buffer::unset(room_ * width_), lower_ = Buffer::unset(room_ * width_);
      parts_.reset(new Part[room_ * numbers_.segment_count()]), start_ = Buffer::unset(room_ * kBlock);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      std::copy(query + r * side_.shape.head_dim, query + (r + 1) * side_.shape.head_dim, &query_[r * width_]);
      for (std::size_t g = 0; g < numbers_.tiles(); ++g)
        store(&steps_[r * width_ + g * kTile], load(&query_[r * width_ + g * kTile]) * numbers_.step(g));
    }
    if (!side_.channel_scale)
      in_blocks(rows, [&](auto some, std::size_t r) { round<some()>(r / kBlock, nullptr, r); });
  }

  // Prepares one of the pages.
  void prepare_page(std::size_t number, const Page& page, std::size_t rows, Ahead& ahead) {
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      const std::size_t block = number * blocks_ + r / kBlock, queries = side_.channel_scale ? block : r / kBlock;
      if (side_.channel_scale) round<Rows>(block, &page, r), ahead.ask<24>();
      __m128 start = side_.centre ? centre<Rows>(page, r) : _mm_setzero_ps();
      if (side_.scaled_shifts) {  // tokens' scales multiply bases, and shall multiply q̃ · z
        float* base = part(queries, 0).base;
        _mm_store_ps(base, _mm_add_ps(_mm_load_ps(base), start)), start = _mm_setzero_ps();
      }
      for (std::size_t i = 0; i < numbers_.segment_count() && !side_.scale; ++i)
        start = _mm_add_ps(start, _mm_load_ps(part(queries, i).base));
      _mm_store_ps(&start_[block * kBlock], start);
    });
  }

  // scores[r · stride + t] with the keys of a page.
  void scores(std::size_t number, const Page& page, std::size_t rows, float* scores, std::size_t stride, Ahead& ahead) {
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      const std::size_t block = number * blocks_ + r / kBlock;
      float* out = scores + r * stride;
      if (numbers_.segment_count() == 1 && !numbers_.segment(0).two_bytes)
        in_widths<4>(size_ / kTile, [&](auto width, std::size_t tile) { score_tiles<Rows, width(), true>(block, page, tile, out, stride, ahead); });
      else
        in_widths<2>(size_ / kTile, [&](auto width, std::size_t tile) { score_tiles<Rows, width(), false>(block, page, tile, out, stride, ahead); });
    });
  }

 private:
  // A segment's queries, for each row of a block.
  struct alignas(16) Part {
    float worth[kBlock] = {};  // the scale: what a rounded query of 1 stands for
    float per[kBlock] = {};    // 1 / worth
    float base[kBlock] = {};   // Σ q̃ ⊙ S · middle, and what subtracts the 128
    float total[kBlock] = {};  // Σ q̃
  };

  static std::uint8_t* bytes(Buffer& buffer) { return reinterpret_cast<std::uint8_t*>(buffer.data()); }
  static const std::uint8_t* bytes(const Buffer& buffer) { return reinterpret_cast<const std::uint8_t*>(buffer.data()); }

  // Of a block of rows, for one page if channels have scales.
  Part& part(std::size_t block, std::size_t segment) const { return parts_[block * numbers_.segment_count() + segment]; }

  // Rounds q̃ ⊙ S · step to whole numbers. All segments are measured first, as `worth` has a long latency.
  template <std::size_t Rows>
  void round(std::size_t block, const Page* page, std::size_t r) {
    for (std::size_t i = 0; i < numbers_.segment_count(); ++i) measure<Rows>(i, block, page, r);
    for (std::size_t i = 0; i < numbers_.segment_count(); ++i)
      numbers_.segment(i).two_bytes ? round_segment<Rows, true>(i, block, page, r) : round_segment<Rows, false>(i, block, page, r);
  }

  template <std::size_t Rows>
  KVFOLD_INLINE void measure(std::size_t index, std::size_t block, const Page* page, std::size_t r) {
    const Numbers::Segment& segment = numbers_.segment(index);
    const float* steps = &steps_[r * width_];
    Vec most[kBlock] = {};
    for (std::size_t g = segment.first_tile; g < segment.first_tile + segment.tiles; ++g) {
      const Vec s = page ? page->channel_scale(g * kTile) : all(1.0f);
      for (std::size_t i = 0; i < Rows; ++i)
        most[i] = Vec(_mm512_range_ps(__m512(most[i]), __m512(load(steps + i * width_ + g * kTile) * s), kLargerSize));
    }
    const __m128 one = _mm_mul_ps(__m128(largest_four(most)), _mm_set1_ps(1.0f / (segment.two_bytes ? 32512.0f : 127.0f)));
    Part& own = part(block, index);
    _mm_store_ps(own.worth, one);
    _mm_store_ps(own.per, _mm_div_ps(_mm_set1_ps(1.0f), _mm_max_ps(one, _mm_set1_ps(1e-30f))));
  }

  // `round` for one segment, to 8 bits, or to 16 as 256 · upper + lower.
  template <std::size_t Rows, bool TwoBytes>
  KVFOLD_INLINE void round_segment(std::size_t index, std::size_t block, const Page* page, std::size_t r) {
    const std::size_t first = numbers_.segment(index).first_tile, last = first + numbers_.segment(index).tiles;
    const bool any_middle = any_middle_;
    const float* steps = &steps_[r * width_];
    Part& own = part(block, index);
    Vec middle[kBlock] = {}, total[kBlock] = {};
    const __m512i bias = _mm512_set1_epi8(-128);  // unsigned: 128
    __m512i upper_sum{}, lower_sum{};
    for (std::size_t g = first; g < last; ++g) {
      const Vec s = page ? page->channel_scale(g * kTile) : all(1.0f);
      __m512i upper[kBlock] = {}, lower[kBlock] = {};
      for (std::size_t i = 0; i < Rows; ++i) {
        const Vec v = load(steps + i * width_ + g * kTile) * s;
        __m512i whole = _mm512_cvtps_epi32(__m512(v * own.per[i]));
        if (any_middle) middle[i] += v * (numbers_.middle(g) / numbers_.step(g));
        if constexpr (TwoBytes) {
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
          lower[i] = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
          whole = high;
        }
        upper[i] = whole;
      }
      const std::size_t at = (block * width_ + g * kTile) * kBlock;
      upper_sum = _mm512_dpbusd_epi32(upper_sum, bias, store_four<true>(bytes(upper_) + at, upper));
      if constexpr (TwoBytes) lower_sum = _mm512_dpbusd_epi32(lower_sum, bias, store_four<true>(bytes(lower_) + at, lower));
    }
    __m128 base = _mm_cvtepi32_ps(sum_of_fours(upper_sum));
    if constexpr (TwoBytes) base = _mm_fmadd_ps(base, _mm_set1_ps(256.0f), _mm_cvtepi32_ps(sum_of_fours(lower_sum)));
    base = _mm_mul_ps(base, _mm_sub_ps(_mm_setzero_ps(), _mm_load_ps(own.worth)));
    if (any_middle) base = _mm_add_ps(base, __m128(sum_four(middle)));
    _mm_store_ps(own.base, base);
    if (!side_.offset) return;
    for (std::size_t g = first; g < last; ++g)
      for (std::size_t i = 0; i < Rows; ++i) total[i] += load(&query_[(r + i) * width_ + g * kTile]);
    store(own.total, sum_four(total));
  }

  // q̃ · z.
  template <std::size_t Rows>
  __m128 centre(const Page& page, std::size_t r) const {
    Vec dot[kBlock] = {};
    for (std::size_t c = 0; c < width_; c += kLanes) {
      const Vec z = page.centre(c);
      for (std::size_t i = 0; i < Rows; ++i) dot[i] += load(&query_[(r + i) * width_ + c]) * z;
    }
    return __m128(sum_four(dot));
  }

  // The scores of Rows rows with Width tiles of tokens. Narrow: there is one segment, and queries have one byte.
  template <std::size_t Rows, std::size_t Width, bool Narrow>
  void score_tiles(std::size_t block, const Page& page, std::size_t tile, float* scores, std::size_t stride, Ahead& ahead) const {
    const std::uint8_t* code = page.code() + 32 * numbers_.all_bits() * tile;
    __m512 sums[Rows][Width];
    const auto start = [&]() KVFOLD_LAMBDA {
      each<Rows>([&](auto i) KVFOLD_LAMBDA {
        each<Width>([&](auto w) KVFOLD_LAMBDA { sums[i][w] = _mm512_set1_ps(start_[block * kBlock + i]); });
      });
    };
    if constexpr (!Narrow) start();  // else after the products, which take all registers
    const auto add = [&]<unsigned Bits, bool TwoBytes>(std::size_t index) KVFOLD_LAMBDA {
      add_segment<Bits, TwoBytes>(index, block, page, code, tile * kTile, sums, ahead, [&]() KVFOLD_LAMBDA { if constexpr (Narrow) start(); });
    };
    for (std::size_t i = 0; i < numbers_.segment_count(); ++i) {
      const unsigned bits = numbers_.run(numbers_.segment(i).first).bits;
      if (Narrow || !numbers_.segment(i).two_bytes) {
        if (bits == 1) add.template operator()<1, false>(i);
        if (bits == 2) add.template operator()<2, false>(i);
        if (bits == 3) add.template operator()<3, false>(i);
        if (bits == 4) add.template operator()<4, false>(i);
      } else {
        if (bits == 1) add.template operator()<1, true>(i);
        if (bits == 2) add.template operator()<2, true>(i);
        if (bits == 3) add.template operator()<3, true>(i);
        if (bits == 4) add.template operator()<4, true>(i);
        if (bits == 5) add.template operator()<5, true>(i);
        if (bits == 6) add.template operator()<6, true>(i);
        if (bits == 7) add.template operator()<7, true>(i);
      }
      if constexpr (Narrow) break;
    }
    each<Rows>([&](auto i) KVFOLD_LAMBDA {
      each<Width>([&](auto w) KVFOLD_LAMBDA { _mm512_store_ps(scores + i * stride + (tile + w) * kTile, sums[i][w]); });
    });
  }

  // Adds one segment's share of the scores, after a call of `start`; Bits are those of its first run.
  template <unsigned Bits, bool TwoBytes, std::size_t Rows, std::size_t Width, typename Start>
  KVFOLD_INLINE void add_segment(std::size_t index, std::size_t block, const Page& page, const std::uint8_t* code, std::size_t token,
                                 __m512 (&sums)[Rows][Width], Ahead& ahead, Start start) const {
    const Numbers::Segment& segment = numbers_.segment(index);
    const std::size_t queries = side_.channel_scale ? block : block % blocks_;
    __m512i upper[Rows][Width], lower[Rows][Width];
    clear(upper), clear(lower);
    products<Bits, TwoBytes>(numbers_.run(segment.first), code, queries, upper, lower, ahead);
    if constexpr (Bits == 2)
      if (segment.count == 2) products<1, TwoBytes>(numbers_.run(segment.first + 1), code, queries, upper, lower, ahead);
    const Part& own = part(queries, index);
    __m512 scale[Width], offset[Width];
    const std::size_t at = segment.group * size_ + token;
    const bool scaled = side_.scale, shifted = side_.offset;
    if (scaled) each<Width>([&](auto w) KVFOLD_LAMBDA { scale[w] = __m512(page.scale(at + w * kTile)); });
    if (shifted) each<Width>([&](auto w) KVFOLD_LAMBDA { offset[w] = __m512(page.offset(at + w * kTile)); });
    start();
    each<Rows>([&](auto i) KVFOLD_LAMBDA {
      const __m512 one = _mm512_set1_ps(own.worth[i]);
      each<Width>([&](auto w) KVFOLD_LAMBDA {
        __m512 y = _mm512_cvtepi32_ps(upper[i][w]);
        if constexpr (TwoBytes) y = _mm512_fmadd_ps(y, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(lower[i][w]));
        __m512& sum = sums[i][w];
        if (scaled)
          sum = _mm512_fmadd_ps(_mm512_fmadd_ps(y, one, _mm512_set1_ps(own.base[i])), scale[w], sum);
        else
          sum = _mm512_fmadd_ps(y, one, sum);
        if (shifted) sum = _mm512_fmadd_ps(offset[w], _mm512_set1_ps(own.total[i]), sum);
      });
    });
  }

  // Adds the products of one run's codes with upper, and perhaps lower, bytes of the queries.
  template <unsigned Bits, bool TwoBytes, std::size_t Rows, std::size_t Width>
  KVFOLD_INLINE void products(const Numbers::Run& run, const std::uint8_t* code, std::size_t block, __m512i (&upper)[Rows][Width],
                              __m512i (&lower)[Rows][Width], Ahead& ahead) const {
    const std::size_t row_bytes = 32 * numbers_.all_bits(), first = (block * width_ + run.first * kTile) * kBlock;
    const std::uint8_t *at = code + 32 * run.before, *up = bytes(upper_) + first, *low = bytes(lower_) + first;
    const __m512i table = numbers_.table(run.first);
    for (std::size_t left = run.count; left; --left) {
      ahead.ask<share_of(32 * Bits * Width)>();
      each<kFields>([&](auto f) KVFOLD_LAMBDA {
        __m512i number[Width];
        each<Width>([&](auto w) KVFOLD_LAMBDA { number[w] = tile_numbers<Bits, f()>(at + w * row_bytes, table); });
        each<Rows>([&](auto i) KVFOLD_LAMBDA {
          const __m512i x = broadcast_four(up + 16 * f + 4 * i);
          each<Width>([&](auto w) KVFOLD_LAMBDA { upper[i][w] = _mm512_dpbusd_epi32(upper[i][w], number[w], x); });
          if constexpr (TwoBytes) {
            const __m512i rest = broadcast_four(low + 16 * f + 4 * i);
            each<Width>([&](auto w) KVFOLD_LAMBDA { lower[i][w] = _mm512_dpbusd_epi32(lower[i][w], number[w], rest); });
          }
        });
      });
      at += 32 * Bits, up += kTile * kBlock, low += kTile * kBlock;
    }
  }

  const Side& side_;
  Numbers numbers_;
  std::size_t width_, size_, blocks_ = 0, room_ = 0;
  bool any_middle_ = false;
  std::unique_ptr<Part[]> parts_;
  Buffer query_, steps_, upper_, lower_;  // upper and lower: bytes, as `store_four` leaves them
  Buffer start_;                          // where each row's scores start: q̃ · z, and the parts' bases if tokens have no scale
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#else
namespace kvfold::KVFOLD_ISA {
namespace {

// Without the instructions, no codes fit.
struct IntegerKeys {
  explicit IntegerKeys(const Side&) {}
  static constexpr bool fits() { return false; }
  void prepare(const float*, std::size_t, std::size_t) {}
  void prepare_page(std::size_t, const Page&, std::size_t, Ahead&) {}
  void scores(std::size_t, const Page&, std::size_t, float*, std::size_t, Ahead&) {}
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#endif
