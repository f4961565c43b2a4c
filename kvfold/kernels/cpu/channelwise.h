// Pages with a centre and scale for each channel: kvfold/quant/affine.py has the formula.
#pragma once

#include "attend.h"

namespace kvfold {

struct Channelwise {
  const void* x = nullptr;  // (batch, heads, pages · page_size, channels)
  std::size_t x_batch = 0, x_head = 0, x_token = 0, batch = 0, heads = 0, pages = 0, page_size = 0, channels = 0;
  Dtype dtype = Dtype::float32;
  const std::int16_t* order = nullptr;  // order of channels: (batch, heads, channels); null: as they come
  std::size_t order_batch = 0, order_head = 0;
  const float* lut = nullptr;  // (channel tiles, lut_stride), ascending
  std::size_t lut_stride = 0;
  const std::uint8_t* bits = nullptr;  // of each channel tile
  std::size_t steps = 0;               // scales that are tried for each centre
  bool lanes_are_tokens = true;
  std::uint8_t* code = nullptr;                       // (batch, heads, pages, bytes)
  std::uint16_t *centre = nullptr, *scale = nullptr;  // (batch, heads, pages, channels)
  int threads = 1;
};

// The same body compiled for each instruction set; channelwise_impl.h.
namespace serial {
void fold_channelwise(const Channelwise& job);
}
namespace avx2 {
void fold_channelwise(const Channelwise& job);
}
namespace avx512 {
void fold_channelwise(const Channelwise& job);
}

}  // namespace kvfold
