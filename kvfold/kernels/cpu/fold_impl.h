// Body of fold; each fold_<set>.cpp compiles it under its own name.
#include "codebook.h"
#include "fold.h"
#include "fold_tile.h"
#include "rotate.h"

namespace kvfold::KVFOLD_ISA {
namespace {

class Folder {
 public:
  explicit Folder(const Fold& job)
      : job_(job),
        rotator_(job.rotation),
        codebook_(job.levels, job.bits),
        width_((job.rotation.code_dim + kTile - 1) / kTile * kTile),
        raw_((job.rotation.dim + kLanes - 1) / kLanes * kLanes),
        rotated_(job.shape.page_size * width_),
        codes_(kTile * width_),
        centre_(width_) {}

  void run(std::size_t batch, std::size_t head, std::size_t page) {
    const std::size_t size = job_.shape.page_size, at = (batch * job_.heads + head) * job_.pages + page;
    const std::size_t start = page * size;  // slot `first` of the stream is its first token
    for (std::size_t slot = 0; slot < size; ++slot)
      if (holds(start + slot)) rotate(batch, head, start + slot - job_.first, &rotated_[slot * width_]);
    if (job_.centred) centre(job_.centre + at * job_.rotation.code_dim);
    for (std::size_t first = 0; first < size; first += kTile) {
      for (std::size_t t = 0; t < kTile; ++t) {
        const std::size_t slot = first + t;
        float scale = 0;
        if (holds(start + slot))
          scale = codebook_.with_bits([&](auto bits) { return encode<bits()>(&rotated_[slot * width_], &codes_[t * width_]); });
        else
          std::fill(&codes_[t * width_], &codes_[t * width_] + width_, 0.0f);
        job_.scale[at * size + slot] = to_half(scale);
      }
      pack(job_.code + at * size * 2 * job_.bits * (width_ / kTile), first / kTile);
    }
  }

 private:
  bool holds(std::size_t slot) const { return slot >= job_.first && slot < job_.first + job_.tokens; }

  void rotate(std::size_t batch, std::size_t head, std::size_t token, float* y) {
    const std::size_t from = batch * job_.x_batch + head * job_.x_head + token * job_.x_token;
    for (std::size_t c = 0; c < job_.rotation.dim; c += kLanes)
      store(&raw_[c], load_some(job_.dtype, job_.x, from + c, std::min(kLanes, job_.rotation.dim - c)));
    rotator_.apply(raw_.data(), y, batch, head);
  }

  // Subtracts the page's mean, rounded as it is stored.
  void centre(std::uint16_t* out) {
    const std::size_t size = job_.shape.page_size;
    std::fill(centre_.data(), centre_.data() + width_, 0.0f);
    for (std::size_t t = 0; t < size; ++t) add_scaled(centre_.data(), &rotated_[t * width_], 1.0f, width_);
    for (std::size_t c = 0; c < job_.rotation.code_dim; ++c) {
      out[c] = to_half(centre_[c] / static_cast<float>(size));
      centre_[c] = from_half(out[c]);
    }
    for (std::size_t t = 0; t < size; ++t) add_scaled(&rotated_[t * width_], centre_.data(), -1.0f, width_);
  }

  // Codes of one token, as whole numbers in `codes`; returns its scale.
  template <std::size_t Bits>
  float encode(const float* y, float* codes) const {
    Vec squares{}, levels{}, products{};
    for (std::size_t c = 0; c < width_; c += kLanes) squares += load(y + c) * load(y + c);
    const float energy = sum(squares), norm = std::sqrt(energy);
    const float by = 1.0f / std::max(norm, std::numeric_limits<float>::min());
    for (std::size_t c = 0; c < width_; c += kLanes) {
      const Vec v = load(y + c);
      Ints index;
      Vec level = codebook_.nearest<Bits>(v * by, index);
      if (c + kLanes > job_.rotation.code_dim)  // channels that pad the last tile
        for (std::size_t lane = job_.rotation.code_dim - c; lane < kLanes; ++lane) index[lane] = 0, level[lane] = 0;
      levels += level * level, products += v * level;
      std::memcpy(codes + c, &index, sizeof index);
    }
    switch (job_.rule) {
      case ScaleRule::raw: return norm;
      case ScaleRule::matched: return ratio(norm, std::sqrt(sum(levels)));
      case ScaleRule::least_squares: return ratio(sum(products), sum(levels));
      case ScaleRule::eden: return ratio(energy, sum(products));
    }
    return norm;
  }

  static float ratio(float a, float b) { return a != 0.0f && b != 0.0f ? a / b : 0.0f; }

  // Packs the codes of 16 tokens into the tiles of their page.
  void pack(std::uint8_t* page, std::size_t row) {
    const std::size_t tiles = width_ / kTile, rows = job_.shape.page_size / kTile;
    for (std::size_t g = 0; g < tiles; ++g) {
      Vec lines[kTile];
      for (std::size_t t = 0; t < kTile; ++t) lines[t] = load(&codes_[t * width_ + g * kTile]);
      pack_tile(lines, job_.bits, job_.shape.lanes_are_tokens,
                page + 32 * job_.bits * (job_.shape.lanes_are_tokens ? row * tiles + g : g * rows + row));
    }
  }

  const Fold& job_;
  Rotator rotator_;
  Codebook codebook_;
  std::size_t width_;
  Buffer raw_, rotated_, codes_, centre_;  // codes: whole numbers of 32 bits
};

}  // namespace

void fold(const Fold& job) {
  const std::size_t count = job.batch * job.heads * job.pages;
#pragma omp parallel num_threads(static_cast<int>(std::min<std::size_t>(std::max(job.threads, 1), std::max<std::size_t>(count / 8, 1))))
  {
    Folder folder(job);
#pragma omp for schedule(static)
    for (std::size_t i = 0; i < count; ++i)
      folder.run(i / job.pages / job.heads, i / job.pages % job.heads, i % job.pages);
  }
}

}  // namespace kvfold::KVFOLD_ISA
