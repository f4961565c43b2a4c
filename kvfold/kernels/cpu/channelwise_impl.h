// Body of fold_channelwise; each channelwise_<set>.cpp compiles it under its own name. Lanes are the 16 channels of a tile.
#include "channelwise.h"
#include "codebook.h"
#include "fold_tile.h"

namespace kvfold::KVFOLD_ISA {
namespace {

constexpr float kTiny = 0x1p-24f;  // the smallest float16
constexpr std::size_t kPagesAThread = 4;  // fewer are not worth waking a thread

// One tile of channels of each page.
class TileFolder {
 public:
  TileFolder(const Channelwise& job, std::size_t tile)
      : job_(job),
        first_(tile * kTile),
        width_(std::min(kTile, job.channels - first_)),
        bits_(job.bits[tile]),
        codebook_(job.lut + tile * job.lut_stride, bits_),
        top_(job.lut[tile * job.lut_stride + (std::size_t{1} << bits_) - 1]),
        y_(job.page_size * kTile) {
    for (std::size_t i = 0; i < (job.channels + kTile - 1) / kTile; ++i) (i < tile ? before_ : after_) += job.bits[i];
    for (std::size_t c = 0; c < width_; ++c) real_[c] = -1;
  }

  void run(std::size_t i) {
    read(i / job_.pages / job_.heads, i / job_.pages % job_.heads, i % job_.pages);
    Vec centre{}, scale{};
    search(centre, scale);
    for (std::size_t c = 0; c < width_; ++c) {
      job_.centre[i * job_.channels + first_ + c] = to_half(centre[c]);
      job_.scale[i * job_.channels + first_ + c] = to_half(scale[c]);
    }
    write(job_.code + i * job_.page_size * 2 * (before_ + after_), centre, scale);
  }

 private:
  void read(std::size_t batch, std::size_t head, std::size_t page) {
    const std::int16_t* order = nullptr;
    if (job_.order) order = job_.order + batch * job_.order_batch + head * job_.order_head + first_;
    const std::size_t from_page = batch * job_.x_batch + head * job_.x_head + page * job_.page_size * job_.x_token;
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      const std::size_t at = from_page + t * job_.x_token;
      Vec v{};
      if (order)
        for (std::size_t c = 0; c < width_; ++c) v[c] = from(job_.dtype, job_.x, at + static_cast<std::size_t>(order[c]));
      else
        v = load_some(job_.dtype, job_.x, at + first_, width_);
      store(&y_[t * kTile], v);
    }
  }

  // The centre and scale with the least Σ e⁴, the first of equals.
  void search(Vec& centre, Vec& scale) const {
    const float tokens = static_cast<float>(job_.page_size);
    Vec mean{}, low = load(&y_[0]), high = low, variance{};
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      const Vec v = load(&y_[t * kTile]);
      mean += v, low = smaller(v, low), high = larger(v, high);
    }
    mean /= tokens;
    for (std::size_t t = 0; t < job_.page_size; ++t) {
      const Vec v = load(&y_[t * kTile]) - mean;
      variance += v * v;
    }
    variance /= tokens;
    Vec least{};
    for (std::size_t k = 0; k < 2 * job_.steps; ++k) {
      const Vec z = in_half(k < job_.steps ? mean : 0.5f * (low + high)), gap = z - mean, up = high - z, down = z - low;
      const Vec deviation = square_root(variance + gap * gap);
      const Vec reach = larger(larger(up, down) / top_, deviation);
      const float weight = static_cast<float>(k % job_.steps) / static_cast<float>(std::max<std::size_t>(job_.steps - 1, 1));
      const Vec s = in_half(deviation + weight * (reach - deviation)), loss = lost(z, s);
      const auto where_better = [&](Vec now, Vec best) KVFOLD_LAMBDA {
        return by_register([](Register own, Register other, Register x, Register y) KVFOLD_LAMBDA { return own < other ? x : y; },
                           loss, least, now, best);
      };
      centre = k ? where_better(z, centre) : z, scale = k ? where_better(s, scale) : s;
      least = k ? where_better(loss, least) : loss;
    }
  }

  static Vec per_scale(Vec scale) { return 1.0f / larger(scale, all(kTiny)); }

  Vec lost(Vec z, Vec s) const {
    const Vec by = per_scale(s);
    return codebook_.with_bits([&](auto bits) {
      Vec loss{};
      Ints index;
      for (std::size_t t = 0; t < job_.page_size; ++t) {
        const Vec rest = load(&y_[t * kTile]) - z, error = rest - s * codebook_.nearest<bits()>(rest * by, index);
        const Vec square = error * error;
        loss += square * square;
      }
      return loss;
    });
  }

  void write(std::uint8_t* page, Vec z, Vec s) const {
    const Vec by = per_scale(s);
    for (std::size_t row = 0; row < job_.page_size / kTile; ++row) {
      Vec lines[kTile];
      for (std::size_t t = 0; t < kTile; ++t) {
        Ints index;
        const Vec u = (load(&y_[(row * kTile + t) * kTile]) - z) * by;
        codebook_.with_bits([&](auto bits) { codebook_.nearest<bits()>(u, index); });
        index &= real_;
        std::memcpy(&lines[t], &index, sizeof index);
      }
      const std::size_t at = job_.lanes_are_tokens ? row * (before_ + after_) + before_
                                                   : job_.page_size / kTile * before_ + row * bits_;
      pack_tile(lines, bits_, job_.lanes_are_tokens, page + 32 * at);
    }
  }

  const Channelwise& job_;
  std::size_t first_, width_;
  unsigned bits_;
  Codebook codebook_;
  float top_;
  Buffer y_;
  std::size_t before_ = 0, after_ = 0;  // bits of the tiles before this one, and of this one and those after it
  Ints real_{};                         // all ones for channels, 0 for those that pad the tile
};

}  // namespace

void fold_channelwise(const Channelwise& job) {
  const std::size_t tiles = (job.channels + kTile - 1) / kTile, pages = job.batch * job.heads * job.pages;
  const std::size_t most = std::max<std::size_t>(pages / kPagesAThread, 1);
#pragma omp parallel num_threads(static_cast<int>(std::min(static_cast<std::size_t>(std::max(job.threads, 1)), most)))
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    TileFolder folder(job, tile);
#pragma omp for schedule(dynamic, kPagesAThread) nowait
    for (std::size_t i = 0; i < pages; ++i) folder.run(i);
  }
}

}  // namespace kvfold::KVFOLD_ISA
