// Tiles of codes, for all folding kernels.
#pragma once

#include "dtypes.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// Packs 16 tokens' codes of 16 channels, whole numbers of 32 bits, into their tile.
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
