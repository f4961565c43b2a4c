// Pages of rotated vectors with one codebook: kvfold/quant/rotated.py has the formula.
#pragma once

#include "attend.h"

namespace kvfold {

// In the order of SCALE_RULES in kvfold/quant/scales.py.
enum class ScaleRule : int { raw, matched, least_squares, eden };

// Folds tokens of some heads into pages of each head, from slot `first` of the first page on. Slots without a token get
// code 0 and scale 0.
struct Fold {
  const void* x = nullptr;  // (batch, heads, tokens, rotation.dim)
  std::size_t x_batch = 0, x_head = 0, x_token = 0, batch = 0, heads = 0, tokens = 0, first = 0;
  Dtype dtype = Dtype::float32;
  Rotation rotation;
  PageShape shape{};  // shape.bits stays null: all channels have the `bits` below
  unsigned bits = 0;
  const float* levels = nullptr;  // 2^bits, ascending
  ScaleRule rule = ScaleRule::raw;
  bool centred = false;  // needs whole pages
  std::size_t pages = 0;             // of each head
  std::uint8_t* code = nullptr;      // (batch, heads, pages, bytes)
  std::uint16_t* scale = nullptr;    // (batch, heads, pages, page_size)
  std::uint16_t* centre = nullptr;   // (batch, heads, pages, code_dim), if centred
  int threads = 1;
};

namespace serial {
void fold(const Fold& job);
}
namespace avx2 {
void fold(const Fold& job);
}
namespace avx512 {
void fold(const Fold& job);
}

}  // namespace kvfold
