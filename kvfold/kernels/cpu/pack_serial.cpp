#include <algorithm>
#include <cstring>

#include "tile.h"

namespace kvfold {

namespace {

std::size_t groups(const PageShape& shape) { return (shape.head_dim + kTile - 1) / kTile; }

// Calls visit(row, group, offset) for every tile in the order of storage.
template <typename Visit>
void for_each_tile(const PageShape& shape, Visit visit) {
  const std::size_t rows = shape.page_size / kTile;
  std::size_t offset = 0;
  if (shape.lanes_are_tokens) {
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t group = 0; group < groups(shape); ++group) {
        visit(row, group, offset);
        offset += 32 * shape.bits[group];
      }
  } else {
    for (std::size_t group = 0; group < groups(shape); ++group)
      for (std::size_t row = 0; row < rows; ++row) {
        visit(row, group, offset);
        offset += 32 * shape.bits[group];
      }
  }
}

// Where a tile keeps the code of one token and channel.
template <bool LanesAreTokens, typename T>
T& at(T (&fields)[4][kSlots], std::size_t token, std::size_t channel) {
  const std::size_t lane = LanesAreTokens ? token : channel, step = LanesAreTokens ? channel : token;
  return fields[step / 4][4 * lane + step % 4];
}

// Unpacks each tile and writes look_up(group, code) where the code belongs.
template <bool LanesAreTokens, typename T, typename LookUp>
void unpack_with(const std::uint8_t* packed, T* out, std::size_t pages, const PageShape& shape,
                 LookUp look_up) {
  const std::size_t page_codes = shape.page_size * shape.head_dim;
  Tile tile;
  for (std::size_t page = 0; page < pages; ++page) {
    const std::uint8_t* source = packed + page * shape.code_bytes();
    T* target = out + page * page_codes;
    for_each_tile(shape, [&](std::size_t row, std::size_t group, std::size_t offset) {
      decode(source + offset, shape.bits[group], tile);
      const std::size_t first = group * kTile;
      T* lines = target + row * kTile * shape.head_dim + first;
      const auto write = [&](std::size_t channels) {
        for (std::size_t t = 0; t < kTile; ++t)
          for (std::size_t c = 0; c < channels; ++c)
            lines[t * shape.head_dim + c] = look_up(group, at<LanesAreTokens>(tile.fields, t, c));
      };
      if (first + kTile <= shape.head_dim)
        write(kTile);  // a constant that the compiler unrolls
      else
        write(shape.head_dim - first);
    });
  }
}

template <bool LanesAreTokens>
void pack_all(const std::uint8_t* codes, std::uint8_t* packed, std::size_t pages, const PageShape& shape) {
  const std::size_t page_codes = shape.page_size * shape.head_dim;
  Tile tile;
  for (std::size_t page = 0; page < pages; ++page) {
    const std::uint8_t* source = codes + page * page_codes;
    std::uint8_t* target = packed + page * shape.code_bytes();
    for_each_tile(shape, [&](std::size_t row, std::size_t group, std::size_t offset) {
      std::memset(tile.fields, 0, sizeof tile.fields);
      const std::size_t first = group * kTile;
      const std::size_t channels = std::min(kTile, shape.head_dim - first);
      const std::uint8_t* lines = source + row * kTile * shape.head_dim + first;
      for (std::size_t t = 0; t < kTile; ++t)
        for (std::size_t c = 0; c < channels; ++c)
          at<LanesAreTokens>(tile.fields, t, c) = lines[t * shape.head_dim + c];
      encode(tile, shape.bits[group], target + offset);
    });
  }
}

}  // namespace

std::size_t PageShape::code_bytes() const {
  std::size_t sum = 0;
  for (std::size_t group = 0; group < groups(*this); ++group) sum += bits[group];
  return page_size * 2 * sum;
}

namespace serial {

void pack(const std::uint8_t* codes, std::uint8_t* packed, std::size_t pages, const PageShape& shape) {
  (shape.lanes_are_tokens ? pack_all<true> : pack_all<false>)(codes, packed, pages, shape);
}

void unpack(const std::uint8_t* packed, std::uint8_t* codes, std::size_t pages, const PageShape& shape) {
  const auto same = [](std::size_t, std::uint8_t code) { return code; };
  if (shape.lanes_are_tokens)
    unpack_with<true>(packed, codes, pages, shape, same);
  else
    unpack_with<false>(packed, codes, pages, shape, same);
}

void unpack_levels(const std::uint8_t* packed, const float* lut, std::size_t lut_stride, float* levels,
                   std::size_t pages, const PageShape& shape) {
  const auto level = [=](std::size_t group, std::uint8_t code) { return lut[group * lut_stride + code]; };
  if (shape.lanes_are_tokens)
    unpack_with<true>(packed, levels, pages, shape, level);
  else
    unpack_with<false>(packed, levels, pages, shape, level);
}

}  // namespace serial
}  // namespace kvfold
