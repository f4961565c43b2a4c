// Tiles to bit planes and back: kvfold/quant/packing.py describes the layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pack.h"

#define KVFOLD_INLINE inline __attribute__((always_inline))
#define KVFOLD_LAMBDA __attribute__((always_inline))

namespace kvfold {
namespace {

constexpr std::size_t kSlots = 64;  // 16 lanes × 4 steps: one field of a tile

// A tile as fields[f][4 * lane + j], with step = 4 * f + j.
struct alignas(64) Tile {
  std::uint8_t fields[4][kSlots];
};

// Bytes of a register. Compilers take wider vectors apart badly.
#if defined(__AVX512F__)
constexpr std::size_t kRegister = 64;
#elif defined(__AVX2__)
constexpr std::size_t kRegister = 32;
#else
constexpr std::size_t kRegister = 16;
#endif
constexpr std::size_t kFieldParts = kSlots / kRegister;  // registers that a field takes
// Bytes by words: shifts go across them, and what crosses is masked.
typedef std::uint64_t Words __attribute__((vector_size(kRegister)));

KVFOLD_INLINE Words load_words(const std::uint8_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// The lowest `Width` bits of each byte.
template <unsigned Width>
constexpr std::uint64_t kLowest = 0x0101010101010101u * ((1u << Width) - 1);

// A plane of width 1 for the slots of part `i` of all fields: the lowest four bits of a byte are those of the fields.
KVFOLD_INLINE Words one_bit_plane(const std::uint8_t* in, std::size_t i) {
  constexpr std::size_t kHalf = kSlots / 2;
  if constexpr (kRegister <= kHalf) return load_words(in + i * kRegister % kHalf) >> (i * kRegister / kHalf * 4);
#ifdef __AVX512F__
  Words both;
  std::memcpy(&both, in, kHalf), std::memcpy(reinterpret_cast<char*>(&both) + kHalf, in, kHalf);
  return both >> Words{0, 0, 0, 0, 4, 4, 4, 4};
#endif
}

// Calls visit(width, shift) for each plane of a `bits`-bit code, `width` a compile-time constant.
template <typename Visit>
KVFOLD_INLINE void for_each_plane(unsigned bits, Visit visit) {
  unsigned shift = 0;
  const auto plane = [&](auto width) KVFOLD_LAMBDA {
    if (!(bits & width)) return;
    visit(width, shift);
    shift += width;
  };
  plane(std::integral_constant<unsigned, 8>{});
  plane(std::integral_constant<unsigned, 4>{});
  plane(std::integral_constant<unsigned, 2>{});
  plane(std::integral_constant<unsigned, 1>{});
}

// Part `i` of each field.
KVFOLD_INLINE void decode_part(const std::uint8_t* in, unsigned bits, std::size_t i, Words (&fields)[4]) {
  for (Words& field : fields) field = Words{};
  for_each_plane(bits, [&](auto width, unsigned shift) KVFOLD_LAMBDA {
    constexpr std::size_t kPerByte = width == 1 ? 4 : 8 / width;
    for (std::size_t f = 0; f < 4; ++f) {
      const Words plane = width == 1 ? one_bit_plane(in, i) : load_words(in + f / kPerByte * kSlots + i * kRegister);
      fields[f] |= (plane >> (f % kPerByte * width) & kLowest<width>) << shift;
    }
    in += 32 * width;
  });
}

[[maybe_unused]] KVFOLD_INLINE void decode(const std::uint8_t* in, unsigned bits, Tile& tile) {
  for (std::size_t i = 0; i < kFieldParts; ++i) {
    Words fields[4];
    decode_part(in, bits, i, fields);
    for (std::size_t f = 0; f < 4; ++f) std::memcpy(tile.fields[f] + i * kRegister, &fields[f], kRegister);
  }
}

// One plane of a tile, `Width` bits of each code from bit `shift` on.
template <unsigned Width>
KVFOLD_INLINE void encode_plane(const Tile& tile, unsigned shift, std::uint8_t* out) {
  constexpr std::size_t kPerByte = 8 / Width, kStep = Width == 1 ? 16 : kRegister, kBytes = Width == 1 ? kSlots / 2 : kSlots;
  typedef std::uint64_t Some __attribute__((vector_size(kStep)));
  for (std::size_t first = 0; first < 4; first += kPerByte)
    for (std::size_t at = 0; at < kBytes; at += kStep, out += kStep) {
      Some bytes{};
      for (std::size_t k = 0; k < kPerByte; ++k) {
        Some field;
        std::memcpy(&field, &tile.fields[first + k % 4][at + k / 4 * kBytes], sizeof field);
        bytes |= (field >> shift & kLowest<Width>) << (k * Width);
      }
      std::memcpy(out, &bytes, sizeof bytes);
    }
}

[[maybe_unused]] KVFOLD_INLINE void encode(const Tile& tile, unsigned bits, std::uint8_t* out) {
  for_each_plane(bits, [&](auto width, unsigned shift) KVFOLD_LAMBDA {
    encode_plane<width>(tile, shift, out);
    out += 32 * width;
  });
}

}  // namespace
}  // namespace kvfold
