// The nearest of up to 256 levels, for 16 numbers at once.
#pragma once

#include "table.h"

namespace kvfold::KVFOLD_ISA {
namespace {

class Codebook {
 public:
  // 2^bits levels, ascending.
  Codebook(const float* levels, unsigned bits) : count_(std::size_t{1} << bits), tree_(std::max(2 * count_, kPart)) {
    for (std::size_t i = 0; i < count_; ++i) tree_[count_ + i] = levels[i];
    for (std::size_t i = 0; i + 1 < count_; ++i) tree_[node(i, bits)] = 0.5f * (levels[i] + levels[i + 1]);
  }

  // Calls visit with the bits as a constant, which `nearest` takes.
  template <typename Visit>
  KVFOLD_INLINE auto with_bits(Visit visit) const {
    return with_constant<8>(static_cast<unsigned>(std::countr_zero(count_)), visit);
  }

  // The level nearest to each lane, the lower of equals, and its index.
  template <std::size_t Bits>
  KVFOLD_INLINE Vec nearest(Vec u, Ints& index) const {
    Vec level;
    each<kParts>([&](auto w) KVFOLD_LAMBDA {
      RegisterInts at;
      put(level, w, nearest_in_register<Bits>(part(u, w), at));
      put(index, w, at);
    });
    return level;
  }

 private:
#if defined(__AVX512F__)
  static constexpr std::size_t kScanned = 0;
#elif defined(__AVX2__)
  static constexpr std::size_t kScanned = 2;
#else
  static constexpr std::size_t kScanned = 5;
#endif

  template <std::size_t Bits>
  KVFOLD_INLINE Register nearest_in_register(Register u, RegisterInts& index) const {
    if constexpr (Bits <= kScanned) {
      // All edges in turn: there are so few that looking them up would take longer.
      index = RegisterInts{};
      Register level = Register{} + tree_[count_];
      each<(std::size_t{1} << Bits) - 1>([&](auto i) KVFOLD_LAMBDA {
        const RegisterInts above = u > Register{} + tree_[node(i, Bits)];
        index -= above;
        level = above ? Register{} + tree_[count_ + i + 1] : level;
      });
      return level;
    }
    RegisterInts at = RegisterInts{} + 1;
    each<Bits>([&](auto depth) KVFOLD_LAMBDA { at = 2 * at - (u > at_depth<depth>(at)); });
    index = at - static_cast<std::int32_t>(std::size_t{1} << Bits);
    return at_depth<Bits>(at);
  }

  // tree_[at], where all of `at` are nodes of one depth.
  template <std::size_t Depth>
  KVFOLD_INLINE Register at_depth(RegisterInts at) const {
    constexpr std::size_t kNodes = std::size_t{1} << Depth;
    if constexpr (kNodes < kPart) return Table<kPart>(tree_.data())[at];  // the first register holds all up to this depth
    return Table<kNodes>(tree_.data() + kNodes)[at];
  }

  // Where the edge between levels i and i + 1 is.
  static constexpr std::size_t node(std::size_t i, std::size_t bits) {
    const auto height = static_cast<std::size_t>(std::countr_zero(i + 1));
    return (std::size_t{1} << (bits - 1 - height)) + ((i + 1) >> (height + 1));
  }

  std::size_t count_;
  Buffer tree_;  // a search tree: node n has children 2n and 2n + 1, edges are inner nodes, levels leaves; the root is 1
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
