// The best of several centres and scales for each channel of a page; the formula is in kvfold/quant/affine.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvfold {

struct Affine {
  std::size_t pages = 0, page_size = 0, channels = 0, candidates = 0;
  const float* y = nullptr;                              // (pages, page_size, channels)
  const float *centre = nullptr, *scale = nullptr;       // (pages, candidates, channels)
  const float* lut = nullptr;                            // (channel tiles, lut_stride)
  std::size_t lut_stride = 0;
  const std::uint8_t* bits = nullptr;                    // of each channel tile
  std::uint8_t* code = nullptr;                          // (pages, page_size, channels)
  std::uint8_t* chosen = nullptr;                        // (pages, channels)
  int threads = 1;
};

// The same body compiled for each instruction set; affine_impl.h.
namespace serial {
void closest_affine(const Affine& job);
}
namespace avx2 {
void closest_affine(const Affine& job);
}
namespace avx512 {
void closest_affine(const Affine& job);
}

}  // namespace kvfold
