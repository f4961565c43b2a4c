#include <algorithm>
#include <cstring>
#include <type_traits>

#include "pack.h"

namespace kvfold {

namespace {

constexpr std::size_t kSlots = 64;  // 16 lanes × 4 steps: one field of a tile

std::size_t groups(const PageShape& shape) { return (shape.head_dim + kTile - 1) / kTile; }

// A tile as fields[f][4 * lane + j], with step = 4 * f + j.
struct Tile {
  std::uint8_t fields[4][kSlots];
};

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

// One plane of a tile, `Width` bits of each code from bit `shift` on.
template <unsigned Width>
void encode_plane(const Tile& tile, unsigned shift, std::uint8_t* out) {
  constexpr std::size_t kPerByte = 8 / Width;
  constexpr unsigned kMask = (1u << Width) - 1;
  if constexpr (Width == 1) {
    for (std::size_t f = 0; f < 4; ++f)
      for (std::size_t i = 0; i < 8; ++i) {
        unsigned byte = 0;
        for (std::size_t k = 0; k < 8; ++k) byte |= ((tile.fields[f][8 * i + k] >> shift) & 1u) << k;
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
    for (std::size_t f = 0; f < 4; ++f)
      for (std::size_t i = 0; i < 8; ++i)
        for (std::size_t k = 0; k < 8; ++k)
          tile.fields[f][8 * i + k] |= static_cast<std::uint8_t>(((in[8 * f + i] >> k) & 1u) << shift);
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
