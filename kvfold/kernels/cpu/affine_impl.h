// Body of closest_affine; each affine_<set>.cpp compiles it under its own name. Lanes are the 16 channels of a tile.
#include "affine.h"
#include "codebook.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr float kTiny = 0x1p-24f;  // the smallest float16
constexpr std::size_t kPagesAThread = 4;  // fewer are not worth waking a thread

// One tile of channels of each page.
class TileSearch {
 public:
  TileSearch(const Affine& job, std::size_t tile)
      : job_(job),
        first_(tile * kTile),
        width_(std::min(kTile, job.channels - first_)),
        codebook_(job.lut + tile * job.lut_stride, job.bits[tile]),
        y_(job.page_size * kTile) {}

  void run(std::size_t page) {
    for (std::size_t t = 0; t < job_.page_size; ++t)
      store(&y_[t * kTile], load_some(Dtype::float32, job_.y, (page * job_.page_size + t) * job_.channels + first_, width_));
    Vec least = all(std::numeric_limits<float>::infinity()), centre{}, scale{};
    Ints choice{};
    for (std::size_t k = 0; k < job_.candidates; ++k) {
      const std::size_t at = (page * job_.candidates + k) * job_.channels + first_;
      const Vec z = load_some(Dtype::float32, job_.centre, at, width_), s = load_some(Dtype::float32, job_.scale, at, width_);
      const Vec loss = lost(z, s);
      const Ints better = loss < least;
      least = better ? loss : least, centre = better ? z : centre, scale = better ? s : scale;
      choice = better ? Ints{} + static_cast<std::int32_t>(k) : choice;
    }
    for (std::size_t c = 0; c < width_; ++c)
      job_.chosen[page * job_.channels + first_ + c] = static_cast<std::uint8_t>(choice[c]);
    write(page, centre, scale);
  }

 private:
  static Vec per_scale(Vec scale) { return 1.0f / (scale > kTiny ? scale : all(kTiny)); }

  Vec lost(Vec z, Vec s) const {
    const Vec by = per_scale(s);
    Vec loss{};
    Ints index;
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      const Vec rest = load(&y_[t * kTile]) - z, error = rest - s * codebook_.nearest(rest * by, index), square = error * error;
      loss += square * square;
    }
    return loss;
  }

  void write(std::size_t page, Vec z, Vec s) const {
    const Vec by = per_scale(s);
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      Ints index;
      codebook_.nearest((load(&y_[t * kTile]) - z) * by, index);
      std::uint8_t* out = job_.code + (page * job_.page_size + t) * job_.channels + first_;
      for (std::size_t c = 0; c < width_; ++c) out[c] = static_cast<std::uint8_t>(index[c]);
    }
  }

  const Affine& job_;
  std::size_t first_, width_;
  Codebook codebook_;
  Buffer y_;
};

}  // namespace

void closest_affine(const Affine& job) {
  const std::size_t tiles = (job.channels + kTile - 1) / kTile;
  const std::size_t most = std::max<std::size_t>(job.pages / kPagesAThread, 1);
#pragma omp parallel num_threads(static_cast<int>(std::min(static_cast<std::size_t>(std::max(job.threads, 1)), most)))
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    TileSearch search(job, tile);
#pragma omp for schedule(dynamic, kPagesAThread) nowait
    for (std::size_t page = 0; page < job.pages; ++page) search.run(page);
  }
}

}  // namespace kvfold::KVFOLD_ISA
