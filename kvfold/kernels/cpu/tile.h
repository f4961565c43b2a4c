// Tiles to bit planes and back: kvfold/quant/packing.py describes the layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pack.h"

namespace kvfold {
namespace {

constexpr std::size_t kSlots = 64;  // 16 lanes × 4 steps: one field of a tile

// A tile as fields[f][4 * lane + j], with step = 4 * f + j.
struct alignas(64) Tile {
  std::uint8_t fields[4][kSlots];
};

// One plane of a tile, `Width` bits of each code from bit `shift` on.
template <unsigned Width>
void encode_plane(const Tile& tile, unsigned shift, std::uint8_t* out) {
  constexpr std::size_t kPerByte = 8 / Width;
  constexpr unsigned kMask = (1u << Width) - 1;
  if constexpr (Width == 1) {
    for (std::size_t i = 0; i < kSlots / 2; ++i) {
      unsigned byte = 0;
      for (std::size_t k = 0; k < 8; ++k) byte |= ((tile.fields[k % 4][kSlots / 2 * (k / 4) + i] >> shift) & 1u) << k;
      *out++ = static_cast<std::uint8_t>(byte);
    }
  } else {
    for (std::size_t first = 0; first < 4; first += kPerByte)
      for (std::size_t slot = 0; slot < kSlots; ++slot) {
        unsigned byte = 0;
        for (std::size_t k = 0; k < kPerByte; ++k)
          byte |= ((tile.fields[first + k][slot] >> shift) & kMask) << (k * Width);
        *out++ = static_cast<std::uint8_t>(byte);
      }
  }
}

template <unsigned Width>
void decode_plane(const std::uint8_t* in, unsigned shift, Tile& tile) {
  constexpr std::size_t kPerByte = 8 / Width;
  constexpr std::uint8_t kMask = (1u << Width) - 1;
  if constexpr (Width == 1) {
    for (std::size_t k = 0; k < 8; ++k)
      for (std::size_t i = 0; i < kSlots / 2; ++i)
        tile.fields[k % 4][kSlots / 2 * (k / 4) + i] |= static_cast<std::uint8_t>(((in[i] >> k) & 1u) << shift);
  } else {
    for (std::size_t first = 0; first < 4; first += kPerByte, in += kSlots)
      for (std::size_t k = 0; k < kPerByte; ++k)
        for (std::size_t slot = 0; slot < kSlots; ++slot) {
          const std::uint8_t field = static_cast<std::uint8_t>(in[slot] >> (k * Width)) & kMask;
          tile.fields[first + k][slot] |= static_cast<std::uint8_t>(field << shift);
        }
  }
}

// Calls visit(width, shift) for each plane of a `bits`-bit code, `width` a compile-time constant.
template <typename Visit>
void for_each_plane(unsigned bits, Visit visit) {
  unsigned shift = 0;
  const auto plane = [&](auto width) {
    if (!(bits & width)) return;
    visit(width, shift);
    shift += width;
  };
  plane(std::integral_constant<unsigned, 8>{});
  plane(std::integral_constant<unsigned, 4>{});
  plane(std::integral_constant<unsigned, 2>{});
  plane(std::integral_constant<unsigned, 1>{});
}

void encode(const Tile& tile, unsigned bits, std::uint8_t* out) {
  for_each_plane(bits, [&](auto width, unsigned shift) {
    encode_plane<width()>(tile, shift, out);
    out += 32 * width;
  });
}

void decode(const std::uint8_t* in, unsigned bits, Tile& tile) {
  std::memset(tile.fields, 0, sizeof tile.fields);
  for_each_plane(bits, [&](auto width, unsigned shift) {
    decode_plane<width()>(in, shift, tile);
    in += 32 * width;
  });
}

}  // namespace
}  // namespace kvfold
