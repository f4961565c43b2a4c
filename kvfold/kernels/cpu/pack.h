// Packing of a page's codes into tiles. kvfold/quant/packing.py describes the layout and has the reference
// implementation; names here are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvfold {

constexpr std::size_t kTile = 16;

// One page: P tokens × D channels, row-major, codes of channel c below 2^bits[c / 16].
struct PageShape {
  std::size_t page_size;      // P, a multiple of 16
  std::size_t head_dim;       // D
  const std::uint8_t* bits;   // of each of the ceil(D / 16) channel groups
  bool lanes_are_tokens;      // keys; values have channels as lanes
  std::size_t code_bytes() const;
};

namespace serial {

void pack(const std::uint8_t* codes, std::uint8_t* packed, std::size_t pages, const PageShape& shape);
void unpack(const std::uint8_t* packed, std::uint8_t* codes, std::size_t pages, const PageShape& shape);

// levels[page][token][channel] = lut[channel / 16][code]
void unpack_levels(const std::uint8_t* packed, const float* lut, std::size_t lut_stride, float* levels,
                   std::size_t pages, const PageShape& shape);

}  // namespace serial
}  // namespace kvfold
