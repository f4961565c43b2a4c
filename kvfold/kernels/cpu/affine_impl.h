// Body of closest_affine; each affine_<set>.cpp compiles it under its own name. Lanes are the 16 channels of a tile.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "affine.h"
#include "tile.h"

namespace kvfold::KVFOLD_ISA {
namespace {

typedef float Lanes __attribute__((vector_size(64)));

constexpr float kTiny = 0x1p-24f;  // the smallest float16

Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// One tile of one page.
class Tile16 {
 public:
  Tile16(const Affine& job, std::size_t page, std::size_t tile, std::vector<float>& scratch)
      : job_(job),
        first_(tile * kTile),
        width_(std::min(kTile, job.channels - first_)),
        page_(page),
        levels_(job.lut + tile * job.lut_stride),
        count_(std::size_t{1} << job.bits[tile]),
        edges_(count_ - 1),
        steps_(count_ - 1) {
    scratch.assign(job.page_size * kTile, 0.0f);
    for (std::size_t t = 0; t < job.page_size; ++t)
      std::memcpy(&scratch[t * kTile], job.y + (page * job.page_size + t) * job.channels + first_, width_ * sizeof(float));
    y_ = scratch.data();
    for (std::size_t i = 0; i + 1 < count_; ++i) {
      edges_[i] = 0.5f * (levels_[i + 1] + levels_[i]);
      steps_[i] = levels_[i + 1] - levels_[i];
    }
  }

  void run() {
    Lanes least = {}, centre = {}, scale = {};
    least += std::numeric_limits<float>::infinity();
    float choice[kTile] = {};
    for (std::size_t k = 0; k < job_.candidates; ++k) {
      const Lanes z = candidate(job_.centre, k), s = candidate(job_.scale, k);
      const Lanes loss = lost(z, s);
      for (std::size_t c = 0; c < kTile; ++c)
        if (loss[c] < least[c]) least[c] = loss[c], centre[c] = z[c], scale[c] = s[c], choice[c] = static_cast<float>(k);
    }
    for (std::size_t c = 0; c < width_; ++c)
      job_.chosen[page_ * job_.channels + first_ + c] = static_cast<std::uint8_t>(choice[c]);
    write(centre, scale);
  }

 private:
  Lanes candidate(const float* of, std::size_t k) const {
    float lanes[kTile] = {};
    std::memcpy(lanes, of + (page_ * job_.candidates + k) * job_.channels + first_, width_ * sizeof(float));
    return load(lanes);
  }

  static Lanes divisor(Lanes scale) { return scale > kTiny ? scale : Lanes{} + kTiny; }

  Lanes lost(Lanes z, Lanes s) const {
    const Lanes zero = {}, by = divisor(s), lowest = zero + levels_[0];
    Lanes loss = {};
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      const Lanes rest = load(y_ + t * kTile) - z, u = rest / by;
      Lanes level = lowest;
      for (std::size_t i = 0; i + 1 < count_; ++i) level += u > zero + edges_[i] ? zero + steps_[i] : zero;
      const Lanes error = rest - s * level, square = error * error;
      loss += square * square;
    }
    return loss;
  }

  void write(Lanes z, Lanes s) const {
    const Lanes zero = {}, one = zero + 1.0f, by = divisor(s);
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      const Lanes u = (load(y_ + t * kTile) - z) / by;
      Lanes index = {};
      for (std::size_t i = 0; i + 1 < count_; ++i) index += u > zero + edges_[i] ? one : zero;
      std::uint8_t* out = job_.code + (page_ * job_.page_size + t) * job_.channels + first_;
      for (std::size_t c = 0; c < width_; ++c) out[c] = static_cast<std::uint8_t>(index[c]);
    }
  }

  const Affine& job_;
  std::size_t first_, width_, page_;
  const float* levels_;
  std::size_t count_;
  std::vector<float> edges_, steps_;
  const float* y_;
};

}  // namespace

void closest_affine(const Affine& job) {
  const std::size_t tiles = (job.channels + kTile - 1) / kTile;
  const auto count = static_cast<std::ptrdiff_t>(job.pages * tiles);
#pragma omp parallel num_threads(job.threads)
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 4)
    for (std::ptrdiff_t i = 0; i < count; ++i) Tile16(job, i / tiles, i % tiles, scratch).run();
  }
}

}  // namespace kvfold::KVFOLD_ISA
