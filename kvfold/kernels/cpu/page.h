// Pages as floats, in rotated coordinates.
#pragma once

#include "ahead.h"
#include "dtypes.h"
#include "table.h"

namespace kvfold::KVFOLD_ISA {
namespace {

// The levels of one tile, lane by lane, one vector a step: out[step · stride].
inline void look_up_tile(const std::uint8_t* packed, unsigned bits, const float* lut, float* out, std::size_t stride) {
  with_constant<8>(bits, [&](auto known) KVFOLD_LAMBDA {
    const Table<std::size_t{1} << known> levels(lut);
    each<kParts>([&](auto w) KVFOLD_LAMBDA {
      Words fields[4];
      decode_part(packed, known, w, fields);
      each<4>([&](auto f) KVFOLD_LAMBDA {
        each<4>([&](auto j) KVFOLD_LAMBDA {
          const Register level = levels[RegisterInts(fields[f]) >> int{8 * j}];
          std::memcpy(out + (4 * f + j) * stride + w * kPart, &level, kRegister);
        });
      });
    });
  });
}

// Where the pages of one head of a sequence are.
struct HeadPages {
  // One of their parts, (pages, …): its address in the first page, null if pages have none, and its bytes a page.
  struct Part {
    const char* first = nullptr;
    std::size_t bytes = 0;
  };
  Part scale, offset, centre, channel_scale, plain, code;
  const std::int64_t* page_at = nullptr;

  HeadPages() = default;
  HeadPages(const Side& side, const Sequence& sequence, std::size_t head) : page_at(sequence.page_at) {
    const std::size_t per_token = side.shape.page_size * side.groups, of_scale = bytes_of(side.scale_dtype);
    const std::size_t row = sequence.row, scales = row * side.scale_batch + head * side.scale_head;
    const std::size_t centres = row * side.centre_batch + head * side.centre_head;
    scale = part(side.scale, of_scale * scales, of_scale * per_token), offset = part(side.offset, 2 * scales, 2 * per_token);
    centre = part(side.centre, 2 * centres, 2 * side.centre_dim);
    channel_scale = part(side.channel_scale, 2 * centres, 2 * side.centre_dim);
    plain = part(side.plain, 2 * (row * side.plain_batch + head * side.plain_head), 2 * side.shape.page_size * side.plain_dim);
    code = part(side.code, row * side.code_batch + head * side.code_head, side.page_bytes);
  }

  template <typename Number>
  const Number* find(const Part& part, std::size_t page) const {
    if (!part.first) return nullptr;
    return reinterpret_cast<const Number*>(part.first + (page_at ? page_at[page] : static_cast<std::int64_t>(page * part.bytes)));
  }

  // Adds pages from `first` on to what is to be prefetched.
  void expect(Ahead& ahead, std::size_t first, std::size_t pages) const {
    for (const Part* part : {&scale, &offset, &centre, &channel_scale, &plain, &code})
      for (std::size_t page = first; part->first && page < first + pages; ++page) ahead.expect(find<char>(*part, page), part->bytes);
  }

 private:
  static Part part(const void* first, std::size_t skipped, std::size_t bytes) {
    if (!first) return {};
    return {static_cast<const char*>(first) + skipped, bytes};
  }
};

enum class Layout { channels_first, tokens_first };  // [channel][token], for keys, or [token][channel], for values

// One page in rotated coordinates: z + a + s · S ⊙ lut[code], or s · z + a · S + s · S ⊙ lut[code] with scaled shifts, then the
// plain channels, with rows padded to whole vectors.
class Page {
 public:
  Page(const Side& side, Layout layout)
      : side_(side),
        tokens_first_(layout == Layout::tokens_first),
        width_(padded(side.shape.head_dim)),
        size_(side.shape.page_size),
        numbers_(Buffer::unset(2 * (padded(size_ * side.groups) + width_))),
        offset_(numbers_.data()),
        scale_(offset_ + padded(size_ * side.groups)),
        centre_(scale_ + padded(size_ * side.groups)),
        channel_scale_(centre_ + width_) {
    // Channels beyond the last get these numbers. Parts that a side lacks are filled in `make_scratch`, except scales, which are
    // always read.
    std::fill(scale_, centre_, 1.0f);
    if (side.centre) std::fill(centre_ + side.centre_dim, channel_scale_, 0.0f);
    if (side.channel_scale) std::fill(channel_scale_ + side.centre_dim, channel_scale_ + width_, 1.0f);
  }

  // 16 numbers from the i-th on of the page found last: of (group, token), or of channels.
  Vec scale(std::size_t i) const { return sixteen(halves_of_.scale, scale_, i); }
  Vec offset(std::size_t i) const { return sixteen(halves_of_.offset, offset_, i); }
  Vec centre(std::size_t i) const { return sixteen(halves_of_.centre, centre_, i); }
  Vec channel_scale(std::size_t i) const { return sixteen(halves_of_.channel_scale, channel_scale_, i); }

  const std::uint8_t* code() const { return code_; }
  const float* data() const { return scratch_.data(); }

  // Fills `data` from the page found last.
  void unfold() {
    if (!scratch_.size()) make_scratch();
    const auto to_scratch = [](const std::uint16_t* from, std::size_t count, float* to) {
      if (from) from_halves(from, count, to);
    };
    to_scratch(halves_of_.scale, size_, scale_), to_scratch(halves_of_.offset, size_, offset_);
    to_scratch(halves_of_.centre, width_, centre_), to_scratch(halves_of_.channel_scale, width_, channel_scale_);
    if (side_.shape.bits == nullptr)
      numbers(code_);
    else if (side_.shape.lanes_are_tokens)
      token_lanes(code_);
    else
      channel_lanes(code_);
    if (side_.unit_levels) bring_to_unit_length();
    for (std::size_t t = 0; t < size_ && side_.plain && !tokens_first_; ++t)
      for (std::size_t c = 0; c < side_.plain_dim; ++c)
        scratch_[(side_.shape.head_dim + c) * size_ + t] = from_half(plain_[t * side_.plain_dim + c]);
  }

  // Takes a page. Its numbers are read in place, except those that must be reordered or padded.
  void find(const HeadPages& pages, std::size_t page) {
    code_ = pages.find<std::uint8_t>(pages.code, page), plain_ = pages.find<std::uint16_t>(pages.plain, page);
    if (side_.scale && side_.scale_dtype == Dtype::float32)
      spread(pages.find<float>(pages.scale, page), scale_);
    else
      halves_of_.scale = in_order(pages.find<std::uint16_t>(pages.scale, page), scale_);
    halves_of_.offset = in_order(pages.find<std::uint16_t>(pages.offset, page), offset_);
    halves_of_.centre = whole(pages.find<std::uint16_t>(pages.centre, page), centre_);
    halves_of_.channel_scale = whole(pages.find<std::uint16_t>(pages.channel_scale, page), channel_scale_);
  }

 private:
  static Vec sixteen(const std::uint16_t* halves, const float* floats, std::size_t i) {
    return halves ? load_some(Dtype::float16, halves, i, kLanes) : load(floats + i);
  }

  // Numbers of (token, group), or null if they were copied to `floats` as (group, token).
  const std::uint16_t* in_order(const std::uint16_t* halves, float* floats) const {
    if (!halves || side_.groups == 1) return halves;
    spread(halves, floats);
    return nullptr;
  }

  // Numbers of channels, or null if they were copied to `floats`, where padding follows them.
  const std::uint16_t* whole(const std::uint16_t* halves, float* floats) const {
    if (!halves || side_.centre_dim == width_) return halves;
    from_halves(halves, side_.centre_dim, floats);
    return nullptr;
  }

  // (token, group) to (group, token): a group's scales lie side by side for keys.
  template <typename Number>
  void spread(const Number* from, float* to) const {
    const std::size_t groups = side_.groups;
    if (groups == 1) return to_floats(from, size_, to);
    for (std::size_t t = 0; t < size_; ++t)
      for (std::size_t g = 0; g < groups; ++g) to_floats(from + t * groups + g, 1, to + g * size_ + t);
  }

  static void to_floats(const std::uint16_t* from, std::size_t count, float* to) { from_halves(from, count, to); }
  static void to_floats(const float* from, std::size_t count, float* to) { std::copy(from, from + count, to); }

  void make_scratch() {
    scratch_ = Buffer(std::max(width_, side_.shape.head_dim + side_.plain_dim) * size_);
    if (!side_.offset) std::fill(offset_, scale_, 0.0f);
    if (!side_.centre) std::fill(centre_, channel_scale_, 0.0f);
    if (!side_.channel_scale) std::fill(channel_scale_, channel_scale_ + width_, 1.0f);
  }

  // Where the scales of a tile's channels begin.
  std::size_t group_of(std::size_t tile) const { return side_.group_of_tile ? side_.group_of_tile[tile] * size_ : 0; }

  // Tiles of codes whose lanes are tokens, as they are for keys; values that are a view of keys are transposed.
  void token_lanes(const std::uint8_t* code) {
    const bool simple = !side_.channel_scale && !side_.offset;
    for (std::size_t first = 0; first < size_; first += kTile, code += side_.skipped_bytes)
      for (std::size_t tile = 0; tile < width_ / kTile; ++tile) {
        const unsigned bits = side_.shape.bits[tile];
        alignas(64) float turned[kTile * kTile];
        float* out = tokens_first_ ? turned : scratch_.data() + tile * kTile * size_ + first;
        const std::size_t stride = tokens_first_ ? kTile : size_;
        look_up_tile(code, bits, side_.lut + tile * side_.lut_stride, out, stride);
        code += 32 * bits;
        const std::size_t group = group_of(tile);
        const Vec scale = load(&scale_[group + first]), offset = load(&offset_[group + first]);
        const float *z = &centre_[tile * kTile], *s = &channel_scale_[tile * kTile];
        if (simple)
          for (std::size_t c = 0; c < kTile; ++c) store(out + c * stride, load(out + c * stride) * scale + all(z[c]));
        else
          for (std::size_t c = 0; c < kTile; ++c)
            store(out + c * stride, shifted(load(out + c * stride) * all(s[c]), scale, all(s[c]), all(z[c]), offset));
        if (!tokens_first_) continue;
        Vec lines[kTile];
        for (std::size_t c = 0; c < kTile; ++c) lines[c] = load(turned + c * kTile);
        transpose(lines);
        for (std::size_t t = 0; t < kTile; ++t) store(scratch_.data() + (first + t) * width_ + tile * kTile, lines[t]);
      }
  }

  void channel_lanes(const std::uint8_t* code) {
    const bool simple = !side_.channel_scale && !side_.offset;
    for (std::size_t tile = 0; tile < width_ / kTile; ++tile) {
      const unsigned bits = side_.shape.bits[tile];
      const std::size_t group = group_of(tile);
      const Vec z = load(&centre_[tile * kTile]), s = load(&channel_scale_[tile * kTile]);
      for (std::size_t first = 0; first < size_; first += kTile) {
        float* out = scratch_.data() + first * width_ + tile * kTile;
        look_up_tile(code, bits, side_.lut + tile * side_.lut_stride, out, width_);
        code += 32 * bits;
        const float *scale = &scale_[group + first], *offset = &offset_[group + first];
        if (simple)
          for (std::size_t t = 0; t < kTile; ++t) store(out + t * width_, load(out + t * width_) * all(scale[t]) + z);
        else
          for (std::size_t t = 0; t < kTile; ++t)
            store(out + t * width_, shifted(load(out + t * width_) * s, all(scale[t]), s, z, all(offset[t])));
      }
    }
  }

  // Levels y = S ⊙ lut[code] with the token's scale, the centre and the token's offset.
  Vec shifted(Vec y, Vec scale, Vec channel_scale, Vec centre, Vec offset) const {
    return side_.scaled_shifts ? (y + centre) * scale + offset * channel_scale : y * scale + (offset + centre);
  }

  // s · c to s · c / |c|, for pages that have nothing but codes and one scale a token.
  void bring_to_unit_length() {
    const std::size_t channels = side_.shape.head_dim, token_step = tokens_first_ ? width_ : 1;
    const std::size_t channel_step = tokens_first_ ? 1 : size_;
    for (std::size_t t = 0; t < size_; ++t) {
      float* at = scratch_.data() + t * token_step;
      float squares = 0;
      for (std::size_t c = 0; c < channels; ++c) squares += at[c * channel_step] * at[c * channel_step];
      const float by = squares > 0 ? std::fabs(scale_[t]) / std::sqrt(squares) : 0.0f;
      for (std::size_t c = 0; c < channels; ++c) at[c * channel_step] *= by;
    }
  }

  // Pages whose codes are float16 numbers.
  void numbers(const std::uint8_t* code) {
    const std::size_t channels = side_.shape.head_dim;
    for (std::size_t t = 0; t < size_; ++t)
      for (std::size_t c = 0; c < channels; ++c) {
        std::uint16_t bits;
        std::memcpy(&bits, code + 2 * (t * channels + c), 2);
        scratch_[tokens_first_ ? t * width_ + c : c * size_ + t] = from_half(bits) * scale_[t];
      }
  }

  const Side& side_;
  bool tokens_first_;
  std::size_t width_, size_;
  Buffer scratch_, numbers_;
  float *offset_, *scale_, *centre_, *channel_scale_;  // in `numbers_`
  // Of the page found last. Halves that are null are floats above.
  struct {
    const std::uint16_t *scale = nullptr, *offset = nullptr, *centre = nullptr, *channel_scale = nullptr;
  } halves_of_;
  const std::uint8_t* code_ = nullptr;
  const std::uint16_t* plain_ = nullptr;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
