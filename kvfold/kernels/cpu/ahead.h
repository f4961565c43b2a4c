// What memory is asked for before its turn comes.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// Asks memory for pages that will be read while those before are worked on, and evenly. A core can have only so many lines under
// way: asked for with the codes alone, they hold up the reading of codes that are near, and memory idles during all that reads
// none (softmax, rounding). So every part of the work asks for its share.
class Ahead {
 public:
  void forget() { count_ = next_ = 0, at_ = end_ = 0; }

  // Adds `bytes` from there on to what is to be asked for.
  void expect(const void* from, std::size_t bytes) {
    const auto at = reinterpret_cast<std::uintptr_t>(from);
    if (count_ > next_ && parts_[count_ - 1].end == at) {
      parts_[count_ - 1].end += bytes;
      return;
    }
    if (count_ < kMost && bytes) parts_[count_++] = {at, at + bytes};
  }

  // Asks for the next Lines lines, or for those that are left.
  template <std::size_t Lines>
  KVFOLD_INLINE void ask() {
    if (end_ - at_ >= Lines * kLine) {
      each<Lines>([&](auto i) KVFOLD_LAMBDA { ask_for(at_ + i * kLine); });
      at_ += Lines * kLine;
    } else {
      ask_across(Lines);
    }
  }

  void ask_for_rest() { ask_across(std::numeric_limits<std::size_t>::max()); }

 private:
  static constexpr std::size_t kLine = 64;

  // Inlined, as a compiler that makes it a function of its own finds that it does nothing, and drops the calls. Into the
  // second-level cache: the first is too small for what is asked for this early.
  static KVFOLD_INLINE void ask_for(std::uintptr_t at) { __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2); }

  // As `ask`, on into the next parts.
  __attribute__((noinline)) void ask_across(std::size_t lines) {
    while (lines) {
      if (at_ >= end_) {
        if (next_ == count_) return;
        at_ = parts_[next_].begin / kLine * kLine;
        end_ = (parts_[next_++].end + kLine - 1) / kLine * kLine;
      }
      const std::size_t here = std::min<std::size_t>(lines, (end_ - at_) / kLine);
      for (std::uintptr_t at = at_, end = at + here * kLine; at < end; at += kLine) ask_for(at);
      at_ += here * kLine, lines -= here;
    }
  }

  struct Part {
    std::uintptr_t begin, end;
  };
  static constexpr std::size_t kMost = 192;  // more than two groups of pages anywhere in a pool come to
  Part parts_[kMost];
  std::size_t count_ = 0, next_ = 0;
  std::uintptr_t at_ = 0, end_ = 0;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
