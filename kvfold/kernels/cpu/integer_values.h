// Weighted sums of the codes of values, in integers.
#pragma once

#include "integer.h"

#ifdef __AVX512VNNI__
namespace kvfold::KVFOLD_ISA {
namespace {

// Sums of a page's values, weighted by rows of probabilities.
class IntegerValues {
 public:
  explicit IntegerValues(const Page& page)
      : page_(page), side_(page.side()), numbers_(side_, kRounded, 0), size_(side_.shape.page_size) {
    if (!fits()) return;
    for (std::size_t g = 0; g < numbers_.tiles(); ++g) any_middle_ = any_middle_ || numbers_.middle(g) != 0.0f;
    weights_ = Buffer(kBlock * size_ / sizeof(float));
  }

  bool fits() const {
    return numbers_.fits() && !side_.channel_scale && !side_.signed_scale && !side_.shape.lanes_are_tokens;
  }

  // Adds to sums[r · width + c], width being head_dim padded to whole tiles, what `rows` rows of probabilities make of
  // the page that `page` found last.
  void add(const std::uint8_t* code, std::size_t rows, const float* probabilities, float* sums) {
    const std::size_t width = numbers_.tiles() * kTile;
    in_blocks(rows, [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows>, std::size_t r) {
      for (std::size_t i = 0; i < numbers_.run_count(); ++i) {
        const Numbers::Run& run = numbers_.run(i);
        if (!i || run.group != numbers_.run(i - 1).group) prepare<Rows>(probabilities + r * size_, run.group);
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

  // Probabilities times a group's scales as whole numbers of 8 bits.
  template <std::size_t Rows>
  void prepare(const float* probabilities, std::size_t group) {
    const float *scales = page_.scale() + group * size_, *offsets = page_.offset() + group * size_;
    Vec most[kBlock] = {}, total[kBlock] = {}, offset[kBlock] = {}, scaled[kBlock] = {};
    for (std::size_t t = 0; t < size_; t += kLanes) {
      const Vec scale = load(scales + t);
      for (std::size_t i = 0; i < Rows; ++i) {
        const Vec p = load(probabilities + i * size_ + t);
        most[i] = Vec(_mm512_max_ps(__m512(most[i]), __m512(p * scale)));
        if (any_middle_) scaled[i] += p * scale;
        if (side_.centre) total[i] += p;
        if (side_.offset) offset[i] += p * load(offsets + t);
      }
    }
    const __m128 worth = _mm_div_ps(largest_four(most), _mm_set1_ps(255.0f));
    _mm_store_ps(one_, worth);
    alignas(16) float per[kBlock];
    _mm_store_ps(per, _mm_div_ps(_mm_set1_ps(1.0f), _mm_max_ps(worth, _mm_set1_ps(1e-30f))));
    for (std::size_t t = 0; t < size_; t += kLanes) {
      const Vec scale = load(scales + t);
      __m128i bytes[kBlock] = {};
      for (std::size_t i = 0; i < Rows; ++i)
        bytes[i] = _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(__m512(load(probabilities + i * size_ + t) * scale * per[i])));
      store_four(weights() + t * kBlock, bytes);
    }
    if (side_.centre) _mm_store_ps(total_, sum_four(total));
    if (side_.offset) _mm_store_ps(offset_, sum_four(offset));
    if (any_middle_) _mm_store_ps(scaled_, sum_four(scaled));
  }

  // Rows rows over Width tiles of channels.
  template <unsigned Bits, std::size_t Rows, std::size_t Width>
  void block(const std::uint8_t* code, std::size_t tile, float* to) {
    const std::size_t tile_bytes = 2 * size_ * Bits, ahead = page_.ahead(), size = size_;
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
        if (any_middle_) y = _mm512_add_ps(y, _mm512_set1_ps(numbers_.middle(tile + w) * scaled_[i]));
        if (side_.offset) y = _mm512_add_ps(y, _mm512_set1_ps(offset_[i]));
        if (side_.centre) y = _mm512_fmadd_ps(_mm512_load_ps(page_.centre() + c), _mm512_set1_ps(total_[i]), y);
        _mm512_store_ps(at, y);
      }
    }
  }

  const Page& page_;
  const Side& side_;
  Numbers numbers_;
  std::size_t size_;
  bool any_middle_ = false;
  Buffer weights_;  // bytes, as `store_four` leaves them
  // Of each row: what a weight of 1 is worth, Σ p · s, Σ p, Σ p · a.
  alignas(16) float one_[kBlock] = {}, scaled_[kBlock] = {}, total_[kBlock] = {}, offset_[kBlock] = {};
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
#endif
