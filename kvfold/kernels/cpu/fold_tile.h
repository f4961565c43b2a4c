// What folding kernels share: float16 numbers, and tiles of codes.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

inline std::uint16_t to_half(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  std::uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// As float16 holds them.
inline Vec in_half(Vec v) {
#ifdef __AVX512F__
  return Vec(_mm512_cvtph_ps(_mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#else
  for (std::size_t i = 0; i < kLanes; ++i) v[i] = from_half(to_half(v[i]));
  return v;
#endif
}

// 16 tokens' codes of 16 channels, whole numbers of 32 bits, into their tile.
inline void pack_tile(Vec (&lines)[kTile], unsigned bits, bool lanes_are_tokens, std::uint8_t* to) {
  if (lanes_are_tokens) transpose(lines);
  Tile tile;
  for (std::size_t f = 0; f < 4; ++f) {
    Ints bytes{};
    for (std::size_t j = 0; j < 4; ++j) {
      Ints line;
      std::memcpy(&line, &lines[4 * f + j], sizeof line);
      bytes |= line << static_cast<int>(8 * j);
    }
    std::memcpy(tile.fields[f], &bytes, sizeof bytes);
  }
  kvfold::encode(tile, bits, to);
}

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
