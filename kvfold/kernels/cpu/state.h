// The softmax of query rows over a part of their context, and how parts are merged.
#pragma once

#include "rotate.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// Softmax state of a block of query rows over a piece of their context: Σ exp(score − maximum), and the same sum of values, for
// folded ones in rotated coordinates. A row that has read nothing has the maximum kNever.
class State {
 public:
  float *total, *maximum, *rotated, *dense;  // total: in 16 parts; dense: null if the piece has no dense tokens

  static std::size_t size(std::size_t rows, std::size_t rotated_width, std::size_t dense_width) {
    return rows * (kLanes + rotated_width + dense_width) + padded(rows);
  }

  State(float* at, std::size_t rows, std::size_t rotated_width, std::size_t dense_width, bool any_dense)
      : total(at),
        maximum(at + rows * kLanes),
        rotated(maximum + padded(rows)),
        dense(any_dense ? rotated + rows * rotated_width : nullptr),
        rotated_width_(rotated_width),
        dense_width_(dense_width) {}

  void begin(std::size_t rows) const {
    std::fill_n(total, rows * kLanes, 0.0f), std::fill_n(maximum, rows, kNever), std::fill_n(rotated, rows * rotated_width_, 0.0f);
    if (dense) std::fill_n(dense, rows * dense_width_, 0.0f);
  }

  // Raises a row's maximum to `to`, which may be equal, and rescales its sums to match.
  void raise(std::size_t r, float to) const {
    const float before = maximum[r];
    maximum[r] = to;
    if (!(to > before)) return;
    const float decay = before == kNever ? 0.0f : std::exp(before - to);
    scale(&total[r * kLanes], kLanes, decay);
    scale(&rotated[r * rotated_width_], rotated_width_, decay);
    if (dense) scale(&dense[r * dense_width_], dense_width_, decay);
  }

 private:
  static void scale(float* at, std::size_t width, float by) {
    for (std::size_t c = 0; c < width; c += kLanes) store(at + c, load(at + c) * by);
  }

  std::size_t rotated_width_, dense_width_;
};

// One row's sums over all pieces of its context, relative to their largest score.
struct Merged {
  float maximum = kNever, total = 0;
  Buffer rotated, dense;

  Merged(std::size_t rotated_width, std::size_t dense_width) : rotated(rotated_width), dense(dense_width) {}

  // Takes row r of states part(0) to part(pieces − 1). Returns false if the row has read nothing in any of them.
  template <typename Part>
  bool merge(std::size_t r, std::size_t pieces, Part part) {
    maximum = kNever, total = 0;
    for (std::size_t s = 0; s < pieces; ++s) maximum = std::max(maximum, part(s).maximum[r]);
    if (maximum == kNever) return false;
    std::fill_n(rotated.data(), rotated.size(), 0.0f), std::fill_n(dense.data(), dense.size(), 0.0f);
    for (std::size_t s = 0; s < pieces; ++s) {
      const State own = part(s);
      if (own.maximum[r] == kNever) continue;
      const float weight = std::exp(own.maximum[r] - maximum);
      total += weight * sum(load(&own.total[r * kLanes]));
      add_scaled(rotated.data(), &own.rotated[r * rotated.size()], weight, rotated.size());
      if (own.dense) add_scaled(dense.data(), &own.dense[r * dense.size()], weight, dense.size());
    }
    return true;
  }
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
