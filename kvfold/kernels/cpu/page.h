// Pages as floats, in rotated coordinates.
#pragma once

#include "vectors.h"

namespace kvfold::KVFOLD_ISA {
namespace {

#ifdef __AVX512F__
// A plane of width 1: bit f of byte 4 · lane + j is that of step 4 · f + j, the bits above are others'.
inline __m512i bit_plane(const std::uint8_t* packed) {
  const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
  return _mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0));
}

// The codes of one tile: byte 4 · lane + j of fields[f] is that of step 4 · f + j.
inline void tile_fields(const std::uint8_t* packed, unsigned bits, __m512i fields[4]) {
  const __m512i low = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(3);
  if (bits >= 4 && bits <= 7) {
    for (int v = 0; v < 2; ++v) {
      const __m512i x = _mm512_loadu_si512(packed + 64 * v);
      fields[2 * v] = _mm512_and_si512(x, low);
      fields[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
    }
    packed += 128;
    if (bits & 2) {
      const __m512i x = _mm512_loadu_si512(packed);
      for (int f = 0; f < 4; ++f)
        fields[f] = _mm512_or_si512(fields[f], _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(x, 2 * f), pair), 4));
      packed += 64;
    }
    if (bits & 1) {
      const __m512i plane = bit_plane(packed);
      const __m512i one = _mm512_set1_epi8(1);
      for (int f = 0; f < 4; ++f)
        fields[f] = _mm512_or_si512(
            fields[f], _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(plane, f), one), bits == 5 ? 4 : 6));
    }
  } else if (bits == 3 || bits == 2) {
    const __m512i x = _mm512_loadu_si512(packed);
    for (int f = 0; f < 4; ++f) fields[f] = _mm512_and_si512(_mm512_srli_epi16(x, 2 * f), pair);
    if (bits == 2) return;
    const __m512i plane = bit_plane(packed + 64), one = _mm512_set1_epi8(1);
    for (int f = 0; f < 4; ++f)
      fields[f] = _mm512_or_si512(fields[f], _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(plane, f), one), 2));
  } else {
    Tile tile;
    decode(packed, bits, tile);
    for (int f = 0; f < 4; ++f) fields[f] = _mm512_load_si512(tile.fields[f]);
  }
}
#endif

// The levels of one tile, lane by lane, one vector a step: out[step · stride].
inline void look_up_tile(const std::uint8_t* packed, unsigned bits, const float* lut, float* out, std::size_t stride) {
#ifdef __AVX512F__
  __m512i fields[4];
  tile_fields(packed, bits, fields);
  if (bits <= 4) {
    // Rows of the table hold at least 2^bits levels; the rest of the vector is never asked for.
    const __m512 levels = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << (1u << bits)) - 1), lut);
    for (int f = 0; f < 4; ++f)
      for (int j = 0; j < 4; ++j) {
        const __m512i index = _mm512_srli_epi32(fields[f], 8 * j);
        _mm512_storeu_ps(out + (4 * f + j) * stride, _mm512_permutexvar_ps(index, levels));
      }
    return;
  }
  if (bits <= 6) {  // 32 or 64 levels in registers; gathering them from memory would take several times as long
    const std::size_t last = (std::size_t{1} << bits) - 32;
    const __m512 a = _mm512_loadu_ps(lut), b = _mm512_loadu_ps(lut + 16);
    const __m512 c = _mm512_loadu_ps(lut + last), d = _mm512_loadu_ps(lut + last + 16);
    for (int f = 0; f < 4; ++f)
      for (int j = 0; j < 4; ++j) {
        const __m512i index = _mm512_srli_epi32(fields[f], 8 * j);
        const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        _mm512_storeu_ps(out + (4 * f + j) * stride,
                         _mm512_mask_blend_ps(upper, _mm512_permutex2var_ps(a, index, b), _mm512_permutex2var_ps(c, index, d)));
      }
    return;
  }
  const __m512i byte = _mm512_set1_epi32(255);
  for (int f = 0; f < 4; ++f)
    for (int j = 0; j < 4; ++j) {
      const __m512i index = _mm512_and_si512(_mm512_srli_epi32(fields[f], 8 * j), byte);
      _mm512_storeu_ps(out + (4 * f + j) * stride, _mm512_i32gather_ps(index, lut, 4));
    }
#else
  Tile tile;
  decode(packed, bits, tile);
  for (std::size_t step = 0; step < kTile; ++step)
    for (std::size_t lane = 0; lane < kTile; ++lane)
      out[step * stride + lane] = lut[tile.fields[step / 4][4 * lane + step % 4]];
#endif
}

// One page in rotated coordinates: z + a + s · S ⊙ lut[code], as [channel][token] for keys and [token][channel] for
// values, with rows padded to whole vectors.
class Page {
 public:
  explicit Page(const Side& side)
      : side_(side),
        width_(padded(side.shape.head_dim)),
        size_(side.shape.page_size),
        scale_(size_ * side.groups, 1.0f),
        offset_(size_ * side.groups),
        centre_(width_),
        channel_scale_(width_, 1.0f) {}

  const Side& side() const { return side_; }
  const float* scale() const { return scale_.data(); }
  const float* offset() const { return offset_.data(); }
  const float* centre() const { return centre_.data(); }
  const float* channel_scale() const { return channel_scale_.data(); }

  const float* data() const { return scratch_.data(); }

  // Fills `data` from the codes of the page found last.
  void unfold(const std::uint8_t* code) {
    if (!scratch_.size()) scratch_ = Buffer(width_ * size_);
    if (side_.shape.bits == nullptr)
      numbers(code);
    else if (side_.shape.lanes_are_tokens)
      keys(code);
    else
      values(code);
  }

  // Takes a page's scales, offsets and centre, and returns where its codes are.
  const std::uint8_t* find(std::size_t batch, std::size_t head, std::size_t page) {
    const std::size_t per_token = size_ * side_.groups;
    const std::size_t at = batch * side_.scale_batch + head * side_.scale_head + page * per_token;
    const std::size_t middle = batch * side_.centre_batch + head * side_.centre_head + page * side_.centre_dim;
    if (side_.scale) ask_for(side_.scale + at + kAhead * per_token, per_token);
    if (side_.offset) ask_for(side_.offset + at + kAhead * per_token, per_token);
    if (side_.centre) ask_for(side_.centre + middle + kAhead * side_.centre_dim, side_.centre_dim);
    if (side_.channel_scale) ask_for(side_.channel_scale + middle + kAhead * side_.centre_dim, side_.centre_dim);
    // (token, group) to (group, token): a group's scales lie side by side for keys.
    if (side_.scale) spread(side_.scale + at, scale_.data());
    if (side_.offset) spread(side_.offset + at, offset_.data());
    if (side_.centre) from_halves(side_.centre + middle, side_.centre_dim, centre_.data());
    if (side_.channel_scale) from_halves(side_.channel_scale + middle, side_.centre_dim, channel_scale_.data());
    const std::size_t page_bytes = side_.shape.bits ? side_.shape.code_bytes() : 2 * size_ * side_.shape.head_dim;
    return side_.code + batch * side_.code_batch + head * side_.code_head + page * page_bytes;
  }

 private:
  void spread(const std::uint16_t* from, float* to) const {
    if (side_.groups == 1) return from_halves(from, size_, to);
    for (std::size_t t = 0; t < size_; ++t)
      for (std::size_t g = 0; g < side_.groups; ++g) to[g * size_ + t] = from_half(from[t * side_.groups + g]);
  }

  std::size_t group_of(std::size_t channel) const {
    return std::min(channel * side_.groups / side_.shape.head_dim, side_.groups - 1);
  }

  void keys(const std::uint8_t* code) {
    const bool plain = !side_.channel_scale && !side_.offset;
    for (std::size_t first = 0; first < size_; first += kTile)
      for (std::size_t tile = 0; tile < width_ / kTile; ++tile) {
        const unsigned bits = side_.shape.bits[tile];
        float* out = scratch_.data() + tile * kTile * size_ + first;
        look_up_tile(code, bits, side_.lut + tile * side_.lut_stride, out, size_);
        code += 32 * bits;
        const std::size_t group = group_of(tile * kTile) * size_;
        const Vec scale = load(&scale_[group + first]), offset = load(&offset_[group + first]);
        const float *z = &centre_[tile * kTile], *s = &channel_scale_[tile * kTile];
        if (plain)
          for (std::size_t c = 0; c < kTile; ++c) store(out + c * size_, load(out + c * size_) * scale + z[c]);
        else
          for (std::size_t c = 0; c < kTile; ++c)
            store(out + c * size_, load(out + c * size_) * s[c] * scale + (offset + z[c]));
      }
  }

  void values(const std::uint8_t* code) {
    const bool plain = !side_.channel_scale && !side_.offset;
    for (std::size_t tile = 0; tile < width_ / kTile; ++tile) {
      const unsigned bits = side_.shape.bits[tile];
      const std::size_t group = group_of(tile * kTile) * size_;
      const Vec z = load(&centre_[tile * kTile]), s = load(&channel_scale_[tile * kTile]);
      for (std::size_t first = 0; first < size_; first += kTile) {
        float* out = scratch_.data() + first * width_ + tile * kTile;
        look_up_tile(code, bits, side_.lut + tile * side_.lut_stride, out, width_);
        code += 32 * bits;
        const float *scale = &scale_[group + first], *offset = &offset_[group + first];
        if (plain)
          for (std::size_t t = 0; t < kTile; ++t) store(out + t * width_, load(out + t * width_) * scale[t] + z);
        else
          for (std::size_t t = 0; t < kTile; ++t)
            store(out + t * width_, load(out + t * width_) * s * scale[t] + (z + offset[t]));
      }
    }
  }

  // Pages whose codes are float16 numbers.
  void numbers(const std::uint8_t* code) {
    const std::size_t channels = side_.shape.head_dim;
    for (std::size_t t = 0; t < size_; ++t)
      for (std::size_t c = 0; c < channels; ++c) {
        std::uint16_t bits;
        std::memcpy(&bits, code + 2 * (t * channels + c), 2);
        const std::size_t to = side_.shape.lanes_are_tokens ? c * size_ + t : t * width_ + c;
        scratch_[to] = from_half(bits) * scale_[t];
      }
  }

  const Side& side_;
  std::size_t width_, size_;
  Buffer scratch_, scale_, offset_, centre_, channel_scale_;
};

}  // namespace
}  // namespace kvfold::KVFOLD_ISA
