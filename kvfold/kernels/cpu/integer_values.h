// Weighted sums of the codes of values, in integers.
#pragma once

#include "integer.h"
#include "page.h"

#ifdef __AVX512VNNI__
namespace kvfold::KVFOLD_ISA {
namespace {

// Sums of values of a few pages, weighted by rows of probabilities. Weights of all pages are made before the first is
// used, as each has a long latency.
class IntegerValues {
 public:
  explicit IntegerValues(const Side& side) : side_(side), numbers_(side_, kMostValueBits, 0), size_(side_.shape.page_size) {
    if (!fits()) return;
    for (std::size_t g = 0; g < numbers_.tiles(); ++g) {
      any_middle_ = any_middle_ || numbers_.middle(g) != 0.0f;
      two_bytes_ = two_bytes_ || side_.shape.bits[g] > kRounded;
    }
  }

  bool fits() const {
    return numbers_.fits() && !side_.channel_scale && !side_.signed_scale && !side_.shape.lanes_are_tokens;
  }

  // Makes room for the weights of `rows` rows in `pages` pages.
  void expect(std::size_t rows, std::size_t pages) {
    blocks_ = (rows + kBlock - 1) / kBlock;
    const std::size_t count = pages * side_.groups * blocks_;
    if (count <= worth_count_) return;
    worth_count_ = count, worths_.reset(new Worth[count]);
    upper_ = Buffer::unset(count * kBlock * size_ / sizeof(float));
    if (two_bytes_) lower_ = Buffer::unset(count * kBlock * size_ / sizeof(float));
  }

  // Whether `prepare` takes softmax's exponentials: it does if nothing else needs them.
  bool takes_exponentials() const { return side_.groups == 1 && !side_.offset; }

  // Makes the weights of one of the pages, from `scores`, whose rows lie `stride` apart and which it may overwrite. If it takes
  // exponentials, it adds Σ exp(score − maximum) to the rows' totals; otherwise `scores` are probabilities already.
  void prepare(std::size_t number, const Page& page, std::size_t rows, float* scores, std::size_t stride, const float* maximum,
               float* totals, Ahead& ahead) {
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      float* own = scores + r * stride;
      if (takes_exponentials()) {
        const std::size_t index = index_of(number, 0, r);
        two_bytes_ ? round<Rows, true, true>(index, page, 0, own, stride, maximum + r, totals + r * kLanes, ahead)
                   : round<Rows, false, true>(index, page, 0, own, stride, maximum + r, totals + r * kLanes, ahead);
      } else {
        for (std::size_t group = 0; group < side_.groups; ++group) {
          const std::size_t index = index_of(number, group, r);
          two_bytes_ ? round<Rows, true, false>(index, page, group, own, stride, nullptr, nullptr, ahead)
                     : round<Rows, false, false>(index, page, group, own, stride, nullptr, nullptr, ahead);
        }
      }
      ahead.ask<24>();
    });
  }

  // Adds the page's values, weighted, to sums[r · width + c]; width is head_dim padded to whole tiles.
  void add(std::size_t number, const Page& page, std::size_t rows, float* sums, Ahead& ahead) const {
    const std::size_t width = numbers_.tiles() * kTile;
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      float* to = sums + r * width;
      for (std::size_t i = 0; i < numbers_.run_count(); ++i) {
        const Numbers::Run& run = numbers_.run(i);
        const std::size_t index = index_of(number, run.group, r);
        const auto of_bits = [&]<unsigned Bits, bool TwoBytes>() KVFOLD_LAMBDA {
          if (run.bits == Bits) add_run<Bits, Rows, TwoBytes>(run, index, page, to, ahead);
        };
        if (two_bytes_) {
          of_bits.template operator()<1, true>(), of_bits.template operator()<2, true>(), of_bits.template operator()<3, true>();
          of_bits.template operator()<4, true>(), of_bits.template operator()<5, true>();
        } else {
          of_bits.template operator()<1, false>(), of_bits.template operator()<2, false>();
          of_bits.template operator()<3, false>(), of_bits.template operator()<4, false>();
        }
      }
    });
  }

 private:
  // Of each row of a block: the worth of a weight of 1, Σ p · s, Σ p, Σ p · a.
  struct alignas(16) Worth {
    float one[kBlock] = {}, scaled[kBlock] = {}, total[kBlock] = {}, offset[kBlock] = {};
  };

  // Index of the weights of a page, scale group and block of rows.
  std::size_t index_of(std::size_t number, std::size_t group, std::size_t r) const {
    return (number * side_.groups + group) * blocks_ + r / kBlock;
  }

  std::uint8_t* bytes(Buffer& weights, std::size_t index) {
    return reinterpret_cast<std::uint8_t*>(weights.data()) + index * kBlock * size_;
  }
  const std::uint8_t* bytes(const Buffer& weights, std::size_t index) const {
    return reinterpret_cast<const std::uint8_t*>(weights.data()) + index * kBlock * size_;
  }

  // Rounds probabilities times a group's scales to whole numbers of 8 bits, or of 16 as 256 · upper + lower. OfScores: takes
  // exponentials first, and leaves the products in place of the scores, which no other group needs.
  template <std::size_t Rows, bool TwoBytes, bool OfScores>
  void round(std::size_t index, const Page& page, std::size_t group, float* scores, std::size_t stride, const float* maximum,
             float* totals, Ahead& ahead) {
    const std::size_t first = group * size_, size = size_;
    const bool shifted = !OfScores && side_.offset;
    Vec most[kBlock] = {}, total[kBlock] = {}, offset[kBlock] = {};
    for (std::size_t t = 0; t < size; t += kLanes) {
      const Vec scale = page.scale(first + t);
      if constexpr (OfScores) ahead.ask<6>();
      each<Rows>([&](auto i) KVFOLD_LAMBDA {
        float* at = scores + i * stride + t;
        Vec p = load(at);
        if constexpr (OfScores) p = exp_vec(p - maximum[i]);
        const Vec weight = p * scale;
        if constexpr (OfScores) store(at, weight);
        most[i] = Vec(_mm512_max_ps(__m512(most[i]), __m512(weight))), total[i] += p;
      });
      if (shifted) each<Rows>([&](auto i) KVFOLD_LAMBDA { offset[i] += load(scores + i * stride + t) * page.offset(first + t); });
    }
    if constexpr (OfScores) each<Rows>([&](auto i) KVFOLD_LAMBDA { store(totals + i * kLanes, load(totals + i * kLanes) + total[i]); });
    Worth& worth = worths_[index];
    const __m128 largest = __m128(largest_four(most)), numbers = _mm_set1_ps(TwoBytes ? 65535.0f : 255.0f);
    _mm_store_ps(worth.one, _mm_mul_ps(largest, _mm_set1_ps(TwoBytes ? 1 / 65535.0f : 1 / 255.0f)));
    alignas(16) float per[kBlock];
    _mm_store_ps(per, _mm_div_ps(numbers, _mm_max_ps(largest, _mm_set1_ps(1e-30f))));
    Vec scaled[kBlock] = {};
    for (std::size_t t = 0; t < size; t += kLanes) {
      __m512i upper[kBlock] = {}, lower[kBlock] = {};
      const Vec scale = OfScores ? all(1.0f) : page.scale(first + t);
      each<Rows>([&](auto i) KVFOLD_LAMBDA {
        const Vec weight = load(scores + i * stride + t) * scale;
        if (any_middle_) scaled[i] += weight;
        upper[i] = _mm512_cvtps_epi32(__m512(weight * per[i]));
        if constexpr (TwoBytes) {
          lower[i] = _mm512_and_si512(upper[i], _mm512_set1_epi32(255));
          upper[i] = _mm512_srli_epi32(upper[i], 8);
        }
      });
      store_four<false>(bytes(upper_, index) + t * kBlock, upper);
      if constexpr (TwoBytes) store_four<false>(bytes(lower_, index) + t * kBlock, lower);
    }
    if (side_.centre) store(worth.total, sum_four(total));
    if (shifted) store(worth.offset, sum_four(offset));
    if (any_middle_) store(worth.scaled, sum_four(scaled));
  }

  // `add` for Rows rows and the channels of one run.
  template <unsigned Bits, std::size_t Rows, bool TwoBytes>
  void add_run(const Numbers::Run& run, std::size_t index, const Page& page, float* to, Ahead& ahead) const {
    in_widths<TwoBytes ? 2 : 4>(run.count, [&](auto width, std::size_t tile) {
      block<Bits, Rows, width(), TwoBytes>(index, page, page.code() + 2 * size_ * (run.before + Bits * tile), run.first + tile, to, ahead);
    });
  }

  // `add` for Rows rows and Width tiles of channels with one codebook.
  template <unsigned Bits, std::size_t Rows, std::size_t Width, bool TwoBytes>
  void block(std::size_t index, const Page& page, const std::uint8_t* code, std::size_t tile, float* to, Ahead& ahead) const {
    const std::size_t tile_bytes = 2 * size_ * Bits, size = size_;
    __m512i upper[Rows][Width], lower[Rows][Width];
    clear(upper), clear(lower);
    const __m512i table = numbers_.table(tile);
    const std::uint8_t *up = bytes(upper_, index), *low = TwoBytes ? bytes(lower_, index) : nullptr;
    for (std::size_t t = 0; t < size; t += kTile, code += 32 * Bits, up += kTile * kBlock, low += TwoBytes ? kTile * kBlock : 0) {
      ahead.ask<share_of(32 * Bits * Width)>();
      each<kFields>([&](auto f) KVFOLD_LAMBDA {
        __m512i number[Width];
        each<Width>([&](auto w) KVFOLD_LAMBDA { number[w] = tile_numbers<Bits, f()>(code + w * tile_bytes, table); });
        each<Rows>([&](auto i) KVFOLD_LAMBDA {
          const __m512i x = broadcast_four(up + 16 * f + 4 * i);
          each<Width>([&](auto w) KVFOLD_LAMBDA { upper[i][w] = _mm512_dpbusd_epi32(upper[i][w], x, number[w]); });
          if constexpr (TwoBytes) {
            const __m512i rest = broadcast_four(low + 16 * f + 4 * i);
            each<Width>([&](auto w) KVFOLD_LAMBDA { lower[i][w] = _mm512_dpbusd_epi32(lower[i][w], rest, number[w]); });
          }
        });
      });
    }
    const Worth& worth = worths_[index];
    const std::size_t width = numbers_.tiles() * kTile;
    const float step = numbers_.step(tile), middle = numbers_.middle(tile);
    const bool centred = side_.centre;
    each<Rows>([&](auto i) KVFOLD_LAMBDA {
      const float one = step * worth.one[i], same = middle * worth.scaled[i] + worth.offset[i], total = worth.total[i];
      float* at = to + i * width + tile * kTile;
      each<Width>([&](auto w) KVFOLD_LAMBDA {
        __m512 y = _mm512_add_ps(_mm512_load_ps(at + w * kTile), _mm512_set1_ps(same));
        __m512 sum = _mm512_cvtepi32_ps(upper[i][w]);
        if constexpr (TwoBytes) sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(lower[i][w]));
        y = _mm512_fmadd_ps(sum, _mm512_set1_ps(one), y);
        if (centred) y = _mm512_fmadd_ps(__m512(page.centre((tile + w) * kTile)), _mm512_set1_ps(total), y);
        _mm512_store_ps(at + w * kTile, y);
      });
    });
  }

  const Side& side_;
  Numbers numbers_;
  std::size_t size_, blocks_ = 0, worth_count_ = 0;
  bool any_middle_ = false, two_bytes_ = false;
  Buffer upper_, lower_;  // of the weights: bytes, as `store_four` leaves them
  std::unique_ptr<Worth[]> worths_;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#else
namespace kvfold::KVFOLD_ISA {
namespace {

// Without the instructions, no codes fit.
struct IntegerValues {
  explicit IntegerValues(const Side&) {}
  static constexpr bool fits() { return false; }
  static constexpr bool takes_exponentials() { return false; }
  void expect(std::size_t, std::size_t) {}
  void prepare(std::size_t, const Page&, std::size_t, float*, std::size_t, const float*, float*, Ahead&) {}
  void add(std::size_t, const Page&, std::size_t, float*, Ahead&) const {}
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#endif
