// Prefetching memory before it is read.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// Prefetches the next pages, evenly, while those before are worked on. A core can have only so many lines under way. Prefetches
// issued only while codes are read would delay codes that are near, and memory would idle during work that reads none (softmax,
// rounding). So every part of the work prefetches its share.
class Ahead {
 public:
  void forget() { count_ = next_ = 0, at_ = end_ = 0; }

  // Adds `bytes` from `from` on to what is to be prefetched.
  void expect(const void* from, std::size_t bytes) {
    const auto at = reinterpret_cast<std::uintptr_t>(from);
    if (count_ > next_ && parts_[count_ - 1].end == at) {
      parts_[count_ - 1].end += bytes;
      return;
    }
    if (count_ < kMost && bytes) parts_[count_++] = {at, at + bytes};
  }

  // Prefetches the next Lines lines, or those that are left.
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

  // Inlined: as a separate function it has no effect that a compiler sees, and its calls are dropped. Into the second-level
  // cache: the first is too small for prefetches this early.
  static KVFOLD_INLINE void ask_for(std::uintptr_t at) { __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2); }

  // As `ask`, continuing with the next parts.
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
  static constexpr std::size_t kMost = 192;  // more than two groups of pages have, wherever they lie in a pool
  Part parts_[kMost];
  std::size_t count_ = 0, next_ = 0;
  std::uintptr_t at_ = 0, end_ = 0;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
